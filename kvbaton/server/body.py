"""Reading and answering JSON."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web

from kvbaton.errors import RequestError
from kvbaton.server.config import FRONTEND
from kvbaton.server.errors import malformed

T = TypeVar("T")


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The request's JSON body as a struct.

    Raises:
        RequestError: it is no JSON, has a field of a wrong type (named), or does not arrive.
        web.HTTPRequestEntityTooLarge: it is longer than the limit.
    """
    timeout = request.app[FRONTEND].config.body_timeout_s
    try:
        data = await asyncio.wait_for(request.read(), timeout)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {timeout} s", status=408) from None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise malformed(error) from error


def json_response(value: object, status: int = 200) -> web.Response:
    """Anything that msgspec encodes, as an answer."""
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )
