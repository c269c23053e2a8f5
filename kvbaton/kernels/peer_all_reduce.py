"""All-reduce in one kernel between GPUs that can write to each other's memory.

"One-shot": each rank writes its values into an inbox on each other rank, raises a flag there, waits
for the others' flags, and adds up in the order of ranks, so that all get the same bits. NCCL's LL
protocols and vendors' kernels follow this pattern. A program does so row by row, and sends its next
row before it waits for this one: an inbox has four parts, and a rank that has raised flag n has
read all rows before n.

"Two-shot", for larger tensors of more than two ranks: each rank receives its share of every tensor,
adds the shares up, and sends their sum to all. Four ranks then send half as much, but synchronise
twice.

"One-shot" may also add the sum to the residual stream and normalise that (`rms_norm`), which is all
that a layer of most models does with a sum (TensorRT-LLM and FlashInfer fuse the same).

The host reads no tensor, so a CUDA graph may capture it. If a rank never comes, the others wait
until `PeerMemory.abort`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from kvbaton.kernels.few_rows_all_reduce import few_rows_all_reduce_norm
from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, wait_for_inputs
from kvbaton.kernels.peer_memory import (
    FEW_ROWS,
    PARTS,
    PROGRAMS,
    ROW_BYTES,
    SHARE,
    SHARED_FROM,
    PeerMemory,
    inbox_area,
    send_row,
)
from kvbaton.kernels.rms_norm import scaled

BLOCK = 4096
"""Elements per row of a tensor that is not normalised."""

REGISTERS = 64
"""Most registers of a thread: four programs of a row of `BLOCK` then fit on a multiprocessor."""


def peer_all_reduce(tensor: torch.Tensor, memory: PeerMemory) -> torch.Tensor:
    """Compute the sum of all ranks' tensors, accumulated in fp32.

    All ranks call it in the same order with equal shapes, on one stream each.

    Args:
        tensor: Contiguous tensor on the rank's device for which `PeerMemory.fits`.
        memory: Memory of the rank.

    Returns:
        The sum, of the shape and dtype of `tensor`.
    """
    if memory.size == 2 or tensor.numel() <= SHARED_FROM:
        return _one_shot(tensor, memory, BLOCK)
    out = torch.empty_like(tensor)
    _shared_kernel[(cdiv(tensor.numel(), SHARE * memory.size),)](
        tensor,
        out,
        *_arguments(memory, tensor),
        tensor.numel(),
        **_constants(memory, tensor),
        BLOCK=SHARE,
        num_warps=4,
    )
    return out


def peer_all_reduce_norm(
    tensor: torch.Tensor,
    memory: PeerMemory,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """Do as `rms_norm` with `residual` does, of the sum of all ranks' tensors.

    Args:
        tensor: Contiguous [T, N] for which `PeerMemory.fits_norm`.
        memory: Memory of the rank.
        residual: Contiguous [T, N], the same on all ranks; the sum is added in place.
        weight: [N], see `rms_norm`.
        eps: See `rms_norm`.
        weight_offset: See `rms_norm`.

    Returns:
        [T, N], of the dtype of `tensor`.
    """
    rows, width = tensor.shape
    if 0 < rows <= FEW_ROWS and width * tensor.itemsize % 4 == 0:
        return few_rows_all_reduce_norm(tensor, memory, residual, weight, eps, weight_offset)
    return _one_shot(tensor, memory, width, residual, weight, eps, weight_offset)


def _one_shot(
    tensor: torch.Tensor,
    memory: PeerMemory,
    width: int,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    out, count = torch.empty_like(tensor), tensor.numel()
    block = next_power_of_2(width)
    wide = cdiv(block, BLOCK)  # times as many registers
    if not count:
        return out
    _kernel[(min(cdiv(count, width), memory.programs // wide),)](
        tensor,
        out,
        tensor if residual is None else residual,
        tensor if weight is None else weight,
        *_arguments(memory, tensor),
        count,
        eps,
        **_constants(memory, tensor),
        WIDTH=width,
        BLOCK=block,
        NORM=residual is not None,
        WEIGHT_OFFSET=weight_offset,
        num_warps=8,
        maxnreg=REGISTERS * wide if memory.size == 2 else None,  # more ranks have few programs
    )
    return out


def _arguments(memory: PeerMemory, tensor: torch.Tensor) -> tuple[Any, ...]:
    flags, flags_at = memory.flags[memory.rank], memory.flags_at
    return memory.views(tensor.dtype), flags, flags_at, memory.rounds, memory.waiting


def _constants(memory: PeerMemory, tensor: torch.Tensor) -> dict[str, int]:
    return {
        "RANK": memory.rank,
        "SIZE": memory.size,
        "LANES": next_power_of_2(memory.size),
        "AREA": ROW_BYTES // tensor.itemsize,
        "PROGRAMS": PROGRAMS,
        "PARTS": PARTS,
    }


def peer_all_reduce_reference(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Plain torch for `peer_all_reduce`, with all ranks' tensors on one device."""
    return reduce(torch.add, (tensor.float() for tensor in tensors)).to(tensors[0].dtype)


