"""Server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import aiohttp
import msgspec
from aiohttp import web

from kvbaton.server.errors import describe, error_body
from kvbaton.server.request_id import REQUEST_ID
from kvbaton.types import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

DONE = b"[DONE]"
DATA = b"data:"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def send_events(
    request: web.Request, messages: AsyncGenerator[bytes], limit_s: float
) -> web.StreamResponse:
    """Send JSON messages as events, then ``[DONE]``; closes `messages` in any case.

    The answer begins with the first message, so that a request which fails before has its proper
    status. A failure after that is sent as an error event, and the stream ends without ``[DONE]``.
    Writing waits for a slow reader.

    Args:
        request: to answer.
        messages: JSON, one per event.
        limit_s: seconds for all of it.

    Raises:
        Exception: what `messages` raised, or `TimeoutError`, before anything was sent.
    """
    response = web.StreamResponse(headers=HEADERS)
    try:
        async with asyncio.timeout(limit_s), aclosing(messages):
            async for message in messages:
                if not response.prepared:
                    await response.prepare(request)
                await _send(response, message)
            if not response.prepared:
                await response.prepare(request)
            await _send(response, DONE)
            await response.write_eof()
    except Exception as error:
        if not response.prepared:
            raise
        await _end_badly(request, response, error)
    return response


async def _send(response: web.StreamResponse, message: bytes) -> None:
    await response.write(b"data: " + message + b"\n\n")


async def _end_badly(request: web.Request, response: web.StreamResponse, error: Exception) -> None:
    """Say why, if the client is still there and takes it; else hang up."""
    name, transport = request[REQUEST_ID], request.transport
    if transport is None or transport.is_closing():
        logger.info("request %s: the client went away", name)
    elif _is_stuck(transport):
        logger.info("request %s: the client takes no more", name)
        transport.abort()
    else:
        failure = describe(error)
        logger.info("request %s: ended by %s", name, failure.message)
        with contextlib.suppress(ConnectionResetError):  # it may go away at this very moment
            await _send(response, error_body(failure))
            await response.write_eof()


def _is_stuck(transport: asyncio.WriteTransport) -> bool:
    """Whether one more write would have to wait for the reader, perhaps for ever."""
    low, _ = transport.get_write_buffer_limits()
    return transport.get_write_buffer_size() > low


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event.

    Raises:
        msgspec.DecodeError: an event is longer than any of ours can be.
    """
    buffer, scanned = bytearray(), 0
    async for chunk in content.iter_any():
        buffer += chunk
        while (end := buffer.find(b"\n\n", max(scanned - 1, 0))) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + 2]
            scanned = 0
            if event.startswith(DATA):
                yield event[len(DATA) :].strip()
        scanned = len(buffer)
        if scanned > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"an event of more than {MAX_MESSAGE_BYTES} bytes")
