"""What a worker of a router knows of the nodes: what its supervisor publishes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
from msgspec import Struct

from kvbaton.errors import EngineDeadError
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.engines import EngineClients
from kvbaton.router.loads import NodeLoads
from kvbaton.router.membership import Member, Membership, State
from kvbaton.router.pairing import NodeLoad
from kvbaton.server.supervisor import WorkerLink

logger = logging.getLogger(__name__)

REPORT_S = 0.1
"""A worker tells its loads so often, if they changed."""
RETRY_S = 1.0
"""Between attempts to reach an engine."""


class ClusterState(Struct, frozen=True):
    """What the supervisor knows.

    Attributes:
        members: all nodes.
        lost: (node id, reason) of those that were lost just now.
        loads: by worker (its process id) and node id.
    """

    members: tuple[Member, ...]
    lost: tuple[tuple[str, str], ...] = ()
    loads: dict[int, dict[str, NodeLoad]] = {}


class WorkerNews(Struct, frozen=True):
    """What a worker tells.

    Attributes:
        worker: its process id.
        loads: what it has in flight, by node id.
        unreachable: (node id, generation, why) of a node that it could not reach.
    """

    worker: int
    loads: dict[str, NodeLoad]
    unreachable: tuple[str, str, str] | None = None


_encoder = msgspec.msgpack.Encoder()
_state = msgspec.msgpack.Decoder(ClusterState)
news_decoder = msgspec.msgpack.Decoder(WorkerNews)


class WorkerNodes:
    """As `Nodes`, in a worker. A node gets requests once its engine is reached from here, too.

    Args:
        link: to the supervisor.
        loads: of this worker.
        cluster_key: with which engines are reached over TCP.

    Attributes:
        membership: as published.
        engines: connections to the nodes' engines.
        on_lost: called with (node id, reason) when a node fails.
    """

    def __init__(self, link: WorkerLink, loads: NodeLoads, cluster_key: str | None) -> None:
        self.membership = Membership()
        self.engines = EngineClients(cluster_key, self.unreachable)
        self.on_lost: Callable[[str, str], None] = lambda node_id, reason: None
        self._link = link
        self._loads = loads
        self._told: Mapping[str, NodeLoad] = {}
        self._published: tuple[Member, ...] = ()
        self._news = asyncio.Event()
        link.on_state = self.take_state

    def take_state(self, data: bytes) -> None:
        """The supervisor says this."""
        state = _state.decode(data)
        self._published = state.members
        others: dict[str, NodeLoad] = {}
        for worker, loads in state.loads.items():
            if worker != os.getpid():
                for node_id, load in loads.items():
                    others[node_id] = others.get(node_id, NodeLoad()) + load
        self._loads.others = others
        known = {member.info.node_id for member in state.members}
        for node_id in self.membership.members.keys() - known:
            self.engines.retire(node_id)
        self._show()
        self._news.set()
        for node_id, reason in state.lost:
            self.on_lost(node_id, reason)

    def _show(self) -> None:
        """Requests go to ready nodes, as far as this worker can reach them."""
        self.membership.members = {
            member.info.node_id: member
            if self.engines.reached(member.info)
            else replace(member, state=State.STARTING)
            for member in self._published
        }

    def unreachable(self, node: NodeInfo, error: str) -> None:
        """A node could not be reached, or its engine died; the supervisor decides what it means."""
        self._show()
        self._report((node.node_id, node.generation, error))

    def _report(self, unreachable: tuple[str, str, str] | None = None) -> None:
        self._told = self._loads.own
        self._link.report(_encoder.encode(WorkerNews(os.getpid(), self._loads.own, unreachable)))

    async def watch(self) -> None:
        """Reach engines, for ever."""
        while True:
            self._news.clear()
            for member in self._published:
                if member.state is State.READY and not self.engines.reached(member.info):
                    await self._reach(member.info)
            await self.engines.sweep()
            try:
                await asyncio.wait_for(self._news.wait(), RETRY_S)
            except TimeoutError:
                continue

    async def _reach(self, node: NodeInfo) -> None:
        try:
            await self.engines.reach(node)
        except (EngineDeadError, ValueError) as error:
            logger.warning("can't reach the engine of %s: %s", node.node_id, error)
        self._show()

    async def report_loads(self) -> None:
        """Tell what is in flight, for ever."""
        self._report()  # this worker may be a new one, in the place of one that had some
        while True:
            await asyncio.sleep(REPORT_S)
            if self._loads.own != self._told:
                self._report()

    async def close(self) -> None:
        """End the connections to engines."""
        await self.engines.close()
