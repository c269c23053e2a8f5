"""Products of few rows with a weight, of floats or FP8: as fast as the weight can be read.

A tile of the weight's rows is split along the columns until the programs fill the GPU; the last
program of a tile adds the parts, in their order, whoever it is; so the result is deterministic.
Source of the pattern: Osama et al., "Stream-K", arXiv 2301.03598, section 4.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kvbaton.kernels.jit import jit, launch_next, next_power_of_2, tl, use_triton, wait_for_inputs
from kvbaton.kernels.quantize_fp8 import widen

MAX_ROWS = 32
"""With more rows the library's product is faster."""

MAX_QUANTISED_ROWS, MAX_QUANTISED_SIZE = 128, 4096
"""Likewise where `x` is FP8 too, and with more outputs."""

BLOCK_N, BLOCK_K = 64, 128


class Workspace:
    """Counters, zero between launches, and fp32 scratch; for launches on one stream at a time.

    Attributes:
        counters: [n], int32.
        scratch: [m], fp32; its content is never needed by the next launch.
    """

    def __init__(
        self, device: torch.device, *, num_counters: int = 1 << 14, num_scratch: int = 1 << 22
    ) -> None:
        self.counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
        self.scratch = torch.empty(num_scratch, dtype=torch.float32, device=device)


@jit()
def is_last(counter: tl.tensor, parties: tl.tensor) -> tl.tensor:
    """Count this program in, its stores before this call included; whether it is the last.

    The last one resets the counter and sees what the others stored. Read that with
    ``cache_modifier=".cg"``, past the multiprocessor's own cache.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == parties - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: Workspace | None = None,
    scales: torch.Tensor | None = None,
    *,
    x_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute out = (x * x_scales) @ (weight * scales).T, accumulated in fp32.

    Args:
        x: [T, K]; the library's product takes those whose rows are not contiguous.
        weight: [N, K], contiguous; of the dtype of `x`, or float8_e4m3fn with `scales`, which is
            widened as it is read if `x` is of floats.
        workspace: of this stream; None makes one for this call.
        scales: [N, runs] float32, contiguous, of equal runs of columns; None for ones.
        x_scales: of an `x` of float8_e4m3fn: [T, 1] float32; the weight has one scale a row, too.
        dtype: of the result; None takes that of `x`.

    Returns:
        [T, N].
    """
    dtype = dtype or x.dtype
    quantised = x_scales is not None
    fits = wins(x.shape[0], weight, scales, quantised=quantised)
    if not use_triton(x) or not fits or x.stride(1) != 1:
        return skinny_linear_reference(x, weight, scales, x_scales, dtype)
    workspace = workspace or Workspace(x.device)
    rows, depth = x.shape
    size = weight.shape[0]
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    runs = 0 if scales is None else scales.shape[1]
    splits = _splits(size, depth, runs, quantised)
    share = depth // splits
    wide = runs == 1 and share % (2 * BLOCK_K) == 0 and not quantised  # bytes as of 16 bits
    _kernel[(size // BLOCK_N, splits)](
        x,
        weight,
        scales,
        x_scales,
        out,
        workspace.scratch,
        workspace.counters,
        rows,
        size,
        depth,
        share,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(0),
        SPLITS=splits,
        RUNS=runs,
        QUANTISED=quantised,
        BLOCK_M=max(64 if quantised else 16, next_power_of_2(rows)),
        BLOCK_N=BLOCK_N,
        BLOCK_K=2 * BLOCK_K if wide else BLOCK_K,
        num_warps=4,
        num_stages=5 if quantised or runs > 1 else 3,
        early=runs > 0,  # of floats it was measured slower, with few rows by 3 %
    )
    return out


def skinny_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    x_scales: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Plain torch for `skinny_linear`."""
    if scales is None:
        return linear(x, weight)
    wide = weight.float() * scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    inputs = x.float() if x_scales is None else x.float() * x_scales
    return linear(inputs, wide).to(dtype)


def wins(
    rows: int, weight: torch.Tensor, scales: torch.Tensor | None = None, *, quantised: bool = False
) -> bool:
    """Whether the kernel is for this product: few rows, even tiles, measured faster on an H200."""
    size, depth = weight.shape
    runs = 0 if scales is None else scales.shape[1]
    splits = _splits(size, depth, runs, quantised)
    even = size % BLOCK_N == 0 and depth % (BLOCK_K * splits) == 0
    if quantised:
        return 0 < rows <= MAX_QUANTISED_ROWS and size <= MAX_QUANTISED_SIZE and runs == 1 and even
    if not 0 < rows <= MAX_ROWS or not even:
        return False
    return runs in (1, depth // BLOCK_K) if runs else size <= 4096 or size >= 65536


def _splits(size: int, depth: int, runs: int, quantised: bool) -> int:
    """Parts along the columns: about four programs for each of some 128 multiprocessors.

    Of FP8, which is read in half the time, more and shorter ones; of more rows fewer.
    """
    most, programs, least = (8, 512, 1024) if runs else (4, 256, BLOCK_K)
    if quantised:
        programs, least = 128, 512
    splits = 1
    while (
        splits < most
        and size // BLOCK_N * splits < programs
        and depth % (2 * splits * BLOCK_K) == 0
        and depth // (2 * splits) >= least
    ):
        splits *= 2
    return splits


@jit("rows", early=True)
def _kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    x_scales: tl.tensor,
    out: tl.tensor,
    scratch: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    depth: tl.tensor,
    share: tl.tensor,
    stride: tl.tensor,
    stride_token: tl.tensor,
    SPLITS: tl.constexpr,
    RUNS: tl.constexpr,
    QUANTISED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_N rows of the weight, one of SPLITS parts of their columns.

    The weight has RUNS scales a row, one for each BLOCK_K columns if there are several. With
    QUANTISED the inputs have one a row.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    inside = (row < rows)[:, None]
    wait_for_inputs(LAUNCH=False)
    weights = weight + column.to(tl.int64)[:, None] * depth + inner[None, :]
    inputs = x + row[:, None] * stride + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(split * share, (split + 1) * share, BLOCK_K):
        if RUNS > 1:  # asked for first, since nothing else has it come early
            scale = tl.load(scales + column * RUNS + k // BLOCK_K)
        a = tl.load(inputs + k, mask=inside, other=0.0)
        w = widen(tl.load(weights + k), a)
        if RUNS > 1:
            acc += tl.dot(a, tl.trans(w), input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    launch_next()  # not before: the next one's programs would take room from this one's
    if RUNS == 1:
        acc *= tl.load(scales + column)[None, :]
        if QUANTISED:
            acc *= tl.load(x_scales + row * stride_token, mask=row < rows, other=0.0)[:, None]
    target = out + row[:, None] * size + column[None, :]
    if SPLITS == 1:
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        part = scratch + row[:, None] * size + column[None, :]
        tl.store(part + split * rows * size, acc, mask=inside)
        if is_last(counters + tile, SPLITS):
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLITS):
                place = part + other * rows * size
                acc += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
