"""What an all-reduce between tensor-parallel ranks costs inside a CUDA graph, by rows of hidden.

python -m benchmarks.bench_all_reduce --ranks 2 --json all_reduce.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch

from kvbaton.engine.cuda.nccl import Communicators, NcclCollectives
from kvbaton.engine.ranks import Team, lanes

HIDDEN = 4096
ROWS = (1, 8, 32, 128, 256, 1024, 8192)
CALLS, REPLAYS = 64, 20


class Rank:
    """One GPU, and a graph of many all-reduces."""

    def __init__(self, rank: int, size: int, communicators: Communicators) -> None:
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        self._collectives = NcclCollectives(communicators, rank, size)

    def capture(self, rows: int) -> None:
        """Record `CALLS` all-reduces of [rows, HIDDEN]."""
        tensor = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=self._device)
        self._collectives.all_reduce(tensor)
        torch.cuda.synchronize(self._device)
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(CALLS):
                self._collectives.all_reduce(tensor)
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
    team = Team(lanes(args.ranks), communicators.disband)
    ranks = team.call(lambda rank: Rank(rank, args.ranks, communicators))
    found = {}
    print(f"{'rows':>8}{'KiB':>10}{'us':>10}{'GB/s':>10}")
    for rows in ROWS:
        team.call(lambda rank, rows=rows: ranks[rank].capture(rows))  # type: ignore[misc]
        found[rows] = max(team.call(lambda rank: ranks[rank].time()))
        size = rows * HIDDEN * 2
        print(f"{rows:8}{size / 1024:10.0f}{found[rows]:10.1f}{size / found[rows] / 1e3:10.1f}")
    for lane in team.lanes:
        lane.shutdown()
    for rank in ranks:
        rank.close()
    communicators.close()
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
