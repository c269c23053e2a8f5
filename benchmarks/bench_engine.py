"""One engine, offline: decode step, prefill, TTFT and throughput, beside vLLM 0.26.0.

    python -m benchmarks.bench_engine --json engine.json [--profile]
    python -m benchmarks.bench_engine --cached  # TTFT after long cached prefixes
    python -m benchmarks.bench_engine --mixed   # steps with a prefill chunk and decoding

Llama-3-8B's shape, bf16, dummy weights, prefix caching off, greedy, ``ignore_eos``, random prompts.
Decode steps are also measured with the sampling of Llama 3's and Qwen2.5's
``generation_config.json``, and with a penalty in the worst case for top-p: dummy weights give all
tokens nearly equal logits.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.workload import (
    MAX_BATCHED_TOKENS,
    MAX_MODEL_LEN,
    compared,
    llama_8b,
    random_prompts,
)
from kvbaton.bench.report import publish
from kvbaton.engine.build import build_engine
from kvbaton.engine.chunk_limit import LEAST, ChunkLimit
from kvbaton.engine.config import EngineConfig
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    FromCore,
    Outputs,
    Rejected,
    SamplingParams,
    ToCore,
)
from kvbaton.types import NodeId

DECODE = {1: 4.95, 32: 5.84, 128: 8.60, 256: 13.56}
SAMPLED: dict[str, dict[str, Any]] = {
    "top-p": {"temperature": 0.6, "top_p": 0.9},
    "top-k, top-p, penalty": {
        "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05,
    },
    "top-p, penalty": {"temperature": 0.6, "top_p": 0.9, "frequency_penalty": 0.5},
}  # fmt: skip
PREFILL = {(64, 1024): 42.5e3, (16, 4096): 40.5e3, (4, 16384): 33.4e3}
TTFT = {128: None, 512: None, 1024: 28.3, 1500: None, 2048: None, 4096: 101.3, 16384: 493.0}
CACHED = ((4096, 64), (8192, 100), (16320, 64), (16320, 500), (65000, 64), (65000, 500))
MIXED = (96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 2048)
"""Tokens per mixed step, including those of decoding sequences."""
BESIDE = (16, 32, 64)
"""Numbers of decoding sequences, with 2,048 tokens each, beside prompts of that length."""
THROUGHPUT = 3926.0
DECODE_STEPS = 100
CORE = ("receive", "poll", "launch", "update")
"""Methods of a core's loop, in order."""


class Desk:
    """The engine's mailbox: it delivers requests and records the time of every token."""

    def __init__(self) -> None:
        self.inbox: list[ToCore] = []
        self.times: dict[str, list[float]] = defaultdict(list)
        self.open = 0

    def receive(self, timeout: float, wake_fd: int) -> list[ToCore]:
        """Return the submitted requests."""
        inbox, self.inbox = self.inbox, []
        return inbox

    def send(self, message: FromCore) -> None:
        """Record the times of tokens."""
        assert not isinstance(message, Rejected), message
        if isinstance(message, Outputs):
            now = time.perf_counter()
            for output in message.outputs:
                self.times[output.request_id] += [now] * len(output.token_ids)
                self.open -= output.finish_reason is not None


class Bench:
    """An engine in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self.desk = Desk()
        self.core = build_engine(config, NodeId("bench", bytes(16)), (), self.desk).core
        gc.collect()
        gc.freeze()  # as a node's core does once it is ready
        self.spent = dict.fromkeys(CORE, 0.0)
        self._count = 0

    def submit(
        self, prompts: Sequence[tuple[int, ...]], max_tokens: int, **sampling: Any
    ) -> list[str]:
        """Submit requests; their ids."""
        how = {"temperature": 0.0, "seed": 0} | sampling
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **how)
        names = []
        for prompt in prompts:
            self._count += 1
            names.append(f"r{self._count}")
            self.desk.inbox.append(
                AddRequest(request_id=names[-1], token_ids=array("I", prompt), params=params)
            )
        self.desk.open += len(names)
        return names

    def turn(self) -> None:
        """Run one turn of the core's loop."""
        for name in CORE:
            before = time.perf_counter()
            getattr(self.core, name)()
            self.spent[name] += time.perf_counter() - before

    def run(
        self, prompts: Sequence[tuple[int, ...]], max_tokens: int, **sampling: Any
    ) -> list[list[float]]:
        """Run requests that all arrive now; per request, seconds from then to each token."""
        self.desk.times.clear()
        names = self.submit(prompts, max_tokens, **sampling)
        began = time.perf_counter()
        self.spent = dict.fromkeys(CORE, 0.0)
        while self.desk.open:
            self.turn()
        while self.core.in_flight:
            self.core.update()
        return [[t - began for t in self.desk.times[name]] for name in names]


def decode_step(bench: Bench, batch: int, steps: int = DECODE_STEPS, **sampling: Any) -> float:
    """Milliseconds per decode step once all sequences decode."""
    times = bench.run(random_prompts(batch, 512, batch), steps, **sampling)
    began = max(row[0] for row in times)
    ends = sorted({t for row in times for t in row if t > began})
    ends = [t for t in ends if t <= min(row[-1] for row in times)]
    return 1e3 * (ends[-1] - ends[0]) / (len(ends) - 1)


def prefill(bench: Bench, count: int, length: int) -> float:
    """Prompt tokens per second."""
    times = bench.run(random_prompts(count, length, 7), 1)
    return count * length / max(row[-1] for row in times)


def ttft(bench: Bench, length: int) -> float:
    """TTFT of one prompt, in milliseconds."""
    return median(1e3 * bench.run(random_prompts(1, length, n), 1)[0][0] for n in range(5))


