"""The router's process: finds the served model, serves, drains, and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from asyncio import create_task
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import msgspec
from aiohttp import web

from kvbaton.errors import ConfigError, RequestError
from kvbaton.log import begin_log
from kvbaton.messages import UNREADABLE
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.api import (
    ROUTER,
    app_without_text,
    check_member,
    live,
    no_node_yet,
    router_app,
    routes,
)
from kvbaton.router.config import RouterConfig
from kvbaton.router.costs import CostModel
from kvbaton.router.loads import NodeLoads
from kvbaton.router.membership import Membership
from kvbaton.router.metrics import NodeCollector
from kvbaton.router.nodes import Nodes
from kvbaton.router.page import StatusFeed
from kvbaton.router.policies import load_policy
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.status import ClusterStatus
from kvbaton.router.workers import workers
from kvbaton.server.app import end_when_told_again, freeze_startup, serve_on, stop_requested
from kvbaton.server.bodies import close_connection, read_body
from kvbaton.server.frontend import FRONTEND, FrontendConfig
from kvbaton.server.network import (
    allow_connections,
    bind,
    operator_token,
    registration_token,
    url_of,
)
from kvbaton.server.tracing import TracingConfig
from kvbaton.text.chat import ChatTemplate
from kvbaton.text.tokenizer import Tokenizer, read_template

logger = logging.getLogger(__name__)

STATIC_NODE_S = 600.0
"""Seconds that a static node may take to report what model it serves."""
ASK_PERIOD_S = 0.5
"""Seconds between questions to static nodes."""


def main(config: RouterConfig) -> int:
    """Run a router until SIGINT or SIGTERM; return the exit status.

    Raises:
        ConfigError: A setting is wrong, or the address is taken.
    """
    begin_log(config.log_level)
    allow_connections()
    return asyncio.run(run(config))


def listening(config: RouterConfig) -> socket.socket:
    """The inherited socket, or a new one.

    Raises:
        ConfigError: The socket is not usable, or the address is taken.
    """
    if config.fd is None:
        return bind(config.host, config.port)
    try:
        return socket.socket(fileno=config.fd)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError("--fd", f"{config.fd} is no socket: {error}") from error


async def run(config: RouterConfig) -> int:
    """Start up, serve, drain and shut down."""
    check_before_waiting(config)
    with listening(config) as listener:
        stop = stop_requested()
        finding, stopped = create_task(find_model(config, listener)), create_task(stop.wait())
        await asyncio.wait((finding, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not finding.done():  # as PID 1 of a container, no signal would end this process
            finding.cancel()
            await asyncio.wait((finding,))
            end_when_told_again()
            return 0
        folder, names = finding.result()
        config = replace(config, served_model_name=names)
        tokenizer = Tokenizer.load(folder, config.chat_template)
        token = operator_token(config.cluster_key)
        edge = FrontendConfig.of(config, folder, names[0], operator_token=token)
        if config.workers > 1:
            serving = workers(config, listener, edge, folder)
        else:
            serving = one_process(config, listener, edge, tokenizer)
        async with serving:
            freeze_startup()
            logger.info("listening on %s", url_of(listener, config.tls.scheme))
            await stopped
            logger.info("stopping; open requests have %g s", config.shutdown_timeout_s)
    end_when_told_again()
    return 0


def check_before_waiting(config: RouterConfig) -> None:
    """Raise `ConfigError` for settings that are wrong for any model, before waiting for a node."""
    load_policy(config.dispatch, CostModel())
    TracingConfig.of(config.otlp_traces_endpoint, "router", "")
    if config.chat_template is not None:
        ChatTemplate(read_template(config.chat_template), {})


@asynccontextmanager
async def one_process(
    config: RouterConfig, listener: socket.socket, edge: FrontendConfig, tokenizer: Tokenizer
) -> AsyncIterator[None]:
    """Serve from this process for as long as the context lasts; running requests may then end."""
    async with watched_app(config, edge, tokenizer) as app:
        runner = await serve_on(listener, app, config)
        try:
            yield
        finally:
            app[ROUTER].nodes.membership.hears = False
            await runner.cleanup()


@asynccontextmanager
async def watched_app(
    config: RouterConfig, edge: FrontendConfig, tokenizer: Tokenizer
) -> AsyncIterator[web.Application]:
    """A router's application; its nodes are probed for as long as the context lasts."""
    loads, policy = NodeLoads(), load_policy(config.dispatch, CostModel())
    index = PrefixIndex() if policy.uses_prefixes else None
    async with Nodes.watched(config, edge.model_name, index) as nodes:
        app = router_app(config, policy, nodes, tokenizer, edge, loads, routes())
        collector = NodeCollector(nodes.membership.members, loads)
        app[FRONTEND].metrics.registry.register(collector)
        status = ClusterStatus(nodes.membership, loads, app[ROUTER].totals)
        async with StatusFeed(status).served(app):
            yield app


