"""Goodput: the highest request rate at which nine in ten requests meet their objectives.

    python -m benchmarks.bench_goodput --json goodput.json                    # two GPUs
    python -m benchmarks.bench_goodput --one-gpu --seconds-budget 230         # one
    python -m benchmarks.bench_goodput --device cpu --input 48 --output 16    # a tiny model

The load is Poisson arrivals at the 8B shape, with 2,000 tokens in and 1,000 out. A request meets an
objective if its TTFT is below ``--ttft`` and the 95th percentile of its own ITL below ``--itl``.
The rate is found by bisection. Each rate starts on idle nodes. After two request lifetimes,
requests that arrive in the next three count (with ``--one-gpu``: one and a half, and one), and the
load goes on until the last of them has ended, so neither filling nor draining counts. (Starting
with as many requests as are live at that rate would mean as many prompts at once, and decoding
slowed by them for two more lifetimes.)

Beside it stands the memory wall of D: at r requests per second of n tokens, a step reads the
weights, and the KV of r * n * (step time) sequences at their mean context, at the measured copy
speed. For each rate, steps around an arrival or an end are compared with the others, part by part.

Layouts: ``1P1D``; ``shared``, two nodes of role any, whose router knows the first objective (run it
once per objective); ``colocated``, two nodes without hand-over, once per ``--chunks``; and
``colocated-max-itl``, the same with chunks sized by the first objective (``--max-itl``). With
``--one-gpu`` the latter two have one node (twice its rate is an estimate for two nodes, not a
measurement). ``cached`` is one node that decodes prompts in its prefix cache: the work of D at this
mix *without* reserving, receiving and verifying hand-overs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from benchmarks.bench_gpu_handover import BLOCK
from benchmarks.memory_wall import Wall, copy_speed, wall_of
from benchmarks.open_load import SHARE, Ask, Load, between, run
from benchmarks.step_parts import shown, step_parts
from benchmarks.workload import cluster_of, llama_8b
from kvbaton.bench.report import machine, median, percentile, table
from kvbaton.bench.serve import Shot
from tests.support.checkpoints import make_checkpoint

LEAST = 20
"""Least number of requests in a window: it is longer than the lifetimes if necessary."""
LAYOUTS = "1P1D", "shared", "colocated", "colocated-max-itl", "cached"
TOLERANCE = 0.05
"""Width at which the bisection ends, as a share of the lowest rate that fails."""


@dataclass
class Layout:
    """Nodes under one router, and the rates measured on them.

    Attributes:
        words: Arguments of `kvbaton up`.
        guess: First rate to try, as a share of the memory wall's rate.
        nodes: Number of decoding nodes that also prefill; 0 if others do so.
        cached: Whether prompts repeat and are in the prefix cache.
        rows: Results, one per rate.
    """

    name: str
    words: list[str]
    guess: float
    nodes: int
    cached: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)

    def bounds(self, objective: int) -> tuple[float, float]:
        """Highest rate met below the lowest failed one, and that one; else 0 and infinity."""
        failed = [row["rate"] for row in self.rows if row["met"][objective] < SHARE]
        above = min(failed, default=math.inf)
        met = [row["rate"] for row in self.rows if row["met"][objective] >= SHARE]
        return max((rate for rate in met if rate < above), default=0.0), above

    def next_rate(self, starts: Sequence[float]) -> float | None:
        """Next rate to try, for the objective of the widest bounds; None if all are narrow."""
        widest, found = TOLERANCE, None
        for objective, start in enumerate(starts):
            low, high = self.bounds(objective)
            width = math.inf if high == math.inf else (high - low) / high
            if width > widest:
                widest = width
                found = (low + high) / 2 if low else 0.7 * high
                if high == math.inf:
                    found = 1.2 * low or start
        return None if found is None else float(f"{found:.3g}")


class Cluster:
    """A running layout.

    Attributes:
        length: Prompt length; all but one token of cached prompts is a hit, as after a hand-over.
        prompts: Number of different prompts that stay cached beside the load; 0 for all different.
    """

    def __init__(self, url: str, args: argparse.Namespace, cached: bool) -> None:
        self.url = url
        with urlopen(f"{url}/nodes", timeout=30) as answer:
            self.nodes = [node["url"] for node in json.load(answer)["nodes"]]
        self.length = args.input // BLOCK * BLOCK + 1 if cached else args.input
        room = BLOCK * sum(self.metric("kvbaton_blocks").values()) if cached else 0.0
        self.prompts = min(192, int(0.8 * room / (self.length + args.output)))

    def metric(self, name: str) -> dict[str, float]:
        """A metric, summed over all nodes by labels."""
        found: dict[str, float] = {}
        for node in self.nodes:
            with urlopen(f"{node}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            for labels, value in re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE):
                found[labels] = found.get(labels, 0.0) + float(value)
        return found


class Bench:
    """Measures rates of layouts; the processes of `pool` generate the load."""

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor, wall: Wall) -> None:
        self.args, self.pool, self.wall = args, pool, wall
        self.itls = tuple(itl / 1000 for itl in args.itl)
        self.warm_up, self.lifetimes = (1.5, 1.0) if args.one_gpu else (2.0, 3.0)
        self.tally = Path(tempfile.mkdtemp()) / "tally"
        self.seed = 1_000_000 * args.seed

    def search(self, layout: Layout, folder: Path, until: float) -> None:
        """Start a layout and bisect: at least two rates, more while there is time."""
        args = self.args
        longest = -(-(args.input + args.output + BLOCK) // BLOCK) * BLOCK
        words = [
            f"--model={folder}", "--load-format=dummy", f"--device={args.device}",
            f"--max-model-len={longest}", "--policy=least-loaded", "--start-timeout=300",
            f"--{'' if layout.cached else 'no-'}enable-prefix-caching", *layout.words,
            *shlex.split(args.flags),
        ]  # fmt: skip
        with cluster_of(words) as (url, _):
            cluster = Cluster(url, args, layout.cached)
            tally, length = str(self.tally), cluster.length
            known = [Ask(0.0, seed, 1, True) for seed in range(cluster.prompts)]
            for warm in (
                known,
                [Ask(0.0, 0, min(32, args.output), True)] * 2,
                [Ask(0.0, 0, args.output, True)],
            ):
                shots = self.ask(Load(url, warm, length, tally=tally), {}) if warm else []
                if bad := next((shot.error for shot in shots if shot.error), None):
                    raise SystemExit(f"failed: {bad}")
            (alone,) = shots
            prompt_s, slower = alone.after(0) if layout.nodes else 0.0, 1.0
            starts = [args.start_rate or layout.guess * self.wall.rate(itl) for itl in self.itls]
            while (rate := layout.next_rate(starts)) is not None:
                # A step waits for prompts and for KV reads, each in proportion to the rate.
                taken = 1.1 * self.wall.output * self.wall.sequence_s + prompt_s
                rest = 1 - rate * taken / max(1, layout.nodes)
                # Tokens that arrive together have no gaps; no step is faster than its memory reads.
                step_s = max(median(alone.gaps), self.wall.weights_s + self.wall.sequence_s)
                pace = slower * step_s / max(0.1, rest)
                life = prompt_s + args.output * min(pace, self.itls[-1])
                needs = (self.warm_up + self.lifetimes + 1) * life
                if len(layout.rows) >= args.max_rates or (
                    len(layout.rows) >= 2 and time.monotonic() + needs > until
                ):
                    print(f"{layout.name:<16} no time left for {rate:g}/s", flush=True)
                    return
                row = self.measure(cluster, rate, life)
                layout.rows.append({"layout": layout.name, **row})
                print(line(layout.rows[-1]), flush=True)
                for node, parts in row.get("steps", {}).items():
                    print(f"steps of {node}\n{shown(parts)}", flush=True)
                if row["ended"]:
                    slower *= min(3.0, max(0.3, row["lifetime_s"] / life))

    def measure(self, cluster: Cluster, rate: float, life: float) -> dict[str, Any]:
        """Measure one rate; `life` is the expected lifetime of a request in seconds."""
        args, itls = self.args, self.itls
        self.seed += 100_000
        rng = np.random.default_rng(self.seed)
        at = time.monotonic() + 0.5
        opens = at + self.warm_up * life
        closes = opens + max(self.lifetimes * life, LEAST / rate)
        until = closes + args.ttft + args.output * itls[-1]
        asks = list[Ask]()
        while (at := at + rng.exponential(1 / rate)) < until:
            asks.append(Ask(at, self.seed + len(asks), args.output, opens <= at < closes))
        if cluster.prompts:
            asks = [replace(ask, seed=ask.seed % cluster.prompts) for ask in asks]
        live, tokens = list[float](), list[dict[str, float]]()

        def look() -> None:
            live.append(sum(sum(cluster.metric(f"kvbaton_sequences_{state}").values())
                            for state in ("running", "waiting", "loading")))  # fmt: skip
            tokens.append(cluster.metric("kvbaton_prompt_tokens_total"))

        def look_last() -> None:
            look()
            row["steps"] = {node: step_parts(node, opens) for node in cluster.nodes}

        row: dict[str, Any] = {}
        load = Load(cluster.url, asks, cluster.length, args.ttft, itls, until, str(self.tally))
        shots = self.ask(load, {opens: look, closes: look_last})
        total = max(1, sum(ask.counts for ask in asks))
        good = [shot for shot in shots if shot.error is None]
        met = [sum(load.met(shot, itl) for shot in shots) / total for itl in itls]
        series = {
            "ttft_ms": [shot.after(0) for shot in good],
            "itl_p95_ms": [percentile(between(shot), 95) for shot in good],
            "itl_p99_ms": [percentile(between(shot), 99) for shot in good],
            "pace_ms": [(shot.after(-1) - shot.after(0)) / (args.output - 1) for shot in good],
        }
        shown = {f"{name}_p{p}": 1e3 * percentile(values, p)
                 for name, values in series.items() for p in (50, 90)}  # fmt: skip
        gained = {k: v - tokens[0].get(k, 0.0) for k, v in tokens[-1].items()} if tokens else {}
        return row | {
            "rate": rate, "met": met, "requests": total, "ended": len(good), **shown,
            "lifetime_s": median([shot.after(-1) for shot in good]), "live": live,
            "prompt_tokens": gained, "errors": sorted({s.error for s in shots if s.error}),
        }  # fmt: skip

    def ask(self, load: Load, looks: Mapping[float, Callable[[], None]]) -> list[Shot]:
        """Generate the load and call `looks` at their times; return the requests that count."""
        num = min(self.args.clients, len(load.asks))
        np.zeros((num, 2), np.int64).tofile(self.tally)
        futures = [self.pool.submit(run, load, i, num) for i in range(num)]
        for at, look in looks.items():
            wait(futures, max(0.0, at - time.monotonic()))  # the load may end earlier
            look()
        return [shot for future in futures for shot in future.result()]


def line(row: dict[str, Any]) -> str:
    """Line to print for a rate."""
    names = "ttft", "itl_p95", "itl_p99"
    ttft, gap, last = ([row[f"{name}_ms_p{p}"] for p in (50, 90)] for name in names)
    return (
        f"{row['layout']:<16}{row['rate']:7.2f}/s  of {row['requests']:4} met "
        + " ".join(f"{share:.2f}" for share in row["met"])
        + f"  TTFT {ttft[0]:5.0f} {ttft[1]:5.0f}  ITL p95 {gap[0]:5.1f} {gap[1]:5.1f}"
        + f"  p99 {last[0]:5.1f} {last[1]:5.1f}"
        + f"  pace {row['pace_ms_p50']:5.1f} ms  live "
        + " to ".join(f"{live:.0f}" for live in row["live"])
    )


def layouts(args: argparse.Namespace) -> list[Layout]:
    """The layouts that ``--layouts`` names."""
    count, alone = (1, 0.4) if args.one_gpu else (2, 0.8)
    chunk = "--max-num-batched-tokens={}".format
    made = [
        Layout("1P1D", ["--prefill=1", "--decode=1", chunk(args.chunk)], 0.9, 0),
        Layout(
            "shared",
            ["--any=2", "--policy=cost", f"--ttft-slo={1000 * args.ttft:g}",
             f"--itl-slo={args.itl[0]:g}", chunk(args.chunk)],
            0.9, 2,
        ),
        Layout(
            "colocated-max-itl",
            [f"--decode={count}", f"--ttft-slo={1000 * args.ttft:g}",
             f"--max-itl={args.itl[0]:g}", chunk(args.chunk)],
            alone, count,
        ),
        *(
            Layout(f"colocated {n}", [f"--decode={count}", chunk(n)], alone, count)
            for n in args.chunks
        ),
        Layout("cached", ["--decode=1", chunk(args.chunk)], 0.9, 1, cached=True),
    ]  # fmt: skip
    return [one for one in made if one.name.split()[0] in args.layouts]


def summary(layout: Layout, args: argparse.Namespace, wall: Wall) -> list[dict[str, Any]]:
    """One row per objective."""
    rows = []
    for objective, itl in enumerate(sorted(args.itl)):
        low, high = layout.bounds(objective)
        at_wall = max(0.0, wall.rate(itl / 1000))
        row = {"layout": layout.name, "itl_ms": itl, "met/s": low, "failed/s": high}
        row |= {"wall/s": at_wall, "met/wall": low / at_wall if at_wall else math.nan}
        if args.one_gpu:
            alone = layout.name.startswith("colocated")
            row["two, estimated/s"] = 2 * low if alone else math.nan
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print a line per rate and a table, and write JSON."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--json", type=Path)
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--one-gpu", action="store_true", help="measure what one GPU allows")
    add("--layouts", nargs="+", choices=LAYOUTS)
    add("--chunk", type=int, default=2048, help="--max-num-batched-tokens")
    add("--chunks", type=int, nargs="+", help="chunk sizes of colocated nodes")
    add("--input", type=int, default=2000)
    add("--output", type=int, default=1000)
    add("--ttft", type=float, default=1.0, help="TTFT objective in seconds")
    add("--itl", type=float, nargs="+", help="ITL objectives in ms (12 25 50; one GPU: 12 25)")
    add("--max-rates", type=int, default=12, help="most rates per layout")
    add("--start-rate", type=float, help="first rate (default: from the memory wall)")
    add("--seconds-budget", type=float, default=math.inf, help="for all layouts together")
    add("--clients", type=int, default=4, help="processes that generate the load")
    add("--seed", type=int, default=1)
    add("--flags", default="", help="more flags of `kvbaton up`, in one argument: --flags='...'")
    args = parser.parse_args()
    began, one = time.monotonic(), args.one_gpu
    usual = ["colocated", "cached"] if one else ["1P1D", "colocated", "shared"]
    args.layouts = args.layouts or usual
    args.chunks = args.chunks or ([2048] if one else [2048, 512, 8192])
    args.itl = sorted(args.itl or ([12, 25] if one else [12, 25, 50]))
    where = Path(tempfile.mkdtemp()) / "model"
    folder = llama_8b(where) if args.device == "cuda" else make_checkpoint(where)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as alone:
        speed = alone.submit(copy_speed, args.device).result()
    wall, found = wall_of(folder, args.input, args.output, speed), layouts(args)
    print(f"copy {speed / 1e12:.3g} TB/s; a step reads weights {1e3 * wall.weights_s:.3g} ms, "
          f"{1e3 * wall.sequence_s:.3g} ms a sequence; wall of one node that decodes: "
          + ", ".join(f"{wall.rate(x / 1e3):.2f}/s at {x:g} ms" for x in args.itl),
          flush=True)  # fmt: skip
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.clients, mp_context=context) as pool:
        bench = Bench(args, pool, wall)
        for number, layout in enumerate(found):
            left = args.seconds_budget - (time.monotonic() - began)
            bench.search(layout, folder, time.monotonic() + left / (len(found) - number))
            results += summary(layout, args, wall)
    print(table(results))
    if args.json is not None:
        rows = [row for layout in found for row in layout.rows]
        settings = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({
            "machine": machine(), "settings": settings, "copy_bytes_s": speed,
            "goodput": results, "rates": rows,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
