"""Steps of made-up prompts, before any request is there: to measure, compile and capture."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.engine.cuda.runner import CudaRunner
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan
from kvbaton.wire import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Trial:
    """Runs steps on a runner whose pool nobody uses; takes its first blocks."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner

    def run(
        self,
        counts: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        prefixes: Sequence[int] | None = None,
    ) -> None:
        """One step of sequences with so many new tokens each, after prefixes that lie about.

        Args:
            counts: tokens to compute of each; ones first.
            params: of all.
            prefixes: tokens before them; their KV is whatever the pool holds.
        """
        before = prefixes or [0] * len(counts)
        new, steps, first = [], [], 1
        for handle, (count, prefix) in enumerate(zip(counts, before, strict=True)):
            total = prefix + count
            blocks = -(-total // self._runner.cache.block_size)
            table = tuple(range(first, first + blocks))
            first += blocks
            new.append(NewSequence(~handle, (1,) * total, total, 0, params))
            steps.append(SequenceStep(~handle, prefix, count, (table,), 1))
        self._runner.run(StepPlan(0, new=tuple(new), steps=tuple(steps)))
        self._runner.run(StepPlan(0, ended=tuple(step.handle for step in steps)))

    def fits(self, tokens: int) -> bool:
        """Whether the pool and the longest sequence hold so many."""
        cache, most = self._runner.cache, self._runner.sequences.tokens.shape[1] - 2
        return tokens <= min(most, (cache.num_blocks - 2) * cache.block_size)
