"""``kvbaton bench serve``: load on any OpenAI endpoint, and what its clients saw.

Closed loop: `concurrency` clients ask again as soon as they have their answer. Open loop (`rate`):
requests come by themselves, as a Poisson process, however slow the answers are; only this shows
what a queue does.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbaton.bench.report import percentile, publish
from kvbaton.config import check_positive, flag, flag_of, secret_flag
from kvbaton.errors import INTERRUPTED, ConfigError
from kvbaton.messages import OTHER_TYPES, UNREADABLE
from kvbaton.server.config import check_url
from kvbaton.server.network import TrustConfig, bearer
from kvbaton.server.sse import DONE, read_events

FIRST_TOKEN_ID = 3
"""Ids below are special in most vocabularies."""
MAX_TOKENS = 1 << 28
"""Of all prompts, which are made before the first is sent."""


@dataclass(frozen=True, kw_only=True)
class ServeLoad:
    """What to ask of an endpoint.

    Attributes:
        url: of the endpoint, with or without ``/v1``.
        model: as it names the model; None asks it.
        api_key: presented to it; of several the first.
        requests: how many in all.
        input_len: tokens of each prompt; all prompts differ.
        output_len: tokens of each answer.
        concurrency: clients of a closed loop, None is 8; most requests at a time of an open one,
            whose others wait here and are not measured meanwhile, None is any number.
        rate: requests per second of an open loop; None is a closed one.
        vocab_size: prompts are made of token ids below it.
        seed: of prompts and arrivals.
        timeout_s: for one request.
        trust: whose certificates are believed.

    Raises:
        ConfigError: a number that makes no sense, or a URL that is none.
    """

    url: str = flag(MISSING, "of the endpoint, without /v1", metavar=None)
    model: str | None = flag(None, "as the endpoint names it (asks it)", metavar="NAME")
    api_key: str | None = secret_flag("presented to it", "KVBATON_API_KEY", metavar="KEY")
    requests: int = flag(64, "in all", metavar="N")
    input_len: int = flag(256, "tokens", metavar="N")
    output_len: int = flag(32, "tokens", metavar="N")
    concurrency: int | None = flag(None, "at a time (8; with --rate as they come)", metavar="N")
    rate: float | None = flag(None, "requests per second, open loop (closed loop)", metavar="R")
    vocab_size: int = flag(256, "of prompts", metavar="N")
    seed: int = flag(0, metavar="N")
    timeout_s: float = 600.0
    trust: TrustConfig = field(default_factory=TrustConfig)

    def __post_init__(self) -> None:
        check_url("--url", self.url)
        for name in ("requests", "input_len", "output_len", "concurrency", "vocab_size"):
            check_positive(flag_of(name), getattr(self, name))
        if self.requests * self.input_len > MAX_TOKENS:
            raise ConfigError("--requests", f"prompts of more than {MAX_TOKENS} tokens in all")
        if self.vocab_size > 1 << 31:
            raise ConfigError("--vocab-size", f"{self.vocab_size} is more than any model has")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError("--rate", f"must be positive, not {self.rate}")

    @property
    def base_url(self) -> str:
        """Of the endpoint, without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")


def run(load: ServeLoad, out: Path | None = None) -> int:
    """Measure, print, write; the exit status: 1 if a request failed, 130 if it was interrupted."""
    shots, seconds = asyncio.run(measure(load))
    row = summary(shots, seconds)
    settings = {name: value for name, value in asdict(load).items() if name != "api_key"}
    publish("serve", settings, [row], out)
    for error in sorted({shot.error for shot in shots if shot.error}):
        print(f"failed: {error}")
    if len(shots) < load.requests:
        print(f"interrupted: {len(shots)} of {load.requests} requests had ended")
        return INTERRUPTED
    return 1 if row["failed"] else 0


async def measure(load: ServeLoad) -> tuple[list[Shot], float]:
    """All requests, in the order of their ends, and the seconds from the first to the last end.

    Cancelled, as by Ctrl-C, it returns those that had ended.
    """
    connector = aiohttp.TCPConnector(limit=0, ssl=load.trust.client(load.base_url))
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    keys = (load.api_key or "").split()  # a router's variable may hold several
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=bearer(next(iter(keys), None))
    ) as session:
        model = load.model or await served_model(session, load.base_url)
        prompts, shots = make_prompts(load), list[Shot]()

        async def ask(number: int) -> None:
            prompt = prompts[number]
            shots.append(await shoot(session, load.base_url, model, prompt, load.output_len))

        began = time.monotonic()
        with suppress(asyncio.CancelledError):
            await (_closed(load, ask) if load.rate is None else _open(load, load.rate, ask))
        return shots, time.monotonic() - began