def cached_ttft(bench: Bench, known: int, new: int) -> float:
    """TTFT in milliseconds of a prompt of `new` tokens after a cached prefix of `known`."""
    (prefix,) = random_prompts(1, known, known)
    bench.run([prefix], 1)
    rests = random_prompts(8, new, known + new)
    return median(1e3 * bench.run([(*prefix, *rest)], 1)[0][0] for rest in rests)


def mixed_step(bench: Bench, sequences: int, mixed: int) -> tuple[float, float]:
    """Milliseconds per step of `mixed` tokens with `sequences` decoding; prompt tokens/s."""
    bench.core.scheduler.chunk_limit = ChunkLimit(MAX_BATCHED_TOKENS, mixed)
    times = bench.desk.times
    texts = bench.submit(random_prompts(sequences, 2048, sequences), 4000)
    while min(len(times[name]) for name in texts) < 5:
        bench.turn()
    prompts = bench.submit(random_prompts(max(3, mixed // 64), 2048, mixed), 1)
    began, steps = time.perf_counter(), bench.core.steps
    while not all(times[name] for name in prompts):
        bench.turn()
    took, steps = time.perf_counter() - began, bench.core.steps - steps
    bench.desk.inbox += [AbortRequest(request_id=name) for name in texts]
    while bench.desk.open or bench.core.in_flight:
        bench.turn()
    return 1e3 * took / steps, 2048 * len(prompts) / took


def throughput(bench: Bench) -> float:
    """Output tokens per second of 512 requests, 1024 in, 128 out."""
    steps = bench.core.steps
    times = bench.run(random_prompts(512, 1024, 9), 128)
    spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in bench.spent.items())
    print(f"  {bench.core.steps - steps} steps; the core's thread: {spent}", flush=True)
    return 512 * 128 / max(row[-1] for row in times)


def profile(bench: Bench) -> None:
    """Print the kernels that take most time in prefill and decode steps."""
    cases: dict[str, Callable[[], Any]] = {
        "decode, batch 1": lambda: bench.run(random_prompts(1, 512, 1), 20),
        "decode, batch 256": lambda: bench.run(random_prompts(256, 16, 1), 20),
        "prefill, 8 x 1024": lambda: bench.run(random_prompts(8, 1024, 1), 1),
        "prefill, 16384": lambda: bench.run(random_prompts(1, 16384, 1), 1),
        "48 requests of 1024, 32 out": lambda: bench.run(random_prompts(48, 1024, 1), 32),
    }
    for name, case in cases.items():
        profile_case(name, case)


def profile_case(name: str, case: Callable[[], Any], rows: int = 16) -> None:
    """Print the kernels of a case that take most device time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        case()
        torch.cuda.synchronize()
    print(f"--- {name}")
    for event in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:rows]:
        total = event.self_device_time_total
        print(f"{total / 1e3:10.2f} ms {event.count:7d} x {total / event.count:9.1f} us  "
              f"{event.key[:90]}")  # fmt: skip


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="print kernels instead")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=MAX_BATCHED_TOKENS)
    parser.add_argument("--only", default="", help="measure only rows whose names contain this")
    parser.add_argument("--cached", action="store_true", help="TTFT after cached prefixes instead")
    parser.add_argument("--mixed", action="store_true", help="mixed steps instead")
    args = parser.parse_args()
    logging.basicConfig(level=os.environ.get("LOG_LEVEL", "INFO"))
    folder = llama_8b(Path(tempfile.mkdtemp()) / "model")
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cuda",
        max_model_len=66560 if args.cached else MAX_MODEL_LEN,
        max_num_seqs=256,
        max_num_batched_tokens=args.chunk,
        max_num_mixed_tokens=args.chunk,
        enable_prefix_caching=args.cached,
        enforce_eager=args.enforce_eager,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    began = time.perf_counter()
    bench = Bench(config)
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    if args.profile:
        profile(bench)
        return
    rows: list[tuple[str, float, float | None]] = []

    def add(name: str, measure: Callable[[], float], theirs: float | None) -> None:
        if args.only in name:
            rows.append((name, measure(), theirs))
            print(f"  {name}: {rows[-1][1]:,.2f}", flush=True)

    if args.cached:
        for cached, new in CACHED:
            name = f"TTFT of {new} after {cached} that are cached, ms"
            add(name, partial(cached_ttft, bench, cached, new), None)
        publish("engine", vars(args), compared(rows), args.json)
        return
    if args.mixed:
        for sequences in BESIDE:
            for mixed in MIXED:
                if mixed - sequences < LEAST:  # its chunk would be longer
                    continue
                took, speed = mixed_step(bench, sequences, mixed)
                name = f"step of {mixed} in which {sequences} decode, ms ({speed:,.0f} tok/s)"
                rows.append((name, took, None))
                print(f"  {name}: {took:,.2f}", flush=True)
        publish("engine", vars(args), compared(rows), args.json)
        return
    for batch, theirs in DECODE.items():
        add(f"decode step, batch {batch}, ms", partial(decode_step, bench, batch), theirs)
    for name, how in SAMPLED.items():
        for batch in DECODE:
            step = partial(decode_step, bench, batch, DECODE_STEPS // 2, **how)
            add(f"decode step, batch {batch}, {name}, ms", step, None)
    for length, known in TTFT.items():
        add(f"TTFT of {length}, ms", partial(ttft, bench, length), known)
    for (count, length), theirs in PREFILL.items():
        name = f"prefill of {count} x {length}, tok/s"
        add(name, partial(prefill, bench, count, length), theirs)
    add("512 requests 1024/128, output tok/s", partial(throughput, bench), THROUGHPUT)
    publish("engine", vars(args), compared(rows), args.json)


if __name__ == "__main__":
    main()
