"""One streamed completion of any OpenAI endpoint, with the time of every token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvbaton.server.sse import DONE, read_events


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
    """Ask for any streamed answer; the body should say ``return_token_ids``."""
    began, times, ids = time.monotonic(), list[float](), list[int]()
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                return Shot(began, (), error=(await response.text())[:500])
            async for data in read_events(response.content):
                if data != DONE:
                    told = tokens_of(msgspec.json.decode(data))
                    times += [time.monotonic()] * (len(told) or 1) if told is not None else []
                    ids += told or []
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
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
    """The first model that an endpoint names."""
    async with session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        models = msgspec.json.decode(await response.read())
        return str(models["data"][0]["id"])
