"""How well the router predicts times to first tokens: median error against what it observed.

    python benchmarks/bench_predictions.py --policy cost

A real cluster of one prefill and one decode node on this machine's CPU, one thread each, with a
small model. Prompts of mixed lengths, some of which share a prefix, come at random times, first
some to learn from, then those that count. The router itself tells what it had expected and what
came of it (``GET /debug/routes``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.bench_handover import START_TIMEOUT_S, cluster
from benchmarks.workload import SMALL
from kvbaton.bench.report import percentile, publish
from kvbaton.bench.serve import served_model, shoot
from kvbaton.testing.checkpoints import make_checkpoint


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--learn", type=int, default=60, help="requests before those that count")
    parser.add_argument("--requests", type=int, default=120, help="that count, at most 250")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder, "model"), SMALL)
        flags = [f"--transport={args.transport}", f"--policy={args.policy}"]
        with cluster(model, flags) as router:
            rows = asyncio.run(measure(router, args))
    publish("predictions", vars(args), rows, args.out)


async def measure(router: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per figure."""
    chance = random.Random(0)
    shared = chance.choices(range(3, 4000), k=max(args.lengths))
    timeout = aiohttp.ClientTimeout(total=START_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        model = await served_model(session, router)

        async def one(number: int) -> None:
            length = chance.choice(args.lengths)
            known = chance.choice([0, 0, length // 2])
            prompt = shared[:known] + chance.choices(range(3, 4000), k=length - known)
            shot = await shoot(session, router, model, prompt, args.output_len)
            if shot.error:
                raise SystemExit(shot.error)

        running = []
        for number in range(args.learn + args.requests):
            running.append(asyncio.create_task(one(number)))
            await asyncio.sleep(chance.expovariate(args.rate))
        await asyncio.gather(*running)
        async with session.get(f"{router}/debug/routes") as response:
            routes = json.loads(await response.read())["routes"][: args.requests]
    seen = [r for r in routes if r["ttft_s"] is not None and r["observed_ttft_s"] is not None]
    off = [abs(r["ttft_s"] - r["observed_ttft_s"]) / r["observed_ttft_s"] for r in seen]
    signed = [(r["ttft_s"] - r["observed_ttft_s"]) / r["observed_ttft_s"] for r in seen]
    alone = sum(r["source"] is None for r in seen) / len(seen)
    observed = [r["observed_ttft_s"] * 1e3 for r in seen]
    figures = {
        "predicted": len(seen),
        "median error, %": 100 * percentile(off, 50),
        "p90 of the error, %": 100 * percentile(off, 90),
        "median of predicted - observed, %": 100 * percentile(signed, 50),
        "observed TTFT p50, ms": percentile(observed, 50),
        "observed TTFT p90, ms": percentile(observed, 90),
        "share served by one node": alone,
    }
    return [{"figure": name, "value": round(value, 2)} for name, value in figures.items()]


if __name__ == "__main__":
    main()
