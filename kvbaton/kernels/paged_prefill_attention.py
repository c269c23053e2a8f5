"""Paged prefill attention: several queries per sequence, with or without a cached prefix.

Source: Dao, "FlashAttention-2", arXiv 2307.08691; the query heads of one KV head share a tile. Few
queries after a long prefix have too few tiles to fill a GPU. The keys of a tile are then split into
parts, which the tile's last program merges in order (Dao et al., "Flash-Decoding for long-context
inference", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvbaton.kernels.jit import cdiv, is_last, jit, next_power_of_2, tl, use_triton
from kvbaton.kernels.paged_attention import (
    Softmax,
    cap_logits,
    first_key,
    load_pages,
    paged_attention_reference,
)
from kvbaton.kernels.quantize_fp8 import widen

MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200."""

MOST_PARTS, LEAST_TILES = 32, 4
"""Most parts of the keys of one tile of queries, and least tiles of keys per part."""


def paged_prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: Sequence[int],
    softmax: Softmax,
    *,
    last_keys: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    parts: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal softmax(scale * q k^T) v for the queries of each sequence's last tokens.

    The host reads no tensor; the grid depends on shapes and `query_lens` only.

    Args:
        query: [T, heads, D], sequences concatenated; last axis contiguous, D >= 16.
        key_cache: [num_blocks, kv_heads, block_size, D], of the query's dtype or float8_e4m3fn; any
            strides before the last axis.
        value_cache: Like `key_cache`, with the same strides.
        block_tables: [N, max_blocks], int32.
        cu_seqlens: [N + 1], int32: start of each sequence's queries; then T.
        context_lens: [N], int32: keys of each sequence, including those of its queries.
        query_lens: Queries per sequence; sum and maximum must not be less than the actual ones.
        softmax: Scale, mask and form of the softmax.
        last_keys: [T], int32: last position that each query attends to, its own or a later one of
            its sequence; None for its own.
        counters: [>= (queries + N) * kv_heads], int32, zero between launches, for launches on one
            stream at a time; None allocates them for this call.
        parts: Most parts of the keys of a tile; None for as many as fill the GPU.
        out: [T, heads, D], contiguous: written where `cu_seqlens` has queries; None allocates it.

    Returns:
        [T, heads, D].
    """
    if not use_triton(query):
        batch = block_tables, cu_seqlens, context_lens
        result = paged_prefill_attention_reference(
            query, key_cache, value_cache, *batch, softmax, last_keys
        )
        if out is None:
            return result
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        out[first:last] = result[first:last]
        return out
    scale, window, chunked, softcap, sinks = softmax
    tokens, heads, head_dim = query.shape
    kv_heads, block_size = key_cache.shape[1:3]
    if out is None:
        out = torch.empty(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
    if not tokens:
        return out
    group = next_power_of_2(heads // kv_heads)
    max_context = block_tables.shape[1] * block_size
    block_d, longest = next_power_of_2(head_dim), max(query_lens)
    tile = _tile(block_d, query.element_size(), longest * group, max_context)
    rows = max(tile["BLOCK_M"] // group, 1)
    block_m = rows * group
    if parts is None:
        places = MULTIPROCESSORS * max(64 // block_m, 1)
        tiles = sum(cdiv(count, rows) for count in query_lens) * kv_heads
        parts = min(max(places // tiles, 1), MOST_PARTS)
    tiles = (sum(query_lens) // rows + len(block_tables)) * kv_heads
    size = tiles * parts * block_m * (block_d + 2) if parts > 1 else 0
    states = torch.empty(size, dtype=torch.float32, device=out.device)
    if counters is None:
        counters = torch.zeros(tiles, dtype=torch.int32, device=out.device)
    grid = (cdiv(longest, rows) * parts, kv_heads, block_tables.shape[0])
    _kernel[grid](
        query,
        key_cache,
        value_cache,
        block_tables,
        cu_seqlens,
        context_lens,
        sinks,
        last_keys,
        out,
        states,
        counters,
        parts,
        scale,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        GROUP=heads // kv_heads,
        BLOCK_G=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=block_size,
        LEAST=LEAST_TILES,
        WINDOW=window,
        CHUNKED=chunked,
        SOFTCAP=softcap,
        HAS_SINKS=sinks is not None,
        HAS_LAST=last_keys is not None,
        **{**tile, "BLOCK_M": block_m},
    )
    return out


def paged_prefill_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    softmax: Softmax,
    last_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch for `paged_prefill_attention`."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    bounds = cu_seqlens.tolist()
    for row, context_len in enumerate(context_lens.tolist()):
        span = slice(bounds[row], bounds[row + 1])
        if span.start < span.stop and context_len:
            last = None if last_keys is None else last_keys[span]
            out[span] = paged_attention_reference(
                query[span], key_cache, value_cache, block_tables[row], context_len, softmax, last
            )
    return out


def _tile(block_d: int, element_size: int, rows: int, max_context: int) -> dict[str, int]:
    """Query rows and keys per tile, pipeline stages and warps: the fastest on an H200."""
    row_bytes = block_d * element_size
    block_m = min(128 if row_bytes <= 256 else 64, max(16, next_power_of_2(rows)))
    if row_bytes > 512:  # queries, and float32 sums of values, need the registers of more warps
        return {"BLOCK_M": min(block_m, 32), "BLOCK_N": 16, "num_stages": 2, "num_warps": 8}
    if row_bytes > 256:
        return {"BLOCK_M": block_m, "BLOCK_N": 32, "num_stages": 2, "num_warps": 4}
    if block_m == 128 and max_context >= 2048:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 3, "num_warps": 8}
    return {"BLOCK_M": min(block_m, 64), "BLOCK_N": 64, "num_stages": 2, "num_warps": 4}


@jit("block_tables", "cu_seqlens", "context_lens", "last_keys", "counters", "parts")
def _kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    cu_seqlens: tl.tensor,
    context_lens: tl.tensor,
    sinks: tl.tensor,
    last_keys: tl.tensor,
    out: tl.tensor,
    states: tl.tensor,
    counters: tl.tensor,
    parts: tl.tensor,
    scale: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    stride_table: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LAST: tl.constexpr,
) -> None:
    """One program: BLOCK_M rows (token, query head) of one KV head of one sequence, some keys.

    The last one of a tile's programs merges what they found.
    """
    # Tiles with the most keys start first, so that none of them is left for the end.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    tile_m, part = number // parts, number % parts
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_seqlens + sequence)
    query_len = tl.load(cu_seqlens + sequence + 1) - start
    length = tl.load(context_lens + sequence)
    TOKENS: tl.constexpr = BLOCK_M // BLOCK_G
    token0 = tile_m * TOKENS
    if token0 >= query_len:
        return
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    token = token0 + row // BLOCK_G
    query_head = head * GROUP + row % BLOCK_G
    inside = (token < query_len) & (row % BLOCK_G < GROUP)
    both = inside[:, None] & (column < HEAD_DIM)[None, :]
    global_token = (start + token).to(tl.int64)
    place = global_token * stride_q_token + query_head * stride_q_head
    q = tl.load(query + place[:, None] + column[None, :], mask=both, other=0.0)

    position = length - query_len + token
    position0 = length - query_len + token0
    last_key = position
    if HAS_LAST:
        last_key = tl.load(last_keys + global_token, mask=inside, other=0)
    last = tl.minimum(position0 + TOKENS, length)
    if HAS_LAST:
        last = tl.minimum(tl.max(last_key, 0) + 1, length)
    begin, full, end = 0, tl.minimum(position0 + 1, length) // BLOCK_N, tl.cdiv(last, BLOCK_N)
    first = 0
    if WINDOW > 0:
        first = first_key(position0, WINDOW, CHUNKED)
        begin = first // BLOCK_N
        full = begin
    share = tl.maximum(tl.cdiv(end - begin, parts), LEAST)
    used = tl.maximum(tl.cdiv(end - begin, share), 1)
    if part >= used:
        return
    begin += part * share
    end = tl.minimum(begin + share, end)
    full = tl.minimum(tl.maximum(full, begin), end)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=inside, other=0.0).to(tl.float32)
        top = tl.where(part == 0, sink * 1.4426950408889634, float("-inf"))
        total += tl.where(part == 0, 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key_head = key_cache + head.to(tl.int64) * stride_head
    value_head = value_cache + head.to(tl.int64) * stride_head
    table = block_tables + sequence * stride_table
    acc, total, top = _attend(
        acc, total, top, q, key_head, value_head, table, begin, full, position, last_key, first,
        length, scale, stride_block, stride_token,
        HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, CHUNKED, SOFTCAP, False,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, key_head, value_head, table, full, end, position, last_key, first,
        length, scale, stride_block, stride_token,
        HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, CHUNKED, SOFTCAP, True,
    )  # fmt: skip
    ends = used == 1
    if used > 1:
        slot = (start - tl.load(cu_seqlens)) // TOKENS + sequence + tile_m
        slot = slot * tl.num_programs(1) + head
        STATE: tl.constexpr = BLOCK_M * (BLOCK_D + 2)
        inner = row[:, None] * BLOCK_D + column[None, :]
        mine = states + (slot * parts + part) * STATE
        tl.store(mine + inner, acc)
        tl.store(mine + BLOCK_M * BLOCK_D + row, top)
        tl.store(mine + BLOCK_M * (BLOCK_D + 1) + row, total)
        ends = is_last(counters + slot, used)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for other in tl.range(0, tl.where(ends, used, 0)):
            state = states + (slot * parts + other) * STATE
            level = tl.load(state + BLOCK_M * BLOCK_D + row, cache_modifier=".cg")
            mass = tl.load(state + BLOCK_M * (BLOCK_D + 1) + row, cache_modifier=".cg")
            higher = tl.maximum(top, level)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - shift), tl.exp2(level - shift)
            values = tl.load(state + inner, cache_modifier=".cg")
            acc = acc * fade[:, None] + values * weight[:, None]
            total = total * fade + mass * weight
            top = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = global_token * (tl.num_programs(1) * GROUP) + query_head
    target = out + place[:, None] * HEAD_DIM + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=both & ends)


@jit()
def _attend(
    acc: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    q: tl.tensor,
    key_head: tl.tensor,
    value_head: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    last_key: tl.tensor,
    first: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Add the key tiles [begin, end) to the state; without MASKED every row sees all their keys."""
    for tile in tl.range(begin, end):
        token = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (token < length) & (token >= first)
        block = tl.load(table + token // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        k = load_pages(
            key_head, block, token, valid, stride_block, stride_token,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE,
        )  # fmt: skip
        logits = cap_logits(
            tl.dot(q, tl.trans(widen(k, q)), input_precision="ieee"), scale, SOFTCAP
        )
        if MASKED:
            visible = valid[None, :] & (token[None, :] <= last_key[:, None])
            if WINDOW > 0:
                visible = visible & (
                    token[None, :] >= first_key(position, WINDOW, CHUNKED)[:, None]
                )
            logits = tl.where(visible, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        shift = higher
        if MASKED:
            # A row that has seen no key yet has -inf, and -inf - -inf is NaN.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(logits - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weight, 1)
        v = load_pages(
            value_head, block, token, valid, stride_block, stride_token,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE,
        )  # fmt: skip
        v = widen(v, q)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = higher
    return acc, total, top
