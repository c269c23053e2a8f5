"""``kvbaton bench serve``: puts load on any OpenAI endpoint, and measures latency and throughput.

Closed loop: `concurrency` clients send a request as soon as they have their last answer. Open loop
(`rate`): requests arrive as a Poisson process, however slow the answers are; only this shows the
effect of a queue.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
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
from kvbaton.server.network import TrustConfig, bearer, first_key
from kvbaton.server.sse import DONE, read_events

FIRST_TOKEN_ID = 3
"""Lowest token id in prompts; ids below are special in most vocabularies."""
MAX_TOKENS = 1 << 28
"""Maximum number of tokens of all prompts, which are made before the first is sent."""
MOST_ERRORS = 5
"""Maximum number of different errors printed: many name numbers."""


@dataclass(frozen=True, kw_only=True)
class ServeLoad:
    """Load on an endpoint.

    Attributes:
        url: URL of the endpoint, with or without ``/v1``.
        model: Name of the model at the endpoint; None asks the endpoint.
        api_key: API key for the endpoint; of several the first.
        requests: Number of requests.
        input_len: Tokens of each prompt; all prompts differ.
        output_len: Tokens of each answer.
        concurrency: Number of clients of a closed loop; None is 8. In an open loop, maximum number
            of concurrent requests; further ones wait here, and this wait is not measured; None is
            unlimited.
        rate: Requests per second of an open loop; None is a closed one.
        vocab_size: Prompts consist of token ids below it.
        seed: Seed of prompts and arrivals.
        timeout_s: Maximum seconds of a request.
        trust: Which certificates are trusted.

    Raises:
        ConfigError: A number or the URL is wrong.
    """

    url: str = flag(MISSING, "URL of the endpoint", metavar=None)
    model: str | None = flag(
        None, "name of the model at the endpoint (asks the endpoint)", metavar="NAME"
    )
    api_key: str | None = secret_flag("API key for the endpoint", "KVBATON_API_KEY", metavar="KEY")
    requests: int = flag(64, "number of requests", metavar="N")
    input_len: int = flag(256, "tokens of each prompt", metavar="N")
    output_len: int = flag(32, "tokens of each answer", metavar="N")
    concurrency: int | None = flag(
        None, "most concurrent requests (8; with --rate unlimited)", metavar="N"
    )
    rate: float | None = flag(
        None, "requests per second of an open loop (closed loop)", metavar="R"
    )
    vocab_size: int = flag(256, "prompts consist of token ids below it", metavar="N")
    seed: int = flag(0, "seed of prompts and arrivals", metavar="N")
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
        """URL of the endpoint, without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")


def run(load: ServeLoad, out: Path | None = None) -> int:
    """Measure, print and write; return the exit status: 1 if a request failed, 130 on Ctrl-C."""
    shots, seconds = asyncio.run(measure(load))
    row = summary(shots, seconds)
    settings = {name: value for name, value in asdict(load).items() if name != "api_key"}
    publish("serve", settings, [row], out)
    tell_failures(shots)
    good = [shot for shot in shots if shot.error is None]
    if short := sum(len(shot.times) < load.output_len for shot in good):
        told = f"{sum(len(shot.times) for shot in good)} tokens in all"
        print(f"{short} of {len(good)} answers were shorter than --output-len: {told}")
    if len(shots) < load.requests:
        print(f"interrupted: {len(shots)} of {load.requests} requests had ended")
        return INTERRUPTED
    return 1 if row["failed"] else 0


def tell_failures(shots: Sequence[Shot]) -> None:
    """Print the most frequent errors, and how many requests failed by others."""
    errors = Counter(shot.error for shot in shots if shot.error is not None)
    most = errors.most_common(MOST_ERRORS)
    for error, number in most:
        print(f"failed: {number} of {len(shots)}, {error}")
    if rest := errors.total() - sum(number for _, number in most):
        kinds = len(errors) - len(most)
        print(f"failed: {rest} of {len(shots)}, by {kinds} other errors")


async def measure(load: ServeLoad) -> tuple[list[Shot], float]:
    """Run all requests; return them in the order of their ends, and the seconds that they took.

    If cancelled, as by Ctrl-C, it returns the requests that have ended.
    """
    connector = aiohttp.TCPConnector(limit=0, ssl=load.trust.client(load.base_url))
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=bearer(first_key(load.api_key))
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
    """Make a random prompt for each request."""
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
    """One row: latencies in milliseconds, throughput over the whole run.

    ``itl`` is over all gaps between tokens, ``tpot`` over each request's mean gap.
    """
    good = [shot for shot in shots if shot.error is None]
    gaps = [gap for shot in good for gap in shot.gaps]
    series = {
        "ttft": [shot.after(0) for shot in good],
        "second": [shot.after(1) for shot in good if len(shot.times) > 1],
        "itl": gaps,
        "tpot": [sum(shot.gaps) / len(shot.gaps) for shot in good if shot.gaps],
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
    """A request as its client saw it; times are seconds on the monotonic clock.

    Attributes:
        began: When the request was sent.
        times: When each token arrived. An endpoint that does not know ``return_token_ids`` is
            assumed to send one token per chunk of text.
        token_ids: Generated tokens, if the endpoint sent them.
        error: Why the request failed; None if it did not.
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
    """Request `max_tokens` greedy tokens of ``URL/v1/completions``.

    Args:
        session: Session with the API key.
        url: URL of the endpoint, without ``/v1``.
        model: Name of the model at the endpoint.
        prompt: Token ids.
        max_tokens: Number of tokens to generate; end-of-text tokens are ignored.
        more: Further fields of the request.
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
    """Request a streamed answer; the body should set ``return_token_ids``.

    The clock starts when the body is encoded, which takes 1 ms for a body with a photo.
    """
    written, headers = msgspec.json.encode(body), {"Content-Type": "application/json"}
    began, times, ids = time.monotonic(), list[float](), list[int]()
    ended = False
    try:
        async with session.post(url, data=written, headers=headers) as response:
            if response.status != 200:
                return Shot(began, (), error=(await response.text())[:500])
            async for data in read_events(response.content):
                if data == DONE:
                    ended = True
                else:
                    told = tokens_of(msgspec.json.decode(data, type=dict[str, Any]))
                    times += [time.monotonic()] * (len(told) or 1) if told is not None else []
                    ids += told or []
    except (aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE, *OTHER_TYPES) as error:
        return Shot(began, tuple(times), tuple(ids), repr(error))
    problem = None if ended else "the stream ended without [DONE]"
    return Shot(began, tuple(times), tuple(ids), problem if times else "no token came")


def tokens_of(chunk: Mapping[str, Any]) -> list[int] | None:
    """Token ids of a chunk: empty if it does not have them, None if it has no token."""
    if "error" in chunk:
        raise aiohttp.ClientPayloadError(str(chunk["error"]))
    choices = chunk.get("choices") or [{}]
    ids = choices[0].get("token_ids")
    if ids is not None:
        return list(ids) or None
    return [] if choices[0].get("text") else None


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that an endpoint lists.

    Raises:
        ConfigError: It lists none, can't be reached, or refuses the API key.
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
