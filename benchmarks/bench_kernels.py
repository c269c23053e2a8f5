"""Time every kernel, and one synthetic decode step of Llama-3-8B's shape, on one CUDA GPU.

    python benchmarks/bench_kernels.py --out kernels.json

Prints a table and writes the same rows as JSON. Each figure is the median over replays of a CUDA
graph; inputs rotate over several copies, so that they are not in the GPU's cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from kvbaton.engine.models.linear import FP8Method
from kvbaton.kernels import delta_rule as rule
from kvbaton.kernels import delta_rule_inputs as rule_inputs
from kvbaton.kernels.decode_attention import decode_attention, decode_parts
from kvbaton.kernels.digest import add_sums, block_sums
from kvbaton.kernels.fused_moe import fused_moe, fused_moe_reference
from kvbaton.kernels.fused_topk import ExpertChoice, fused_topk
from kvbaton.kernels.gather_pages import gather_pages
from kvbaton.kernels.jit import cdiv
from kvbaton.kernels.latent_decode_attention import latent_decode_attention, latent_decode_parts
from kvbaton.kernels.merge_attention_states import merge_attention_states
from kvbaton.kernels.paged_attention import Softmax
from kvbaton.kernels.paged_prefill_attention import paged_prefill_attention
from kvbaton.kernels.prefill_attention import PrefillBatch, planning, prefill_attention
from kvbaton.kernels.rms_norm import rms_norm
from kvbaton.kernels.rope_write import rope_write
from kvbaton.kernels.silu_and_mul import silu_and_mul
from kvbaton.kernels.skinny_linear import Workspace, skinny_linear, wins
from kvbaton.kernels.varlen_attention import varlen_attention

RANK, ROPE = 512, 64
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 4096, 32, 8, 128
FFN, VOCABULARY, BLOCK_SIZE = 14336, 128256, 16
SCALE = HEAD_DIM**-0.5
SOFTMAX = Softmax(SCALE)
COPIES = 4
GEMMS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
MIXTURES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral-8x7B": (8, 2, 4096, 14336)}
"""By model: number of experts, experts per token, hidden size, intermediate size."""


@dataclass(frozen=True)
class Row:
    """One measurement: microseconds per call, and a rate in `unit` where meaningful."""

    op: str
    case: str
    us: float
    rate: float = 0.0
    unit: str = ""


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Microseconds per call of `calls`, run in order as one CUDA graph."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()  # inputs are made on another stream
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = [time_once(graph.replay) for _ in range(replays)]
    return statistics.median(times) / len(calls)


def time_once(call: Callable[[], object]) -> float:
    """Microseconds of `call`, between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


def randn(*shape: int, std: float = 1.0) -> Tensor:
    """Random bf16 values on the GPU."""
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, std)


def bench_gemms() -> Iterator[Row]:
    """Products with weights, by batch: the library's, and ours where it is used."""
    workspace = Workspace(torch.device("cuda"))
    for name, (rows, columns) in GEMMS.items():
        weights = [randn(rows, columns, std=0.02) for _ in range(COPIES)]
        for batch in (1, 32, 128, 256):
            x = randn(batch, columns)
            for op in (linear, skinny_linear):
                if op is skinny_linear and not wins(batch, weights[0]):
                    continue
                more = (workspace,) if op is skinny_linear else ()
                us = time_calls([partial(op, x, weight, *more) for weight in weights])
                rate = 2 * rows * columns / us / 1e6
                yield Row(op.__name__, f"{name} batch {batch}", us, rate, "TB/s")


def bench_fp8() -> Iterator[Row]:
    """Products with FP8 weights as in layers, including quantisation, and bare ones."""
    one = torch.ones((), device="cuda")
    for name, (rows, columns) in GEMMS.items():
        if name == "lm_head":
            continue
        weights = [randn(rows, columns).to(torch.float8_e4m3fn) for _ in range(COPIES)]
        kinds = {
            "rows": FP8Method(None),
            "runs": FP8Method(128),
            "squares": FP8Method(128, square=True),
            "bare": None,
        }
        for batch in (1, 16, 32, 64, 128, 256, 8192):
            x = randn(batch, columns)
            work, small = 2 * batch * rows * columns, batch <= 256
            numbers = x.to(torch.float8_e4m3fn)
            for kind, method in kinds.items():
                groups = 1 if method is None or method.group is None else columns // 128
                scales = torch.ones(rows, groups, device="cuda")
                if method is None:
                    parts = [
                        partial(torch._scaled_mm, numbers, weight.t(), one, one,
                                out_dtype=torch.bfloat16, use_fast_accum=True)
                        for weight in weights
                    ]  # fmt: skip
                else:
                    parts = [partial(method.product, x, w, scales, None) for w in weights]
                us = time_calls(parts)
                rate = rows * columns / us / 1e6 if small else work / us / 1e6
                unit = "TB/s" if small else "TFLOP/s"
                yield Row(f"fp8 {kind}", f"{name} batch {batch}", us, rate, unit)


