"""Attention of several sequences, one after the other, over keys that lie side by side.

On a GPU in half precision: FlashAttention-2 (Dao, arXiv 2307.08691), which comes with torch.
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
    """Compute causal softmax(scale * q k^T) v; queries are the last tokens of their sequences.

    Args:
        query: [T, heads, D], the sequences one after the other; D a multiple of 8, last axis
            contiguous, as in all tensors here.
        key: [N, heads, D], likewise.
        value: [N, heads, D].
        cu_query: [sequences + 1], int32: where each one's queries start, and T.
        cu_key: [sequences + 1], int32: where each one's keys start, and N.
        query_lens: of each sequence, known on the host.
        key_lens: likewise; at least as many.
        scale: of the logits.

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
