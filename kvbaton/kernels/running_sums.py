"""Digest sums kept up to date as tokens are written: no host in between, so a graph may hold it.

What a sum is: see `digest`. Addition wraps and commutes, so tokens are added in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbaton.kernels.digest import (
    position_weight,
    token_sums,
    tokens_together,
    word_view,
    word_weights,
)
from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton

BLOCK_T = 16


def start_sums(sums: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    """Zero the sums of every block whose first slot is in `slot_mapping`.

    Args:
        sums: [num_blocks, layers, kv, heads] int64, contiguous.
        slot_mapping: [T] int64: block * block_size + offset, or -1 for none.
        block_size: tokens per block.
    """
    if not use_triton(sums):
        first = (slot_mapping >= 0) & (slot_mapping % block_size == 0)
        sums[slot_mapping[first] // block_size] = 0
    elif len(slot_mapping):
        size = sums[0].numel()
        _start_kernel[(len(slot_mapping),)](
            sums, slot_mapping, size, BLOCK_SIZE=block_size, BLOCK=next_power_of_2(size)
        )


def add_sums(
    sums: Tensor, cache: Tensor, slot_mapping: Tensor, positions: Tensor, sign: int = 1
) -> None:
    """Add the sums of tokens, as they lie in the cache now, to those of their blocks.

    Args:
        sums: [num_blocks, layers, kv, heads] int64, contiguous.
        cache: [num_blocks, heads, layers, kv, block_size, D]; last axis contiguous, the other
            strides whole words.
        slot_mapping: [T] int64: block * block_size + offset, or -1 for none.
        positions: [T] int64, absolute.
        sign: 1, or -1 to take them out again.
    """
    if not use_triton(sums):
        add_sums_reference(sums, cache, slot_mapping, positions, sign)
        return
    words = word_view(cache)
    _, heads, layers, planes, block_size, num_words = words.shape
    tokens = len(slot_mapping)
    if not tokens:
        return
    weights = [word_weights(num_words, kv, cache.device) for kv in range(planes)]
    block_t = tokens_together(BLOCK_T, num_words)
    _kernel[(cdiv(tokens, block_t) * heads * layers * planes,)](
        words,
        torch.stack(weights),
        sums,
        slot_mapping,
        positions,
        tokens,
        sign,
        heads,
        layers,
        planes,
        *words.stride()[:5],
        BLOCK_SIZE=block_size,
        NUM_WORDS=num_words,
        BLOCK_T=block_t,
        BLOCK_W=next_power_of_2(num_words),
    )


def add_sums_reference(
    sums: Tensor, cache: Tensor, slot_mapping: Tensor, positions: Tensor, sign: int
) -> None:
    """Plain torch for `add_sums`."""
    _, heads, layers, planes, size, _ = cache.shape
    there = slot_mapping >= 0
    slots, positions = slot_mapping[there], positions[there]
    blocks = slots // size
    data = cache[blocks, :, :, :, slots % size]
    for kv in range(planes):
        rows = token_sums(data[:, :, :, kv].flatten(1, 2), positions, kv)
        rows = rows.view(-1, heads, layers).transpose(1, 2).contiguous()
        sums[:, :, kv].index_add_(0, blocks, rows, alpha=sign)


@jit("slot_mapping")
def _start_kernel(
    sums: tl.tensor,
    slot_mapping: tl.tensor,
    size: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one token."""
    slot = tl.load(slot_mapping + tl.program_id(0)).to(tl.int64)
    if (slot >= 0) & (slot % BLOCK_SIZE == 0):
        column = tl.arange(0, BLOCK)
        place = sums + slot // BLOCK_SIZE * size + column
        tl.store(place, tl.zeros([BLOCK], tl.int64), mask=column < size)


@jit("slot_mapping", "positions", "tokens", "sign")
def _kernel(
    words: tl.tensor,
    word_weights: tl.tensor,
    sums: tl.tensor,
    slot_mapping: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    sign: tl.tensor,
    heads: tl.tensor,
    layers: tl.tensor,
    planes: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_layer: tl.tensor,
    stride_kv: tl.tensor,
    stride_token: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """One program: BLOCK_T tokens of one (head, layer, kv)."""
    number = tl.program_id(0).to(tl.int64)
    kv = number % planes
    layer = number // planes % layers
    head = number // (planes * layers) % heads
    token = number // (planes * layers * heads) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1).to(tl.int64)
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    block = slot // BLOCK_SIZE
    place = block * stride_block + head * stride_head + layer * stride_layer + kv * stride_kv
    place += slot % BLOCK_SIZE * stride_token
    column = tl.arange(0, BLOCK_W)
    mask = there[:, None] & (column < NUM_WORDS)[None, :]
    data = tl.load(words + place[:, None] + column[None, :], mask=mask, other=0).to(tl.int64)
    weight = tl.load(word_weights + kv * NUM_WORDS + column, mask=column < NUM_WORDS, other=0)
    rows = tl.sum((data + 1) * weight[None, :], axis=1)
    rows *= position_weight(tl.load(positions + token, mask=there, other=0)) * sign
    target = sums + ((block * layers + layer) * planes + kv) * heads + head
    tl.atomic_add(target, rows, mask=there, sem="relaxed")
