"""Gather the keys and values of a sequence's tokens from its pages into contiguous tensors."""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton
from kvbaton.kernels.paged_attention import load_pages

BLOCK_T = 16


def gather_pages(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    start: int,
    tokens: int,
    valid: int,
) -> torch.Tensor:
    """Gather `tokens` tokens of one sequence from position `start` on; all after `valid` are zero.

    One launch, without synchronisation.

    Args:
        key_cache: [num_blocks, heads, block_size, D]; last axis contiguous, the others
            of any stride.
        value_cache: Like `key_cache`, with the same strides.
        block_table: [blocks], int32 or int64, in logical order; blocks past `valid` are not read.
        start: Position of the first token.
        tokens: Number of tokens to return.
        valid: Number of tokens that the cache holds from `start` on.

    Returns:
        Keys and values, [2, heads, tokens, D].
    """
    heads, block_size, head_dim = key_cache.shape[1:]
    shape = 2, heads, tokens, head_dim
    out = torch.empty(shape, dtype=key_cache.dtype, device=key_cache.device)
    if not use_triton(key_cache):
        at = start + torch.arange(min(valid, tokens), device=key_cache.device)
        places = block_table[at // block_size].long(), slice(None), at % block_size
        for cache, rows in zip((key_cache, value_cache), out, strict=True):
            rows[:, : len(at)], rows[:, len(at) :] = cache[places].transpose(0, 1), 0
        return out
    _kernel[(cdiv(tokens, BLOCK_T), heads, 2)](
        key_cache,
        value_cache,
        block_table,
        out,
        start,
        tokens,
        valid,
        *key_cache.stride()[:3],
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_T=BLOCK_T,
        num_warps=4,
    )
    return out


@jit("block_table", "start", "tokens", "valid")
def _kernel(
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    out: tl.tensor,
    start: tl.tensor,
    tokens: tl.tensor,
    valid: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """One program: BLOCK_T tokens of one head, keys or values."""
    head, of_values = tl.program_id(1).to(tl.int64), tl.program_id(2)
    cache = value_cache if of_values else key_cache
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    there, place = token < tl.minimum(valid, tokens), start + token
    block = tl.load(block_table + place // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    rows = load_pages(
        cache + head * stride_head, block, place, there, stride_block, stride_token,
        HEAD_DIM, BLOCK_D, BLOCK_SIZE,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    row = (of_values * tl.num_programs(1) + head) * tokens + token
    target = out + row[:, None] * HEAD_DIM + column[None, :]
    tl.store(target, rows, mask=(token < tokens)[:, None] & (column < HEAD_DIM)[None, :])
