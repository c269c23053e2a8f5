"""How events become an answer, whole or streamed: what both generating endpoints share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol

from aiohttp import web
from msgspec import Struct

from kvbaton.messages.openai import SamplingFields, Usage
from kvbaton.server.body import json_response
from kvbaton.server.config import Frontend
from kvbaton.server.prompt_request import Event, PromptRequest, fold, run_prompts
from kvbaton.server.sse import event, event_stream
from kvbaton.server.usage import UsageCounter, wants_usage


class ResponseFormatter(Protocol):
    """Formats the events of one endpoint."""

    def chunk(self, event: Event, usage: Usage | None) -> bytes:
        """One server-sent event of a stream."""
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
    prompts: Sequence[PromptRequest],
    formatter: ResponseFormatter,
) -> web.StreamResponse:
    """Run the prompts and answer.

    A stream has one chunk per event, also where a token adds no text, as vLLM's: who measures by
    the chunks counts every token.

    Raises:
        RequestError, EngineDeadError: nothing was sent yet and it can't be served.
        TimeoutError: nothing was sent yet and the deadline is long over.
    """
    limit_s = prompts[0].request.deadline_s + frontend.config.deadline_grace_s
    usage = UsageCounter(prompts)
    events = run_prompts(frontend, prompts)
    if not body.stream:
        async with asyncio.timeout(limit_s), aclosing(events):
            got = [new async for new in events]
        for new in got:
            usage.add(new)
        return json_response(formatter.whole(fold(got), usage.usage()))
    at_end, always = wants_usage(body)
    async with event_stream(request, limit_s) as stream, aclosing(events):
        async for new in events:
            usage.add(new)
            await stream.send(formatter.chunk(new, usage.usage() if always else None))
        if at_end:
            await stream.send(event(formatter.usage_chunk(usage.usage())))
    return stream.response
