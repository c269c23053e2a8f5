"""Do policies rank the same on two real CPU nodes and in the simulator?

    python -m benchmarks.bench_policies --json policies.json

Nodes of one thread each serve a model of 25 million parameters, with Poisson arrivals, and prompts
and answers of mixed lengths. Each policy serves the same requests, on nodes started for it that
have served as many others before. Then the simulator serves them, with the costs of steps and
hand-overs that the nodes measured (`kvbaton_step_cost_seconds`, `kvbaton_wire_cost_seconds`;
medians over all nodes), and the requests of other seeds, since policies differ by less than loads
do. The two nodes and the client need three free cores, or a rate at which the nodes are often idle.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import aiohttp

from benchmarks.bench_simulated_goodput import fresh, settings_of
from benchmarks.workload import SMALL, cluster_of, counters
from kvbaton.bench.report import percentile, publish
from kvbaton.bench.serve import Shot, served_model, shoot
from kvbaton.messages.nodes import STEP_COSTS
from kvbaton.simulate.engine_model import EngineModel
from kvbaton.simulate.main import is_good
from kvbaton.simulate.service import parse_nodes, simulate
from kvbaton.simulate.traces import TraceRequest
from tests.support.checkpoints import make_checkpoint

POLICIES = "cost@2A", "least-loaded@2D", "threshold@1P1D", "least-loaded@1P1D"
LETTERS = {"A": "any", "P": "prefill", "D": "decode"}
BLOCK, CHUNK, MAX_MODEL_LEN = 16, 512, 2040


def requests(args: argparse.Namespace, seed: int, since: float = 0.0) -> list[TraceRequest]:
    """Arrivals of one run that begins at `since` (seconds)."""
    chance, at, found = random.Random(seed), since, list[TraceRequest]()
    for number in range(args.requests):
        at += chance.expovariate(args.rate)
        length, tokens = chance.choice(args.lengths), chance.choice(args.outputs)
        found.append(fresh(seed * args.requests + number, at, length, tokens))
    return found


Figures = dict[str, float]


def figures(ttfts: Sequence[float], paces: Sequence[float], good: float) -> Figures:
    """Figures to compare."""
    return {
        "good": good,
        "TTFT p50, ms": 1e3 * percentile(ttfts, 50),
        "TTFT p90, ms": 1e3 * percentile(ttfts, 90),
        "pace p50, ms": 1e3 * percentile(paces, 50),
        "pace p90, ms": 1e3 * percentile(paces, 90),
    }


def words_of(spec: str, args: argparse.Namespace) -> list[str]:
    """Arguments of ``kvbaton up`` for a policy and its nodes."""
    policy, _, nodes = spec.partition("@")
    counts = re.findall(r"(\d+)([APD])", nodes)
    words = [f"--{LETTERS[letter]}={count}" for count, letter in counts]
    if policy == "cost":
        words += [f"--ttft-slo={args.ttft_slo:g}", f"--itl-slo={args.itl_slo:g}"]
    return [*words, f"--policy={policy}"]


async def real(router: str, args: argparse.Namespace) -> tuple[Figures, list[dict[str, float]]]:
    """Figures seen by clients of a cluster, and the nodes' metrics."""
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        model = await served_model(session, router)
        for seed in (0, args.seed):  # the first run is for learning
            asks, chance, began = requests(args, seed), random.Random(seed), time.monotonic()

            async def one(ask: TraceRequest, prompt: list[int], began: float = began) -> Shot:
                await asyncio.sleep(began + ask.at - time.monotonic())
                shot = await shoot(session, router, model, prompt, ask.output_tokens)
                if shot.error:
                    raise SystemExit(shot.error)
                return shot

            prompts = [chance.choices(range(3, 4000), k=ask.prompt_tokens) for ask in asks]
            shots = await asyncio.gather(*map(one, asks, prompts))
        async with session.get(f"{router}/nodes") as response:
            nodes = [node["url"] for node in (await response.json())["nodes"]]
        told = [await counters(session, node) for node in nodes]
    ttfts = [shot.after(0) for shot in shots]
    paces = [(shot.after(-1) - shot.after(0)) / (len(shot.times) - 1) for shot in shots]
    met = [1e3 * ttft <= args.ttft_slo and 1e3 * pace <= args.itl_slo
           for ttft, pace in zip(ttfts, paces, strict=True)]  # fmt: skip
    return figures(ttfts, paces, sum(met) / len(met)), told