def make_prompts(load: ServeLoad) -> list[list[int]]:
    """As many random prompts as requests."""
    chance = random.Random(load.seed)
    ids = range(min(FIRST_TOKEN_ID, load.vocab_size - 1), load.vocab_size)
    return [chance.choices(ids, k=load.input_len) for _ in range(load.requests)]


async def _closed(load: ServeLoad, ask: Callable[[int], Awaitable[None]]) -> None:
    numbers = iter(range(load.requests))

    async def client() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*(client() for _ in range(min(load.concurrency or 8, load.requests))))


async def _open(load: ServeLoad, rate: float, ask: Callable[[int], Awaitable[None]]) -> None:
    chance = random.Random(load.seed + 1)
    room = asyncio.Semaphore(load.concurrency or load.requests)

    async def one(number: int, at: float) -> None:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        async with room:
            await ask(number)

    at, tasks = time.monotonic(), []
    for number in range(load.requests):
        tasks.append(one(number, at))
        at += chance.expovariate(rate)
    await asyncio.gather(*tasks)


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


@dataclass(frozen=True)
class Shot:
    """What a client saw; times are seconds on the monotonic clock.

    Attributes:
        began: when the request was sent.
        times: when each token came. An endpoint that does not know ``return_token_ids`` is taken
            to send one token per chunk of text.
        token_ids: if the endpoint told them.
        error: why it failed, or None.
    """

    began: float
    times: tuple[float, ...]
    token_ids: tuple[int, ...] = ()
    error: str | None = None

    def after(self, token: int) -> float:
        """Seconds from the request to a token, counted from 0."""
        return self.times[token] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def shoot(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    **more: Any,
) -> Shot:
    """Ask ``URL/v1/completions`` for `max_tokens` greedy tokens.

    Args:
        session: carries the API key.
        url: of the endpoint, without ``/v1``.
        model: as the endpoint names it.
        prompt: token ids.
        max_tokens: all of them are wanted: the end of a text is ignored.
        more: further fields of the request.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **more,
    }
    return await stream(session, f"{url}/v1/completions", body)


async def stream(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Shot:
    """Ask for any streamed answer; the body should say ``return_token_ids``.

    The clock starts when the body is written: 1 ms of one with a photo would be the client's own.
    """
    written, headers = msgspec.json.encode(body), {"Content-Type": "application/json"}
    began, times, ids = time.monotonic(), list[float](), list[int]()
    try:
        async with session.post(url, data=written, headers=headers) as response:
            if response.status != 200:
                return Shot(began, (), error=(await response.text())[:500])
            async for data in read_events(response.content):
                if data != DONE:
                    told = tokens_of(msgspec.json.decode(data, type=dict[str, Any]))
                    times += [time.monotonic()] * (len(told) or 1) if told is not None else []
                    ids += told or []
    except (aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE, *OTHER_TYPES) as error:
        return Shot(began, tuple(times), tuple(ids), repr(error))
    return Shot(began, tuple(times), tuple(ids), None if times else "no token came")


def tokens_of(chunk: Mapping[str, Any]) -> list[int] | None:
    """Token ids of a chunk: empty if it does not tell which, None if it holds no token."""
    if "error" in chunk:
        raise aiohttp.ClientPayloadError(str(chunk["error"]))
    choices = chunk.get("choices") or [{}]
    ids = choices[0].get("token_ids")
    if ids is not None:
        return list(ids) or None
    return [] if choices[0].get("text") else None


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that an endpoint names.

    Raises:
        ConfigError: it names none.
    """
    try:
        async with session.get(f"{url}/v1/models") as response:
            if response.status == 401:
                raise ConfigError("--api-key", f"{url} asks for the right one")
            response.raise_for_status()
            return str(msgspec.json.decode(await response.read())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error) or "no answer in time"
        raise ConfigError("--url", f"can't tell what {url} serves: {reason}") from error
