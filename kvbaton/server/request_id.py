"""``X-Request-Id``: honoured, cleaned, echoed."""

from __future__ import annotations

import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

HEADER = "X-Request-Id"
MAX_LENGTH = 128
REQUEST_ID = web.RequestKey("request_id", str)

_UNWANTED = re.compile(r"[^A-Za-z0-9._:@+=/-]")


def clean(request_id: str | None) -> str | None:
    """An id that is safe in logs, headers and names; None if nothing is left of it."""
    return _UNWANTED.sub("", request_id or "")[:MAX_LENGTH] or None


@web.middleware
async def request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id."""
    request[REQUEST_ID] = clean(request.headers.get(HEADER)) or uuid.uuid4().hex
    return await handler(request)


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal ``on_response_prepare``: also works for streams."""
    response.headers[HEADER] = request[REQUEST_ID]
