"""Puts a router together and runs it: startup, serve, drain, shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from kvbaton.errors import RequestError
from kvbaton.router.config import RouterConfig
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.loads import NodeLoads
from kvbaton.router.membership import Membership
from kvbaton.router.metrics import NodeCollector, RouterMetrics
from kvbaton.router.model_lookup import find_model
from kvbaton.router.node_http import CONNECT_TIMEOUT_S
from kvbaton.router.nodes import Nodes
from kvbaton.router.nodes_api import app_keys, routes
from kvbaton.server.app import make_app
from kvbaton.server.config import EdgeConfig, Frontend
from kvbaton.server.listener import bind, url_of
from kvbaton.server.metrics import HttpMetrics
from kvbaton.server.source import ModelFacts
from kvbaton.text.generation import sampling_defaults
from kvbaton.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

UNKNOWN_LENGTH = 1 << 31
"""Bound of a request while no node has said how much it takes."""


@asynccontextmanager
async def router_app(
    config: RouterConfig, tokenizer: Tokenizer, edge: EdgeConfig
) -> AsyncIterator[web.Application]:
    """The application, its probes running, for as long as the context lasts.

    Args:
        config: settings.
        tokenizer: of the model that the nodes serve.
        edge: settings of the endpoint, with the model's name for clients and nodes.
    """
    async with make_session(config) as session:
        membership = Membership(config.membership, config.cluster_key is None, edge.model_name)
        nodes = Nodes(membership, session, cluster_key=config.cluster_key)
        loads, metrics = NodeLoads(), HttpMetrics()
        dispatcher = Dispatcher(
            nodes, session, RouterMetrics(metrics.registry), loads, config.dispatch
        )
        members = membership.members
        metrics.registry.register(NodeCollector(lambda: list(members.values()), loads))
        app = make_app(
            Frontend(
                source=dispatcher,
                tokenizer=tokenizer,
                config=edge,
                facts=lambda: facts(membership),
                metrics=metrics,
            ),
            routes(),
        )
        app_keys(nodes, loads, config.cluster_key, app)
        for url, role in config.static_nodes:
            nodes.add_static(url, role)
        watching = asyncio.create_task(nodes.watch())
        try:
            yield app
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await dispatcher.close()
            await nodes.close()


def make_session(config: RouterConfig) -> aiohttp.ClientSession:
    """The client side of the router: as many connections as there are legs."""
    key = config.key_for_nodes
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers=headers,
    )


def facts(membership: Membership) -> ModelFacts:
    """Bounds of a request that any ready node takes.

    Raises:
        RequestError: 503, there is no ready node.
    """
    if not membership.serving():
        raise RequestError(
            "No node is ready to serve this request; retry shortly.",
            status=503,
            code="no_node_ready",
        )
    return ModelFacts(
        max_model_len=membership.max_model_len() or UNKNOWN_LENGTH,
        vocab_size=membership.vocab_size(),
    )


# --- the process ---


def main(config: RouterConfig) -> int:
    """Run a router until SIGINT or SIGTERM; returns the exit status.

    Raises:
        ConfigError: a setting is wrong, or the address is taken.
    """
    logging.basicConfig(
        level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    return asyncio.run(run(config))


async def run(config: RouterConfig) -> int:
    """Startup, serve, drain, shutdown."""
    with listening_socket(config) as listener:
        folder, name = await find_model(config, listener)
        tokenizer = Tokenizer.load(folder, config.chat_template)
        edge = endpoint_config(config, folder, name)
        if config.workers > 1:
            from kvbaton.router.workers import run_workers

            await run_workers(config, listener, folder, name)
            return 0
        async with router_app(config, tokenizer, edge) as app:
            await serve(app, listener, config.grace_s)
    return 0


def endpoint_config(config: RouterConfig, folder: str, name: str) -> EdgeConfig:
    """Settings of the endpoint for a model.

    Raises:
        ConfigError: the model's recommendations can't be read.
    """
    return EdgeConfig(
        model_name=name,
        api_keys=config.api_keys,
        sampling_defaults=sampling_defaults(folder, config.generation_config),
        media=config.media,
    )


async def serve(app: web.Application, listener: socket.socket, grace_s: float) -> None:
    """Answer until told to stop, then let open requests end."""
    runner = web.AppRunner(
        app, handler_cancellation=True, shutdown_timeout=grace_s, access_log=None
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        await told_to_stop(listener, grace_s)
    finally:
        await runner.cleanup()


async def told_to_stop(listener: socket.socket, grace_s: float) -> None:
    """Say that we serve, and wait for SIGINT or SIGTERM; a second one ends the process at once."""
    logger.info("listening on %s", url_of(listener))
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            sys.exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await stop.wait()
    logger.info("stopping; open requests have %g s", grace_s)


def listening_socket(config: RouterConfig) -> socket.socket:
    """The socket to serve on.

    Raises:
        ConfigError: the address is taken or is not ours.
    """
    if config.fd is not None:
        return socket.socket(fileno=config.fd)
    return bind(config.host, config.port)
