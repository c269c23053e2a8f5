"""Attention of one query per sequence over its pages, split over the keys.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023); the query heads of one KV
head share a tile, so that keys and values are read once (Ainslie et al., "GQA", arXiv 2305.13245).
"""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import (
    jit,
    launch_next,
    next_power_of_2,
    tl,
    use_triton,
)
from kvbaton.kernels.paged_attention import (
    cap_logits,
    first_key,
    load_pages,
    paged_attention_reference,
)
from kvbaton.kernels.quantize_fp8 import widen

MAX_SPLITS = 64

MIN_PART = 64
"""Tokens: no part is shorter, unless its sequence is."""


def decode_splits(batch: int, kv_heads: int, max_context: int) -> int:
    """Into how many parts at most to split a sequence's keys: a power of two.

    Few sequences need parts to fill the GPU; many need them only where one is far longer than the
    others. Depends on nothing that changes between replays of a CUDA graph: `max_context` is a
    bound.
    """
    splits = min(2048 // (batch * kv_heads), max_context // MIN_PART, MAX_SPLITS)
    return next_power_of_2(splits + 1) // 2 if splits > 1 else 1


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute out = softmax(scale * q k^T) v over each sequence's keys; q is its last token.

    Nothing is read on the host, and the grid depends on shapes and `num_splits` only, so a CUDA
    graph may capture it and replay it with other lengths.

    Args:
        query: [B, heads, D]; last axis contiguous, D at least 16.
        key_cache: [num_blocks, kv_heads, block_size, D], of the query's dtype or float8_e4m3fn; any
            strides before the last axis.
        value_cache: as `key_cache`, with the same strides.
        block_tables: [B, max_blocks], int32.
        context_lens: [B], int32: tokens of each sequence, the query's own included; 0 is padding.
        scale: of the logits.
        window: keys at positions > own position - window only; 0: all.
        chunked: instead those of the own chunk of `window` tokens.
        softcap: bound of the logits; 0: none.
        sinks: [heads], fp32, or None.
        num_splits: most parts of a sequence, a power of two; None takes `decode_splits`.
        out: [B, heads, D], contiguous, to fill; None makes one.

    Returns:
        [B, heads, D], contiguous; 0 in padding.
    """
    if not use_triton(query):
        found = decode_attention_reference(
            query,
            key_cache,
            value_cache,
            block_tables,
            context_lens,
            scale=scale,
            window=window,
            chunked=chunked,
            softcap=softcap,
            sinks=sinks,
        )
        return found if out is None else out.copy_(found)
    batch, heads, head_dim = query.shape
    kv_heads, block_size = key_cache.shape[1:3]
    if out is None:
        out = torch.empty(batch, heads, head_dim, dtype=query.dtype, device=query.device)
    if not batch:
        return out
    splits = num_splits or decode_splits(batch, kv_heads, block_tables.shape[1] * block_size)
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty(batch, heads, splits, head_dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=out.device)
    block_n, options = _tile(next_power_of_2(head_dim), query.element_size())
    shape = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": next_power_of_2(head_dim),
        "SPLITS": splits,
        "BLOCK_N": block_n,
        "MIN_TILES": min_tiles(batch * kv_heads, block_n),
        "WINDOW": window,
        "CHUNKED": chunked,
    }
    _kernel[(kv_heads, batch, splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        sinks,
        out,
        parts,
        lse,
        scale,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        GROUP=heads // kv_heads,
        BLOCK_G=max(16, next_power_of_2(heads // kv_heads)),
        BLOCK_SIZE=block_size,
        SOFTCAP=softcap,
        HAS_SINKS=sinks is not None,
        **shape,
        **options,
    )
    if splits > 1:
        merge_kernel[(batch, heads, 1)](parts, lse, out, context_lens, **shape, num_warps=4)
    return out


def decode_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch for `decode_attention`."""
    shape = (*query.shape[:2], value_cache.shape[-1])
    out = torch.zeros(shape, dtype=query.dtype, device=query.device)
    for row, context_len in enumerate(context_lens.tolist()):
        if context_len:
            out[row] = paged_attention_reference(
                query[row : row + 1],
                key_cache,
                value_cache,
                block_tables[row],
                context_len,
                scale=scale,
                window=window,
                chunked=chunked,
                softcap=softcap,
                sinks=sinks,
            )[0][0]
    return out


def min_tiles(programs: int, block_n: int) -> int:
    """Least tiles of a part: the more (sequence, head) pairs there are, the less parts pay."""
    return max(min(max(next_power_of_2(2 * programs), MIN_PART), 4096) // block_n, 1)


def _tile(block_d: int, element_size: int) -> tuple[int, dict[str, int]]:
    """Keys per tile, and launch options, as measured best on an H200 for 128 features of bf16."""
    if block_d * element_size > 1024:  # two stages of more keys don't fit into shared memory
        return 16, {"num_stages": 2, "num_warps": 4}
    if block_d * element_size > 256:
        return 32, {"num_stages": 2, "num_warps": 4}
    return 64, {"num_stages": 3, "num_warps": 4, "maxnreg": 128}


@jit()
def _kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    lse: tl.tensor,
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
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """One program: one split of one sequence for the query heads of one KV head."""
    launch_next()
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(context_lens + sequence)
    first, tile_first, tiles, share, used = share_keys(
        length, SPLITS, MIN_TILES, BLOCK_N, WINDOW, CHUNKED
    )
    if split >= used:
        return
    begin = tile_first + split * share
    end = tl.minimum(begin + share, tile_first + tiles)

    row = tl.arange(0, BLOCK_G)
    column = tl.arange(0, BLOCK_D)
    query_head = head * GROUP + row
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    place = sequence * stride_q_token + query_head[:, None] * stride_q_head + column[None, :]
    q = tl.load(query + place, mask=inside, other=0.0)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    if HAS_SINKS:
        if split == 0:
            sink = tl.load(sinks + query_head, mask=row < GROUP, other=0.0).to(tl.float32)
            top = sink * 1.4426950408889634
            total += 1.0
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    key_head = key_cache + head.to(tl.int64) * stride_head
    value_head = value_cache + head.to(tl.int64) * stride_head
    table = block_tables + sequence * stride_table
    for tile in tl.range(begin, end):
        token = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (token < length) & (token >= first)
        block = tl.load(table + token // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        k = load_pages(
            key_head, block, token, valid, stride_block, stride_token,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE,
        )  # fmt: skip
        v = load_pages(
            value_head, block, token, valid, stride_block, stride_token,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE,
        )  # fmt: skip
        k, v = widen(k, q), widen(v, q)
        logits = cap_logits(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, SOFTCAP)
        logits = tl.where(valid[None, :], logits, float("-inf"))
        # Every tile holds a valid key, so `higher` is finite.
        higher = tl.maximum(top, tl.max(logits, 1))
        weight = tl.exp2(logits - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = higher

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = sequence * tl.num_programs(0) * GROUP + query_head
    if SPLITS == 1 or used == 1:
        target = out + place[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        place = place * SPLITS + split
        tl.store(lse + place, top + tl.log2(total), mask=row < GROUP)
        tl.store(parts + place[:, None] * HEAD_DIM + column[None, :], acc, mask=inside)


@jit()
def share_keys(
    length: tl.tensor,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
) -> tl.tensor:
    """First key, first tile and number of tiles in sight; tiles per part; parts in use."""
    first = 0
    if WINDOW > 0:
        first = first_key(tl.maximum(length - 1, 0), WINDOW, CHUNKED)
    tile_first = first // BLOCK_N
    tiles = tl.cdiv(length, BLOCK_N) - tile_first
    share = tl.cdiv(tiles, tl.minimum(tl.maximum(tiles // MIN_TILES, 1), SPLITS))
    used = tl.maximum(tl.cdiv(tiles, tl.maximum(share, 1)), 1)
    return first, tile_first, tiles, share, used


@jit()
def merge_kernel(
    parts: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    context_lens: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
) -> None:
    """One program merges the parts of BLOCK_D features of a sequence's head; lse is to base 2."""
    launch_next()
    length = tl.load(context_lens + tl.program_id(0))
    _first, _tile_first, _tiles, _part, used = share_keys(
        length, SPLITS, MIN_TILES, BLOCK_N, WINDOW, CHUNKED
    )
    if used == 1:
        return
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.load(lse + place * SPLITS + split, mask=split < used, other=float("-inf"))
    weight = tl.exp2(part - tl.max(part, 0))
    mask = (split < used)[:, None] & (column < HEAD_DIM)[None, :]
    source = parts + (place * SPLITS + split)[:, None] * HEAD_DIM + column[None, :]
    state = tl.load(source, mask=mask, other=0.0)
    merged = tl.sum(state * weight[:, None], 0) / tl.sum(weight, 0)
    target = out + place * HEAD_DIM + column
    tl.store(target, merged.to(out.dtype.element_ty), mask=column < HEAD_DIM)
