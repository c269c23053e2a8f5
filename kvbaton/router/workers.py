"""A router of several processes: workers that answer, a supervisor that knows the nodes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import reduce

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from typing_extensions import override

from kvbaton.errors import EngineDeadError
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.api import ROUTER, RouterState, app_without_text, router_app, routes
from kvbaton.router.config import RouterConfig
from kvbaton.router.costs import CostModel
from kvbaton.router.loads import IDLE, NodeLoad, NodeLoads, Queue, RouterTotals
from kvbaton.router.membership import Member, Membership, NodeState
from kvbaton.router.metrics import NodeCollector
from kvbaton.router.nodes import KnownNodes, Nodes
from kvbaton.router.page import StatusFeed
from kvbaton.router.policies import load_policy
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.status import ClusterStatus
from kvbaton.server.frontend import FRONTEND, FrontendConfig
from kvbaton.server.metrics import exposition
from kvbaton.server.network import registration_token
from kvbaton.server.supervisor import Supervisor, WorkerLink
from kvbaton.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PUBLISH_S = 0.1
"""Seconds between publications of changes that can wait (loads, heartbeats)."""
REPORT_S = 0.1
"""Seconds between a worker's reports of changed loads."""
RETRY_S = 1.0
"""Seconds between attempts to reach an engine."""
REACH_S = 5.0
"""Maximum seconds that a request waits for a worker that has yet to reach a ready node."""
MAX_DEPARTURES = 64
"""Maximum number of departures that are published again, for workers that read late."""
SERVED = ("/v1/", "/tokenize", "/detokenize", "/health", "/ping")
"""Paths that need a reached node."""


class Departure(Struct, frozen=True, array_like=True):
    """A node that requests have to leave.

    Attributes:
        number: Its number; later ones are larger.
        node_id: Id of the node.
        lost: Why the node was lost; None if it goes on, and its decoding requests are to move away.
    """

    number: int
    node_id: str
    lost: str | None


class ClusterState(Struct, frozen=True):
    """State that the supervisor publishes to workers; each takes the place of the one before.

    Attributes:
        members: All nodes.
        departures: The latest ones, also those that were published before: a worker reads only the
            latest state.
        news: The latest report of each worker.
        draining: See `KnownNodes`.
    """

    members: tuple[Member, ...]
    departures: tuple[Departure, ...] = ()
    news: tuple[WorkerNews, ...] = ()
    draining: bool = False


class WorkerNews(Struct, frozen=True):
    """A worker's report.

    Attributes:
        worker: Its process id.
        loads: Its loads by node id.
        queues: See `NodeLoads.queues`.
        totals: Its totals.
        unreachable: (node id, generation, reason) of a node that it could not reach.
    """

    worker: int
    loads: dict[str, NodeLoad]
    queues: dict[str, dict[Queue, int]] = {}
    totals: RouterTotals = RouterTotals()
    unreachable: tuple[str, str, str] | None = None


_encoder = msgspec.msgpack.Encoder()
_state = msgspec.msgpack.Decoder(ClusterState)
_news = msgspec.msgpack.Decoder(WorkerNews)


def _summed(reports: Iterable[WorkerNews]) -> dict[str, NodeLoad]:
    total: dict[str, NodeLoad] = {}
    for news in reports:
        for node_id, load in news.loads.items():
            total[node_id] = total.get(node_id, IDLE).plus(load)
    return total


# --- a worker ---


