"""Kernels of experts, FP8, latents and sampling compile for compute capability 9.0, without a GPU.

The interpreter shows what a kernel computes, not whether Triton takes it, and what it asks of a
multiprocessor; nor that one which is launched early waits before it touches memory.
"""

import os
import subprocess
import sys

import pytest

from kvbaton.kernels.jit import HAS_TRITON

CHECK = r"""
import re

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import driver

from kvbaton.kernels.jit import EarlyKernel

class Hopper:
    @staticmethod
    def get_current_target():
        return GPUTarget("cuda", 90, 32)

driver.set_active(Hopper)

def check(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    sizes = ("size", "depth", "share", "stride")  # multiples of 16 in every model
    constants = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if (str(signature[name]).startswith("*") and at not in kernel.do_not_specialize
        and name not in kernel.do_not_specialize) or name in sizes
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 227 << 10, made.metadata.shared
    ptx = made.asm["ptx"]
    if isinstance(kernel, EarlyKernel):
        before, waits, after = ptx.partition("griddepcontrol.wait")
        assert waits and not re.search(r"(ld|st|red|atom)\.\S*global|cp\.async\.c[ag]", before)
        assert re.search(r"(ld|st)\.\S*global", after)
    else:
        assert "griddepcontrol.wait" not in ptx  # it may let the next one begin
    return ptx
"""

EXPERTS = """
from kvbaton.kernels import fused_moe, fused_router, fused_topk

lists = dict.fromkeys(("ids", "order", "experts", "used"), "*i32")
numbers = dict.fromkeys(("entries", "blocks", "first", "held"), "i32")
for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
    tensors = dict.fromkeys(("x", "weight", "bias", "out", "parts"), "*" + dtype) | lists | numbers
    for tile in list(fused_moe.TILES.values())[: 3 if dtype == "bf16" else 1]:
        for gated in (True, False):
            sizes = dict(SIZE=768, DEPTH=2880, TOP_K=8, BIASED=gated, GATED=gated, CLAMPED=gated)
            sizes |= dict(LONE=gated and tile.rows == 16)
            sizes |= dict(ALPHA=1.7, LIMIT=7.0, GROUP=16, BLOCK_M=tile.rows)
            sizes |= dict(BLOCK_N=tile.columns // (1 + gated), BLOCK_K=tile.depth_bytes // itemsize)
            used = {name: kind for name, kind in tensors.items()
                    if name in fused_moe._gemm_kernel.arg_names}
            ptx = check(fused_moe._gemm_kernel, used | dict(of_x="*fp32", scales="*fp32"),
                        sizes | dict(RUNS=0, QUANTISED=False, PACKED=False, SWAPPED=False),
                        num_warps=tile.warps, num_stages=tile.stages)
            assert ("wgmma" in ptx) == (dtype == "bf16" and tile.rows >= 64), tile
    for tile in fused_moe.FP8_TILES.values() if dtype == "bf16" else ():
        for runs, gated in ((1, True), (16, True), (16, False)):
            kinds = tensors | dict(of_x="*fp32", scales="*fp32", weight="*fp8e4nv")
            kinds |= {"x": "*fp8e4nv"} if tile.quantised else {}
            kinds = {name: kinds[name] for name in fused_moe._gemm_kernel.arg_names
                     if name in kinds and name != "bias"}
            sizes = dict(SIZE=768, DEPTH=2048, RUNS=runs, TOP_K=8, BIASED=False, GATED=gated)
            sizes |= dict(QUANTISED=tile.quantised, CLAMPED=False, LONE=False, ALPHA=0.0, LIMIT=0.0)
            sizes |= dict(PACKED=False, SWAPPED=False)
            sizes |= dict(GROUP=16, BLOCK_M=tile.rows, BLOCK_N=tile.columns // (1 + gated))
            ptx = check(fused_moe._gemm_kernel, kinds, sizes | dict(BLOCK_K=128, bias=None),
                        num_warps=tile.warps, num_stages=tile.stages)
            assert ("e4m3.e4m3" in ptx) == tile.quantised
            assert "cp.async.cg.shared.global" in ptx
    for tile in fused_moe.MXFP4_TILES.values() if dtype == "bf16" else ():
        for gated in (True, False):
            kinds = tensors | dict(of_x="*i32", scales="*i32", weight="*i16")
            kinds = {name: kinds[name] for name in fused_moe._gemm_kernel.arg_names
                     if name in kinds}
            sizes = dict(SIZE=2880, DEPTH=2880, RUNS=0, TOP_K=4, BIASED=True, GATED=gated)
            sizes |= dict(QUANTISED=False, PACKED=True, SWAPPED=tile.swapped, CLAMPED=gated)
            sizes |= dict(LONE=gated and tile.rows == 16, ALPHA=1.7, LIMIT=7.0, GROUP=16)
            sizes |= dict(BLOCK_M=tile.rows, BLOCK_N=tile.columns // (1 + gated), BLOCK_K=32)
            ptx = check(fused_moe._gemm_kernel, kinds, sizes,
                        num_warps=tile.warps, num_stages=tile.stages)
            assert "cp.async.cg.shared.global" in ptx  # 16 bytes of packed weights at a time
            assert ("wgmma" in ptx) == tile.swapped
            # One for two weights, and no more: each number of the tile is widened once.
            widened = tile.columns * 128 // 2 // (32 * tile.warps)
            assert ptx.count("fma.rn.bf16x2") == widened, ptx.count("fma.rn.bf16x2")
    kinds = tensors | {"weights": "*fp32"}
    for kernel, sizes in (
        (fused_moe._sort_kernel, dict(HELD=60, BLOCK_E=64, ROWS=16, COUNT=1024)),
        (fused_moe._sum_kernel, dict(SIZE=768, TOP_K=8, BLOCK=1024)),
    ):
        check(kernel, {name: kinds[name] for name in kernel.arg_names if name in kinds}, sizes)
    for sigmoid in (False, True):
        check(
            fused_topk._kernel,
            {"logits": "*fp32", "like": "*" + dtype, "bias": "*fp32", "weights": "*fp32",
             "ids": "*i32"},
            dict(EXPERTS=60, TOP_K=6, SHARED=2, GROUPS=1 + 3 * sigmoid, TOP_GROUPS=1 + sigmoid,
                 SIGMOID=sigmoid, RENORMALIZE=True, SCALE=2.5, BLOCK=64, BLOCK_K=8, SPLITS=16,
                 BLOCK_S=16, HAS_LOGIT_BIAS=False, logit_bias=None, BLOCK_G=1 + 3 * sigmoid),
            num_warps=1,
        )
    for rows in (1, 16, 32):
        check(
            fused_router._kernel,
            {"x": "*bf16", "weight": "*" + dtype, "parts": "*fp32", "tokens": "i32"},
            dict(EXPERTS=60, DEPTH=2880, SHARE=128, LONE=rows == 1, BLOCK_M=max(16, rows),
                 BLOCK_N=32, BLOCK_K=128),
            num_warps=4, num_stages=2,
        )
"""


