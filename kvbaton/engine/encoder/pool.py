"""Encoder outputs in blocks: a KV pool of one head, one plane, and a layer per level."""

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

    An item fills whole blocks: its rows, then zeros, which are summed and moved like any row.

    Args:
        num_blocks: the null block included.
        levels: vectors per row: 1, and one per deepstack layer.
        hidden: features of the language model.
        dtype: name of the model's dtype.
        device: where it lies.
        blocks: see `BlockMemory`.
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
        self.layouts, self.group_data = [view.layout], [view.data]

    def gather(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Rows by block and row in it, each [n] integers: [n, levels, hidden]."""
        return self.data[:, 0, :, 0][blocks, :, offsets]

    def write(self, blocks: Sequence[int], rows: Tensor, *, first: int = 0) -> None:
        """Store rows of one item, zeros after them, and their sums.

        Args:
            blocks: consecutive logical blocks of the item.
            rows: [n, levels, hidden], the item's from the start of ``blocks[0]`` on.
            first: logical number of ``blocks[0]``.
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
    """Last position that each token sees where items are seen whole: its item's, or its own.

    Args:
        steps: a batch; none ends within an item.
        positions: [tokens], of its tokens.

    Returns:
        [tokens]; None if there is no item.
    """
    found = None
    for step, item, first in _items_of(steps):
        found = positions.copy() if found is None else found
        begin, end = max(0, item.start - step.start), item.start + item.length - step.start
        assert end <= step.count, "a step ends within an item that is seen whole"
        found[first + begin : first + end] = item.start + item.length - 1
    return found


def item_tokens(steps: Sequence[SequenceStep]) -> npt.NDArray[np.int64] | None:
    """Per placeholder its token in the batch, its row's block, and the row in that: [3, n].

    None if there is none.
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
    """Items of a batch with their steps, and where the tokens of these begin in it."""
    first = 0
    for step in steps:
        for item in step.items:
            yield step, item, first
        first += step.count
