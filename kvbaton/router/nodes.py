"""The shell around `Membership`: its clock, its probes, and who wants to know of changes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from kvbaton.errors import EngineDeadError
from kvbaton.messages.nodes import Members, NodeInfo
from kvbaton.router.engines import EngineClients
from kvbaton.router.membership import Change, Member, Membership, State
from kvbaton.server.cluster_token import operator_token

logger = logging.getLogger(__name__)

_node_info = msgspec.json.Decoder(NodeInfo)
_reset_answer = msgspec.json.Decoder(dict[str, Any])
MAX_INFO_BYTES = 1 << 20
RESET_TIMEOUT_S = 10.0


class Nodes:
    """All nodes that this router knows.

    Args:
        membership: the table.
        session: for probes.
        cluster_key: with which engines are reached over TCP.

    Attributes:
        engines: connections to the nodes' engines.
        on_change: called when something about a node may have changed.
        on_lost: called with (node id, reason) when a node that may have requests of ours fails.
    """

    def __init__(
        self,
        membership: Membership,
        session: aiohttp.ClientSession,
        *,
        cluster_key: str | None = None,
    ) -> None:
        self.membership = membership
        self.engines = EngineClients(cluster_key, self.unreachable)
        self.on_lost: Callable[[str, str], None] = lambda node_id, reason: None
        self.on_change: Callable[[], None] = lambda: None
        self._session = session
        self._headers: dict[str, str] = {}
        if cluster_key:
            self._headers["Authorization"] = f"Bearer {operator_token(cluster_key)}"
        self._probes: set[asyncio.Task[None]] = set()

    # --- events from elsewhere ---

    def add_static(self, url: str, role: str) -> None:
        """A flag names a node."""
        self.membership.add_static(url, role, time.monotonic())

    def register(self, info: NodeInfo) -> Members:
        """A node registers or repeats its heartbeat.

        Raises:
            RequestError: see `Membership.register`.
        """
        members, changes = self.membership.register(info, time.monotonic())
        self._announce(changes)
        self.on_change()
        return members

    def drain(self, node_id: str) -> None:
        """Send no new requests there.

        Raises:
            RequestError: no such node (404).
        """
        self._announce(self.membership.drain(node_id))

    def remove(self, node_id: str) -> None:
        """Forget a node.

        Raises:
            RequestError: no such node (404).
        """
        self._announce(self.membership.remove(node_id))

    def unreachable(self, node: NodeInfo, error: str) -> None:
        """A request could not connect to a node."""
        self._announce(self.membership.unreachable(node.node_id, node.generation, error))

    # --- asking ---

    async def reset_prefix_caches(self) -> dict[str, str | None]:
        """Let all ready nodes forget cached prefixes; by node id, None or why it did not."""
        nodes = [member.info for member in self.membership.ready()]
        done = await asyncio.gather(*(self._reset(info.url) for info in nodes))
        return {info.node_id: error for info, error in zip(nodes, done, strict=True)}

    async def _reset(self, url: str) -> str | None:
        where = url.rstrip("/") + "/reset_prefix_cache"
        try:
            async with (
                asyncio.timeout(RESET_TIMEOUT_S),
                self._session.post(where, headers=self._headers) as response,
            ):
                if response.status in (401, 403):
                    return (
                        "it takes us for a stranger: give the router the node's --cluster-key, or "
                        "one of its API keys as --node-api-key"
                    )
                response.raise_for_status()
                answer = _reset_answer.decode(await response.content.read(MAX_INFO_BYTES))
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            return f"{error!r}"
        return None if answer.get("result") is not False else "it says that it did not"

    # --- watching ---

    async def watch(self) -> None:
        """Probe all nodes for ever."""
        while True:
            self._announce(self.membership.tick(time.monotonic()))
            for member in self.membership.probe_targets():
                self._probe_soon(member)
            await self.engines.sweep()
            await asyncio.sleep(self.membership.timers.probe_period_s)

    def _probe_soon(self, member: Member) -> None:
        # One probe of a node at a time: a silent one must not collect them.
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
                    asked = await self._identify(asked.url)
                await self._get(asked.url, "/health")
                await self.engines.reach(asked)
        except TimeoutError:
            error = "no answer to a probe in time"
        except aiohttp.ClientResponseError as failure:
            error, answered = f"it answers {failure.status} to a probe", True
        except (aiohttp.ClientError, OSError) as failure:
            error = f"probe failed: {failure}"
        except (EngineDeadError, ValueError) as failure:
            error = f"its engine can't be reached: {failure}"
        except msgspec.DecodeError as failure:
            error, answered = f"its /node is malformed: {failure}", True
        now = time.monotonic()
        changes = self.membership.probed(
            asked.node_id, asked.generation, error, now, answered=answered
        )
        self._announce(changes)

    async def _identify(self, url: str) -> NodeInfo:
        info = _node_info.decode(await self._get(url, "/node"))
        self._announce(self.membership.identified(url, info, time.monotonic()))
        return info

    async def _get(self, url: str, path: str) -> bytes:
        async with self._session.get(url.rstrip("/") + path) as response:
            response.raise_for_status()
            return await response.content.read(MAX_INFO_BYTES)

    def _announce(self, changes: list[Change]) -> None:
        for change in changes:
            level = logging.WARNING if change.new is State.UNHEALTHY else logging.INFO
            logger.log(level, "%s", change.describe())
            if change.lost:
                self.on_lost(change.node_id, change.reason)
            if change.new is State.GONE:
                self.engines.retire(change.node_id)
            member = self.membership.members.get(change.node_id)
            if change.new is State.STARTING and member is not None:
                self._probe_soon(member)
        if changes:
            self.on_change()

    async def close(self) -> None:
        """Stop the probes under way, and end the connections to engines."""
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await self.engines.close()
