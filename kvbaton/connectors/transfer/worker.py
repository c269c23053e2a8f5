"""Common base of source and target workers: feeds events to a machine, carries out its actions."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from kvbaton.connectors.base import Peer, Transport
from kvbaton.connectors.channel import ControlChannel
from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.machine import Machine
from kvbaton.errors import LocalProtocolError, TransferError
from kvbaton.messages.control import Hello, Welcome, encode_control
from kvbaton.types import Attempt, NodeId

logger = logging.getLogger(__name__)

MAX_LOGGED_ERRORS = 100
"""Number of errors that are all logged; later ones are rate-limited, see `LOG_EVERY_S`."""
LOG_EVERY_S = 10.0
"""Minimum seconds between two of the later errors: a broken plug-in raises at every poll."""

MAX_TIMELINES = 256
"""Maximum number of attempts whose timeline is kept."""
MAX_MARKS = 4096
"""Maximum number of marks in one timeline; the oldest are dropped."""

PERIOD_S = 0.05
"""Seconds between checks for lost peers and publications of totals and timers."""

FAILURES = Exception, SystemExit
"""What a call of a plug-in may raise: some libraries end the process when they are at a loss."""

Links = dict[tuple[int, int], Peer]
"""Connections to one peer, by (own rank, peer's rank)."""


class Timelines:
    """Timelines of the latest `MAX_TIMELINES` attempts: what happened and when."""

    def __init__(self) -> None:
        self._marks: dict[Attempt, deque[dict[str, Any]]] = {}

    def mark(self, attempt: Attempt, what: str, at: float | None = None, **detail: float) -> None:
        """Add a mark at time `at` of the monotonic clock, by default now."""
        marks = self._marks.setdefault(attempt, deque(maxlen=MAX_MARKS))
        marks.append({"what": what, "time": time.monotonic() if at is None else at, **detail})
        if len(self._marks) > MAX_TIMELINES:
            del self._marks[next(iter(self._marks))]

    def by_name(self) -> dict[str, list[dict[str, Any]]]:
        """All timelines, by `attempt_name`."""
        return {attempt_name(attempt): list(marks) for attempt, marks in self._marks.items()}


class TransferWorker:
    """Carries out a machine's actions on transports; only the transfer thread calls it.

    Actions without an entry in `_do` are passed to the engine.

    Args:
        machine: The machine that decides.
        transports: One per rank, with memory registered.
        counters: Names of the totals to keep.

    Attributes:
        published: Snapshot of `counters` for other threads; replaced, never changed.
        outbox_fd: Readable while `take` has actions.
        linked: The peer and its connections, by session (on P) or peer (on D).
        mark: Adds a mark to an attempt's timeline, see `Timelines.mark`.
    """

    channel: ControlChannel

    def __init__(
        self, machine: Machine[Any, Any], transports: Sequence[Transport], counters: Iterable[str]
    ) -> None:
        self.transports = transports
        self.counters = dict.fromkeys((*counters, "errors"), 0.0)
        self.published = dict(self.counters)
        self.outbox_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outbox: deque[Any] = deque()
        self.linked: dict[bytes | NodeId, tuple[NodeId, Links]] = {}
        self._machine = machine
        self._events: deque[events.Event] = deque()
        self._do: dict[type, Callable[[Any, float], None]] = {events.SendMessage: self._send}
        self._timelines = Timelines()
        self.mark = self._timelines.mark
        self._deadline: float | None = None
        self._period_ends = self._log_at = 0.0

    def handle(self, event: events.Event, now: float) -> None:
        """Pass an event to the machine and carry out the actions that it returns.

        Events caused by these actions wait until all of them are carried out. An exception is
        counted and logged; it ends only the event or action that raised it.
        """
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            try:
                actions = self._machine.handle(self._events[0], now)
            except FAILURES:
                self.error("%s could not be handled", type(self._events[0]).__name__)
                actions = self._machine.actions
            for action in actions:
                do = self._do.get(type(action))
                try:
                    if do is not None:
                        do(action, now)
                    else:
                        self.to_engine(action)
                except FAILURES:
                    self.error("%s could not be carried out", type(action).__name__)
            self._events.popleft()

    def to_engine(self, action: events.Action) -> None:
        """Queue an action for the engine's thread."""
        self.published = dict(self.counters)  # first: they include the cause of the action
        self._outbox.append(action)
        os.eventfd_write(self.outbox_fd, 1)

    def take(self) -> Iterator[Any]:
        """Actions for the engine, in order; called by the engine's thread, never blocks.

        Actions that are not consumed, because handling one of them raises, come with the next call.
        """
        with suppress(BlockingIOError):
            os.eventfd_read(self.outbox_fd)
        for _ in range(len(self._outbox)):
            yield self._outbox.popleft()

    def error(self, what: str, *args: object) -> None:
        """Count the exception being handled, and log it unless there are too many.

        Errors caused by a peer or its connection are logged in one line; a traceback indicates a
        bug in this process.
        """
        self.counters["errors"] += 1
        now = time.monotonic()
        if self.counters["errors"] > MAX_LOGGED_ERRORS and now < self._log_at:
            return
        self._log_at = now + LOG_EVERY_S
        error = sys.exc_info()[1]
        if isinstance(error, TransferError) and not isinstance(error, LocalProtocolError):
            logger.warning(f"{what}: %s", *args, error)  # noqa: G004
        else:
            logger.error(what, *args, exc_info=error)

    def poll(self, now: float) -> bool:
        """Poll timers, transports and transfers; returns whether to poll again at once."""
        if self._deadline is not None and self._deadline <= now:
            self.handle(events.Tick(), now)
        if now >= self._period_ends:
            self._period_ends = now + PERIOD_S
            self._look_around(now)
            self.settle()
        for transport in self.transports:
            try:
                for notice in transport.notices():
                    self._landed(notice.payload, now)
            except FAILURES:
                self.error("transport %s can't be looked at", transport.name)
        return self._poll_transfers(now)

    def _landed(self, payload: bytes, now: float) -> None:
        """Handle a notice. A source gets none, but `notices` drives its transport's progress."""

    def _poll_transfers(self, now: float) -> bool:
        """Poll transfers; returns whether one needs polling to make progress."""
        raise NotImplementedError

    def _look_around(self, now: float) -> None:
        """Check for lost peers; called every `PERIOD_S`."""
        for transport in self.transports:
            try:
                for peer in transport.lost():
                    for node, links in list(self.linked.values()):
                        if any(link is peer for link in links.values()):
                            self.handle(events.PeerGone(node), now)
            except FAILURES:
                self.error("transport %s can't tell who is lost", transport.name)

    def settle(self) -> float | None:
        """Publish totals; returns the time of the machine's next alarm, None without one."""
        self.published = dict(self.counters)
        self._deadline = self._machine.next_alarm()
        return self._deadline

    def _connect(
        self, peer: events.OpenPeer, pairs: Iterable[tuple[int, int]], links: Links, now: float
    ) -> bool:
        """Connect rank pairs, adding to `links`; on failure report `PeerGone` and return False."""
        try:
            for own, other in sorted(pairs):
                links[own, other] = self.transports[own].connect(peer.ranks[other].card)
        except FAILURES:
            self.error("can't reach %s", peer.node.node)
            self.handle(events.PeerGone(peer.node), now)
            return False
        return True

    def _close(self, own: int, link: Peer) -> bool | None:
        """Close a connection: the result of the transport's `close`, or None if it raises."""
        try:
            return self.transports[own].close(link)
        except FAILURES:
            self.error("transport %s can't close a peer", self.transports[own].name)
            return None

    def _send(self, action: events.SendMessage, now: float) -> None:
        """Send a message, with current cards: a transport's card may change with a fence.

        Raises:
            TransportError: A transport has no card at the moment.
            ValueError: The address is invalid.
        """
        message = action.message
        if isinstance(message, Hello | Welcome):
            cards = [transport.card() for transport in self.transports]
            ranks = [
                msgspec.structs.replace(rank, card=card)
                for rank, card in zip(message.ranks, cards, strict=True)
            ]
            message = msgspec.structs.replace(message, ranks=tuple(ranks))
        link = action.link
        if link is None:
            assert action.address is not None, "a message has a link or an address"
            link = self.channel.dial(action.address)
        self.channel.send(link, encode_control(message))

    def close(self) -> None:
        """Close all peers and shut the transports down."""
        for transport in self.transports:
            try:
                transport.shutdown()
            except FAILURES:
                self.error("transport %s can't be shut down", transport.name)
        os.close(self.outbox_fd)

    def state(self) -> dict[str, Any]:
        """State of the machine and of this worker, for diagnosis."""
        stories = self._machine.stories
        return {
            "ledger": self._machine.ledger(),
            "stories": {
                attempt_name(attempt): [f"{at:.3f} {line}" for at, line in story]
                for attempt, story in stories.items()
            },
            "timelines": self._timelines.by_name(),
        }


def attempt_name(attempt: Attempt) -> str:
    """Readable name of an attempt: ``transfer_id/attempt``, with the id in hex."""
    return f"{attempt.transfer_id.hex()}/{attempt.number}"