async def worker(link: WorkerLink, payload: tuple[RouterConfig, FrontendConfig, str]) -> None:
    """Main function of each worker (`supervisor.WorkerMain`).

    Args:
        link: Link to the supervisor.
        payload: Settings of the router and of the endpoint, and folder of the model.
    """
    config, edge, folder = payload
    tokenizer = Tokenizer.load(folder, config.chat_template)
    loads, policy = NodeLoads(), load_policy(config.dispatch, CostModel())
    index = PrefixIndex() if policy.uses_prefixes else None
    nodes = WorkerNodes(link, loads, config.cluster_key, index)
    app = router_app(config, policy, nodes, tokenizer, edge, loads, routes(link))
    nodes.totals = app[ROUTER].totals

    @web.middleware
    async def once_reached(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(SERVED):
            await nodes.until_reached()
        return await handler(request)

    app.middlewares.append(once_reached)
    registry = app[FRONTEND].metrics.registry
    registry.register(NodeCollector({}, loads))
    async with _running(nodes.watch(), nodes.report_loads()):
        await link.serve(app, registry, config)
    await nodes.engines.close()


class WorkerNodes(KnownNodes):
    """The nodes of a worker, as its supervisor publishes them.

    A node gets requests once its engine is reached from this process, too.

    Args:
        link: Link to the supervisor.
        loads: Loads of this worker.
        cluster_key: Key of the cluster.
        index: See `KnownNodes`.

    Attributes:
        totals: Returns this worker's totals.
    """

    def __init__(
        self,
        link: WorkerLink,
        loads: NodeLoads,
        cluster_key: str | None,
        index: PrefixIndex | None = None,
    ) -> None:
        super().__init__(Membership(), cluster_key, index)
        self._link = link
        self._loads = loads
        self._told: tuple[Mapping[str, NodeLoad], RouterTotals] = {}, RouterTotals()
        self.totals: Callable[[], RouterTotals] = RouterTotals
        self._published: tuple[Member, ...] = ()
        self._departed = 0
        self._reaching = set[str]()
        self._reached = asyncio.Event()
        self._news = asyncio.Event()
        link.on_state = self.take_state

    def take_state(self, data: bytes) -> None:
        """Take in the state that the supervisor published."""
        state = _state.decode(data)
        self._published, self.draining = state.members, state.draining
        others = [news for news in state.news if news.worker != os.getpid()]
        self._loads.others = _summed(others)
        queues = defaultdict[str, Counter[Queue]](Counter)
        for news in others:
            for node_id, tokens in news.queues.items():
                queues[node_id].update(tokens)
        self._loads.other_queues = queues
        known = {member.info.node_id: member.info for member in state.members}
        for node_id in self.membership.members.keys() - known.keys():
            self.engines.retire(node_id)
        self._show()
        self._news.set()
        for departure in state.departures:
            if departure.number <= self._departed:
                continue
            self._departed = departure.number
            node = known.get(departure.node_id)
            if departure.lost is None:
                self.on_leaving(departure.node_id)
            elif node is None or not self.engines.reached(node):
                # Else only the supervisor has lost it, and tokens still come here.
                self.on_lost(departure.node_id, departure.lost)

    def _show(self) -> None:
        """Update membership: ready nodes that this worker has not reached count as starting."""
        self.membership.show(
            member
            if self.engines.reached(member.info)
            else replace(member, state=NodeState.STARTING)
            for member in self._published
        )
        if self.membership.ready().serving or all(m.paused for m in self._unreached()):
            self._reached.set()
        else:
            self._reached.clear()

    def _unreached(self) -> list[Member]:
        """Ready nodes that this worker has yet to reach."""
        ready = (m for m in self._published if m.state is NodeState.READY)
        return [member for member in ready if not self.engines.reached(member.info)]

    async def until_reached(self) -> None:
        """Wait for the first published state, then until a node is reached if one is ready.

        It waits for at most `REACH_S`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(REACH_S):
                await self._reached.wait()

    @override
    def unreachable(self, node: NodeInfo, error: str) -> None:
        self._show()  # the supervisor decides what it means
        self._report((node.node_id, node.generation, error))

    def _report(self, unreachable: tuple[str, str, str] | None = None) -> None:
        self._told = dict(self._loads.own), self.totals()
        loads, totals = self._told
        news = WorkerNews(os.getpid(), loads, self._loads.queues, totals, unreachable)
        self._link.report(_encoder.encode(news))

    async def watch(self) -> None:
        """Reach engines, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                # None waits for another, which may stand still; one attempt per node at a time.
                for node in [member.info for member in self._unreached()]:
                    if node.node_id not in self._reaching:
                        self._reaching.add(node.node_id)
                        group.create_task(self._reach(node))
                await self.engines.sweep()
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._news.wait()

    async def _reach(self, node: NodeInfo) -> None:
        try:
            await self.engines.reach(node)
        except (EngineDeadError, ValueError) as error:
            logger.warning("can't reach the engine of %s: %s", node.node_id, error)
        finally:
            self._reaching.discard(node.node_id)
        self._show()

    async def report_loads(self) -> None:
        """Report loads when they change, for ever."""
        self._report()  # this worker may replace one that had loads
        while True:
            await asyncio.sleep(REPORT_S)
            if (self._loads.own, self.totals()) != self._told:
                self._report()


# --- the supervisor ---


@asynccontextmanager
async def workers(
    config: RouterConfig, listener: socket.socket, edge: FrontendConfig, folder: str
) -> AsyncIterator[None]:
    """Serve with `config.workers` processes for as long as the context lasts.

    Raises:
        ConfigError: A worker can't serve.
    """
    async with Nodes.watched(config, edge.model_name) as nodes:
        cluster = _Cluster(config, nodes, listener, edge, folder)
        async with cluster.feed.served(cluster.control), _running(cluster.publish_regularly()):
            try:
                cluster.publish()
                await cluster.supervisor.start()
                yield
            finally:
                nodes.membership.hears = False
                await cluster.supervisor.stop(config.shutdown_timeout_s)


@asynccontextmanager
async def _running(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run tasks for as long as the context lasts; if one of them fails, so does the context."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class _Cluster:
    """The supervisor's state and its link to the workers.

    Attributes:
        supervisor: Supervises the workers.
        control: Answers requests that workers pass on.
        feed: Keeps status pages up to date.
    """

    def __init__(
        self,
        config: RouterConfig,
        nodes: Nodes,
        listener: socket.socket,
        edge: FrontendConfig,
        folder: str,
    ) -> None:
        self._nodes = nodes
        self._loads = NodeLoads()
        self._by_worker: dict[int, WorkerNews] = {}
        self._ended = RouterTotals()
        self._registry = CollectorRegistry()
        self._registry.register(NodeCollector(nodes.membership.members, self._loads))
        self._departures: deque[Departure] = deque(maxlen=MAX_DEPARTURES)
        self._numbers = itertools.count(1)
        self._is_news = self._is_urgent = False
        nodes.on_lost = nodes.on_leaving = self._departs
        nodes.on_change, nodes.on_command = self._changed, self.publish
        # Answers requests that workers pass on.
        own = [route for route in routes() if route.path != "/metrics"]
        own.append(web.get("/metrics", self._metrics))
        control = app_without_text(FrontendConfig(model_name=edge.model_name), own)
        token = registration_token(config.cluster_key)
        control[ROUTER] = RouterState(nodes, self._loads, self._totals, token, trusted=True)
        self.control = control
        self.feed = StatusFeed(ClusterStatus(nodes.membership, self._loads, self._totals))
        self.supervisor = Supervisor(
            worker,
            (config, edge, folder),
            listener,
            control,
            count=config.workers,
            log_level=config.log_level,
        )
        self.supervisor.on_report = self._take_report

    async def _metrics(self, request: web.Request) -> web.Response:
        return exposition(await self.supervisor.metrics(generate_latest(self._registry)))

    def _take_report(self, index: int, data: bytes) -> None:
        """Take in a worker's report."""
        news = _news.decode(data)
        old = self._by_worker.get(index)
        if old is not None and old.worker != news.worker:  # a new one: keep the old totals
            self._ended = self._ended.plus(
                msgspec.structs.replace(old.totals, waiting=0, running=0)
            )
        self._by_worker[index] = news
        self._loads.others = _summed(self._by_worker.values())
        self._is_news |= old is None or (old.worker, old.loads) != (news.worker, news.loads)
        if news.unreachable is not None:
            node_id, generation, error = news.unreachable
            member = self._nodes.membership.in_life(node_id, generation)
            # A worker that stood still has lost all nodes, which are there for everybody else.
            if member is not None and not self._nodes.engines.reached(member.info):
                self._nodes.unreachable(member.info, error)

    def _totals(self) -> RouterTotals:
        """Totals of all workers, ended ones included."""
        return reduce(RouterTotals.plus, (n.totals for n in self._by_worker.values()), self._ended)

    def _departs(self, node_id: str, lost: str | None = None) -> None:
        self._departures.append(Departure(next(self._numbers), node_id, lost))
        self._is_urgent = True

    def _changed(self) -> None:
        if self._is_urgent:
            self.publish()
        self._is_news = True

    def publish(self) -> None:
        """Publish the current state to all workers."""
        self._is_news = self._is_urgent = False
        members = tuple(self._nodes.membership.members.values())
        departures, news = tuple(self._departures), tuple(self._by_worker.values())
        state = ClusterState(members, departures, news, self._nodes.draining)
        self.supervisor.publish(_encoder.encode(state))

    async def publish_regularly(self) -> None:
        """Publish the state when it changes, for ever."""
        while True:
            await asyncio.sleep(PUBLISH_S)
            if self._is_news:
                self.publish()
