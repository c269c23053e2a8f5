"""Drives `RequestRelay`: supplies its clock, sends its requests to nodes, and passes tokens on."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace
from typing_extensions import override

from kvbaton.engine.client import EngineClient
from kvbaton.engine.outputs import OutputReceiver, TokenSource
from kvbaton.errors import SHUTTING_DOWN, EngineDeadError, RequestError
from kvbaton.messages.engine import AddRequest, Item, Mark, Output
from kvbaton.router.chooser import RouteChooser
from kvbaton.router.config import RelayTimers
from kvbaton.router.loads import IDLE, NodeLoad, NodeLoads, RouterTotals
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.node_request import NodeError, NodeRequest
from kvbaton.router.nodes import KnownNodes
from kvbaton.router.relay import (
    Action,
    AskNode,
    CancelNode,
    CheckNode,
    Finished,
    MoveEnded,
    RequestRelay,
)
from kvbaton.router.route import Route

logger = logging.getLogger(__name__)

MOVES_AT_ONCE = 4
"""Maximum number of requests that are moved off one node at the same time."""
MOVE_TRIES = 3
"""Attempts to move a request, after which it ends where it is."""
MOVE_PERIOD_S = 0.02
"""Seconds between checks for requests to move, while some are being moved."""
REST_S = 0.25
"""Seconds between these checks while none is being moved."""
RETRIES_PER_S = 10.0
"""Retries per second that are allowed however few requests there are."""
MOST_RETRIES = 100.0
"""Maximum number of retries that can be saved up."""


class RetryBudget:
    """Limits a router's retries to a share of its requests, and a few more.

    Where nodes refuse requests because of overload, each retry adds to it: without a limit, every
    request is tried as often as there are attempts. This token bucket, as Finagle's
    ``RetryBudget``, lets through the retries that a healthy cluster needs.

    Args:
        share: Retries that each request adds.
        clock: Monotonic seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._left, self._at = MOST_RETRIES, clock()

    def request(self) -> None:
        """Record a new request."""
        self._left = min(MOST_RETRIES, self._left + self._share)

    def spend(self) -> bool:
        """Take one retry; return False if none is left."""
        now = self._clock()
        self._left = min(MOST_RETRIES, self._left + RETRIES_PER_S * (now - self._at))
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Dispatcher(TokenSource):
    """All nodes as one `TokenSource`.

    Args:
        nodes: Known nodes.
        metrics: Metrics to update.
        loads: Loads of nodes, kept up to date here.
        chooser: Chooses nodes.
        timers: Limits of each request.
        retries: Retry budget of all requests.
    """

    def __init__(
        self,
        nodes: KnownNodes,
        metrics: RouterMetrics,
        loads: NodeLoads,
        chooser: RouteChooser,
        timers: RelayTimers,
        retries: RetryBudget,
    ) -> None:
        self.nodes = nodes
        self.metrics = metrics
        self.loads = loads
        self.chooser = chooser
        self.timers = timers
        self.retries = retries
        self.running: dict[str, _Running] = {}
        self._leaving: dict[str, _Departure] = {}
        self._ended: Counter[str] = Counter()
        self._tokens = 0
        nodes.on_lost = self.node_lost
        nodes.on_leaving = self.leave

    @override
    def submit(self, request: AddRequest, receiver: OutputReceiver) -> None:
        if request.params.seed is None:  # both nodes must sample the same tokens
            seeded = replace(request.params, seed=secrets.randbits(63))
            request = replace(request, params=seeded)
        settings = self.chooser.policy.settings
        if settings.ttft_slo is not None:
            request = replace(request, ttft_s=min(settings.ttft_slo / 1e3, request.deadline_s))
        if settings.max_itl is not None:
            request = replace(request, itl_s=min(settings.max_itl / 1e3, request.deadline_s))
        name = request.request_id
        if name in self.running:
            raise RequestError(f"request id {name!r} is in use", param="request_id", status=409)
        self.retries.request()
        running = self.running[name] = _Running(self, request, receiver)
        try:
            running.perform(running.relay.start(running.started_at))
            running.arm()
        except Exception:  # no node was asked
            running.close("refused")
            raise

    @override
    def cancel(self, request_id: str) -> None:
        running = self.running.get(request_id)
        if running is not None:
            running.perform(running.relay.client_gone())
            running.close("cancelled")

    @override
    def stop(self) -> None:
        for running in list(self.running.values()):
            error = RequestError("the router is shutting down", status=503, code=SHUTTING_DOWN)
            running.perform(running.relay.fail(error))
            running.receiver.flush()

    def totals(self) -> RouterTotals:
        """What was done for clients, and is being done."""
        relays = [running.relay for running in self.running.values()]
        return RouterTotals(
            waiting=sum(not relay.num_generated for relay in relays),
            running=sum(bool(relay.num_generated) for relay in relays),
            finished=self._ended["finished"],
            failed=self._ended["failed"] + self._ended["refused"],
            tokens=self._tokens + sum(relay.num_tokens for relay in relays),
        )

    def count_end(self, outcome: str, tokens: int) -> None:
        """Record the end of a request that relayed `tokens` tokens."""
        self.metrics.requests.counts[(outcome,)] += 1
        self._ended[outcome] += 1
        self._tokens += tokens

    def may_retry(self) -> bool:
        """Whether a failed request may be tried again."""
        if self.retries.spend():
            return True
        self.metrics.refused_retries.inc()
        return False

    def node_lost(self, node_id: str, reason: str) -> None:
        """Retry the requests of a lost node elsewhere now, rather than at a timeout."""
        for running in list(self.running.values()):
            running.node_lost(node_id, reason)

    def leave(self, node_id: str) -> None:
        """Move the requests that a node decodes now to other nodes, where possible."""
        there = [r for r in self.running.values() if r.is_at(node_id)]
        if node_id in self._leaving:
            self._leaving[node_id].add(there)
        elif there:
            departure = self._leaving[node_id] = _Departure(self, node_id, there)
            departure.step()

    def left(self, node_id: str) -> None:
        """Record that all requests which can leave a node have left."""
        del self._leaving[node_id]


