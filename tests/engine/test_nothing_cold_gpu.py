"""After the warm-up, no mix of requests compiles, captures, allocates, or stalls."""

from __future__ import annotations

import gc
import pkgutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvbaton.kernels
from kvbaton.engine.cuda.graphs import DecodeGraphs
from kvbaton.kernels import prefill_attention
from kvbaton.messages.engine import SamplingParams
from tests.engine.test_gpu import MODELS
from tests.support.digests import digest_of
from tests.support.driver import Driver
from tests.support.prompts import random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 40, "max_model_len": 6000,
    "max_num_batched_tokens": 2048, "num_blocks": 80_000,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-two-ranks": ("llama", {"tensor_parallel_size": 2}),
    "llama-fp8": ("llama", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "gemma3": ("gemma3", {"num_blocks": 400_000}),
    "gpt-oss": ("gpt-oss", {"num_blocks": 200_000}),
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-next": ("qwen3-next", {"num_blocks": 200_000}),
}
ROUNDS = 150
SLOWER, SLACK_S = 3.0, 0.01
"""A step may take so many times what it takes when all is played again, and so much more."""
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 100, 129, 500, 1000, 1023, 1024, 1500, 2048, 3001, 5000)
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.7, seed=6, top_k=20, top_p=0.8, repetition_penalty=1.05),
)


def compiled() -> dict[str, int]:
    """In how many versions each of our kernels is there, on all devices."""
    found = {}
    for info in pkgutil.iter_modules(kvbaton.kernels.__path__):
        for name, kernel in vars(import_module(f"kvbaton.kernels.{info.name}")).items():
            caches = getattr(kernel, "device_caches", None)
            if caches is not None:
                versions = sum(len(cache[0]) for cache in caches.values())
                found[f"{info.name}.{name}"] = versions
    assert sum(found.values()), "the kernels' caches are elsewhere in this Triton"
    return found


class Mix:
    """Requests of all lengths that come, decode beside each other, and end."""

    def __init__(self, driver: Any, seed: int) -> None:
        self.driver, self.rng = driver, np.random.default_rng(seed)
        self.live: list[int] = []
        self.finished: list[tuple[list[int], list[int]]] = []
        self.seconds: list[float] = []
        self.counts: list[list[int]] = []

    def round(self) -> None:
        """One step, with prompts and chunks behind decoding sequences; then digests as pushed."""
        ended = self._end()
        while len(self.live) < self.rng.integers(1, 39):
            self._come()
        budget, work = SETTINGS["max_num_batched_tokens"], []
        for handle in self.live:
            left = self.driver.left(handle)
            count = min(left, int(2 ** self.rng.uniform(1, 11)), budget)
            if count and (count > 1 or left == 1):
                work.append((handle, count, int(count == left)))
                budget -= count
        self.counts.append([count for _, count, _ in work])
        began = time.perf_counter()
        self.driver.step(*sorted(work, key=lambda item: item[1] > 1), ended=ended)
        self.seconds.append(time.perf_counter() - began)
        handle = int(self.rng.choice(self.live))
        table, length = self.driver.tables[handle], self.driver.computed[handle]
        start = int(self.rng.integers(0, max(length, 1)))
        size = self.driver.block_size
        blocks, first = table[start // size :], start // size * size
        if length > start:
            self.driver.wait(self.driver.executor.sums(0, blocks))
            self.driver.wait(digest_of(self.driver.executor, 0, blocks, first, start, length))

    def _come(self) -> None:
        count = int(self.rng.choice(LENGTHS))
        tokens, cached = random_tokens(self.rng, count), list[int]()
        if self.finished and len(self.driver.groups) == 1 and self.rng.random() < 0.4:
            known, table = self.finished[int(self.rng.integers(len(self.finished)))]
            hit = int(self.rng.integers(0, min(len(known), 4000) // self.driver.block_size + 1))
            cached = table[:hit]
            tokens = (known[: hit * self.driver.block_size] + tokens)[:5500]
            cached = cached[: (len(tokens) - 1) // self.driver.block_size]
        params = KINDS[int(self.rng.integers(len(KINDS)))]
        self.live.append(self.driver.add(tokens, params, cached=cached))

    def _end(self) -> tuple[int, ...]:
        done = [h for h in self.live if self.driver.left(h) == 1 and self.rng.random() < 0.1]
        for handle in done:
            self.live.remove(handle)
            self.finished.append((self.driver.tokens[handle][:-1], self.driver.tables[handle]))
        return tuple(done)


def driver_calls() -> tuple[int, int, int]:
    """What torch asked the driver for so far: of device, of pinned host memory, and its bytes."""
    host, device = torch.cuda.host_memory_stats(), torch.cuda.memory_stats()
    return device["num_device_alloc"], host["num_host_alloc"], host["allocated_bytes.allocated"]


def slow_steps(driver: Any, look: Callable[[int, list[int]], None]) -> dict[int, str]:
    """Steps of a mix that take far longer than when all is played again; `look` after each."""
    mix, again = Mix(driver, seed=0), Mix(driver, seed=0)
    gc.collect()
    gc.disable()
    try:
        for number in range(ROUNDS):
            mix.round()
            look(number, mix.counts[-1])
        for _ in range(ROUNDS):
            again.round()
    finally:
        gc.enable()
    return {
        number: f"of {mix.counts[number]}: {1e3 * first:.1f} ms, then {1e3 * second:.1f}"
        for number, (first, second) in enumerate(zip(mix.seconds, again.seconds, strict=True))
        if first > SLOWER * second + SLACK_S
    }


def slow_steps_of(folder: Path, settings: dict[str, Any]) -> dict[int, str]:
    """Of an engine that starts for it, in a process of its own."""
    return slow_steps(Driver(folder, **settings), lambda number, counts: None)


@pytest.mark.parametrize("case", CASES)
def test_no_mix_compiles_captures_allocates_or_stalls(
    case: str, checkpoint: Callable[..., Path], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = CASES[case]
    if settings.get("tensor_parallel_size", 1) > torch.cuda.device_count():
        pytest.skip("fewer than two CUDA devices")
    spec = MODELS[name] | {"max_position_embeddings": 8192}
    folder = checkpoint(**spec)
    monkeypatch.setattr(prefill_attention, "FAR_LOGITS", 400_000)  # as after far longer prefixes
    driver = drive(folder, **SETTINGS | settings)
    captured: list[int] = []
    capture = DecodeGraphs.capture

    def counted(graphs: DecodeGraphs, size: int) -> Any:
        captured.append(size)
        return capture(graphs, size)

    monkeypatch.setattr(DecodeGraphs, "capture", counted)
    before, allocated, cold = compiled(), driver_calls(), list[str]()

    def look(number: int, counts: list[int]) -> None:
        nonlocal before, allocated
        now, asked = compiled(), driver_calls()
        cold.extend(f"{name} in step {number}" for name in now if now[name] != before.get(name, 0))
        if asked != allocated:
            cold.append(f"allocations {allocated} to {asked} in {number}: {counts}")
        before, allocated = now, asked

    slow = slow_steps(driver, look)
    assert cold == []
    assert captured == []
    if slow:  # a machine may be slow for a moment, but hardly twice in the same step
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            again = fresh.submit(slow_steps_of, folder, SETTINGS | settings).result(300)
        both = slow.keys() & again.keys()
        assert not both, "\n".join(f"step {n} {slow[n]}; anew {again[n]}" for n in sorted(both))
