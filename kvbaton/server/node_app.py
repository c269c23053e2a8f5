"""A node's HTTP face: the endpoint over its engine, and what is only a node's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import generate_latest

from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.server.app import make_app
from kvbaton.server.auth import require_operator
from kvbaton.server.body import json_response
from kvbaton.server.config import FRONTEND, EdgeConfig, Frontend
from kvbaton.server.errors import error_response
from kvbaton.server.generate import generate
from kvbaton.server.metrics import HttpMetrics, exposition
from kvbaton.server.node_client import NodeClient
from kvbaton.server.node_metrics import CoreCollector, split_name
from kvbaton.server.openapi import contract
from kvbaton.server.source import ModelFacts
from kvbaton.server.transfer_params import KvTransferParams, parse_transfer
from kvbaton.text.tokenizer import Tokenizer

CLIENT = web.AppKey("client", NodeClient)
Exposition = Callable[[], Awaitable[bytes]]
EXPOSITION: web.AppKey[Exposition] = web.AppKey("exposition")
"""What ``/metrics`` shows, in Prometheus' text format."""

ALARMS = ("kvbaton_unhealthy", "kvbaton_ledger_imbalance")
"""Gauges that make a node unhealthy while they are not 0."""

METRICS_PATIENCE_S = 1.0
"""A scrape waits this long for the engine, which answers between two steps."""


def make_node_app(
    client: NodeClient,
    tokenizer: Tokenizer,
    config: EdgeConfig,
    forward: Handler | None = None,
) -> web.Application:
    """Everything that a node answers.

    Args:
        client: its engine, already up.
        tokenizer: the model's.
        config: settings of the endpoint.
        forward: in a worker of a node, what passes requests on to the one that knows all of it.
    """
    frontend = Frontend(
        source=client,
        tokenizer=tokenizer,
        config=config,
        facts=lambda: node_facts(client),
        transfer=parse_transfer,
        transfer_type=KvTransferParams,
        metrics=HttpMetrics(latencies=False),
    )
    app = make_app(frontend, [web.post("/inference/v1/generate", generate), *node_routes(forward)])
    attach_client(app, client, forward)
    return app


def attach_client(app: web.Application, client: NodeClient, forward: Handler | None) -> None:
    """Let the handlers of `node_routes` find the engine, and ``/metrics`` show what it counts."""
    app[CLIENT] = client
    registry = app[FRONTEND].metrics.registry
    if forward is None:
        registry.register(CoreCollector(lambda: client.metrics))

    async def own() -> bytes:
        return generate_latest(registry)

    app[EXPOSITION] = own


def node_routes(forward: Handler | None = None) -> list[web.RouteDef]:
    """What nodes of every role answer, for those who run them."""
    return [
        web.get("/health", forward or health),
        web.get("/metrics", forward or metrics),
        web.get("/state", forward or state),
        web.post("/reset_prefix_cache", forward or reset_prefix_cache),
        *([] if forward is None else [web.get("/node", forward)]),
    ]


def make_starting_app() -> web.Application:
    """What a node answers until its engine is up: 503, with the reason, to everything."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", _starting)
    return app


async def _starting(request: web.Request) -> web.Response:
    return error_response(RequestError("the engine is starting", status=503, code="starting"))


def node_facts(client: NodeClient) -> ModelFacts:
    """Bounds of a request on this node.

    Raises:
        EngineDeadError: there is no engine to ask.
    """
    if client.dead is not None:
        raise EngineDeadError(client.dead)
    ready = client.ready
    return ModelFacts(max_model_len=ready.max_model_len, vocab_size=ready.vocab_size)


def complaint(client: NodeClient) -> str | None:
    """Why the node is not healthy; None if it is."""
    if client.dead is not None:
        return f"the engine is down: {client.dead}"
    gauges = {} if client.metrics is None else client.metrics.gauges
    alarms = [key for key, value in gauges.items() if value and split_name(key)[0] in ALARMS]
    return f"alarms: {', '.join(sorted(alarms))}" if alarms else None


async def health(request: web.Request) -> web.Response:
    """``GET /health``: 200, or 503 with the reason."""
    reason = complaint(request.app[CLIENT])
    if reason is not None:
        raise RequestError(reason, status=503, code="unhealthy")
    return json_response({"status": "ok"})


@contract(content_type="text/plain")
async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics``: as of now, or the latest report of an engine that does not answer."""
    # What keeps the engine from answering is told by `/health`, and must not hide the numbers.
    with suppress(TimeoutError, EngineDeadError):
        async with asyncio.timeout(METRICS_PATIENCE_S):
            await request.app[CLIENT].command("metrics")
    return exposition(await request.app[EXPOSITION]())


async def state(request: web.Request) -> web.Response:
    """``GET /state``: the debugging dump, for operators."""
    require_operator(request)
    dump: Any = await request.app[CLIENT].command("state")
    body = msgspec.json.format(msgspec.json.encode(dump), indent=1)
    return web.Response(body=body, content_type="application/json")


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``: forget cached prefixes, for operators."""
    require_operator(request)
    return json_response({"result": await request.app[CLIENT].command("reset_prefix_cache")})
