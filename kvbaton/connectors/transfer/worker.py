"""What source and target workers share: they feed a machine, and do what it answers."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec.structs import replace

from kvbaton.connectors.base import Transport
from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.protocol.events import Send, Tick
from kvbaton.connectors.transfer.timeline import Timelines, attempt_name
from kvbaton.messages.control import Hello, Welcome
from kvbaton.types import Attempt

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")
MAX_LOGGED_ERRORS = 100
"""After so many only every hundredth is logged: a broken plug-in raises in every look."""

EventT_contra = TypeVar("EventT_contra", contravariant=True)
ActionT_co = TypeVar("ActionT_co", covariant=True)


class Side(Protocol[EventT_contra, ActionT_co]):
    """A machine of the protocol, `Source` or `Target`."""

    def handle(self, event: EventT_contra | Tick, now: float) -> Sequence[ActionT_co]:
        """Take in an event; returns what to do, in order."""
        ...

    def take_actions(self) -> Sequence[ActionT_co]:
        """What a `handle` that raised had decided until then, in order."""
        ...

    def next_deadline(self) -> float | None:
        """When `Tick` is due, in seconds; None for never."""
        ...

    def ledger(self) -> dict[str, Any]:
        """Attempts alive and what they hold."""
        ...

    def stories(self) -> dict[Attempt, list[str]]:
        """What happened to the latest attempts."""
        ...


class TransferWorker(Generic[EventT, ActionT]):
    """Carries out a machine's actions on transports; only the transfer thread calls it.

    What `_do` does not name is for the engine.

    Args:
        machine: decides.
        transports: one per rank, their memory registered.
        layouts: per rank, one layout per group.
        counters: names of the totals that it keeps.

    Attributes:
        published: totals and values as other threads may read them; replaced, never changed.
    """

    to_engine: Callable[[Any], None]
    send: Callable[[Send], None]
    hang_up: Callable[[str], None]

    def __init__(
        self,
        machine: Side[EventT, ActionT],
        transports: Sequence[Transport],
        layouts: Sequence[Sequence[KVLayout]],
        counters: Iterable[str],
    ) -> None:
        self.transports = transports
        self.layouts = layouts
        self.counters = dict.fromkeys((*counters, "errors"), 0.0)
        self.published = dict(self.counters)
        self.timelines = Timelines()
        self._machine = machine
        self._events: deque[EventT | Tick] = deque()
        self._do: dict[type, Callable[[Any, float], None]] = {}

    def handle(self, event: EventT | Tick, now: float) -> None:
        """Give the machine an event and carry out what it answers.

        What an action causes waits until all actions of the event are carried out. An exception
        costs this event or action, not the thread: it is counted and logged.
        """
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            for action in self._decide(self._events[0], now):
                try:
                    self._do.get(type(action), self._tell_engine)(action, now)
                except Exception:
                    self.error("%s could not be carried out", type(action).__name__)
            self._events.popleft()

    def _decide(self, event: EventT | Tick, now: float) -> Sequence[ActionT]:
        try:
            return self._machine.handle(event, now)
        except Exception:
            self.error("%s could not be handled", type(event).__name__)
            return self._machine.take_actions()

    def _tell_engine(self, action: ActionT, now: float) -> None:
        self.publish(now)  # who acts on it and then asks sees what led to it
        self.to_engine(action)

    def error(self, what: str, *args: object) -> None:
        """Count the exception being handled, and log it while it is no flood."""
        self.counters["errors"] += 1
        count = int(self.counters["errors"])
        if count <= MAX_LOGGED_ERRORS or count % MAX_LOGGED_ERRORS == 0:
            logger.error(what, *args, exc_info=sys.exc_info()[1])

    def poll(self, now: float) -> None:
        """Look at all that moves by itself, and at timers."""
        self._look(now)
        deadline = self._machine.next_deadline()
        if deadline is not None and deadline <= now:
            self.handle(Tick(), now)
        self.publish(now)

    def publish(self, now: float) -> None:
        """Let other threads read how things stand."""
        self.published = dict(self.counters)

    def _look(self, now: float) -> None:
        raise NotImplementedError

    def busy(self) -> bool:
        """Whether something is on its way that only looking at it moves on."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When the machine wants to be called again."""
        return self._machine.next_deadline()

    def with_cards(self, action: Send) -> Send:
        """Put in the cards of now: a transport that had to fence may have a new one.

        Raises:
            TransportError: it has none at the moment.
        """
        message = action.message
        if not isinstance(message, Hello | Welcome):
            return action
        ranks = zip(message.ranks, self.transports, strict=True)
        cards = tuple(replace(rank, card=transport.card()) for rank, transport in ranks)
        return dataclasses.replace(action, message=replace(message, ranks=cards))

    def close(self) -> None:
        """Close all peers and shut the transports down."""
        for transport in self.transports:
            transport.shutdown()

    def state(self) -> dict[str, Any]:
        """What the machine and this thread know, for diagnosis."""
        stories = self._machine.stories()
        return {
            "ledger": self._machine.ledger(),
            "stories": {attempt_name(attempt): list(lines) for attempt, lines in stories.items()},
            "timelines": self.timelines.dump(),
        }