FP8 = """
from kvbaton.kernels import (
    block_scaled_linear, decode_attention, gather_pages, paged_prefill_attention, quantize_fp8,
    rope_write, skinny_linear,
)

def run(kernel, pointers, constants, floats=(), **options):
    given = pointers | dict.fromkeys(floats, "fp32")
    upper = {name for name in kernel.arg_names if name.isupper()}
    rest = [name for name in kernel.arg_names if name not in upper | set(given) | set(constants)]
    return check(kernel, given | dict.fromkeys(rest, "i32"), constants, **options)

for group, groups, warps, gated in (
    (128, 8, 4, False), (128, 8, 4, True), (28672, 1, 8, False), (14336, 1, 16, True)
):
    block = 1 << (group - 1).bit_length()
    ptx = run(
        quantize_fp8._kernel, {"x": "*bf16", "out": "*fp8e4nv", "scales": "*fp32"},
        dict(GROUP=group, GROUPS=groups, BLOCK=block, GATED=gated, LEAST=1e-12, MAX=448.0),
        num_warps=warps,
    )
    assert "cvt.rn.satfinite.e4m3x2" in ptx
for rows, columns, warps in ((16, 32, 4), (32, 32, 4), (64, 128, 4), (128, 128, 8)):
    ptx = run(
        block_scaled_linear._kernel,
        {"x": "*fp8e4nv", "weight": "*fp8e4nv", "x_scales": "*fp32", "scales": "*fp32",
         "out": "*bf16"},
        dict(BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=128), num_warps=warps, num_stages=3,
    )
    # Few rows are widened to fp16: the reading of the weight is all the work.
    assert ("wgmma" in ptx and "e4m3.e4m3" in ptx) == (rows >= 64), (rows, columns)
for rows, splits, runs in ((16, 1, 1), (16, 4, 32)):
    ptx = run(
        skinny_linear._kernel,
        {"x": "*bf16", "weight": "*fp8e4nv", "scales": "*fp32", "out": "*bf16",
         "scratch": "*fp32", "counters": "*i32"},
        dict(SPLITS=splits, RUNS=runs, SWAPPED=False, GATED=False, BLOCK_M=rows, BLOCK_N=64,
             BLOCK_K=256 if runs == 1 else 128),
        num_warps=4, num_stages=5 if runs > 1 else 3,
    )
    assert "cp.async.cg.shared.global" in ptx
    assert "cvt.bf16.f16" not in ptx  # see `widen`
for rows, size, gated in ((16, 4096, 0), (32, 4096, 0), (64, 28672, 0), (16, 28672, 1)):
    tile = skinny_linear._tile_of(size, 4096, 0, False)
    ptx = run(
        skinny_linear._kernel,
        {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "scratch": "*fp32", "counters": "*i32"},
        dict(scales=None, x_scales=None, SPLITS=tile.splits, RUNS=0, QUANTISED=False, SWAPPED=True,
             GATED=gated, AHEAD=4, BLOCK_M=rows, BLOCK_N=tile.rows, BLOCK_K=tile.depth_bytes // 2),
        num_warps=4, num_stages=tile.stages,
    )
    before, _, after = ptx.partition("griddepcontrol.wait")
    assert before.count("prefetch.global.L2") == tile.rows * 4 // 128  # each thread's, once
    assert "prefetch" not in after
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}k16" in ptx  # the weight is on the left
shape = dict(HEAD_DIM=128, BLOCK_D=128, BLOCK_SIZE=16, GROUP=4, BLOCK_G=4)
values = dict(VALUE_DIM=128, BLOCK_V=128, INTERLEAVED=False)
caches = {"query": "*bf16", "key_cache": "*fp8e4nv", "value_cache": "*fp8e4nv"}
tokens = {"key": "*bf16", "value": "*bf16", "positions": "*i64", "cos_sin": "*fp32",
          "slot_mapping": "*i64"}
norms = {"query_norm": "*bf16", "key_norm": "*bf16", "eps": "fp32"}
for normed in (False, True):
    ptx = run(rope_write._kernel, caches | tokens | norms,
              shape | values | dict(BLOCK_T=1, HALF=64, BLOCK_HALF=64, NORMED=normed, OFFSET=0.0),
              num_warps=2)
    assert "cvt.rn.satfinite.e4m3x2" in ptx
tables = {"block_tables": "*i32", "context_lens": "*i32", "out": "*bf16", "lse": "*fp32"}
options = dict(WINDOW=0, SOFTCAP=0.0, HAS_SINKS=False, sinks=None)
block_n, launch = decode_attention._tile(128, 2)
run(
    decode_attention._kernel,
    caches | tables | {"fields": "*i32", "counters": "*i32", "states": "*fp32"},
    shape | options
    | dict(MERGED_G=4, BLOCK_G=16, BLOCK_N=block_n, STRIDE=6, MERGES=True,
           BLOCK_P=decode_attention.MERGED_PARTS),
    ["scale"], **launch,
)
for rows, context in ((16, 8192), (4096, 8192)):
    tile = paged_prefill_attention._tile(128, 2, rows, context)
    run(
        paged_prefill_attention._kernel,
        caches | tables | {"cu_seqlens": "*i32", "states": "*fp32", "counters": "*i32"},
        shape | options | dict(BLOCK_M=tile["BLOCK_M"], BLOCK_N=tile["BLOCK_N"], LEAST=4),
        ["scale"], num_stages=tile["num_stages"], num_warps=tile["num_warps"],
    )
caches = dict.fromkeys(("key_cache", "value_cache", "out"), "*fp8e4nv")
run(gather_pages._kernel, caches | {"block_table": "*i32"},
    dict(HEAD_DIM=128, BLOCK_D=128, BLOCK_SIZE=16, BLOCK_T=16), num_warps=4)
"""


