"""A mixture of experts, each over the tokens that the router gave it, as two grouped GEMMs.

An *entry* is a pair of a token and one of its experts. Entries are sorted by expert; those of an
expert are padded to whole blocks of rows, so that each block uses the weights of one expert,
whatever the balance. Sorting happens on the device, and grids depend on shapes alone, so that a
CUDA graph can capture it. Sources: Gale et al., "MegaBlocks", arXiv 2211.15841; vLLM's
``fused_moe``.

Weights may be FP8 with scales. With few entries per expert, reading its weights takes longer than
multiplying, and activations keep their dtype; with more, activations are quantised too. Weights may
also be MXFP4 (see `kernels.mxfp4`), which is widened as it is read; activations keep their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import linear

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton, wait_for_inputs
from kvbaton.kernels.mxfp4 import WORDS, mxfp4_sums, unpack_mxfp4
from kvbaton.kernels.quantize_fp8 import quantize_fp8, widen
from kvbaton.kernels.silu_and_mul import silu_and_mul_reference

GROUP = 16
"""Blocks of rows that traverse the weights together, so that they share the read of a tile."""

COUNT = 1024
"""Entries that a program of the sort reads at a time; four times as many for large blocks."""


@dataclass(frozen=True)
class Tile:
    """How a product is cut into programs.

    Attributes:
        rows: Entries per block.
        columns: Rows of the weight per program; in a gated product, half are gate and half are up.
        depth_bytes: Bytes of a weight row that are read at a time; for MXFP4, those of a block.
        warps: Warps per program.
        stages: Loads in flight.
        quantised: For FP8 weights: whether inputs are quantised too.
        swapped: For MXFP4 weights: whether they are the left factor.
    """

    rows: int
    columns: int
    depth_bytes: int
    warps: int
    stages: int
    quantised: bool = False
    swapped: bool = False


Tiles = dict[float, Tile]

TILES: Tiles = {
    10: Tile(16, 64, 256, 4, 4),
    128: Tile(64, 128, 128, 4, 3),
    1 << 31: Tile(128, 128, 128, 8, 3),
}
"""Tiles by the largest mean number of entries per expert for which each is used."""

FP8_TILES: Tiles = {
    16: Tile(16, 128, 128, 8, 3),
    128: Tile(64, 128, 128, 4, 4, quantised=True),
    1 << 31: Tile(128, 128, 128, 8, 3, quantised=True),
}
"""Tiles for FP8 weights, by the same number as `TILES`."""

MXFP4_TILES: Tiles = {
    0.5: Tile(16, 64, 64, 4, 3),
    10: Tile(16, 128, 64, 4, 4, swapped=True),
    24: Tile(32, 128, 64, 4, 3, swapped=True),
    128: Tile(64, 128, 64, 4, 3, swapped=True),
    1 << 31: Tile(128, 128, 64, 4, 3, swapped=True),
}
"""Tiles for MXFP4 weights, by the same number as `TILES`."""


def tile_of(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype = torch.bfloat16) -> Tile:
    """Tile for a number of tokens and weights of a dtype."""
    tiles = {torch.float8_e4m3fn: FP8_TILES, WORDS: MXFP4_TILES}.get(dtype, TILES)
    return next(tile for most, tile in tiles.items() if tokens * top_k <= most * num_experts)


def token_counts(top_k: int, num_experts: int) -> list[int]:
    """Smallest number of tokens for which each tile is used; kernels are compiled for each."""
    borders = {most for tiles in (TILES, FP8_TILES, MXFP4_TILES) for most in list(tiles)[:-1]}
    return [1, *(int(most * num_experts // top_k) + 1 for most in sorted(borders))]


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's activation: (up + 1) * gate * sigmoid(alpha * gate).

    gate is clamped to at most `limit`, and up to +-`limit`. Source: OpenAI, "gpt-oss-120b &
    gpt-oss-20b Model Card", arXiv 2508.10925, and its code.
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map [T, 2 * N], with gate and up interleaved, to [T, N]."""
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    first_expert: int = 0,
    num_experts: int | None = None,
    gate_up_scales: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu: ClampedSwiGLU | None = None,
) -> torch.Tensor:
    """Compute out[t] = sum over k of weights[t, k] * mlp(ids[t, k], x[t]), for the held experts.

    mlp(e, x) = down[e] @ (silu(gate) * up), where [gate, up] = gate_up[e] @ x.

    Args:
        x: [T, H], contiguous.
        gate_up: [E, 2 * M, H], contiguous: the held experts; of the dtype of `x`, or float8_e4m3fn;
            or packed by `pack_mxfp4`, in which case H and M are multiples of 32.
        down: [E, H, M], contiguous, like `gate_up`.
        weights: [T, K], of any float dtype, contiguous.
        ids: [T, K] int32, contiguous: expert ids; distinct for each token.
        first_expert: Id of the first held expert; other experts contribute nothing.
        num_experts: Number of experts that `ids` refers to; None for the number held.
        gate_up_scales: For FP8, [E, n, 2 * M] float32, contiguous: n scales per row, one for each
            H / n inputs (32, 64, or a multiple of 128; n is 1 for one scale per row). For MXFP4,
            as `pack_mxfp4` returns them.
        down_scales: [E, n, H], like `gate_up_scales`, one for each M / n inputs.
        gate_up_bias: [E, 2 * M], added to the first product.
        down_bias: [E, H], added to the second product.
        swiglu: Activation instead of silu(gate) * up; rows of gate and up then are interleaved.

    Returns:
        [T, H], dtype of `x`.
    """
    if not use_triton(x):
        return fused_moe_reference(
            x, gate_up, down, weights, ids, first_expert=first_expert,
            gate_up_scales=gate_up_scales, down_scales=down_scales,
            gate_up_bias=gate_up_bias, down_bias=down_bias, swiglu=swiglu,
        )  # fmt: skip
    out = torch.empty_like(x)
    tokens, top_k = ids.shape
    if not tokens:
        return out
    held, size, middle = len(down), x.shape[1], gate_up.shape[-2] // 2
    tile = tile_of(tokens, top_k, num_experts or held, down.dtype)
    rows = _sort(ids, first_expert, held, tile.rows)
    hidden = torch.empty((tokens * top_k, middle), dtype=x.dtype, device=x.device)
    first = gate_up, gate_up_scales, gate_up_bias
    _product(x, *first, hidden, rows, tile, top_k, gated=True, swiglu=swiglu)
    parts = torch.empty((tokens * top_k, size), dtype=x.dtype, device=x.device)
    _product(hidden, down, down_scales, down_bias, parts, rows, tile, 1)
    block = min(1024, next_power_of_2(size))
    _sum_kernel[(tokens, cdiv(size, block))](
        parts, weights, ids, out, first_expert, held,
        SIZE=size, TOP_K=top_k, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def fused_moe_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    first_expert: int = 0,
    gate_up_scales: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu: ClampedSwiGLU | None = None,
) -> torch.Tensor:
    """Plain torch for `fused_moe`: loops over experts with tokens; ids of any integer dtype."""
    out = torch.zeros_like(x)
    experts, order = (ids.flatten() - first_expert).sort(stable=True)
    numbers = torch.arange(len(down) + 1, dtype=experts.dtype, device=x.device)
    bounds = torch.searchsorted(experts, numbers).tolist()
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        entries = order[begin:end]
        tokens = entries // ids.shape[1]
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        both = linear(x[tokens], _widened(gate_up, gate_up_scales, expert, x), bias)
        hidden = silu_and_mul_reference(both) if swiglu is None else swiglu(both)
        bias = None if down_bias is None else down_bias[expert]
        parts = linear(hidden, _widened(down, down_scales, expert, hidden), bias)
        parts = parts * weights.flatten()[entries, None]
        out.index_add_(0, tokens, parts.to(x.dtype))
    return out


