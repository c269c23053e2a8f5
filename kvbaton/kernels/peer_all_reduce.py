"""All-reduce in one kernel between GPUs that can write to each other's memory.

"One-shot": each rank writes its values into an inbox on each other rank, raises a flag there, waits
for the others' flags, and adds up in the order of ranks, so that all get the same bits. There is no
second synchronisation: an inbox has two halves, and a rank raises its next flag only after it has
read this half. NCCL's LL protocols and vendors' kernels follow this pattern.

"Two-shot", for larger tensors of more than two ranks: each rank receives its share of every tensor,
adds the shares up, and sends their sum to all. Four ranks then send half as much, but synchronise
twice.

The host reads no tensor, so a CUDA graph may capture it. If a rank never comes, the others wait
until `PeerMemory.abort`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl

BLOCK = 2048
"""Elements per block; a program handles one or several."""

MAX_BLOCKS = 1024
"""Most programs of a launch. Each waits for its twins on other ranks, so all must be resident."""

PAIR_ROUNDS = 4
"""Most blocks per program between two GPUs."""

SHARED_FROM = 64 * 4096
"""Elements beyond which more than two GPUs use "two-shot"."""

MOST_SHARED = 1024 * 4096
"""Most elements for more than two GPUs; for larger tensors NCCL's ring is faster."""


class PeerMemory:
    """Memory of an all-reduce, as one rank sees it.

    Args:
        rank: Number of this rank.
        inboxes: Per rank, flat [2, ranks, part] float32.
        flags: Per rank, flat [MAX_BLOCKS, ranks] int32: last round that each sender has written.
        rounds: This rank's [MAX_BLOCKS] int32: number of rounds of each program.
        waiting: This rank's [1] int32: 0 once kernels must not wait any more.

    Attributes:
        part: Most elements that one rank sends another per round.
        capacity: Elements of the largest tensor.
        flags_at: On this rank's device, [ranks] int64: addresses of `flags`.
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
        # Made now: while a rank waits, the driver may be unable to create a stream.
        self._aside = torch.cuda.Stream(rounds.device)  # type: ignore[no-untyped-call]

    def views(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The inboxes, viewed as a dtype."""
        if dtype not in self._views:
            self._views[dtype] = tuple(inbox.view(dtype) for inbox in self.inboxes)
        return self._views[dtype]

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is small enough for this all-reduce."""
        return tensor.numel() <= self.capacity

    def abort(self) -> None:
        """End all waiting of this rank; results are invalid from then on."""
        with torch.cuda.stream(self._aside):
            self.waiting.zero_()  # a memset: loading a kernel could wait for running ones


def peer_memories(devices: Sequence[torch.device]) -> list[PeerMemory]:
    """Allocate memory for one rank per device."""
    size = len(devices)
    part = MAX_BLOCKS * BLOCK * (PAIR_ROUNDS if size == 2 else 1)
    inboxes = [torch.empty(2 * size * part, dtype=torch.float32, device=d) for d in devices]
    flags, rounds = (
        [torch.zeros(count, dtype=torch.int32, device=d) for d in devices]
        for count in (MAX_BLOCKS * size, MAX_BLOCKS)
    )
    waiting = [torch.ones(1, dtype=torch.int32, device=d) for d in devices]
    for ours in inboxes:  # torch enables peer access at the first copy
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
        tensor: Contiguous tensor on the rank's device for which `PeerMemory.fits`.
        memory: Memory of the rank.

    Returns:
        The sum, of the shape and dtype of `tensor`.
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
    """Plain torch for `peer_all_reduce`, with all ranks' tensors on one device."""
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
