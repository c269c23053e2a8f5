"""The router in front of two nodes: load, chats, and prefixes cached on the other node.

    python -m benchmarks.bench_gpu_router --json router.json               # two GPUs
    python -m benchmarks.bench_gpu_router --small --parts chat fetch cached  # on this CPU

The 8B shape over HTTP, with random prompts and greedy sampling. Parts:

- ``load``: a closed loop (2,048 tokens in, 128 out, 64 at once) on a prefill and a decode node, on
  two nodes that serve alone, and on two of any role with the `cost` policy; and the error of the
  router's predictions.
- ``chat``: conversations of 8 turns over a history of 8 k tokens, through the router to two nodes
  of any role, and as many with one of them directly, which has the prefix cached: TTFT by turn, and
  how many routed turns were handed over, or fetched a prefix.
- ``fetch``: a prompt of 16 k tokens whose prefix only the other node has (paused meanwhile, so that
  it gets no requests), against a new prompt of that length.
- ``cached``: a prompt of 64,000 tokens, 95 % of it cached on P, through P and D, against P alone.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.bench_gpu_handover import LOADS, get_json, load
from benchmarks.workload import SMALL, cluster_of, counters, llama_8b, random_prompts
from kvbaton.bench.report import percentile, prediction_error, publish
from kvbaton.bench.serve import Shot, served_model, shoot
from tests.support.checkpoints import make_checkpoint

PARTS = ("load", "chat", "fetch", "cached")
TURNS, NEW, SAID = 8, 100, 64
"""Turns of a chat, new prompt tokens per turn, and tokens per answer."""


class Cluster:
    """A running cluster.

    Attributes:
        scale: Divisor of all lengths.
    """

    def __init__(self, session: aiohttp.ClientSession, router: str, scale: int) -> None:
        self.session, self.router, self.scale = session, router, scale
        self._seed = 0

    async def start(self) -> None:
        """Read its nodes, and let each node run every kind of step once."""
        found = (await get_json(self.session, f"{self.router}/nodes"))["nodes"]
        self.ids = [node["node_id"] for node in found]
        self.urls = [node["url"] for node in found]
        self.roles = [node["role"] for node in found]
        self.model = await served_model(self.session, self.router)
        for url in (*self.urls, self.router, self.router):
            for length in (512, 4096):
                await self.ask(url, self.new(length))

    def new(self, length: int) -> tuple[int, ...]:
        """A new prompt, without any prefix hit."""
        self._seed += 1
        return random_prompts(1, max(32, length // self.scale), self._seed)[0]

    async def ask(self, url: str, prompt: Sequence[int], tokens: int = 8) -> Shot:
        """Send one request, which must succeed."""
        shot = await shoot(self.session, url, self.model, prompt, tokens)
        if shot.error:
            raise SystemExit(shot.error)
        return shot

    async def post(self, path: str) -> None:
        """Send an operator's command to the router."""
        async with self.session.post(f"{self.router}{path}") as response:
            response.raise_for_status()


Row = dict[str, Any]


async def loop(cluster: Cluster, name: str) -> list[Row]:
    """Run the closed loop; compare predictions with observations."""
    requests, length, clients, _ = LOADS[1]
    shots, took = await load(
        cluster.session, cluster.router, cluster.model, requests, length // cluster.scale, clients
    )
    if bad := {shot.error for shot in shots if shot.error}:
        raise SystemExit(f"failed: {bad}")
    gaps = [1e3 * gap for shot in shots for gap in shot.gaps[1:]]
    routes = (await get_json(cluster.session, f"{cluster.router}/debug/routes"))["routes"]
    pairs = [(r["ttft_s"], r["observed_ttft_s"]) for r in routes]
    figures = {
        "requests/s": len(shots) / took,
        "TTFT p50, ms": 1e3 * percentile([shot.after(0) for shot in shots], 50),
        "TTFT p99, ms": 1e3 * percentile([shot.after(0) for shot in shots], 99),
        "ITL p50, ms": percentile(gaps, 50),
        "ITL p99, ms": percentile(gaps, 99),
        "ITL p99 / p50": percentile(gaps, 99) / percentile(gaps, 50),
        "predicted TTFT off by (median), %": 100 * prediction_error(pairs),
    }
    return [{"what": f"load, {name}: {what}", "value": value} for what, value in figures.items()]


async def chat(cluster: Cluster) -> list[Row]:
    """Median TTFT of each turn, and the number of turns that moved KV."""
    moved = [0] * TURNS
    ways = {"through the router": cluster.router, "one node directly": cluster.urls[0]}
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(5):
        for name, url in ways.items():
            prompt, turns = list(cluster.new(8192)), list[float]()
            for turn in range(TURNS):
                shot = await cluster.ask(url, prompt, SAID)
                turns.append(1e3 * shot.after(0))
                if url == cluster.router:
                    route = (await get_json(cluster.session, f"{url}/debug/routes"))["routes"][0]
                    moved[turn] += bool(route["source"] or route["holder"])
                prompt += [*shot.token_ids, *cluster.new(NEW * cluster.scale)]
            times[name].append(turns)
    rows = []
    for turn in range(TURNS):
        ours, alone = (median(turns[turn] for turns in found) for found in times.values())
        told = f"directly {alone:.1f}; ratio {ours / alone:.2f}; {moved[turn]} of 5 moved KV"
        rows.append({"what": f"chat: TTFT of turn {turn + 1}, ms ({told})", "value": ours})
    return rows


