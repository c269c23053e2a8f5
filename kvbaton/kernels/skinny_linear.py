"""Products of few rows with a float or FP8 weight, as fast as the weight can be read.

A tile of the weight's rows is split along the columns until the programs fill the GPU (split-K).
The last program of a tile adds the parts, always in the same order, so the result is deterministic.
Source of the pattern: Osama et al., "Stream-K", arXiv 2301.03598, section 4.

A float weight is the left factor, so that its rows fill the tensor cores' tiles, however few rows
`x` has. A weight that has to be widened was measured slower as the left factor.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from kvbaton.kernels.jit import (
    INTERPRETED,
    is_last,
    jit,
    launch_next,
    next_power_of_2,
    prefetch,
    shared_memory,
    tl,
    use_triton,
    wait_for_inputs,
)
from kvbaton.kernels.quantize_fp8 import widen
from kvbaton.kernels.silu_and_mul import silu_and_mul

MAX_ROWS, MAX_ROWS_OF_LARGE = 32, 64
"""Most rows of `x` before the library's product is faster; the second for 64 Mi floats or more."""

MAX_ROWS_TO_WIDEN = 16
"""Most rows for an FP8 weight; for more, quantising them for an FP8 product is faster."""

MAX_QUANTISED_ROWS, MAX_QUANTISED_SIZE = 128, 4096
"""Most rows, and most outputs, if `x` is FP8 too; beyond these the library is faster."""

LARGE = 128
"""Rows per tile of a float weight large enough for a tile per multiprocessor."""

AHEAD = 4
"""Lines of 128 bytes of a row of floats that a program asks for while the kernel ahead ends.

More were measured slower, and any of an FP8 weight.
"""

BLOCK_K = 128
"""Columns that share a scale, unless a row has one scale; a part has a multiple of them."""


class _Tile(NamedTuple):
    """How a product is cut into programs.

    Attributes:
        rows: Rows of the weight per tile.
        depth_bytes: Bytes of each row that are read at a time.
        stages: Loads in flight.
        splits: Number of parts along the columns.
    """

    rows: int
    depth_bytes: int
    stages: int
    splits: int = 1


