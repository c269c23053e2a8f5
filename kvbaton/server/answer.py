"""How events become an answer, whole or streamed: what both generating endpoints share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from aiohttp import web
from msgspec import Struct

from kvbaton.messages.openai import SamplingFields, Usage
from kvbaton.server.body import json_response
from kvbaton.server.config import Frontend
from kvbaton.server.jobs import Event, Job, fold, run_jobs
from kvbaton.server.sse import send_events
from kvbaton.server.usage import Tally, wants_usage


class Shape(Protocol):
    """Formats the events of one endpoint."""

    def chunk(self, event: Event, usage: Usage | None) -> Struct:
        """One event of a stream."""
        ...

    def usage_chunk(self, usage: Usage) -> Struct:
        """The last event of a stream that reports usage."""
        ...

    def whole(self, events: Sequence[Event], usage: Usage) -> Struct:
        """All choices at once."""
        ...


async def respond(
    request: web.Request,
    frontend: Frontend,
    body: SamplingFields,
    jobs: Sequence[Job],
    shape: Shape,
) -> web.StreamResponse:
    """Run the jobs and answer.

    Raises:
        RequestError, EngineDeadError: nothing was sent yet and it can't be served.
        TimeoutError: nothing was sent yet and the deadline is long over.
    """
    limit_s = jobs[0].request.deadline_s + frontend.config.deadline_grace_s
    if body.stream:
        return await send_events(request, _chunks(frontend, body, jobs, shape), limit_s)
    tally = Tally(jobs)
    events = []
    async with asyncio.timeout(limit_s), aclosing(run_jobs(frontend, jobs)) as stream:
        async for event in stream:
            tally.add(event)
            events.append(event)
    return json_response(shape.whole(fold(events), tally.usage()))


async def _chunks(
    frontend: Frontend, body: SamplingFields, jobs: Sequence[Job], shape: Shape
) -> AsyncGenerator[bytes]:
    tally = Tally(jobs)
    at_end, always = wants_usage(body)
    encoder = msgspec.json.Encoder()
    async with aclosing(run_jobs(frontend, jobs)) as events:
        async for event in events:
            tally.add(event)
            if _says_something(event, body):
                usage = tally.usage() if always else None
                yield encoder.encode(shape.chunk(event, usage))
    if at_end:
        yield encoder.encode(shape.usage_chunk(tally.usage()))


def _says_something(event: Event, body: SamplingFields) -> bool:
    delta = event.delta
    tokens = bool(delta.token_ids) and (delta.logprobs is not None or bool(body.return_token_ids))
    return bool(delta.text or delta.finish_reason or event.first or tokens)