async def fetch(cluster: Cluster) -> list[Row]:
    """TTFT with a prefix from the other node, and without any."""
    fetched, computed = list[float](), list[float]()
    before = await from_peers(cluster)
    for number in range(6):
        known, rest = cluster.new(16384 - 64 * cluster.scale), cluster.new(64 * cluster.scale)
        await cluster.ask(cluster.urls[0], known)
        await cluster.post(f"/nodes/{cluster.ids[0]}/pause")
        one = await cluster.ask(cluster.router, [*known, *rest])
        other = await cluster.ask(cluster.router, cluster.new(16384))
        await cluster.post(f"/nodes/{cluster.ids[0]}/resume")
        if number:
            fetched.append(1e3 * one.after(0))
            computed.append(1e3 * other.after(0))
    gained = await from_peers(cluster) - before
    return [
        {"what": "fetch: TTFT of a prompt whose prefix was fetched, ms", "value": median(fetched)},
        {"what": "fetch: TTFT of a new one, ms", "value": median(computed)},
        {"what": "fetch: share", "value": median(fetched) / median(computed)},
        {"what": "fetch: prompt tokens that came from a peer (6 prompts)", "value": gained},
    ]


async def from_peers(cluster: Cluster) -> float:
    """Number of prompt tokens that nodes have fetched from peers."""
    name = 'kvbaton_prompt_tokens_total{source="peer"}'
    found = [await counters(cluster.session, url) for url in cluster.urls]
    return sum(metrics.get(name, 0.0) for metrics in found)


async def cached(cluster: Cluster) -> list[Row]:
    """TTFT of a long prompt with 95 % cached, on P alone and through P and D."""
    whole = 64000
    source = cluster.urls[cluster.roles.index("prefill")]
    ways = {"P alone": source, "P and D": cluster.router}
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(5):
        known = cluster.new(whole * 95 // 100)
        await cluster.ask(source, known)
        for name, url in ways.items():
            shot = await cluster.ask(url, [*known, *cluster.new(whole // 20)])
            if number:
                firsts[name].append(1e3 * shot.after(0))
                seconds[name].append(1e3 * shot.after(1))
    rows = []
    for what, times in (("first", firsts), ("second", seconds)):
        alone, both = (median(found) for found in times.values())
        rows.append({"what": f"cached: {what} token, P alone, ms", "value": alone})
        rows.append({"what": f"cached: {what} token, P and D, ms", "value": both})
        rows.append({"what": f"cached: added to the {what} token, ms", "value": both - alone})
    return rows


async def measure(router: str, name: str, args: argparse.Namespace) -> list[Row]:
    """Run all parts for this cluster."""
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        cluster = Cluster(session, router, 32 if args.small else 1)
        await cluster.start()
        rows = list[Row]()
        if "load" in args.parts:
            rows += await loop(cluster, name)
        if name == "any role":
            rows += await chat(cluster) if "chat" in args.parts else ()
            rows += await fetch(cluster) if "fetch" in args.parts else ()
        if name == "1P1D" and "cached" in args.parts:
            rows += await cached(cluster)
    for row in rows:
        print(f"  {row['what']}: {row['value']:,.2f}", flush=True)
    return rows


def main() -> None:
    """Measure, print a table, and write JSON."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", action="store_true", help="a small model on CPU, lengths / 32")
    parser.add_argument("--chunk", type=int, default=2048, help="--max-num-batched-tokens")
    parser.add_argument("--itl-slo", type=float, help="ITL objective in ms, for nodes of any role")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    layouts = {
        "any role": ["--any=2", "--policy=cost"],
        "1P1D": ["--prefill=1", "--decode=1", "--policy=least-loaded"],
        "alone": ["--decode=2", "--policy=least-loaded"],
    }
    if args.itl_slo is not None:
        layouts["any role"].append(f"--itl-slo={args.itl_slo:g}")
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        if args.small:
            model = make_checkpoint(Path(folder, "model"), SMALL)
            flags = ["--num-threads=1", "--max-model-len=2040"]
        else:
            model = llama_8b(Path(folder, "model"))
            flags = ["--load-format=dummy", "--device=cuda", "--max-model-len=66560"]
        flags += [f"--model={model}", f"--max-num-batched-tokens={args.chunk}"]
        for name, words in layouts.items():
            needed = {"1P1D": {"load", "cached"}, "alone": {"load"}}.get(name, set(PARTS[:3]))
            if needed.intersection(args.parts):
                with cluster_of([*words, *flags, "--start-timeout=200"]) as (router, _):
                    rows += asyncio.run(measure(router, name, args))
    publish("gpu_router", vars(args), rows, args.json)


if __name__ == "__main__":
    main()