def bench_rows() -> Iterator[Row]:
    """Element-wise ops."""
    for tokens in (1, 32, 256, 8192):
        weight = randn(HIDDEN)
        pairs = [(randn(tokens, HIDDEN), randn(tokens, HIDDEN)) for _ in range(COPIES)]
        us = time_calls([partial(rms_norm, x, weight, 1e-5, residual=r) for x, r in pairs])
        moved = tokens * HIDDEN * 2 * 4
        yield Row("rms_norm", f"residual, {tokens} tokens", us, moved / us / 1e6, "TB/s")
        gates = [randn(tokens, 2 * FFN) for _ in range(COPIES)]
        us = time_calls([partial(silu_and_mul, gate) for gate in gates])
        moved = tokens * FFN * 2 * 3
        yield Row("silu_and_mul", f"{tokens} tokens", us, moved / us / 1e6, "TB/s")


def bench_experts() -> Iterator[Row]:
    """Experts of one layer and their router; also as a loop over the experts that are hit.

    The loop reads from the device which experts have tokens, so it is timed without a graph.
    """
    for name, (experts, top_k, size, middle) in MIXTURES.items():
        gate_up = randn(experts, 2 * middle, size, std=0.02)
        down = randn(experts, size, middle, std=0.02)
        for tokens in (1, 8, 32, 128, 512, 2048, 8192):
            logits, x = randn(tokens, experts), randn(tokens, size)
            route = partial(fused_topk, logits, ExpertChoice(top_k, True, x.dtype))
            weights, ids = route()
            hit = int(torch.bincount(ids.flatten()).count_nonzero())
            case = f"{name} {tokens} tokens"
            moved, work = 6 * hit * size * middle, 6 * tokens * top_k * size * middle
            yield Row("fused_topk", case, time_calls([route] * COPIES))
            grouped = time_calls([partial(fused_moe, x, gate_up, down, weights, ids)])
            loop = partial(fused_moe_reference, x, gate_up, down, weights, ids)
            loop()
            for op, us in (
                ("fused_moe", grouped),
                ("loop of experts", statistics.median(time_once(loop) for _ in range(10))),
            ):
                yield Row(op, case, us, moved / us / 1e6, f"TB/s {work / us / 1e6:.0f} TFLOP/s")


def make_cache(num_blocks: int, layers: int) -> Tensor:
    """A random KV pool in the default layout."""
    return randn(num_blocks, KV_HEADS, layers, 2, BLOCK_SIZE, HEAD_DIM)


