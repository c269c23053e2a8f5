"""Gather tokens of a sequence from its pages: contiguous keys or values."""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton
from kvbaton.kernels.paged_attention import load_pages

BLOCK_T = 16


def gather_pages(
    cache: torch.Tensor, block_table: torch.Tensor, start: int, tokens: int, valid: int
) -> torch.Tensor:
    """Tokens from position `start` on of one sequence, zero past the first `valid` of them.

    One launch, no synchronisation.

    Args:
        cache: [num_blocks, heads, block_size, D]; last axis contiguous, else any strides.
        block_table: [blocks], int32 or int64, in logical order; blocks past `valid` are not read.
        start: position of the first token.
        tokens: how many.
        valid: tokens of them that are there.

    Returns:
        [heads, tokens, D].
    """
    heads, block_size, head_dim = cache.shape[1:]
    out = torch.empty(heads, tokens, head_dim, dtype=cache.dtype, device=cache.device)
    if not use_triton(cache):
        at = start + torch.arange(min(valid, tokens), device=cache.device)
        rows = cache[block_table[at // block_size].long(), :, at % block_size]
        out[:, : len(at)], out[:, len(at) :] = rows.transpose(0, 1), 0
        return out
    _kernel[(cdiv(tokens, BLOCK_T), heads)](
        cache,
        block_table,
        out,
        start,
        tokens,
        valid,
        *cache.stride()[:3],
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_T=BLOCK_T,
        num_warps=4,
    )
    return out


@jit("block_table", "start", "tokens", "valid")
def _kernel(
    cache: tl.tensor,
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
    """One program: BLOCK_T tokens of one head."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    there, place = token < tl.minimum(valid, tokens), start + token
    block = tl.load(block_table + place // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    rows = load_pages(
        cache + head * stride_head, block, place, there, stride_block, stride_token,
        HEAD_DIM, BLOCK_D, BLOCK_SIZE,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    target = out + (head * tokens + token)[:, None] * HEAD_DIM + column[None, :]
    tl.store(target, rows, mask=(token < tokens)[:, None] & (column < HEAD_DIM)[None, :])
