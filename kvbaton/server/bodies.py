"""JSON bodies of requests and answers, errors in OpenAI's or Anthropic's format, request ids."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import ParamSpec, TypeVar

import msgspec
from aiohttp import web

from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.messages.anthropic import MessagesError, MessagesErrorInfo
from kvbaton.messages.engine import ERROR_STATUSES
from kvbaton.messages.openai import ErrorBody, ErrorInfo
from kvbaton.server.auth import tenant
from kvbaton.server.frontend import FRONTEND

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
MAX_REQUEST_ID = 128
REQUEST_ID = web.RequestKey("request_id", str)
QUICK_BODY = 1 << 15
"""Bytes of a body up to which any processing of it takes a few ms at most."""
_QUICK = web.RequestKey("quick", bool)
LONG_BODY = 1 << 20
"""Bytes of a body up to which it does not count towards ``max_bodies_bytes``."""
RETRY_AFTER_S = 1.0
WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""``wbits`` of `zlib`, by Content-Encoding."""
PROBES = ("/health", "/live", "/ping")
"""Paths that are asked each second, also while the answer is an error; not logged each time."""
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES = {**TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}

_UNWANTED = re.compile(r"[^A-Za-z0-9._:@+=/-]")
_LOCATION = re.compile(r" - at (?:`[^`$]*` in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")

P = ParamSpec("P")
T = TypeVar("T")


def clean(request_id: str | None) -> str | None:
    """Remove unsafe characters from a request id (for logs and headers); None if none is left."""
    return _UNWANTED.sub("", request_id or "")[:MAX_REQUEST_ID] or None


def flag_of(request: web.Request, name: str) -> bool:
    """Value of a boolean query parameter; False if it is left out.

    Raises:
        RequestError: It is neither ``true`` nor ``false``.
    """
    value = request.query.get(name, "false")
    if value not in ("true", "false"):
        raise RequestError(f"must be true or false, not {value[:20]!r}", param=name)
    return value == "true"


def request_id_of(request: web.Request) -> str:
    """The request id from the header, or a new one."""
    named = request.headers.get(REQUEST_ID_HEADER)
    return (clean(named) if named else None) or f"{random.getrandbits(128):032x}"


def speaks_anthropic(request: web.Request) -> bool:
    """Whether the client expects errors and streams in the format of Anthropic's API."""
    return request.path.startswith("/v1/messages")


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal ``on_response_prepare``, which streams send, too: add the request id as a header."""
    # Requests that aiohttp itself refuses (an unknown Expect) have not passed our middleware.
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID) or request_id_of(request)
    if speaks_anthropic(request):
        response.headers["Request-Id"] = response.headers[REQUEST_ID_HEADER]


async def close_connection(request: web.Request, response: web.StreamResponse) -> None:
    """Signal ``on_response_prepare``: close the connection after this answer.

    An application that is replaced by another one needs this: connections whose TLS handshake ends
    after its open connections were closed would otherwise stay with it.
    """
    response.headers["Connection"] = "close"
    response.force_close()


def malformed(error: Exception) -> RequestError:
    """Turn msgspec's error about a body into a `RequestError` that names the field."""
    text = str(error)
    location = _LOCATION.search(text)
    where = location.group(1) if location else ""
    if missing := _MISSING.search(text):
        where = f"{where}.{missing.group(1)}".lstrip(".")
    reason = _LOCATION.sub("", text)
    if isinstance(error, msgspec.ValidationError):
        if reason.startswith("Invalid"):
            reason += "; GET /openapi.json tells what is allowed"
        return RequestError(f"{where}: {reason}" if where else reason, param=where or None)
    return RequestError(f"the body is not valid JSON: {reason}")


