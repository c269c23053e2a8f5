"""The HTTP application (routes and middlewares over any source of tokens), and how to serve it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler
from typing_extensions import override

from kvbaton.engine.validate import INT32, check_ids
from kvbaton.errors import ConfigError, RequestError
from kvbaton.malloc import keep_freed_memory
from kvbaton.messages import openai
from kvbaton.server.auth import PROTECTED, check_key
from kvbaton.server.bodies import (
    REQUEST_ID,
    REQUEST_ID_HEADER,
    close_connection,
    echo_request_id,
    error_response,
    failure_response,
    json_response,
    read_body,
    request_id_of,
)
from kvbaton.server.chat import chat_completions, encode_chat
from kvbaton.server.completions import completions
from kvbaton.server.config import EndpointConfig
from kvbaton.server.frontend import FRONTEND, Frontend
from kvbaton.server.messages import count_tokens, messages
from kvbaton.server.network import TlsConfig
from kvbaton.server.openapi import contract, openapi
from kvbaton.server.responses import count_input_tokens, not_stored, responses
from kvbaton.server.tracing import ARRIVED, CLIENT_CLOSED_REQUEST
from kvbaton.server.validation import check_model, encode
from kvbaton.signals import STOP_SIGNALS
from kvbaton.version import __version__

logger = logging.getLogger(__name__)

YOUNG_OBJECTS = 20_000
"""Threshold of the garbage collector: objects allocated less freed before it looks for cycles."""
BACKLOG = 1024
ANSWER_S = 300.0
"""Seconds within which a client must have read an answer that is sent as a whole."""
RENEW_PERIOD_S = 10.0
"""Interval in seconds at which the files of the certificate are read again."""
FINISH_PERIOD_S = 0.02
"""Interval in seconds at which a stopping process checks whether its requests have ended."""
ENDING_S = 1.0
"""Seconds for requests to end after they were told to."""
TOLD_TWICE = 130
"""Exit status of a process that was stopped twice and did not wait for its requests."""
PREFLIGHT = "Access-Control-Request-Method"
PREFLIGHT_KEPT_S = 600
SHOWN = f"{REQUEST_ID_HEADER}, Request-Id, Retry-After, X-Should-Retry"
"""Headers of answers that OpenAI's and Anthropic's SDKs read, also in a page."""


def make_app(
    frontend: Frontend, extra_routes: Sequence[web.RouteDef] = (), *, text: bool = True
) -> web.Application:
    """Make the application of an endpoint.

    Args:
        frontend: What the handlers share.
        extra_routes: Routes of the owner (``/health``, ``/metrics``, ...). They get the same
            request ids, error bodies, limits and counters, and need an API key if their path is in
            `auth.PROTECTED`.
        text: Whether to add the routes for texts and tokens.
    """
    app = web.Application(
        client_max_size=frontend.config.max_body_bytes, middlewares=[endpoint_middleware]
    )
    app[FRONTEND] = frontend
    app.on_response_prepare.append(echo_request_id)
    if frontend.config.allowed_origins:
        app.middlewares.insert(0, answer_preflight)
        app.on_response_prepare.append(allow_origin)
    if frontend.tracing is not None:
        app.on_cleanup.append(frontend.tracing.close)
    if text:
        app.add_routes(
            [
                web.post("/v1/completions", completions),
                web.post("/v1/chat/completions", chat_completions),
                web.post("/v1/messages", messages),
                web.post("/v1/messages/count_tokens", count_tokens),
                web.post("/v1/responses", responses),
                web.post("/v1/responses/input_tokens", count_input_tokens),
                web.get("/v1/responses/{response_id}", not_stored),
                web.delete("/v1/responses/{response_id}", not_stored),
                web.get("/v1/models", models),
                web.get("/v1/models/{model:.+}", model),
                web.post("/tokenize", tokenize),
                web.post("/detokenize", detokenize),
            ]
        )
    app.add_routes([web.get("/version", version), web.get("/openapi.json", openapi)])
    app.add_routes(extra_routes)
    return app


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log, where bytes that are not HTTP (as scanners send) are not an exception."""

    @override
    def exception(self, msg: object, *args: object, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        if isinstance(error, HttpProcessingError):
            self.info("%s: %s", str(msg) % args, _reason(error))
        else:
            super().exception(msg, *args, **kwargs)


def _reason(error: HttpProcessingError) -> str:
    if isinstance(error, LineTooLong):  # its message has the line, which may hold a secret
        return f"a line of the request's head has more than {error.args[1]} bytes"
    return f"this is no HTTP/1.1: {' '.join(error.message.split())[:200]}"


class _Connection(RequestHandler):
    """A connection that answers malformed HTTP with our error format, and has a send deadline."""

    __slots__ = ()

    @override
    def handle_error(
        self,
        request: Any,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        answer = super().handle_error(request, status, exc, message)
        if isinstance(exc, HttpProcessingError):
            answer = error_response(request, RequestError(_reason(exc)))
            answer.force_close()
        return answer

    @override
    async def finish_response(
        self, request: Any, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; abort the connection if the client does not read it in `ANSWER_S`."""
        late = asyncio.get_running_loop().call_later(ANSWER_S, self._leave)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            late.cancel()

    def _leave(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Server(web.Server):
    @override
    def __call__(self) -> RequestHandler:
        made = super().__call__()
        made.__class__ = _Connection  # aiohttp has no way to name the class to make
        return made


class _Runner(web.AppRunner):
    @override
    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        made.__class__ = _Server
        return made


async def serve_on(
    listener: socket.socket, app: web.Application, config: EndpointConfig
) -> web.AppRunner:
    """Serve an application on a listening socket, which the runner then owns.

    A handler is cancelled when its client disconnects. The runner's ``cleanup`` waits for open
    requests up to `config.shutdown_timeout_s`, then ends the rest with an error. Answers that begin
    meanwhile close their connections, and say so: clients do not use these for another request.
    """
    stopping = False

    async def close_if_stopping(request: web.Request, response: web.StreamResponse) -> None:
        if stopping:
            await close_connection(request, response)

    async def finish(app: web.Application) -> None:
        nonlocal stopping
        stopping = True
        if (frontend := app.get(FRONTEND)) is None:
            return
        deadline = time.monotonic() + config.shutdown_timeout_s
        while frontend.metrics.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(FINISH_PERIOD_S)
        frontend.source.stop()

    async def renewing(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(renew_certificate(config.tls), name="renewal of the certificate")
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    app.on_response_prepare.append(close_if_stopping)
    app.on_shutdown.append(finish)
    tls = config.tls.server()
    if tls is not None:
        app.cleanup_ctx.append(renewing)
    runner = _Runner(
        app,
        handler_cancellation=True,
        # aiohttp waits for this time twice: before it cancels a handler, and after.
        shutdown_timeout=ENDING_S,
        keepalive_timeout=config.timeout_keep_alive_s,
        access_log=None,
        auto_decompress=False,  # `read_body` decompresses
        logger=ServerLog(logger),
    )
    await runner.setup()
    # asyncio accepts up to `backlog` connections at once. With 1 the rest is left to other workers;
    # and if file descriptors run out, asyncio schedules one retry and not one per connection.
    await web.SockSite(runner, listener, ssl_context=tls, backlog=1).start()
    listener.listen(BACKLOG)
    return runner


async def renew_certificate(tls: TlsConfig) -> None:
    """Take over changes of the certificate's files, until cancelled."""
    told = ""
    while True:
        await asyncio.sleep(RENEW_PERIOD_S)
        try:
            if tls.renew():
                logger.info("the certificate was renewed from %s", tls.ssl_certfile)
            told = ""
        except ConfigError as error:
            if str(error) != told:
                logger.error("the certificate is not renewed, trying on: %s", error)
            told = str(error)


def freeze_startup() -> None:
    """Tune memory management once start-up is over.

    Objects made until now are excluded from garbage collection, and collections become rare because
    requests leave no cycles. Freed memory is kept for the next requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    keep_freed_memory()


def stop_requested() -> asyncio.Event:
    """Return an event that `STOP_SIGNALS` set; a Ctrl-C after that ends the process at once.

    A second SIGTERM does not: systemd and Slurm send it to a whole process group, and the leader of
    the group then sends it again.
    """
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set() and number == signal.SIGINT:
            logger.warning("told to stop twice: not waiting for requests")
            os._exit(TOLD_TWICE)
        stop.set()

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


def end_when_told_again() -> None:
    """Handle signals as after the first of `stop_requested`, without the loop, which closes soon.

    A closing loop closes its pipe before it removes its signal handlers, which write to that pipe:
    a signal in between would cause a traceback and have no effect.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(TOLD_TWICE)

    for number in STOP_SIGNALS:
        if asyncio.get_running_loop().remove_signal_handler(number):
            signal.signal(number, end if number == signal.SIGINT else signal.SIG_IGN)


@web.middleware
async def endpoint_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Wraps every handler: request id, API key, failures as JSON, counters.

    It is one middleware, because each one adds a frame that every token passes.
    """
    request[ARRIVED] = time.monotonic()
    request[REQUEST_ID] = request_id_of(request)
    metrics = request.app[FRONTEND].metrics
    resource = request.match_info.route.resource
    path = "unmatched" if resource is None else resource.canonical
    status = CLIENT_CLOSED_REQUEST
    metrics.in_flight += 1
    try:
        response: web.StreamResponse
        try:
            check_key(request)
            response = await handler(request)
        except Exception as error:
            response = failure_response(request, error)
        status = response.status
    finally:
        metrics.in_flight -= 1
        method = "other" if resource is None else request.method
        metrics.requests.counts[method, path, str(status)] += 1
    return response


# --- requests from web pages of other origins (CORS, as the Fetch standard specifies it) ---


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's preflight request, which carries no API key."""
    if request.method == "OPTIONS" and PREFLIGHT in request.headers:
        return web.Response(status=204)
    return await handler(request)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Signal ``on_response_prepare``: add headers that let an allowed origin read the answer.

    Only on `PROTECTED` paths, where clients ask for text: operators' paths are not for web pages.
    """
    origin, allowed = request.headers.get("Origin"), request.app[FRONTEND].config.allowed_origins
    if not request.path.startswith(PROTECTED):
        return
    response.headers.add("Vary", "Origin")
    if origin is None or not {origin, "*"} & set(allowed):
        return
    headers = {"Allow-Origin": origin, "Expose-Headers": SHOWN}
    if PREFLIGHT in request.headers:
        headers |= {
            "Allow-Methods": "GET, POST",
            "Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Max-Age": str(PREFLIGHT_KEPT_S),
        }
    for name, value in headers.items():
        response.headers[f"Access-Control-{name}"] = value


# --- answers ---


@contract(answer=openai.ModelList)
async def models(request: web.Request) -> web.Response:
    """List the names of the model."""
    frontend = request.app[FRONTEND]
    names = (frontend.config.model_name, *frontend.config.aliases)
    cards = [_card(frontend, name) for name in names]
    return json_response(openai.ModelList(data=cards, first_id=names[0], last_id=names[-1]))


@contract(answer=openai.ModelCard)
async def model(request: web.Request) -> web.Response:
    """Describe the model."""
    frontend = request.app[FRONTEND]
    name = request.match_info["model"]
    check_model(frontend, name)
    return json_response(_card(frontend, name))


def _card(frontend: Frontend, name: str) -> openai.ModelCard:
    return openai.ModelCard(
        id=name,
        created=frontend.created,
        max_model_len=frontend.facts().max_model_len,
        display_name=name,
        created_at=datetime.fromtimestamp(frontend.created, UTC),
    )


async def version(request: web.Request) -> web.Response:
    """Version of kvbaton."""
    return json_response({"version": __version__})


@contract(body=openai.TokenizeRequest, answer=openai.TokenizeResponse)
async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or a conversation."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, openai.TokenizeRequest)
    check_model(frontend, body.model)
    if body.prompt is not None and body.messages is not None:
        raise RequestError("give prompt or messages, not both", param="messages")
    if body.prompt is None and body.messages is None:
        raise RequestError("give prompt, a text, or messages, a conversation", param="prompt")
    if body.prompt is None:
        ids, _ = await encode_chat(frontend, body, request)
    else:
        special = body.add_special_tokens is not False
        ids = await encode(frontend, body.prompt, add_special_tokens=special)
    texts = None
    if body.return_token_strs:  # takes seconds for a long text
        texts = await asyncio.to_thread(lambda: list(map(frontend.tokenizer.token_text, ids)))
    return json_response(
        openai.TokenizeResponse(
            count=len(ids),
            max_model_len=frontend.facts().max_model_len,
            tokens=ids,
            token_strs=texts,
        )
    )


@contract(body=openai.DetokenizeRequest, answer=openai.DetokenizeResponse)
async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids, special tokens included."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, openai.DetokenizeRequest)
    check_model(frontend, body.model)
    check_ids("tokens", body.tokens, frontend.facts().vocab_size, most=INT32)
    decode = frontend.tokenizer.decode  # takes 0.1 s and more for a million ids
    text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
    return json_response(openai.DetokenizeResponse(prompt=text))
