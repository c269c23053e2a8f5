"""Cost of the hand-over between two GPUs, with real prefill (P) and decode (D) nodes.

    python -m benchmarks.bench_gpu_handover --json handover.json
    python -m benchmarks.bench_gpu_handover --shape deepseek-v2-lite
    python -m benchmarks.bench_gpu_handover --shape gemma3-4b --one-gpu

Each request goes to the prefill node alone, and through the router to P and D, whose first token
comes from P. A P that is idle samples the second, too, so the third one needs the hand-over; else
the second does. Then closed loops of clients follow. The workload is that of `workload`, over HTTP;
results stand beside those of vLLM 0.26.0. Shapes of
`bench_gpu_shapes` other than 8B have no loops; instead, the bytes transferred for a prompt by the
metrics are compared with what each group of layers must transfer: a latent once, of a window only
its tokens. For each length and load, a table shows the time between P's last step and D's first one
(`handover_parts`).

With ``--one-gpu`` both nodes share the first GPU, transfer by CUDA IPC, and run no loops: the bytes
are the same as between two GPUs, the times are not, as every row says. For each pair, the GPU time
of P's steps is printed, with the clock and power of that GPU meanwhile (`gpu_clocks`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from contextlib import AbstractContextManager, closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp

from benchmarks.bench_gpu_shapes import SHAPES
from benchmarks.gpu_clocks import GpuClocks
from benchmarks.handover_parts import print_parts, timelines
from benchmarks.workload import MAX_MODEL_LEN, cluster_of, compared, dummy_folder, random_prompts
from kvbaton.bench.report import percentile, publish
from kvbaton.bench.serve import Shot, served_model, shoot
from kvbaton.cluster.config import visible_gpus
from kvbaton.connectors.layout import ITEM_SIZE
from kvbaton.engine.model_config import load_model_config
from kvbaton.types import first_attended

ADDED = {1024: 22.5, 4096: 44.6, 16384: 143.9}
LOADS = [  # requests, prompt, at once, and vLLM's req/s, TTFT p50, p99, ITL p50, p99
    (128, 2048, 32, (18.1, 539.0, 1626.0, 6.4, 58.6)),
    (256, 2048, 64, (19.2, 2057.0, 3288.0, 6.5, 57.3)),
    (128, 8192, 32, (4.5, 5996.0, 6842.0, 5.8, 57.5)),
]
OUTPUT = 128
PAIRS = 8
OF_SHAPES = (1024, 16384)
"""Prompt lengths for shapes other than 8B, with half as many pairs."""

BLOCK = 16
"""Tokens per KV block."""

ALONE = "alone"
"""Name of the way that asks only the prefill node."""
TOKENS = "first", "second", "third"
"""Tokens that are timed."""

REPORT_S = 0.05
"""Seconds after a client's first token until the prefill step is in the node's list of steps."""

PAUSE_S = 1.0
"""Seconds between requests of a pair.

After 0.1 s of work the power cap lowers a GPU's clock by a sixth, which would slow the next request
(the prefill node decodes in one way, and is idle in the other).
"""


SHARED_POOL = 4 << 30
"""Bytes of each node's KV pool if two share a GPU: free memory depends on which started first."""


def cluster(
    flags: list[str], gpus: list[str] | None = None
) -> AbstractContextManager[tuple[str, int]]:
    """A prefill and a decode node, each on its own GPU or on those named; see `cluster_of`."""
    words = ["--prefill=1", "--decode=1", "--policy=least-loaded", *flags]
    env = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return cluster_of(words, env, echo=True)


async def compare(
    session: aiohttp.ClientSession,
    urls: dict[str, str],
    model: str,
    length: int,
    pairs: int,
    clocks: GpuClocks,
) -> dict[str, list[float]]:
    """Median milliseconds to each of `TOKENS`, by way; `clocks` is of P's GPU."""
    found: dict[str, list[list[float]]] = {name: [] for name in urls}
    whiles: dict[str, list[tuple[float, float]]] = {name: [] for name in urls}
    ways = list(urls.items())
    for number in range(pairs + 2):
        # In turn each way goes first: a GPU is warmer for the second one.
        for name, url in ways if number % 2 else reversed(ways):
            (prompt,) = random_prompts(1, length, number * 10 + len(name))
            await asyncio.sleep(PAUSE_S)
            shot = await shoot(session, url, model, prompt, 8)
            if shot.error:
                raise SystemExit(f"{name}, prompt of {length}: {shot.error}")
            if number >= 2:
                found[name].append([1e3 * shot.after(index) for index in range(len(TOKENS))])
                whiles[name].append((shot.began, shot.times[0]))
    steps = await get_json(session, f"{urls[ALONE]}/debug/steps")
    rows = [dict(zip(steps["columns"], row, strict=True)) for row in steps["rows"]]
    prompts = [(row["at"], 1e3 * row["device"]) for row in rows if row["tokens"] > 1]
    for name, spans in whiles.items():
        device = [
            sum(ms for at, ms in prompts if since <= at <= to + REPORT_S) for since, to in spans
        ]
        seen = [clocks.between(*span) for span in spans]
        mhz, watts, capped, samples = map(median, zip(*seen, strict=True))
        print(f"  P's steps, {name}: {median(device):.2f} ms ({min(device):.2f}, "
              f"{max(device):.2f}) at {mhz:.0f} MHz, {watts:.0f} W, capped in {capped:.0%} "
              f"of {samples:.0f} samples", flush=True)  # fmt: skip
    return {name: list(map(median, zip(*shots, strict=True))) for name, shots in found.items()}


