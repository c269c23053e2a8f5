"""A node as a process: engine core, HTTP application and registration, from start to clean stop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from kvbaton.engine.client import EngineClient
from kvbaton.engine.process import EngineProcess
from kvbaton.log import begin_log
from kvbaton.messages.engine import NO_METRICS, Metrics
from kvbaton.messages.nodes import STEP_COSTS, DrainProgress, NodeInfo
from kvbaton.server.app import end_when_told_again, freeze_startup, serve_on, stop_requested
from kvbaton.server.auth import require_operator
from kvbaton.server.bodies import json_response
from kvbaton.server.config import NodeConfig
from kvbaton.server.frontend import FRONTEND, FrontendConfig
from kvbaton.server.metrics import CoreCollector, split_name
from kvbaton.server.network import allow_connections, bind, operator_token
from kvbaton.server.node_app import EXPOSITION, app_for_role, make_starting_app
from kvbaton.server.openapi import contract
from kvbaton.server.registration import NodeRegistrar
from kvbaton.server.supervisor import Supervisor, WorkerLink
from kvbaton.types import NodeId

if TYPE_CHECKING:
    from kvbaton.engine.build import ConnectorFactory


logger = logging.getLogger(__name__)

RATES = {
    "encoder_row_s": (
        ("kvbaton_encoder_read_seconds_total", "kvbaton_encoder_encode_seconds_total"),
        "kvbaton_encoder_rows_total",
    ),
    "prompt_token_s": (("kvbaton_step_seconds_total",), "kvbaton_step_tokens_total"),
}
"""By name in `NodeInfo.load`: counters of seconds, and the counter of work done in that time."""
GAUGES = {
    "kvbaton_prompt_tokens_waiting": "waiting_tokens",
    "kvbaton_step_token_budget": "step_tokens",
    "kvbaton_mixed_step_token_budget": "mixed_tokens",
    "kvbaton_blocks_available": "free_blocks",
    "kvbaton_sequences_running": "running",
    "kvbaton_sequences_waiting": "waiting",
    "kvbaton_sequences_loading": "loading",
    **{f'kvbaton_step_cost_seconds{{term="{term}"}}': term for term in STEP_COSTS},
}
"""By gauge that is reported unchanged: its name in `NodeInfo.load`."""
WIRE_GAUGE = "kvbaton_wire_cost_seconds{"
WIRE_FAILURES = "kvbaton_wire_failures{"
STORE_BYTES = "kvbaton_store_bytes_total{"
TOTALS = {
    "kvbaton_generation_tokens_total": "generated_tokens",
    "kvbaton_transfer_sent_bytes_total": "sent_bytes",
}
"""By counter that is reported unchanged: its name in `NodeInfo.load`."""
WATCH_S = 1.0
"""Interval in seconds at which it is checked whether the engine hangs."""
NEWEST = 0.5
"""Weight of the newest report in a reported rate."""


def run_node(config: NodeConfig, connectors: Sequence[ConnectorFactory]) -> int:
    """Run a node until SIGINT or SIGTERM; return the exit status, 1 if its engine died.

    Args:
        config: Settings of the node.
        connectors: Factories of its connectors.

    Raises:
        ConfigError: A setting is wrong.
    """
    begin_log(config.log_level)
    allow_connections()
    return asyncio.run(Node(config, connectors).run())


class Node:
    """One node; its methods `start`, `serve` and `stop` are called in this order."""

    def __init__(self, config: NodeConfig, connectors: Sequence[ConnectorFactory]) -> None:
        self.config = config
        self.connectors = connectors
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
        """Start, serve and stop; return the exit status."""
        self._stop = stop_requested()
        try:
            await self.start()
            return await self.serve()
        finally:
            await self.stop()
            end_when_told_again()

    # --- start ---

    async def start(self) -> None:
        """Listen (answering 503), register, start the engine, then serve."""
        config, key = self.config, self.config.cluster_key
        make_app = app_for_role(config)
        edge_config = FrontendConfig.of(
            config,
            config.engine.model,
            config.model_name,
            operator_token=operator_token(key),
            role=config.role,
            node=config.node_id,
        )
        await self._listen(make_starting_app())
        if config.routers:
            self._registrar = NodeRegistrar(
                config.routers, self.info, self._on_members, cluster_key=key, trust=config.tls
            )
            self._registration = asyncio.create_task(self._registrar.run(), name="registration")
        starting = asyncio.create_task(
            EngineProcess.start(
                config.engine,
                self.connectors,
                node=self.id,
                host=config.host,
                port=config.engine_port,
                cluster_key=key,
                log_level=config.log_level,
            )
        )
        stopped = asyncio.create_task(self._stop.wait())
        await self._first_of(starting, stopped)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return
        self.client = starting.result()
        app = make_app(self.client, edge_config, None)

        async def show_node(request: web.Request) -> web.Response:
            return json_response(self.info())

        @contract(answer=DrainProgress)
        async def drain(request: web.Request) -> web.Response:
            """Refuse new requests for good, and tell whether running ones are done."""
            require_operator(request)
            return json_response(DrainProgress(idle=await self.drain()))

        app.router.add_get("/node", show_node)
        app.router.add_post("/drain", drain)
        if config.workers == 1:
            await self._listen(app)
        else:
            await self._start_workers(app, edge_config)
        await self.client.command("metrics")  # the first status as ready has the step costs
        self.state = "ready"
        await self._on_members(self._members)
        if self._registrar is not None:
            self._registrar.nudge()
        logger.info("%s serves at %s", self.id.node, self.url)

    async def _first_of(self, *tasks: asyncio.Task[object]) -> None:
        """Wait for any of the tasks, or for the registration to fail."""
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
        # Clients that connect in between are answered by the new application: the socket stays
        # open.
        self._runner = await serve_on(self._listener.dup(), app, self.config)

    async def _start_workers(self, control: web.Application, edge: FrontendConfig) -> None:
        client, listener = self.client, self._listener
        assert client is not None, "workers need an engine"
        assert listener is not None, "it listened while the engine started"
        core = CollectorRegistry()
        core.register(CoreCollector(lambda: client.metrics))
        supervisor = self._supervisor = Supervisor(
            node_worker,
            (self.config, edge, client.local_address),
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

    # --- membership ---

    @property
    def url(self) -> str:
        """Base URL of the HTTP endpoint."""
        host = self.config.host
        return f"{self.config.tls.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def info(self) -> NodeInfo:
        """The node's current description, for routers."""
        ready = self.client.ready if self.client is not None else None
        metrics = self.client.metrics if self.client is not None else NO_METRICS
        return NodeInfo(
            node_id=self.id.node,
            generation=self.id.generation.hex(),
            role=self.config.role,
            url=self.url,
            model=self.config.model_name,
            aliases=list(self.config.served_model_name[1:]),
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
            num_blocks=ready.num_blocks if ready else 0,
            wires=wires_of(metrics),
            wire_failures=wire_failures_of(metrics),
            prompt_limits=ready.prompt_limits if ready else None,
            stores=stores_of(metrics),
        )

    async def _on_members(self, addresses: tuple[str, ...]) -> None:
        self._members = addresses
        if self.client is not None and self.state != "loading":
            await self.client.command("members", list(addresses))

    # --- serve, drain, stop ---

    async def serve(self) -> int:
        """Serve until told to stop, or until the engine dies; return the exit status."""
        if self.client is None:
            return 0
        freeze_startup()
        died = asyncio.create_task(self.client.died.wait())
        stopped = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(tell_of_silence(self.client), name="watch of the engine")
        await self._first_of(died, stopped)
        for task in (died, stopped, watching):
            task.cancel()
        if self.client.dead is not None:
            logger.error("the engine died: %s", self.client.dead)
            return 1
        logger.info("stopping; what runs has %g s", self.config.shutdown_timeout_s)
        return 0

    async def drain(self) -> bool:
        """Accept no new requests and tell all routers; return whether no request is left."""
        assert self.client is not None, "only a node that serves is asked"
        news, self.state = self.state != "draining", "draining"
        if news:
            logger.info("drained on request: takes nothing new until it is started again")
        if news and self._registrar is not None:
            await self._registrar.announce()
        return await self.client.drain()

    async def stop(self) -> None:
        """Finish running requests, end the engine, leave the cluster, stop listening."""
        self.state = "draining"
        if self._registration is not None:
            self._registration.cancel()
            await asyncio.wait([self._registration])
        if self._registrar is not None:
            await self._registrar.announce()  # routers send no requests, and move running ones
        if self._supervisor is not None:
            self._supervisor.stop_replacing()
        if self.client is not None:
            await self.client.shutdown(self.config.shutdown_timeout_s)
        if self._registrar is not None:
            await self._registrar.leave()
        if self._supervisor is not None:
            await self._supervisor.stop(self.config.shutdown_timeout_s)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._listener is not None:
            self._listener.close()


