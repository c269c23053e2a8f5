"""What `Source` and `Target` have in common: dispatch from a table, alarms, stories, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from kvbaton.connectors.protocol.alarms import Alarms, Stories
from kvbaton.connectors.protocol.events import Counters, Identity, Send
from kvbaton.connectors.protocol.session import Negotiator, Pairable, Session, check_timers
from kvbaton.connectors.protocol.table import Row
from kvbaton.messages.control import Control, TransferMessage
from kvbaton.types import Attempt, TransferTimers

EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")
StateT = TypeVar("StateT", bound=Enum)
StateT_co = TypeVar("StateT_co", bound=Enum, covariant=True)


class Record(Protocol[StateT_co]):
    """An attempt, as one side knows it."""

    name: Attempt
    outcome: str

    @property
    def state(self) -> StateT_co:
        """Its state."""
        ...


RecordT = TypeVar("RecordT", bound=Record[Any])


class Machine(Generic[EventT, ActionT, StateT, RecordT]):
    """One side of the protocol.

    Args:
        identity: what this side says of itself.
        timers: of the protocol.
        new_id: makes 16 random bytes.
        pairable: checks layouts, source first; raises `ValueError` naming both values.
    """

    table: Mapping[str, Row]
    alarms_of: Mapping[StateT, tuple[str, ...]]
    states: type[StateT]

    def __init__(
        self,
        identity: Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        pairable: Pairable,
    ) -> None:
        check_timers(timers)
        self.identity = identity
        self.timers = timers
        self.counters = Counters()
        self._new_id = new_id
        self._negotiator = Negotiator(identity, pairable)
        self._alarms = Alarms()
        self._stories = Stories()
        self._live: dict[Attempt, RecordT] = {}
        self._ended: dict[Attempt, RecordT] = {}
        self._now = 0.0
        self._out: list[ActionT] = []
        states = list(self.states)
        self._rules: dict[tuple[str, StateT], Callable[[RecordT, Any], None]] = {
            (row, state): getattr(self, "_" + rule)
            for row, rules in self.table.items()
            for state, rule in zip(states, rules, strict=True)
        }

    def handle(self, event: EventT, now: float) -> list[ActionT]:
        """Take in an event at a time in seconds; returns what to do, in order."""
        self._now = now
        self._out = []
        self._react(event)
        return self._out

    def take_actions(self) -> list[ActionT]:
        """What a `handle` that raised had decided until then, in order."""
        return self._out

    def next_deadline(self) -> float | None:
        """When `Tick` is due, in seconds; None for never."""
        return self._alarms.next()

    def story(self, attempt: Attempt) -> list[str]:
        """What happened to an attempt, oldest line first, each with its time."""
        return self._stories.of(attempt)

    def stories(self) -> dict[Attempt, list[str]]:
        """What happened to the latest attempts."""
        return {
            subject: self._stories.of(subject)
            for subject in self._stories.subjects()
            if isinstance(subject, Attempt)
        }

    # --- for the sides ---

    def _react(self, event: EventT) -> None:
        raise NotImplementedError

    def _new_record(self, name: Attempt) -> RecordT:
        raise NotImplementedError

    def _record(self, name: Attempt) -> RecordT:
        """The attempt of that name, or one that is not known and not yet kept."""
        return self._live.get(name) or self._ended.get(name) or self._new_record(name)

    def _apply(self, row: str, record: RecordT, given: Any) -> None:
        """Follow the rule for an event in the attempt's state."""
        self._rules[row, record.state](record, given)

    def _do(self, *actions: ActionT) -> None:
        self._out += actions

    def _in(self, name: str, owner: Any, seconds: float) -> None:
        self._alarms.set(name, owner, self._now + seconds)

    def _tell(self, record: RecordT, line: str) -> None:
        self._stories.note(record.name, self._now, line)

    def _count_dropped(self, code: str) -> None:
        self.counters.dropped_messages += 1
        self._count(code)

    def _count(self, code: str) -> None:
        self.counters.by_code[code] = self.counters.by_code.get(code, 0) + 1

    def _ring(self) -> None:
        while (key := self._alarms.take(self._now)) is not None:
            name, owner = key
            if isinstance(owner, Attempt):
                self._apply(name, self._record(owner), None)
            else:
                self._ring_session(name, owner)

    def _ring_session(self, name: str, owner: Any) -> None:
        raise NotImplementedError

    def _keep_alarms(self, record: RecordT) -> None:
        self._alarms.keep(record.name, self.alarms_of[record.state])

    def _message(
        self, kind: type[TransferMessage], session: Session, name: Attempt, **fields: Any
    ) -> Any:
        return kind(
            session=session.id,
            seq=session.next_seq(),
            transfer_id=name.transfer_id,
            attempt=name.number,
            **fields,
        )

    # --- rules that both tables name ---

    def _drop(self, record: RecordT, given: Control) -> None:
        self._count_dropped(f"late_{type(given).__name__.lower()}")

    def _ignore(self, record: RecordT, given: Any) -> None:
        """Engine and transport report what they saw before they heard that it is over."""

    def _never(self, record: RecordT, given: Any) -> None:
        story = "\n".join(self.story(record.name))
        raise AssertionError(f"an alarm rang in state {record.state.value}:\n{story}")

    def _forget(self, record: RecordT, given: None) -> None:
        del self._ended[record.name]

    # --- checks ---

    def _states(self) -> dict[str, int]:
        return dict(Counter(record.state.value for record in self._live.values()))

    def _validate(self, extra: Iterable[tuple[RecordT, str]]) -> None:
        """Raise `AssertionError`, with the story, for the first thing that is wrong."""
        for record, problem in extra:
            raise AssertionError("\n".join([f"{record.name}: {problem}", *self.story(record.name)]))
        for record in (*self._live.values(), *self._ended.values()):
            must = self.alarms_of[record.state][0]
            if self._alarms.at(must, record.name) is None:
                lines = [f"no alarm {must!r} in state {record.state.value}"]
                raise AssertionError("\n".join([*lines, *self.story(record.name)]))
        counters = self.counters
        done = counters.completed + counters.failed + counters.cancelled
        assert counters.started == done + len(self._live), f"{counters} with {len(self._live)} live"


def reply(session: Session, message: Control, address: str | None = None) -> Send:
    """Send within a session: to where its last message came from, else to the address."""
    if session.link is not None:
        return Send(message, link=session.link)
    return Send(message, address=address)