class _Departure:
    """Moves requests off a node.

    A few move at a time, since a node pins only a limited share of its blocks for a peer.

    Args:
        dispatcher: The dispatcher.
        node_id: Id of the node.
        staying: Requests that have not left yet, the oldest first.
    """

    def __init__(self, dispatcher: Dispatcher, node_id: str, staying: list[_Running]) -> None:
        self._staying = dict.fromkeys(staying)
        self._dispatcher = dispatcher
        self._node_id = node_id
        self._tries: Counter[_Running] = Counter()

    def add(self, staying: list[_Running]) -> None:
        """Add requests; those that could not be moved are tried again."""
        self._staying |= dict.fromkeys(staying)
        self._tries.clear()

    def step(self) -> None:
        """Start the moves that can start now; schedule the next step while requests are left."""
        self._staying = {r: None for r in self._staying if r.is_at(self._node_id)}
        moving = sum(running.relay.is_moving for running in self._staying)
        for running in self._staying:
            if moving >= MOVES_AT_ONCE:
                break
            if self._tries[running] == MOVE_TRIES:
                continue
            try:
                began = running.relay.can_move() and running.move()
            except Exception:  # this one stays, others still leave
                logger.exception("a request could not be moved from %s", self._node_id)
                self._tries[running] = MOVE_TRIES
                continue
            self._tries[running] += began
            moving += began
        if all(self._tries[r] == MOVE_TRIES and not r.relay.is_moving for r in self._staying):
            self._dispatcher.left(self._node_id)
        else:
            wait_s = MOVE_PERIOD_S if moving else REST_S
            asyncio.get_running_loop().call_later(wait_s, self.step)


