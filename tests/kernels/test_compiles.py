"""The kernels of experts compile for a GPU of compute capability 9.0, which none need be here for.

The interpreter shows what a kernel computes, not whether Triton takes it, and what it asks of a
multiprocessor.
"""

import os
import subprocess
import sys

import pytest

from kvbaton.kernels.jit import HAS_TRITON

SCRIPT = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvbaton.kernels import fused_moe, fused_topk

def check(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*") and at not in kernel.do_not_specialize
        and name not in kernel.do_not_specialize
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 227 << 10, made.metadata.shared
    return made.asm["ptx"]

lists = dict.fromkeys(("ids", "counts", "order", "experts", "used"), "*i32")
numbers = dict.fromkeys(("entries", "blocks", "first", "held"), "i32")
for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
    tensors = dict.fromkeys(("x", "weight", "bias", "out", "parts"), "*" + dtype) | lists | numbers
    for tile in list(fused_moe.TILES.values())[: 3 if dtype == "bf16" else 1]:
        for gated in (True, False):
            sizes = dict(SIZE=768, DEPTH=2880, TOP_K=8, BIASED=gated, GATED=gated, CLAMPED=gated)
            sizes |= dict(ALPHA=1.7, LIMIT=7.0, GROUP=16, BLOCK_M=tile.rows)
            sizes |= dict(BLOCK_N=tile.columns // (1 + gated), BLOCK_K=tile.depth_bytes // itemsize)
            used = {name: kind for name, kind in tensors.items()
                    if name in fused_moe._gemm_kernel.arg_names}
            ptx = check(fused_moe._gemm_kernel, used, sizes,
                        num_warps=tile.warps, num_stages=tile.stages)
            assert ("wgmma" in ptx) == (dtype == "bf16" and tile.rows >= 64), tile
    kinds = tensors | {"weights": "*fp32"}
    for kernel, sizes in (
        (fused_moe._count_kernel, dict(COUNT=1024)),
        (fused_moe._place_kernel, dict(HELD=60, BLOCK_E=64, ROWS=16, COUNT=1024)),
        (fused_moe._sum_kernel, dict(SIZE=768, TOP_K=8, BLOCK=1024)),
    ):
        check(kernel, {name: kinds[name] for name in kernel.arg_names if name in kinds}, sizes)
    for sigmoid in (False, True):
        check(
            fused_topk._kernel,
            {"logits": "*" + dtype, "bias": "*fp32", "weights": "*fp32", "ids": "*i32"},
            dict(EXPERTS=60, TOP_K=6, GROUPS=1 + 3 * sigmoid, TOP_GROUPS=1 + sigmoid,
                 SIGMOID=sigmoid, RENORMALIZE=True, SCALE=2.5, BLOCK=64, BLOCK_K=8,
                 BLOCK_G=1 + 3 * sigmoid),
            num_warps=1,
        )
"""


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_kernels_of_experts_compile_for_hopper() -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
