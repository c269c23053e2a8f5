"""An all-reduce in one kernel between GPUs that can write into each other's memory.

Every rank writes its values straight into an inbox on each other rank, raises a flag there, waits
for the others' flags, and adds up in the order of ranks, so that all get the same bits. There is no
second meeting at the end: an inbox has two halves, and a rank raises its next flag only after it
has read this half. The pattern is that of NCCL's LL protocols and of vendors' "one-shot" kernels.

Of more than two ranks each would send larger tensors to all the others. Of those it gets a share of
each, adds it up, and sends all the sum: half as much for four, with a second meeting ("two-shot").

Nothing is read on the host, so a CUDA graph may capture it. A rank that never comes keeps the
others waiting until `PeerMemory.abort`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl

BLOCK = 2048
"""Elements of a program."""

MAX_BLOCKS = 1024
"""Programs that are on the GPU at the same time, whatever else is: each waits for its twin."""

PAIR_ROUNDS = 4
"""Blocks of a program between two GPUs at most."""

SHARED_FROM = 64 * 4096
"""Elements; of fewer, more than two GPUs get all, which takes one meeting."""

MOST_SHARED = 1024 * 4096
"""Elements, of more than two GPUs; for more, NCCL's ring is the faster way."""


class PeerMemory:
    """What an all-reduce needs, as one rank sees it.

    Args:
        rank: which.
        inboxes: per rank, [2, ranks, part] of 4 bytes, flat float32.
        flags: per rank, [MAX_BLOCKS, ranks] int32, flat: the last round for which a sender has
            written.
        rounds: its own, [MAX_BLOCKS] int32: rounds of each program.
        waiting: its own, [1] int32: 0 once it shall not wait any more.

    Attributes:
        part: elements that one rank sends another before they meet.
        capacity: elements of the largest tensor.
        flags_at: on its device, [ranks] int64: addresses of `flags`.
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
        self.part = len(inboxes[0]) // (2 * self.size)
        self.capacity = self.part if self.size == 2 else MOST_SHARED
        addresses = [each.data_ptr() for each in flags]
        self.flags_at = torch.tensor(addresses, device=rounds.device)
        self._views: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        # While a rank waits the driver may not make one.
        self._aside = torch.cuda.Stream(rounds.device)  # type: ignore[no-untyped-call]

    def views(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The inboxes as elements of a dtype."""
        if dtype not in self._views:
            self._views[dtype] = tuple(inbox.view(dtype) for inbox in self.inboxes)
        return self._views[dtype]

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is small enough."""
        return tensor.numel() <= self.capacity

    def abort(self) -> None:
        """Let this rank not wait any more; what it then has is no sum."""
        with torch.cuda.stream(self._aside):
            self.waiting.zero_()  # no kernel: to load one could wait for those that wait


def peer_memories(devices: Sequence[torch.device]) -> list[PeerMemory]:
    """Memory for a rank on each device, before any of them uses it."""
    size = len(devices)
    part = MAX_BLOCKS * BLOCK * (PAIR_ROUNDS if size == 2 else 1)
    inboxes = [torch.empty(2 * size * part, dtype=torch.float32, device=d) for d in devices]
    flags, rounds = (
        [torch.zeros(count, dtype=torch.int32, device=d) for d in devices]
        for count in (MAX_BLOCKS * size, MAX_BLOCKS)
    )
    waiting = [torch.ones(1, dtype=torch.int32, device=d) for d in devices]
    for ours in inboxes:  # torch makes memory reachable with the first copy
        for theirs in inboxes:
            ours[:1].copy_(theirs[:1])
    made = [PeerMemory(rank, inboxes, flags, rounds[rank], waiting[rank]) for rank in range(size)]
    for device in devices:
        torch.cuda.synchronize(device)
    return made


def peer_all_reduce(tensor: torch.Tensor, memory: PeerMemory) -> torch.Tensor:
    """Compute the sum of all ranks' tensors, accumulated in fp32.

    All ranks call it in the same order with equal shapes, on one stream each.

    Args:
        tensor: contiguous, on the rank's device; see `PeerMemory.fits`.
        memory: the rank's.

    Returns:
        As `tensor`.
    """
    out = torch.empty_like(tensor)
    count, size = tensor.numel(), memory.size
    if not count:
        return out
    shared = size > 2 and count > SHARED_FROM
    programs = min(cdiv(count, BLOCK * (size if shared else 1)), MAX_BLOCKS)
    (_shared_kernel if shared else _kernel)[(programs,)](
        tensor,
        out,
        memory.views(tensor.dtype),
        memory.flags[memory.rank],
        memory.flags_at,
        memory.rounds,
        memory.waiting,
        count,
        RANK=memory.rank,
        SIZE=size,
        LANES=next_power_of_2(size),
        PART=memory.part,
        BLOCK=BLOCK,
        **({} if shared else dict(ROUNDS=cdiv(count, MAX_BLOCKS * BLOCK), PROGRAMS=MAX_BLOCKS)),
        num_warps=4,
    )
    return out


def peer_all_reduce_reference(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Plain torch for `peer_all_reduce`, of all ranks' tensors on one device."""
    return reduce(torch.add, (tensor.float() for tensor in tensors)).to(tensors[0].dtype)


