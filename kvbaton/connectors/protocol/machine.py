"""What `Source` and `Target` have in common: dispatch from a table, alarms, stories, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvbaton.connectors.protocol.alarms import Alarms, Stories, Tombstones
from kvbaton.connectors.protocol.events import Counters
from kvbaton.connectors.protocol.session import check_timers
from kvbaton.types import Attempt, TransferTimers

EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")
StateT = TypeVar("StateT", bound=Enum)
StateT_co = TypeVar("StateT_co", bound=Enum, covariant=True)

Rule = Callable[..., None]
"""A method of a machine: it takes the record and what has come; its docstring is its text."""

Table = Mapping["type | str", tuple[Rule | None, ...]]
"""By kind of event or name of alarm, a rule per state, in their order; None can't happen."""


class Record(Protocol[StateT_co]):
    """An attempt, as one side knows it."""

    name: Attempt
    outcome: str

    @property
    def state(self) -> StateT_co:
        """Its state."""
        ...


RecordT = TypeVar("RecordT", bound=Record[Any])


class Context:
    """What the parts of a machine share while it handles an event.

    Attributes:
        now: time of the event, in seconds.
        actions: decided so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.actions: list[Any] = []
        self.alarms = Alarms()
        self.stories = Stories()
        self.counters = Counters()

    def do(self, *actions: Any) -> None:
        """Decide on actions."""
        self.actions += actions

    def ring_in(self, name: str, owner: Any, seconds: float) -> None:
        """Set an alarm."""
        self.alarms.set(name, owner, self.now + seconds)

    def tell(self, name: Attempt, line: str) -> None:
        """Add to an attempt's story."""
        self.stories.note(name, self.now, line)

    def count(self, code: str, *, dropped: bool = False) -> None:
        """Count something by its name; `dropped` messages are counted together as well."""
        self.counters.dropped_messages += dropped
        self.counters.by_code[code] = self.counters.by_code.get(code, 0) + 1


class Machine(Generic[EventT, ActionT, StateT, RecordT]):
    """One side of the protocol.

    Args:
        timers: of the protocol.
    """

    table: ClassVar[Table]
    alarms_of: ClassVar[Mapping[Any, tuple[str, ...]]]
    states: ClassVar[type[Enum]]

    def __init__(self, timers: TransferTimers) -> None:
        check_timers(timers)
        self.timers = timers
        self.context = Context()
        self.counters = self.context.counters
        self.live: dict[Attempt, RecordT] = {}
        self.ended = Tombstones(timers.tombstone)
        self._rules: dict[tuple[type | str, Any], Callable[[RecordT, Any], None]] = {
            (row, state): getattr(self, rule.__name__ if rule is not None else "_never")
            for row, rules in self.table.items()
            for state, rule in zip(self.states, rules, strict=True)
        }

    def handle(self, event: EventT, now: float) -> list[ActionT]:
        """Take in an event at a time in seconds; returns what to do, in order."""
        self.context.now = now
        self.context.actions = []
        self._react(event)
        return self.context.actions

    def take_actions(self) -> list[ActionT]:
        """What a `handle` that raised had decided until then, in order."""
        return self.context.actions

    def next_deadline(self) -> float | None:
        """When `Tick` is due, in seconds; None for never."""
        return self.context.alarms.next()

    def story(self, attempt: Attempt) -> list[str]:
        """What happened to an attempt, oldest line first, each with its time."""
        return self.context.stories.of(attempt)

    def stories(self) -> dict[Attempt, list[str]]:
        """What happened to the latest attempts."""
        return {
            subject: self.story(subject)
            for subject in self.context.stories.subjects()
            if isinstance(subject, Attempt)
        }

    # --- for the sides ---

    def _react(self, event: EventT) -> None:
        raise NotImplementedError

    def record(self, name: Attempt) -> RecordT:
        """The attempt of that name, or one that is not known or has ended, and is not kept."""
        return self.live.get(name) or self._absent(name, self.ended.outcome(name, self.context.now))

    def _absent(self, name: Attempt, outcome: str | None) -> RecordT:
        raise NotImplementedError

    def _apply(self, row: type | str, record: RecordT, given: Any) -> None:
        """Follow the rule for an event in the attempt's state."""
        self._rules[row, record.state](record, given)

    def _set_state(self, record: Any, state: StateT) -> None:
        self.context.tell(record.name, f"{record.state.value} -> {state.value}")
        record.state = state
        self.context.alarms.keep(record.name, self.alarms_of.get(state, ()))

    def _count_end(self, name: Attempt, outcome: str, counter: str) -> None:
        """An attempt is over: remember how it ended."""
        setattr(self.counters, counter, getattr(self.counters, counter) + 1)
        del self.live[name]
        self.ended.add(name, outcome, self.context.now)

    def _ring(self) -> None:
        while (key := self.context.alarms.take(self.context.now)) is not None:
            name, owner = key
            if isinstance(owner, Attempt):
                self._apply(name, self.record(owner), None)
            else:
                self._ring_session(name, owner)

    def _ring_session(self, name: str, owner: Any) -> None:
        raise NotImplementedError

    # --- rules that both tables name ---

    def _drop(self, record: RecordT, given: Any) -> None:
        """Count it; the sender has its answer already."""
        self.context.count(f"late_{type(given).__name__.lower()}", dropped=True)

    def _ignore(self, record: RecordT, given: Any) -> None:
        """The engine or transport has not heard yet that it is over."""

    def _never(self, record: RecordT, given: Any) -> None:
        story = "\n".join(self.story(record.name))
        raise AssertionError(f"an alarm rang in state {record.state.value}:\n{story}")

    # --- checks ---

    def _states(self) -> dict[str, int]:
        return dict(Counter(record.state.value for record in self.live.values()))

    def _validate(self, wrong: Iterable[tuple[RecordT, str | None]]) -> None:
        """Raise `AssertionError`, with the story, for the first thing that is wrong."""
        for record, problem in wrong:
            must = self.alarms_of[record.state][0]
            if problem is None and self.context.alarms.at(must, record.name) is None:
                problem = f"no alarm {must!r} in state {record.state.value}"
            if problem is not None:
                story = self.story(record.name)
                raise AssertionError("\n".join([f"{record.name}: {problem}", *story]))
        counters = self.counters
        done = counters.completed + counters.failed + counters.cancelled
        assert counters.started == done + len(self.live), f"{counters}, {len(self.live)} live"
