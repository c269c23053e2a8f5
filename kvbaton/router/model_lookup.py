"""Which model a router serves: a flag says it, a node named by a flag, or the first to register."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import msgspec
import tokenizers
from aiohttp import web
from tokenizers.models import WordLevel

from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import AddRequest, Output
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.config import RouterConfig
from kvbaton.router.membership import Membership
from kvbaton.router.nodes_api import TOKEN, require_member
from kvbaton.server.app import make_app
from kvbaton.server.body import read_body
from kvbaton.server.cluster_token import registration_token
from kvbaton.server.config import EdgeConfig, Frontend
from kvbaton.server.listener import url_of
from kvbaton.server.source import ModelFacts
from kvbaton.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


async def find_model(config: RouterConfig, listener: socket.socket) -> tuple[str, str]:
    """The folder with the tokenizer and the model's name.

    Args:
        config: settings.
        listener: where nodes register; it stays open.

    Raises:
        ConfigError: a static node could not be asked, or its model is not here.
    """
    if config.model is not None:
        return config.model, config.served_model_name or config.model
    if not config.static_nodes:
        info = await first_to_register(config, listener)
    else:
        info = await _ask_static_nodes(config)
        if not _is_here(info):
            raise ConfigError("--model", _elsewhere(info))
    return info.model_path, config.served_model_name or info.model


def _is_here(info: NodeInfo) -> bool:
    return Path(info.model_path, "tokenizer.json").is_file()


def _elsewhere(info: NodeInfo) -> str:
    return f"{info.node_id} has its model at {info.model_path!r}, which is not here"


# --- the first node ---


async def first_to_register(config: RouterConfig, listener: socket.socket) -> NodeInfo:
    """Wait until a node registers whose model's folder is also here.

    It is told to come again, as all requests are until then: a node repeats its registration.
    """
    first: asyncio.Future[NodeInfo] = asyncio.get_running_loop().create_future()

    async def introduce(request: web.Request) -> web.Response:
        require_member(request)
        info = await read_body(request, NodeInfo)
        Membership(loopback_only=config.cluster_key is None).register(info, time.monotonic())
        if not _is_here(info):
            raise RequestError(
                f"{_elsewhere(info)}; start the router with --model", param="model_path", status=409
            )
        if not first.done():
            first.set_result(info)
        return await starting(request)

    async def starting(request: web.Request) -> web.Response:
        raise _starting()

    frontend = without_text(EdgeConfig(model_name="", api_keys=config.api_keys))
    routes = [web.post("/nodes", introduce), web.route("*", "/{path:.*}", starting)]
    app = make_app(frontend, routes, text=False)
    app[TOKEN] = registration_token(config.cluster_key) if config.cluster_key else ""
    runner = web.AppRunner(app, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listener.dup()).start()
        logger.info("waiting at %s for the first node, which says what is served", url_of(listener))
        info = await first
    finally:
        await runner.cleanup()
    logger.info("%s serves %s from %s", info.node_id, info.model, info.model_path)
    return info


def without_text(edge: EdgeConfig) -> Frontend:
    """For an endpoint that answers nothing of texts and tokens."""
    return Frontend(
        source=_NoTokens(),
        tokenizer=Tokenizer(tokenizers.Tokenizer(WordLevel({}, unk_token=""))),
        config=edge,
        facts=_no_facts,
    )


class _NoTokens:
    """There are no routes that ask for any."""

    def generate(self, request: AddRequest) -> AsyncGenerator[Output]:
        """See `TokenSource`."""
        raise _starting()


def _no_facts() -> ModelFacts:
    raise _starting()


def _starting() -> RequestError:
    return RequestError("no node has registered yet; retry shortly", status=503, code="starting")


# --- nodes named by flags ---


async def _ask_static_nodes(config: RouterConfig) -> NodeInfo:
    give_up = time.monotonic() + config.start_timeout_s
    async with aiohttp.ClientSession() as session:
        while True:
            for url, _ in config.static_nodes:
                try:
                    return await _ask(session, url, config.key_for_nodes)
                except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                    logger.info("waiting for %s: %s", url, error)
            if time.monotonic() >= give_up:
                raise ConfigError("--model", "no node answered what model it serves")
            await asyncio.sleep(0.5)


async def _ask(session: aiohttp.ClientSession, url: str, key: str | None) -> NodeInfo:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=2.0)
    async with session.get(f"{url.rstrip('/')}/node", headers=headers, timeout=timeout) as response:
        response.raise_for_status()
        return msgspec.json.decode(await response.read(), type=NodeInfo)
