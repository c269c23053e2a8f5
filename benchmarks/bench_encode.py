"""Cost and gain of an encoder node, against encoding images on the node that prefills.

    python -m benchmarks.bench_encode --device cuda --json encode.json     # two GPUs
    python -m benchmarks.bench_encode --device cpu                         # a small model
    python -m benchmarks.bench_encode --known                              # one GPU
    python -m benchmarks.bench_encode --known --device cpu

On GPUs the model has Qwen2.5-VL-7B's shape (dummy weights, bfloat16). Requests are chats over HTTP
with one or more new JPEG images. *Colocated* asks the node that has both encoder and language
model; *separate* asks the router, which uses an encoder node (``--min-encode-rows 1``), and the
same node for prefill. Both alternate within one run. Then the same image follows another text,
against a text of as many tokens: the remaining cost of an encoded image. Then a closed loop of
clients, on an encoder node and one other node, and on two nodes that do both.

With ``--known``, only known images are measured, in many pairs, through the router to one node that
does both. With ``--known`` on CPUs there is an encoder node too, the model is tiny, and an image
has 64 rows whatever its size: only the cost of its bytes remains.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

from benchmarks.bench_gpu_handover import cluster, get_json
from benchmarks.workload import compared
from kvbaton.bench.report import percentile, publish
from kvbaton.bench.serve import Shot, served_model, stream
from tests.support.checkpoints import make_checkpoint
from tests.support.families import FamilySpec

Row = tuple[str, float, float | None]
QWEN_7B_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [16, 24, 24],
    },
}
QWEN_7B_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
KNOWN_SIDES, KNOWN_PAIRS, CPU_ROWS = (448, 1024), 40, 64
QWEN_7B_PIXELS = {"patch_size": 14, "min_pixels": 4 * 28 * 28, "max_pixels": 16384 * 28 * 28}
SMALL = FamilySpec(
    family="qwen2_5_vl",
    hidden_size=512,
    intermediate_size=1376,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
)

TINY = FamilySpec(family="qwen2_5_vl", max_position_embeddings=4096)


@dataclass(frozen=True)
class Workload:
    """Requests of the benchmark.

    Attributes:
        sides: Sides of the square images of the pairs, in pixels.
        images: Numbers of images per request of a pair.
        pairs: Number of pairs per shape.
        words: Words of text before the images.
        load: Of the closed loop: requests, images per request, side, clients, output tokens.
    """

    sides: tuple[int, ...]
    images: tuple[int, ...]
    pairs: int
    words: int
    load: tuple[int, int, int, int, int]


GPU = Workload((448, 1024), (1, 4), 8, 64, (128, 2, 1024, 32, 16))
CPU = Workload((64, 80), (1, 4), 7, 64, (24, 2, 80, 4, 8))


def qwen_7b(folder: Path) -> Path:
    """Write configuration, processor and a small tokenizer, for dummy weights; the folder."""
    make_checkpoint(folder, FamilySpec(family="qwen2_5_vl"))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= QWEN_7B_TEXT
    config["vision_config"] |= QWEN_7B_VISION
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    pixels = json.loads((folder / "preprocessor_config.json").read_text()) | QWEN_7B_PIXELS
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return folder


class Asker:
    """Sends chats about new images.

    Args:
        session: Session for all requests.
        model: Name of the served model.
        seed: Seed of texts and images.
    """

    def __init__(self, session: aiohttp.ClientSession, model: str, seed: int) -> None:
        self.session, self._model = session, model
        self._random = np.random.default_rng(seed)

    def image(self, side: int) -> str:
        """A data URL of a new image: smooth noise, whose JPEG is about as large as a photo's."""
        small = self._random.integers(0, 256, (side // 8 + 1, side // 8 + 1, 3), np.uint8)
        image = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=90)
        return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    def text(self, words: int) -> str:
        """New text, without any prefix hit."""
        return "".join(f"{number:03d} " for number in self._random.integers(0, 1000, words))

    async def ask(self, url: str, text: str, images: Sequence[str], tokens: int = 4) -> Shot:
        """Send one chat."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        parts += [{"type": "image_url", "image_url": {"url": image}} for image in images]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        shot = await stream(self.session, f"{url}/v1/chat/completions", body)
        if shot.error:
            raise SystemExit(f"{len(images)} images: {shot.error}")
        return shot


async def pairs(asker: Asker, urls: dict[str, str], workload: Workload) -> list[Row]:
    """TTFT through an encoder node, against colocated encoding."""
    rows: list[Row] = []
    for side in workload.sides:
        for count in workload.images:
            taken: dict[str, list[float]] = {name: [] for name in urls}
            for number in range(workload.pairs + 2):
                for name in sorted(urls, reverse=bool(number % 2)):
                    text = asker.text(workload.words)
                    images = [asker.image(side) for _ in range(count)]
                    await asyncio.sleep(0.3)
                    shot = await asker.ask(urls[name], text, images)
                    if number >= 2:
                        taken[name].append(1e3 * shot.after(0))
            shape = f"{count} image(s) of {side} x {side}"
            middle = {name: median(values) for name, values in taken.items()}
            rows += [(f"TTFT, {shape}, {name}, ms", middle[name], None) for name in urls]
            added = (middle["separate"] - middle["colocated"]) / count
            rows.append((f"added per image, {shape}, ms", added, None))
    return rows


async def again(
    asker: Asker, url: str, node: str, workload: Workload, side: int, count: int
) -> list[Row]:
    """A known image after a new text, against a text of as many tokens, in `count` pairs."""
    image = asker.image(side)
    seen, plain = list[float](), list[float]()
    tokens = await _prompt_tokens(asker, node, image, workload)
    for number in range(count + 2):
        known = await asker.ask(url, asker.text(workload.words), [image])
        text = await asker.ask(url, asker.text(workload.words + tokens), [])
        if number >= 2:
            seen.append(1e3 * known.after(0))
            plain.append(1e3 * text.after(0))
    return [
        (f"TTFT, known image of {side} x {side}, ms", median(seen), None),
        ("TTFT, text of as many tokens, ms", median(plain), None),
        ("known image - text, ms, in pairs", median(map(sub, seen, plain)), None),
        ("known image / text", median(seen) / median(plain), None),
    ]


async def _prompt_tokens(asker: Asker, node: str, image: str, workload: Workload) -> int:
    """Number of words of `Asker.text` that take as many tokens as the image."""
    counts = []
    for words, images in (
        (workload.words, [image]),
        (workload.words, []),
        (2 * workload.words, []),
    ):
        before = await _computed(asker, node)
        await asker.ask(node, asker.text(words), images)
        counts.append(await _computed(asker, node) - before)
    per_word = (counts[2] - counts[1]) / workload.words
    return round((counts[0] - counts[1]) / per_word)


async def _computed(asker: Asker, node: str) -> float:
    found = await _metrics(asker, node)
    return found.get('kvbaton_prompt_tokens_total{source="computed"}', 0.0)


async def _metrics(asker: Asker, node: str) -> dict[str, float]:
    async with asker.session.get(f"{node}/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("kvbaton_"))
    return {name: float(value) for name, value in pairs}


async def per_image(asker: Asker, nodes: Sequence[str]) -> list[Row]:
    """Mean time of each stage of encoding an image on a node."""
    found = [await _metrics(asker, node) for node in nodes]
    items = sum(metrics['kvbaton_encoder_items_total{source="encoded"}'] for metrics in found)
    totals = {
        what: sum(metrics[f"kvbaton_encoder_{what}_seconds_total"] for metrics in found)
        for what in ("read", "encode")
    }
    return [
        (f"to {what} an image, ms", 1e3 * total / items, None) for what, total in totals.items()
    ]


async def load(asker: Asker, url: str, workload: Workload) -> list[Row]:
    """Requests per second and TTFT of a closed loop."""
    requests, count, side, clients, tokens = workload.load
    todo = [
        (asker.text(workload.words), [asker.image(side) for _ in range(count)])
        for _ in range(requests + clients)
    ]
    for text, images in todo[requests:]:
        await asker.ask(url, text, images, tokens)
    waiting = iter(todo[:requests])

    async def client() -> list[Shot]:
        return [await asker.ask(url, text, images, tokens) for text, images in waiting]

    clock = asyncio.get_running_loop().time
    began = clock()
    shots = [s for part in await asyncio.gather(*(client() for _ in range(clients))) for s in part]
    took = clock() - began
    firsts = [1e3 * shot.after(0) for shot in shots]
    return [
        ("requests/s", requests / took, None),
        ("images/s", requests * count / took, None),
        ("TTFT p50, ms", percentile(firsts, 50), None),
        ("TTFT p99, ms", percentile(firsts, 99), None),
    ]


async def known_images(router: str, workload: Workload) -> list[Row]:
    """TTFT with known images, by size."""
    rows: list[Row] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        asker = Asker(session, await served_model(session, router), 0)
        told = (await get_json(session, f"{router}/nodes"))["nodes"]
        node = next(node["url"] for node in told if node["role"] != "encode")
        await asker.ask(node, asker.text(workload.words), [])
        for side in KNOWN_SIDES:
            rows += await again(asker, router, node, workload, side, KNOWN_PAIRS)
    for row in rows:
        print(f"  {row[0]}: {row[1]:,.2f}", flush=True)
    return rows


async def measure(router: str, workload: Workload, *, separate: bool) -> list[Row]:
    """All rows of one cluster."""
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    rows: list[Row] = []
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        asker = Asker(session, await served_model(session, router), int(separate))
        told = (await get_json(session, f"{router}/nodes"))["nodes"]
        nodes = [(node["role"], node["url"]) for node in told]
        if separate:
            node = next(url for role, url in nodes if role != "encode")
            rows += await pairs(asker, {"colocated": node, "separate": router}, workload)
            rows += await again(asker, router, node, workload, workload.sides[-1], workload.pairs)
        requests, count, side, clients, _ = workload.load
        name = "1 encoder + 1" if separate else "2 with both"
        for what, ours, theirs in await load(asker, router, workload):
            load_name = f"{name}: {requests} requests, {count} of {side}, {clients} at once: {what}"
            rows.append((load_name, ours, theirs))
        for what, ours, theirs in await per_image(asker, [url for _, url in nodes]):
            rows.append((f"{name}: {what}", ours, theirs))
    for row in rows:
        print(f"  {row[0]}: {row[1]:,.2f}", flush=True)
    return rows


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--known", action="store_true", help="measure only known images")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) / "model"
    flags = [f"--device={args.device}", f"--transport={args.transport}", "--start-timeout=200"]
    if args.device == "cuda":
        qwen_7b(folder)
        flags += ["--load-format=dummy", "--max-model-len=16640", "--log-level=info"]
    else:
        make_checkpoint(folder, TINY if args.known else SMALL)
        flags += ["--num-threads=1"]
    workload = GPU if args.device == "cuda" else CPU
    rows: list[Row] = []
    if args.known:
        if args.device == "cpu":
            file = folder / "preprocessor_config.json"
            pixels = json.loads(file.read_text())
            row_pixels = (pixels["patch_size"] * pixels["merge_size"]) ** 2
            pixels |= {"min_pixels": row_pixels, "max_pixels": CPU_ROWS * row_pixels}
            file.write_text(json.dumps(pixels))
        nodes = ["--prefill=0", "--decode=1", f"--encode={int(args.device == 'cpu')}"]
        with cluster([f"--model={folder}", *flags, *nodes]) as (router, _):
            rows = asyncio.run(known_images(router, workload))
        publish("known-images", vars(args), compared(rows), args.json)
        return
    clusters = [
        (["--prefill=0", "--decode=1", "--encode=1", "--min-encode-rows=1"], True),
        (["--prefill=0", "--decode=2"], False),
    ]
    for nodes, separate in clusters:
        with cluster([f"--model={folder}", *flags, *nodes]) as (router, _):
            rows += asyncio.run(measure(router, workload, separate=separate))
    publish("encode", vars(args), compared(rows), args.json)


if __name__ == "__main__":
    main()
