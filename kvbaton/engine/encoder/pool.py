"""Encoder outputs in blocks: a KV pool with one head, one plane, and a layer per level."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbaton.connectors.layout import ITEM_SIZE
from kvbaton.engine.block_memory import BlockMemory, BlockView
from kvbaton.engine.step import ItemRows, SequenceStep
from kvbaton.kernels.digest import block_sums
from kvbaton.types import ENCODER_BLOCK_ROWS


class EncoderPool(BlockMemory):
    """Rows of encoder outputs, ``[block, 1, level, 1, row, hidden]``.

    An item takes whole blocks: its rows, then zeros, which are summed and moved like rows.

    Args:
        num_blocks: Number of blocks, null block included.
        levels: Vectors per row: 1, plus one per DeepStack layer.
        hidden: Hidden size of the language model.
        dtype: Name of the model's dtype.
        device: Device of the pool.
        blocks: See `BlockMemory`.
    """

    def __init__(
        self,
        num_blocks: int,
        levels: int,
        hidden: int,
        dtype: str,
        device: torch.device,
        blocks: Tensor | None = None,
    ) -> None:
        shape = (1, levels, 1, ENCODER_BLOCK_ROWS, hidden)
        block_bytes = math.prod(shape) * ITEM_SIZE[dtype]
        super().__init__(
            num_blocks, block_bytes, ENCODER_BLOCK_ROWS, device, "--encoder-cache-tokens", blocks
        )
        view = BlockView(self.blocks, shape, dtype)
        self.views, self.data, self.sums = [view], view.data, view.sums
        self.layouts = [view.layout]

    def gather(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Read rows, by block and row within it, each [n] integers: [n, levels, hidden]."""
        return self.data[:, 0, :, 0][blocks, :, offsets]

    def write(self, blocks: Sequence[int], rows: Tensor, *, first: int = 0) -> None:
        """Write rows of one item, zeros after them, and their sums.

        Args:
            blocks: Physical blocks of consecutive logical blocks of the item.
            rows: [n, levels, hidden], rows of the item from the start of ``blocks[0]`` on.
            first: Logical number of ``blocks[0]``.
        """
        assert 0 not in blocks, "the null block is never written"
        assert self.sums is not None
        size, num_blocks = self.block_size, len(blocks)
        ids = torch.tensor(blocks, device=self.data.device)
        rows = pad(rows.to(self.data.dtype), (0, 0, 0, 0, 0, num_blocks * size - len(rows)))
        levels_first = rows.view(num_blocks, size, *rows.shape[1:]).transpose(1, 2)
        self.data.index_copy_(0, ids, levels_first[:, None, :, None])
        start, end = first * size, (first + num_blocks) * size
        self.sums.index_copy_(0, ids, block_sums(self.data, ids, start, start, end))
        self.counted[list(blocks)] = size


def last_keys(
    steps: Sequence[SequenceStep], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """Last position that each token attends to if items attend to all of themselves.

    Args:
        steps: Steps of a batch; none ends within an item.
        positions: [tokens], positions of the batch's tokens.

    Returns:
        [tokens], the end of the token's item, or its own position; None if there is no item.
    """
    found = None
    for step, item, first in _items_of(steps):
        found = positions.copy() if found is None else found
        begin, end = max(0, item.start - step.start), item.start + item.length - step.start
        assert end <= step.count, "a step ends within an item that is seen whole"
        found[first + begin : first + end] = item.start + item.length - 1
    return found


def item_tokens(steps: Sequence[SequenceStep]) -> npt.NDArray[np.int64] | None:
    """Per placeholder: index of its token, block of its row, and row in the block: [3, n].

    None if there are no placeholders.
    """
    parts = []
    for step, item, first in _items_of(steps):
        start = max(step.start, item.start)
        positions = np.arange(start, min(step.start + step.count, item.start + item.length))
        rows = positions - item.start
        blocks = np.array(item.blocks, np.int64)[rows // ENCODER_BLOCK_ROWS]
        assert blocks.all(), "an encoder output has no block"
        parts.append(np.stack((positions - step.start + first, blocks, rows % ENCODER_BLOCK_ROWS)))
    return np.concatenate(parts, axis=1) if parts else None


def _items_of(steps: Sequence[SequenceStep]) -> Iterator[tuple[SequenceStep, ItemRows, int]]:
    """Items of a batch, with their steps and the index of each step's first token."""
    first = 0
    for step in steps:
        for item in step.items:
            yield step, item, first
        first += step.count
