"""``kvbaton bench serve``: load on any OpenAI endpoint, and what its clients saw.

Closed loop: `concurrency` clients ask again as soon as they have their answer. Open loop (`rate`):
requests come by themselves, as a Poisson process, however slow the answers are; only this shows
what a queue does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvbaton.bench.report import percentile, publish
from kvbaton.bench.shot import Shot, served_model, shoot
from kvbaton.config import flag

FIRST_TOKEN_ID = 3
"""Ids below are special in most vocabularies."""


@dataclass(frozen=True, kw_only=True)
class ServeLoad:
    """What to ask of an endpoint.

    Attributes:
        url: of the endpoint, with or without ``/v1``.
        model: as it names the model; None asks it.
        api_key: presented to it.
        requests: how many in all.
        input_len: tokens of each prompt; all prompts differ.
        output_len: tokens of each answer.
        concurrency: clients of a closed loop; most requests at a time of an open one.
        rate: requests per second of an open loop; None is a closed one.
        vocab_size: prompts are made of token ids below it.
        seed: of prompts and arrivals.
        timeout_s: for one request.
    """

    url: str = flag(MISSING, "of the endpoint, without /v1", metavar=None)
    model: str | None = flag(None, "as the endpoint names it (asks it)", metavar="NAME")
    api_key: str | None = flag(None, metavar="KEY", secret=True)
    requests: int = flag(64, "in all", metavar="N")
    input_len: int = flag(256, "tokens", metavar="N")
    output_len: int = flag(32, "tokens", metavar="N")
    concurrency: int = flag(8, "at a time", metavar="N")
    rate: float | None = flag(None, "requests per second, open loop (closed loop)", metavar="R")
    vocab_size: int = flag(256, "of prompts", metavar="N")
    seed: int = flag(0, metavar="N")
    timeout_s: float = 600.0

    @property
    def base_url(self) -> str:
        """Of the endpoint, without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")


def run(load: ServeLoad, out: Path | None = None) -> int:
    """Measure, print, write; returns the exit status: 1 if a request failed."""
    shots, seconds = asyncio.run(measure(load))
    row = summary(shots, seconds)
    settings = {name: value for name, value in asdict(load).items() if name != "api_key"}
    publish("serve", settings, [row], out)
    for error in sorted({shot.error for shot in shots if shot.error}):
        print(f"failed: {error}")
    return 1 if row["failed"] else 0


async def measure(load: ServeLoad) -> tuple[list[Shot], float]:
    """All requests; returns what came, and the seconds from the first to the end of the last."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        model = load.model or await served_model(session, load.base_url)
        prompts = make_prompts(load)

        async def ask(number: int) -> Shot:
            return await shoot(session, load.base_url, model, prompts[number], load.output_len)

        began = time.monotonic()
        shots = await (_closed(load, ask) if load.rate is None else _open(load, load.rate, ask))
        return shots, time.monotonic() - began


def make_prompts(load: ServeLoad) -> list[list[int]]:
    """As many random prompts as requests."""
    chance = random.Random(load.seed)
    ids = range(min(FIRST_TOKEN_ID, load.vocab_size - 1), load.vocab_size)
    return [chance.choices(ids, k=load.input_len) for _ in range(load.requests)]


async def _closed(load: ServeLoad, ask: Callable[[int], Awaitable[Shot]]) -> list[Shot]:
    numbers = iter(range(load.requests))

    async def client() -> list[Shot]:
        return [await ask(number) for number in numbers]

    clients = (client() for _ in range(min(load.concurrency, load.requests)))
    return [shot for shots in await asyncio.gather(*clients) for shot in shots]


async def _open(load: ServeLoad, rate: float, ask: Callable[[int], Awaitable[Shot]]) -> list[Shot]:
    chance, room = random.Random(load.seed + 1), asyncio.Semaphore(load.concurrency)

    async def one(number: int, at: float) -> Shot:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        async with room:
            return await ask(number)

    at, tasks = time.monotonic(), []
    for number in range(load.requests):
        tasks.append(one(number, at))
        at += chance.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def summary(shots: Sequence[Shot], seconds: float) -> dict[str, Any]:
    """One row: latencies in milliseconds, throughput over the whole run."""
    good = [shot for shot in shots if shot.error is None]
    gaps = [gap for shot in good for gap in shot.gaps]
    series = {
        "ttft": [shot.after(0) for shot in good],
        "second": [shot.after(1) for shot in good if len(shot.times) > 1],
        "itl": gaps,
    }
    row: dict[str, Any] = {"ok": len(good), "failed": len(shots) - len(good), "s": seconds}
    for name, values in series.items():
        for percent in (50, 99):
            row[f"{name}_p{percent}_ms"] = 1000 * percentile(values, percent)
    row["requests/s"] = len(good) / seconds
    row["tokens/s"] = sum(len(shot.times) for shot in good) / seconds
    return row
