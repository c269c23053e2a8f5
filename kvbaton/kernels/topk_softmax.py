"""Which experts a router chooses, from its logits.

Source: Shazeer et al., "Outrageously Large Neural Networks", arXiv 1701.06538, with the softmax
before the choice.
"""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import jit, next_power_of_2, tl, use_triton


def topk_softmax(
    logits: torch.Tensor, top_k: int, *, renormalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` largest of softmax(logits), computed in fp32, largest first.

    Args:
        logits: [T, E], contiguous.
        top_k: at most E.
        renormalize: scale what was chosen to add up to 1.
        dtype: to round the weights to.

    Returns:
        Weights [T, top_k] of `dtype`, and numbers of experts [T, top_k], int32, always within E,
        even where logits are NaN.
    """
    if not use_triton(logits):
        return topk_softmax_reference(logits, top_k, renormalize=renormalize, dtype=dtype)
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=dtype, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        _kernel[(tokens,)](
            logits,
            weights,
            ids,
            EXPERTS=experts,
            TOP_K=top_k,
            RENORMALIZE=renormalize,
            BLOCK=next_power_of_2(experts),
            BLOCK_K=next_power_of_2(top_k),
            num_warps=1,
        )
    return weights, ids


def topk_softmax_reference(
    logits: torch.Tensor, top_k: int, *, renormalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch for `topk_softmax`."""
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalize:
        weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(dtype), ids.int()


@jit()
def _kernel(
    logits: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, BLOCK_K)
    there = expert < EXPERTS
    logit = tl.load(logits + token * EXPERTS + expert, mask=there, other=-float("inf"))
    logit = logit.to(tl.float32)
    powers = tl.exp(logit - tl.max(logit, axis=0))
    probability = powers / tl.sum(powers, axis=0)
    # Lower than any expert: those that are none, and those that were chosen.
    rank = tl.where(logit > -3e38, logit, -3e38)
    rank = tl.where(there, rank, -float("inf"))
    chosen = tl.zeros([BLOCK_K], tl.float32)
    numbers = tl.zeros([BLOCK_K], tl.int32)
    for turn in tl.static_range(TOP_K):
        best = tl.argmax(rank, axis=0)
        value = tl.sum(tl.where(expert == best, probability, 0.0), axis=0)
        chosen = tl.where(place == turn, value, chosen)
        numbers = tl.where(place == turn, best.to(tl.int32), numbers)
        rank = tl.where(expert == best, -float("inf"), rank)
    if RENORMALIZE:
        chosen = chosen / tl.sum(chosen, axis=0)
    target = token * TOP_K + place
    tl.store(weights + target, chosen.to(weights.dtype.element_ty), mask=place < TOP_K)
    tl.store(ids + target, numbers, mask=place < TOP_K)
