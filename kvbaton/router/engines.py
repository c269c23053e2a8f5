"""The router as a frontend of the nodes' engines: one connection to each, and requests over it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from kvbaton.engine.client import EngineClient
from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.messages.engine import Output
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.node_request import Listener, NodeError, NodeRequest

logger = logging.getLogger(__name__)

IPC = "ipc://"


class EngineClients:
    """Connections to engines, by the lives of their nodes.

    A node has one if it offers a socket that can be reached from here: over TCP with the cluster's
    key, or on this machine. All others are asked over HTTP.

    Args:
        cluster_key: of the cluster.
        on_died: called with (node, reason) when a connection is lost, at once.
    """

    def __init__(self, cluster_key: str | None, on_died: Callable[[NodeInfo, str], None]) -> None:
        self._cluster_key = cluster_key
        self._on_died = on_died
        self._clients: dict[str, tuple[NodeInfo, EngineClient]] = {}
        self._retired: list[EngineClient] = []
        self._watching: dict[EngineClient, asyncio.Task[None]] = {}

    def get(self, node: NodeInfo) -> EngineClient | None:
        """The connection to a node's engine, alive or lost; None if there is none."""
        known, client = self._clients.get(node.node_id, (None, None))
        return client if known is not None and known.generation == node.generation else None

    def offers_socket(self, node: NodeInfo) -> bool:
        """Whether a node is to be asked over its engine's socket."""
        address = node.engine_address
        if address.startswith(IPC):
            return os.path.exists(address.removeprefix(IPC))
        return bool(address and self._cluster_key)

    def reached(self, node: NodeInfo) -> bool:
        """Whether a node can be asked now: its connection lives, or it is asked over HTTP."""
        client = self.get(node)
        return client.dead is None if client is not None else not self.offers_socket(node)

    async def reach(self, node: NodeInfo) -> None:
        """Connect to a node's engine if it is to have a connection, and has none that lives.

        Raises:
            EngineDeadError: it does not answer.
            ValueError: its address is none.
        """
        if self.reached(node) or not self.offers_socket(node):
            return
        is_ipc = node.engine_address.startswith(IPC)
        key = None if is_ipc else self._cluster_key
        client = await EngineClient.connect(node.engine_address, cluster_key=key)
        self.retire(node.node_id)
        self._clients[node.node_id] = node, client
        self._watching[client] = asyncio.create_task(self._watch(node, client))

    async def _watch(self, node: NodeInfo, client: EngineClient) -> None:
        await client.died.wait()
        self._on_died(node, f"its engine: {client.dead}")

    def retire(self, node_id: str) -> None:
        """A node has left: its connection ends when the requests on it have."""
        _, client = self._clients.pop(node_id, (None, None))
        if client is not None:
            self._retired.append(client)

    async def sweep(self) -> None:
        """End connections of nodes that have left and do nothing for us any more."""
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


class EngineCall:
    """One request to a node over its engine's socket (an `OutputReceiver`).

    Args:
        client: of the node's engine.
        asked: the request.
        listener: who hears what the node says.
        on_over: called once, when nothing more will come.
    """

    __slots__ = ("_asked", "_client", "_done", "_listener", "_on_over", "_open_choices")

    def __init__(
        self,
        client: EngineClient,
        asked: NodeRequest,
        listener: Listener,
        on_over: Callable[[], object],
    ) -> None:
        self._client = client
        self._asked = asked
        self._listener = listener
        self._on_over = on_over
        self._open_choices = asked.request.params.n
        self._done = False

    def start(self) -> None:
        """Send it."""
        try:
            self._client.submit(self._asked.request, self)
        except (EngineDeadError, RequestError) as error:
            # Whoever sends is not to be told before it has noted that it sent.
            asyncio.get_running_loop().call_soon(self.fail, error)

    def put(self, output: Output) -> None:
        """The node says this."""
        if output.finish_reason is not None:
            self._open_choices -= 1
        over = not self._open_choices
        try:
            self._listener.output(self._asked, output)
        except Exception as error:
            logger.exception("unforeseen failure of a request to %s", self._asked.node.node_id)
            self.fail(RequestError(f"the router failed: {error!r}", status=500))
            return
        if over and not self._done:
            self._end(over=True)
            self._listener.ended(self._asked)

    def fail(self, error: Exception, *, over: bool = False) -> None:
        """Nothing more will come."""
        if self._done:
            return
        self._end(over=over)
        if isinstance(error, RequestError):
            why = NodeError(error.message, error.status, error.param, error.code)
            self._listener.failed(self._asked, why)
        else:
            self._listener.failed(self._asked, NodeError(str(error)), unreachable=True)

    def cancel(self) -> None:
        """Nobody listens any more."""
        if not self._done:
            self._end(over=False)

    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._done

    def _end(self, *, over: bool) -> None:
        self._done = True
        self._client.forget(self._asked.request.request_id, over=over)
        self._on_over()
