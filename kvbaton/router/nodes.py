"""Runs `Membership`: its clock, its probes, and connections to engines."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import msgspec
from typing_extensions import override

from kvbaton.engine.client import EngineClient
from kvbaton.errors import EngineDeadError
from kvbaton.messages import UNREADABLE
from kvbaton.messages.nodes import Members, NodeInfo
from kvbaton.messages.openai import ErrorBody
from kvbaton.router.config import RouterConfig
from kvbaton.router.membership import Change, Member, Membership, NodeState
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.server.network import TrustConfig, bearer, operator_token

logger = logging.getLogger(__name__)

_node_info = msgspec.json.Decoder(NodeInfo)
_reset_answer = msgspec.json.Decoder(dict[str, Any])
_error = msgspec.json.Decoder(ErrorBody)
MAX_INFO_BYTES = 1 << 20
RESET_TIMEOUT_S = 10.0
RESET_STORE_TIMEOUT_S = 70.0
"""Longer than a node waits for its store."""


class EngineClients:
    """Connections to engines, by node and generation.

    They use TCP with the cluster's key, or a Unix socket on one machine without a key.

    Args:
        cluster_key: Key of the cluster.
        on_died: Called with (node, reason) as soon as a connection is lost.
        index: Told what the engines' prefix caches hold; None if that is not needed.
    """

    def __init__(
        self,
        cluster_key: str | None,
        on_died: Callable[[NodeInfo, str], None],
        index: PrefixIndex | None = None,
    ) -> None:
        self._cluster_key = cluster_key
        self._index = index
        self._on_died = on_died
        self._clients: dict[str, tuple[NodeInfo, EngineClient]] = {}
        self._retired: list[EngineClient] = []
        self._watching: dict[EngineClient, asyncio.Task[None]] = {}

    def get(self, node: NodeInfo) -> EngineClient | None:
        """The connection to a node's engine, alive or lost; None if there is none."""
        known, client = self._clients.get(node.node_id, (None, None))
        return client if known is not None and known.generation == node.generation else None

    def reached(self, node: NodeInfo) -> bool:
        """Whether requests can be sent to a node now."""
        client = self.get(node)
        return client is not None and client.dead is None

    async def reach(self, node: NodeInfo) -> None:
        """Connect to a node's engine, unless there is a live connection.

        Raises:
            EngineDeadError: It does not answer, or can't be reached from here.
            ValueError: Its address is malformed.
        """
        if self.reached(node):
            return
        address, path = node.engine_address, node.engine_address.removeprefix("ipc://")
        if path != address and not os.path.exists(path):
            raise EngineDeadError(
                f"its socket {path} is not on this machine, or not for this user; start router and "
                "nodes with the same --cluster-key"
            )
        key = self._cluster_key if path == address else None
        client = await EngineClient.connect(address, cluster_key=key)
        self.retire(node.node_id)
        self._clients[node.node_id] = node, client
        self._watching[client] = asyncio.create_task(self._watch(node, client))
        if self._index is not None and node.role != "encode":
            client.watch_blocks(partial(self._index.take, node))

    async def _watch(self, node: NodeInfo, client: EngineClient) -> None:
        await client.died.wait()
        if self._index is not None and self.get(node) is client:
            self._index.drop(node.node_id)
        self._on_died(node, f"its engine: {client.dead}")

    def retire(self, node_id: str) -> None:
        """Handle a node's departure: its connection ends when the requests on it have."""
        _, client = self._clients.pop(node_id, (None, None))
        if client is not None:
            self._retired.append(client)
        if self._index is not None:
            self._index.drop(node_id)

    async def sweep(self) -> None:
        """Drop what is left of departed nodes: idle connections, and blocks in the index."""
        if self._index is not None:
            await self._index.sweep()
        for client in [c for c in self._retired if c.idle or c.dead is not None]:
            self._retired.remove(client)
            await self._close(client)

    async def close(self) -> None:
        """End all connections."""
        for node_id in tuple(self._clients):
            self.retire(node_id)
        while self._retired:
            await self._close(self._retired.pop())

    async def _close(self, client: EngineClient) -> None:
        self._watching.pop(client).cancel()
        await client.close()