def describe(error: BaseException) -> RequestError:
    """Turn any exception into the error for the client; 500 only for unforeseen ones."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDeadError):
        return RequestError(f"the engine is down: {error}", status=503, code="engine_dead")
    if isinstance(error, TimeoutError):
        return RequestError("the request took longer than its timeout", status=504, code="timeout")
    if isinstance(error, RecursionError):  # it could be decoded, but not be encoded again
        return RequestError("the request is nested too deep")
    if isinstance(error, web.HTTPException):
        text = f"{error.reason}: {error.text}" if error.status == 413 else error.reason
        return RequestError(text, status=error.status)
    logger.error("unforeseen error while serving a request", exc_info=error)
    told = "internal error; the server's log has the details"
    return RequestError(told, status=500, code="internal_error")


def error_body(request: web.Request, error: RequestError) -> bytes:
    """The JSON of an error answer or event."""
    anthropic = speaks_anthropic(request)
    kind = (ANTHROPIC_TYPES if anthropic else TYPES).get(error.status)
    if kind is None:
        failed = "api_error" if anthropic else "server_error"
        kind = "invalid_request_error" if error.status < 500 else failed
    message, param = error.message, error.param
    if param and param not in message:  # most clients show only the message
        field = param.rpartition(".")[2]
        message = f"{param}: {message.removeprefix(f'{field}: ')}"
    if anthropic:
        told = MessagesErrorInfo(type=kind, message=message)
        return msgspec.json.encode(
            MessagesError(error=told, request_id=request.get(REQUEST_ID, ""))
        )
    info = ErrorInfo(message=message, type=kind, param=param, code=error.code)
    return msgspec.json.encode(ErrorBody(error=info))


def error_response(request: web.Request, error: RequestError) -> web.Response:
    """The answer for a request that fails before anything was sent."""
    headers = {}
    if error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s or RETRY_AFTER_S))
    if error.code in ERROR_STATUSES:  # OpenAI's and Anthropic's SDKs would retry a 500
        headers["X-Should-Retry"] = "false"
    if error.status == HTTPStatus.UNAUTHORIZED:
        by_password = error.code == "password_required"
        headers["WWW-Authenticate"] = 'Basic realm="kvbaton"' if by_password else "Bearer"
    return web.Response(
        status=error.status,
        body=error_body(request, error),
        content_type="application/json",
        headers=headers,
    )


def failure_response(request: web.Request, error: Exception) -> web.Response:
    """The answer for an exception of a handler."""
    failure = describe(error)
    if isinstance(error, web.HTTPNotFound | web.HTTPMethodNotAllowed):
        asked = f"{request.method} {request.rel_url.raw_path[:100]}".encode("ascii", "replace")
        failure = RequestError(
            f"{asked.decode()} is not served here; GET /openapi.json tells what is",
            status=error.status,
        )
    level = logging.DEBUG if request.path in PROBES else logging.INFO
    logger.log(level, "request %s: %d %s", request[REQUEST_ID], failure.status, failure.message)
    response = error_response(request, failure)
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = error.headers["Allow"]
    return response


async def read_body(request: web.Request, kind: type[T]) -> T:
    """Read the request's JSON body into a struct.

    Raises:
        RequestError: It is not JSON, has a field of a wrong type (named), or does not arrive.
        web.HTTPRequestEntityTooLarge: It exceeds the limit, perhaps only once decompressed.
    """
    data, config = await read_bytes(request), request.app[FRONTEND].config
    if encoding := request.headers.get("Content-Encoding"):
        data = await asyncio.to_thread(unpacked, data, encoding, config.max_body_bytes)
    request[_QUICK] = len(data) <= QUICK_BODY
    try:
        return msgspec.json.decode(data.removeprefix(BOM_UTF8), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise malformed(error) from error


async def made_of_body(
    request: web.Request | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function on a body; for a long body in a thread, so that other requests go on."""
    if request is None or request[_QUICK]:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def unpacked(data: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body.

    aiohttp would decompress it as it arrives, without a limit and before the API key is checked.

    Raises:
        RequestError: The encoding is unknown, or the body is not encoded that way.
        web.HTTPRequestEntityTooLarge: The result is longer than `limit` bytes.
    """
    if encoding.lower() == "identity":
        return data
    if encoding.lower() not in WINDOW_BITS:
        problem = f"Content-Encoding must be {' or '.join(WINDOW_BITS)}, not {encoding[:64]!r}"
        raise RequestError(problem, status=415)
    packer = zlib.decompressobj(WINDOW_BITS[encoding.lower()])
    try:
        found = packer.decompress(data, limit + 1)
    except zlib.error as error:
        raise RequestError(f"the body is not encoded as its headers say: {error}") from error
    if len(found) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, len(found))
    if not packer.eof:
        raise RequestError("the body is not encoded as its headers say: its end is missing")
    if packer.unused_data:  # perhaps further pieces: many small ones would take very long
        raise RequestError("the body must be compressed in one piece: something follows its end")
    return found


@asynccontextmanager
async def _room_for_body(request: web.Request) -> AsyncIterator[None]:
    """Wait until a long body fits into ``max_bodies_bytes``, of which a tenant may have half.

    Raises:
        RequestError: 429, if other bodies take too long.
    """
    frontend = request.app[FRONTEND]
    held, config, who = frontend.long_bodies, frontend.config, tenant(request)
    length = request.content_length or config.max_body_bytes
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while max(held.total(), 2 * held[who] if who else 0) + length > config.max_bodies_bytes:
                frontend.body_ended.clear()
                await frontend.body_ended.wait()
    except TimeoutError:
        problem = f"too many bodies of more than {LONG_BODY >> 20} MiB are on their way"
        raise RequestError(f"{problem}; retry later", status=429, code="overloaded") from None
    held[who] += length
    try:
        yield
    finally:
        held[who] -= length
        if not held[who]:
            del held[who]
        frontend.body_ended.set()


async def _read_beyond(request: web.Request, end: int, body: bytearray) -> bool:
    """Read a body until its end, or until it is longer than `end` bytes; return whether it is."""
    while len(body) <= end:
        if not (chunk := await request.content.readany()):
            return False
        body += chunk
    return True


async def read_bytes(request: web.Request) -> bytes:
    """Read the request's body as it was sent.

    Raises:
        RequestError: It does not arrive in time, or is not encoded as its headers say.
        web.HTTPRequestEntityTooLarge: It is longer than the limit.
    """
    config = request.app[FRONTEND].config
    limit, timeout = config.max_body_bytes, config.body_timeout_s
    if (request.content_length or 0) > limit:  # not worth waiting for
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
    try:
        if request.content.is_eof():  # mostly the body came with the head: nothing to wait for
            data = request.content.read_nowait()
            if len(data) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, len(data))
            return data
        body = bytearray()
        async with asyncio.timeout(timeout):
            is_long = await _read_beyond(request, LONG_BODY, body)
        if is_long:  # a body only counts from here on, as its sender may be very slow
            async with _room_for_body(request), asyncio.timeout(timeout):
                if await _read_beyond(request, limit, body):
                    raise web.HTTPRequestEntityTooLarge(limit, len(body))
        return bytes(body)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {timeout} s", status=408) from None
    except web.RequestPayloadError as error:
        request.content.feed_eof()  # else aiohttp reads on to discard the rest, and fails at it
        request.protocol.close()  # after the answer: where the next request begins is unknown
        reason = " ".join(str(error).split()).removeprefix("400, message: ")
        raise RequestError(f"the body is not encoded as its headers say: {reason}") from error


def json_response(value: object, status: int = 200) -> web.Response:
    """A JSON answer of any value that msgspec encodes."""
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )
