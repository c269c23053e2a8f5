"""Activations to FP8 e4m3 with a scale for each group of a token's features, for FP8 products."""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import INTERPRETED, cdiv, jit, next_power_of_2, tl, use_triton

MAX = 448.0
"""Largest number of e4m3."""

LEAST = 1e-12
"""Least magnitude that a group is taken to have, so that zeros have a scale too."""


FOURS = 4
"""The library's product by blocks takes tokens in fours."""


def quantize_fp8(
    x: torch.Tensor, group: int, *, for_blocks: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute scale = max |x| / 448 of each group, and x / scale rounded to e4m3.

    Args:
        x: [T, K], rows contiguous.
        group: features that share a scale; the last group may be shorter.
        for_blocks: as `torch.nn.functional.scaled_mm` takes them with a scale for each 128: T
            rounded up to a multiple of 4, with anything in the rows that are added, and the tokens'
            scales of a group side by side.

    Returns:
        [T, K] float8_e4m3fn, and [T, ceil(K / group)] float32.
    """
    if use_triton(x):
        return _launch(x, group, for_blocks)
    numbers, scales = quantize_fp8_reference(x, group)
    if for_blocks:
        extra = -len(x) % FOURS
        numbers = torch.nn.functional.pad(numbers.view(torch.uint8), (0, 0, 0, extra))
        numbers = numbers.view(torch.float8_e4m3fn)
        scales = torch.nn.functional.pad(scales, (0, 0, 0, extra)).t().contiguous().t()
    return numbers, scales


def quantize_fp8_reference(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch for `quantize_fp8`."""
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group))
    groups = wide.view(len(x), wide.shape[1] // group, group)
    scales = groups.abs().amax(2).clamp(min=LEAST) / MAX
    numbers = (groups / scales[..., None]).clamp(-MAX, MAX).flatten(1)[:, : x.shape[1]]
    return numbers.to(torch.float8_e4m3fn), scales


def _launch(x: torch.Tensor, group: int, for_blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, size = x.shape
    groups = cdiv(size, group)
    rows = cdiv(tokens, FOURS) * FOURS if for_blocks else tokens
    # Triton's interpreter loses carries when it rounds to e4m3, so torch rounds there.
    dtype = torch.float32 if INTERPRETED else torch.float8_e4m3fn
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    shape = (groups, rows) if for_blocks else (rows, groups)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    scales = scales.t() if for_blocks else scales
    if tokens:
        block = next_power_of_2(min(group, size))
        _kernel[(tokens, groups)](
            x,
            out,
            scales,
            x.stride(0),
            size,
            scales.stride(0),
            scales.stride(1),
            GROUP=group,
            BLOCK=block,
            LEAST=LEAST,
            MAX=MAX,
            num_warps=1 if block <= 512 else 8,
        )
    return out.to(torch.float8_e4m3fn), scales


@jit("stride_token", "stride_group")
def _kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    stride_token: tl.tensor,
    stride_group: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    MAX: tl.constexpr,
) -> None:
    """One program: one group of a token."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    column = group * GROUP + inner
    inside = (inner < GROUP) & (column < size)
    wide = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide)), LEAST) / MAX
    number = tl.minimum(tl.maximum(wide / scale, -MAX), MAX)
    tl.store(out + row * size + column, number.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row * stride_token + group.to(tl.int64) * stride_group, scale)
