"""The driver of `RequestRelay`: its clock, its requests to nodes, and who waits for its tokens."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Sequence

from msgspec.structs import replace

from kvbaton.engine.client import EngineClient, merge_outputs
from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.messages.engine import AddRequest, Item, Output
from kvbaton.router.choose import IDLE, NodeLoad, NodeLoads, Route, choose
from kvbaton.router.config import DispatchConfig
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.node_request import NodeError, NodeRequest
from kvbaton.router.nodes import KnownNodes
from kvbaton.router.relay import Action, AskNode, CancelNode, Finished, RequestRelay

logger = logging.getLogger(__name__)


class Dispatcher:
    """A `TokenSource` over all nodes.

    Args:
        nodes: who there is.
        metrics: what is counted.
        loads: what is in flight.
        config: how to dispatch.
    """

    def __init__(
        self,
        nodes: KnownNodes,
        metrics: RouterMetrics,
        loads: NodeLoads,
        config: DispatchConfig,
    ) -> None:
        self.nodes = nodes
        self.metrics = metrics
        self.loads = loads
        self.config = config
        self._running: set[_Running] = set()
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
                if running.ready:
                    for output in running.take():
                        yield output
                elif running.error is not None:
                    raise running.error
                elif running.over:
                    return
                else:
                    await running.news()
        finally:
            self._running.discard(running)
            running.close()

    def route(self, num_tokens: int, items: Sequence[Item], avoid: frozenset[str]) -> Route | None:
        """Choose nodes by what is known now."""
        ready = self.nodes.membership.ready()
        return choose(ready, self.loads, num_tokens, items, avoid=avoid, policy=self.config)

    def node_lost(self, node_id: str, reason: str) -> None:
        """A node is of no use any more: its requests go elsewhere now, not at a timeout."""
        for running in list(self._running):
            running.node_lost(node_id, reason)


class _Running:
    """One client's request on its way.

    Attributes:
        relay: decides what becomes of it.
        ready: outputs for the client, in the order in which they came.
        over: nothing more will become ready.
        error: why it has failed, if it has.
        read_at: when the first of those that are ready came.
    """

    def __init__(self, dispatcher: Dispatcher, request: AddRequest) -> None:
        self.dispatcher = dispatcher
        self.loop = asyncio.get_running_loop()
        self._started_at = self.loop.time()
        self.relay = RequestRelay(
            request,
            dispatcher.route,
            transfer_id=os.urandom(16),
            item_ids=[os.urandom(16) for _ in request.items],
            timers=dispatcher.config.timers,
            now=self._started_at,
        )
        self.ready: list[Output] = []
        self.over = False
        self.error: RequestError | None = None
        self.read_at = 0.0
        self._calls: dict[NodeRequest, _NodeCall] = {}
        self._behind = 0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._outcome = "cancelled"
        self._first = True

    # --- the consumer's side ---

    def start(self) -> None:
        """Ask the first nodes."""
        self.perform(self.relay.start(self._started_at))
        self.tick()

    def take(self) -> Sequence[Output]:
        """All that is ready, one output per choice."""
        ready, self.ready, self._behind = self.ready, [], 0
        now, metrics = self.loop.time(), self.dispatcher.metrics
        metrics.overhead.observe(now - self.read_at)
        if self._first and any(output.token_ids for output in ready):
            self._first = False
            metrics.first_token.observe(now - self._started_at)
        return ready if len(ready) == 1 else merged(ready)

    def news(self) -> asyncio.Future[None]:
        """Done once something is ready, or all is over."""
        self._waiter = self.loop.create_future()
        return self._waiter

    def close(self) -> None:
        """The client has all it wanted, or has gone: end what is open at nodes."""
        self.perform(self.relay.client_gone())
        if self._timer is not None:
            self._timer.cancel()
        self.dispatcher.metrics.requests.labels(self._outcome).inc()
        for line in self.relay.story:
            logger.warning("request %s: %s", self.relay.request.request_id, line)

    # --- the nodes' side ---

    def failed(self, asked: NodeRequest, error: NodeError) -> None:
        """A node refused, or broke off."""
        failures = self.dispatcher.metrics.node_request_failures
        failures.labels(asked.node.node_id, asked.side).inc()
        self.perform(self.relay.failed(asked, error, self.loop.time()))

    def node_lost(self, node_id: str, reason: str) -> None:
        """One of the nodes is gone."""
        for asked, call in list(self._calls.items()):
            if asked.node.node_id == node_id and not call.done:
                self.failed(asked, NodeError(f"the node is lost: {reason}"))

    # --- carrying out ---

    def perform(self, actions: list[Action]) -> None:
        """Do what the relay wants, and wake the consumer."""
        late: list[NodeRequest] = []
        for action in actions:
            match action:
                case Output():
                    self.ready.append(action)
                    self._behind += len(action.token_ids)
                    if action.logprobs is not None:
                        self._behind += sum(len(entry.top) for entry in action.logprobs)
                case AskNode(asked):
                    # The target has time until the prompt is computed: asking it is not to hold up
                    # the source.
                    late.append(asked) if asked.side == "target" else self._ask(asked)
                case CancelNode(asked):
                    self._calls[asked].cancel()
                case Finished():
                    self._outcome, self.over = "finished", True
                case RequestError():
                    self._outcome, self.over, self.error = "failed", True, action
        for asked in late:
            self._ask(asked)
        if self._behind > self.dispatcher.config.max_behind and not self.relay.done:
            self.perform(self.relay.client_gone())
            self._outcome, self.over = "failed", True
            self.error = RequestError(
                "the client reads more slowly than its tokens are made", status=503, code="too_slow"
            )
        if actions and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ask(self, asked: NodeRequest) -> None:
        metrics, side = self.dispatcher.metrics, asked.side
        part = "alone" if side == "target" and asked.prefills else side
        metrics.node_requests.labels(asked.node.node_id, part).inc()
        if asked.num_items:
            where = "prefill" if asked.prefills else "encoder"
            metrics.items.labels(where).inc(asked.num_items)
        if asked.attempt and side == "target":
            metrics.retries.inc()
        self._calls[asked] = _NodeCall(self, asked)

    def tick(self) -> None:
        """Tell the relay the time, and come again when it next wants to know."""
        self.perform(self.relay.tick(self.loop.time()))
        if self._timer is not None:
            self._timer.cancel()
        if not self.relay.done:
            self._timer = self.loop.call_at(self.relay.next_deadline(), self.tick)


class _NodeCall:
    """One request to one node over its engine's socket (an `OutputReceiver`), from when it is made.

    Attributes:
        done: nothing more will come.
    """

    __slots__ = ("_asked", "_client", "_load", "_open_choices", "_running", "done")

    def __init__(self, running: _Running, asked: NodeRequest) -> None:
        self._running = running
        self._asked = asked
        self._load = IDLE
        self._open_choices = asked.request.params.n
        self._client: EngineClient | None = running.dispatcher.nodes.engines.get(asked.node)
        self.done = False
        self._set_load(asked.load)
        try:
            if self._client is None:
                raise EngineDeadError("its engine is not connected")
            self._client.submit(asked.request, self)
        except (EngineDeadError, RequestError) as error:
            # The relay is not to be told before all was done that it wanted.
            running.loop.call_soon(self.fail, error)

    def put(self, output: Output) -> None:
        """The node says this."""
        asked, running = self._asked, self._running
        if output.finish_reason is not None:
            self._open_choices -= 1
        if self._load.prompt_tokens:  # not any more, if it has a token
            self._set_load(NodeLoad(0, self._load.sequences, self._load.tokens))
        now = running.loop.time()
        if not running.ready:
            running.read_at = now
        try:
            running.perform(running.relay.output(asked, output, now))
            if asked.side == "source":
                running.tick()  # an end that it announced has its own deadline
        except Exception as error:
            logger.exception("unforeseen failure of a request to %s", asked.node.node_id)
            self.fail(RequestError(f"the router failed: {error!r}", status=500))
            return
        if not self._open_choices and not self.done:
            self._end(over=True)
            running.perform(running.relay.ended(asked, now))

    def fail(self, error: Exception, *, over: bool = False) -> None:
        """Nothing more will come."""
        if self.done:
            return
        self._end(over=over)
        if isinstance(error, RequestError):
            why = NodeError(error.message, error.status, error.param, error.code)
            self._running.failed(self._asked, why)
        else:
            self._running.failed(self._asked, NodeError(str(error)))
            self._running.dispatcher.nodes.unreachable(self._asked.node, str(error))

    def cancel(self) -> None:
        """Nobody listens any more."""
        if not self.done:
            self._end(over=False)

    def _end(self, *, over: bool) -> None:
        self.done = True
        self._set_load(IDLE)
        if self._client is not None:
            self._client.forget(self._asked.request.request_id, over=over)

    def _set_load(self, load: NodeLoad) -> None:
        """What the request is to the node now."""
        self._running.dispatcher.loads.change(self._asked.node.node_id, self._load, load)
        self._load = load


def merged(outputs: Sequence[Output]) -> list[Output]:
    """Outputs in the order in which they came, as one per choice."""
    by_choice: dict[int, list[Output]] = {}
    for output in outputs:
        by_choice.setdefault(output.choice, []).append(output)
    return [merge_outputs(mine) for mine in by_choice.values()]
