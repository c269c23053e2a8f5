"""Longest gap that a client sees when its request migrates to another node.

    python -m benchmarks.bench_migration --small --input-len 512 --output-len 400  # on this CPU
    python -m benchmarks.bench_migration                  # the 8B shape, on two GPUs

Streams with prompts of equal length run on one node; halfway, the other node takes all of them over
(``POST /nodes/{id}/migrate``). Gaps between tokens are measured by the clients, before the
migration begins and from then on.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.workload import (
    MAX_MODEL_LEN,
    SMALL,
    cluster_of,
    counters,
    llama_8b,
    random_prompts,
)
from kvbaton.bench.report import percentile, publish
from kvbaton.bench.serve import Shot, served_model, shoot
from tests.support.checkpoints import make_checkpoint


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small model on this CPU")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=4096)
    parser.add_argument("--output-len", type=int, default=768)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.small:
            model = make_checkpoint(Path(folder, "model"), SMALL)
            flags = ["--num-threads=1"]
        else:
            model = llama_8b(Path(folder, "model"))
            flags = ["--load-format=dummy", "--device=cuda", f"--max-model-len={MAX_MODEL_LEN}"]
        flags += [f"--model={model}", f"--transport={args.transport}", "--start-timeout=200"]
        with cluster(flags) as (router, _):
            rows = asyncio.run(measure(router, args))
    publish("migration", vars(args), rows, args.out)


def cluster(flags: list[str]) -> AbstractContextManager[tuple[str, int]]:
    """A cluster of two nodes that serve alone; see `cluster_of`."""
    words = ["--any=2", "--policy=least-loaded", "--min-handover-tokens=1000000"]
    return cluster_of([*words, *flags])


async def measure(router: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row before the migration, one from its beginning on."""
    timeout = aiohttp.ClientTimeout(total=400)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def post(path: str) -> None:
            async with session.post(f"{router}{path}") as response:
                response.raise_for_status()

        model = await served_model(session, router)
        async with session.get(f"{router}/nodes") as response:
            source, target = (n["node_id"] for n in (await response.json())["nodes"])
        # Both nodes run such steps once before they are timed.
        for prompt in random_prompts(4, args.input_len, 1):
            await shoot(session, router, model, prompt, 8)
        await post(f"/nodes/{target}/pause")
        prompts = random_prompts(args.streams, args.input_len, 2)
        running = [
            asyncio.create_task(shoot(session, router, model, prompt, args.output_len))
            for prompt in prompts
        ]

        async def generating() -> int:
            found = await counters(session, router)
            return int(found.get("kvbaton_router_first_token_seconds_count", 0.0)) - 4

        while await generating() < args.streams:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # gaps to compare with
        await post(f"/nodes/{target}/resume")
        began = time.monotonic()
        await post(f"/nodes/{source}/migrate")
        shots = await asyncio.gather(*running)
        done = await counters(session, router)
    for shot in shots:
        if shot.error or len(shot.times) != args.output_len:
            raise SystemExit(f"a stream failed: {shot.error or len(shot.times)}")
    steady = max(shot.times[0] for shot in shots)  # the last prompt has been computed
    count = int(done.get('kvbaton_router_moves_total{outcome="moved"}', 0.0))
    return [
        row("before", shots, steady, began, 0),
        row("from the move on", shots, began, math.inf, count),
    ]


def row(name: str, shots: list[Shot], begin: float, end: float, moved: int) -> dict[str, Any]:
    """Gaps (ms) that ended between `begin` and `end`."""
    gaps = [
        1e3 * gap
        for shot in shots
        for gap, at in zip(shot.gaps, shot.times[1:], strict=True)
        if begin < at <= end
    ]
    return {
        "tokens": name,
        "moved": moved,
        "gaps": len(gaps),
        "p50 ms": percentile(gaps, 50),
        "p99 ms": percentile(gaps, 99),
        "longest ms": max(gaps),
    }


if __name__ == "__main__":
    main()
