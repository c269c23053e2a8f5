"""Cost of a hand-over: time to the second token through P and D, minus that on one node.

The first token comes from P and would hide the transfer; the second token needs it. Requests are
sent in pairs, through the router and to the prefill node alone, in alternating order within one
run, so that both see the same noise. All run on this machine: on two cores, the work of P and D
competes, unlike on a pair of machines.

All prompts differ, so there are no prefix hits. The share is relative to TTFT plus one decode step
on one node.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.handover_parts import print_parts, timelines
from benchmarks.workload import cluster_of
from kvbaton.bench.report import median, percentile, publish
from kvbaton.bench.serve import Shot, served_model, shoot
from tests.support.checkpoints import CheckpointSpec, make_checkpoint

MODEL = CheckpointSpec(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=12,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=8192,
    tied=True,
)
"""A model of about 100 million parameters, 24 million of them the embedding."""

START_TIMEOUT_S = 120.0


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--pairs", type=int, default=7, help="pairs of requests per length")
    parser.add_argument("--chunk", type=int, default=512, help="--max-num-batched-tokens")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder, "model"), MODEL)
        flags = [f"--max-num-batched-tokens={args.chunk}", f"--transport={args.transport}"]
        with cluster(model, flags) as (router, _):
            rows = asyncio.run(measure(router, args.lengths, args.pairs))
    publish("handover", vars(args), rows, args.out)


def cluster(model: Path, flags: list[str]) -> AbstractContextManager[tuple[str, int]]:
    """A cluster of a prefill and a decode node of one thread each; see `cluster_of`."""
    words = [f"--model={model}", "--prefill=1", "--decode=1", "--num-threads=1"]
    words.append("--policy=least-loaded")  # always hands over, unless flags override it
    return cluster_of([*words, *flags], {"OMP_NUM_THREADS": "1"})


async def measure(router: str, lengths: list[int], pairs: int) -> list[dict[str, Any]]:
    """Measure; one row per prompt length."""
    timeout = aiohttp.ClientTimeout(total=START_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with session.get(f"{router}/nodes") as response:
            nodes = json.loads(await response.read())["nodes"]
        urls_of = {node["role"]: node["url"] for node in nodes}
        alone = urls_of["prefill"]
        model = await served_model(session, router)
        rows = []
        for length in lengths:
            urls = {"one node": alone, "handed over": router}
            await one_pair(session, urls, model, length, -1)
            known = await timelines(session, alone, urls_of["decode"])
            taken = [await one_pair(session, urls, model, length, i) for i in range(pairs)]
            rows.append(row_of(length, taken))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)  # long prompts take minutes
            parts = await timelines(session, alone, urls_of["decode"])
            print_parts({name: marks for name, marks in parts.items() if name not in known})
        return rows


async def one_pair(
    session: aiohttp.ClientSession, urls: Mapping[str, str], model: str, length: int, number: int
) -> dict[str, Shot]:
    """Send one request both ways, in alternating order, with an empty prefix cache each time."""
    chance = random.Random(length * 1000 + number)
    prompt = chance.choices(range(3, 256), k=length)
    names = sorted(urls, reverse=bool(number % 2))
    shots = {}
    for name in names:
        salt = f"{number}-{name}"
        shots[name] = await shoot(session, urls[name], model, prompt, 4, cache_salt=salt)
        if shots[name].error:
            raise SystemExit(f"{name}: {shots[name].error}")
    if len({shot.token_ids for shot in shots.values()}) != 1:
        raise SystemExit(f"the outputs differ: {shots}")
    return shots


def row_of(length: int, taken: list[dict[str, Shot]]) -> dict[str, Any]:
    """Medians over pairs, in milliseconds."""
    alone = [pair["one node"] for pair in taken]
    over = [pair["handed over"] for pair in taken]
    cost = [1000 * (b.after(1) - a.after(1)) for a, b in zip(alone, over, strict=True)]
    base = 1000 * median([shot.after(1) for shot in alone])
    return {
        "prompt": length,
        "ttft alone": 1000 * median([shot.after(0) for shot in alone]),
        "step alone": 1000 * median([shot.gaps[-1] for shot in alone]),
        "2nd alone": base,
        "ttft P+D": 1000 * median([shot.after(0) for shot in over]),
        "2nd P+D": 1000 * median([shot.after(1) for shot in over]),
        "cost p50": median(cost),
        "cost p25": percentile(cost, 25),
        "cost p75": percentile(cost, 75),
        "share %": 100 * median(cost) / base,
    }


if __name__ == "__main__":
    main()
