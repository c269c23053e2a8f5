"""Cost of the path of tokens from the engine's sampler to a client, under load.

    python -m benchmarks.bench_gpu_road --json road.json

One node serves alone behind a router. The same load is run offline (the engine in a process without
frontend), on the node directly, and through the router: a number of sequences at once, with short
prompts and equal numbers of output tokens, streamed by clients in their own processes. Measured in
the steady window (all sequences decode): tokens/s, ITL, and CPU time per token of all processes but
the engine core. ``--device cpu`` uses a small model, to try the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import aiohttp

from benchmarks.workload import SMALL, cluster_of, llama_8b, random_prompts
from kvbaton.bench.report import percentile, publish
from kvbaton.bench.serve import Shot, served_model, shoot
from tests.support.checkpoints import make_checkpoint

PROMPT = 32
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Window:
    """Measurements while all sequences decoded.

    Attributes:
        tokens_s: Tokens per second.
        itl: Milliseconds between tokens of a sequence, ascending.
        tokens_per_chunk: Mean number of tokens per chunk that clients received.
    """

    tokens_s: float
    itl: list[float]
    tokens_per_chunk: float


# --- clients ---


def clients(url: str, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Shot]:
    """Stream all prompts at once; runs in its own process."""
    return asyncio.run(_clients(url, prompts, max_tokens))


async def _clients(url: str, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Shot]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        model = await served_model(session, url)
        asks = (shoot(session, url, model, prompt, max_tokens) for prompt in prompts)
        return list(await asyncio.gather(*asks))


def steady(times: Sequence[Sequence[float]]) -> Window:
    """The window between the last first token and the first last token."""
    began, ended = max(row[0] for row in times), min(row[-1] for row in times)
    if ended <= began:
        raise SystemExit("no steady window: ask for more tokens (--tokens)")
    inside = [[t for t in row if began <= t <= ended] for row in times]
    gaps = sorted(1e3 * (b - a) for row in inside for a, b in pairwise(row))
    chunks = sum(len(set(row)) for row in inside)
    tokens = sum(len(row) for row in inside)
    return Window(tokens / (ended - began), gaps, tokens / chunks)


# --- processes ---


def cpu_seconds(root: int) -> float:
    """CPU time of a process' descendants but engine cores: the ones that have loaded torch."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(stat[1]), []).append(int(folder.name))
    total, todo = 0.0, list(parents.get(root, ()))
    while todo:
        pid = todo.pop()
        todo += parents.get(pid, ())
        try:
            if "libtorch" in (Path("/proc") / str(pid) / "maps").read_text():
                continue
            stat = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(stat[11]) + int(stat[12])) / TICKS
    return total


def offline(
    folder: str, device: Literal["cpu", "cuda"], batches: Sequence[int], max_tokens: int
) -> dict[int, Window]:
    """Measure the engine without frontend; runs in its own process."""
    from benchmarks.bench_engine import Bench
    from kvbaton.engine.config import EngineConfig

    bench = Bench(
        EngineConfig(
            model=folder,
            load_format="dummy",
            device=device,
            max_model_len=2048,
            max_num_seqs=256,
            enable_prefix_caching=False,
        )
    )
    bench.run(random_prompts(max(batches), PROMPT, 1), 8)
    return {
        batch: steady(bench.run(random_prompts(batch, PROMPT, batch), max_tokens))
        for batch in batches
    }


# --- the measurement ---


def online(
    pool: ProcessPoolExecutor, url: str, root: int, batch: int, max_tokens: int, seed: int
) -> tuple[Window, float]:
    """A load's window, and CPU microseconds per token of all but core and clients."""
    prompts = random_prompts(batch, PROMPT, seed)
    num = min(batch, 4)
    parts = [prompts[i::num] for i in range(num)]
    before = cpu_seconds(root)
    shots = [
        s for part in pool.map(partial(clients, url, max_tokens=max_tokens), parts) for s in part
    ]
    spent = cpu_seconds(root) - before
    errors = {shot.error for shot in shots if shot.error}
    if errors:
        raise SystemExit(f"failed: {errors}")
    tokens = sum(len(shot.times) for shot in shots)
    return steady([shot.times for shot in shots]), 1e6 * spent / tokens


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--tokens", type=int, default=600, help="output tokens per sequence")
    parser.add_argument("--flags", nargs="*", default=[], help="more flags of `kvbaton up`")
    args = parser.parse_args()
    where = Path(tempfile.mkdtemp()) / "model"
    folder = llama_8b(where) if args.device == "cuda" else make_checkpoint(where, SMALL)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as alone:
        work = alone.submit(offline, str(folder), args.device, args.batches, args.tokens)
        engine = work.result()
    flags = [
        f"--model={folder}", "--load-format=dummy", f"--device={args.device}",
        "--no-enable-prefix-caching", "--max-model-len=2048", "--max-num-seqs=256",
        *args.flags,
    ]  # fmt: skip
    rows = []
    cluster = cluster_of(["--prefill=0", "--decode=1", *flags])
    with cluster as (router, root), ProcessPoolExecutor(4, mp_context=context) as pool:
        with urllib.request.urlopen(f"{router}/nodes", timeout=30) as answer:
            node = json.load(answer)["nodes"][0]["url"]
        online(pool, router, root, max(args.batches), args.tokens, 3)
        for batch in args.batches:
            found = {"offline": (engine[batch], 0.0)}
            for name, url in (("directly", node), ("through router", router)):
                found[name] = online(pool, url, root, batch, args.tokens, batch + len(name))
            for name, (window, cpu) in found.items():
                p50, p95, p99 = (percentile(window.itl, p) for p in (50, 95, 99))
                share = window.tokens_s / engine[batch].tokens_s
                rows.append({"at_once": batch, "asked": name, "tokens_s": window.tokens_s,
                             "of_offline": share, "itl_p50": p50, "itl_p95": p95, "itl_p99": p99,
                             "p99/p50": p99 / p50, "tokens_per_chunk": window.tokens_per_chunk,
                             "cpu_us_per_token": cpu})  # fmt: skip
    publish("gpu_road", vars(args), rows, args.json)


if __name__ == "__main__":
    main()
