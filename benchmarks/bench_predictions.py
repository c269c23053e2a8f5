"""Median error of the router's TTFT predictions against its observations.

    python benchmarks/bench_predictions.py --policy cost

A real cluster of a prefill and a decode node of one thread each serves a small model on this
machine's CPU. Prompts of mixed lengths, some with a shared prefix, come at random times; the first
ones are for learning, the others count. The router reports its predictions and observations, and
the predicted costs of the cheapest pair and the cheapest single node (``GET /debug/routes``).
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
from tests.support.checkpoints import make_checkpoint


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--learn", type=int, default=60, help="requests before those that count")
    parser.add_argument("--requests", type=int, default=120, help="that count, at most 250")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--routes", type=Path, help="write the decisions to this file as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder, "model"), SMALL)
        flags = [f"--transport={args.transport}", f"--policy={args.policy}"]
        with cluster(model, flags) as (router, _):
            rows = asyncio.run(measure(router, args))
    publish("predictions", vars(args), rows, args.out)


async def measure(router: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure; one row per figure."""
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
    if args.routes is not None:
        args.routes.write_text(json.dumps(routes))
    seen = [r for r in routes if r["ttft_s"] is not None and r["observed_ttft_s"] is not None]
    off = [(r["ttft_s"] - r["observed_ttft_s"]) / r["observed_ttft_s"] for r in seen]
    itl = [r for r in seen if r["observed_itl_s"]]
    itl_off = [(r["itl_s"] - r["observed_itl_s"]) / r["observed_itl_s"] for r in itl]
    priced = [r for r in seen if r["pair_cost_s"] is not None and r["single_cost_s"] is not None]

    def ms(values: list[float], share: float = 50) -> float:
        return 1e3 * percentile(values, share) if values else 0.0

    figures = {
        "predicted": len(seen),
        "median error, %": 100 * percentile([abs(x) for x in off], 50),
        "p90 of the error, %": 100 * percentile([abs(x) for x in off], 90),
        "median of predicted - observed, %": 100 * percentile(off, 50),
        "observed TTFT p50, ms": ms([r["observed_ttft_s"] for r in seen]),
        "observed TTFT p90, ms": ms([r["observed_ttft_s"] for r in seen], 90),
        "predicted queue p50, ms": ms([r["wait_s"] for r in seen]),
        "predicted queue p90, ms": ms([r["wait_s"] for r in seen], 90),
        "predicted prefill p50, ms": ms([r["model_s"] - r["wait_s"] for r in seen]),
        "predicted beyond the node's figures p50, ms": ms(
            [r["ttft_s"] - r["model_s"] for r in seen]
        ),
        "observed ITL p50, ms": ms([r["observed_itl_s"] for r in itl]),
        "median ITL error, %": 100 * percentile([abs(x) for x in itl_off], 50) if itl else 0.0,
        "median of predicted - observed ITL, %": 100 * percentile(itl_off, 50) if itl else 0.0,
        "cheapest pair p50, ms": ms([r["pair_cost_s"] for r in priced]),
        "cheapest single node p50, ms": ms([r["single_cost_s"] for r in priced]),
        "share served by one node": sum(r["source"] is None for r in seen) / len(seen),
    }
    return [{"figure": name, "value": round(value, 2)} for name, value in figures.items()]


if __name__ == "__main__":
    main()
