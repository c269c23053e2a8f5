"""A node as a process: engine core, HTTP face and registration, from start to clean stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest

from kvbaton.engine.client import EngineClient
from kvbaton.engine.process import EngineProcess
from kvbaton.messages.nodes import NodeInfo
from kvbaton.server.app import serve_on
from kvbaton.server.cluster_token import operator_token
from kvbaton.server.config import FRONTEND, EdgeConfig
from kvbaton.server.listener import bind
from kvbaton.server.load import LoadMeter
from kvbaton.server.node_app import EXPOSITION, make_node_app, make_starting_app
from kvbaton.server.node_client import NodeClient
from kvbaton.server.node_config import NodeConfig
from kvbaton.server.node_metrics import CoreCollector
from kvbaton.server.registration import NodeRegistrar
from kvbaton.server.supervisor import Supervisor, WorkerLink
from kvbaton.text.generation import sampling_defaults
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.types import NodeId

if TYPE_CHECKING:
    from kvbaton.engine.kv_connector import ConnectorFactory

logger = logging.getLogger(__name__)


MakeApp = Callable[[NodeClient, EdgeConfig, Handler | None], web.Application]
Face = Callable[[NodeConfig], MakeApp]
"""What a node answers over HTTP: reads what it needs of the model before the engine is up."""


def text_face(config: NodeConfig) -> MakeApp:
    """The face of a node that serves prompts.

    Raises:
        ConfigError: the tokenizer or chat template can't be read.
    """
    tokenizer = Tokenizer.load(config.engine.model, config.chat_template)
    return lambda client, edge, forward: make_node_app(client, tokenizer, edge, forward)


def run_node(
    config: NodeConfig, connectors: Sequence[ConnectorFactory], face: Face = text_face
) -> int:
    """Run a node until SIGINT or SIGTERM; returns the exit status, 1 if its engine died.

    Args:
        config: settings.
        connectors: make its connectors.
        face: makes its HTTP face.

    Raises:
        ConfigError: a setting is wrong.
    """
    logging.basicConfig(
        level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    return asyncio.run(Node(config, connectors, face).run())


class Node:
    """One node. The four verbs of its life, in order: start, serve, drain, stop."""

    def __init__(
        self, config: NodeConfig, connectors: Sequence[ConnectorFactory], face: Face = text_face
    ) -> None:
        self.config = config
        self.connectors = connectors
        self.face = face
        self.id = NodeId(config.node_id, os.urandom(16))
        self.state = "loading"
        self.client: EngineProcess | None = None
        self.port = config.port
        self._listener: socket.socket | None = None
        self._supervisor: Supervisor | None = None
        self._members: tuple[str, ...] = ()
        self._load = LoadMeter()
        self._stop = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._registrar: NodeRegistrar | None = None
        self._registration: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """All of it; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            await self.start()
            return await self.serve()
        finally:
            await self.stop()

    def _signalled(self) -> None:
        if self._stop.is_set():
            logger.warning("told to stop twice: not waiting for requests")
            os._exit(130)
        self._stop.set()

    # --- start ---

    async def start(self) -> None:
        """Listen, register, bring the engine up, then answer for real."""
        make_app, edge_config = self.face(self.config), self._edge_config()
        await self._listen(make_starting_app())
        self._register()
        starting = asyncio.create_task(self._start_engine())
        stopped = asyncio.create_task(self._stop.wait())
        await self._first_of(starting, stopped)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return
        self.client = starting.result()
        app = make_app(self.client, edge_config, None)
        app.router.add_get("/node", self._show_node)
        if self.config.workers == 1:
            await self._listen(app)
        else:
            await self._start_workers(app, edge_config)
        self.state = "ready"
        await self._on_members(self._members)
        if self._registrar is not None:
            self._registrar.nudge()
        logger.info("%s serves at %s", self.id.node, self.url)

    async def _start_engine(self) -> EngineProcess:
        return await EngineProcess.start(
            self.config.engine,
            self.connectors,
            node=self.id,
            host=self.config.host,
            port=self.config.engine_port,
            cluster_key=self.config.cluster_key,
            log_level=self.config.log_level,
        )

    async def _first_of(self, *tasks: asyncio.Task[object]) -> None:
        """Wait for any of these, or for the registration to fail."""
        watched = [*tasks, *([self._registration] if self._registration else [])]
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if self._registration is not None and self._registration.done():
            self._registration.result()

    async def _listen(self, app: web.Application) -> None:
        if self._listener is None:
            self._listener = bind(self.config.host, self.port)
            self.port = self._listener.getsockname()[1]
        if self._runner is not None:
            await self._runner.cleanup()
        # Whoever calls between the two is answered by the second: the socket stays open.
        self._runner = await serve_on(self._listener.dup(), app, grace_s=self.config.grace_s)

    async def _start_workers(self, control: web.Application, edge: EdgeConfig) -> None:
        client, listener = self.client, self._listener
        assert client is not None, "workers need an engine"
        assert listener is not None, "it listened while the engine started"
        core = CollectorRegistry()
        core.register(CoreCollector(lambda: client.metrics))
        supervisor = self._supervisor = Supervisor(
            node_worker,
            (self.config, self.face, edge, client.local_address),
            listener,
            control,
            count=self.config.workers,
            log_level=self.config.log_level,
        )

        async def exposition() -> bytes:
            return await supervisor.metrics(generate_latest(core))

        control[EXPOSITION] = exposition
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await supervisor.start()

    def _edge_config(self) -> EdgeConfig:
        config = self.config
        return EdgeConfig(
            model_name=config.model_name,
            api_keys=config.api_keys,
            operator_token=operator_token(config.cluster_key) if config.cluster_key else "",
            sampling_defaults=sampling_defaults(config.engine.model, config.generation_config),
            media=config.media,
        )

    # --- membership ---

    @property
    def url(self) -> str:
        """Base URL of the HTTP endpoint."""
        host = self.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def info(self) -> NodeInfo:
        """What the node says of itself now."""
        ready = self.client.ready if self.client is not None else None
        metrics = self.client.metrics if self.client is not None else None
        return NodeInfo(
            node_id=self.id.node,
            generation=self.id.generation.hex(),
            role=self.config.role,
            url=self.url,
            model=self.config.model_name,
            control_address=ready.control_address if ready else None,
            identity=ready.identity.hex() if ready else "",
            transport=self.config.transport.partition(":")[0],
            block_size=self.config.engine.block_size,
            max_model_len=ready.max_model_len if ready else 0,
            tp_size=ready.tp_size if ready else 1,
            vocab_size=ready.vocab_size if ready else 0,
            load=self._load.measure(metrics),
            state=self.state,
            model_path=os.path.abspath(self.config.engine.model),
            encoder_identity=ready.encoder_identity.hex() if ready else "",
            encodes=not self.config.engine.language_model_only,
            engine_address=ready.engine_address if ready else "",
        )

    async def _show_node(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.info()), content_type="application/json")

    def _register(self) -> None:
        if self.config.router is None:
            return
        self._registrar = NodeRegistrar(
            self.config.router,
            self.info,
            self._on_members,
            cluster_key=self.config.cluster_key,
        )
        self._registration = asyncio.create_task(self._registrar.run(), name="registration")

    async def _on_members(self, addresses: tuple[str, ...]) -> None:
        self._members = addresses
        if self.client is not None and self.state == "ready":
            await self.client.command("members", list(addresses))

    # --- serve, drain, stop ---

    async def serve(self) -> int:
        """Serve until told to stop; then let what runs finish."""
        if self.client is None:
            return 0
        died = asyncio.create_task(self.client.died.wait())
        stopped = asyncio.create_task(self._stop.wait())
        await self._first_of(died, stopped)
        died.cancel()
        stopped.cancel()
        if self.client.dead is not None:
            logger.error("the engine died: %s", self.client.dead)
            return 1
        return 0

    async def stop(self) -> None:
        """Leave the cluster, finish what runs, end the engine, stop listening."""
        self.state = "draining"
        if self._registration is not None:
            self._registration.cancel()
            await asyncio.wait([self._registration])
        if self._registrar is not None:
            await self._registrar.leave()
        if self._supervisor is not None:
            self._supervisor.stop_replacing()
        if self.client is not None:
            await self.client.shutdown(self.config.grace_s)
        if self._supervisor is not None:
            await self._supervisor.stop(self.config.grace_s)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._listener is not None:
            self._listener.close()


async def node_worker(link: WorkerLink, payload: tuple[NodeConfig, Face, EdgeConfig, str]) -> None:
    """One of several processes that answer for a node: a local frontend of its engine."""
    config, face, edge, address = payload
    make_app = face(config)
    client = await EngineClient.connect(address, local=True)
    app = make_app(client, edge, link.forward)
    died = asyncio.create_task(client.died.wait())
    died.add_done_callback(lambda task: link.stop())
    try:
        await link.serve(app, app[FRONTEND].metrics.registry, grace_s=config.grace_s)
    finally:
        died.cancel()
        await client.close()
