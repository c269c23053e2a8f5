"""How many tokens of prompts a step takes beside sequences that decode.

Chunked prefill stalls nobody if chunks are small (Sarathi-Serve, OSDI 2024). They cost little while
the products of few tokens wait for weights anyway, so a step that decodes has few tokens in all.
But where it is known how long those who decode may wait, it has as many as there is time for. That
limit follows what steps take: each one with a chunk tells what its tokens added to a step without,
and so how many would add what is left.
"""

from __future__ import annotations

import math

from kvbaton.engine.step_costs import Terms

LEAST = 64
"""Tokens; fewer add next to nothing less to a step."""
AIM = 0.9
"""Of the objective: steps vary."""
SHRINK, GROW = 0.5, 2.0
"""By no more after one step: something else may have slowed it, and few tokens are cheap."""
CAREFUL = 1 / 16
"""Of what is left it grows once a chunk was too long: with padding and attention tokens are dearer
than those before them, so that every other one would be."""
FADE = 0.125
"""Of the mean of steps without prompts: what a new one counts."""
PADDED = 32, 128
"""A step with chunks has a multiple of as many tokens as a GPU pads it to, at least and at most: it
would compute the rest in vain, and take longer than it may."""
GRAIN = 128
"""For so many who decode a step has as many tokens more."""
FAR_PREFIX = 16384
"""Tokens of a prompt, behind which few cost much more each than many: what attends to so many keys
has a kernel that is the faster the more there are."""

IN_TIME = 0.75
"""Of its objective: a first token that would take longer in small chunks has large ones."""


def chunk_tokens(objective_s: float, step_s: float, token_s: float, most: int, mixed: int) -> int:
    """What a limit comes to, for those who know what steps take but do not see them.

    Args:
        objective_s: of who decodes.
        step_s: without prompts.
        token_s: of each token of a prompt, beside them.
        most: tokens of a step.
        mixed: of one in which sequences decode, too, without an objective.
    """
    if objective_s == math.inf:
        return min(most, mixed)
    left_s = AIM * objective_s - step_s
    if left_s < 0 or left_s >= most * token_s:
        return most
    return min(most, max(LEAST, int(left_s / token_s)))


def size_step(tokens: int, least: int) -> int:
    """By how much the next graph of a GPU is larger: a quarter of a power of two, or `least`."""
    return max(least, 1 << tokens.bit_length() >> 3)


def padded_down(tokens: int) -> int:
    """The largest step that is not padded (`kvbaton.engine.cuda.prompt_graphs.padded_sizes`)."""
    least, most = PADDED
    return tokens - tokens % min(size_step(tokens, least), most)


class ChunkLimit:
    """Learns from steps.

    Args:
        most: tokens of a step.
        mixed: of one in which sequences decode, too, if these are few: without an objective the
            limit is what they leave of it.
        least: tokens that are computed together or not at all, if more than `LEAST`.
    """

    def __init__(self, most: int, mixed: int | None = None, least: int = 0) -> None:
        self._most = most
        self._mixed = min(most, mixed or most)
        self._least = min(most, max(LEAST, least))
        self._limit, self._asked = float(self._least), 0
        self._objective_s, self._careful = math.inf, False
        self._alone_s = self._chunks_s = self._chunks = 0.0

    @property
    def tokens(self) -> int:
        """Of prompts in a step like the last one that was asked for.

        All that fit where steps without prompts miss the objective of who decodes: then few long
        steps are better than many that are a little longer.
        """
        if self._objective_s == math.inf:
            return self._mixed
        return self._most if self._alone_s > AIM * self._objective_s else int(self._limit)

    @property
    def token_s(self) -> float:
        """Of steps with a chunk, over its tokens, of late; 0 before the first."""
        return self._chunks_s / self._chunks if self._chunks else 0.0

    def beside(self, decodes: int, objective_s: float) -> int:
        """`tokens` beside so many that decode; one of these is to come within so long."""
        if objective_s != self._objective_s:
            self._objective_s, self._careful = objective_s, False
        tokens = self.tokens
        if objective_s == math.inf:
            tokens -= decodes % GRAIN
        elif tokens == self._most:
            return tokens
        self._asked = max(padded_down(decodes + tokens) - decodes, self._least)
        return self._asked

    def observe(self, terms: Terms, seconds: float) -> None:
        """A step took so long; see `terms_of`."""
        _, prompts, _, decodes, _ = terms
        if not decodes:
            return
        if not prompts:
            self._alone_s += FADE * (seconds - self._alone_s)
            return
        self._chunks_s += FADE * (seconds - self._chunks_s)
        self._chunks += FADE * (prompts - self._chunks)
        if self._objective_s == math.inf:
            return
        aim_s = AIM * self._objective_s
        if prompts <= self._asked - PADDED[0] and seconds <= aim_s:
            return  # the end of a prompt: the first tokens of a chunk cost the most
        found = prompts * (aim_s - self._alone_s) / max(seconds - self._alone_s, 1e-5)
        found = min(max(found, SHRINK * self._limit), GROW * self._limit)
        self._careful = self._careful or seconds > aim_s
        if self._careful and found > self._limit:
            found = self._limit + CAREFUL * (found - self._limit)
        self._limit = min(max(found, self._least), float(self._most))
