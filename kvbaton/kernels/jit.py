"""Triton where it is installed, and the rule by which an op picks its kernel or its reference.

Triton comes with torch's CUDA wheels only; every module here imports without it. With the
environment variable ``TRITON_INTERPRET=1`` Triton interprets kernels, so that they run on CPU
tensors too (fp32): that is how they are tested without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

if HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = tl = None

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "cdiv",
    "jit",
    "next_power_of_2",
    "tl",
    "triton",
    "use_triton",
]


def jit(*unspecialized: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`, or the bare function where there is no Triton (it is never launched there).

    Args:
        unspecialized: integers and pointers that change from call to call. Else Triton compiles
            for each of: 1, a multiple of 16, any other number; an address that is a multiple of
            16, any other. Only where no wide load depends on it.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        if not HAS_TRITON:
            return kernel
        # Of this name in profiles, where all are `_kernel` else.
        name = f"{kernel.__module__.rpartition('.')[2]}_{kernel.__name__.lstrip('_')}"
        return triton.jit(kernel, do_not_specialize=unspecialized, repr=lambda _: name)

    return decorate


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an op on `tensor` runs its Triton kernel rather than its plain torch reference."""
    return tensor.is_cuda or INTERPRETED


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def cdiv(value: int, divisor: int) -> int:
    """`value` / `divisor`, rounded up."""
    return -(-value // divisor)
