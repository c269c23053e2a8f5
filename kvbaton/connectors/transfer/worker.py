"""What source and target workers share: they feed a machine, and do what it answers."""

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
LOG_EVERY_S = 10.0
"""After so many one is logged in so long: a broken plug-in raises in every look."""

MAX_TIMELINES = 256
MAX_MARKS = 4096
"""Of one attempt; the first are forgotten."""

PERIOD_S = 0.05
"""Between two looks for lost peers, totals for other threads, and timers while bytes move."""

Links = dict[tuple[int, int], Peer]
"""Connections of one peer, by our rank and its rank."""


class Timelines:
    """What happened to the latest attempts and when; of more than `MAX_TIMELINES` no more."""

    def __init__(self) -> None:
        self._marks: dict[Attempt, deque[dict[str, Any]]] = {}

    def mark(self, attempt: Attempt, what: str, at: float | None = None, **detail: float) -> None:
        """Note something, now or at a time of the machine-wide clock."""
        marks = self._marks.setdefault(attempt, deque(maxlen=MAX_MARKS))
        marks.append({"what": what, "time": time.monotonic() if at is None else at, **detail})
        if len(self._marks) > MAX_TIMELINES:
            del self._marks[next(iter(self._marks))]

    def by_name(self) -> dict[str, list[dict[str, Any]]]:
        """All of them, by `attempt_name`."""
        return {attempt_name(attempt): list(marks) for attempt, marks in self._marks.items()}


class TransferWorker:
    """Carries out a machine's actions on transports; only the transfer thread calls it.

    What `_do` does not name is for the engine.

    Args:
        machine: decides.
        transports: one per rank, their memory registered.
        counters: names of the totals that it keeps.

    Attributes:
        published: totals and values as other threads may read them; replaced, never changed.
        outbox_fd: readable while `take` has something.
        linked: connections by session (P) or peer (D), and whom they are with.
        mark: notes what happens to an attempt, see `Timelines.mark`.
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
        """Give the machine an event and carry out what it answers.

        What an action causes waits until all actions of the event are carried out. An exception
        costs this event or action, not the thread: it is counted and logged.
        """
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            try:
                actions = self._machine.handle(self._events[0], now)
            except Exception:
                self.error("%s could not be handled", type(self._events[0]).__name__)
                actions = self._machine.actions
            for action in actions:
                do = self._do.get(type(action))
                try:
                    if do is not None:
                        do(action, now)
                    else:
                        self.to_engine(action)
                except Exception:
                    self.error("%s could not be carried out", type(action).__name__)
            self._events.popleft()

    def to_engine(self, action: events.Action) -> None:
        """Leave an action for the engine's thread: who acts on it sees what led to it."""
        self.published = dict(self.counters)
        self._outbox.append(action)
        os.eventfd_write(self.outbox_fd, 1)

    def take(self) -> Iterator[Any]:
        """What the machine wants of the engine, in order; for its thread, never blocks.

        What is not consumed, as where acting on one of them raises, comes with the next call.
        """
        with suppress(BlockingIOError):
            os.eventfd_read(self.outbox_fd)
        for _ in range(len(self._outbox)):
            yield self._outbox.popleft()

    def error(self, what: str, *args: object) -> None:
        """Count the exception being handled, and log it while it is no flood.

        What a peer or the way to it causes takes one line; a traceback means a fault of ours.
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
        """Look at all that moves by itself, and at timers; whether to look again at once."""
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
            except Exception:
                self.error("transport %s can't be looked at", transport.name)
        return self._look(now)

    def _landed(self, payload: bytes, now: float) -> None:
        """Take in a notice. Nobody writes to a source; to ask drives a transport's progress."""

    def _look(self, now: float) -> bool:
        """At transfers on their way; whether one is that only looking at it moves on."""
        raise NotImplementedError

    def _look_around(self, now: float) -> None:
        """At what no transfer waits for."""
        for transport in self.transports:
            try:
                for peer in transport.lost():
                    for node, links in list(self.linked.values()):
                        if any(link is peer for link in links.values()):
                            self.handle(events.PeerGone(node), now)
            except Exception:
                self.error("transport %s can't tell who is lost", transport.name)

    def settle(self) -> float | None:
        """Publish totals, before a pause; when the machine wants to be called again."""
        self.published = dict(self.counters)
        self._deadline = self._machine.next_alarm()
        return self._deadline

    def _connect(
        self, peer: events.OpenPeer, pairs: Iterable[tuple[int, int]], links: Links, now: float
    ) -> bool:
        """Connect our ranks with a peer's, or say that it is gone; what was done is in `links`."""
        try:
            for own, other in sorted(pairs):
                links[own, other] = self.transports[own].connect(peer.ranks[other].card)
        except Exception:
            self.error("can't reach %s", peer.node.node)
            self.handle(events.PeerGone(peer.node), now)
            return False
        return True

    def _close(self, own: int, link: Peer) -> bool | None:
        """Close a connection of one of our ranks: what its transport says; None if it raises."""
        try:
            return self.transports[own].close(link)
        except Exception:
            self.error("transport %s can't close a peer", self.transports[own].name)
            return None

    def _send(self, action: events.SendMessage, now: float) -> None:
        """Send a message; with the cards of now, since a transport that fenced may have a new one.

        Raises:
            TransportError: it has none at the moment.
            ValueError: the address is none.
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
            assert action.address is not None, "a message has one of the two"
            link = self.channel.dial(action.address)
        self.channel.send(link, encode_control(message))

    def close(self) -> None:
        """Close all peers and shut the transports down."""
        for transport in self.transports:
            try:
                transport.shutdown()
            except Exception:
                self.error("transport %s can't be shut down", transport.name)
        os.close(self.outbox_fd)

    def state(self) -> dict[str, Any]:
        """What the machine and this thread know, for diagnosis."""
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
    """An attempt for people: ``transfer_id/attempt``, the id in hex."""
    return f"{attempt.transfer_id.hex()}/{attempt.number}"
