"""The memory of one pool of blocks, and the digest sums kept beside it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.connectors.base import Device, Memory
from kvbaton.connectors.layout import ALIGNMENT, GroupKind, KVLayout, contiguous_plane
from kvbaton.engine.upload import upload_ids
from kvbaton.errors import ConfigError
from kvbaton.kernels.digest import block_sums

PAGE = 4096
"""The pool starts at a page border, so that any transport can register it."""

Shape = tuple[int, int, int, int, int, int]
"""Blocks, heads, layers, kv, tokens, features."""


class BlockMemory:
    """Blocks of one rank, ``[block, head, layer, kv, token, feature]``.

    Block 0 is the null block: all zeros, never written; it pads block tables.

    The *sum* of (block, layer, kv, head) is the wrapping sum of `token_sums` over the tokens that
    its first `counted` slots hold.

    Args:
        shape: of the pool.
        dtype: name of its dtype.
        device: where it lies.
        head_start: global id of the first head.
        head_total: heads of the whole model.
        track_sums: keep digest sums.

    Attributes:
        layouts: per KV group, what its blocks hold: here one group of all layers.
        group_data: per KV group, that part of `data`: its layers are the first ones of its blocks.

    Raises:
        ConfigError: a block's bytes can't be aligned.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dtype: str,
        device: torch.device,
        head_start: int = 0,
        head_total: int = 1,
        track_sums: bool = True,
    ) -> None:
        num_blocks, heads, layers, planes, block_size, features = self.shape = shape
        kind = getattr(torch, dtype)
        num_bytes = heads * layers * planes * block_size * features * kind.itemsize
        if num_bytes % ALIGNMENT:
            raise ConfigError(
                "--block-size",
                f"{block_size} makes blocks of {num_bytes} bytes, not a multiple of {ALIGNMENT}",
            )
        self.block_size, self.num_blocks = block_size, num_blocks
        if device.type == "cpu":  # pages are made when they are first touched, 2 MiB at a time
            memory = mmap.mmap(
                -1, num_blocks * num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            memory.madvise(mmap.MADV_HUGEPAGE)
            raw = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            raw = torch.zeros(num_blocks * num_bytes + PAGE, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % PAGE
        pool = raw[start : start + num_blocks * num_bytes]
        self.data = pool.view(kind).view(shape)
        self.sums = (
            torch.zeros((num_blocks, layers, planes, heads), dtype=torch.int64, device=device)
            if track_sums
            else None
        )
        self.counted = np.zeros(num_blocks, np.int64)
        where: Device = "cuda" if device.type == "cuda" else "cpu"
        self.memory = Memory(self.data.data_ptr(), pool.numel(), where, device.index or 0, raw)
        plane = contiguous_plane(
            num_blocks=num_blocks,
            block_size=block_size,
            num_heads=heads,
            head_dim=features,
            layers=tuple(range(layers)),
            dtype=dtype,
            head_start=head_start,
            head_total=head_total,
            kv=planes,
        )
        self.layouts = [
            KVLayout(
                group=0,
                kind=GroupKind.FULL,
                block_size=block_size,
                num_blocks=num_blocks,
                planes=(plane,),
            )
        ]
        self.group_data = [self.data]

    def num_layers(self, group: int) -> int:
        """Layers of a group: the first ones of its blocks."""
        return len(self.layouts[group].planes[0].layers)

    def group_sums(self, group: int) -> Tensor:
        """The sums that are kept of it: [blocks, layers, kv, heads] int64."""
        assert self.sums is not None, "this executor was started without digest sums"
        return self.sums[:, : self.num_layers(group)]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks with their sums."""
        assert 0 not in targets, "the null block is never written"
        source, target = (upload_ids(ids, self.data.device) for ids in (sources, targets))
        data = self.data.view(torch.uint8)  # torch indexes float8 in part of its functions only
        data.index_copy_(0, target, data.index_select(0, source))
        self.counted[list(targets)] = self.counted[list(sources)]
        if self.sums is not None:
            self.sums.index_copy_(0, target, self.sums.index_select(0, source))

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        assert 0 not in blocks, "the null block is never written"
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.data.device)
        self.data.view(torch.uint8)[ids] = 0xFF  # a NaN of every dtype
        if self.data.is_cuda:
            torch.cuda.synchronize(self.data.device)

    def kept_sums(self, group: int, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Sums kept with blocks of a group, [blocks, layers, kv, heads]."""
        sums = self.group_sums(group)
        return _unsigned(sums[torch.tensor(blocks, dtype=torch.int64, device=sums.device)])

    def digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> npt.NDArray[np.uint64]:
        """Sums recomputed from memory, [blocks, layers, kv, heads]; see `Executor.digest`."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.data.device)
        return _unsigned(block_sums(self.group_data[group], ids, first_position, start, end))

    def adopt(
        self,
        group: int,
        blocks: Sequence[int],
        sums: npt.NDArray[np.uint64],
        counted: npt.NDArray[np.int64],
    ) -> None:
        """Keep sums computed elsewhere, of the first `counted` slots of each block."""
        if self.sums is None:
            return
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.sums.device)
        kept = torch.from_numpy(sums.view(np.int64)).to(self.sums.device)
        self.group_sums(group)[ids] = kept
        self.counted[list(blocks)] = counted


def _unsigned(sums: Tensor) -> npt.NDArray[np.uint64]:
    return sums.cpu().numpy().view(np.uint64)
