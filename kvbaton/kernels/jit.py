"""Optional Triton: the `jit` decorator, programmatic dependent launch, and `use_triton`.

Only torch's CUDA wheels come with Triton; every module here can be imported without it. With the
environment variable ``TRITON_INTERPRET=1`` Triton interprets kernels, so that they run on CPU
tensors too (fp32): this is how they are tested without a GPU.
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
        """Starts when all programs of the previous kernel of its stream have begun.

        More precisely, when each has called `launch_next` or ended.
        """

        @override
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return super().run(*args, launch_pdl=_can_launch_early(), **kwargs)

else:
    triton = tl = None
    EarlyKernel = None  # type: ignore[assignment, misc]

__all__ = ["tl"]  # the one name that others take from here though it is Triton's


def jit(*unspecialized: str, early: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`; without Triton, the bare function, which is never launched.

    Args:
        unspecialized: Names of integer and pointer parameters that change from call to call. For
            others Triton compiles a variant each for 1, multiples of 16 and other numbers, and for
            addresses that are multiples of 16 and others. Wide loads must not depend on them.
        early: Start the kernel while the previous one ends, where the GPU can (programmatic
            dependent launch; NVIDIA, "CUDA C++ Programming Guide", 2025). Each of its programs must
            call `wait_for_inputs` before it reads or writes what any other kernel writes or reads.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        if not HAS_TRITON:
            return kernel
        # The name in profiles; otherwise all would be called `_kernel`.
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
def prefetch(pointers: tl.tensor) -> None:
    """Ask for the lines of 128 bytes at `pointers` to be read into the GPU's L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
    """Bytes of shared memory that a program may use; without CUDA, those of an H100."""
    if device.type != "cuda":
        return 232448
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def cdiv(value: int, divisor: int) -> int:
    """`value` / `divisor`, rounded up."""
    return -(-value // divisor)
