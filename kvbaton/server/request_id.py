"""``X-Request-Id``: honoured, cleaned, echoed."""

from __future__ import annotations

import random
import re

from aiohttp import web

HEADER = "X-Request-Id"
MAX_LENGTH = 128
REQUEST_ID = web.RequestKey("request_id", str)

_UNWANTED = re.compile(r"[^A-Za-z0-9._:@+=/-]")


def clean(request_id: str | None) -> str | None:
    """An id that is safe in logs, headers and names; None if nothing is left of it."""
    return _UNWANTED.sub("", request_id or "")[:MAX_LENGTH] or None


def request_id_of(request: web.Request) -> str:
    """The id that a request brings, or a new one."""
    named = request.headers.get(HEADER)
    return (clean(named) if named else None) or f"{random.getrandbits(128):032x}"


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal ``on_response_prepare``: also works for streams."""
    response.headers[HEADER] = request[REQUEST_ID]
