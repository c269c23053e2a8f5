"""Steps of made-up prompts, before any request is there: to measure, compile and capture."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.engine.cuda.runner import CudaRunner
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.step import ItemRows, NewSequence, SequenceStep, StepPlan
from kvbaton.messages.engine import Item, SamplingParams
from kvbaton.types import ENCODER_BLOCK_ROWS

GREEDY = SamplingParams(temperature=0.0)


class Trial:
    """Runs steps on a runner whose pool nobody uses; takes its first blocks.

    Prompts of a multimodal model are all image, of one block of encoder outputs again and again.
    """

    def __init__(self, runner: CudaRunner) -> None:
        self._runner, config = runner, runner.model.config
        self._vision = config.vision
        if self._vision is not None:
            levels, device = self._vision.levels, runner.device
            pool = EncoderPool(2, levels, config.hidden_size, config.dtype, device)
            runner.attach_encoder(pool)

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
            items, rows = self._image(total) if count > 1 else ((), ())
            new.append(NewSequence(~handle, (1,) * total, total, 0, params, items))
            steps.append(SequenceStep(~handle, prefix, count, (table,), 1, rows))
        self._runner.run(StepPlan(0, new=tuple(new), steps=tuple(steps)))
        self._runner.run(StepPlan(0, ended=tuple(step.handle for step in steps)))

    def _image(self, tokens: int) -> tuple[tuple[Item, ...], tuple[ItemRows, ...]]:
        """One row of so many squares."""
        if self._vision is None:
            return (), ()
        side = self._vision.merge_size
        grid = (1, side, side * tokens)
        blocks = (1,) * -(-tokens // ENCODER_BLOCK_ROWS)
        item = Item(start=0, length=tokens, digest=bytes(32), grid=grid)
        return (item,), (ItemRows(0, tokens, blocks),)

    def fits(self, tokens: int) -> bool:
        """Whether the pool and the longest sequence hold so many."""
        cache, most = self._runner.cache, self._runner.sequences.tokens.shape[1] - 2
        return tokens <= min(most, (cache.num_blocks - 2) * cache.block_size)