async def load(
    session: aiohttp.ClientSession, url: str, model: str, requests: int, length: int, clients: int
) -> tuple[list[Shot], float]:
    """Run a closed loop; its requests and the seconds it took."""
    prompts = iter(random_prompts(requests, length, length + clients))

    async def client() -> list[Shot]:
        return [await shoot(session, url, model, prompt, OUTPUT) for prompt in prompts]

    began = time.monotonic()
    shots = await asyncio.gather(*(client() for _ in range(clients)))
    return [shot for part in shots for shot in part], time.monotonic() - began


class Crossing(NamedTuple):
    """Bytes of a prompt that D's ranks store for one group of layers.

    Attributes:
        least: Bytes of the tokens that the next token attends to, or of the last state.
        most: The same with the rest of the block in which a window begins.
        whole: Bytes of all tokens.
    """

    least: int
    most: int
    whole: int


def in_groups(folder: Path, length: int, ranks: int) -> dict[str, Crossing]:
    """Bytes to transfer for a prompt, by group of layers."""
    model = load_model_config(folder)
    found = {}
    for number, group in enumerate(model.kv_groups()):
        heads, kind = max(group.heads, ranks), "latents" if model.mla else "full"
        if group.window:
            kind = f"{'chunk' if group.chunked else 'window'} {group.window}"
        per_token = heads * len(group.layers) * group.planes * group.head_dim
        first = first_attended(length, group.window, group.chunked)
        tokens = length - first, length - first + first % BLOCK, length
        sizes = Crossing(*(count * per_token * ITEM_SIZE[model.kv_dtype] for count in tokens))
        if group.state_rows:
            kind = "states"
            state = heads * len(group.layers) * group.state_rows * group.head_dim * 4
            sizes = Crossing(state, state, state)
        found[f"group {number} ({kind}, {len(group.layers)} layers)"] = sizes
    return found


