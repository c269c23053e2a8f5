"""Shared by paged decode and prefill attention: the reference, and the steps of a tile.

Source of the online softmax over tiles: Dao, "FlashAttention-2", arXiv 2307.08691; of pages:
Kwon et al., "PagedAttention", arXiv 2309.06180. A sink is a logit without a value that joins a
head's softmax (gpt-oss; Xiao et al., arXiv 2309.17453). Softcap: cap * tanh(logit / cap) (Gemma 2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvbaton.kernels.jit import jit, tl


class Softmax(NamedTuple):
    """Keys that a query attends to, and how its logits are formed.

    Attributes:
        scale: Scale of the logits.
        window: A query at position p attends to keys at positions > p - window only; 0 for all.
        chunked: A query attends to keys of its own chunk of `window` tokens instead.
        softcap: Bound of the logits; 0 for none.
        sinks: [heads], fp32, or None.
    """

    scale: float
    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: int,
    softmax: Softmax,
    last_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch attention of one sequence's last tokens over its pages, in fp32 or wider.

    Args:
        query: [T, heads, D]: queries of the sequence's last T tokens.
        key_cache: [num_blocks, kv_heads, block_size, D].
        value_cache: Like `key_cache`, or of another width.
        block_table: Block ids of the sequence, in order.
        context_len: Number of tokens of the sequence, including the queries'.
        softmax: Scale, mask and form of the softmax.
        last_keys: [T]: last position that each query attends to; None for its own.

    Returns:
        [T, heads, width of values], dtype of `query`.
    """
    scale, window, chunked, softcap, sinks = softmax
    num_blocks = -(-context_len // key_cache.shape[2])
    blocks = block_table[:num_blocks].long()
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (
        cache[blocks].transpose(1, 2).flatten(0, 1)[:context_len].to(wide)
        for cache in (key_cache, value_cache)
    )
    tokens, heads, head_dim = query.shape
    grouped = query.to(wide).view(tokens, key.shape[1], -1, head_dim)
    logits = torch.einsum("tkgd,nkd->kgtn", grouped, key).flatten(0, 1) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    at = torch.arange(context_len - tokens, context_len, device=query.device)[:, None]
    seen = torch.arange(context_len, device=query.device)[None]
    visible = seen <= (at if last_keys is None else last_keys[:, None])
    if window:
        visible &= seen >= (at - at % window if chunked else at - window + 1)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.to(wide).view(-1, 1, 1).expand(heads, tokens, 1)
        logits = torch.cat((logits, sink), dim=-1)
    share = logits.softmax(-1)[..., :context_len].view(key.shape[1], -1, tokens, context_len)
    out = torch.einsum("kgtn,nkd->tkgd", share, value).reshape(tokens, heads, -1)
    return out.to(query.dtype)


@jit()
def first_key(position: tl.tensor, WINDOW: tl.constexpr, CHUNKED: tl.constexpr) -> Any:
    """First key in sight of a query: behind a window, or where its chunk begins."""
    if CHUNKED:
        return position // WINDOW * WINDOW
    return tl.maximum(position - WINDOW + 1, 0)


@jit()
def cap_logits(logits: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr) -> Any:
    """Scale logits, bound them, and take them to base 2."""
    if SOFTCAP > 0.0:
        # tanh(x) = 1 - 2 / (e^2x + 1), which is right at both infinities too.
        wave = tl.exp2(logits * (scale * (2.0 / SOFTCAP) * 1.4426950408889634))
        return (SOFTCAP * 1.4426950408889634) * (1.0 - 2.0 / (wave + 1.0))
    return logits * (scale * 1.4426950408889634)


@jit()
def load_pages(
    cache: tl.tensor,
    block_ids: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> Any:
    """Rows [tokens, BLOCK_D] of a head's pages; zero where not valid: slots may hold NaN."""
    column = tl.arange(0, BLOCK_D)
    offset = block_ids * stride_block + token % BLOCK_SIZE * stride_token
    mask = valid[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (column < HEAD_DIM)[None, :]
    return tl.load(cache + offset[:, None] + column[None, :], mask=mask, other=0.0)
