"""Decode and prefill of every supported model shape on one GPU, beside their lower bounds.

    python -m benchmarks.bench_gpu_shapes --shapes 8b 8b-fp8 qwen3-30b-a3b --json shapes.json

Whole models with dummy weights are measured, each in its own process. The wall of a decode step is
the time in which a bare loop (one launch per weight, in a CUDA graph) reads what the step must
read: every weight once (of a mixture, the experts that its tokens hit, counted in the same run),
and the attended K and V at the speed that the loop reached. Prefill is compared with its bare
products.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.bench_engine import Bench, decode_step, prefill, profile_case
from benchmarks.bench_kernels import time_calls, time_once
from benchmarks.workload import LLAMA_8B, dummy_folder, random_prompts
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.cuda.runner import CudaRunner
from kvbaton.engine.models.layers import ColumnLinear, LatentProjection, RowLinear
from kvbaton.engine.models.llama import LlamaForCausalLM
from kvbaton.engine.models.moe import Experts, Router
from kvbaton.errors import ConfigError
from kvbaton.kernels.jit import cdiv, jit, tl
from kvbaton.kernels.mxfp4 import COLUMNS
from kvbaton.kernels.mxfp4 import WORDS as PACKED
from kvbaton.types import first_attended

BATCHES = (1, 32, 128)
PROMPT, STEPS, COUNTED_STEPS = 512, 50, 4
PREFILL_LENGTH = 4096
CHUNK = 8192
WORDS = 16384
"""Number of int32 words that a program of the bare loop reads."""

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_SOME = {"hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": LLAMA_8B,
    "8b-fp8": LLAMA_8B | {"quantization_config": _FP8},
    "8b-fp8-block": LLAMA_8B | {"quantization_config": _FP8 | {"weight_block_size": [128, 128]}},
    "qwen3-30b-a3b": _SOME | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": _SOME | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088,
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0, "tie_word_embeddings": False,
    },
    "gemma3-4b": _SOME | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 1024, "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    "gemma4": _SOME | {  # transformers' defaults
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text",
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144, "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
    "llama4-scout-quarter": _SOME | {  # 12 of the 48 layers of Llama 4 Scout
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text",
        "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_hidden_layers": 12, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192, "use_qk_norm": True, "attn_temperature_tuning": True,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": _SOME | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
    "qwen3-next-half": _SOME | {  # 24 of the 48 layers of Qwen3-Next-80B-A3B
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "partial_rotary_factor": 0.25,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
SHAPES["qwen3-next-quarter"] = SHAPES["qwen3-next-half"] | {"num_hidden_layers": 12}  # fits 80 GB
SHAPES["qwen3-30b-a3b-fp8"] = SHAPES["qwen3-30b-a3b"] | {
    "quantization_config": _FP8 | {
        "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }
}  # fmt: skip
SHAPES["gpt-oss-20b-mxfp4"] = SHAPES["gpt-oss-20b"] | {  # as published
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
    }
}  # fmt: skip
PROMPTS = {"8b": 16, "8b-fp8": 16, "8b-fp8-block": 16}
"""Number of prompts of 4096 tokens, by shape; 4 for others."""


@dataclass(frozen=True)
class Row:
    """A measurement and its wall, both in `unit`."""

    name: str
    ours: float
    wall: float
    unit: str
    more: str = ""

    def __str__(self) -> str:
        ratio = self.ours / self.wall
        return (f"{self.name:<36}{self.ours:12,.2f}{self.wall:12,.2f} {self.unit:<6}"
                f"{ratio:7.2f}  {self.more}")  # fmt: skip


# --- the bare loop ---


@jit()
def _read_kernel(
    data: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    SLICE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: WORDS int32 of one slice, which are folded into one that is stored."""
    start = tl.program_id(0) * WORDS
    first = tl.load(ids + tl.program_id(1)).to(tl.int64) * SLICE
    folded = tl.zeros([BLOCK], tl.int32)
    for k in tl.range(0, WORDS, BLOCK):
        at = start + k + tl.arange(0, BLOCK)
        folded ^= tl.load(data + first + at, mask=at < SLICE, other=0)
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + place, tl.xor_sum(folded, axis=0))


