"""The driver of `RequestRelay`: its clock, its requests to nodes, and who waits for its tokens."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial

import aiohttp
from msgspec.structs import replace

from kvbaton.engine.client import merge_outputs
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item, Output
from kvbaton.router.encoders import with_encoders
from kvbaton.router.engines import EngineCall
from kvbaton.router.loads import NodeLoads
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.node_http import ask_over_http
from kvbaton.router.node_request import NodeError, NodeRequest
from kvbaton.router.nodes import Nodes
from kvbaton.router.pairing import Route, choose
from kvbaton.router.policy import RoutingPolicy
from kvbaton.router.relay import Action, Cancel, Finished, RelayTimers, RequestRelay, Send
from kvbaton.router.worker_nodes import WorkerNodes

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""What is open at nodes at the end of a request may take this long to end by itself, which keeps
the connection."""
MAX_BEHIND = 16384
"""A client that is so many tokens (and log probabilities) behind its nodes has left."""


@dataclass(frozen=True)
class DispatchConfig(RoutingPolicy):
    """How requests are dispatched.

    Attributes:
        timers: of each request.
        max_behind: tokens, and log probabilities, that may wait for one client.
    """

    timers: RelayTimers = field(default_factory=RelayTimers)
    max_behind: int = MAX_BEHIND


class Dispatcher:
    """A `TokenSource` over all nodes.

    Args:
        nodes: who there is.
        session: for nodes that are asked over HTTP.
        metrics: what is counted.
        loads: what is in flight.
        config: how to dispatch.
    """

    def __init__(
        self,
        nodes: Nodes | WorkerNodes,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        loads: NodeLoads,
        config: DispatchConfig,
    ) -> None:
        self.nodes = nodes
        self.session = session
        self.metrics = metrics
        self.loads = loads
        self.config = config
        self._running: set[_Running] = set()
        self._lingering: set[asyncio.Task[None]] = set()
        nodes.on_lost = self.node_lost

    async def generate(self, request: AddRequest) -> AsyncGenerator[Output]:
        """Run a request on the nodes; see `TokenSource`.

        While the consumer is behind, outputs of one choice become one.

        Raises:
            RequestError: it is wrong, or nobody could serve it.
        """
        if request.params.seed is None:  # all nodes must sample alike
            seeded = replace(request.params, seed=secrets.randbits(63))
            request = replace(request, params=seeded)
        running = _Running(self, request)
        self._running.add(running)
        try:
            running.start()
            while True:
                if outputs := running.take():
                    for output in outputs:
                        yield output
                elif running.over:
                    return
                else:
                    await running.news()
        finally:
            self._running.discard(running)
            running.close()

    def route(self, items: Sequence[Item], num_tokens: int, avoid: frozenset[str]) -> Route | None:
        """Choose nodes by what is known now."""
        ready = self.nodes.membership.ready()
        shortest, smallest = self.config.min_handover_tokens, self.config.min_encode_rows
        route = choose(ready, self.loads, num_tokens, exclude=avoid, min_handover_tokens=shortest)
        if route is None or not items:
            return route
        return with_encoders(route, items, ready, self.loads, exclude=avoid, min_rows=smallest)

    def node_lost(self, node_id: str, reason: str) -> None:
        """A node is of no use any more: its requests go elsewhere now, not at a timeout."""
        for running in list(self._running):
            running.node_lost(node_id, reason)

    def linger(self, tasks: list[asyncio.Task[None]]) -> None:
        """Let node requests of a finished request end by themselves for a moment."""
        task = asyncio.create_task(_end_soon(tasks))
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def close(self) -> None:
        """Wait for what lingers."""
        await asyncio.gather(*self._lingering)


