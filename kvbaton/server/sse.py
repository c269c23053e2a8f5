"""Server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Struct

from kvbaton.errors import RequestError
from kvbaton.server.bodies import REQUEST_ID, describe, error_body
from kvbaton.types import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()

MAX_BEHIND_S = 30.0
"""A reader of `send_events` that takes nothing for so long is left."""
LAST_WORDS_S = 2.0
"""For a client that is behind to make room for why its stream ends."""
DONE = b"[DONE]"
DATA = b"data:"
DONE_EVENT = b"data: [DONE]\n\n"
EVENTS = "text/event-stream"
HEADERS = {
    "Content-Type": f"{EVENTS}; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class _EventResponse(web.StreamResponse):
    """Its head leaves with the first event, in one write."""

    _send_headers_immediately = False  # as of `web.Response`


class EventStream:
    """An answer of server-sent events, begun with the first of them.

    Args:
        request: to answer.

    Attributes:
        held: events that leave with the next ones, or with the end.
        done: what it ends with if all is well.
        failed: makes an event of why it has not.
        error: why it has ended early; empty if it has not.
    """

    __slots__ = ("_chunks", "_request", "done", "error", "failed", "held", "response")

    def __init__(self, request: web.Request) -> None:
        self.response = _EventResponse(headers=HEADERS)
        self.held = b""
        self.done = DONE_EVENT
        self.failed: Callable[[web.Request, RequestError], bytes] = error_event
        self.error = ""
        self._request = request
        self._chunks: asyncio.Transport | None = None

    def is_free(self) -> bool:
        """Whether the answer has begun, and its reader keeps up: `write` may be called."""
        chunks = self._chunks
        return chunks is not None and not chunks.get_write_buffer_size() and not chunks.is_closing()

    def write(self, events: bytes) -> None:
        """Send whole events at once, in one write.

        Every token is one. So they go to the socket itself, which takes half the time of aiohttp's
        writer: that one has the first, and those for which there is no room.
        """
        assert self._chunks is not None, "is_free() was asked"
        self._chunks.write(b"%x\r\n%b\r\n" % (len(events), events))

    async def send(self, events: bytes) -> None:
        """Send whole events, in one write; waits for a reader that is far behind."""
        if self.is_free():
            self.write(events)
            return
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(events)
        if self.response.headers.get("Transfer-Encoding") == "chunked":
            self._chunks = self._request.transport


def error_event(request: web.Request, error: RequestError) -> bytes:
    """What ends a stream early, as OpenAI's API has it."""
    return b"data: %b\n\n" % error_body(request, error)


@asynccontextmanager
async def event_stream(request: web.Request, limit_s: float) -> AsyncIterator[EventStream]:
    """Answer with events.

    The answer begins with the first event, so that a request which fails before has its proper
    status. After that the stream ends with an event that tells of the failure.

    Args:
        request: to answer.
        limit_s: seconds for all of it.

    Raises:
        Exception: what the body raised, or `TimeoutError`, before anything was sent.
    """
    stream = EventStream(request)
    response = stream.response
    try:
        async with asyncio.timeout(limit_s):
            yield stream
            if not response.prepared:
                await response.prepare(request)
            held, stream.held = stream.held, b""
            await response.write_eof(held + stream.done)
    except Exception as error:
        if not response.prepared:
            raise
        stream.error = f"{type(error).__name__}: {error}"
        await _end_badly(request, stream, error)


async def send_events(
    request: web.Request, events: AsyncIterator[bytes], headers: Mapping[str, str] = HEADERS
) -> web.StreamResponse:
    """Answer with whole events, until there are no more or the reader is gone or stuck.

    While it is behind, nothing is asked of `events`: there is one of them in memory, and what the
    socket holds.

    Args:
        request: to answer.
        events: to send.
        headers: of the answer.
    """
    response = web.StreamResponse(headers=headers)
    try:
        await response.prepare(request)
        async for some in events:
            async with asyncio.timeout(MAX_BEHIND_S):
                await response.write(some)
        await response.write_eof()
    except ConnectionResetError:
        logger.debug("a reader of %s went away", request.path)
    except (TimeoutError, aiohttp.ClientError) as error:  # of the reader, or of where they are from
        logger.info("events of %s broken off: %r", request.path, error)
        if request.transport is not None:
            request.transport.abort()
    return response


def event(message: Struct) -> bytes:
    """A message as an event."""
    return b"data: %b\n\n" % _encoder.encode(message)


def named_event(kind: str, **fields: Any) -> bytes:
    """Fields and the type that they are of, as an event of that name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encoder.encode({"type": kind, **fields}))


async def _end_badly(request: web.Request, stream: EventStream, error: Exception) -> None:
    """Say why, if the client is still there and takes it in time; else hang up."""
    name, transport = request[REQUEST_ID], request.transport
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LAST_WORDS_S
    while transport is not None and _is_stuck(transport) and loop.time() < deadline:
        await asyncio.sleep(0.01)
    if transport is None or transport.is_closing():
        logger.info("request %s: the client went away", name)
    elif _is_stuck(transport):
        logger.info("request %s: the client takes no more", name)
        transport.abort()
    else:
        failure = describe(error)
        logger.info("request %s: ended by %s", name, failure.message)
        with contextlib.suppress(ConnectionResetError):  # it may go away at this very moment
            await stream.response.write(stream.held + stream.failed(request, failure))
            await stream.response.write_eof()


def _is_stuck(transport: asyncio.WriteTransport) -> bool:
    """Whether one more write would have to wait for the reader, perhaps for ever."""
    low, _ = transport.get_write_buffer_limits()
    return transport.get_write_buffer_size() > low


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event, which JSON has on one line; others may end lines by CRLF.

    Raises:
        msgspec.DecodeError: a line is longer than any of ours can be.
    """
    buffer, scanned = bytearray(), 0
    async for chunk in content.iter_any():
        buffer += chunk
        while (end := buffer.find(b"\n", scanned)) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            scanned = 0
            if line.startswith(DATA):
                yield line[len(DATA) :].strip()
        scanned = len(buffer)
        if scanned > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a line of more than {MAX_MESSAGE_BYTES} bytes")
