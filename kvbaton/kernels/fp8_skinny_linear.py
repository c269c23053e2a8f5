"""Products of few rows with a weight in FP8: as fast as the weight can be read, in one launch.

Activations are quantised on the way, by runs of 128 features, whatever the weight's scales are for:
each program reads all of them anyway, and a launch less is a tenth of such a product. The weight's
rows are the tensor cores' rows, of which they take 64; the few tokens are their columns. Splits and
sums are those of `skinny_linear`; products of one run are summed as in `block_scaled_linear`.
"""

from __future__ import annotations

import torch

from kvbaton.kernels.block_scaled_linear import block_scaled_linear_reference
from kvbaton.kernels.jit import INTERPRETED, jit, next_power_of_2, tl, use_triton
from kvbaton.kernels.quantize_fp8 import LEAST, MAX, quantize_fp8_reference
from kvbaton.kernels.skinny_linear import Workspace, is_last

MAX_ROWS = 32
"""With more rows quantising them once is cheaper, and the library's products are as fast."""

RUN = 128
"""Features that share a scale."""

BLOCK_N = 64
PROGRAMS = 512
"""As many programs as fill the GPU some times over, if each has something to read."""

MOST_SPLITS, LEAST_DEPTH = 8, 1024


def fp8_skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, workspace: Workspace | None = None
) -> torch.Tensor:
    """Compute out = x @ (weight * scales).T, x rounded to e4m3 with a scale for each run.

    Args:
        x: [T, K] float16 or bfloat16, rows contiguous; T and K such that `fits`.
        weight: [N, K] float8_e4m3fn, contiguous.
        scales: [N, 1] or [N, K / 128] float32, contiguous.
        workspace: of this stream; None makes one for this call.

    Returns:
        [T, N], dtype of `x`.
    """
    if not use_triton(x):
        return fp8_skinny_linear_reference(x, weight, scales)
    return _launch(x, weight, scales, workspace or Workspace(x.device))


def fp8_skinny_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Plain torch for `fp8_skinny_linear`."""
    numbers, x_scales = quantize_fp8_reference(x, RUN)
    scales = scales.expand(-1, x_scales.shape[1])
    return block_scaled_linear_reference(numbers, x_scales, weight, scales, RUN, x.dtype)


def fits(rows: int, weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether the kernel is for this product: few rows, even tiles, scales as it knows them."""
    size, depth = weight.shape
    known = scales.shape[1] in (1, depth // RUN)
    return known and 0 < rows <= MAX_ROWS and size % BLOCK_N == 0 and depth % RUN == 0


def _splits(size: int, depth: int) -> int:
    splits = 1
    while (
        splits < MOST_SPLITS
        and size // BLOCK_N * splits < PROGRAMS
        and depth % (2 * splits * RUN) == 0
        and depth // (2 * splits) >= LEAST_DEPTH
    ):
        splits *= 2
    return splits


def _launch(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, workspace: Workspace
) -> torch.Tensor:
    rows, (size, depth) = x.shape[0], weight.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    splits = _splits(size, depth)
    _kernel[(size // BLOCK_N, splits)](
        x,
        weight,
        scales,
        out,
        workspace.scratch,
        workspace.counters,
        rows,
        size,
        depth,
        depth // splits,
        x.stride(0),
        SPLITS=splits,
        BLOCK_M=max(16, next_power_of_2(rows)),
        BLOCK_N=BLOCK_N,
        RUN=RUN,
        BY_RUN=scales.shape[1] > 1,
        # Triton's interpreter loses carries when it rounds to e4m3.
        ROUND=not INTERPRETED,
        LEAST=LEAST,
        MAX=MAX,
        num_warps=4,
        num_stages=4,
    )
    return out


@jit("rows")
def _kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    scratch: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    depth: tl.tensor,
    share: tl.tensor,
    stride: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
    BY_RUN: tl.constexpr,
    ROUND: tl.constexpr,
    LEAST: tl.constexpr,
    MAX: tl.constexpr,
) -> None:
    """One program: BLOCK_N rows of the weight, one of SPLITS parts of their columns."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, RUN)
    weights = weight + column.to(tl.int64)[:, None] * depth + inner[None, :]
    inputs = x + row[:, None] * stride + inner[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(split * share, (split + 1) * share, RUN):
        w = tl.load(weights + k)
        a = tl.load(inputs + k, mask=(row < rows)[:, None], other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(a), axis=1), LEAST) / MAX
        a = tl.minimum(tl.maximum(a / scale[:, None], -MAX), MAX)
        if ROUND:
            part = tl.dot(w, tl.trans(a.to(w.dtype)))
        else:
            part = tl.dot(w.to(tl.float32), tl.trans(a), input_precision="ieee")
        part *= scale[None, :]
        if BY_RUN:
            part *= tl.load(scales + column * (depth // RUN) + k // RUN)[:, None]
        acc += part
    if not BY_RUN:
        acc *= tl.load(scales + column)[:, None]
    place = row[None, :] * size + column[:, None]
    inside = (row < rows)[None, :]
    if SPLITS == 1:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(scratch + split * rows * size + place, acc, mask=inside)
        if is_last(counters + tile, SPLITS):
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in tl.static_range(SPLITS):
                part = scratch + other * rows * size + place
                acc += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
