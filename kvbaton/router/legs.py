"""One leg over HTTP: send the request to a node, pass on what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from kvbaton.messages.engine import Output
from kvbaton.messages.openai import ErrorBody
from kvbaton.router.actions import Leg, LegError, StartLeg
from kvbaton.types import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

DONE = b"[DONE]"
DATA = b"data:"
CONNECT_TIMEOUT_S = 3.0

_encoder = msgspec.json.Encoder()
_output = msgspec.json.Decoder(Output)
_error = msgspec.json.Decoder(ErrorBody)


@dataclass(frozen=True)
class LegOutput:
    """A leg said something.

    Attributes:
        at: when it was read, on the event loop's clock.
    """

    leg: Leg
    output: Output
    at: float


@dataclass(frozen=True)
class LegFailed:
    """A leg broke or was refused.

    Attributes:
        unreachable: nobody listens at the node's address.
    """

    leg: Leg
    error: LegError
    unreachable: bool = False


@dataclass(frozen=True)
class LegEnded:
    """A leg's stream ended with ``[DONE]``."""

    leg: Leg


LegEvent = LegOutput | LegFailed | LegEnded


async def run_leg(
    session: aiohttp.ClientSession,
    start: StartLeg,
    request_id: str,
    put: Callable[[LegEvent], None],
) -> None:
    """Send a leg's request and report all it leads to, failures included.

    Cancelling the task closes the connection, which cancels the request at the node.
    """
    leg = start.leg
    try:
        await _converse(session, start, request_id, put)
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        put(LegFailed(leg, LegError(f"can't connect: {error}"), unreachable=refused))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        put(LegFailed(leg, LegError(f"connection lost: {type(error).__name__}: {error}")))
    except msgspec.DecodeError as error:
        put(LegFailed(leg, LegError(f"it sent something that is no output: {error}")))
    except Exception as error:
        logger.exception("unforeseen failure of a leg to %s", leg.node.node_id)
        put(LegFailed(leg, LegError(f"the router failed: {error!r}")))


async def _converse(
    session: aiohttp.ClientSession,
    start: StartLeg,
    request_id: str,
    put: Callable[[LegEvent], None],
) -> None:
    leg = start.leg
    response = await session.post(
        f"{leg.node.url.rstrip('/')}/inference/v1/generate",
        data=_encoder.encode(start.body),
        headers={"Content-Type": "application/json", "X-Request-Id": request_id},
    )
    try:
        if response.status == 200:
            await _listen(leg, response, put)
        else:
            put(LegFailed(leg, read_error(response.status, await _bounded(response))))
    except BaseException:
        response.close()
        raise
    response.release()


async def _listen(
    leg: Leg, response: aiohttp.ClientResponse, put: Callable[[LegEvent], None]
) -> None:
    clock = asyncio.get_running_loop().time
    ended = False
    async for data in read_events(response.content):
        if ended:
            continue  # read on to the end, so that the connection can be used again
        if data == DONE:
            ended = True
            put(LegEnded(leg))
            continue
        try:
            put(LegOutput(leg, _output.decode(data), clock()))
        except msgspec.ValidationError:
            ended = True
            put(LegFailed(leg, LegError(_error.decode(data).error.message)))
    if not ended:
        put(LegFailed(leg, LegError("its stream was cut off")))


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


async def _bounded(response: aiohttp.ClientResponse, limit: int = 1 << 16) -> bytes:
    return await response.content.read(limit)


def read_error(status: int, body: bytes) -> LegError:
    """What a node's error answer says."""
    try:
        info = _error.decode(body).error
    except msgspec.DecodeError:
        return LegError(f"it answered HTTP {status}", status)
    code = info.code if isinstance(info.code, str) else None
    return LegError(info.message, status, info.param, code)