def _widened(
    weight: torch.Tensor, scales: torch.Tensor | None, expert: int, x: torch.Tensor
) -> torch.Tensor:
    """The weight of one expert, dequantised to the dtype of its inputs."""
    if scales is None:
        return weight[expert]
    if weight.dtype == WORDS:
        return unpack_mxfp4(weight[expert], scales[expert])[:, : x.shape[1]].to(x.dtype)
    run = weight.shape[2] // scales.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    of_columns = scales[expert].t().to(wide).repeat_interleave(run, 1)
    return (weight[expert].to(wide) * of_columns).to(x.dtype)


@dataclass(frozen=True)
class _Rows:
    """Entries sorted by expert.

    Attributes:
        entries: [blocks * rows per block] int32; padding holds the number of entries.
        experts: [blocks] int32, index among the held experts; for a lone token, `ids`.
        used: [1] int32: length of the used part of `entries`.
        first: Number to subtract from `experts`.
        lone: Whether there is only one token. Each entry then has its own block, and `entries` and
            `used` are not read.
    """

    entries: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor
    first: int = 0
    lone: bool = False


def _sort(ids: torch.Tensor, first: int, held: int, rows: int) -> _Rows:
    entries = ids.numel()
    if len(ids) == 1:
        return _Rows(ids, ids, ids, first, lone=True)
    # At most `entries` experts have an entry, and each pads by less than a block.
    blocks = cdiv(entries + min(entries, held) * (rows - 1), rows)
    scratch = torch.empty(blocks * (rows + 1) + 1, dtype=torch.int32, device=ids.device)
    used, experts, order = scratch[:1], scratch[1 : 1 + blocks], scratch[1 + blocks :]
    count, warps = (4 * COUNT, 8) if rows >= 128 else (COUNT, 4)
    _sort_kernel[(held,)](
        ids, order, experts, used, entries, first,
        HELD=held, BLOCK_E=next_power_of_2(held), ROWS=rows, COUNT=count, num_warps=warps,
    )  # fmt: skip
    return _Rows(order, experts, used)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: _Rows,
    tile: Tile,
    top_k: int,
    *,
    gated: bool = False,
    swiglu: ClampedSwiGLU | None = None,
) -> None:
    """Compute out[entry] = weight[its expert] @ x[entry // top_k], or its gated form."""
    size, depth = out.shape[1], x.shape[1]
    columns = tile.columns // 2 if gated else tile.columns
    blocks, packed = rows.experts.numel(), weight.dtype == WORDS
    runs = 0 if scales is None or packed else scales.shape[1]
    block_k = tile.depth_bytes // weight.itemsize
    if runs > 1:
        block_k = min(block_k, depth // runs)
    of_x, quantised = scales, runs > 0 and tile.quantised
    if quantised:
        x, of_x = quantize_fp8(x, depth // runs)
    _gemm_kernel[(blocks * cdiv(size, columns),)](
        x, of_x, weight, scales, bias, out,
        rows.entries, rows.experts, rows.used, len(out), blocks, rows.first, len(weight),
        LONE=rows.lone, SIZE=size, DEPTH=depth, RUNS=runs, TOP_K=top_k, GATED=gated,
        QUANTISED=quantised, PACKED=packed, SWAPPED=tile.swapped, BIASED=bias is not None,
        CLAMPED=swiglu is not None, ALPHA=swiglu.alpha if swiglu else 0.0,
        LIMIT=swiglu.limit if swiglu else 0.0,
        BLOCK_M=tile.rows, BLOCK_N=columns, BLOCK_K=block_k, GROUP=GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@jit("order", "experts", "used", "entries", "first", early=True)
def _sort_kernel(
    ids: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    used: tl.tensor,
    entries: tl.tensor,
    first: tl.tensor,
    HELD: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    """One program per expert held: lists its entries, in their order, behind those before it.

    Each counts those of all, which takes less than a launch that counts them once.
    """
    wait_for_inputs()
    expert = tl.program_id(0)
    other = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in tl.range(0, entries, COUNT):
        entry = start + tl.arange(0, COUNT)
        chosen = tl.load(ids + entry, mask=entry < entries, other=-1) - first
        here = (entry < entries) & (chosen >= 0) & (chosen < HELD)
        counts += tl.histogram(tl.where(here, chosen, 0), BLOCK_E, mask=here)
    padded = (counts + ROWS - 1) // ROWS * ROWS
    begin = tl.sum(tl.where(other < expert, padded, 0), axis=0)
    end = begin + tl.sum(tl.where(other == expert, padded, 0), axis=0)
    if expert == 0:
        tl.store(used, tl.sum(padded, axis=0))
    for block in tl.range(begin // ROWS, end // ROWS):
        tl.store(experts + block, expert)
    place = begin
    for start in tl.range(0, entries, COUNT):
        entry = start + tl.arange(0, COUNT)
        chosen = tl.load(ids + entry, mask=entry < entries, other=-1)
        mine = (chosen == expert + first).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, axis=0) - 1, entry, mask=mine > 0)
        place += tl.sum(mine, axis=0)
    rest = place + tl.arange(0, ROWS)
    tl.store(order + rest, rest * 0 + entries, mask=rest < end)


@jit("order", "experts", "used", "entries", "blocks", "first", "held", early=True)
def _gemm_kernel(
    x: tl.tensor,
    of_x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    used: tl.tensor,
    entries: tl.tensor,
    blocks: tl.tensor,
    first: tl.tensor,
    held: tl.tensor,
    LONE: tl.constexpr,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    RUNS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    QUANTISED: tl.constexpr,
    PACKED: tl.constexpr,
    SWAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One program: a block of entries times BLOCK_N rows of its expert's weight.

    With GATED these are rows of gate and as many of up, and silu(gate) * up is what it writes,
    rounded as by `silu_and_mul`, or with CLAMPED what `ClampedSwiGLU` says. With RUNS the weight is
    FP8, with so many scales a row, and with QUANTISED inputs are too, with as many. With PACKED the
    weight is MXFP4; see `mxfp4_sums`.
    """
    wait_for_inputs()
    # In a weight with gate and up: how far the rows of each are apart, and up's from gate's.
    step: tl.constexpr = 2 if CLAMPED else 1
    to_up: tl.constexpr = 1 if CLAMPED else SIZE
    tiles: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    height: tl.constexpr = 2 * SIZE if GATED else SIZE
    run: tl.constexpr = DEPTH // RUNS if RUNS > 1 else DEPTH
    program = tl.program_id(0)
    leader = program // (GROUP * tiles) * GROUP
    together = tl.minimum(blocks - leader, GROUP)
    turn = program % (GROUP * tiles)
    block = leader + turn % together
    expert = tl.load(experts + block).to(tl.int64) - first
    if LONE:
        some = (expert >= 0) & (expert < held)
    else:
        some = block * BLOCK_M < tl.load(used)
    if some:
        row_of_block = tl.arange(0, BLOCK_M)
        if LONE:
            entry = tl.where(row_of_block == 0, block, entries)
        else:
            entry = tl.load(order + block * BLOCK_M + row_of_block)
        column = turn // together * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        there, inside = (entry < entries)[:, None], (column < SIZE)[:, None]
        token = (entry // TOP_K).to(tl.int64)
        inputs = x + token[:, None] * DEPTH + inner[None, :]
        row = expert * height + column * step
        weights = weight + row[:, None] * DEPTH + inner[None, :]
        place = expert * (RUNS * height) + column * step
        if PACKED:
            first_row = expert * ((DEPTH + 127) // 128 * height) + column * step
            acc, up = mxfp4_sums(
                x + token[:, None] * DEPTH, there, weight, scales, first_row, column < SIZE,
                height, to_up, DEPTH, GATED, SWAPPED, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in tl.range(0, DEPTH, BLOCK_K):
                if RUNS > 1:  # asked for first, since nothing else has them come early
                    at = scales + place + k // run * height
                    of_a = _input_scales(of_x + token * RUNS + k // run, entry < entries, QUANTISED)
                    of_w = tl.load(at, mask=column < SIZE, other=0.0)[None, :]
                    if GATED:
                        of_up = tl.load(at + to_up, mask=column < SIZE, other=0.0)[None, :]
                left = (inner < DEPTH - k)[None, :]
                a = tl.load(inputs + k, mask=there & left, other=0.0)
                w = widen(tl.load(weights + k, mask=inside & left, other=0.0), a)
                if RUNS > 1:
                    acc += tl.dot(a, tl.trans(w), input_precision="ieee") * (of_a * of_w)
                else:
                    acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
                if GATED:
                    w = tl.load(weights + to_up * DEPTH + k, mask=inside & left, other=0.0)
                    w = widen(w, a)
                    if RUNS > 1:
                        up += tl.dot(a, tl.trans(w), input_precision="ieee") * (of_a * of_up)
                    else:
                        up = tl.dot(a, tl.trans(w), up, input_precision="ieee")
        if RUNS == 1:
            of_a = _input_scales(of_x + token, entry < entries, QUANTISED)
            acc *= of_a * tl.load(scales + place, mask=column < SIZE, other=0.0)[None, :]
            if GATED:
                up *= of_a * tl.load(scales + place + to_up, mask=column < SIZE, other=0.0)[None, :]
        if BIASED:
            acc += tl.load(bias + row, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
            if GATED:
                row += to_up
                up += tl.load(bias + row, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        result = acc.to(out.dtype.element_ty)
        if CLAMPED:
            gate = tl.minimum(acc, LIMIT)
            wide = gate / (1.0 + tl.exp(-ALPHA * gate))
            result = (wide * (tl.clamp(up, -LIMIT, LIMIT) + 1.0)).to(result.dtype)
        elif GATED:
            wide = result.to(tl.float32)
            wide = (wide / (1.0 + tl.exp(-wide))).to(result.dtype).to(tl.float32)
            result = (wide * up.to(result.dtype).to(tl.float32)).to(result.dtype)
        target = out + entry.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(target, result, mask=there & (column < SIZE)[None, :])


@jit()
def _input_scales(scales: tl.tensor, inside: tl.tensor, QUANTISED: tl.constexpr) -> Any:
    """[entries, 1], ones for inputs that are not quantised."""
    found = tl.full(inside.shape, 1.0, tl.float32)
    if QUANTISED:
        found = tl.load(scales, mask=inside, other=0.0)
    return found[:, None]


@jit("first", early=True)
def _sum_kernel(
    parts: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    held: tl.tensor,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per token and BLOCK columns; what other ranks' experts left is not read."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        entry = token * TOP_K + choice
        expert = tl.load(ids + entry) - first
        here = (expert >= 0) & (expert < held)
        part = tl.load(parts + entry * SIZE + column, mask=inside & here, other=0.0)
        acc += tl.load(weights + entry).to(tl.float32) * part.to(tl.float32)
    tl.store(out + token * SIZE + column, acc.to(out.dtype.element_ty), mask=inside)
