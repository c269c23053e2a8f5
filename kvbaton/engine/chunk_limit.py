"""How many prompt tokens a step computes beside decoding sequences.

Chunked prefill does not stall decoding if chunks are small (Sarathi-Serve, OSDI 2024). Small chunks
cost little, since the products of few tokens wait for weights anyway, so a step that also decodes
has few tokens in all. If the decoding sequences have an ITL objective, such a step has as many
prompt tokens as it leaves time for. That limit is learned from the duration of steps: a step with a
chunk shows how long its prompt tokens made it, and so how many tokens would fill the time left.
"""

from __future__ import annotations

import math

from kvbaton.engine.step_costs import Terms

LEAST = 64
"""Minimum number of tokens in a chunk: fewer hardly make a step shorter."""
AIM = 0.9
"""Share of the ITL objective that a step aims at, since step times vary."""
SHRINK, GROW = 0.5, 2.0
"""Bounds for the change of the limit after one step: something else may have slowed it, and few
tokens are cheap."""
CAREFUL = 1 / 16
"""Share of an increase that is made once a chunk was too long. Padding and attention make further
tokens dearer than those before, so after full increases every other chunk would be late."""
LONG_CHUNKS = 16
"""Number of long chunks until the smallest one is tried again, if that was too long, too."""
FADE = 0.125
"""Weight of a new step in the running means."""
PADDED = 32, 128
"""Smallest and largest number of tokens to a multiple of which GPUs pad a step with chunks: other
limits would compute padding, and exceed the objective."""
GRAIN = 128
"""Without an objective, each further 128 decoding sequences allow a step 128 tokens more."""
FAR_PREFIX = 16384
"""Position in a prompt beyond which large chunks are much cheaper per token: the attention kernel
for that many keys is the faster the more queries there are."""

IN_TIME = 0.75
"""Share of the TTFT objective: a prompt that would take longer in small chunks gets large ones,
unless sequences that decode have an ITL objective."""


def chunk_tokens(objective_s: float, step_s: float, token_s: float, most: int, mixed: int) -> int:
    """The limit that `ChunkLimit` would come to, for routers, which know costs but see no steps.

    Unlike `ChunkLimit` it stays at `LEAST` where even steps with so few tokens are too long: with
    longer chunks, nodes that break the objective would look faster to routers.

    Args:
        objective_s: ITL objective of the decoding sequences; infinite for none.
        step_s: Seconds of a step without prompts.
        token_s: Seconds that each prompt token adds to it.
        most: Maximum number of tokens in a step.
        mixed: Maximum number of tokens in a step that also decodes, without an objective.
    """
    if objective_s == math.inf:
        return min(most, mixed)
    left_s = AIM * objective_s - step_s
    if left_s < 0 or left_s >= most * token_s:
        return most
    return min(most, max(LEAST, int(left_s / token_s)))


def size_step(tokens: int, least: int) -> int:
    """Difference between the sizes of GPU graphs: a quarter of a power of two, at least `least`."""
    return max(least, 1 << tokens.bit_length() >> 3)


def padded_down(tokens: int) -> int:
    """The largest number of tokens that needs no padding, see `cuda.prompt_graphs.padded_sizes`."""
    least, most = PADDED
    return tokens - tokens % min(size_step(tokens, least), most)


class ChunkLimit:
    """Limit on the prompt tokens of steps that also decode, learned from the duration of steps.

    Args:
        most: Maximum number of tokens in a step.
        mixed: Maximum number of tokens, decoding ones included, in a step without an objective.
        least: Tokens that must fit into one step (an unsplit item), if more than `LEAST`.
    """

    def __init__(self, most: int, mixed: int | None = None, least: int = 0) -> None:
        self._most = most
        self._mixed = min(most, mixed or most)
        self._least = min(most, max(LEAST, least))
        self._limit, self._asked = float(self._least), 0
        self._objective_s, self._careful = math.inf, False
        self._alone_s = self._chunks_s = self._chunks = self._least_s = 0.0
        self._long_chunks = 0

    @property
    def _unbounded(self) -> bool:
        """Whether chunks are as without an objective."""
        return self._objective_s == math.inf or self._long_chunks > 0

    @property
    def current(self) -> int:
        """Current limit in prompt tokens, for the objective last given to `for_step`; not rounded.

        The whole step if steps without prompts miss the objective already: few long steps are then
        better than many slightly longer ones. So they are, as without an objective, if steps with
        the smallest chunk miss it, where prompt tokens are dear, as on a CPU.
        """
        if self._unbounded:
            return self._mixed
        return self._most if self._alone_s > AIM * self._objective_s else int(self._limit)

    @property
    def token_s(self) -> float:
        """Running mean of seconds per prompt token in steps with a chunk; 0 before the first."""
        return self._chunks_s / self._chunks if self._chunks else 0.0

    def for_step(self, decodes: int, objective_s: float) -> int:
        """Limit in prompt tokens for the next step, rounded so that the step is not padded.

        It has `decodes` decoding sequences, with this smallest ITL objective; infinite for none.
        """
        if objective_s != self._objective_s:
            self._objective_s, self._careful = objective_s, False
            self._least_s, self._long_chunks = 0.0, 0
        tokens = self.current
        if self._unbounded:
            tokens -= decodes % GRAIN
        elif tokens == self._most:
            return tokens
        self._asked = max(padded_down(decodes + tokens) - decodes, self._least)
        return self._asked

    def observe(self, terms: Terms, seconds: float) -> None:
        """Learn from a step with these terms (see `terms_of`) that took so many seconds."""
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
        if self._long_chunks:
            self._long_chunks -= 1
        elif self._least / 2 <= prompts <= self._least:
            weight = FADE if self._least_s else 1.0
            self._least_s += weight * (seconds - self._least_s)
            if self._least_s > self._objective_s:
                self._least_s, self._long_chunks = 0.0, LONG_CHUNKS
        aim_s = AIM * self._objective_s
        if prompts <= self._asked - PADDED[0] and seconds <= aim_s:
            return  # the short end of a prompt: the first tokens of a chunk cost the most
        found = prompts * (aim_s - self._alone_s) / max(seconds - self._alone_s, 1e-5)
        found = min(max(found, SHRINK * self._limit), GROW * self._limit)
        self._careful = self._careful or seconds > aim_s
        if self._careful and found > self._limit:
            found = self._limit + CAREFUL * (found - self._limit)
        self._limit = min(max(found, self._least), float(self._most))
