"""The thin shell that drives `RequestMachine`: legs as tasks, their events in a queue."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import msgspec

from kvbaton.messages.engine import AddRequest, Item, Output
from kvbaton.router.actions import (
    Action,
    CancelLeg,
    Emit,
    Finish,
    Leg,
    LegError,
    Raise,
    StartLeg,
)
from kvbaton.router.bodies import rows_left
from kvbaton.router.encoders import with_encoders
from kvbaton.router.legs import LegEnded, LegEvent, LegFailed, LegOutput, run_leg
from kvbaton.router.loads import LoadBook
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.nodes import Nodes
from kvbaton.router.pairing import Route, choose
from kvbaton.router.relay import RelayTimers, RequestMachine

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""A finished request's legs may take this long to end by themselves and free their connection."""


@dataclass(frozen=True)
class DispatchConfig:
    """How requests are dispatched.

    Attributes:
        timers: of each request.
        min_handover_tokens: shorter prompts are served on one node.
        min_encode_rows: see `encoders.with_encoders`.
    """

    timers: RelayTimers = field(default_factory=RelayTimers)
    min_handover_tokens: int = 0
    min_encode_rows: int | None = None


class Dispatcher:
    """A `TokenSource` over all nodes.

    Args:
        nodes: who there is.
        session: for the legs.
        metrics: what is counted.
        loads: what is in flight.
        config: see there.
    """

    def __init__(
        self,
        nodes: Nodes,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        loads: LoadBook,
        config: DispatchConfig,
    ) -> None:
        self.nodes = nodes
        self.session = session
        self.metrics = metrics
        self.loads = loads
        self.config = config
        self._runs: set[_Run] = set()
        self._lingering: set[asyncio.Task[None]] = set()
        nodes.on_lost = self.node_lost

    async def generate(self, request: AddRequest) -> AsyncGenerator[Output]:
        """Run a request on the nodes; see `TokenSource`.

        Raises:
            RequestError: it is wrong, or nobody could serve it.
        """
        run = _Run(self, _with_seed(request))
        self._runs.add(run)
        try:
            async for output in run.outputs():
                yield output
        finally:
            self._runs.discard(run)
            run.close()

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
        for run in self._runs:
            run.node_lost(node_id, reason)

    def linger(self, tasks: list[asyncio.Task[None]]) -> None:
        """Let legs of a finished request end by themselves for a moment."""
        task = asyncio.create_task(_end_soon(tasks))
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def close(self) -> None:
        """Wait for lingering legs."""
        await asyncio.gather(*self._lingering)


class _Run:
    """One request on its way."""

    def __init__(self, dispatcher: Dispatcher, request: AddRequest) -> None:
        self._dispatcher = dispatcher
        self._metrics = dispatcher.metrics
        self._request = request
        self._now = asyncio.get_running_loop().time
        self._started_at = self._now()
        self._machine = RequestMachine(
            request,
            partial(dispatcher.route, request.items),
            transfer_id=os.urandom(16),
            item_ids=[os.urandom(16) for _ in request.items],
            timers=dispatcher.config.timers,
            now=self._started_at,
        )
        self._events: asyncio.Queue[LegEvent] = asyncio.Queue()
        self._legs: dict[Leg, asyncio.Task[None]] = {}
        self._outcome = "cancelled"
        self._emitted = False
        self._read_at: float | None = None

    async def outputs(self) -> AsyncGenerator[Output]:
        """What the client gets."""
        actions = self._machine.start(self._now())
        while True:
            # First, because who has seen the last output may close us while we yield it.
            self._perform(actions)
            for action in actions:
                match action:
                    case Emit(output):
                        self._observe(output)
                        yield output
                    case Raise(error):
                        raise error
                    case Finish():
                        return
            actions = await self._next()

    def _perform(self, actions: list[Action]) -> None:
        # The target has time until the prompt is computed: its leg is not to hold up the source's.
        for action in sorted(actions, key=_starts_target):
            match action:
                case StartLeg():
                    self._start(action)
                case CancelLeg(leg):
                    self._legs[leg].cancel()
                case Raise():
                    self._outcome = "failed"
                case Finish():
                    self._outcome = "finished"

    async def _next(self) -> list[Action]:
        try:
            async with asyncio.timeout_at(self._machine.next_deadline()):
                event = await self._events.get()
        except TimeoutError:
            self._read_at = None
            return self._machine.tick(self._now())
        return self._feed(event)

    def _feed(self, event: LegEvent) -> list[Action]:
        now, self._read_at = self._now(), None
        match event:
            case LegOutput(leg, output, at):
                self._read_at = at
                self._dispatcher.loads.prefilled(leg)
                return self._machine.output(leg, output, now)
            case LegEnded(leg):
                return self._machine.ended(leg, now)
            case LegFailed(leg, error, unreachable):
                self._metrics.leg_failures.labels(leg.node.node_id, leg.side).inc()
                actions = self._machine.failed(leg, error, now)
                if unreachable:
                    self._dispatcher.nodes.unreachable(leg.node, error.message)
                return actions

    def node_lost(self, node_id: str, reason: str) -> None:
        """One of the nodes is gone."""
        for leg, task in self._legs.items():
            if leg.node.node_id == node_id and not task.done():
                self._events.put_nowait(LegFailed(leg, LegError(f"the node is lost: {reason}")))

    def _start(self, action: StartLeg) -> None:
        leg, body = action.leg, action.body
        alone = leg.side == "target" and body.kv_transfer_params is None
        prefills = alone or leg.side == "source"
        rows = rows_left(body.items) if prefills or leg.side == "encoder" else []
        num_tokens = len(body.token_ids) + len(body.resume_token_ids)
        self._dispatcher.loads.enter(leg, num_tokens, prefills=prefills, rows=sum(rows))
        self._metrics.legs.labels(leg.node.node_id, "alone" if alone else leg.side).inc()
        self._metrics.items.labels("prefill" if prefills else "encoder").inc(len(rows))
        if leg.attempt and leg.side == "target":
            self._metrics.retries.inc()
        work = run_leg(
            self._dispatcher.session, action, self._request.request_id, self._events.put_nowait
        )
        task = asyncio.create_task(work, name=f"{leg.name} {body.request_id}")
        task.add_done_callback(lambda _: self._dispatcher.loads.strike(leg))
        self._legs[leg] = task

    def _observe(self, output: Output) -> None:
        now = self._now()
        if self._read_at is not None:
            self._metrics.overhead.observe(now - self._read_at)
        if output.token_ids and not self._emitted:
            self._emitted = True
            self._metrics.first_token.observe(now - self._started_at)

    def close(self) -> None:
        """The client has all it wanted, or has gone: end the legs."""
        self._perform(self._machine.client_gone())
        self._metrics.requests.labels(self._outcome).inc()
        for line in self._machine.story:
            logger.warning("request %s: %s", self._request.request_id, line)
        running = [task for task in self._legs.values() if not task.done()]
        if running:
            self._dispatcher.linger(running)


def _starts_target(action: Action) -> bool:
    return isinstance(action, StartLeg) and action.leg.side == "target"


async def _end_soon(tasks: list[asyncio.Task[None]]) -> None:
    _, late = await asyncio.wait(tasks, timeout=LINGER_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)


def _with_seed(request: AddRequest) -> AddRequest:
    """Both legs must sample alike."""
    if request.params.seed is not None:
        return request
    params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
    return msgspec.structs.replace(request, params=params)
