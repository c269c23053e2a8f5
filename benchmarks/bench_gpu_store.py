"""A host-memory store on a GPU engine: loads into device memory, and decoding meanwhile.

    python -m benchmarks.bench_gpu_store --json gpu-store.json

Llama-3-8B's shape with dummy weights and a `memory` store. *Bare* is `cudaMemcpyAsync` of as many
bytes, block by block, between pinned memory and the device. *Load* is the engine's own load of a
prompt's blocks, digest sums verified: directly into the blocks, and through pinned memory as for a
store that can't access a GPU. Decoding is milliseconds between tokens of a batch, in turns with
continuous loads and without loads; ratios are within a pair of turns.
"""

from __future__ import annotations

import argparse
import json
import select
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bench_engine import Bench, Desk
from benchmarks.workload import LLAMA_8B, MAX_MODEL_LEN, dummy_folder, random_prompts
from kvbaton.bench.report import publish
from kvbaton.connectors.cuda_copies import CopyRun, CudaCopies
from kvbaton.engine.block_staging import BlockStaging
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.store_connector import StoreConnector
from kvbaton.engine.store_worker import BlockRun, LoadBlocks
from kvbaton.messages.engine import ToCore

LENGTH = 16384
ROUNDS = 5
BATCHES = (32, 128)
TURNS = 8
"""Number of turns with loads, and of turns without."""
STEPS = 40
"""Decode steps per turn; the first ones are not counted."""
LEAD_STEPS = 4
LOAD_STEPS = 60
"""Most decode steps during one load: the last load of a turn outlasts the turn."""
POLL_S = 0.0002

Row = dict[str, Any]


class IdleDesk(Desk):
    """A mailbox that lets the engine sleep until an event."""

    def receive(self, timeout: float, wake_fd: int) -> list[ToCore]:
        """As `Desk.receive`, but wait until there is a message or the core is woken."""
        if not self.inbox:
            select.select([wake_fd], [], [], timeout)
        return super().receive(timeout, wake_fd)


class StoreBench(Bench):
    """An engine with a store."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.desk = self.core.mailbox = IdleDesk()
        (self.store,) = (c for c in self.core.connectors if isinstance(c, StoreConnector))
        self.worker = self.store.worker
        self.blocks = self.core.scheduler.blocks

    def settle(self) -> None:
        """Run until no saves are left."""
        while not self.core.is_idle():
            self.core.turn()

    def counter(self, name: str, part: str) -> float:
        """Value of a counter of the store."""
        counters = self.core.metrics().counters
        return sum(v for key, v in counters.items() if f"store_{name}" in key and part in key)

    def keep(self, prompt: tuple[int, ...]) -> tuple[float, float, tuple[BlockRun, ...]]:
        """TTFT in ms if the prompt is computed, and if it is loaded; and the loaded runs."""
        computed = self.run([prompt], 1)[0][0]
        self.settle()
        self.core.reset_prefix_cache()
        self.desk.times.clear()
        self.submit([prompt], 1)
        began = time.perf_counter()
        runs: tuple[BlockRun, ...] = ()
        while self.desk.open:
            self.core.turn()
            for load in self.store._loads:
                runs = load.runs
        (times,) = self.desk.times.values()
        assert runs, "nothing was loaded"
        return 1e3 * computed, 1e3 * (times[0] - began), runs


def main() -> None:
    """Measure, print tables, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--store-gib", type=int, default=4)
    args = parser.parse_args()
    folder = dummy_folder(Path(tempfile.mkdtemp()) / "model", LLAMA_8B)
    began = time.perf_counter()
    bench = StoreBench(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            device="cuda",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max(args.batches, default=1),
            store=f"memory:{json.dumps({'max_bytes': args.store_gib << 30})}",
            store_load_timeout=20.0,
        )
    )
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    bench.run(random_prompts(1, 64, 1), 2)
    (prompt,) = random_prompts(1, args.length, 7)
    computed, loaded, runs = bench.keep(prompt)
    num_blocks = sum(len(run.blocks) for run in runs)
    size = bench.worker.forms[0].num_bytes
    saved = bench.counter("bytes", "save") / bench.counter("seconds", "save") / 1e9
    print(f"{num_blocks} blocks of {size >> 10} KiB; first token {computed:.0f} ms computed, "
          f"{loaded:.0f} ms loaded", flush=True)  # fmt: skip
    held = bench.blocks.pool.allocate(num_blocks)
    taken: Iterator[int] = iter(held)
    mine = tuple(run._replace(blocks=tuple(next(taken) for _ in run.blocks)) for run in runs)
    rows = bandwidths(bench, mine, size, num_blocks, args.rounds)
    took = num_blocks * size / saved / 1e6
    rows.append({"what": "save, as the engine counts it", "GB/s": saved, "best": saved, "ms": took})
    for row in rows:
        print(row, flush=True)
    decoding = [decode(bench, batch, mine, size * num_blocks) for batch in args.batches]
    for row in decoding:
        print(row, flush=True)
    publish("gpu_store", vars(args) | {"gpu": torch.cuda.get_device_name()}, rows, args.json,
            decoding=decoding)  # fmt: skip
    bench.blocks.pool.deref(held)
    bench.core.close()


