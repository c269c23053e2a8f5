"""Time of sums between tensor-parallel ranks in a CUDA graph, by number of tokens.

Alone, and with the addition to the residual stream and the norm that follow in a model.

python -m benchmarks.bench_all_reduce --ranks 2 --json all_reduce.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from kvbaton.bench.report import publish
from kvbaton.engine.cuda.nccl import NcclCollectives, make_unique_id
from kvbaton.engine.executor import WorkerGroup, rank_threads
from kvbaton.kernels.peer_memory import peer_memories
from kvbaton.kernels.rms_norm import rms_norm

HIDDEN = 4096
ROWS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
CALLS, REPLAYS = 64, 20


class Rank:
    """One GPU with a graph of many all-reduces."""

    def __init__(self, rank: int, collectives: NcclCollectives) -> None:
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        collectives.connect()
        stream = torch.randn(ROWS[-1], HIDDEN, dtype=torch.bfloat16, device=self._device)
        scale = torch.ones(HIDDEN, dtype=torch.bfloat16, device=self._device)

        def after_nccl(tensor: torch.Tensor) -> torch.Tensor:
            total = collectives.nccl_all_reduce(tensor)
            return rms_norm(total, scale, 1e-5, residual=stream[: len(tensor)])

        def in_one(tensor: torch.Tensor) -> torch.Tensor:
            return collectives.all_reduce_norm(tensor, stream[: len(tensor)], scale, 1e-5, 0.0)

        self.ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "NCCL": collectives.nccl_all_reduce,
            "ours": collectives.all_reduce,
            "NCCL, norm": after_nccl,
            "ours with norm": in_one,
        }

    def capture(self, way: str, rows: int) -> None:
        """Capture `CALLS` all-reduces of [rows, HIDDEN]."""
        reduce = self.ways[way]
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
        """Median time of one all-reduce, in microseconds."""
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
        """Drop the graph, which keeps the communicator alive."""
        torch.cuda.synchronize(self._device)
        del self._graph


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    devices = [torch.device("cuda", rank) for rank in range(args.ranks)]
    unique_id, memories = make_unique_id(), peer_memories(devices)
    all_collectives = [
        NcclCollectives(rank, args.ranks, unique_id, memory) for rank, memory in enumerate(memories)
    ]
    group = WorkerGroup(rank_threads(args.ranks))
    ranks = group.call(lambda rank: Rank(rank, all_collectives[rank]))
    found = []
    for rows in ROWS:
        row = {"rows": float(rows), "KiB": rows * HIDDEN / 512}
        for way in ranks[0].ways:
            group.call(lambda rank, way=way, rows=rows: ranks[rank].capture(way, rows))  # type: ignore[misc]
            row[f"{way} us"] = max(group.call(lambda rank: ranks[rank].time()))
        found.append({**row, "GB/s": rows * HIDDEN * 2 / row["ours us"] / 1e3})
    for thread in group.threads:
        thread.shutdown()
    for rank in ranks:
        rank.close()
    for collectives in all_collectives:
        collectives.close()
    publish("all_reduce", vars(args), found, args.json)


if __name__ == "__main__":
    main()
