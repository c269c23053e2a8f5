"""An all-reduce in one kernel between GPUs that can write into each other's memory.

Every rank writes its values straight into an inbox on each other rank, raises a flag there, waits
for the others' flags, and adds up in the order of ranks, so that all get the same bits. There is no
second meeting at the end: an inbox has two halves, and a rank raises its next flag only after it
has read this half. The pattern is that of NCCL's LL protocols and of vendors' "one-shot" kernels.

Nothing is read on the host, so a CUDA graph may capture it. A rank that never comes keeps the
others waiting until `PeerMemory.abort`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from kvbaton.kernels.jit import cdiv, jit, tl

BLOCK = 2048
"""Elements of a program."""

MAX_BLOCKS = 1024
"""Programs that are on the GPU at the same time, whatever else is: each waits for its twin."""

PAIR_ROUNDS = 4
"""Blocks of a program between two GPUs at most. Of more GPUs each would receive as much from all
the others, where NCCL's ring is the faster way."""


class PeerMemory:
    """What an all-reduce needs on all GPUs; made before any rank uses it.

    Attributes:
        capacity: elements of the largest tensor.
        inboxes: per rank, [2, size, capacity] of 4 bytes.
        flags: per rank, [MAX_BLOCKS, size] int32: the last round for which a sender has written.
        rounds: per rank, [MAX_BLOCKS] int32: rounds of each program.
        waiting: per rank, [1] int32: 0 once nobody shall wait any more.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        size = len(devices)
        self.capacity = MAX_BLOCKS * BLOCK * (PAIR_ROUNDS if size == 2 else 1)
        elements = 2 * size * self.capacity
        self.inboxes = [torch.empty(elements, dtype=torch.float32, device=d) for d in devices]
        self.flags, self.rounds = (
            [torch.zeros(count, dtype=torch.int32, device=d) for d in devices]
            for count in (MAX_BLOCKS * size, MAX_BLOCKS)
        )
        self.waiting = [torch.ones(1, dtype=torch.int32, device=d) for d in devices]
        self._views: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        for ours in self.inboxes:  # torch makes memory reachable with the first copy
            for theirs in self.inboxes:
                ours[:1].copy_(theirs[:1])
        for device in devices:
            torch.cuda.synchronize(device)

    def views(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The inboxes as elements of a dtype."""
        if dtype not in self._views:
            self._views[dtype] = tuple(inbox.view(dtype) for inbox in self.inboxes)
        return self._views[dtype]

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is small enough."""
        return tensor.numel() <= self.capacity

    def abort(self) -> None:
        """Let nobody wait any more; what they then have is no sum."""
        for waiting in self.waiting:
            with torch.cuda.stream(torch.cuda.Stream(waiting.device)):  # type: ignore[no-untyped-call]
                waiting.zero_()  # no kernel: to load one could wait for those that wait


def peer_all_reduce(tensor: torch.Tensor, memory: PeerMemory, rank: int) -> torch.Tensor:
    """Compute the sum of all ranks' tensors, accumulated in fp32.

    All ranks call it in the same order with equal shapes, on one stream each.

    Args:
        tensor: contiguous, on the rank's device; see `PeerMemory.fits`.
        memory: of all ranks.
        rank: whose tensor it is.

    Returns:
        As `tensor`.
    """
    out = torch.empty_like(tensor)
    count = tensor.numel()
    if not count:
        return out
    _kernel[(min(cdiv(count, BLOCK), MAX_BLOCKS),)](
        tensor,
        out,
        memory.views(tensor.dtype),
        tuple(memory.flags),
        memory.rounds[rank],
        memory.waiting[rank],
        count,
        RANK=rank,
        SIZE=len(memory.inboxes),
        CAPACITY=memory.capacity,
        ROUNDS=cdiv(count, MAX_BLOCKS * BLOCK),
        PROGRAMS=MAX_BLOCKS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


def peer_all_reduce_reference(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Plain torch for `peer_all_reduce`, of all ranks' tensors on one device."""
    return reduce(torch.add, (tensor.float() for tensor in tensors)).to(tensors[0].dtype)


@jit()
def _kernel(
    tensor: tl.tensor,
    out: tl.tensor,
    inboxes: tl.tensor,
    flags: tl.tensor,
    rounds: tl.tensor,
    waiting: tl.tensor,
    count: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROUNDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: up to ROUNDS * BLOCK elements; it waits for its like on each rank, once.

    Which places of an inbox are a program's does not depend on `count`: nobody else may write there
    before it has read.

    `inboxes` and `flags` are tuples, in the order of ranks.
    """
    block = tl.program_id(0)
    number = tl.load(rounds + block) + 1
    half = (number & 1) * SIZE
    first = block * BLOCK + tl.arange(0, BLOCK)
    for piece in tl.static_range(ROUNDS):
        place = first + piece * PROGRAMS * BLOCK
        own = tl.load(tensor + place, mask=place < count, other=0.0)
        for other in tl.static_range(SIZE):
            if other != RANK:
                inbox = inboxes[other] + (half + RANK) * CAPACITY
                tl.store(inbox + place, own, mask=place < count)
    tl.debug_barrier()
    tl.store(rounds + block, number)
    for other in tl.static_range(SIZE):
        if other != RANK:
            flag = flags[other] + block * SIZE + RANK
            tl.atomic_xchg(flag, number, sem="release", scope="sys")
    for other in tl.static_range(SIZE):
        if other != RANK:
            flag = flags[RANK] + block * SIZE + other
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while seen - number < 0:  # it may be ahead, too; right also when rounds wrap
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                seen = tl.where(tl.load(waiting, volatile=True) == 1, seen, number)
    tl.debug_barrier()
    for piece in tl.static_range(ROUNDS):
        place = first + piece * PROGRAMS * BLOCK
        inside = place < count
        total = tl.zeros([BLOCK], tl.float32)
        for other in tl.static_range(SIZE):
            if other == RANK:
                total += tl.load(tensor + place, mask=inside, other=0.0).to(tl.float32)
            else:
                came = inboxes[RANK] + (half + other) * CAPACITY + place
                part = tl.load(came, mask=inside, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
