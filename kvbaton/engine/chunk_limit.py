"""How many tokens of prompts a step takes beside sequences that decode, by how late these may be.

Chunked prefill stalls nobody if chunks are small (Sarathi-Serve, OSDI 2024), and the more decodes,
the less time is left for them. So the limit follows what steps take: each one with a chunk tells
what its tokens added to a step without, and so how many would add what there is time for.
"""

from __future__ import annotations

import math

from kvbaton.engine.step_costs import Terms

LEAST = 64
"""Tokens; fewer add next to nothing less to a step."""
AIM = 0.93
"""Of the objective: steps vary."""
SHRINK, GROW = 0.5, 2.0
"""By no more after one step: something else may have slowed it, and few tokens are cheap."""
FADE = 0.125
"""Of the mean of steps without prompts: what a new one counts."""

IN_TIME = 0.75
"""Of its objective: a first token that would take longer in small chunks has large ones."""


def chunk_tokens(objective_s: float, step_s: float, token_s: float, most: int) -> int:
    """What a limit comes to, for those who know what steps take but do not see them.

    Args:
        objective_s: of who decodes.
        step_s: without prompts.
        token_s: of each token of a prompt, beside them.
        most: tokens of a step.
    """
    left_s = AIM * objective_s - step_s
    if left_s < 0 or left_s >= most * token_s:
        return most
    return min(most, max(LEAST, int(left_s / token_s)))


class ChunkLimit:
    """Learns from steps.

    Args:
        most: tokens of a step; the limit where there is no objective.
        least: tokens that are computed together or not at all, if more than `LEAST`.
    """

    def __init__(self, most: int, least: int = 0) -> None:
        self._most = most
        self._least = min(most, max(LEAST, least))
        self._limit = float(self._least)
        self._objective_s = math.inf
        self._alone_s = 0.0

    @property
    def tokens(self) -> int:
        """Of prompts in a step like the last one that was asked for.

        All that fit if nobody who decodes has an objective, and also where steps without prompts
        miss it: then few long steps are better than many that are a little longer.
        """
        if self._objective_s == math.inf or self._alone_s > AIM * self._objective_s:
            return self._most
        return int(self._limit)

    def for_objective(self, objective_s: float) -> int:
        """`tokens` beside sequences of which one wants each of its tokens within so long."""
        self._objective_s = objective_s
        return self.tokens

    def observe(self, terms: Terms, seconds: float) -> None:
        """A step took so long; see `terms_of`."""
        _, prompts, _, decodes, _ = terms
        if not decodes:
            return
        if not prompts:
            self._alone_s += FADE * (seconds - self._alone_s)
            return
        if self._objective_s == math.inf:
            return
        aim_s = AIM * self._objective_s
        if prompts < int(self._limit) and seconds <= aim_s:
            return  # the end of a prompt: the first tokens of a chunk cost the most
        found = prompts * (aim_s - self._alone_s) / max(seconds - self._alone_s, 1e-5)
        found = min(max(found, SHRINK * self._limit), GROW * self._limit)
        self._limit = min(max(found, self._least), float(self._most))
