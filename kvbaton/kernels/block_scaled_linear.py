"""FP8 products with a scale for each run of input features, as in DeepSeek-V3.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3: the tensor cores
sum the products within a run; the sums of runs are added in float32.
"""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import cdiv, jit, tl, use_triton

GROUPS = (32, 64, 128)
"""Lengths of a run, in features, that the kernel supports."""


def block_scaled_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute out[t, n] = sum over runs g of x_scales[t, g] * scales[n, g] * (x[t] . weight[n])_g.

    Args:
        x: [T, K] float8_e4m3fn, contiguous.
        x_scales: [T, ceil(K / group)] float32, contiguous.
        weight: [N, K] float8_e4m3fn, contiguous.
        scales: [N, ceil(K / group)] float32, contiguous.
        group: Features per run, one of `GROUPS`; the last run may be shorter.
        dtype: dtype of the result.

    Returns:
        [T, N].
    """
    if not use_triton(x):
        return block_scaled_linear_reference(x, x_scales, weight, scales, group, dtype)
    (rows, depth), size = x.shape, weight.shape[0]
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    if not rows:
        return out
    # With few rows, reading the weight is all the work: use as many programs as possible.
    block_m, block_n, warps = (64, 128, 4) if rows <= 128 else (128, 128, 8)
    if rows <= 32:
        block_m, block_n, warps = (16 if rows <= 16 else 32), 32, 4
    _kernel[(cdiv(rows, block_m), cdiv(size, block_n))](
        x,
        x_scales,
        weight,
        scales,
        out,
        rows,
        size,
        depth,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=group,
        num_warps=warps,
        num_stages=3,
    )
    return out


def block_scaled_linear_reference(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Plain torch for `block_scaled_linear`, computed in float32."""
    wide, heavy = (
        part.float() * of.repeat_interleave(group, 1)[:, : part.shape[1]]
        for part, of in ((x, x_scales), (weight, scales))
    )
    return torch.nn.functional.linear(wide, heavy).to(dtype)


@jit("rows")
def _kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    depth: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_M tokens, BLOCK_N rows of the weight; those of one weight run together."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    runs = tl.cdiv(depth, BLOCK_K)
    is_row, is_column = row < rows, column < size
    wide_row, wide_column = row.to(tl.int64), column.to(tl.int64)
    inputs = x + wide_row[:, None] * depth + inner[None, :]
    weights = weight + wide_column[:, None] * depth + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for run in tl.range(0, runs):
        inside = (inner < depth - run * BLOCK_K)[None, :]
        a = tl.load(inputs + run * BLOCK_K, mask=is_row[:, None] & inside, other=0.0)
        w = tl.load(weights + run * BLOCK_K, mask=is_column[:, None] & inside, other=0.0)
        a_scale = tl.load(x_scales + wide_row * runs + run, mask=is_row, other=0.0)
        w_scale = tl.load(scales + wide_column * runs + run, mask=is_column, other=0.0)
        acc += tl.dot(a, tl.trans(w)) * a_scale[:, None] * w_scale[None, :]
    target = out + wide_row[:, None] * size + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)
