"""The memory of a pool of blocks, and the digest sums kept with it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from itertools import groupby

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.connectors.base import Device, Memory
from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.connectors.layout import ALIGNMENT, BLOCK, GroupKind, KVLayout, contiguous_plane
from kvbaton.engine.upload import lent, stage, upload_ids
from kvbaton.errors import ConfigError
from kvbaton.kernels.digest import TableSums, empty_sums, unsigned

PAGE = 4096
"""Alignment of the pool in bytes, as required by transports that register memory."""

Shape = tuple[int, int, int, int, int]
"""Shape of a block: heads, layers, kv, tokens, features."""


class BlockView:
    """The blocks of a pool in one shape, as its groups see them, and their digest sums.

    The *sum* of (block, layer, kv, head) is the wrapping sum of `token_sums` over the tokens in its
    first `BlockMemory.counted` slots.

    Args:
        blocks: [blocks, bytes] uint8; a block has room for `shape`, and may be larger.
        shape: Shape of a block.
        dtype: Name of the dtype.
        name: Name of the plane.
        kind: Kind of attention or state.
        head_start: Global index of the first head.
        head_total: Number of heads of the whole model.
        track_sums: Whether to keep digest sums.

    Attributes:
        data: [blocks, head, layer, kv, token, feature].
        sums: [blocks, layers, kv, heads] int64, or None.
        table_sums: Recomputes sums from the data, and may store them in `sums`.
        layout: Layout of blocks with all these layers.
    """

    def __init__(
        self,
        blocks: Tensor,
        shape: Shape,
        dtype: str,
        *,
        name: str = "data",
        kind: GroupKind = GroupKind.FULL,
        head_start: int = 0,
        head_total: int = 1,
        track_sums: bool = True,
    ) -> None:
        heads, layers, planes, tokens, features = shape
        items = blocks.view(getattr(torch, dtype))
        self.data = items[:, : math.prod(shape)].view(-1, *shape)
        self.sums: Tensor | None = None
        if track_sums:
            of_blocks = (len(blocks), layers, planes, heads)
            self.sums = torch.zeros(of_blocks, dtype=torch.int64, device=blocks.device)
        self.table_sums = TableSums(self.data, self.sums)
        plane = contiguous_plane(
            name=name,
            num_blocks=len(blocks),
            block_size=tokens,
            num_heads=heads,
            head_dim=features,
            layers=tuple(range(layers)),
            dtype=dtype,
            head_start=head_start,
            head_total=head_total,
            kv=planes,
        )
        plane = msgspec.structs.replace(
            plane, strides=(blocks.shape[1], *plane.strides[BLOCK + 1 :])
        )
        self.layout = KVLayout(
            group=0, kind=kind, block_size=tokens, num_blocks=len(blocks), planes=(plane,)
        )


class BlockMemory:
    """Blocks of one rank, which each group sees in its own shape.

    Block 0 is the null block: all zeros, never written; it pads block tables.

    Args:
        num_blocks: Number of blocks, null block included.
        block_bytes: Size of a block in bytes.
        block_size: Tokens per block.
        device: Device of the memory.
        flag: Flag that set the number of blocks, for errors.
        blocks: Existing memory to use, such as another pool's: [blocks, bytes] uint8.

    Attributes:
        blocks: [blocks, bytes] uint8.
        views: Per KV group, its view of the blocks.
        data: Data of the first group's view.
        sums: Sums of the first group's view; None if none are kept.
        layouts: Per KV group, layout of its blocks.
        counted: Per block, number of leading slots that its sums cover.

    Raises:
        ConfigError: The bytes of a block are not aligned, or the memory can't be allocated.
    """

    views: list[BlockView]
    data: Tensor
    sums: Tensor | None
    layouts: list[KVLayout]

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        block_size: int,
        device: torch.device,
        flag: str = "--num-blocks",
        blocks: Tensor | None = None,
    ) -> None:
        if block_bytes % ALIGNMENT:
            raise ConfigError(
                "--block-size",
                f"{block_size} makes blocks of {block_bytes} bytes, not a multiple of {ALIGNMENT}",
            )
        self.block_size, self.num_blocks = block_size, num_blocks
        num_bytes = num_blocks * block_bytes
        if blocks is None:
            raw = _memory(num_blocks, block_bytes, device, flag)
            start = -raw.data_ptr() % PAGE
            blocks = raw[start : start + num_bytes].view(num_blocks, block_bytes)
        self.blocks = blocks
        self.counted = np.zeros(num_blocks, np.int64)
        where: Device = "cuda" if device.type == "cuda" else "cpu"
        self.memory = Memory(self.blocks.data_ptr(), num_bytes, where, device.index or 0, blocks)

    def num_layers(self, group: int) -> int:
        """Number of layers of a group, which are the first ones in its view."""
        return len(self.layouts[group].planes[0].layers)

    def group_sums(self, group: int) -> Tensor:
        """Kept sums of a group: [blocks, layers, kv, heads] int64."""
        sums = self.views[group].sums
        assert sums is not None, "this executor was started without digest sums"
        return sums[:, : self.num_layers(group)]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks with their sums."""
        assert 0 not in targets, "the null block is never written"
        source, target = (upload_ids(ids, self.blocks.device) for ids in (sources, targets))
        self.blocks.index_copy_(0, target, self.blocks.index_select(0, source))
        self.counted[list(targets)] = self.counted[list(sources)]
        for view in dict.fromkeys(self.views):
            if view.sums is not None:
                view.sums.index_copy_(0, target, view.sums.index_select(0, source))

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        assert 0 not in blocks, "the null block is never written"
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.blocks.device)
        self.blocks[ids] = 0xFF  # a NaN in every dtype
        if self.blocks.is_cuda:
            torch.cuda.synchronize(self.blocks.device)

    def kept_sums(self, group: int, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Sums kept with blocks of a group, [blocks, layers, kv, heads]."""
        sums = self.group_sums(group)
        return unsigned(sums[torch.tensor(blocks, dtype=torch.int64, device=sums.device)])

    def digest(self, ranges: Sequence[BlockRange], *, keep: bool = False) -> list[Sums]:
        """Recompute sums from memory: per range [blocks, layers, kv, heads]; `keep` stores them."""
        found = self.fetch_digest(ranges, keep=keep)
        if self.blocks.is_cuda:
            torch.cuda.current_stream(self.blocks.device).synchronize()
        return list(map(unsigned, found))

    def fetch_digest(
        self,
        ranges: Sequence[BlockRange],
        *,
        keep: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> list[Tensor]:
        """Start to do what `digest` does, with one launch per view.

        Sums are not kept with a range whose first block is covered only in part: it is never cached
        nor sent.

        Args:
            ranges: Ranges of blocks to sum.
            keep: Whether to store the sums.
            stream: Stream of a GPU; None is the current one. Its device must be the current one.

        Returns:
            The sums, in memory of the host that is valid once the stream has come here. It must be
            held until then: torch does not know that a kernel writes it.
        """
        found: list[Tensor] = []
        device = self.blocks.device
        for view, alike in groupby(ranges, lambda held: self.views[held.group]):
            same, size = list(alike), view.layout.block_size
            count = sum(len(held.blocks) for held in same)
            words, there = stage(8 * count, device, stream)
            table, past = words.reshape(count, 8), 0
            sums = empty_sums(view.data, count, torch.device("cpu"))
            for held in same:
                first, past = past, past + len(held.blocks)
                numbers, part = size * np.arange(past - first), table[first:past]
                part[:, 0], part[:, 1] = held.blocks, held.first_position + numbers
                part[:, 2:5] = held.start, held.end, -1
                if keep and view.sums is not None and held.start <= held.first_position:
                    part[:, 4] = blocks = part[:, 0]
                    counted = np.minimum(held.end - held.first_position - numbers, size)
                    self.counted[blocks] = np.maximum(counted, 0)
                found.append(sums[first:past, : self.num_layers(held.group)])
            view.table_sums(lent(there, device, stream).view(count, 8), sums, stream)
        return found


def _memory(num_blocks: int, block_bytes: int, device: torch.device, flag: str) -> Tensor:
    """Zeroed memory for these blocks, plus a page."""
    num_bytes = num_blocks * block_bytes + PAGE
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # Pages are allocated at their first access, 2 MiB at a time.
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        text = f"{num_blocks} blocks of {block_bytes} bytes can't be had: {error}"
        raise ConfigError(flag, text) from error
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
