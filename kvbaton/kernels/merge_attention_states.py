"""Merge two attention results over disjoint sets of keys into the result over their union.

Source: Ye et al., "FlashInfer", arXiv 2501.01005, section 2.2 (attention states and their sum);
the rescaling is that of Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv 1805.02867.
"""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import jit, next_power_of_2, tl, use_triton


def merge_attention_states(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute lse = log(e^lse1 + e^lse2); out = out1 * e^(lse1 - lse) + out2 * e^(lse2 - lse).

    A state over no keys has lse = -inf; its `out` is ignored, and may be NaN.

    Args:
        out1: [T, heads, D]; last axis contiguous.
        lse1: [T, heads], fp32, natural logarithm; any strides.
        out2: Like `out1`.
        lse2: Like `lse1`.
        out: Tensor for the result, contiguous; may be `out1`. None allocates one.

    Returns:
        out [T, heads, D] (contiguous, dtype of `out1`, 0 where both are empty) and lse [T, heads].
    """
    tokens, heads, head_dim = out1.shape
    if out is None:
        out = torch.empty(out1.shape, dtype=out1.dtype, device=out1.device)
    if not use_triton(out1):
        merged, lse = merge_attention_states_reference(out1, lse1, out2, lse2)
        return out.copy_(merged), lse
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=out1.device)
    if tokens:
        _kernel[(tokens,)](
            out1,
            lse1,
            out2,
            lse2,
            out,
            lse,
            *out1.stride()[:2],
            *out2.stride()[:2],
            *lse1.stride()[:2],
            *lse2.stride()[:2],
            HEADS=heads,
            BLOCK_H=next_power_of_2(heads),
            HEAD_DIM=head_dim,
            BLOCK_D=next_power_of_2(head_dim),
            num_warps=8,
        )
    return out, lse


def merge_attention_states_reference(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch for `merge_attention_states`."""
    lse = torch.logaddexp(lse1, lse2)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    parts = (
        torch.where((part == -torch.inf)[..., None], 0.0, out.float())
        * torch.exp(part - shift)[..., None]
        for out, part in ((out1, lse1), (out2, lse2))
    )
    return sum(parts, torch.zeros_like(out1, dtype=torch.float32)).to(out1.dtype), lse


@jit("lse1", "lse2", "stride_l1_token", "stride_l1_head", "stride_l2_token", "stride_l2_head")
def _kernel(
    out1: tl.tensor,
    lse1: tl.tensor,
    out2: tl.tensor,
    lse2: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    stride_1_token: tl.tensor,
    stride_1_head: tl.tensor,
    stride_2_token: tl.tensor,
    stride_2_head: tl.tensor,
    stride_l1_token: tl.tensor,
    stride_l1_head: tl.tensor,
    stride_l2_token: tl.tensor,
    stride_l2_head: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program merges all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = head < HEADS
    first = tl.load(
        lse1 + token * stride_l1_token + head * stride_l1_head, mask=inside, other=float("-inf")
    )
    second = tl.load(
        lse2 + token * stride_l2_token + head * stride_l2_head, mask=inside, other=float("-inf")
    )
    top = tl.maximum(first, second)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight1 = tl.exp(first - top)
    weight2 = tl.exp(second - top)
    total = weight1 + weight2
    share = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    features = column < HEAD_DIM
    state1 = tl.load(
        out1 + token * stride_1_token + head[:, None] * stride_1_head + column,
        mask=features & (weight1 > 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    state2 = tl.load(
        out2 + token * stride_2_token + head[:, None] * stride_2_head + column,
        mask=features & (weight2 > 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    merged = state1 * (weight1 * share)[:, None] + state2 * (weight2 * share)[:, None]
    target = (token * HEADS + head[:, None]) * HEAD_DIM + column
    tl.store(out + target, merged.to(out.dtype.element_ty), mask=features & inside[:, None])
    tl.store(lse + token * HEADS + head, top + tl.log(total), mask=inside)