async def transferred(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """A node's byte counters: posted, sent, needed."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    found = re.findall(r"^kvbaton_transfer_(\w+)_bytes_total(?:{.*})? (\S+)", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def crossed(
    session: aiohttp.ClientSession,
    urls: dict[str, str],
    router: str,
    model: str,
    groups: dict[str, Crossing],
    length: int,
) -> bool:
    """Print the bytes transferred for one prompt and those planned; whether they agree."""
    before = await transferred(session, urls["prefill"])
    (prompt,) = random_prompts(1, length, 7 * length)
    shot = await shoot(session, router, model, prompt, 8)
    if shot.error:
        raise SystemExit(f"prompt of {length}: {shot.error}")
    await asyncio.sleep(PAUSE_S)
    after = await transferred(session, urls["prefill"])
    print(f"--- {length} tokens: bytes to cross, with whole first blocks of windows, of all tokens")
    for name, sizes in groups.items():
        print(f"  {name}: " + ", ".join(f"{size:,}" for size in sizes))
    total = Crossing(*map(sum, zip(*groups.values(), strict=True)))
    print("  all groups: " + ", ".join(f"{size:,}" for size in total))
    gained = {name: int(after[name] - before.get(name, 0)) for name in after}
    print("  by P's metrics: " + ", ".join(f"{name} {size:,}" for name, size in gained.items()))
    within = gained["needed"] == total.least
    within &= total.least <= gained["sent"] == gained["posted"] <= total.most
    print("  as planned" if within else "  NOT AS PLANNED", flush=True)
    return within


async def measure(
    router: str, folder: Path, args: argparse.Namespace, clocks: GpuClocks
) -> tuple[list[tuple[str, float, float | None]], bool]:
    """All rows of the table, and whether the bytes transferred were as planned."""
    rows: list[tuple[str, float, float | None]] = []

    def add(name: str, ours: float, theirs: float | None = None) -> None:
        if args.one_gpu:
            name = f"{name} (one GPU)"
        rows.append((name, ours, theirs))
        print(f"  {name}: {ours:,.2f}", flush=True)

    timeout = aiohttp.ClientTimeout(total=200)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        nodes = (await get_json(session, f"{router}/nodes"))["nodes"]
        urls = {node["role"]: node["url"] for node in nodes}
        model = await served_model(session, router)
        loops = args.shape == "8b" and not args.one_gpu
        planned = True
        dump: Path | None = args.dump
        for length in ADDED if args.shape == "8b" else OF_SHAPES:
            theirs = ADDED[length] if loops else None
            ways = {ALONE: urls["prefill"], "through P and D": router}
            pairs = PAIRS if args.shape == "8b" else PAIRS // 2
            known = await timelines(session, urls["prefill"], urls["decode"])
            found = await compare(session, ways, model, length, pairs, clocks)
            parts = await timelines(session, urls["prefill"], urls["decode"])
            for name, times in found.items():
                for token, ms in zip(TOKENS, times, strict=True):
                    add(f"{token} token of {length}, {name}, ms", ms)
            for token, alone, both in zip(TOKENS, *found.values(), strict=True):
                add(f"added time to {token} token at {length}, ms", both - alone, theirs)
            print_parts({name: marks for name, marks in parts.items() if name not in known})
            groups = in_groups(folder, length, args.tensor_parallel_size)
            planned &= await crossed(session, urls, router, model, groups, length)
        if dump is not None:
            states = {role: await get_json(session, f"{url}/state") for role, url in urls.items()}
            dump.write_text(json.dumps(states))
        for requests, length, clients, vllm in LOADS[: 3 - args.quick] if loops else ():
            known = await timelines(session, urls["prefill"], urls["decode"])
            shots, took = await load(session, router, model, requests, length, clients)
            parts = await timelines(session, urls["prefill"], urls["decode"])
            good = [shot for shot in shots if shot.error is None]
            if len(good) < len(shots):
                print("FAILED:", {shot.error for shot in shots if shot.error}, flush=True)
            ttft = [1e3 * shot.after(0) for shot in good]
            itl = [1e3 * gap for shot in good for gap in shot.gaps[1:]]
            first_gap = [1e3 * shot.gaps[0] for shot in good if shot.gaps]
            name = f"{requests} of {length}, {clients} at once:"
            add(f"{name} requests/s", len(good) / took, vllm[0])
            add(f"{name} TTFT p50, ms", percentile(ttft, 50), vllm[1])
            add(f"{name} TTFT p99, ms", percentile(ttft, 99), vllm[2])
            add(f"{name} ITL p50, ms", percentile(itl, 50), vllm[3])
            add(f"{name} ITL p99, ms", percentile(itl, 99), vllm[4])
            add(f"{name} first to second token p50, ms", percentile(first_gap, 50))
            add(f"{name} first to second token p99, ms", percentile(first_gap, 99))
            print_parts({name: marks for name, marks in parts.items() if name not in known})
        for role, url in urls.items():
            print(f"--- {role}")
            async with session.get(f"{url}/metrics") as response:
                for line in (await response.text()).splitlines():
                    if re.match(r"kvbaton_(transfer|ledger|prompt|steps|step_t)", line):
                        print(line)
    return rows, planned


async def get_json(session: aiohttp.ClientSession, url: str) -> Any:
    """GET a JSON document."""
    async with session.get(url) as response:
        return json.loads(await response.read())


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chunk", type=int, default=2048, help="--max-num-batched-tokens")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="of both nodes")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--one-gpu", action="store_true", help="both nodes share the first GPU")
    parser.add_argument("--dump", type=Path, help="write the nodes' states after the pairs here")
    parser.add_argument("--quick", action="store_true", help="leave the longest load out")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of bench_gpu_shapes")
    args = parser.parse_args()
    gpus = visible_gpus()[:1] if args.one_gpu else None
    if gpus is not None and args.tensor_parallel_size > 1:
        parser.error("--one-gpu: a node's ranks need a GPU each, so give --tensor-parallel-size 1")
    folder = dummy_folder(Path(tempfile.mkdtemp()) / "model", SHAPES[args.shape])
    flags = [
        f"--model={folder}", "--load-format=dummy", "--device=cuda", "--no-enable-prefix-caching",
        f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-batched-tokens={args.chunk}",
        f"--transport={args.transport}", "--start-timeout=200", "--log-level=info",
        f"--tensor-parallel-size={args.tensor_parallel_size}",
    ]  # fmt: skip
    if args.one_gpu:
        flags.append(f"--kv-cache-memory-bytes={SHARED_POOL}")
    with closing(GpuClocks(visible_gpus()[0])) as clocks, cluster(flags, gpus) as (router, _):
        rows, planned = asyncio.run(measure(router, folder, args, clocks))
    if args.one_gpu:
        print("P and D shared one GPU: bytes are those between two GPUs, times are not")
    publish("gpu_handover", vars(args), compared(rows), args.json)
    if not planned:
        raise SystemExit("what crossed is not what the groups hold: see NOT AS PLANNED above")


if __name__ == "__main__":
    main()
