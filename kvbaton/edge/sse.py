"""Server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from kvbaton.edge.errors import describe, error_body
from kvbaton.edge.request_id import REQUEST_ID

logger = logging.getLogger(__name__)

DONE = b"[DONE]"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def send_events(request: web.Request, messages: AsyncGenerator[bytes]) -> web.StreamResponse:
    """Send JSON messages as events, then ``[DONE]``; closes `messages` in any case.

    The answer begins with the first message, so that a request which fails before has its proper
    status. A failure after that is sent as an error event, and the stream ends without ``[DONE]``.
    Writing waits for a slow reader.
    """
    response = web.StreamResponse(headers=HEADERS)
    try:
        async with aclosing(messages):
            async for message in messages:
                if not response.prepared:
                    await response.prepare(request)
                await _send(response, message)
        if not response.prepared:
            await response.prepare(request)
        await _send(response, DONE)
    except ConnectionResetError:
        logger.info("request %s: the client went away", request[REQUEST_ID])
        return response
    except Exception as error:
        if not response.prepared:
            raise
        await _send_error(request, response, error)
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, message: bytes) -> None:
    await response.write(b"data: " + message + b"\n\n")


async def _send_error(request: web.Request, response: web.StreamResponse, error: Exception) -> None:
    failure = describe(error)
    logger.info("request %s: ended by %s", request[REQUEST_ID], failure.message)
    await _send(response, error_body(failure))