@jit()
def _raise_flags(
    flags_at: tl.tensor,
    number: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Tell this program's twin on each other rank that a round has been written.

    By a lane for each rank, all at once: a release waits until what was written has arrived.
    """
    lanes = tl.arange(0, LANES)
    others = (lanes < SIZE) & (lanes != RANK)
    tl.debug_barrier()
    there = tl.load(flags_at + lanes, mask=others, other=0).to(tl.pointer_type(tl.int32))
    place = there + tl.program_id(0) * SIZE + RANK
    tl.atomic_xchg(place, number, mask=others, sem="release", scope="sys")


@jit()
def _await_flags(
    flags: tl.tensor,
    waiting: tl.tensor,
    number: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Wait until this program's twin on each other rank has written a round."""
    lanes = tl.arange(0, LANES)
    others = (lanes < SIZE) & (lanes != RANK)
    came = flags + tl.program_id(0) * SIZE + lanes
    behind = 1
    while behind > 0:  # a twin may be ahead, too; right also when rounds wrap
        seen = tl.atomic_add(came, 0, mask=others, sem="acquire", scope="sys")
        behind = tl.max(tl.where(others, number - seen, 0))
        behind = tl.where(tl.load(waiting, volatile=True) == 1, behind, 0)
    tl.debug_barrier()


@jit()
def _inside(
    start: tl.tensor, column: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr, NORM: tl.constexpr
) -> tl.tensor:
    """Which columns of the row at `start` exist; without norm, the last row may be shorter."""
    inside = column < WIDTH
    if not NORM:
        inside &= start + column < count
    return inside


@jit()
def _received(
    inbox: tl.tensor,
    inside: tl.tensor,
    sender: tl.constexpr,
    number: tl.tensor,
    column: tl.tensor,
    SIZE: tl.constexpr,
    AREA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """The row that a sender wrote into this program's area of our inbox."""
    area = inbox_area(sender, number, SIZE, AREA, PROGRAMS, PARTS)
    return tl.load(inbox + area + column, mask=inside, other=0.0, cache_modifier=".cg")


@jit()
def _sum(
    own: tl.tensor,
    inbox: tl.tensor,
    inside: tl.tensor,
    number: tl.tensor,
    column: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    AREA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """What ranks sent in a round, and ours, added up in their order."""
    total = tl.zeros(inside.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            came = _received(inbox, inside, rank, number, column, SIZE, AREA, PROGRAMS, PARTS)
            total += came.to(tl.float32)
    return total.to(own.dtype)


@jit(early=True)
def _kernel(
    tensor: tl.tensor,
    out: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    inboxes: tl.tensor,
    flags: tl.tensor,
    flags_at: tl.tensor,
    rounds: tl.tensor,
    waiting: tl.tensor,
    count: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    AREA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
) -> None:
    """One program: a row of WIDTH elements in each round.

    Which places of an inbox are a program's does not depend on `count`: nobody else may write there
    before it has read.

    `inboxes` is a tuple, in the order of ranks.
    """
    wait_for_inputs()
    column = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * WIDTH
    number = tl.load(rounds + tl.program_id(0)) + 1
    start = tl.program_id(0).to(tl.int64) * WIDTH
    inside = _inside(start, column, count, WIDTH, NORM)
    own = tl.load(tensor + start + column, mask=inside, other=0.0)
    send_row(own, inside, inboxes, number, column, RANK, SIZE, AREA, PROGRAMS, PARTS)
    _raise_flags(flags_at, number, RANK, SIZE, LANES)
    while start < count:
        inside = _inside(start, column, count, WIDTH, NORM)
        own = tl.load(tensor + start + column, mask=inside, other=0.0)
        later = start + step
        if later < count:
            within = _inside(later, column, count, WIDTH, NORM)
            ahead = tl.load(tensor + later + column, mask=within, other=0.0)
            send_row(ahead, within, inboxes, number + 1, column, RANK, SIZE, AREA, PROGRAMS, PARTS)
        inbox, place = inboxes[RANK], start + column
        if NORM:  # loaded while the others' rows come
            stream = tl.load(residual + place, mask=inside, other=0.0)
            scale = tl.load(weight + column, mask=inside, other=0.0)
        _await_flags(flags, waiting, number, RANK, SIZE, LANES)
        total = _sum(own, inbox, inside, number, column, RANK, SIZE, AREA, PROGRAMS, PARTS)
        if NORM:
            total = (total.to(tl.float32) + stream.to(tl.float32)).to(own.dtype)
            tl.store(residual + place, total, mask=inside)
            wide = total.to(tl.float32)
            factor = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
            total = scaled(wide, factor, scale.to(tl.float32), own.dtype, WEIGHT_OFFSET)
        tl.store(out + place, total.to(own.dtype), mask=inside)
        start = later
        number += 1
        if start < count:  # raised only now, since that waits until the row has arrived
            _raise_flags(flags_at, number, RANK, SIZE, LANES)
    tl.store(rounds + tl.program_id(0), number - 1)


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
    AREA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: a share of BLOCK elements of each rank to add up, in two rounds.

    Places in an inbox are those of `_kernel`, which may follow.
    """
    column = tl.arange(0, BLOCK)
    number = tl.load(rounds + tl.program_id(0)) + 1
    first = tl.program_id(0) * SIZE * BLOCK + column
    area = inbox_area(RANK, number, SIZE, AREA, PROGRAMS, PARTS)
    for other in tl.static_range(SIZE):
        if other != RANK:
            inside = first + other * BLOCK < count
            share = tl.load(tensor + first + other * BLOCK, mask=inside, other=0.0)
            tl.store(inboxes[other] + area + column, share, mask=inside)
    _raise_flags(flags_at, number, RANK, SIZE, LANES)
    _await_flags(flags, waiting, number, RANK, SIZE, LANES)
    place, inbox = first + RANK * BLOCK, inboxes[RANK]
    inside = place < count
    own = tl.load(tensor + place, mask=inside, other=0.0)
    total = _sum(own, inbox, inside, number, column, RANK, SIZE, AREA, PROGRAMS, PARTS)
    tl.store(out + place, total, mask=inside)
    number += 1
    send_row(total, inside, inboxes, number, column, RANK, SIZE, AREA, PROGRAMS, PARTS)
    _raise_flags(flags_at, number, RANK, SIZE, LANES)
    _await_flags(flags, waiting, number, RANK, SIZE, LANES)
    tl.store(rounds + tl.program_id(0), number)
    for other in tl.static_range(SIZE):
        if other != RANK:
            inside = first + other * BLOCK < count
            came = _received(inbox, inside, other, number, column, SIZE, AREA, PROGRAMS, PARTS)
            tl.store(out + first + other * BLOCK, came, mask=inside)