LATENT = """
from kvbaton.kernels import decode_parts, latent_decode_attention, rope_write

def run(kernel, pointers, constants, **options):
    upper = {name for name in kernel.arg_names if name.isupper()}
    rest = [name for name in kernel.arg_names if name not in upper | set(pointers)]
    return check(kernel, pointers | dict.fromkeys(rest, "i32"), constants, **options)

for dtype, size in (("bf16", 2), ("fp32", 4)):
    block_n, tile = latent_decode_attention.tile(size)
    for cache in (dtype, "fp8e4nv"):
        pointers = dict.fromkeys(("query", "query_rope", "out"), "*" + dtype)
        pointers |= {"cache": "*" + cache, "block_tables": "*i32", "context_lens": "*i32",
                     "fields": "*i32", "states": "*fp32", "lse": "*fp32", "scale": "fp32"}
        run(
            latent_decode_attention._kernel, pointers,
            dict(RANK=512, BLOCK_R=512, ROPE=64, BLOCK_P=64, BLOCK_H=16, BLOCK_SIZE=16,
                 BLOCK_N=block_n, STRIDE=6),
            **tile,
        )
run(
    decode_parts._kernel,
    {"context_lens": "*i32", "begins": "*i32", "fields": "*i32", "counters": "*i32"},
    dict(BATCH=256, STRIDE=6, CLEARED=256, TILE=64, WINDOW=0, CHUNKED=False), num_warps=4,
)
run(
    decode_parts._merge_kernel,
    {"parts": "*fp32", "lse": "*fp32", "out": "*bf16", "begins": "*i32"},
    dict(HEAD_DIM=512, BLOCK_D=128, BLOCK_P=decode_parts.MERGED_PARTS), num_warps=4,
)
run(
    rope_write._kernel,
    {"query": "*bf16", "key": "*bf16", "value": "*bf16", "positions": "*i64", "cos_sin": "*fp32",
     "key_cache": "*bf16", "value_cache": "*bf16", "slot_mapping": "*i64"},
    dict(GROUP=16, BLOCK_G=16, BLOCK_T=1, HEAD_DIM=64, BLOCK_D=64, VALUE_DIM=512, BLOCK_V=512,
         INTERLEAVED=True, NORMED=False, OFFSET=0.0, HALF=32, BLOCK_HALF=32, BLOCK_SIZE=16),
    num_warps=2,
)
"""


