"""Router of a mixture of experts for few tokens: logits by many programs, then the choice.

The library's product of few rows with few experts runs on a few multiprocessors, which take longer
than the reads would; in float32, as DeepSeek's routers need, longer still. Here inputs are split
too (split-K). The kernel that chooses the experts adds the parts.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kvbaton.kernels.fused_topk import ExpertChoice, choose_experts, fused_topk_reference
from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton, wait_for_inputs

MAX_TOKENS = 256
"""Largest number of tokens for this kernel; for more, the library's product is faster."""

MAX_SPLITS = 32
BLOCK_M, BLOCK_N, BLOCK_K = 32, 32, 128


def fits(x: torch.Tensor) -> bool:
    """Whether `fused_router` is the faster one for these tokens."""
    return use_triton(x) and len(x) <= MAX_TOKENS


def fused_router(
    x: torch.Tensor,
    weight: torch.Tensor,
    choice: ExpertChoice,
    logit_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_topk` of the logits x @ weight.T + logit_bias.

    Args:
        x: [T, H], contiguous.
        weight: [E, H], contiguous. Products are in its dtype, and logits are rounded to it.
        choice: How experts are chosen.
        logit_bias: [E].

    Returns:
        As `fused_topk`.
    """
    if not use_triton(x):
        return fused_topk_reference(linear(x.to(weight.dtype), weight, logit_bias), choice)
    (tokens, depth), experts = x.shape, len(weight)
    share = cdiv(cdiv(depth, BLOCK_K), MAX_SPLITS) * BLOCK_K
    splits = cdiv(depth, share)
    parts = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    if tokens:
        rows = min(BLOCK_M, max(16, next_power_of_2(tokens)))
        _kernel[(cdiv(experts, BLOCK_N), splits, cdiv(tokens, rows))](
            x, weight, parts, tokens,
            EXPERTS=experts, DEPTH=depth, SHARE=share, LONE=tokens == 1,
            BLOCK_M=rows, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=2,
        )  # fmt: skip
    return choose_experts(parts, weight, logit_bias, choice)


@jit("tokens", early=True)
def _kernel(
    x: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    tokens: tl.tensor,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,
    LONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_M tokens, BLOCK_N experts, SHARE of their inputs."""
    wait_for_inputs()
    expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    inner = tl.arange(0, BLOCK_K)
    is_expert = expert < EXPERTS
    weights = weight + expert[:, None] * DEPTH + inner[None, :]
    if LONE:
        total = tl.zeros([BLOCK_N], tl.float32)
        for k in tl.range(split * SHARE, tl.minimum((split + 1) * SHARE, DEPTH), BLOCK_K):
            inside = inner < DEPTH - k
            w = tl.load(weights + k, mask=is_expert[:, None] & inside[None, :], other=0.0)
            a = tl.load(x + k + inner, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(w.to(tl.float32) * a[None, :], axis=1)
        tl.store(parts + split * EXPERTS + expert, total, mask=is_expert)
    else:
        row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = row < tokens
        inputs = x + row.to(tl.int64)[:, None] * DEPTH + inner[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(split * SHARE, tl.minimum((split + 1) * SHARE, DEPTH), BLOCK_K):
            inside = (inner < DEPTH - k)[None, :]
            w = tl.load(weights + k, mask=is_expert[:, None] & inside, other=0.0)
            a = tl.load(inputs + k, mask=is_row[:, None] & inside, other=0.0).to(w.dtype)
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        place = (split * tokens + row)[:, None] * EXPERTS + expert[None, :]
        tl.store(parts + place, acc, mask=is_row[:, None] & is_expert[None, :])
