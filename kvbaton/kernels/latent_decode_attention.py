"""Paged decode attention over latents (MLA): one query per sequence, split over its keys.

A row of the cache is the latent, then the rotated part of the key. The latent is the value and the
rest of the key for all heads, which share rows as if they had one KV head (DeepSeek-AI,
"DeepSeek-V2", arXiv 2405.04434, section 2.1; `decode_parts` for the split). Each tile of rows is
loaded once, for both products.
"""

from __future__ import annotations

from typing import Any

import torch

from kvbaton.kernels.decode_attention import decode_attention_reference
from kvbaton.kernels.decode_parts import FIELDS, Parts, merge_parts, part_at, share_keys
from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton, wait_for_inputs
from kvbaton.kernels.paged_attention import Softmax
from kvbaton.kernels.quantize_fp8 import widen

BLOCK_H = 16
"""Query heads per program."""

PLACES = 264
"""Programs that an H100 or H200 runs at a time: two on each of its 132 multiprocessors."""

MERGED = 128
"""Number of features per program of the merge kernel."""


def latent_decode_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    parts: Parts | None = None,
) -> torch.Tensor:
    """Compute softmax(scale * q k^T) v; k are a sequence's rows, v their first `rank` features.

    The host reads no tensor, and the grid depends on shapes only: a CUDA graph may capture the
    launch and replay it with other lengths.

    Args:
        query: [B, heads, rank], part of the query for latents; any strides before the last axis.
        query_rope: [B, heads, rope], part for the rotated features; strides as for `query`.
        cache: [num_blocks, block_size, rank + rope], of the query's dtype or float8_e4m3fn; any
            strides before the last axis.
        block_tables: [B, max_blocks], int32; any stride between rows.
        context_lens: [B], int32: tokens of each sequence, including the query's; 0 is padding.
        scale: Scale of the logits.
        parts: Result of `latent_decode_parts` for these lengths; None computes it.

    Returns:
        [B, heads, rank], contiguous; 0 in padding.
    """
    if not use_triton(query):
        return latent_decode_attention_reference(
            query, query_rope, cache, block_tables, context_lens, scale=scale
        )
    (batch, heads, rank), rope = query.shape, query_rope.shape[2]
    out = torch.empty(batch, heads, rank, dtype=query.dtype, device=query.device)
    if not batch:
        return out
    if parts is None:
        parts = latent_decode_parts(query, context_lens)
    block_n, options = tile(query.element_size())
    states = torch.empty(len(parts.fields), heads, rank, dtype=torch.float32, device=out.device)
    lse = torch.empty(len(parts.fields), heads, dtype=torch.float32, device=out.device)
    _kernel[(cdiv(heads, BLOCK_H), len(parts.fields))](
        query,
        query_rope,
        cache,
        block_tables,
        parts.fields,
        out,
        states,
        lse,
        scale,
        heads,
        *query.stride()[:2],
        *query_rope.stride()[:2],
        *cache.stride()[:2],
        block_tables.stride(0),
        RANK=rank,
        BLOCK_R=next_power_of_2(rank),
        ROPE=rope,
        BLOCK_P=max(16, next_power_of_2(rope)),
        BLOCK_H=BLOCK_H,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_N=block_n,
        STRIDE=FIELDS,
        **options,
    )
    return merge_parts(states, lse, parts, out, MERGED)


def latent_decode_parts(
    query: torch.Tensor, context_lens: torch.Tensor, *, spare: int | None = None
) -> Parts:
    """Split rows among programs, for all layers with these shapes.

    The arguments are those of `latent_decode_attention` and `share_keys`.
    """
    rows, _ = tile(query.element_size())
    programs = cdiv(query.shape[1], BLOCK_H)
    return share_keys(context_lens, programs, rows, places=PLACES, spare=spare)


def latent_decode_attention_reference(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Plain torch for `latent_decode_attention`."""
    rank, whole, keys = query.shape[2], torch.cat((query, query_rope), dim=-1), cache[:, None]
    values, softmax = keys[..., :rank], Softmax(scale)
    return decode_attention_reference(whole, keys, values, block_tables, context_lens, softmax)


def tile(element_size: int) -> tuple[int, dict[str, int]]:
    """Rows per tile, and launch options: several programs of 576 features fit a multiprocessor."""
    if element_size > 2:
        return 16, {"num_stages": 1, "num_warps": 8}
    return 32, {"num_stages": 3, "num_warps": 4}


@jit("fields", early=True)
def _kernel(
    query: tl.tensor,
    query_rope: tl.tensor,
    cache: tl.tensor,
    block_tables: tl.tensor,
    fields: tl.tensor,
    out: tl.tensor,
    states: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_p_token: tl.tensor,
    stride_p_head: tl.tensor,
    stride_block: tl.tensor,
    stride_row: tl.tensor,
    stride_table: tl.tensor,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIDE: tl.constexpr,
) -> None:
    """One program: one part of one sequence for BLOCK_H heads."""
    wait_for_inputs()
    of, length, begin, end, _part, used = part_at(fields, STRIDE, tl.program_id(1))
    if of < 0:
        return
    sequence = of.to(tl.int64)

    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = head < heads
    place = sequence * stride_q_token + head * stride_q_head
    q = _row(query + place[:, None], inside, RANK, BLOCK_R)
    place = sequence * stride_p_token + head * stride_p_head
    p = _row(query_rope + place[:, None], inside, ROPE, BLOCK_P)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    table = block_tables + sequence * stride_table
    for number in tl.range(begin, end):
        token = number * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = token < length
        block = tl.load(table + token // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        row = cache + (block * stride_block + token % BLOCK_SIZE * stride_row)[:, None]
        latent = widen(_row(row, valid, RANK, BLOCK_R), q)
        turned = widen(_row(row + RANK, valid, ROPE, BLOCK_P), q)
        logits = tl.dot(q, tl.trans(latent), input_precision="ieee")
        logits = tl.dot(p, tl.trans(turned), logits, input_precision="ieee")
        logits = logits * (scale * 1.4426950408889634)
        logits = tl.where(valid[None, :], logits, float("-inf"))
        # Every tile holds a valid key, so `higher` is finite.
        higher = tl.maximum(top, tl.max(logits, 1))
        weight = tl.exp2(logits - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(latent.dtype), latent, acc, input_precision="ieee")
        top = higher

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    column = tl.arange(0, BLOCK_R)
    mask = inside[:, None] & (column < RANK)[None, :]
    if used == 1:
        target = out + (sequence * heads + head)[:, None] * RANK + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)
    else:
        item = tl.program_id(1).to(tl.int64) * heads + head
        tl.store(lse + item, top + tl.log2(total), mask=inside)
        tl.store(states + item[:, None] * RANK + column[None, :], acc, mask=mask)


@jit()
def _row(rows: tl.tensor, valid: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    """[n, BLOCK] of rows that begin at `rows`; zero where not valid: slots may hold NaN."""
    column = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if SIZE != BLOCK:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(rows + column[None, :], mask=mask, other=0.0)
