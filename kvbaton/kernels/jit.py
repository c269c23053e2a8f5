"""Triton where it is installed, how its kernels follow each other, and when an op runs its kernel.

Triton comes with torch's CUDA wheels only; every module here imports without it. With the
environment variable ``TRITON_INTERPRET=1`` Triton interprets kernels, so that they run on CPU
tensors too (fp32): that is how they are tested without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from typing_extensions import override

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.language.target_info import cuda_capability_geq

    class EarlyKernel(triton.JITFunction):  # type: ignore[misc]
        """Launched when all programs of the one ahead on its stream have begun, not ended.

        Unless it is called with ``early=False``.
        """

        @override
        def run(self, *args: Any, early: bool = True, **kwargs: Any) -> Any:
            return super().run(*args, launch_pdl=early and _can_launch_early(), **kwargs)

else:
    triton = tl = None
    EarlyKernel = None  # type: ignore[assignment, misc]

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "EarlyKernel",
    "cdiv",
    "is_last",
    "jit",
    "launch_next",
    "next_power_of_2",
    "shared_memory",
    "tl",
    "triton",
    "use_triton",
    "wait_for_inputs",
]


def jit(*unspecialized: str, early: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`, or the bare function where there is no Triton (it is never launched there).

    Args:
        unspecialized: integers and pointers that change from call to call. Else Triton compiles
            for each of: 1, a multiple of 16, any other number; an address that is a multiple of
            16, any other. Only where no wide load depends on it.
        early: launch it while the kernel ahead of it ends, where the GPU can (programmatic
            dependent launch; NVIDIA, "CUDA C++ Programming Guide", 2025). Every program of it then
            calls `wait_for_inputs` before it reads or writes what any other kernel writes or reads.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        if not HAS_TRITON:
            return kernel
        # Of this name in profiles, where all are `_kernel` else.
        name = f"{kernel.__module__.rpartition('.')[2]}_{kernel.__name__.lstrip('_')}"
        make = EarlyKernel if early and not INTERPRETED else triton.jit
        return make(kernel, do_not_specialize=unspecialized, repr=lambda _: name)

    return decorate


@cache
def _can_launch_early() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


@jit()
def launch_next() -> None:
    """Let the next kernel be launched, if all programs of this one have come here or ended."""
    if cuda_capability_geq(9):
        gdc_launch_dependents()


@jit()
def wait_for_inputs(LAUNCH: tl.constexpr = True) -> None:
    """Wait until the kernels ahead have ended; see `jit`. With LAUNCH after a `launch_next`."""
    if LAUNCH:
        launch_next()
    if cuda_capability_geq(9):
        gdc_wait()


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


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an op on `tensor` runs its Triton kernel rather than its plain torch reference."""
    return tensor.is_cuda or INTERPRETED


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor's memory that a program may use; interpreted, an H100's."""
    if device.type != "cuda":
        return 232448
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def cdiv(value: int, divisor: int) -> int:
    """`value` / `divisor`, rounded up."""
    return -(-value // divisor)
