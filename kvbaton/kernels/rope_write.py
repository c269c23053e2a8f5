"""Rotary position embedding of queries and keys, fused with the write of keys and values.

Source: Su et al., "RoFormer", arXiv 2104.09864, in the half-rotated order of GPT-NeoX; paged
cache and slot mapping: Kwon et al., "PagedAttention", arXiv 2309.06180.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton, wait_for_inputs
from kvbaton.kernels.rms_norm import rms_norm


@dataclass(frozen=True)
class HeadNorms:
    """Root mean square norms of query and key heads, as `rms_norm` computes them.

    Attributes:
        query: [D], weight for queries.
        key: [D], weight for keys.
        eps: Added to the mean square.
        offset: Added to weights.
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    offset: float

    def apply(self, heads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Normalise queries, and keys if given; results are contiguous."""
        return [
            rms_norm(x, weight, self.eps, weight_offset=self.offset)
            for x, weight in zip(heads, (self.query, self.key), strict=False)
        ]


def rope_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> None:
    """Normalise and rotate `query` and `key` in place, then write `key` and `value` to their slots.

    With c, s = cos_sin[position].chunk(2) and x1, x2 the halves of the first R features of a
    head: x1' = x1 * c - x2 * s and x2' = x2 * c + x1 * s, in fp32. Features past R are
    unchanged. If `interleaved`, x1 are the even features of the first R and x2 the odd ones; x1'
    and x2' become halves.

    Args:
        query: [T, heads, D]; last axis contiguous, as in all tensors here.
        key: [T, kv_heads, D].
        value: [T, kv_heads, D], or of another width.
        positions: [T], int64.
        cos_sin: [max_position, R], fp32: R / 2 cosines, then R / 2 sines; None for no rotation.
        key_cache: [num_blocks, kv_heads, block_size, D], any strides before the last axis; of the
            dtype of `key`, or float8_e4m3fn, which saturates.
        value_cache: Like `key_cache`, with the same strides, as wide as `value`.
        slot_mapping: [T], contiguous, int64: block * block_size + offset, or -1 to write nothing.
        interleaved: Whether pairs are adjacent features rather than features of two halves.
        norms: Norms of the heads before the rotation; None for none.
    """
    assert slot_mapping.is_contiguous(), "the kernel reads neighbours"
    whole = cos_sin is not None and cos_sin.shape[1] == query.shape[2]
    if norms is not None and not (whole and use_triton(query)):
        for tensor, normed in zip((query, key), norms.apply((query, key)), strict=True):
            tensor.copy_(normed)
        norms = None
    if not use_triton(query):
        rope_write_reference(
            query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping,
            interleaved=interleaved,
        )  # fmt: skip
        return
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    if not tokens:
        return
    rotary_dim = cos_sin.shape[1] if cos_sin is not None else 0
    group = next_power_of_2(heads // kv_heads)
    block_t = min(max(16 // group, 1), 4) if tokens >= 1024 else 1
    _kernel[(cdiv(tokens, block_t), kv_heads)](
        query,
        key,
        value,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        slot_mapping,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        tokens,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        cos_sin.stride(0) if cos_sin is not None else 0,
        *key_cache.stride()[:3],
        GROUP=heads // kv_heads,
        BLOCK_G=group,
        BLOCK_T=block_t,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        VALUE_DIM=value.shape[2],
        BLOCK_V=next_power_of_2(value.shape[2]),
        INTERLEAVED=interleaved,
        NORMED=norms is not None,
        OFFSET=0.0 if norms is None else norms.offset,
        HALF=rotary_dim // 2,
        BLOCK_HALF=next_power_of_2(max(rotary_dim // 2, 1)),
        BLOCK_SIZE=key_cache.shape[2],
        num_warps=4 if block_t > 1 else 2,
    )


def rope_write_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Plain torch for `rope_write`."""
    if cos_sin is not None:
        table = cos_sin[positions].unsqueeze(1)
        for tensor in (query, key):
            turned = tensor[..., : table.shape[-1]]
            if interleaved:
                turned = torch.cat((turned[..., ::2], turned[..., 1::2]), dim=-1)
            cos, sin = table.float().chunk(2, dim=-1)
            first, second = turned.float().chunk(2, dim=-1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            tensor[..., : table.shape[-1]] = rotated.to(tensor.dtype)
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted]
    block_size = key_cache.shape[2]
    for cache, x in ((key_cache, key), (value_cache, value)):
        cache[slots // block_size, :, slots % block_size] = narrow(x[wanted], cache.dtype)


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `x` to the dtype of a cache; e4m3 has no infinity, so numbers saturate."""
    return x.clamp(-448, 448).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


@jit("positions", "slot_mapping", "tokens", early=True)
def _kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: tl.tensor,
    tokens: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """One program rotates and writes BLOCK_T tokens of one KV head and its group of query heads."""
    wait_for_inputs()
    head = tl.program_id(1)
    row = tl.arange(0, BLOCK_T * BLOCK_G)
    row_token = tl.program_id(0) * BLOCK_T + row // BLOCK_G
    row_inside = (row_token < tokens) & (row % BLOCK_G < GROUP)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    slot = tl.load(slot_mapping + token, mask=inside, other=-1).to(tl.int64)
    written = (slot >= 0)[:, None]
    slot = tl.maximum(slot, 0)
    place = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    place = (place + head.to(tl.int64) * stride_head)[:, None]
    key_row = key + (token.to(tl.int64) * stride_k_token + head * stride_k_head)[:, None]
    if HALF > 0:
        query_head = head * GROUP + row % BLOCK_G
        query_row = query + row_token.to(tl.int64) * stride_q_token + query_head * stride_q_head
        table = cos_sin + _position(positions, row_token, row_inside) * stride_table
        _rotate_rows(
            query_row[:, None], table[:, None], row_inside[:, None], query_norm, eps,
            HALF, BLOCK_HALF, INTERLEAVED, NORMED, OFFSET,
        )  # fmt: skip
        table = cos_sin + _position(positions, token, inside) * stride_table
        first, second = _rotate_rows(
            key_row, table[:, None], inside[:, None], key_norm, eps,
            HALF, BLOCK_HALF, INTERLEAVED, NORMED, OFFSET,
        )  # fmt: skip
        half = tl.arange(0, BLOCK_HALF)[None, :]
        mask = written & (half < HALF)
        tl.store(key_cache + place + half, _narrow(first, key_cache), mask=mask)
        tl.store(key_cache + place + HALF + half, _narrow(second, key_cache), mask=mask)
    column = tl.arange(0, BLOCK_D)[None, :]
    if 2 * HALF < HEAD_DIM:
        mask = written & (column >= 2 * HALF) & (column < HEAD_DIM)
        rest = _narrow(tl.load(key_row + column, mask=mask), key_cache)
        tl.store(key_cache + place + column, rest, mask=mask)
    value_row = value + (token.to(tl.int64) * stride_v_token + head * stride_v_head)[:, None]
    column = tl.arange(0, BLOCK_V)[None, :]
    mask = written & (column < VALUE_DIM)
    row = _narrow(tl.load(value_row + column, mask=mask), value_cache)
    tl.store(value_cache + place + column, row, mask=mask)


@jit()
def _narrow(x: tl.tensor, cache: tl.tensor) -> Any:
    """`narrow` in Triton."""
    if cache.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    return x.to(cache.dtype.element_ty)


@jit()
def _position(positions: tl.tensor, token: tl.tensor, inside: tl.tensor) -> Any:
    return tl.load(positions + token, mask=inside, other=0).to(tl.int64)


@jit()
def _rotate_rows(
    rows: tl.tensor,
    table: tl.tensor,
    inside: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
) -> Any:
    half = tl.arange(0, BLOCK_HALF)[None, :]
    mask = inside & (half < HALF)
    cos = tl.load(table + half, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(table + HALF + half, mask=mask, other=0.0).to(tl.float32)
    if INTERLEAVED:
        at1, at2 = 2 * half, 2 * half + 1
    else:
        at1, at2 = half, HALF + half
    first = tl.load(rows + at1, mask=mask, other=0.0)
    second = tl.load(rows + at2, mask=mask, other=0.0)
    if INTERLEAVED:
        tl.debug_barrier()  # what is stored goes where other threads have loaded
    wide1 = first.to(tl.float32)
    wide2 = second.to(tl.float32)
    if NORMED:
        squares = tl.sum(wide1 * wide1, axis=1) + tl.sum(wide2 * wide2, axis=1)
        factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        weight1 = tl.load(norm + at1, mask=half < HALF, other=0.0).to(tl.float32)
        weight2 = tl.load(norm + at2, mask=half < HALF, other=0.0).to(tl.float32)
        wide1 *= factor
        wide2 *= factor
        if OFFSET == 0.0:
            wide1 = wide1.to(first.dtype).to(tl.float32)
            wide2 = wide2.to(first.dtype).to(tl.float32)
        wide1 = (wide1 * (weight1 + OFFSET)).to(first.dtype).to(tl.float32)
        wide2 = (wide2 * (weight2 + OFFSET)).to(first.dtype).to(tl.float32)
    first = (wide1 * cos - wide2 * sin).to(first.dtype)
    second = (wide2 * cos + wide1 * sin).to(second.dtype)
    tl.store(rows + half, first, mask=mask)
    tl.store(rows + HALF + half, second, mask=mask)
    return first, second
