"""What an all-reduce between tensor-parallel ranks costs inside a CUDA graph, by rows of hidden.

python -m benchmarks.bench_all_reduce --ranks 2 --json all_reduce.json
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median

import torch

from kvbaton.engine.cuda.nccl import Communicators
from kvbaton.engine.executor import WorkerGroup, rank_threads

HIDDEN = 4096
ROWS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
CALLS, REPLAYS = 64, 20


class Rank:
    """One GPU, and a graph of many all-reduces."""

    def __init__(self, rank: int, communicators: Communicators) -> None:
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        self._ways = {
            "NCCL": partial(communicators.nccl_all_reduce, rank),
            "ours": partial(communicators.all_reduce, rank),
        }

    def capture(self, way: str, rows: int) -> None:
        """Record `CALLS` all-reduces of [rows, HIDDEN]."""
        reduce = self._ways[way]
        tensor = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=self._device)
        reduce(tensor)
        torch.cuda.synchronize(self._device)
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(CALLS):
                reduce(tensor)
            self._graph.capture_end()

    def time(self) -> float:
        """Median microseconds of one all-reduce."""
        took: list[float] = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            took.append(1e3 * begin.elapsed_time(end) / CALLS)
        return median(took)

    def close(self) -> None:
        """Drop the graph, which holds the communicator."""
        torch.cuda.synchronize(self._device)
        del self._graph


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    communicators = Communicators(args.ranks)
    group = WorkerGroup(rank_threads(args.ranks), abort=communicators.abort)
    ranks = group.call(lambda rank: Rank(rank, communicators))
    found: dict[str, dict[int, float]] = {"NCCL": {}, "ours": {}}
    print(f"{'rows':>8}{'KiB':>10}{'NCCL us':>10}{'ours us':>10}{'GB/s':>10}")
    for rows in ROWS:
        for way, times in found.items():
            group.call(lambda rank, way=way, rows=rows: ranks[rank].capture(way, rows))  # type: ignore[misc]
            times[rows] = max(group.call(lambda rank: ranks[rank].time()))
        nccl, ours = (times[rows] for times in found.values())
        size = rows * HIDDEN * 2
        print(f"{rows:8}{size / 1024:10.0f}{nccl:10.1f}{ours:10.1f}{size / ours / 1e3:10.1f}")
    for thread in group.threads:
        thread.shutdown()
    for rank in ranks:
        rank.close()
    communicators.close()
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