async def tell_of_silence(client: EngineClient) -> None:
    """Log when the engine begins and ceases to hang, until cancelled."""
    hung = False
    while True:
        await asyncio.sleep(WATCH_S)
        if client.hangs != hung:
            hung = not hung
            if hung:
                logger.error("the engine hangs: not healthy until it is heard of again")
            else:
                logger.info("the engine is heard of again")


async def node_worker(link: WorkerLink, payload: tuple[NodeConfig, FrontendConfig, str]) -> None:
    """Serve as one of a node's workers: a local frontend of its engine."""
    config, edge, address = payload
    make_app = app_for_role(config)
    client = await EngineClient.connect(address, local=True)
    app = make_app(client, edge, link.forward)
    died = asyncio.create_task(client.died.wait())
    died.add_done_callback(lambda task: link.stop())
    try:
        await link.serve(app, app[FRONTEND].metrics.registry, config)
    finally:
        died.cancel()
        await client.close()


def wires_of(metrics: Metrics) -> dict[str, dict[str, float]]:
    """`NodeInfo.wires`, from an engine's metrics."""
    return _by_labels(metrics.gauges, WIRE_GAUGE, "peer", "term")


def stores_of(metrics: Metrics) -> dict[str, dict[str, float]]:
    """`NodeInfo.stores`, from an engine's metrics."""
    return _by_labels(metrics.counters, STORE_BYTES, "store", "direction")