class _Running:
    """A client's request in flight.

    Attributes:
        relay: State machine of the request.
        receiver: Receives what the relay sends to the client.
        started_at: When the request came, on the loop's clock.
        read_at: When the first output was read that was not relayed yet; 0 if there is none.
        marks: Marks of a timed request that the receiver does not have yet.
    """

    __slots__ = (
        "_calls", "_costs", "_decoding_since", "_first_at", "_identity", "_timer", "_to_time",
        "_tokens_timed", "dispatcher", "loop", "marks", "read_at", "receiver", "relay",
        "started_at",
    )  # fmt: skip

    def __init__(
        self, dispatcher: Dispatcher, request: AddRequest, receiver: OutputReceiver
    ) -> None:
        self.dispatcher = dispatcher
        self.loop = asyncio.get_running_loop()
        self.started_at = self.loop.time()
        self.relay = RequestRelay(
            request,
            self._route,
            transfer_id=os.urandom(16),
            item_ids=list(map(os.urandom, [16] * len(request.items))),
            timers=dispatcher.timers,
            now=self.started_at,
            may_retry=dispatcher.may_retry,
        )
        self.receiver = receiver
        self.read_at = 0.0
        self.marks: list[Mark] = []
        self._costs = dispatcher.chooser.policy.costs
        self._calls: dict[NodeRequest, _NodeCall] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tokens_timed, self._to_time = 0, 2
        self._first_at = 0.0
        self._decoding_since: tuple[float, int] | None = None
        self._identity = ""

    def close(self, outcome: str) -> None:
        """Clean up after the relay has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._calls.clear()  # reference cycles would be left to the garbage collector
        request_id = self.relay.request.request_id
        del self.dispatcher.running[request_id]
        generated, itl_s = self.relay.num_generated, None
        if outcome == "finished" and self._decoding_since is not None:
            since, before = self._decoding_since
            if generated > before:
                itl_s = (self.loop.time() - since) / (generated - before)
        self.dispatcher.chooser.ended(request_id, generated, itl_s)
        self._costs.finished(self.relay.num_tokens, self.relay.request.params.n)
        self.dispatcher.count_end(outcome, self.relay.num_tokens)
        for line in self.relay.story:
            logger.warning("request %s (%s): %s", request_id, outcome, line)

    def _route(self, num_tokens: int, items: Sequence[Item], avoid: frozenset[str]) -> Route | None:
        """Nodes for an attempt; see `RouteChooser.route`.

        Raises:
            Exception: Whatever the policy raises, for the first attempt only.
        """
        request, chooser = self.relay.request, self.dispatcher.chooser
        try:
            if self.relay.num_generated:  # other weights would not continue the relayed text
                serving = self.dispatcher.nodes.membership.ready().serving
                avoid |= {n.node_id for n in serving if n.identity != self._identity}
            route = chooser.route(request, num_tokens, items, avoid)
            self._identity = "" if route is None else route.target.identity
            return route
        except Exception:  # third-party policies may raise anything
            if self.relay.attempt < 0:
                raise
            logger.exception("no node could be chosen for request %s", request.request_id)
            return None

    # --- moving ---

    def is_at(self, node_id: str) -> bool:
        """Whether a node decodes the request, or is to."""
        target = self.relay.target
        return target is not None and target.node.node_id == node_id

    def move(self) -> bool:
        """Move the request to another node; return False if no node can take it."""
        relay, target = self.relay, self.relay.target
        assert target is not None, "there is one while it can move"
        chooser = self.dispatcher.chooser
        try:
            route = chooser.successor(relay.request, relay.known_tokens, target.node)
        except Exception:  # third-party policies may raise anything
            logger.exception("no node could be chosen for what leaves %s", target.node.node_id)
            return False
        if route is None:
            return False
        self.perform(relay.move(route, self.loop.time()))
        self.receiver.flush()
        self.arm()  # a move has its own deadline
        return True

    # --- the nodes' side ---

    def failed(self, asked: NodeRequest, error: NodeError) -> None:
        """Pass on that a node refused the request or broke it off."""
        failures = self.dispatcher.metrics.node_request_failures
        failures.counts[asked.node.node_id, asked.side] += 1
        if self.relay.request.timed:
            self.take_marks(asked, (Mark("failed", time.monotonic()),))
        self.perform(self.relay.failed(asked, error, self.loop.time()))
        self.receiver.flush()

    def node_lost(self, node_id: str, reason: str) -> None:
        """Fail all requests to a lost node."""
        for asked, call in list(self._calls.items()):
            if asked.node.node_id == node_id and not call.done:
                self.failed(asked, NodeError(f"the node is lost: {reason}", lost=True))

    # --- carrying out ---

    def perform(self, actions: list[Action]) -> None:
        """Carry out the relay's actions."""
        for action in actions:
            match action:
                case Output():
                    self.receiver.put(self._with_marks(action) if self.marks else action)
                    self._costs.relayed += len(action.token_ids)
                    for _ in action.token_ids[: self._to_time - self._tokens_timed]:
                        self._time_token()
                case AskNode(asked):
                    metrics = self.dispatcher.metrics
                    metrics.node_requests.counts[asked.node.node_id, asked.part] += 1
                    if self.relay.request.timed:
                        self.take_marks(asked, (Mark("asked", time.monotonic()),))
                    if asked.num_items:
                        where = "prefill" if asked.prefills else "encoder"
                        metrics.items.counts[(where,)] += asked.num_items
                    if asked.attempt and asked.side == "target":
                        metrics.retries.inc()
                    self._calls[asked] = _NodeCall(self, asked)
                case CheckNode(asked):
                    self._calls[asked].check()
                case CancelNode(asked):
                    self._calls[asked].cancel()
                case MoveEnded(gap_s):
                    metrics = self.dispatcher.metrics
                    metrics.moves.counts[("failed" if gap_s is None else "moved",)] += 1
                    if gap_s is not None:
                        metrics.move_gap.observe(gap_s)
                case Finished():
                    self.close("finished")
                    self.receiver.end(None)
                case RequestError():
                    self.close("failed")
                    if self.marks:
                        self.receiver.put(self._with_marks(Output(request_id="")))
                    self.receiver.end(action)

    def take_marks(self, asked: NodeRequest, marks: tuple[Mark, ...]) -> None:
        """Add a node's marks."""
        part = f"{asked.part}-{asked.item}" if asked.item else asked.part
        where = asked.node.node_id, part, asked.attempt
        self.marks += (Mark(mark.name, mark.at, *where) for mark in marks)

    def _with_marks(self, output: Output) -> Output:
        marks, self.marks = tuple(self.marks), []
        return replace(output, marks=marks)

    def _time_token(self) -> None:
        """Record the times of the first token, and of the next one that waits for a hand-over."""
        now, request_id = self.loop.time(), self.relay.request.request_id
        self._tokens_timed += 1
        if self._tokens_timed == 1:
            self._first_at = now
            ttft_s = now - self.started_at
            self.dispatcher.metrics.first_token.observe(ttft_s)
            self.dispatcher.chooser.first_token(request_id, ttft_s)
            return
        if self._tokens_timed == 2:
            self._costs.begun(self.relay.request.params.n)
            self._to_time = 1 + max(1, self.relay.from_source)
        if self._tokens_timed == self._to_time:
            steps = self._to_time - 1
            self._decoding_since = now, min(self.relay.num_generated, self._to_time)
            self.dispatcher.chooser.handed_over(request_id, now - self._first_at, steps)

    def tick(self) -> None:
        """Tell the relay the time, and schedule the next tick."""
        self._timer = None
        self.perform(self.relay.tick(self.loop.time()))
        self.receiver.flush()
        self.arm()

    def arm(self) -> None:
        """Schedule a tick for the relay's next deadline; an earlier tick does no harm."""
        if self.relay.done:
            return
        due = self.relay.next_deadline()
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self.tick)


