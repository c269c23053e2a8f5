"""Root mean square normalisation, with the residual addition before it in the same pass.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import jit, next_power_of_2, tl, use_triton, wait_for_inputs


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise the last axis: y = (weight_offset + weight) * x / sqrt(mean(x^2) + eps).

    With `residual`, ``residual += x`` first (in place, rounded to its dtype), and the sum is
    normalised. The mean is computed in fp32. Without an offset, the normalised row is rounded to
    the dtype before it is multiplied by the weight (as in Llama); with one, only the product is
    rounded (as in Gemma). With `gate`, the result is multiplied by silu(gate), in fp32.

    Args:
        x: [..., N]; any strides on up to three axes, the last one contiguous.
        weight: [N].
        eps: Added to the mean square.
        residual: [T, N], for an `x` of [T, N]; rows contiguous; updated in place.
        weight_offset: 0, or 1 where the checkpoint stores weight - 1.
        gate: [T, groups, rows, N], for an `x` of [T, groups * rows, N]; any strides on the first
            two axes, the others contiguous.

    Returns:
        [..., N], contiguous, dtype of `x`.
    """
    if not use_triton(x):
        return rms_norm_reference(
            x, weight, eps, residual=residual, weight_offset=weight_offset, gate=gate
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    size = x.shape[-1]
    block = next_power_of_2(size)
    if rows.shape[0]:
        _kernel[(rows.shape[0], rows.shape[1])](
            rows,
            weight,
            residual if residual is not None else rows,
            gate if gate is not None else rows,
            out,
            eps,
            *rows.stride()[:2],
            residual.stride(0) if residual is not None else 0,
            *(gate.stride()[:2] if gate is not None else (0, 0)),
            SIZE=size,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            GATES=gate.shape[2] if gate is not None else 0,
            WEIGHT_OFFSET=weight_offset,
            num_warps=max(1, min(8, block // 512)),
        )
    return out


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch for `rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    row = x.float()
    row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    if weight_offset:
        out = (row * (weight_offset + weight.float())).to(x.dtype)
    else:
        out = row.to(x.dtype) * weight
    if gate is not None:
        out = (out * torch.nn.functional.silu(gate.reshape(x.shape).float())).to(x.dtype)
    return out


@jit()
def scaled(
    value: tl.tensor,
    factor: tl.tensor,
    scale: tl.tensor,
    dtype: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
) -> tl.tensor:
    """Values of a row, in fp32, times its factor and the norm's weight; see `rms_norm`."""
    if WEIGHT_OFFSET == 0.0:
        return (value * factor).to(dtype).to(tl.float32) * scale
    else:
        return value * factor * (WEIGHT_OFFSET + scale)


@jit(early=True)
def _kernel(
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    stride_row: tl.tensor,
    stride_head: tl.tensor,
    stride_residual: tl.tensor,
    stride_gate: tl.tensor,
    stride_group: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATES: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride_row + head * stride_head + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        place = residual + row * stride_residual + column
        value = (value.to(tl.float32) + tl.load(place, mask=inside, other=0.0)).to(value.dtype)
        tl.store(place, value, mask=inside)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    wide = scaled(wide, factor, scale, value.dtype, WEIGHT_OFFSET)
    if GATES:
        place = gate + row * stride_gate + head // GATES * stride_group + head % GATES * SIZE
        away = tl.load(place + column, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(value.dtype).to(tl.float32) * away / (1.0 + tl.exp(-away))
    target = out + (row * tl.num_programs(1) + head) * SIZE + column
    tl.store(target, wide.to(out.dtype.element_ty), mask=inside)
