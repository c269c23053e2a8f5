"""Paged decode attention: one query per sequence, split over its keys (see `decode_parts`).

The query heads of one KV head share a tile, so that keys and values are read once (Ainslie et al.,
"GQA", arXiv 2305.13245).
"""

from __future__ import annotations

import torch

from kvbaton.kernels.decode_parts import FIELDS, Parts, merge_parts, part_at, share_keys
from kvbaton.kernels.jit import is_last, jit, next_power_of_2, tl, use_triton, wait_for_inputs
from kvbaton.kernels.paged_attention import (
    Softmax,
    cap_logits,
    first_key,
    load_pages,
    paged_attention_reference,
)
from kvbaton.kernels.quantize_fp8 import widen

PLACES = 528
"""Programs that an H100 or H200 runs at a time: four on each of its 132 multiprocessors."""

MERGED_PARTS = 8
"""Number of parts that a program merges at a time."""

MERGING_SEQUENCES = 16
"""Smallest batch whose parts are merged by the last program of each sequence.

For smaller batches a separate merge kernel is faster.
"""


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax: Softmax,
    *,
    parts: Parts | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(scale * q k^T) v over each sequence's keys; q is its last token's query.

    The host reads no tensor, and the grid depends on shapes only: a CUDA graph may capture the
    launch and replay it with other lengths.

    Args:
        query: [B, heads, D]; last axis contiguous, D at least 16.
        key_cache: [num_blocks, kv_heads, block_size, D], of the query's dtype or float8_e4m3fn; any
            strides before the last axis.
        value_cache: Like `key_cache`, with the same strides.
        block_tables: [B, max_blocks], int32.
        context_lens: [B], int32: tokens of each sequence, including the query's; 0 is padding.
        softmax: Scale, mask and form of the softmax.
        parts: Result of `decode_parts` for these lengths; None computes it.
        out: [B, heads, D], contiguous: the output tensor; None allocates one.

    Returns:
        [B, heads, D], contiguous; 0 in padding, unless `parts` has none for padding.
    """
    if not use_triton(query):
        found = decode_attention_reference(
            query, key_cache, value_cache, block_tables, context_lens, softmax
        )
        return found if out is None else out.copy_(found)
    batch, heads, head_dim = query.shape
    kv_heads, block_size = key_cache.shape[1:3]
    if out is None:
        out = torch.empty(batch, heads, head_dim, dtype=query.dtype, device=query.device)
    if not batch:
        return out
    if parts is None:
        parts = decode_parts(query, key_cache, context_lens, softmax)
    scale, window, chunked, softcap, sinks = softmax
    block_n, options = _tile(next_power_of_2(head_dim), query.element_size())
    states = torch.empty(len(parts.fields), heads, head_dim, dtype=torch.float32, device=out.device)
    lse = torch.empty(len(parts.fields), heads, dtype=torch.float32, device=out.device)
    block_d, merges = next_power_of_2(head_dim), batch >= MERGING_SEQUENCES
    _kernel[(kv_heads, len(parts.fields))](
        query,
        key_cache,
        value_cache,
        block_tables,
        parts.fields,
        parts.counters,
        sinks,
        out,
        states,
        lse,
        scale,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        GROUP=heads // kv_heads,
        MERGED_G=next_power_of_2(heads // kv_heads),
        BLOCK_G=max(16, next_power_of_2(heads // kv_heads)),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        BLOCK_P=MERGED_PARTS,
        STRIDE=FIELDS,
        WINDOW=window,
        CHUNKED=chunked,
        SOFTCAP=softcap,
        HAS_SINKS=sinks is not None,
        MERGES=merges,
        **options,
    )
    return out if merges else merge_parts(states, lse, parts, out, block_d)


def decode_parts(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    context_lens: torch.Tensor,
    softmax: Softmax,
    *,
    spare: int | None = None,
    pads: bool = True,
) -> Parts:
    """Split keys among programs, for all layers with these shapes.

    The arguments are those of `decode_attention` and `share_keys`.
    """
    tile, _ = _tile(next_power_of_2(query.shape[2]), query.element_size())
    heads = key_cache.shape[1]
    return share_keys(
        context_lens, heads, tile, places=PLACES, window=softmax.window, chunked=softmax.chunked,
        spare=spare, pads=pads,
    )  # fmt: skip


def decode_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """Plain torch for `decode_attention`."""
    shape = (*query.shape[:2], value_cache.shape[-1])
    out = torch.zeros(shape, dtype=query.dtype, device=query.device)
    for row, context_len in enumerate(context_lens.tolist()):
        if context_len:
            found = paged_attention_reference(
                query[[row]], key_cache, value_cache, block_tables[row], context_len, softmax
            )
            out[row] = found[0]
    return out


def _tile(block_d: int, element_size: int) -> tuple[int, dict[str, int]]:
    """Keys per tile, and launch options: the fastest on an H200 for 128 features in bf16."""
    if block_d * element_size > 1024:  # two stages of more keys don't fit in shared memory
        return 16, {"num_stages": 2, "num_warps": 4}
    if block_d * element_size > 256:
        return 32, {"num_stages": 2, "num_warps": 4}
    return 64, {"num_stages": 3, "num_warps": 4, "maxnreg": 128}


@jit("fields", "counters", early=True)
def _kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    fields: tl.tensor,
    counters: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    states: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    stride_table: tl.tensor,
    GROUP: tl.constexpr,
    MERGED_G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MERGES: tl.constexpr,
) -> None:
    """One program: one part of one sequence for the query heads of one KV head.

    With MERGES the last one of a sequence and KV head merges their parts, BLOCK_P at a time.
    """
    wait_for_inputs()
    head = tl.program_id(0)
    of, length, begin, end, part, used = part_at(fields, STRIDE, tl.program_id(1))
    if of < 0:
        return
    sequence = of.to(tl.int64)
    first = 0
    if WINDOW > 0:
        first = first_key(tl.maximum(length - 1, 0), WINDOW, CHUNKED)

    row = tl.arange(0, BLOCK_G)
    column = tl.arange(0, BLOCK_D)
    query_head = head * GROUP + row
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    place = sequence * stride_q_token + query_head[:, None] * stride_q_head + column[None, :]
    q = tl.load(query + place, mask=inside, other=0.0)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    if HAS_SINKS:
        if part == 0:
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
    heads = tl.num_programs(0) * GROUP
    target = out + (sequence * heads + query_head)[:, None] * HEAD_DIM + column[None, :]
    if used == 1:
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        item = tl.program_id(1).to(tl.int64) * heads + query_head
        tl.store(lse + item, top + tl.log2(total), mask=row < GROUP)
        tl.store(states + item[:, None] * HEAD_DIM + column[None, :], acc, mask=inside)
        if MERGES:
            if is_last(counters + sequence * tl.num_programs(0) + head, used):
                _merge(
                    states, lse, out, tl.program_id(1) - part, used,
                    sequence * heads + head * GROUP, head * GROUP,
                    GROUP, MERGED_G, HEAD_DIM, BLOCK_D, BLOCK_P,
                )  # fmt: skip


@jit()
def _merge(
    states: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    first_part: tl.tensor,
    used: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    GROUP: tl.constexpr,
    MERGED_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Merge a sequence's parts for GROUP heads from `head` on into rows of `out` from `row` on."""
    heads = tl.num_programs(0) * GROUP
    of, column = tl.arange(0, MERGED_G), tl.arange(0, BLOCK_D)
    top = tl.full([MERGED_G], float("-inf"), tl.float32)
    total = tl.zeros([MERGED_G], tl.float32)
    acc = tl.zeros([MERGED_G, BLOCK_D], tl.float32)
    for start in tl.range(0, used, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        place = (first_part + part).to(tl.int64)[:, None] * heads + (head + of)[None, :]
        mask = (part < used)[:, None] & (of < GROUP)[None, :]
        level = tl.load(lse + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
        state = tl.load(
            states + place[:, :, None] * HEAD_DIM + column[None, None, :],
            mask=mask[:, :, None] & (column < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # Finite for heads that are none, too.
        higher = tl.maximum(tl.maximum(top, tl.max(level, 0)), -3.0e38)
        weight, fade = tl.exp2(level - higher[None, :]), tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade[:, None] + tl.sum(state * weight[:, :, None], 0)
        top = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = out + (row + of)[:, None] * HEAD_DIM + column[None, :]
    inside = (of < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