def engine_of(told: Sequence[Mapping[str, float]], num_blocks: int) -> EngineModel:
    """Model of a node from the costs that the nodes measured."""

    def cost(name: str, term: str) -> float:
        values = [
            value
            for metrics in told
            for labelled, value in metrics.items()
            if labelled.startswith(f"{name}{{") and f'term="{term}"' in labelled
        ]
        return median(values) if values else 0.0

    steps = tuple(cost("kvbaton_step_cost_seconds", term) for term in STEP_COSTS)
    wire = "kvbaton_wire_cost_seconds"
    return EngineModel(
        name="two nodes of this machine",
        costs=steps,
        handover=(cost(wire, "handover_s"), 0.0, cost(wire, "token_s")),
        block_size=BLOCK,
        kv_tokens=BLOCK * num_blocks,
        step_tokens=CHUNK,
        max_model_len=MAX_MODEL_LEN,
        message_s=0.001,
    )


def simulated(spec: str, model: EngineModel, args: argparse.Namespace, seed: int) -> Figures:
    """Figures of the requests of a seed in the simulator."""
    policy, _, nodes = spec.partition("@")
    settings = settings_of(policy, args.ttft_slo, args.itl_slo)
    before = requests(args, 0)
    starts = before[-1].at + 5.0
    trace = [*before, *requests(args, seed, starts)]
    done = simulate(trace, parse_nodes(nodes), model, settings, seed=seed).outcomes
    counts = [outcome for outcome in done if outcome.begin >= starts]
    good = [is_good(outcome, args.ttft_slo, args.itl_slo) for outcome in counts]
    ttfts = [outcome.ttft_s for outcome in counts if outcome.ttft_s is not None]
    return figures(ttfts, [outcome.itl_of(None) for outcome in counts], sum(good) / len(good))


def main() -> None:
    """Measure, print a table, and write JSON."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--policies", nargs="+", default=POLICIES, metavar="NAME@NODES")
    add("--rate", type=float, default=1.5, help="requests per second")
    add("--requests", type=int, default=90, help="requests per run")
    add("--lengths", type=int, nargs="+", default=[64, 256, 512, 1024])
    add("--outputs", type=int, nargs="+", default=[8, 32, 96])
    add("--ttft-slo", type=float, default=1000.0, help="TTFT objective in ms")
    add("--itl-slo", type=float, default=40.0, help="objective in ms for a request's mean ITL")
    add("--seed", type=int, default=1, help="seed of the run that counts, at least 1")
    add(
        "--seeds",
        type=int,
        default=12,
        help="loads whose simulated means rank policies, at least 1",
    )
    add("--json", type=Path)
    args = parser.parse_args()
    found, told, num_blocks = dict[str, Figures](), list[Mapping[str, float]](), 2000
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            f"--model={make_checkpoint(Path(folder, 'model'), SMALL)}", "--num-threads=1",
            f"--max-num-batched-tokens={CHUNK}", f"--num-blocks={num_blocks}",
            f"--max-model-len={MAX_MODEL_LEN}", "--no-enable-prefix-caching",
        ]  # fmt: skip
        for spec in args.policies:
            with cluster_of([*words_of(spec, args), *flags], {"OMP_NUM_THREADS": "1"}) as (url, _):
                found[spec], metrics = asyncio.run(real(url, args))
            told += metrics
            print(spec, found[spec], flush=True)
    model = engine_of(told, num_blocks)
    print(model, flush=True)
    virtual, means = dict[str, Figures](), dict[str, Figures]()
    seeds = range(1, args.seeds + 1)
    for spec in args.policies:
        loads = {seed: simulated(spec, model, args, seed) for seed in {args.seed, *seeds}}
        virtual[spec] = loads[args.seed]
        means[spec] = {what: fmean(loads[seed][what] for seed in seeds) for what in virtual[spec]}
    tables = {"real": found, "simulated": virtual, f"mean of {args.seeds} loads": means}
    rows = [
        {"policy": spec, "what": what} | {name: ways[spec][what] for name, ways in tables.items()}
        for spec, seen in found.items()
        for what in seen
    ]
    publish("policies", vars(args), rows, args.json)
    for what in ("good", "TTFT p50, ms", "pace p50, ms"):
        for name, ways in tables.items():
            order = ", ".join(sorted(ways, key=lambda spec: ways[spec][what]))
            print(f"{what}, ascending, {name}: {order}")


if __name__ == "__main__":
    main()
