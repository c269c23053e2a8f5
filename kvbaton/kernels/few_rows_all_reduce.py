"""All-reduce of a few rows, with the residual addition and the norm that follow, by flagged words.

A rank sends each word of 32 bits together with the number of the round, as 64 bits that arrive at
once (NCCL's protocol "LL"). So the receiver needs no flag beside the data, and the sender need not
wait until its data has arrived: a sum takes one trip between the GPUs. An inbox has two parts: a
rank that has sent round n has read all before it.
"""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import jit, next_power_of_2, tl, wait_for_inputs
from kvbaton.kernels.peer_memory import (
    FEW_PARTS,
    FEW_ROWS,
    PROGRAMS,
    ROW_BYTES,
    PeerMemory,
    inbox_area,
    send_row,
)
from kvbaton.kernels.rms_norm import scaled


def few_rows_all_reduce_norm(
    tensor: torch.Tensor,
    memory: PeerMemory,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """See `peer_all_reduce_norm`; for up to FEW_ROWS rows of whole words of 32 bits."""
    out = torch.empty_like(tensor)
    words = tensor.shape[1] * tensor.itemsize // 4
    _kernel[(len(tensor),)](
        *(each.view(torch.int32) for each in (tensor, out, residual, weight)),
        memory.few_rows,
        memory.rounds[PROGRAMS:],
        memory.waiting,
        eps,
        RANK=memory.rank,
        SIZE=memory.size,
        PARTS=FEW_PARTS,
        ROWS=FEW_ROWS,
        AREA=ROW_BYTES // 4,
        WIDTH=tensor.shape[1],
        WORDS=words,
        BLOCK=next_power_of_2(words),
        DTYPE=_TYPES[tensor.dtype],
        HALVES=tensor.itemsize == 2,
        WEIGHT_OFFSET=weight_offset,
        num_warps=8,
    )
    return out


_TYPES = {} if tl is None else {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
}  # fmt: skip


@jit()
def _unpacked(
    words: tl.tensor, DTYPE: tl.constexpr, HALVES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The two halves of words as fp32; without halves, the words and zeros."""
    if not HALVES:
        return words.to(tl.float32, bitcast=True), tl.zeros(words.shape, tl.float32)
    else:
        low = words.to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@jit()
def _packed(
    low: tl.tensor, high: tl.tensor, DTYPE: tl.constexpr, HALVES: tl.constexpr
) -> tl.tensor:
    """Do the reverse of `_unpacked`, with rounding."""
    if not HALVES:
        return low.to(tl.int32, bitcast=True)
    else:
        left = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return left | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@jit(early=True)
def _kernel(
    tensor: tl.tensor,
    out: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    inboxes: tl.tensor,
    rounds: tl.tensor,
    waiting: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    AREA: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    HALVES: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
) -> None:
    """One program: a row. `inboxes` is a tuple, in the order of ranks; the rest are words."""
    wait_for_inputs()
    row, word = tl.program_id(0), tl.arange(0, BLOCK)
    inside, place = word < WORDS, row * WORDS + word
    number = tl.load(rounds + row) + 1
    flag = number.to(tl.int64) << 32
    own = tl.load(tensor + place, mask=inside, other=0)
    message = flag | (own.to(tl.int64) & 0xFFFFFFFF)
    send_row(message, inside, inboxes, number, word, RANK, SIZE, AREA, ROWS, PARTS)
    low, high = _unpacked(tl.load(residual + place, mask=inside, other=0), DTYPE, HALVES)
    left, right = _unpacked(tl.load(weight + word, mask=inside, other=0), DTYPE, HALVES)
    sum_low, sum_high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        words = own
        if rank != RANK:
            came = inboxes[RANK] + inbox_area(rank, number, SIZE, AREA, ROWS, PARTS) + word
            seen = tl.load(came, mask=inside, other=flag, volatile=True)
            while tl.max(((seen >> 32) != number).to(tl.int32)) > 0:
                seen = tl.load(came, mask=inside, other=flag, volatile=True)
                seen = tl.where(tl.load(waiting, volatile=True) == 1, seen, flag)
            words = seen.to(tl.int32)
        of_low, of_high = _unpacked(words, DTYPE, HALVES)
        sum_low += of_low
        sum_high += of_high
    low += sum_low.to(DTYPE).to(tl.float32)
    high += sum_high.to(DTYPE).to(tl.float32)
    total = _packed(low, high, DTYPE, HALVES)
    tl.store(residual + place, total, mask=inside)
    low, high = _unpacked(total, DTYPE, HALVES)
    factor = tl.rsqrt(tl.sum(low * low + high * high) / WIDTH + eps)
    low = scaled(low, factor, left, DTYPE, WEIGHT_OFFSET)
    high = scaled(high, factor, right, DTYPE, WEIGHT_OFFSET)
    tl.store(out + place, _packed(low, high, DTYPE, HALVES), mask=inside)
    tl.store(rounds + row, number)