def _by_labels(
    values: Mapping[str, float], start: str, outer: str, inner: str
) -> dict[str, dict[str, float]]:
    """Values whose names begin with `start`, by the values of two of their labels."""
    found: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        if key.startswith(start):
            _, labels = split_name(key)
            found.setdefault(labels[outer], {})[labels[inner]] = value
    return found


def wire_failures_of(metrics: Metrics) -> dict[str, int]:
    """`NodeInfo.wire_failures`, from an engine's metrics."""
    return {
        split_name(key)[1]["peer"]: int(count)
        for key, count in metrics.gauges.items()
        if key.startswith(WIRE_FAILURES)
    }


class LoadMeter:
    """Makes `NodeInfo.load` from an engine's metrics: rates, gauges, totals."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        self._before: dict[str, tuple[float, float]] = {}

    def measure(self, metrics: Metrics) -> dict[str, float]:
        """Take the latest metrics and return `NodeInfo.load`."""
        counters, gauges = metrics.counters, metrics.gauges
        for name, (timers, work) in RATES.items():
            total = sum(counters.get(timer, 0.0) for timer in timers), counters.get(work, 0.0)
            seconds, done = self._before.get(name, (0.0, 0.0))
            if total[1] > done:
                rate = (total[0] - seconds) / (total[1] - done)
                old = self._rates.get(name, rate)
                self._rates[name] = NEWEST * rate + (1 - NEWEST) * old
                self._before[name] = total
        now = {name: gauges[gauge] for gauge, name in GAUGES.items() if gauge in gauges}
        done_so_far = {name: counters[c] for c, name in TOTALS.items() if c in counters}
        return {**self._rates, **now, **done_so_far}