@jit()
def _meet(
    flags: tl.tensor,
    flags_at: tl.tensor,
    waiting: tl.tensor,
    number: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Tell this program's like on each rank that it has written, and wait until they have.

    By a lane for each rank, all at once: a release waits until what was written has arrived.
    """
    block, lanes = tl.program_id(0), tl.arange(0, LANES)
    others = (lanes < SIZE) & (lanes != RANK)
    tl.debug_barrier()
    there = tl.load(flags_at + lanes, mask=others, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(there + block * SIZE + RANK, number, mask=others, sem="release", scope="sys")
    came = flags + block * SIZE + lanes
    seen = tl.load(came, mask=others, other=number, volatile=True)
    while tl.min(seen - number) < 0:  # it may be ahead, too; right also when rounds wrap
        seen = tl.load(came, mask=others, other=number, volatile=True)
        seen = tl.where(tl.load(waiting, volatile=True) == 1, seen, number)
    tl.atomic_add(came, 0, mask=others, sem="acquire", scope="sys")
    tl.debug_barrier()


@jit()
def _sum(
    tensor: tl.tensor,
    inbox: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
) -> tl.tensor:
    """What ranks sent to an inbox, and ours, added up in their order."""
    total = tl.zeros(inside.shape, tl.float32)
    for other in tl.static_range(SIZE):
        if other == RANK:
            value = tl.load(tensor, mask=inside, other=0.0)
        else:
            value = tl.load(inbox + other * PART, mask=inside, other=0.0, cache_modifier=".cg")
        total += value.to(tl.float32)
    return total


@jit()
def _kernel(
    tensor: tl.tensor,
    out: tl.tensor,
    inboxes: tl.tensor,
    flags: tl.tensor,
    flags_at: tl.tensor,
    rounds: tl.tensor,
    waiting: tl.tensor,
    count: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> None:
    """One program: up to ROUNDS * BLOCK elements; it waits for its like on each rank, once.

    Which places of an inbox are a program's does not depend on `count`: nobody else may write there
    before it has read.

    `inboxes` is a tuple, in the order of ranks.
    """
    block = tl.program_id(0)
    number = tl.load(rounds + block) + 1
    half = (number & 1) * SIZE * PART
    first = block * BLOCK + tl.arange(0, BLOCK)
    for piece in tl.static_range(ROUNDS):
        place = first + piece * PROGRAMS * BLOCK
        own = tl.load(tensor + place, mask=place < count, other=0.0)
        for other in tl.static_range(SIZE):
            if other != RANK:
                tl.store(inboxes[other] + half + RANK * PART + place, own, mask=place < count)
    _meet(flags, flags_at, waiting, number, RANK, SIZE, LANES)
    tl.store(rounds + block, number)
    for piece in tl.static_range(ROUNDS):
        place = first + piece * PROGRAMS * BLOCK
        inbox = inboxes[RANK] + half + place
        total = _sum(tensor + place, inbox, place < count, RANK, SIZE, PART)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


@jit()
def _shared_kernel(
    tensor: tl.tensor,
    out: tl.tensor,
    inboxes: tl.tensor,
    flags: tl.tensor,
    flags_at: tl.tensor,
    rounds: tl.tensor,
    waiting: tl.tensor,
    count: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: up to SIZE * BLOCK elements, a block of each rank to add up; in two rounds.

    Places in an inbox are those of `_kernel`, of which any may follow.
    """
    block = tl.program_id(0)
    number = tl.load(rounds + block) + 1
    place = block * BLOCK + tl.arange(0, BLOCK)
    first = block * SIZE * BLOCK + tl.arange(0, BLOCK)
    half = (number & 1) * SIZE * PART
    for other in tl.static_range(SIZE):
        if other != RANK:
            inside = first + other * BLOCK < count
            share = tl.load(tensor + first + other * BLOCK, mask=inside, other=0.0)
            tl.store(inboxes[other] + half + RANK * PART + place, share, mask=inside)
    _meet(flags, flags_at, waiting, number, RANK, SIZE, LANES)
    ours = first + RANK * BLOCK
    inbox = inboxes[RANK] + half + place
    total = _sum(tensor + ours, inbox, ours < count, RANK, SIZE, PART).to(out.dtype.element_ty)
    tl.store(out + ours, total, mask=ours < count)
    number += 1
    half = (number & 1) * SIZE * PART
    for other in tl.static_range(SIZE):
        if other != RANK:
            tl.store(inboxes[other] + half + RANK * PART + place, total, mask=ours < count)
    _meet(flags, flags_at, waiting, number, RANK, SIZE, LANES)
    tl.store(rounds + block, number)
    for other in tl.static_range(SIZE):
        if other != RANK:
            inside, inbox = first + other * BLOCK < count, inboxes[RANK] + half + other * PART
            came = tl.load(inbox + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out + first + other * BLOCK, came, mask=inside)
