"""Which tokens of a step stand for rows of encoder outputs, and where these lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.engine.step import ItemRows, SequenceStep
from kvbaton.types import ENCODER_BLOCK_ROWS

Ints = npt.NDArray[np.int64]


def item_tokens(steps: Sequence[SequenceStep]) -> Ints | None:
    """Per placeholder its token in the batch, its row's block, and the row in that: [3, n].

    None if there is none.
    """
    if not any(step.items for step in steps):
        return None
    return np.concatenate(list(_parts(steps)), axis=1)


def _parts(steps: Sequence[SequenceStep]) -> Iterator[Ints]:
    first = 0
    for step in steps:
        for item in step.items:
            yield _overlap(step, item, first)
        first += step.count


def _overlap(step: SequenceStep, item: ItemRows, first: int) -> Ints:
    """Those of one item; the step's first token is number `first` of the batch."""
    start = max(step.start, item.start)
    positions = np.arange(start, min(step.start + step.count, item.start + item.length))
    rows = positions - item.start
    blocks = np.array(item.blocks, np.int64)[rows // ENCODER_BLOCK_ROWS]
    assert blocks.all(), "an encoder output has no block"
    return np.stack((positions - step.start + first, blocks, rows % ENCODER_BLOCK_ROWS))
