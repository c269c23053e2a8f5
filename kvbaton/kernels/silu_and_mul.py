"""Gated activations of feed-forward layers: SwiGLU and GeGLU.

Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202. GELU is approximated with
tanh: Hendrycks and Gimpel, arXiv 1606.08415.
"""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import cdiv, jit, tl, use_triton, wait_for_inputs

BLOCK = 1024


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute out = silu(gate) * up, where [gate, up] = gate_up and silu(x) = x / (1 + exp(-x)).

    silu is computed in fp32 and rounded to the dtype before the product, as unfused layers do.

    Args:
        gate_up: [T, 2 * N], rows contiguous.

    Returns:
        [T, N], contiguous.
    """
    return _launch(gate_up, gelu=False) if use_triton(gate_up) else silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch for `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul`, with gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))."""
    return _launch(gate_up, gelu=True) if use_triton(gate_up) else gelu_and_mul_reference(gate_up)


def gelu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch for `gelu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


def _launch(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    tokens, width = gate_up.shape
    out = torch.empty(tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _kernel[(tokens, cdiv(width // 2, BLOCK))](
            gate_up, out, gate_up.stride(0), SIZE=width // 2, GELU=gelu, BLOCK=BLOCK, num_warps=4
        )
    return out


@jit(early=True)
def _kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if GELU:
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 * z)), and 2 * sqrt(2 / pi) = 1.5957691216057308
        away = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    else:
        away = wide
    wide = (wide / (1.0 + tl.exp(-away))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * SIZE + column, wide.to(gate.dtype), mask=inside)