class _NodeCall:
    """One request to one node over its engine's socket, sent on creation; an `OutputReceiver`.

    Attributes:
        done: Whether no more outputs are expected.
    """

    __slots__ = ("_asked", "_client", "_load", "_queue", "_running", "done")

    def __init__(self, running: _Running, asked: NodeRequest) -> None:
        self._running = running
        self._asked = asked
        self._load, self._queue = asked.load, (asked.request.priority, asked.request.tenant)
        running.dispatcher.loads.change(asked.node.node_id, IDLE, asked.load, self._queue)
        self._client: EngineClient | None = running.dispatcher.nodes.engines.get(asked.node)
        self.done = False
        try:
            if self._client is None:
                raise EngineDeadError("its engine is not connected")
            self._client.submit(asked.request, self)
        except (EngineDeadError, RequestError) as error:
            # The relay gets this event only after all its current actions are carried out.
            running.loop.call_soon(self.end, error)

    def put(self, output: Output) -> None:
        """Receive an output of the node."""
        asked, running = self._asked, self._running
        load = self._load
        now = running.loop.time()
        if load.prompt_tokens or load.pending:  # until the first token
            due = running.started_at + running.dispatcher.chooser.policy.costs.ttft_slo_s
            late = load.sequences if now > due else 0
            self._set_load(NodeLoad(0, load.sequences, load.tokens, late=late))
        running.read_at = running.read_at or now
        if output.marks:
            running.take_marks(asked, output.marks)
        try:
            running.perform(running.relay.output(asked, output, now))
            if output.finish_reason is not None:
                running.arm()  # an end that waits for other nodes has a deadline
        except Exception as error:
            logger.exception("unforeseen failure of a request to %s", asked.node.node_id)
            self.end(RequestError(f"the router failed: {error!r}", status=500))

    def flush(self) -> None:
        """Receive the end of a step's outputs."""
        running = self._running
        running.receiver.flush()
        if running.read_at:
            running.dispatcher.metrics.overhead.observe(running.loop.time() - running.read_at)
            running.read_at = 0.0

    def end(self, error: Exception | None) -> None:
        """Receive the end of the request."""
        if self.done:
            return
        self.cancel()
        running, asked = self._running, self._asked
        if error is None:
            running.perform(running.relay.ended(asked, running.loop.time()))
            return
        nodes = running.dispatcher.nodes
        leaving = nodes.membership.is_draining(asked.node)
        if isinstance(error, RequestError):
            lost, told = error.code == SHUTTING_DOWN, (error.status, error.param, error.code)
            why = NodeError(error.message, *told, lost=lost, leaving=lost and leaving)
            running.failed(asked, why)
        else:
            running.failed(asked, NodeError(str(error), lost=True, leaving=leaving))
            nodes.unreachable(asked.node, str(error))

    def check(self) -> None:
        """End the request if the node's engine hangs."""
        if self._client is not None and self._client.hangs:
            # The relay gets this event only after all its current actions are carried out.
            self._running.loop.call_soon(self.end, EngineDeadError("its engine hangs"))

    def cancel(self) -> None:
        """Stop listening, and cancel the request at the node."""
        if self.done:
            return
        self.done = True
        self._set_load(IDLE)
        if self._client is not None:
            self._client.cancel(self._asked.request.request_id)

    def _set_load(self, load: NodeLoad) -> None:
        """Set the request's load at the node."""
        if load != self._load:
            loads = self._running.dispatcher.loads
            loads.change(self._asked.node.node_id, self._load, load, self._queue)
            self._load = load
