"""The memory of one pool of blocks, and the digest sums kept beside it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.connectors.base import Device, Memory
from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.connectors.layout import ALIGNMENT, BLOCK, GroupKind, KVLayout, contiguous_plane
from kvbaton.engine.upload import upload_ids
from kvbaton.errors import ConfigError
from kvbaton.kernels.digest import block_sums

PAGE = 4096
"""The pool starts at a page border, so that any transport can register it."""

Shape = tuple[int, int, int, int, int]
"""Of a block: heads, layers, kv, tokens, features."""


class BlockView:
    """The blocks of a pool as groups of one shape see them, and their digest sums.

    The *sum* of (block, layer, kv, head) is the wrapping sum of `token_sums` over the tokens that
    its first `BlockMemory.counted` slots hold.

    Args:
        blocks: [blocks, bytes] uint8; a block holds `shape`, and may be larger.
        shape: of a block.
        dtype: name of its dtype.
        name: of the plane.
        kind: what a block means.
        head_start: global id of the first head.
        head_total: heads of the whole model.
        track_sums: keep digest sums.

    Attributes:
        data: [blocks, head, layer, kv, token, feature].
        sums: [blocks, layers, kv, heads] int64; or None.
        layout: of blocks with all these layers.
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
    """Blocks of one rank, which groups see as they like.

    Block 0 is the null block: all zeros, never written; it pads block tables.

    Args:
        num_blocks: the null block included.
        block_bytes: of each.
        block_size: tokens that a block holds.
        device: where it lies.
        flag: that said how many blocks there are.
        blocks: those of another pool, which are ours, too: [blocks, bytes] uint8.

    Attributes:
        blocks: [blocks, bytes] uint8.
        views: per KV group, what its blocks hold.
        data: what they hold for the first group and those of its shape.
        sums: the sums of the first group's blocks; None if none are kept.
        layouts: per KV group, of its view.
        group_data: per KV group, the data of its view that is its layers', the first ones.
        counted: per block, its first slots that its sums count.

    Raises:
        ConfigError: a block's bytes can't be aligned, or so many can't be had.
    """

    views: list[BlockView]
    data: Tensor
    sums: Tensor | None
    layouts: list[KVLayout]
    group_data: list[Tensor]

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
        """Layers of a group: the first ones of its blocks."""
        return len(self.layouts[group].planes[0].layers)

    def group_sums(self, group: int) -> Tensor:
        """The sums that are kept of it: [blocks, layers, kv, heads] int64."""
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
        self.blocks[ids] = 0xFF  # a NaN of every dtype
        if self.blocks.is_cuda:
            torch.cuda.synchronize(self.blocks.device)

    def kept_sums(self, group: int, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Sums kept with blocks of a group, [blocks, layers, kv, heads]."""
        sums = self.group_sums(group)
        return _unsigned(sums[torch.tensor(blocks, dtype=torch.int64, device=sums.device)])

    def digest(self, ranges: Sequence[BlockRange], *, keep: bool = False) -> list[Sums]:
        """Per range sums recomputed from memory, [blocks, layers, kv, heads]; see `keep`."""
        found = []
        for held in ranges:
            group, blocks, *tokens = held
            ids = torch.tensor(blocks, dtype=torch.int64, device=self.blocks.device)
            sums = block_sums(self.group_data[group], ids, *tokens)
            if keep:
                self.keep(held, ids, sums)
            found.append(_unsigned(sums))
        return found

    def keep(self, held: BlockRange, ids: Tensor, sums: Tensor) -> None:
        """Keep recomputed sums with their blocks, whose numbers are `ids`, where any are kept.

        Not if the first block counts in part only: such a one is never cached, nor sent.
        """
        if self.sums is None or held.start > held.first_position:
            return
        self.group_sums(held.group).index_copy_(0, ids, sums)
        size, tokens = self.layouts[held.group].block_size, held.end - held.first_position
        self.counted[list(held.blocks)] = np.clip(tokens - size * np.arange(len(ids)), 0, size)


def _memory(num_blocks: int, block_bytes: int, device: torch.device, flag: str) -> Tensor:
    """Zeros for these blocks, and a page more."""
    num_bytes = num_blocks * block_bytes + PAGE
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # Pages are made when they are first touched, 2 MiB at a time.
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        text = f"{num_blocks} blocks of {block_bytes} bytes can't be had: {error}"
        raise ConfigError(flag, text) from error
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unsigned(sums: Tensor) -> npt.NDArray[np.uint64]:
    return sums.cpu().numpy().view(np.uint64)
