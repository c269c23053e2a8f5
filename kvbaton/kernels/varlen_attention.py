"""Causal attention of several concatenated sequences over contiguous (not paged) keys.

On a GPU in half precision it is torch's FlashAttention-2 (Dao, arXiv 2307.08691).
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_query: torch.Tensor,
    cu_key: torch.Tensor,
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    *,
    scale: float,
) -> torch.Tensor:
    """Compute causal softmax(scale * q k^T) v for queries of each sequence's last tokens.

    Args:
        query: [T, heads, D], sequences concatenated; D a multiple of 8, last axis contiguous, as
            in all tensors here.
        key: [N, heads, D], sequences concatenated.
        value: [N, heads, D].
        cu_query: [sequences + 1], int32: start of each sequence's queries; then T.
        cu_key: [sequences + 1], int32: start of each sequence's keys; then N.
        query_lens: Queries of each sequence, known on the host.
        key_lens: Keys of each sequence, at least as many, known on the host.
        scale: Scale of the logits.

    Returns:
        [T, heads, D].
    """
    if not query.is_cuda or query.dtype == torch.float32:
        return varlen_attention_reference(query, key, value, query_lens, key_lens, scale=scale)
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_query, cu_key, max(query_lens), max(key_lens), 0.0, True, False,
        scale=scale,
    )[0]  # fmt: skip
    return found


def varlen_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    *,
    scale: float,
) -> torch.Tensor:
    """Plain torch for `varlen_attention`."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    spans = (pairwise(accumulate(lens, initial=0)) for lens in (query_lens, key_lens))
    for (first, past), (start, end) in zip(*spans, strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[first:past], key[start:end], value[start:end]))
        at = torch.arange(start, end, device=query.device)
        visible = at <= torch.arange(end - past + first, end, device=query.device)[:, None]
        found = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        out[first:past] = found.transpose(0, 1)
    return out