# --- the model: named by a flag, by a static node, or by the first node that registers ---


async def find_model(config: RouterConfig, listener: socket.socket) -> tuple[str, tuple[str, ...]]:
    """The folder with the tokenizer, and the model's names.

    Args:
        config: Settings.
        listener: Socket at which nodes register; it stays open.

    Raises:
        ConfigError: A static node did not answer, or its model is not on this machine.
    """
    if config.model is not None:
        return config.model, config.served_model_name or (config.model,)
    if not config.static_nodes:
        info = await first_to_register(config, listener)
    else:
        info = await _ask_static_nodes(config)
        if not _is_here(info):
            raise ConfigError("--model", _elsewhere(info))
    return info.model_path, config.served_model_name or (info.model, *info.aliases)


def _is_here(info: NodeInfo) -> bool:
    return os.path.isfile(os.path.join(info.model_path, "tokenizer.json"))


def _elsewhere(info: NodeInfo) -> str:
    return f"{info.node_id} has its model at {info.model_path!r}, which is not here"


async def first_to_register(config: RouterConfig, listener: socket.socket) -> NodeInfo:
    """Wait until a node registers whose model folder is also on this machine.

    Until then all requests get a 503; the node repeats its registration.
    """
    first: asyncio.Future[NodeInfo] = asyncio.get_running_loop().create_future()
    token = registration_token(config.cluster_key)

    async def introduce(request: web.Request) -> web.Response:
        check_member(request, token)
        info = await read_body(request, NodeInfo)
        Membership(loopback_only=config.cluster_key is None).register(info, time.monotonic())
        if not _is_here(info):
            raise RequestError(
                f"{_elsewhere(info)}; start the router with --model", param="model_path", status=409
            )
        if not first.done():
            first.set_result(info)
        problem = f"the router first loads the tokenizer of {info.model_path}; retry shortly"
        raise RequestError(problem, status=503, code="starting")

    async def starting(request: web.Request) -> web.Response:
        raise no_node_yet()

    edge = FrontendConfig(model_name="", api_keys=config.api_keys)
    anything = web.route("*", "/{path:.*}", starting)
    own = [web.post("/nodes", introduce), web.get("/live", live), anything]
    app = app_without_text(edge, own)
    app.on_response_prepare.append(close_connection)
    runner = await serve_on(listener.dup(), app, replace(config, shutdown_timeout_s=1.0))
    try:
        url = url_of(listener, config.tls.scheme)
        logger.info("waiting at %s for the first node, which says what is served", url)
        info = await first
    finally:
        await runner.cleanup()
    logger.info("%s serves %s from %s", info.node_id, info.model, info.model_path)
    return info


async def _ask_static_nodes(config: RouterConfig) -> NodeInfo:
    give_up, told = time.monotonic() + STATIC_NODE_S, dict[str, str]()
    timeout = aiohttp.ClientTimeout(total=2.0)
    async with aiohttp.ClientSession(headers=config.node_headers, timeout=timeout) as session:
        while True:
            for url, _ in config.static_nodes:
                try:
                    where, tls = f"{url.rstrip('/')}/node", config.tls.client(url)
                    async with session.get(where, ssl=tls) as response:
                        response.raise_for_status()
                        return msgspec.json.decode(await response.read(), type=NodeInfo)
                except (aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE) as error:
                    if told.get(url) != (reason := str(error) or repr(error)):
                        logger.info("waiting for %s: %s", url, reason)
                    told[url] = reason
            if time.monotonic() >= give_up:
                why = ", ".join(f"{url}: {reason}" for url, reason in told.items())
                raise ConfigError("--model", f"no node answered what model it serves ({why})")
            await asyncio.sleep(ASK_PERIOD_S)
