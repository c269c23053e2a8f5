"""One rank's paged KV cache: writing tokens, reading pages, and what that does to the sums."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.connectors.layout import ITEM_SIZE
from kvbaton.engine.block_memory import BlockMemory
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.shard import Shard
from kvbaton.kernels.digest import block_sums, token_sums

LONG_RUN = 4
"""Tokens in a row from which on reading their blocks whole is cheaper than token by token."""


@dataclass(frozen=True)
class Slots:
    """Where a batch's tokens go.

    Attributes:
        blocks: [tokens] int64, physical block of each token.
        offsets: [tokens] int64, slot in the block.
        positions: [tokens] int64, absolute positions.
        host_blocks: `blocks` on the host.
        host_offsets: `offsets` on the host.
    """

    blocks: Tensor
    offsets: Tensor
    positions: Tensor
    host_blocks: npt.NDArray[np.int64]
    host_offsets: npt.NDArray[np.int64]


def block_bytes(model: ModelConfig, block_size: int, kv_heads: int) -> int:
    """Bytes of one block on one rank."""
    tokens = kv_heads * model.num_layers * 2 * block_size
    return tokens * model.head_dim * ITEM_SIZE[model.dtype]


class KVCache(BlockMemory):
    """Blocks of K and V of every layer.

    Writing slot 0 of a block starts its sum anew; writing another slot that is counted takes that
    and all later ones out first.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        shard: Shard,
        track_sums: bool,
    ) -> None:
        head_start, heads = shard.kv_heads(model.num_kv_heads)
        super().__init__(
            (num_blocks, heads, model.num_layers, 2, block_size, model.head_dim),
            dtype=model.dtype,
            device=device,
            head_start=head_start,
            head_total=model.num_kv_heads,
            track_sums=track_sums,
        )
        self._tokens = self.data.view(-1, model.head_dim)
        self._pages = self.data.view(-1, block_size * model.head_dim)
        self._heads = torch.arange(heads, device=device)

    def token_rows(self, slots: Slots) -> Tensor:
        """Row of K of layer 0, in the pool as rows of one token and head: [tokens * heads]."""
        _, heads, layers, _, size, _ = self.shape
        blocks = slots.blocks[:, None] * heads + self._heads
        return (blocks * (layers * 2 * size) + slots.offsets[:, None]).flatten()

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store a layer's K and V, each [tokens, heads, head_dim], at `token_rows`."""
        for kv, x in enumerate((key, value)):
            step = (layer * 2 + kv) * self.block_size
            self._tokens.index_copy_(0, rows + step, x.reshape(-1, x.shape[-1]))

    def page_rows(self, tables: Tensor) -> Tensor:
        """Row of K of layer 0, as rows of one block and head: [sequences, heads, blocks].

        Args:
            tables: [sequences, blocks] int64, padded with 0.
        """
        _, heads, layers, _, _, _ = self.shape
        return (tables[:, None] * heads + self._heads[:, None]) * (layers * 2)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at `page_rows`, copied: each [sequences, heads, blocks * size, head_dim]."""
        flat, shape = rows.flatten(), (*rows.shape[:2], -1, self.shape[-1])
        key = self._pages.index_select(0, flat + layer * 2)
        value = self._pages.index_select(0, flat + (layer * 2 + 1))
        return key.view(shape), value.view(shape)

    # --- digest sums ---

    def forget_overwritten(self, slots: Slots) -> None:
        """Before a step writes: take out of the sums what is no longer part of its blocks."""
        if self.sums is None:
            return
        first = np.flatnonzero(np.diff(slots.host_blocks, prepend=0))
        blocks, offsets = slots.host_blocks[first], slots.host_offsets[first]
        started = blocks[offsets == 0]
        self.sums[torch.from_numpy(started).to(self.sums.device)] = 0
        self.counted[started] = 0
        for index in first[offsets < self.counted[blocks]]:
            self._truncate(slots, index)

    def _truncate(self, slots: Slots, index: np.intp) -> None:
        """Take counted slots out of a block's sums, from that of token `index` on."""
        block, offset = int(slots.host_blocks[index]), int(slots.host_offsets[index])
        offsets = torch.arange(offset, int(self.counted[block]), device=self.data.device)
        positions = offsets - offset + slots.positions[index]
        self._accumulate(torch.full_like(offsets, block), offsets, positions, -1)
        self.counted[block] = offset

    def count_written(self, slots: Slots) -> None:
        """After a step wrote: add its tokens to the sums."""
        if self.sums is None:
            return
        borders = self._run_borders(slots)
        lengths = np.diff(borders)
        for start, end in pairwise(borders):
            if end - start >= LONG_RUN:
                self._count_run(slots, int(start), int(end))
        apart = torch.from_numpy(np.flatnonzero(np.repeat(lengths < LONG_RUN, lengths)))
        if len(apart):
            self._accumulate(slots.blocks[apart], slots.offsets[apart], slots.positions[apart], 1)
        np.maximum.at(self.counted, slots.host_blocks, slots.host_offsets + 1)

    def _run_borders(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Where tokens begin that do not follow their predecessor in its block or the next one."""
        blocks, offsets = slots.host_blocks, slots.host_offsets
        follows = np.diff(slots.positions.numpy(), prepend=-2) == 1
        follows &= (np.diff(blocks, prepend=-1) == 0) | (offsets == 0)
        return np.append(np.flatnonzero(~follows), len(blocks))

    def _count_run(self, slots: Slots, start: int, end: int) -> None:
        """Add consecutive tokens of one sequence, whole blocks at a time."""
        assert self.sums is not None
        blocks = slots.host_blocks[start:end]
        ids = torch.from_numpy(blocks[np.flatnonzero(np.diff(blocks, prepend=-1))])
        position = int(slots.positions[start])
        first = position - int(slots.host_offsets[start])
        sums = block_sums(self.data, ids, first, position, position + end - start)
        self.sums.index_add_(0, ids, sums)

    def _accumulate(self, blocks: Tensor, offsets: Tensor, positions: Tensor, sign: int) -> None:
        """Add (or subtract) the sums of single tokens as they are in memory now."""
        assert self.sums is not None
        _, heads, layers, _, _, _ = self.shape
        data = self.data[blocks, :, :, :, offsets]
        for kv in range(2):
            sums = token_sums(data[:, :, :, kv].flatten(1, 2), positions, kv)
            sums = sums.view(-1, heads, layers).transpose(1, 2)
            self.sums[:, :, kv].index_add_(0, blocks, sums.contiguous(), alpha=sign)