def bandwidths(
    bench: StoreBench, runs: tuple[BlockRun, ...], size: int, count: int, rounds: int
) -> list[Row]:
    """One row per way; each round measures all ways."""
    direct: BlockStaging = bench.worker._staging
    bounced = bench.worker._executor.staging(bench.worker.forms)
    ways = {
        "bare, to the device": partial(bare, size, count, to_device=True),
        "bare, from the device": partial(bare, size, count, to_device=False),
        "load, straight into blocks": partial(load, bench, runs, direct),
        "load, by pinned memory": partial(load, bench, runs, bounced),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            taken = way()
            if number:  # the first one warms up
                seconds[name].append(taken)
    bench.worker._staging = direct
    return [
        {
            "what": name,
            "GB/s": count * size / median(taken) / 1e9,
            "best": count * size / min(taken) / 1e9,
            "ms": 1e3 * median(taken),
        }
        for name, taken in seconds.items()
    ]


def bare(size: int, count: int, *, to_device: bool) -> float:
    """Seconds to copy `count` blocks between pinned memory and the device."""
    copies = CudaCopies()
    host = torch.empty(count * size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count * size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    sides = [there.data_ptr(), host.data_ptr()][:: 1 if to_device else -1]
    runs = [CopyRun(sides[0] + at, sides[1] + at, size) for at in range(0, count * size, size)]
    began = time.perf_counter()
    copies.begin(runs, copies.stream(0)).synchronize()
    return time.perf_counter() - began


def load(bench: StoreBench, runs: tuple[BlockRun, ...], staging: BlockStaging) -> float:
    """Seconds of a load without the engine's thread."""
    bench.worker._staging = staging
    order = LoadBlocks(runs=runs)
    began = time.perf_counter()
    bench.worker.submit(order)
    while not is_over(order):
        time.sleep(POLL_S)
    taken = time.perf_counter() - began
    assert all(order.good), f"{order.good.count(False)} blocks are wrong: {order.error}"
    return taken


def is_over(order: LoadBlocks) -> bool:
    """Whether the load is complete."""
    return order.seconds > 0


def decode(bench: StoreBench, batch: int, runs: tuple[BlockRun, ...], num_bytes: int) -> Row:
    """Milliseconds between tokens, in turns with and without loads."""
    bench.core.reset_prefix_cache()
    bench.store.committed = lambda *_: None  # type: ignore[method-assign]  # saves are not measured
    most = LEAD_STEPS + TURNS * (2 * STEPS + LOAD_STEPS)
    times = bench.desk.times
    times.clear()
    bench.submit(random_prompts(batch, 512, batch), most)

    def step() -> None:
        bench.core.turn()
        assert bench.desk.open == batch, f"{most} tokens were too few"

    while len(times) < batch or min(map(len, times.values())) < LEAD_STEPS:
        step()
    names = list(times)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    seconds, loads = 0.0, 0
    for turn in range(2 * TURNS):
        loading = bool(turn % 2)
        first, order = len(times[names[0]]), None
        began, done = time.perf_counter(), loads
        while len(times[names[0]]) < first + STEPS:
            if loading and (order is None or is_over(order)):
                loads += order is not None
                order = LoadBlocks(runs=runs)
                bench.worker.submit(order)
            step()
        own = times[names[0]][first + LEAD_STEPS :]
        gaps[loading].append(1e3 * (own[-1] - own[0]) / (len(own) - 1))
        if order is not None:
            while not is_over(order):
                step()
            loads += 1
            assert all(order.good), order.error
            seconds += time.perf_counter() - began
            assert loads > done
    while bench.desk.open:
        bench.core.turn()
    bench.settle()
    slower = [with_loads / without for without, with_loads in zip(*gaps.values(), strict=True)]
    return {
        "batch": batch,
        "ms alone": median(gaps[False]),
        "ms beside loads": median(gaps[True]),
        "ratio": median(slower),
        "ratios": told(slower),
        "loads": loads,
        "load GB/s": loads * num_bytes / seconds / 1e9,
    }


def told(ratios: Sequence[float]) -> str:
    """Text of the lowest and the highest ratio."""
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


if __name__ == "__main__":
    main()
