"""A router of several processes: workers that answer, a supervisor that knows the nodes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from kvbaton.router.app import endpoint_config, facts, make_session, told_to_stop
from kvbaton.router.config import RouterConfig
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.loads import NodeLoads
from kvbaton.router.membership import Membership
from kvbaton.router.metrics import NodeCollector, RouterMetrics
from kvbaton.router.model_lookup import without_text
from kvbaton.router.nodes import Nodes
from kvbaton.router.nodes_api import TRUSTED, app_keys, routes, worker_routes
from kvbaton.router.pairing import NodeLoad
from kvbaton.router.worker_nodes import ClusterState, WorkerNews, WorkerNodes, news_decoder
from kvbaton.server.app import make_app
from kvbaton.server.config import EdgeConfig, Frontend
from kvbaton.server.metrics import HttpMetrics
from kvbaton.server.supervisor import Supervisor, WorkerLink
from kvbaton.text.tokenizer import Tokenizer

PUBLISH_S = 0.1
"""Changes that can wait (loads, heartbeats) are published so often."""

_encoder = msgspec.msgpack.Encoder()


# --- a worker ---


async def worker(link: WorkerLink, payload: tuple[RouterConfig, str, str]) -> None:
    """What runs in each worker (`supervisor.WorkerMain`).

    Args:
        link: to the supervisor.
        payload: settings, folder of the model, its name.
    """
    config, folder, name = payload
    tokenizer = Tokenizer.load(folder, config.chat_template)
    loads, counted = NodeLoads(), HttpMetrics()
    nodes = WorkerNodes(link, loads, config.cluster_key)
    async with make_session(config) as session:
        dispatcher = Dispatcher(
            nodes, session, RouterMetrics(counted.registry), loads, config.dispatch
        )
        counted.registry.register(NodeCollector(list, loads))
        app = make_app(
            Frontend(
                source=dispatcher,
                tokenizer=tokenizer,
                config=endpoint_config(config, folder, name),
                facts=lambda: facts(nodes.membership),
                metrics=counted,
            ),
            worker_routes(link),
        )
        app_keys(nodes, loads, config.cluster_key, app)
        working = [asyncio.create_task(nodes.watch()), asyncio.create_task(nodes.report_loads())]
        try:
            await link.serve(app, counted.registry, grace_s=config.grace_s)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await dispatcher.close()
            await nodes.close()


# --- the supervisor ---


async def run_workers(
    config: RouterConfig, listener: socket.socket, folder: str, name: str
) -> None:
    """Serve with `config.workers` processes until told to stop.

    Raises:
        ConfigError: a worker can't serve.
    """
    async with make_session(config) as session:
        membership = Membership(config.membership, config.cluster_key is None, name)
        nodes = Nodes(membership, session, cluster_key=config.cluster_key)
        cluster = _Cluster(config, nodes)
        app = cluster.control_app(name)
        payload = (config, folder, name)
        cluster.supervisor = supervisor = Supervisor(
            worker, payload, listener, app, count=config.workers, log_level=config.log_level
        )
        supervisor.on_report = cluster.take_report
        for url, role in config.static_nodes:
            nodes.add_static(url, role)
        async with _running(nodes.watch(), cluster.publish_regularly()):
            try:
                cluster.publish()
                await supervisor.start()
                await told_to_stop(listener, config.grace_s)
            finally:
                await supervisor.stop(config.grace_s)
                await nodes.close()


@asynccontextmanager
async def _running(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Cluster:
    """The supervisor's knowledge, and how it reaches the workers.

    Attributes:
        supervisor: of the workers; set before anything is published.
    """

    supervisor: Supervisor

    def __init__(self, config: RouterConfig, nodes: Nodes) -> None:
        self._config = config
        self._nodes = nodes
        self._loads = NodeLoads()
        self._by_worker: dict[int, tuple[int, dict[str, NodeLoad]]] = {}
        self._registry = CollectorRegistry()
        members = nodes.membership.members
        self._registry.register(NodeCollector(lambda: list(members.values()), self._loads))
        self._lost: list[tuple[str, str]] = []
        self._news = False
        nodes.on_lost = lambda node_id, reason: self._lost.append((node_id, reason))
        nodes.on_change = self._changed

    def control_app(self, name: str) -> web.Application:
        """What workers pass on is answered by this."""
        frontend = without_text(EdgeConfig(model_name=name))
        own = [route for route in routes() if route.path != "/metrics"]
        app = make_app(frontend, [*own, web.get("/metrics", self._metrics)], text=False)
        app_keys(self._nodes, self._loads, self._config.cluster_key, app)
        app[TRUSTED] = True
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        body = await self.supervisor.metrics(generate_latest(self._registry))
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=body, headers=headers)

    def take_report(self, index: int, data: bytes) -> None:
        """A worker says this."""
        news: WorkerNews = news_decoder.decode(data)
        self._by_worker[index] = news.worker, news.loads
        total: dict[str, NodeLoad] = {}
        for _, loads in self._by_worker.values():
            for node_id, load in loads.items():
                total[node_id] = total.get(node_id, NodeLoad()) + load
        self._loads.others = total
        self._news = True
        if news.unreachable is not None:
            node_id, generation, error = news.unreachable
            member = self._nodes.membership.members.get(node_id)
            if member is not None and member.info.generation == generation:
                self._nodes.unreachable(member.info, error)

    def _changed(self) -> None:
        if self._lost:
            self.publish()
        self._news = True

    def publish(self) -> None:
        """Tell all workers what is known now."""
        lost, self._lost, self._news = tuple(self._lost), [], False
        state = ClusterState(
            tuple(self._nodes.membership.members.values()), lost, dict(self._by_worker.values())
        )
        self.supervisor.publish(_encoder.encode(state))

    async def publish_regularly(self) -> None:
        """Tell workers of what is new, for ever."""
        while True:
            await asyncio.sleep(PUBLISH_S)
            if self._news:
                self.publish()