STATES = """
from kvbaton.kernels import delta_rule, delta_rule_inputs

tables = ("reads", "writes", "bounds", "sequences", "chunks", "pieces")
types = dict.fromkeys(tables, "*i64") | dict.fromkeys(("states", "decay", "beta"), "*fp32")
types |= {"totals": "*fp32", "decays": "*fp32", "count": "i32"}

def run(kernel, dtype, constants, **options):
    strides = {name: "i64" for name in kernel.arg_names if name.startswith("stride")}
    halves = ("mixed", "out", "solved", "within", "projected", "rates", "weight")
    kinds = types | strides | dict.fromkeys(halves, "*" + dtype)
    constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
    kinds = {name: kinds[name] for name in kernel.arg_names if name in kinds}
    return check(kernel, kinds, constants, **options)

for keys, values in ((128, 128), (64, 192)):
    shape = dict(HEADS=32, KEY_HEADS=16, PER_KEY=2, KEYS=keys, VALUES=values, TAPS=4, PADDING=0)
    shape |= dict(CHUNK=delta_rule.CHUNK, BLOCK=delta_rule.BLOCK, BLOCK_K=keys)
    shape |= dict(BLOCK_D=1 << (max(keys, values) - 1).bit_length())
    for dtype, size in (("bf16", 2), ("fp32", 4)):
        run(delta_rule._decode_kernel, dtype, shape | dict(BLOCK_V=delta_rule.BLOCK_V), num_warps=4)
        for launch in (dict(BLOCK_T=1, num_warps=1), dict(delta_rule_inputs.LAUNCH)):
            tokens = shape | dict(BLOCK_T=launch.pop("BLOCK_T"))
            run(delta_rule_inputs._kernel, dtype, tokens, **launch)
        launch = dict(delta_rule.SCAN[size])
        scan = shape | dict(BLOCK_V=launch.pop("BLOCK_V"))
        for kernel, constants, options in (
            (delta_rule._solve_kernel, shape, delta_rule.SOLVE[size]),
            (delta_rule._scan_kernel, scan, launch),
        ):
            ptx = run(kernel, dtype, constants, **options)
            assert ("wgmma" in ptx and "bf16.bf16" in ptx) == (dtype == "bf16")
            assert ".tf32" in ptx or (dtype == "bf16" and kernel is delta_rule._scan_kernel)
"""

