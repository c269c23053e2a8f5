"""Memory of the ranks of a tensor-parallel model that kernels on other GPUs write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from kvbaton.kernels.jit import jit, tl

PROGRAMS = 512
"""Most programs of a launch."""

RESIDENT = 3
"""Programs per multiprocessor. All of a launch must run at once, since each waits for its twins on
other ranks; and there must be room for other kernels, of which `PeerMemory.abort` is one."""

SHARE = 2048
"""Elements per program and rank of "two-shot"."""

ROW_BYTES = 16 << 10
"""Most bytes of a row: the size of a program's part of an inbox."""

PARTS = 4
"""Parts of an inbox, used in turn."""

SHARED_FROM = 64 * 4096
"""Elements beyond which more than two GPUs use "two-shot", which does not normalise."""

MOST_SHARED = 1024 * 4096
"""Most elements for more than two GPUs; for larger tensors NCCL's ring is faster."""

FEW_ROWS = 32
"""Most rows of `few_rows_all_reduce_norm`, which sends twice the bytes but waits less often."""

FEW_PARTS = 2
"""Parts of its inbox, used in turn."""


class PeerMemory:
    """Memory of an all-reduce, as one rank sees it.

    Args:
        rank: Number of this rank.
        inboxes: Per rank, flat float32: [PARTS, ranks, PROGRAMS, ROW_BYTES / 4], then zeros
            [FEW_PARTS, ranks, FEW_ROWS, 2 * ROW_BYTES / 4].
        flags: Per rank, flat [PROGRAMS, ranks] int32: last round that each sender has written.
        rounds: This rank's [PROGRAMS + FEW_ROWS] int32: number of rounds of each program.
        waiting: This rank's [1] int32: 0 once kernels must not wait any more.

    Attributes:
        flags_at: On this rank's device, [ranks] int64: addresses of `flags`.
        programs: Most programs of a launch of "one-shot".
    """

    def __init__(
        self,
        rank: int,
        inboxes: Sequence[torch.Tensor],
        flags: Sequence[torch.Tensor],
        rounds: torch.Tensor,
        waiting: torch.Tensor,
    ) -> None:
        self.rank, self.size = rank, len(inboxes)
        self.inboxes, self.flags, self.rounds, self.waiting = inboxes, flags, rounds, waiting
        device: Any = torch.cuda.get_device_properties(rounds.device)
        self.programs = min(PROGRAMS, RESIDENT * device.multi_processor_count)
        addresses = [each.data_ptr() for each in flags]
        self.flags_at = torch.tensor(addresses, device=rounds.device)
        self._views: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        # Made now: while a rank waits, the driver may be unable to create a stream.
        self._aside = torch.cuda.Stream(rounds.device)  # type: ignore[no-untyped-call]

    def views(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The inboxes, viewed as a dtype."""
        if dtype not in self._views:
            self._views[dtype] = tuple(inbox.view(dtype) for inbox in self.inboxes)
        return self._views[dtype]

    @cached_property
    def few_rows(self) -> tuple[torch.Tensor, ...]:
        """Inboxes of `few_rows_all_reduce_norm`: [FEW_PARTS, ranks, FEW_ROWS, words] int64."""
        shape = FEW_PARTS, self.size, FEW_ROWS, ROW_BYTES // 4
        number = 2 * math.prod(shape)
        return tuple(inbox[-number:].view(torch.int64).view(shape) for inbox in self.inboxes)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `peer_all_reduce` is the fastest way to sum a tensor."""
        return self.size == 2 or tensor.numel() <= min(MOST_SHARED, self.size * PROGRAMS * SHARE)

    def fits_norm(self, tensor: torch.Tensor) -> bool:
        """Whether `peer_all_reduce_norm` is the fastest way to sum and normalise [T, N]."""
        most = ROW_BYTES // tensor.itemsize
        return tensor.shape[-1] <= most and (self.size == 2 or tensor.numel() <= SHARED_FROM)

    def abort(self) -> None:
        """End all waiting of this rank; results are invalid from then on."""
        with torch.cuda.stream(self._aside):
            self.waiting.zero_()  # a memset: loading a kernel could wait for running ones


def inbox_size(ranks: int) -> int:
    """Number of float32 elements of an inbox; see `PeerMemory`."""
    return (PARTS * PROGRAMS + 2 * FEW_PARTS * FEW_ROWS) * ranks * ROW_BYTES // 4


def peer_memories(devices: Sequence[torch.device]) -> list[PeerMemory]:
    """Allocate memory for one rank per device."""
    size = len(devices)
    inboxes = [torch.zeros(inbox_size(size), dtype=torch.float32, device=d) for d in devices]
    flags, rounds = (
        [torch.zeros(count, dtype=torch.int32, device=d) for d in devices]
        for count in (PROGRAMS * size, PROGRAMS + FEW_ROWS)
    )
    waiting = [torch.ones(1, dtype=torch.int32, device=d) for d in devices]
    for ours in inboxes:  # torch enables peer access at the first copy
        for theirs in inboxes:
            ours[:1].copy_(theirs[:1])
    made = [PeerMemory(rank, inboxes, flags, rounds[rank], waiting[rank]) for rank in range(size)]
    for device in devices:
        torch.cuda.synchronize(device)
    return made


@jit()
def inbox_area(
    sender: tl.constexpr,
    number: tl.tensor,
    SIZE: tl.constexpr,
    AREA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Where in an inbox this program's row of a sender is, in a round."""
    return (((number & (PARTS - 1)) * SIZE + sender) * PROGRAMS + tl.program_id(0)) * AREA


@jit()
def send_row(
    values: tl.tensor,
    inside: tl.tensor,
    inboxes: tl.tensor,
    number: tl.tensor,
    column: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    AREA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Write a row into this program's area of each other rank's inbox."""
    area = inbox_area(RANK, number, SIZE, AREA, PROGRAMS, PARTS)
    for other in tl.static_range(SIZE):
        if other != RANK:
            tl.store(inboxes[other] + area + column, values, mask=inside)
