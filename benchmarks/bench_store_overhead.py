"""Cost of saves for a busy engine: the same work with and without a store, in turns.

Two engines in one process, equal except for the store, run the same requests one after the other,
in alternating order. All prompts are new, so all of their blocks are computed and saved. Each pair
gives two ratios: throughput with the store over throughput without; and CPU seconds of the whole
process without the store over CPU seconds with it, including all saves, which hardly depend on
other load of the machine. A full store (`--store-mib`) evicts blocks that earlier pairs saved.
Reported are the medians over all pairs and their 95 % intervals (bootstrap over pairs).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_engine import Bench
from benchmarks.workload import SMALL
from kvbaton.bench.report import median, publish
from kvbaton.engine.config import EngineConfig
from tests.support.checkpoints import make_checkpoint

RESAMPLES = 10_000


class SavingBench(Bench):
    """An engine that may have a store."""

    def timed(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[float, float]:
        """Seconds until the last token of requests that all arrive now, and all CPU seconds.

        The clock stops at the last token; CPU time includes the queue of saves, which is emptied so
        that the next run does not pay for it.
        """
        self.submit(prompts, max_tokens)
        began, cpu = time.perf_counter(), time.process_time()
        while self.desk.open:
            self._turn()
        taken = time.perf_counter() - began
        while not self.core.is_idle():
            time.sleep(0.001)
            self._turn()
        return taken, time.process_time() - cpu

    def _turn(self) -> None:
        self.core.receive()
        self.core.poll()
        self.core.launch()
        self.core.update()

    def saved(self) -> dict[str, float]:
        """Number of saved blocks by outcome."""
        name = "kvbaton_store_save_blocks_total"
        counters = self.core.metrics().counters
        return {key.split('"')[-2]: v for key, v in counters.items() if key.startswith(name)}


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("filesystem", "memory"), default="filesystem")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--store-mib", type=int, default=512, help="capacity of the store")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), args)
    publish("store_overhead", vars(args), rows, args.out)


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all pairs; the first is warm-up."""
    options = {
        "filesystem": {"path": str(folder / "store"), "max_bytes": args.store_mib << 20},
        "memory": {"max_bytes": args.store_mib << 20},
    }[args.store]
    store = f"{args.store}:{json.dumps(options)}"
    settings: dict[str, Any] = {
        "model": str(make_checkpoint(folder / "model", SMALL)),
        "device": "cpu",
        "num_threads": args.threads,
        "max_model_len": 1024,
    }
    benches = [SavingBench(EngineConfig(**settings, store=spec)) for spec in (None, store)]
    chance = random.Random(0)
    ratios, cpu_ratios, taken = list[float](), list[float](), list[list[float]]()
    for number in range(args.pairs + 1):
        size = args.input_len
        prompts = [tuple(chance.choices(range(3, 4096), k=size)) for _ in range(args.requests)]
        seconds, cpu = [0.0, 0.0], [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            seconds[which], cpu[which] = benches[which].timed(prompts, args.output_len)
        if number:
            ratios.append(seconds[0] / seconds[1])
            cpu_ratios.append(cpu[0] / cpu[1])
            taken.append(seconds)
    saved = benches[1].saved()
    for bench in benches:
        bench.core.close()
    tokens = args.requests * (args.input_len + args.output_len)
    return [
        {
            "store": args.store,
            "tokens/s without": tokens / median([pair[0] for pair in taken]),
            "tokens/s with": tokens / median([pair[1] for pair in taken]),
            "ratio": told(ratios),
            "CPU ratio": told(cpu_ratios),
            "blocks stored": saved["stored"],
            "dropped": saved["dropped"],
        }
    ]


def told(ratios: Sequence[float]) -> str:
    """Text of the median and its interval."""
    low, high = interval(ratios)
    return f"{median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median (Efron, "Bootstrap Methods", Annals of Statistics, 1979)."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


if __name__ == "__main__":
    main()
