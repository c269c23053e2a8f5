"""Choice of experts from a router's logits.

Sources: Shazeer et al., "Outrageously Large Neural Networks", arXiv 1701.06538, with the softmax
before the choice; DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.2.2, for groups, and
"DeepSeek-V3", arXiv 2412.19437, section 2.1.2, for sigmoids and a bias that balances the choice.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvbaton.kernels.jit import jit, next_power_of_2, tl, use_triton, wait_for_inputs


class ExpertChoice(NamedTuple):
    """How experts are chosen by their logits, and weighted.

    An expert's score is its entry of softmax(logits), and experts are ranked by score. With `bias`
    the score is sigmoid(logit), and the rank score + bias. Only experts of the `top_groups` best
    groups are chosen; a group is ranked by its best expert, with `bias` by the sum of its two best.
    Weights are the scores, renormalised, then scaled.

    Attributes:
        top_k: Number of experts to choose; at most those of `top_groups` groups.
        renormalize: Whether to divide the weights of a token by their sum.
        dtype: dtype of the weights.
        bias: [E] fp32.
        num_groups: Number of equal groups of experts, each of two at least.
        top_groups: Number of groups to choose from.
        scale: Factor for all weights.
        shared: Number of shared experts; they have ids E, E + 1 and so on, come after the chosen
            ones, and have weight 1.
    """

    top_k: int
    renormalize: bool
    dtype: torch.dtype
    bias: torch.Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: int = 0


def fused_topk(logits: torch.Tensor, choice: ExpertChoice) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` best experts of each token, best first, and their weights, computed in fp32.

    Args:
        logits: [T, E], contiguous.
        choice: How experts are chosen.

    Returns:
        Weights [T, top_k + shared] of `dtype`, and expert ids [T, top_k + shared], int32. Ids of
        chosen experts are always below E, even where logits are NaN.
    """
    if not use_triton(logits):
        return fused_topk_reference(logits, choice)
    return choose_experts(logits, logits, None, choice)


def choose_experts(
    parts: torch.Tensor, like: torch.Tensor, logit_bias: torch.Tensor | None, choice: ExpertChoice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `fused_topk`, always by its kernel, from partial sums of the logits.

    Args:
        parts: [..., T, E], contiguous; they add up to the logits.
        like: Tensor of the dtype that logits are rounded to.
        logit_bias: [E], added to the logits, or None.
        choice: How experts are chosen.
    """
    *splits, tokens, experts = parts.shape
    top_k, renormalize, dtype, bias, num_groups, top_groups, scale, shared = choice
    weights = torch.empty((tokens, top_k + shared), dtype=dtype, device=parts.device)
    ids = torch.empty((tokens, top_k + shared), dtype=torch.int32, device=parts.device)
    if tokens:
        _kernel[(tokens,)](
            parts, like, logit_bias, bias, weights, ids,
            SPLITS=math.prod(splits), BLOCK_S=next_power_of_2(math.prod(splits)),
            EXPERTS=experts, TOP_K=top_k, SHARED=shared, GROUPS=num_groups, TOP_GROUPS=top_groups,
            SIGMOID=bias is not None, RENORMALIZE=renormalize, SCALE=scale,
            HAS_LOGIT_BIAS=logit_bias is not None,
            BLOCK=next_power_of_2(experts), BLOCK_K=next_power_of_2(top_k + shared),
            BLOCK_G=next_power_of_2(num_groups), num_warps=1,
        )  # fmt: skip
    return weights, ids


def fused_topk_reference(
    logits: torch.Tensor, choice: ExpertChoice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch for `fused_topk`."""
    top_k, renormalize, dtype, bias, num_groups, top_groups, scale, shared = choice
    if bias is None:
        scores = ranks = torch.softmax(logits, dim=-1, dtype=torch.float32)
    else:
        scores = logits.float().sigmoid()
        ranks = scores + bias
    if num_groups > 1:
        groups = ranks.view(len(ranks), num_groups, ranks.shape[1] // num_groups)
        rating = groups.topk(1 if bias is None else 2, dim=-1).values.sum(dim=-1)
        best = rating.topk(top_groups, dim=-1).indices
        barred = torch.ones_like(rating).scatter_(1, best, 0.0).bool()
        ranks = groups.masked_fill(barred[..., None], -torch.inf).flatten(1)
    ids = ranks.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights /= weights.sum(dim=-1, keepdim=True)
    of_shared = torch.arange(logits.shape[1], logits.shape[1] + shared, device=ids.device)
    ids = torch.cat((ids, of_shared.expand(len(ids), -1)), dim=1)
    return F.pad((weights * scale).to(dtype), (0, shared), value=1.0), ids.int()


@jit(early=True)
def _kernel(
    logits: tl.tensor,
    like: tl.tensor,
    logit_bias: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """One program per token."""
    wait_for_inputs()
    token, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, BLOCK_K)
    there = expert < EXPERTS
    split = tl.arange(0, BLOCK_S)[:, None]
    parts = logits + (split * tokens + token) * EXPERTS + expert[None, :]
    part = tl.load(parts, mask=(split < SPLITS) & there[None, :], other=0.0)
    logit = tl.sum(part.to(tl.float32), axis=0)
    if HAS_LOGIT_BIAS:
        logit += tl.load(logit_bias + expert, mask=there, other=0.0).to(tl.float32)
    logit = tl.where(there, logit.to(like.dtype.element_ty).to(tl.float32), -float("inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
        rank = score + tl.load(bias + expert, mask=there, other=0.0)
    else:
        powers = tl.exp(logit - tl.max(logit, axis=0))
        score = powers / tl.sum(powers, axis=0)
        rank = logit
    # NaN and -inf before what may not be chosen: what is no expert, barred, or chosen already.
    rank = tl.where(rank > -1e30, rank, -1e30)
    rank = tl.where(there, rank, -float("inf"))
    if GROUPS > 1:
        group_of = expert // (EXPERTS // GROUPS)
        group = tl.arange(0, BLOCK_G)
        totals = tl.full([BLOCK_G], -float("inf"), tl.float32)
        for number in tl.static_range(GROUPS):
            own = tl.where(group_of == number, rank, -float("inf"))
            total = tl.max(own, axis=0)
            if SIGMOID:
                best = tl.argmax(own, axis=0)
                total += tl.max(tl.where(expert == best, -float("inf"), own), axis=0)
            totals = tl.where(group == number, total, totals)
        open_ = expert < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.argmax(totals, axis=0)
            open_ = open_ | (group_of == best)
            totals = tl.where(group == best, -float("inf"), totals)
        rank = tl.where(open_, rank, -float("inf"))
    chosen = tl.zeros([BLOCK_K], tl.float32)
    numbers = tl.zeros([BLOCK_K], tl.int32)
    for turn in tl.static_range(TOP_K):
        best = tl.argmax(rank, axis=0)
        value = tl.sum(tl.where(expert == best, score, 0.0), axis=0)
        chosen = tl.where(place == turn, value, chosen)
        numbers = tl.where(place == turn, best.to(tl.int32), numbers)
        rank = tl.where(expert == best, -float("inf"), rank)
    if RENORMALIZE:
        chosen = chosen / tl.sum(chosen, axis=0)
    chosen = tl.where(place < TOP_K, chosen * SCALE, 1.0)
    numbers = tl.where(place < TOP_K, numbers, EXPERTS + place - TOP_K)
    target = token * (TOP_K + SHARED) + place
    mask = place < TOP_K + SHARED
    tl.store(weights + target, chosen.to(weights.dtype.element_ty), mask=mask)
    tl.store(ids + target, numbers, mask=mask)