def make_tables(batch: int, context: int) -> tuple[Tensor, Tensor, int]:
    """Shuffled block tables, lengths, and the number of blocks of the pool."""
    per_sequence = -(-context // BLOCK_SIZE)
    tables = torch.randperm(batch * per_sequence, device="cuda").to(torch.int32) + 1
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return tables.view(batch, per_sequence), lengths, batch * per_sequence + 1


def split_heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of [T, heads + 2 * kv_heads, D]."""
    return qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]


def bench_rope_write() -> Iterator[Row]:
    """Rotation and cache write."""
    for tokens in (1, 32, 256, 8192):
        tables, _, blocks = make_tables(1, tokens)
        cache = make_cache(blocks, COPIES)
        slots = (tables.long()[0, :, None] * BLOCK_SIZE + torch.arange(16, device="cuda")).view(-1)
        positions = torch.arange(tokens, device="cuda")
        table = torch.rand(tokens, HEAD_DIM, device="cuda")
        calls = []
        for layer in range(COPIES):
            qkv = randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
            query, key, value = split_heads(qkv)
            planes = cache[:, :, layer, 0], cache[:, :, layer, 1]
            rotate = partial(rope_write, query, key, value, positions, table)
            calls.append(partial(rotate, *planes, slots[:tokens]))
        us = time_calls(calls)
        moved = tokens * HEAD_DIM * 2 * (2 * HEADS + 6 * KV_HEADS)
        yield Row("rope_write", f"{tokens} tokens", us, moved / us / 1e6, "TB/s")


def bench_decode_attention() -> Iterator[Row]:
    """Decode attention, by batch and context; one sequence may be far longer than the others."""
    cases = [
        (1, 512), (1, 16384), (1, 131072), (8, 2048), (32, 512), (32, 8192),
        *((batch, 2500) for batch in (16, 24, 32, 36, 40, 48, 64, 72, 80, 96, 128, 192)),
        *((batch, 512) for batch in (64, 128, 256)), (40, 8500), (64, 8500),
    ]  # fmt: skip
    long = [(batch, 512, 100_000) for batch in (8, 32, 64, 128, 256)]
    for batch, context, longest in (*((*case, case[1]) for case in cases), *long):
        tables, lengths, _ = make_tables(batch, longest)
        lengths[1:] = context
        tokens = int(lengths.sum())
        blocks = cdiv(tokens, BLOCK_SIZE) + batch
        tables = tables % blocks
        cache, query = make_cache(blocks, COPIES), randn(batch, HEADS, HEAD_DIM)
        parts = decode_parts(query, cache[:, :, 0, 0], lengths, SOFTMAX)  # once a step
        attend = partial(decode_attention, query, parts=parts)
        calls = [
            partial(attend, cache[:, :, layer, 0], cache[:, :, layer, 1], tables, lengths, SOFTMAX)
            for layer in range(COPIES)
        ]
        us = time_calls(calls)
        moved = tokens * KV_HEADS * HEAD_DIM * 4
        case = f"batch {batch} context {context}"
        case += f", one of {longest}" if longest > context else ""
        yield Row("decode_attention", case, us, moved / us / 1e6, "TB/s")
        del cache


def bench_latent_attention() -> Iterator[Row]:
    """Decode attention over latents, by heads, batch and context; prefill over expanded ones."""
    cases = [(1, 512), (1, 16384), (1, 131072), (32, 512), (32, 8192), (128, 512), (128, 2048)]
    for heads, (batch, context) in product((16, 128), cases):
        tables, lengths, blocks = make_tables(batch, context)
        cache = randn(blocks, COPIES, BLOCK_SIZE, RANK + ROPE)
        queries = randn(heads, batch, RANK).transpose(0, 1), randn(batch, heads, ROPE)
        parts = latent_decode_parts(queries[0], lengths)  # once a step
        attend = partial(latent_decode_attention, *queries, scale=SCALE, parts=parts)
        us = time_calls([partial(attend, x, tables, lengths) for x in cache.unbind(1)])
        moved = batch * context * (RANK + ROPE) * 2
        rate = 2 * batch * heads * context * (2 * RANK + ROPE) / us / 1e6
        case = f"{heads} heads, {batch} x {context}"
        yield Row("latent_decode_attention", case, us, moved / us / 1e6, f"TB/s {rate:.0f} TFLOP/s")
        del cache
    for batch, fresh, prefix in ((1, 1024, 0), (4, 4096, 0), (1, 2048, 14336)):
        heads, width = 16, 192
        query = randn(batch * fresh, heads, width)
        key, value = randn(batch * (fresh + prefix), heads, 2, width).unbind(2)
        numbers = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        attend = partial(
            varlen_attention, query, key, value, numbers * fresh, numbers * (fresh + prefix),
            (fresh,) * batch, (fresh + prefix,) * batch, scale=SCALE,
        )  # fmt: skip
        us = time_calls([attend])
        pairs = batch * (fresh * prefix + fresh * fresh / 2)
        work = 2 * pairs * heads * (192 + 128)
        case = f"{batch} x {fresh} after {prefix}"
        yield Row("varlen_attention", case, us, work / us / 1e6, "TFLOP/s, padding apart")


def bench_prefill_attention() -> Iterator[Row]:
    """Prefill attention: fresh prompts, and chunks with a cached prefix."""
    cases = [
        (1, 1024, 0),
        (1, 2048, 0),
        (1, 16384, 0),
        (1, 2048, 14336),
        (1, 2000, 9000),
        (8, 512, 0),
        (4, 256, 8192),
        (1, 64, 16320),
        (1, 16, 65520),
    ]
    for batch, fresh, prefix in cases:
        tables, lengths, blocks = make_tables(batch, fresh + prefix)
        cache = make_cache(blocks, 1)
        planes = cache[:, :, 0, 0], cache[:, :, 0, 1]
        query = randn(batch * fresh, HEADS, HEAD_DIM)
        cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * fresh
        key, value = (randn(batch * fresh, KV_HEADS, HEAD_DIM) for _ in range(2))
        both = PrefillBatch(
            block_tables=tables,
            cu_seqlens=cu,
            context_lens=lengths,
            query_lens=(fresh,) * batch,
            prefix_lens=(prefix,) * batch,
        )
        chosen = partial(prefill_attention, query, key, value, *planes, both, SOFTMAX)
        args = query, *planes, tables, cu, lengths, (fresh,) * batch, SOFTMAX
        paged = partial(paged_prefill_attention, *args)
        work = 4 * batch * (fresh * prefix + fresh * fresh / 2) * HEADS * HEAD_DIM
        for name, call in (("prefill", chosen), ("paged_prefill", paged)):
            with planning():
                us = time_calls([call])
            case = f"{batch} x {fresh} after {prefix}"
            yield Row(f"{name}_attention", case, us, work / us / 1e6, "TFLOP/s")


DELTA_KEY_HEADS, DELTA_HEADS, DELTA_DIM, DELTA_CHANNELS = 16, 32, 128, 512
"""Sizes of Qwen3-Next-80B-A3B's gated delta rule."""


def delta_states(decodes: int, prompts: Sequence[int]) -> rule.LayerStates:
    """States in a random pool for `decodes` decoding rows and prompts of given lengths."""
    rows = decodes + len(prompts)
    data = torch.randn(rows + 1, DELTA_KEY_HEADS, 12 + 256, DELTA_DIM, device="cuda")
    blocks = torch.arange(rows, device="cuda") + 1
    if not prompts:
        return rule.LayerStates(data, blocks, blocks, decodes)
    bounds, sequences = np.cumsum([0, *[1] * decodes, *prompts]), np.arange(decodes, rows + 1)
    pieces = rule.cut(bounds[decodes:])
    arrays = (bounds, sequences, pieces, pieces)
    tables = rule.PromptRows(*(torch.from_numpy(x).cuda() for x in arrays))
    return rule.LayerStates(data, blocks, blocks, decodes, tables)


def delta_inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of `delta_rule_inputs` for a number of tokens."""
    projected = randn(tokens, DELTA_KEY_HEADS, DELTA_CHANNELS + 256)[..., :DELTA_CHANNELS]
    rates, weight = randn(tokens, DELTA_KEY_HEADS, 2, 2), randn(DELTA_KEY_HEADS, DELTA_CHANNELS, 4)
    return projected, rates, weight, torch.randn(2, DELTA_HEADS, device="cuda")


DELTA_CASES: dict[str, tuple[int, tuple[int, ...]]] = {
    "4 x 4096": (0, (4096,) * 4),
    "2 x 4096": (0, (4096,) * 2),
    "1 x 16384": (0, (16384,)),
    "1 x 8192": (0, (8192,)),
    "1 x 1024": (0, (1024,)),
    "64 x 100": (0, (100,) * 64),
    "1 decodes": (1, ()),
    "32 decode": (32, ()),
    "128 decode": (128, ()),
}


def bench_delta_rule() -> Iterator[Row]:
    """The gated delta rule of one layer and its inputs, by kernels and in plain torch."""
    for case, (decodes, prompts) in DELTA_CASES.items():
        tokens = decodes + sum(prompts)
        states, inputs = delta_states(decodes, prompts), delta_inputs(tokens)
        prepare = partial(rule_inputs.delta_rule_inputs, *inputs, states)
        moved = tokens * DELTA_KEY_HEADS * DELTA_CHANNELS * 4
        us = time_calls([prepare])
        yield Row("delta_rule_inputs", case, us, moved / us / 1e6, "TB/s")
        apply = partial(rule.delta_rule, *prepare(), states)
        square, chunk = DELTA_DIM * DELTA_DIM, rule.CHUNK * DELTA_DIM
        work = 2 * sum(prompts) * DELTA_HEADS * (3 * square + 4 * chunk)
        us = time_calls([apply])
        yield Row("delta_rule", case, us, work / us / 1e6, "TFLOP/s")
        if case not in ("4 x 4096", "1 x 16384"):
            continue
        plainly: dict[str, Callable[[], object]] = {
            "inputs in plain torch": partial(
                rule_inputs.delta_rule_inputs_reference, *inputs, states
            ),
            "rule in plain torch": partial(rule.delta_rule_reference, *prepare(), states),
        }
        for op, call in plainly.items():
            call()
            yield Row(op, case, statistics.median(time_once(call) for _ in range(3)))


def bench_delta_tiles() -> Iterator[Row]:
    """Launch options of the gated delta rule's prefill kernels."""
    kept, solves = dict(rule.SCAN[2]), dict(rule.SOLVE[2])
    for case in ("2 x 4096", "1 x 8192"):
        decodes, prompts = DELTA_CASES[case]
        states = delta_states(decodes, prompts)
        prepare = partial(rule_inputs.delta_rule_inputs, *delta_inputs(sum(prompts)), states)
        kept_inputs = dict(rule_inputs.LAUNCH)
        for block_t, warps in product((8, 16, 32), (2, 4, 8)):
            rule_inputs.LAUNCH.update(BLOCK_T=block_t, num_warps=warps)
            yield from _tried("inputs", f"{case} {(block_t, warps)}", prepare)
        rule_inputs.LAUNCH.update(kept_inputs)
        call = partial(rule.delta_rule, *prepare(), states)
        for block_v, warps, stages in product((16, 32, 64), (4, 8), (2, 3)):
            rule.SCAN[2] = {"BLOCK_V": block_v, "num_warps": warps, "num_stages": stages}
            rule.LONE_BLOCK_V = block_v
            yield from _tried("scan", f"{case} {tuple(rule.SCAN[2].values())}", call)
        rule.SCAN[2], rule.LONE_BLOCK_V = kept, 32
        for block, warps in product((8, 16, 32), (2, 4, 8)):
            rule.BLOCK, rule.SOLVE[2] = block, solves | {"num_warps": warps}
            yield from _tried("solve", f"{case} {(block, warps)}", call)
        rule.BLOCK, rule.SOLVE[2] = 16, solves


def _tried(op: str, case: str, call: Callable[[], object]) -> Iterator[Row]:
    """Measure a call, unless it does not fit the GPU."""
    try:
        yield Row(op, case, time_calls([call]))
    except Exception as error:
        print(f"{op:24} {case:28} {type(error).__name__}")


def bench_moves() -> Iterator[Row]:
    """Merge of attention states, and gather of a sequence's pages."""
    states = [randn(2048, HEADS, HEAD_DIM) for _ in range(2)]
    lse = [torch.randn(2048, HEADS, device="cuda") for _ in range(2)]
    us = time_calls([partial(merge_attention_states, states[0], lse[0], states[1], lse[1])])
    moved = 3 * states[0].numel() * 2
    yield Row("merge_attention_states", "2048 tokens", us, moved / us / 1e6, "TB/s")
    keys, values = make_cache(1025, 2)[:, :, 1].unbind(2)
    ids = torch.randperm(1024, device="cuda").to(torch.int32) + 1
    for tokens in (1024, 4096, 16384):
        us = time_calls([partial(gather_pages, keys, values, ids, 0, tokens, tokens)])
        moved = 4 * tokens * KV_HEADS * HEAD_DIM * 2
        yield Row("gather_pages", f"{tokens} tokens", us, moved / us / 1e6, "TB/s")


def bench_digests() -> Iterator[Row]:
    """Digest sums of whole blocks (that were received), and of tokens written by a step."""
    tokens = 16384
    tables, _, blocks = make_tables(1, tokens)
    cache, ids = make_cache(blocks, LAYERS), tables[0]
    positions = torch.arange(tokens, device="cuda")
    slots = ids.long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    sums = torch.zeros((blocks, LAYERS, 2, KV_HEADS), dtype=torch.int64, device="cuda")
    per_token = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
    for count in (1024, tokens):
        whole = partial(block_sums, cache, ids[: count // BLOCK_SIZE], 0, 0, count)
        us = time_calls([whole])
        yield Row("block_sums", f"{count} tokens", us, count * per_token / us / 1e6, "TB/s")
    for count in (1, 32, 2048):
        us = time_calls([partial(add_sums, sums, cache, slots[:count], positions[:count])])
        yield Row("add_sums", f"{count} tokens", us, count * per_token / us / 1e6, "TB/s")


@dataclass(frozen=True)
class Parts:
    """Parts of a decode step to run, to separate their times."""

    gemms: bool = True
    attention: bool = True
    rest: bool = True


class DecodeStep:
    """A decode step with random weights, as a model runner captures it in a graph."""

    def __init__(self, context: int, max_batch: int) -> None:
        shapes = ("qkv", "o", "gate_up", "down")
        self.layers = [[randn(*GEMMS[name], std=0.02) for name in shapes] for _ in range(LAYERS)]
        self.lm_head = randn(*GEMMS["lm_head"], std=0.02)
        self.norm = randn(HIDDEN)
        self.tables, self.lengths, blocks = make_tables(max_batch, context)
        self.cache = make_cache(blocks, LAYERS)
        self.slots = self.tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        self.positions = torch.full((max_batch,), context - 1, device="cuda")
        self.cos_sin = torch.rand(context, HEAD_DIM, device="cuda")
        self.residual = randn(max_batch, HIDDEN)
        self.workspace = Workspace(torch.device("cuda"))
        self.wide = {rows: randn(max_batch, rows) for rows, _ in GEMMS.values()}

    def __call__(self, batch: int, parts: Parts) -> Tensor:
        """Next tokens [batch], or the result of the chosen parts."""
        hidden, residual = self.wide[HIDDEN][:batch], self.residual[:batch].clone()
        for layer, (qkv, o, gate_up, down) in enumerate(self.layers):
            hidden = self._norm(hidden, residual, parts)
            hidden = self._attend(self._linear(hidden, qkv, parts), layer, parts)
            hidden = self._norm(self._linear(hidden, o, parts), residual, parts)
            wide = self._linear(hidden, gate_up, parts)
            hidden = silu_and_mul(wide) if parts.rest else wide[:, :FFN]
            hidden = self._linear(hidden, down, parts)
        logits = self._linear(self._norm(hidden, residual, parts), self.lm_head, parts)
        return logits.argmax(-1) if parts.rest else logits

    def _linear(self, x: Tensor, weight: Tensor, parts: Parts) -> Tensor:
        if not parts.gemms:
            return self.wide[weight.shape[0]][: x.shape[0]]
        return skinny_linear(x, weight, self.workspace)

    def _norm(self, x: Tensor, residual: Tensor, parts: Parts) -> Tensor:
        return rms_norm(x, self.norm, 1e-5, residual=residual) if parts.rest else x

    def _attend(self, qkv: Tensor, layer: int, parts: Parts) -> Tensor:
        batch = qkv.shape[0]
        query, key, value = split_heads(qkv.view(batch, -1, HEAD_DIM))
        planes = self.cache[:, :, layer, 0], self.cache[:, :, layer, 1]
        if parts.rest:
            slots = self.slots[:batch]
            rope_write(query, key, value, self.positions[:batch], self.cos_sin, *planes, slots)
        if not parts.attention:
            return self.wide[HIDDEN][:batch]
        tables, lengths = self.tables[:batch], self.lengths[:batch]
        out = decode_attention(query, *planes, tables, lengths, SOFTMAX)
        return out.flatten(1)


def bench_decode_step() -> Iterator[Row]:
    """A whole decode step at context 512, and its parts."""
    step = DecodeStep(512, 256)
    parts = {
        "whole": Parts(),
        "GEMMs": Parts(attention=False, rest=False),
        "attention": Parts(gemms=False, rest=False),
        "rest": Parts(gemms=False, attention=False),
    }
    for batch in (1, 32, 128, 256):
        for name, part in parts.items():
            us = time_calls([partial(step, batch, part)])
            yield Row("decode_step", f"batch {batch} {name}", us)


BENCHES: dict[str, Callable[[], Iterator[Row]]] = {
    "gemms": bench_gemms,
    "fp8": bench_fp8,
    "rows": bench_rows,
    "experts": bench_experts,
    "rope_write": bench_rope_write,
    "decode_attention": bench_decode_attention,
    "latent_attention": bench_latent_attention,
    "prefill_attention": bench_prefill_attention,
    "delta_rule": bench_delta_rule,
    "delta_tiles": bench_delta_tiles,
    "moves": bench_moves,
    "digests": bench_digests,
    "decode_step": bench_decode_step,
}


def main() -> None:
    """Run the selected benchmarks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON to this file")
    parser.add_argument("--only", nargs="*", choices=BENCHES, default=list(BENCHES))
    options = parser.parse_args()
    rows = []
    for name in options.only:
        for row in BENCHES[name]():
            rows.append(row)
            print(f"{row.op:24} {row.case:28} {row.us:10.1f} us {row.rate:9.2f} {row.unit}")
        torch.cuda.empty_cache()
    if options.out is not None:
        device = torch.cuda.get_device_name()
        report = {"device": device, "torch": torch.__version__, "rows": [asdict(r) for r in rows]}
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
