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
"""Seconds after which `send_events` gives up on a client that reads nothing."""
LAST_WORDS_S = 2.0
"""Seconds in which a client that is behind must make room for the error that ends its stream."""
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
    """A response whose head is sent with the first event, in one write."""

    _send_headers_immediately = False  # as in `web.Response`


class EventStream:
    """An answer of server-sent events, which begins with the first event.

    Args:
        request: Request to answer.

    Attributes:
        response: The answer.
        held: Events to be sent with the end.
        done: End of a stream without an error.
        failed: Makes the events that end a stream with an error.
        error: Why the stream ended early; empty if it did not.
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
        """Whether the answer has begun and its client keeps up, so that `write` may be called."""
        chunks = self._chunks
        return chunks is not None and not chunks.get_write_buffer_size() and not chunks.is_closing()

    def write(self, events: bytes) -> None:
        """Send whole events at once, in one write.

        Each token is an event, so events go directly to the transport, which takes half the time of
        aiohttp's writer. That writer sends the first event, and those that have to wait for room.
        """
        assert self._chunks is not None, "is_free() was asked"
        self._chunks.write(b"%x\r\n%b\r\n" % (len(events), events))

    async def send(self, events: bytes) -> None:
        """Send whole events in one write; wait for a client that is far behind."""
        if self.is_free():
            self.write(events)
            return
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(events)
        if self.response.headers.get("Transfer-Encoding") == "chunked":
            self._chunks = self._request.transport


def error_event(request: web.Request, error: RequestError) -> bytes:
    """The event that ends a stream early, in the format of OpenAI's API."""
    return b"data: %b\n\n" % error_body(request, error)


@asynccontextmanager
async def event_stream(request: web.Request, limit_s: float) -> AsyncIterator[EventStream]:
    """Answer with server-sent events.

    The answer begins with the first event, so a request that fails before gets the status of its
    error. After that a failure ends the stream with an error event.

    Args:
        request: Request to answer.
        limit_s: Maximum seconds of the whole answer.

    Raises:
        Exception: Exception of the body, or `TimeoutError`, before anything was sent.
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
    """Answer with whole events, until there are no more or the client is gone or stuck.

    While the client is behind, `events` is not advanced: one event is in memory, beside what the
    socket buffers.

    Args:
        request: Request to answer.
        events: Events to send.
        headers: Headers of the answer.
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
    except (TimeoutError, aiohttp.ClientError) as error:  # of the client, or of the events' source
        logger.info("events of %s broken off: %r", request.path, error)
        if request.transport is not None:
            request.transport.abort()
    return response


def event(message: Struct) -> bytes:
    """Encode a message as an event."""
    return b"data: %b\n\n" % _encoder.encode(message)


def named_event(kind: str, **fields: Any) -> bytes:
    """Encode fields as a named event, with its name also as the field ``type``."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encoder.encode({"type": kind, **fields}))


async def _end_badly(request: web.Request, stream: EventStream, error: Exception) -> None:
    """Send the error if the client is still there and reads it in time; else abort."""
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
        with contextlib.suppress(ConnectionResetError):  # the client may go away meanwhile
            await stream.response.write(stream.held + stream.failed(request, failure))
            await stream.response.write_eof()


def _is_stuck(transport: asyncio.WriteTransport) -> bool:
    """Whether one more write would have to wait for the client, perhaps for ever."""
    low, _ = transport.get_write_buffer_limits()
    return transport.get_write_buffer_size() > low


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event; it is JSON on one line, which may end in CRLF.

    Raises:
        msgspec.DecodeError: A line is longer than `MAX_MESSAGE_BYTES`.
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