class KnownNodes(ABC):
    """Nodes that requests can be given to.

    Args:
        membership: The table of nodes.
        cluster_key: Key of the cluster.
        index: Told what the nodes' prefix caches hold; None if that is not needed.

    Attributes:
        engines: Connections to the nodes' engines.
        index: As given.
        on_lost: Called with (node id, reason) when a node that may have requests of ours fails.
        on_leaving: Called with the id of a node whose decoding requests are to move away.
        draining: Whether this router is about to stop: it serves on, but asks clients to go
            elsewhere.
    """

    def __init__(
        self, membership: Membership, cluster_key: str | None, index: PrefixIndex | None = None
    ) -> None:
        self.membership = membership
        self.index = index
        self.engines = EngineClients(cluster_key, self.unreachable, index)
        self.on_lost: Callable[[str, str], None] = lambda node_id, reason: None
        self.on_leaving: Callable[[str], None] = lambda node_id: None
        self.draining = False

    @abstractmethod
    def unreachable(self, node: NodeInfo, error: str) -> None:
        """Handle a request that could not be sent to a node's engine."""


class Nodes(KnownNodes):
    """All nodes that this router knows. Make one with `watched`.

    Args:
        membership: The table of nodes.
        session: HTTP session for probes.
        cluster_key: Key of the cluster.
        index: See `KnownNodes`.
        trust: Certificates to trust.

    Attributes:
        on_change: Called when something about a node may have changed.
        on_command: Called when an operator has changed which requests nodes get.
    """

    def __init__(
        self,
        membership: Membership,
        session: aiohttp.ClientSession,
        cluster_key: str | None,
        index: PrefixIndex | None = None,
        trust: TrustConfig | None = None,
    ) -> None:
        super().__init__(membership, cluster_key, index)
        self._trust = TrustConfig() if trust is None else trust
        self.on_change: Callable[[], None] = lambda: None
        self.on_command: Callable[[], None] = lambda: None
        self._session = session
        self._headers = bearer(operator_token(cluster_key))
        self._probes: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def watched(
        cls, config: RouterConfig, model: str, index: PrefixIndex | None = None
    ) -> AsyncIterator[Nodes]:
        """The nodes of a router, probed for as long as the context lasts.

        Args:
            config: Settings.
            model: Name of the served model.
            index: See `KnownNodes`.
        """
        key = config.cluster_key
        connector = aiohttp.TCPConnector(limit=0)  # no limit: one connection per node
        async with aiohttp.ClientSession(
            connector=connector, headers=config.node_headers
        ) as session:
            membership = Membership(config.membership, key is None, model)
            nodes = cls(membership, session, key, index, config.tls)
            for url, role in config.static_nodes:
                nodes.membership.add_static(url, role, time.monotonic())
            watching = asyncio.create_task(nodes._watch())
            try:
                yield nodes
            finally:
                tasks = (watching, *nodes._probes)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await nodes.engines.close()

    # --- events from elsewhere ---

    def register(self, info: NodeInfo) -> Members:
        """Handle a node's registration or heartbeat.

        Raises:
            RequestError: See `Membership.register`.
        """
        members, changes = self.membership.register(info, time.monotonic())
        self._announce(changes)
        self.membership.ready()  # made now, so that no request waits for it
        self.on_change()
        return members

    def drain(self, node_id: str) -> None:
        """Send no new requests to a node, and move its decoding requests away where possible.

        Called again, it tries again to move what is left.

        Raises:
            RequestError: There is no such node (404).
        """
        if changes := self.membership.drain(node_id):
            self._announce(changes)
        else:
            self.migrate(node_id)

    def migrate(self, node_id: str) -> None:
        """Move the requests that a node decodes now to others, where possible.

        Raises:
            RequestError: There is no such node (404).
        """
        self.membership.require(node_id)
        self.on_leaving(node_id)
        self.on_change()

    def pause(self, node_id: str, *, paused: bool) -> None:
        """Send no new requests to a node for now, or resume; see `Membership.pause`."""
        self.membership.pause(node_id, paused=paused)
        logger.info("node %s: %s", node_id, "paused" if paused else "resumed")
        self.on_command()

    def remove(self, node_id: str, generation: str | None = None) -> None:
        """Forget a node, or one generation of it only.

        Raises:
            RequestError: There is no such node (404).
        """
        self._announce(self.membership.remove(node_id, generation))

    @override
    def unreachable(self, node: NodeInfo, error: str) -> None:
        self._announce(self.membership.unreachable(node.node_id, node.generation, error))

    # --- asking ---

    async def reset_prefix_caches(self, *, external: bool = False) -> dict[str, str | None]:
        """Empty nodes' prefix caches, also on paused and draining nodes.

        Args:
            external: Whether to empty their stores, too.

        Returns:
            For each node id, None or why it failed.
        """
        empty = (NodeState.STARTING, NodeState.LOADING, NodeState.GONE)
        members = self.membership.members.values()
        nodes = [member.info for member in members if member.state not in empty]
        done = await asyncio.gather(*(self._reset(info.url, external) for info in nodes))
        return {info.node_id: error for info, error in zip(nodes, done, strict=True)}

    async def _reset(self, url: str, external: bool) -> str | None:
        where = url.rstrip("/") + "/reset_prefix_cache" + "?reset_external=true" * external
        try:
            async with (
                asyncio.timeout(RESET_STORE_TIMEOUT_S if external else RESET_TIMEOUT_S),
                self._session.post(
                    where, headers=self._headers, ssl=self._trust.client(url)
                ) as response,
            ):
                if response.status in (401, 403):
                    return (
                        "it takes us for a stranger: give the router the node's --cluster-key, or "
                        "one of its API keys as --node-api-key"
                    )
                if response.status == 503:
                    return _error.decode(await response.content.read(MAX_INFO_BYTES)).error.message
                response.raise_for_status()
                answer = _reset_answer.decode(await response.content.read(MAX_INFO_BYTES))
        except (aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE) as error:
            return f"{error!r}"
        return None if answer.get("result") is not False else "it says that it did not"

    # --- watching ---

    async def _watch(self) -> None:
        """Probe all nodes for ever."""
        due, timers = time.monotonic(), self.membership.timers
        while True:
            try:
                now = time.monotonic()
                if now - due > timers.heartbeat_s:  # heartbeats since then wait in sockets
                    logger.warning("this process stood still for %.1f s", now - due)
                    self.membership.stood_still(now - due, now)
                self._announce(self.membership.tick(now))
                for member in self.membership.probe_targets():
                    self._probe_soon(member)
                await self.engines.sweep()
            except Exception:  # perhaps of a callback; probes must go on
                logger.exception("a look at the nodes failed")
            due = time.monotonic() + timers.probe_period_s
            await asyncio.sleep(timers.probe_period_s)

    def _probe_soon(self, member: Member) -> None:
        # One probe per node at a time: they must not pile up at a silent node.
        name = f"probe {member.info.url}"
        if any(task.get_name() == name for task in self._probes):
            return
        task = asyncio.create_task(self._probe(member), name=name)
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe(self, member: Member) -> None:
        asked, error, answered = member.info, None, False
        try:
            async with asyncio.timeout(self.membership.timers.probe_timeout_s):
                if member.static:
                    url = asked.url
                    asked = _node_info.decode(await self._get(url, "/node"))
                    self._announce(self.membership.identified(url, asked, time.monotonic()))
                await self._get(member.info.url, "/health")
                if self.membership.in_life(asked.node_id, asked.generation) is None:
                    return  # it was replaced meanwhile, or is refused
                await self.engines.reach(asked)
        except TimeoutError:
            error = "no answer to a probe in time"
        except aiohttp.ClientResponseError as failure:
            error, answered = f"it answers {failure.status} to a probe", True
        except (aiohttp.ClientError, OSError) as failure:
            error = f"probe failed: {failure}"
        except UNREADABLE as failure:
            error, answered = f"its /node is malformed: {failure}", True
        except (EngineDeadError, ValueError) as failure:
            error = f"its engine can't be reached: {failure}"
        now = time.monotonic()
        changes = self.membership.probed(
            asked.node_id, asked.generation, error, now, answered=answered
        )
        self._announce(changes)

    async def _get(self, url: str, path: str) -> bytes:
        tls = self._trust.client(url)
        async with self._session.get(url.rstrip("/") + path, ssl=tls) as response:
            response.raise_for_status()
            return await response.content.read(MAX_INFO_BYTES)

    def _announce(self, changes: list[Change]) -> None:
        for change in changes:
            level = logging.WARNING if change.new is NodeState.UNHEALTHY else logging.INFO
            logger.log(level, "%s", change.describe())
            if change.new is NodeState.READY:
                for misfit in self.membership.misfits(change.node_id):
                    logger.warning("node %s %s", change.node_id, misfit)
            if change.lost:
                self.on_lost(change.node_id, change.reason)
            if change.new is NodeState.DRAINING:
                self.on_leaving(change.node_id)
            if change.new is NodeState.GONE:
                self.engines.retire(change.node_id)
            member = self.membership.members.get(change.node_id)
            if change.new is NodeState.STARTING and member is not None:
                self._probe_soon(member)
        if changes:
            self.on_change()