class _Running:
    """One request on its way; hears what nodes say (`Listener`).

    Attributes:
        over: it has ended; `take` gives out what is left.
    """

    def __init__(self, dispatcher: Dispatcher, request: AddRequest) -> None:
        self._dispatcher = dispatcher
        self._metrics = dispatcher.metrics
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._relay = RequestRelay(
            request,
            partial(dispatcher.route, request.items),
            transfer_id=os.urandom(16),
            item_ids=[os.urandom(16) for _ in request.items],
            timers=dispatcher.config.timers,
            now=self._started_at,
        )
        self._calls: dict[NodeRequest, asyncio.Task[None] | EngineCall] = {}
        self._prefilling: set[NodeRequest] = set()
        self._ready: list[Output] = []
        self._behind = 0
        self._read_at = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: RequestError | None = None
        self._outcome = "cancelled"
        self._first = True
        self.over = False

    # --- the consumer's side ---

    def start(self) -> None:
        """Ask the first nodes."""
        self._perform(self._relay.start(self._started_at))
        self._tick()

    def take(self) -> Sequence[Output]:
        """All that is new, one output per choice.

        Raises:
            RequestError: the request has failed.
        """
        ready, self._ready, self._behind = self._ready, [], 0
        if not ready:
            if self._error is not None:
                raise self._error
            return ready
        now = self._loop.time()
        self._metrics.overhead.observe(now - self._read_at)
        if self._first and any(output.token_ids for output in ready):
            self._first = False
            self._metrics.first_token.observe(now - self._started_at)
        return ready if len(ready) == 1 else merged(ready)

    def news(self) -> asyncio.Future[None]:
        """Done once there is something to take, or the end."""
        self._waiter = self._loop.create_future()
        return self._waiter

    def close(self) -> None:
        """The client has all it wanted, or has gone: end what is open at nodes."""
        self._perform(self._relay.client_gone())
        if self._timer is not None:
            self._timer.cancel()
        self._metrics.requests.labels(self._outcome).inc()
        for line in self._relay.story:
            logger.warning("request %s: %s", self._relay.request.request_id, line)
        left = [c for c in self._calls.values() if isinstance(c, asyncio.Task) and not c.done()]
        if left:
            self._dispatcher.linger(left)

    # --- the nodes' side ---

    def output(self, asked: NodeRequest, output: Output) -> None:
        """A node made tokens."""
        if asked in self._prefilling:
            self._prefilling.discard(asked)
            self._dispatcher.loads.prefilled(asked)
        now = self._loop.time()
        if not self._ready:
            self._read_at = now
        self._perform(self._relay.output(asked, output, now))
        if asked.side == "source":
            self._tick()  # an end that it announced has its own deadline

    def ended(self, asked: NodeRequest) -> None:
        """A node has said all."""
        self._perform(self._relay.ended(asked, self._loop.time()))

    def failed(self, asked: NodeRequest, error: NodeError, *, unreachable: bool = False) -> None:
        """A node refused, or broke off."""
        self._metrics.node_request_failures.labels(asked.node.node_id, asked.side).inc()
        self._perform(self._relay.failed(asked, error, self._loop.time()))
        if unreachable:
            self._dispatcher.nodes.unreachable(asked.node, error.message)

    def node_lost(self, node_id: str, reason: str) -> None:
        """One of the nodes is gone."""
        for asked, call in list(self._calls.items()):
            if asked.node.node_id == node_id and not call.done():
                self.failed(asked, NodeError(f"the node is lost: {reason}"))

    # --- carrying out ---

    def _perform(self, actions: list[Action]) -> None:
        late: list[NodeRequest] = []
        for action in actions:
            match action:
                case Output():
                    self._ready.append(action)
                    self._count(action)
                case Send(asked):
                    # The target has time until the prompt is computed: asking it is not to hold up
                    # the source.
                    late.append(asked) if asked.side == "target" else self._send(asked)
                case Cancel(asked):
                    self._calls[asked].cancel()
                case Finished():
                    self._outcome, self.over = "finished", True
                case RequestError():
                    self._outcome, self.over, self._error = "failed", True, action
        for asked in late:
            self._send(asked)
        if actions and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _count(self, output: Output) -> None:
        self._behind += len(output.token_ids)
        if output.logprobs is not None:
            self._behind += sum(len(entry.top) for entry in output.logprobs)
        if self._behind > self._dispatcher.config.max_behind and not self._relay.done:
            self._error = RequestError(
                "the client reads more slowly than its tokens are made", status=503, code="too_slow"
            )
            self._outcome, self.over = "failed", True
            self._perform(self._relay.client_gone())

    def _send(self, asked: NodeRequest) -> None:
        loads, metrics = self._dispatcher.loads, self._metrics
        loads.enter(asked)
        self._prefilling.add(asked)
        alone = asked.prefills and asked.side == "target"
        metrics.node_requests.labels(asked.node.node_id, "alone" if alone else asked.side).inc()
        if rows := asked.rows:
            metrics.items.labels("prefill" if asked.prefills else "encoder").inc(len(rows))
        if asked.attempt and asked.side == "target":
            metrics.retries.inc()
        client = self._dispatcher.nodes.engines.get(asked.node)
        if client is not None:
            call = EngineCall(client, asked, self, partial(loads.remove, asked))
            self._calls[asked] = call
            call.start()
            return
        request_id = self._relay.request.request_id
        task = asyncio.create_task(
            ask_over_http(self._dispatcher.session, asked, request_id, self),
            name=f"{asked.name} {asked.request.request_id}",
        )
        task.add_done_callback(lambda _: loads.remove(asked))
        self._calls[asked] = task

    def _tick(self) -> None:
        """Tell the relay the time, and come again when it next wants to know."""
        now = self._loop.time()
        self._perform(self._relay.tick(now))
        if self._timer is not None:
            self._timer.cancel()
        if not self._relay.done:
            self._timer = self._loop.call_at(self._relay.next_deadline(), self._tick)


def merged(outputs: Sequence[Output]) -> list[Output]:
    """Outputs in the order in which they came, as one per choice."""
    by_choice: dict[int, list[Output]] = {}
    for output in outputs:
        by_choice.setdefault(output.choice, []).append(output)
    return [merge_outputs(mine) for mine in by_choice.values()]


async def _end_soon(tasks: list[asyncio.Task[None]]) -> None:
    _, late = await asyncio.wait(tasks, timeout=LINGER_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