class Workspace:
    """Counters and scratch, for launches on one stream at a time.

    Attributes:
        counters: [n], int32; zero between launches.
        scratch: [m], fp32; no launch needs what an earlier one wrote.
    """

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(1 << 14, dtype=torch.int32, device=device)
        self.scratch = torch.empty(1 << 22, dtype=torch.float32, device=device)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: Workspace | None = None,
    scales: torch.Tensor | None = None,
    *,
    x_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Compute out = (x * x_scales) @ (weight * scales).T, accumulated in fp32.

    Args:
        x: [T, K]; if rows are not contiguous, the library computes the product.
        weight: [N, K], contiguous; of the dtype of `x`, or float8_e4m3fn with `scales`, which is
            widened as it is read if `x` is of floats.
        workspace: Workspace of this stream; None allocates one for this call.
        scales: [N, runs] float32, contiguous, for equal runs of columns; None for ones.
        x_scales: For an `x` of float8_e4m3fn, [T, 1] float32; `scales` then is [N, 1].
        dtype: dtype of the result; None for that of `x`.
        gated: Return `silu_and_mul` of the product, in the same launch if `gates`.

    Returns:
        [T, N]; with `gated` [T, N / 2].
    """
    dtype = dtype or x.dtype
    quantised = x_scales is not None
    if gated and (scales is not None or not gates(len(x), weight)):
        out = skinny_linear(x, weight, workspace, scales, x_scales=x_scales, dtype=dtype)
        return silu_and_mul(out)
    fits = wins(x.shape[0], weight, scales, quantised=quantised)
    if not use_triton(x) or not fits or x.stride(1) != 1:
        out = skinny_linear_reference(x, weight, scales, x_scales, dtype)
        return silu_and_mul(out) if gated else out
    workspace = workspace or Workspace(x.device)
    rows, depth = x.shape
    size = weight.shape[0]
    out = torch.empty(rows, size // 2 if gated else size, dtype=dtype, device=x.device)
    runs = 0 if scales is None else scales.shape[1]
    tile = _tile_of(size, depth, runs, quantised)
    block_m = max(64 if quantised else 16, next_power_of_2(rows))
    block_k = tile.depth_bytes // weight.itemsize
    stage = (tile.rows * weight.itemsize + block_m * x.itemsize) * block_k
    share = depth // tile.splits
    ahead = 0 if runs or INTERPRETED else min(AHEAD, share * weight.itemsize // 128)
    _kernel[(size // tile.rows, tile.splits)](
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
        SPLITS=tile.splits,
        RUNS=runs,
        QUANTISED=quantised,
        SWAPPED=not runs,
        GATED=gated,
        AHEAD=ahead,
        BLOCK_M=block_m,
        BLOCK_N=tile.rows,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=min(tile.stages, shared_memory(x.device) // stage),
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
    """Whether the kernel is used for a product: few rows, whole tiles; measured on Hopper."""
    size, depth = weight.shape
    runs = 0 if scales is None else scales.shape[1]
    tile = _tile_of(size, depth, runs, quantised)
    even = size % tile.rows == 0 and depth % (BLOCK_K * tile.splits) == 0
    if quantised:
        return 0 < rows <= MAX_QUANTISED_ROWS and size <= MAX_QUANTISED_SIZE and runs == 1 and even
    if runs:
        return 0 < rows <= MAX_ROWS_TO_WIDEN and even and runs in (1, depth // BLOCK_K)
    large = tile.rows == LARGE and size * depth >= 1 << 26
    return 0 < rows <= (MAX_ROWS_OF_LARGE if large else MAX_ROWS) and even


def gates(rows: int, weight: torch.Tensor) -> bool:
    """Whether `gated` needs no launch of its own: with few rows and a large float weight."""
    size, depth = weight.shape
    return wins(rows, weight) and _tile_of(size, depth, 0, False).rows == LARGE


@cache
def _tile_of(size: int, depth: int, runs: int, quantised: bool) -> _Tile:
    """Tile for a weight of [size, depth] with `runs` scales per row.

    For floats, a program has as many loads in flight as a multiprocessor has room for: programs for
    half of some 128 multiprocessors are enough, unless rows are long, and more than one for each
    are too many. For FP8, which is read in half the time, there are about four programs for each;
    if inputs are FP8 too, fewer, and with shorter parts.
    """
    if not runs and size >= 128 * LARGE and size % LARGE == 0:
        return _Tile(LARGE, 256, 4)
    programs, least = (128 if quantised else 512, 512 if quantised else 1024) if runs else (64, 512)
    splits = 1
    while (
        splits < 8
        and size // 64 * splits < programs
        and depth % (2 * splits * BLOCK_K) == 0
        and depth // (2 * splits) >= least
    ):
        splits *= 2
    if not runs:
        long = size // 64 * splits == programs and depth // splits >= 1 << 13
        return _Tile(64, 256, 6, 2 * splits if long else splits)
    wide = runs == 1 and depth // splits % (2 * BLOCK_K) == 0 and not quantised
    return _Tile(64, 256 if wide else 128, 3 if wide else 5, splits)


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
    SWAPPED: tl.constexpr,
    GATED: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_N rows of the weight, one of SPLITS parts of their columns.

    The weight has RUNS scales a row, one for each BLOCK_K columns if there are several. With
    QUANTISED the inputs have one a row. With SWAPPED the weight is the left factor; with GATED as
    well half of a tile are of gates, half of what these are for.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        half, of = BLOCK_N // 2, tl.arange(0, BLOCK_N)
        column = of // half * (size // 2) + tile * half + of % half
    inner = tl.arange(0, BLOCK_K)
    inside = (row < rows)[:, None]
    weight += column.to(tl.int64)[:, None] * depth
    if AHEAD:
        line = tl.arange(0, AHEAD) * (1024 // weight.dtype.element_ty.primitive_bitwidth)
        prefetch(weight + split * share + line[None, :])
    wait_for_inputs(LAUNCH=False)
    weights = weight + inner[None, :]
    inputs = x + row[:, None] * stride + inner[None, :]
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(split * share, (split + 1) * share, BLOCK_K):
        if RUNS > 1:  # asked for first, since nothing else has it come early
            scale = tl.load(scales + column * RUNS + k // BLOCK_K)
        a = tl.load(inputs + k, mask=inside, other=0.0)
        w = widen(tl.load(weights + k), a)
        if SWAPPED:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        elif RUNS > 1:
            acc += tl.dot(a, tl.trans(w), input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    launch_next()  # not before: the next one's programs would take room from this one's
    if GATED:
        # Rounded as by a product and `silu_and_mul`.
        both = acc.to(out.dtype.element_ty).to(tl.float32).reshape(2, BLOCK_N // 2, BLOCK_M)
        gate, up = both.permute(2, 1, 0).split()
        acc = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32) * up
        size, column = size // 2, tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    elif SWAPPED:
        acc = tl.trans(acc)
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