class BareReads:
    """Reads of a model's weights that a decode step needs, one launch each.

    Args:
        model: The model.
        hits: Mean number of experts that a layer's tokens hit; 0 without experts.
    """

    def __init__(self, model: LlamaForCausalLM, hits: float) -> None:
        self.num_bytes = 0
        self.calls: list[Callable[[], object]] = []
        head = model.lm_head or model.embed_tokens
        self._add(head.weight, 1)
        for module in model.layers.modules():
            if isinstance(module, ColumnLinear | RowLinear | Router | LatentProjection):
                self._add(module.weight, 1)
            elif isinstance(module, LatentProjection):
                self._add(stored_rows(module), 1)
            elif isinstance(module, Experts):
                depths = {"gate_up": module.size, "down": module.middle}
                for name, weight in module.named_parameters():
                    packed = weight.dtype in (PACKED, torch.int32)  # with scales: 4.25 bits each
                    if packed or ("bias" not in name and "scale" not in name):
                        slices, share = round(hits) + module.shared, 1.0
                        if packed:  # without the columns that pad a block
                            depth = depths[name.rpartition("_")[0]]
                            share = depth / (weight.shape[1] * COLUMNS)
                        self._add(weight, slices, stacked=True, share=share)

    def _add(
        self, weight: Tensor, slices: int, *, stacked: bool = False, share: float = 1.0
    ) -> None:
        data = weight.detach().view(torch.uint8).view(-1).view(torch.int32)
        size = round(data.numel() // (len(weight) if stacked else 1) * share)
        programs = cdiv(size, WORDS)
        of = torch.randperm(len(weight))[:slices] if stacked else torch.zeros(1)
        ids = of.to("cuda", torch.int32)
        out = torch.empty(programs * slices, dtype=torch.int32, device="cuda")
        self.num_bytes += 4 * size * slices
        self.calls.append(
            partial(_read_kernel[(programs, slices)], data, ids, out, SLICE=size, WORDS=WORDS,
                    BLOCK=4096, num_warps=8)
        )  # fmt: skip

    def seconds(self) -> float:
        """Seconds of all reads as one CUDA graph."""
        return time_calls(self.calls, replays=8) * len(self.calls) / 1e6


def stored_rows(projection: LatentProjection) -> Tensor:
    """The checkpoint's rows, without the padding that makes keys and values equally wide."""
    count = projection.mla.nope_dim + projection.mla.value_dim
    return projection.weight[:, :count].flatten(0, 1)


def kv_bytes(bench: Bench, batch: int) -> int:
    """Bytes of K and V that a decode step in the middle of the run reads.

    States count twice: they are read and written.
    """
    (worker,) = bench.core.executor.workers
    runner: CudaRunner = worker.runner  # type: ignore[attr-defined]
    cache, total, states = runner.cache, 0, 0
    for g, group in enumerate(cache.groups):
        if group.state_rows:
            states += 8 * group.heads * group.state_rows * group.head_dim * len(group.layers)
            continue
        heads, _, planes, _, head_dim = cache.token_views[g].shape
        seen = PROMPT + STEPS // 2
        seen -= first_attended(seen - 1, group.window, group.chunked)
        total += seen * heads * planes * head_dim * len(group.layers)
    return (total * cache.data.element_size() + states) * batch


def experts_hit(bench: Bench, batch: int) -> float:
    """Mean number of different experts per layer that a decode step hits, run without graphs.

    Prompts and greedy tokens are those of `decode_step`.
    """
    (worker,) = bench.core.executor.workers
    runner: CudaRunner = worker.runner  # type: ignore[attr-defined]
    graphs, found = runner.graphs, list[Tensor]()

    def count(router: Router, args: Any, chosen: tuple[Tensor, Tensor]) -> None:
        ids = chosen[1][:, : router.moe.top_k]
        if len(ids) == batch:
            found.append(torch.bincount(ids.flatten(), minlength=1).count_nonzero())

    routers = [module for module in runner.model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(count) for router in routers]
    runner.graphs = None
    steps = COUNTED_STEPS + cdiv(batch * PROMPT, CHUNK - batch)  # until all decode
    bench.run(random_prompts(batch, PROMPT, batch), steps)
    runner.graphs = graphs
    for hook in hooks:
        hook.remove()
    return float(torch.stack(found).float().mean())


# --- the bare products ---


def bare_products(model: LlamaForCausalLM, tokens: int) -> list[Callable[[], object]]:
    """All products of a step of `tokens` prompt tokens, with inputs made beforehand."""
    inputs: dict[tuple[Any, ...], Tensor] = {}

    def given(*shape: int, dtype: torch.dtype) -> Tensor:
        if (shape, dtype) not in inputs:
            inputs[shape, dtype] = torch.randn(shape, device="cuda").to(dtype)
        return inputs[shape, dtype]

    calls: list[Callable[[], object]] = []
    one = torch.ones((), device="cuda")
    for module in model.layers.modules():
        if isinstance(module, ColumnLinear | RowLinear | Router):
            weight = module.weight
            x = given(tokens, weight.shape[1], dtype=weight.dtype)
            if weight.dtype == torch.float8_e4m3fn:
                calls.append(
                    partial(torch._scaled_mm, x, weight.t(), one, one,
                            out_dtype=torch.bfloat16, use_fast_accum=True)
                )  # fmt: skip
            else:
                calls.append(partial(linear, x, weight))
        elif isinstance(module, LatentProjection):
            stored = stored_rows(module)
            calls.append(
                partial(linear, given(tokens, stored.shape[1], dtype=stored.dtype), stored)
            )
        elif isinstance(module, Experts):
            rows = tokens * module.moe.top_k // module.moe.num_experts
            for stack in (module.gate_up_proj, module.down_proj):
                routed = len(stack) - module.shared
                for shared in stack[routed:]:
                    x = given(tokens, shared.shape[1], dtype=shared.dtype)
                    calls.append(partial(linear, x, shared))
                experts = stack[:routed]
                if experts.dtype == PACKED:  # as if they were floats, the same for all layers
                    depth = module.size if stack is module.gate_up_proj else module.middle
                    experts = given(routed, stack.shape[2], depth, dtype=torch.bfloat16)
                held, size, depth = experts.shape
                if experts.dtype == torch.bfloat16:
                    x = given(held, rows, depth, dtype=torch.bfloat16)
                    calls.append(partial(torch.bmm, x, experts.transpose(1, 2)))
                    continue
                x = given(rows * held, depth, dtype=experts.dtype)
                ends = torch.arange(rows, rows * held + 1, rows, device="cuda", dtype=torch.int32)
                calls.append(
                    partial(torch._scaled_grouped_mm, x, experts.transpose(1, 2),
                            torch.ones(rows * held, device="cuda"),
                            torch.ones(held, size, device="cuda"), offs=ends,
                            out_dtype=torch.bfloat16, use_fast_accum=True)
                )  # fmt: skip
    return calls


def bare_prefill(model: LlamaForCausalLM, tokens: int) -> float:
    """Prompt tokens per second of the products alone."""
    calls = bare_products(model, CHUNK)

    def run() -> None:
        for call in calls:
            call()

    run()
    steps = max(1, tokens // CHUNK)
    # For as long as the prefill takes, so that GPU clocks are the same.
    return CHUNK * 1e6 / statistics.median([time_once(run) for _ in range(steps + 1)][-steps:])


def measure(name: str, args: argparse.Namespace) -> list[Row]:
    """Measure one shape."""
    folder = dummy_folder(Path(tempfile.mkdtemp()) / "model", SHAPES[name])
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cuda",
        max_model_len=PREFILL_LENGTH + 256,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=CHUNK,
        max_num_mixed_tokens=CHUNK,  # prompts are over after a few steps, as `decode_step` needs
        enable_prefix_caching=False,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    began = time.perf_counter()
    bench = Bench(config)
    (worker,) = bench.core.executor.workers
    model: LlamaForCausalLM = worker.model  # type: ignore[attr-defined]
    rows = [Row(f"{name}: ready", time.perf_counter() - began, 30.0, "s")]
    if args.profile:
        for batch in BATCHES:
            case = partial(bench.run, random_prompts(batch, 16, 1), 20)
            profile_case(f"{name}: decode, batch {batch}", case, args.rows)
        case = partial(bench.run, random_prompts(2, PREFILL_LENGTH, 1), 1)
        profile_case(f"{name}: prefill, 2 x {PREFILL_LENGTH}", case, args.rows)
        return rows
    for batch in BATCHES:
        ours = decode_step(bench, batch, STEPS)
        hits = 0.0 if model.config.moe is None else experts_hit(bench, batch)
        reads = BareReads(model, hits)
        seconds = reads.seconds()
        kept = kv_bytes(bench, batch)
        wall = 1e3 * seconds * (1 + kept / reads.num_bytes)
        rate = reads.num_bytes / seconds / 1e12
        more = f"{reads.num_bytes / 1e9:.2f} + {kept / 1e9:.2f} GB at {rate:.2f} TB/s"
        more += f", {hits:.1f} experts hit" if hits else ""
        rows.append(Row(f"{name}: decode, batch {batch}", ours, wall, "ms", more))
        print(rows[-1], flush=True)
        del reads
        gc.collect()
    count = PROMPTS.get(name, 4)
    ours = max(prefill(bench, count, PREFILL_LENGTH) for _ in range(2))
    wall = bare_prefill(model, count * PREFILL_LENGTH)
    title = f"{name}: prefill of {count} x {PREFILL_LENGTH}"
    rows.append(Row(title, ours / 1e3, wall / 1e3, "ktok/s", "the same products bare"))
    print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure each shape in its own process; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--profile", action="store_true", help="print kernels instead")
    parser.add_argument("--rows", type=int, default=24, help="kernels to print")
    args = parser.parse_args()
    logging.basicConfig(level=os.environ.get("LOG_LEVEL", "INFO"))
    found: dict[str, list[Any]] = {}
    if len(args.shapes) == 1:
        try:
            rows = measure(args.shapes[0], args)
        except ConfigError as error:
            print(f"{args.shapes[0]}: not served: {error}")
            return
        print("\n".join(map(str, rows)))
        found = {row.name: [row.ours, row.wall, row.unit, row.more] for row in rows}
    for name in args.shapes if len(args.shapes) > 1 else ():
        part = Path(tempfile.mkdtemp()) / "part.json"
        command = [sys.executable, "-m", "benchmarks.bench_gpu_shapes", "--shapes", name]
        command += ["--json", str(part), "--kv-cache-dtype", args.kv_cache_dtype]
        command += ["--rows", str(args.rows), *["--profile"] * args.profile]
        began = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        print(f"{name}: {time.perf_counter() - began:.0f} s, exit status {code}", flush=True)
        found |= json.loads(part.read_text()) if part.exists() else {}
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
