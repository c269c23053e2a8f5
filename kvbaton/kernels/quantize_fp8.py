"""Quantise activations to FP8 e4m3, with a scale per group of a token's features."""

from __future__ import annotations

from typing import Any

import torch

from kvbaton.kernels.jit import (
    INTERPRETED,
    cdiv,
    jit,
    next_power_of_2,
    tl,
    use_triton,
    wait_for_inputs,
)
from kvbaton.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

MAX = 448.0
"""Largest finite e4m3 number."""

LEAST = 1e-12
"""Lower bound of a group's largest magnitude, so that the scale of zeros is not 0."""


FOURS = 4
"""The library's product with block scales needs a multiple of this many tokens."""


PROGRAM = 1024
"""Features per program: those of several groups if groups are smaller."""

MOST_GATED = 1 << 14
"""Largest group for which `silu_and_mul` is fused: its input takes twice the registers."""


def quantize_fp8(
    x: torch.Tensor, group: int, *, for_blocks: bool = False, gated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute scale = max |x| / 448 of each group, and x / scale rounded to e4m3.

    Args:
        x: [T, K], or [T, 2 * K] with `gated`; rows contiguous.
        group: Features that share a scale; the last group may be shorter.
        for_blocks: Use the layout of `torch.nn.functional.scaled_mm` with a scale per 128 features:
            T rounded up to a multiple of 4 (the added rows are undefined), and the scales of one
            group adjacent in memory.
        gated: Quantise `silu_and_mul(x)` instead of `x`.

    Returns:
        [T, K] float8_e4m3fn, and [T, ceil(K / group)] float32.
    """
    if not use_triton(x):
        numbers, scales = quantize_fp8_reference(silu_and_mul_reference(x) if gated else x, group)
        if for_blocks:
            extra = -len(x) % FOURS
            numbers = torch.nn.functional.pad(numbers.view(torch.uint8), (0, 0, 0, extra))
            numbers = numbers.view(torch.float8_e4m3fn)
            scales = torch.nn.functional.pad(scales, (0, 0, 0, extra)).t().contiguous().t()
        return numbers, scales
    if gated and group > MOST_GATED:
        x, gated = silu_and_mul(x), False
    tokens, size = len(x), x.shape[1] // 2 if gated else x.shape[1]
    groups = cdiv(size, group)
    rows = cdiv(tokens, FOURS) * FOURS if for_blocks else tokens
    # Triton's interpreter loses carries when it rounds to e4m3, so torch rounds instead.
    dtype = torch.float32 if INTERPRETED else torch.float8_e4m3fn
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    shape = (groups, rows) if for_blocks else (rows, groups)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    scales = scales.t() if for_blocks else scales
    if tokens:
        block = next_power_of_2(min(group, size))
        together = max(1, min(PROGRAM // block, next_power_of_2(groups)))
        _kernel[(tokens, cdiv(groups, together))](
            x,
            out,
            scales,
            x.stride(0),
            size,
            *scales.stride()[:2],
            GROUP=group,
            GROUPS=together,
            BLOCK=block,
            GATED=gated,
            LEAST=LEAST,
            MAX=MAX,
            num_warps=max(1, min(16 if gated else 8, block * together // 256)),
        )
    return out.to(torch.float8_e4m3fn), scales


def quantize_fp8_reference(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch for `quantize_fp8`."""
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group))
    groups = wide.view(len(x), wide.shape[1] // group, group)
    scales = groups.abs().amax(2).clamp(min=LEAST) / MAX
    numbers = (groups / scales[..., None]).clamp(-MAX, MAX).flatten(1)[:, : x.shape[1]]
    return numbers.to(torch.float8_e4m3fn), scales


@jit()
def widen(x: tl.tensor, like: tl.tensor) -> Any:
    """`x` in the dtype of `like`, if that is one of floats.

    Of FP8 it goes by way of float32: the multiprocessor's own conversion from float16 to bfloat16
    is slower than weights can be read (16 a cycle on Hopper).
    """
    if x.dtype == tl.float8e4nv:
        if like.dtype != tl.float8e4nv:
            x = x.to(tl.float16)
            if like.dtype != tl.float16:
                x = x.to(tl.float32).to(like.dtype)
    return x


@jit("stride_token", "stride_group", early=True)
def _kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    stride_token: tl.tensor,
    stride_group: tl.tensor,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    LEAST: tl.constexpr,
    MAX: tl.constexpr,
) -> None:
    """One program: GROUPS groups of a token."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inner = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + inner[None, :]
    inside = (inner < GROUP)[None, :] & (column < size)
    value = tl.load(x + row * stride + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    if GATED:
        up = tl.load(x + row * stride + size + column, mask=inside, other=0.0)
        wide = (wide / (1.0 + tl.exp(-wide))).to(value.dtype).to(tl.float32)
        wide = (wide * up.to(tl.float32)).to(value.dtype).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), axis=1), LEAST) / MAX
    number = tl.minimum(tl.maximum(wide / scale[:, None], -MAX), MAX)
    tl.store(out + row * size + column, number.to(out.dtype.element_ty), mask=inside)
    place = scales + row * stride_token + group.to(tl.int64) * stride_group
    tl.store(place, scale, mask=group * GROUP < size)
