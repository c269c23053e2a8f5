"""A router over stand-ins for nodes, in the test's process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import tokenizers
from aiohttp import web
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvbaton.router.api import ROUTER
from kvbaton.router.app import watched_app
from kvbaton.router.config import DispatchConfig, MembershipTimers, RouterConfig
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.nodes import Nodes
from kvbaton.server.frontend import FRONTEND, FrontendConfig
from kvbaton.text.tokenizer import Tokenizer
from tests.support.listening import listen
from tests.support.stand_in import MODEL, VOCAB_SIZE, StandIn, stand_in
from tests.support.waiting import eventually


@dataclass
class Rig:
    """A router with its nodes."""

    url: str
    app: web.Application
    session: aiohttp.ClientSession
    nodes: dict[str, StandIn]
    sockets: Path
    runner: web.AppRunner

    @property
    def dispatcher(self) -> Dispatcher:
        source = self.app[FRONTEND].source
        assert isinstance(source, Dispatcher)
        return source

    @property
    def directory(self) -> Nodes:
        nodes = self.app[ROUTER].nodes
        assert isinstance(nodes, Nodes)
        return nodes

    def states(self) -> dict[str, str]:
        members = self.directory.membership.members
        return {node_id: str(member.state) for node_id, member in members.items()}

    def loads(self) -> dict[str, object]:
        return dict(self.app[ROUTER].loads)

    async def register(self, node_id: str) -> None:
        """Register all nodes twice, so that each knows all others; wait until one is ready."""
        for _ in range(2):
            for node in self.nodes.values():
                if node.runner is not None:
                    self.directory.register(node.info)
        await eventually(lambda: self.states().get(node_id) == "ready")


MakeRig = Callable[..., Awaitable[Rig]]


def tiny_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(
        WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0")
    )
    backend.pre_tokenizer = Whitespace()
    return Tokenizer(backend)


async def build_rig(
    stack: contextlib.AsyncExitStack,
    sockets: Path,
    prefill: int = 1,
    decode: int = 1,
    encode: int = 0,
    static: tuple[str, ...] = (),
    at: tuple[str, int] = ("127.0.0.1", 0),
    **settings: object,
) -> Rig:
    """Start a router and nodes ``p0..``, ``d0..``, ``e0..``; all end with the stack.

    The nodes' engine sockets are in the folder `sockets`; the router listens on host and port
    `at`.
    """
    timers = MembershipTimers(heartbeat_s=60.0, probe_period_s=0.05, probe_timeout_s=0.5)
    default = RouterConfig(membership=timers, dispatch=DispatchConfig())
    config = dataclasses.replace(default, **settings)  # type: ignore[arg-type]
    config = dataclasses.replace(config, prefill=static[:1], decode=static[1:])
    nodes = [stand_in("prefill", f"p{i}") for i in range(prefill)]
    nodes += [stand_in("decode", f"d{i}") for i in range(decode)]
    nodes += [stand_in("encode", f"e{i}") for i in range(encode)]
    for node in nodes:  # first, so that they outlive the router and its probes
        await node.start()
        node.offer_socket(sockets)
        stack.push_async_callback(node.stop)
    edge = FrontendConfig(model_name=MODEL, api_keys=config.api_keys)
    app = await stack.enter_async_context(watched_app(config, edge, tiny_tokenizer()))
    runner, _ = await listen(app, *at, grace_s=0.1)
    stack.push_async_callback(runner.cleanup)
    url = f"http://{at[0]}:{runner.addresses[0][1]}"
    session = await stack.enter_async_context(aiohttp.ClientSession(url))
    rig = Rig(url, app, session, {node.info.node_id: node for node in nodes}, sockets, runner)
    for node_id in rig.nodes:
        await rig.register(node_id)
    return rig