SUMS = """
from triton import language as tl

from kvbaton.kernels import few_rows_all_reduce, peer_all_reduce

for size, lanes in ((2, 2), (3, 4), (8, 8)):
    kinds = dict(tensor="*bf16", out="*bf16", inboxes=("*bf16",) * size, flags="*i32")
    kinds |= dict(flags_at="*i64", rounds="*i32", waiting="*i32", count="i32")
    sizes = dict(RANK=1, SIZE=size, LANES=lanes, AREA=8192, PROGRAMS=512, PARTS=4)
    ptx = check(peer_all_reduce._shared_kernel, kinds, sizes | dict(BLOCK=2048), num_warps=4)
    for flag in ("sys.release.exch", "sys.acquire.add"):
        assert ptx.count(flag) == 2, size  # of all ranks at once
    kinds |= dict(residual="*bf16", weight="*bf16", eps="fp32")
    for width, block, norm in ((4096, 4096, False), (5120, 8192, True)):
        sizes |= dict(WIDTH=width, BLOCK=block, NORM=norm, WEIGHT_OFFSET=0.0)
        most = peer_all_reduce.REGISTERS * block // 4096
        ptx = check(peer_all_reduce._kernel, kinds, sizes, num_warps=8, maxnreg=most)
        assert (ptx.count("sys.release.exch"), ptx.count("sys.acquire.add")) == (2, 1), size
    kinds = dict.fromkeys(("tensor", "out", "residual", "weight", "rounds", "waiting"), "*i32")
    kinds |= dict(inboxes=("*i64",) * size, eps="fp32")
    sizes = dict(RANK=1, SIZE=size, PARTS=2, ROWS=32, AREA=4096, WIDTH=5120, WORDS=2560, BLOCK=4096)
    sizes |= dict(DTYPE=tl.bfloat16, HALVES=True, WEIGHT_OFFSET=0.0)
    ptx = check(few_rows_all_reduce._kernel, kinds, sizes, num_warps=8)
    assert "ld.volatile.global.b64" in ptx and "atom" not in ptx  # a word and its flag at once
"""

SAMPLING = """
from kvbaton.kernels import penalties, sample_tokens

by_row = {"positions": "*i64", "choices": "*i64", "seeds": "*i64", "top_ks": "*i64", "of": "*i64"}
by_row |= dict.fromkeys(("num_prompt", "lengths"), "*i64")
floats = ("temperatures", "top_ps", "min_ps", "repetitions", "presences", "frequencies")
kinds = by_row | dict.fromkeys(floats, "*fp64") | dict.fromkeys(("least", "best"), "*fp32")
kinds |= dict.fromkeys(("kept", "ids", "counts", "tokens"), "*i32") | {"out": "*i64"}

def run(kernel, logits, **options):
    sizes = dict(vocab="i32", stride="i32", parts="i32", logits="*" + logits)
    given = {name: (kinds | sizes)[name] for name in kernel.arg_names if not name.isupper()}
    constants = {name: options.pop(name) for name in kernel.arg_names if name.isupper()}
    return check(kernel, given, constants, **options)

atomics = run(penalties._kernel, "bf16", BLOCK=penalties.BLOCK)
assert "atom.global" in atomics or "red.global" in atomics
for logits, unused in (("bf16", 16), ("fp16", 12), ("fp32", 2)):
    run(sample_tokens._kept_kernel, logits, UNUSED=unused, BLOCK=sample_tokens.SEARCHED,
        num_warps=sample_tokens.SEARCHING_WARPS)
    run(sample_tokens._kernel, logits, UNUSED=unused, BLOCK=sample_tokens.BLOCK, PURPOSE=0,
        num_warps=4)
run(sample_tokens._merge_kernel, "bf16", BLOCK=64, num_warps=1)
"""


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize(
    "script",
    [EXPERTS, FP8, LATENT, STATES, SUMS, SAMPLING],
    ids=["experts", "fp8", "latent", "states", "sums", "sampling"],
)
def test_kernels_compile_for_hopper(script: str) -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", CHECK + script],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
