"""What `Source` and `Target` have in common: dispatch from a table, alarms, stories, counters."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from kvbaton.connectors.protocol.events import AboutAttempt, Tick
from kvbaton.messages.control import Refused, TransferMessage
from kvbaton.types import Attempt, TransferTimers

MAX_STORIES = 512
MAX_STORY_LINES = 64
MAX_TOMBSTONES = 16_384
ALARMS = ("deadline", "resend")


class Alarms:
    """At most one alarm of a name per owner; setting it again moves it.

    Attributes:
        now: the time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._at: dict[tuple[str, Hashable], float] = {}
        self._heap: list[tuple[float, int, str, Hashable]] = []
        self._numbers = itertools.count()

    def ring_in(self, name: str, owner: Hashable, seconds: float) -> None:
        """Ring some seconds from now."""
        at = self._at[name, owner] = self.now + seconds
        heapq.heappush(self._heap, (at, next(self._numbers), name, owner))
        if len(self._heap) > 8 * len(self._at) + 64:  # most of them were moved or cleared
            self._heap = [(at, next(self._numbers), *key) for key, at in self._at.items()]
            heapq.heapify(self._heap)

    def clear(self, name: str, owner: Hashable) -> None:
        """Do not ring, if it was set."""
        self._at.pop((name, owner), None)

    def rings_at(self, name: str, owner: Hashable) -> float | None:
        """When an alarm rings; None if it is not set."""
        return self._at.get((name, owner))

    def next_alarm(self) -> float | None:
        """When the earliest alarm rings."""
        while self._heap:
            at, _, name, owner = self._heap[0]
            if self._at.get((name, owner)) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def take_alarm(self) -> tuple[str, Hashable] | None:
        """Take out the earliest alarm that rings until now; only one, as it may clear others."""
        at = self.next_alarm()
        if at is None or at > self.now:
            return None
        _, _, name, owner = heapq.heappop(self._heap)
        self.clear(name, owner)
        return name, owner


class Tombstones:
    """How the latest attempts ended, to answer late messages right.

    Args:
        seconds: how long each is remembered.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._outcomes: OrderedDict[Attempt, tuple[str, float]] = OrderedDict()

    def add(self, name: Attempt, outcome: str, now: float) -> None:
        """Remember an end; of more than `MAX_TOMBSTONES` the oldest are forgotten."""
        self._outcomes[name] = outcome, now + self._seconds
        while len(self) > MAX_TOMBSTONES or next(iter(self._outcomes.values()))[1] <= now:
            self._outcomes.popitem(last=False)

    def outcome(self, name: Attempt, now: float) -> str | None:
        """How it ended; None if that is not known (any more)."""
        outcome, until = self._outcomes.get(name, ("", now))
        return outcome if until > now else None

    def __len__(self) -> int:
        return len(self._outcomes)


@dataclass
class Counters:
    """Totals that a machine keeps; ``started == completed + failed + cancelled + live``."""

    started: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    dropped_messages: int = 0
    mismatches: int = 0
    by_code: dict[str, int] = field(default_factory=dict)


class Context(Alarms):
    """What the parts of a machine share while it handles an event, and its alarms.

    Attributes:
        now: time of the event, in seconds.
        actions: decided so far.
        do: decides on an action.
        stories: what happened to the latest attempts, the oldest first: the latest lines of each.
    """

    actions: list[Any]
    do: Callable[[Any], None]

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters()
        self.stories: dict[Attempt, deque[str]] = {}
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Another event is handled."""
        self.now, self.actions = now, []
        self.do = self.actions.append

    def tell(self, name: Attempt, line: str) -> None:
        """Add to an attempt's story."""
        if name not in self.stories:
            if len(self.stories) >= MAX_STORIES:
                del self.stories[next(iter(self.stories))]
            self.stories[name] = deque(maxlen=MAX_STORY_LINES)
        self.stories[name].append(f"{self.now:.3f} {line}")

    def count(self, code: str, *, dropped: bool = False) -> None:
        """Count something by its name; `dropped` messages are counted together as well."""
        self.counters.dropped_messages += dropped
        self.counters.by_code[code] = self.counters.by_code.get(code, 0) + 1


Rule = Callable[..., None]
"""A method of a machine: it takes the record and what has come; its docstring is its text."""

Table = Mapping["type | str", tuple[Rule | None, ...]]
"""By kind of event or name of alarm, a rule per state, in their order; None can't happen."""


@dataclass
class Record:
    """An attempt, as one side knows it.

    Attributes:
        state: one of the side's; the first is that of an attempt that is not known, the last that
            of one that has ended.
        outcome: how it ends, once that is known.
        session: the one that it is bound to.
    """

    name: Attempt
    state: Any = None
    outcome: str = ""
    session: Any = None

    def wrong(self) -> str | None:
        """What is wrong with it, if anything."""
        raise NotImplementedError


EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")
RecordT = TypeVar("RecordT", bound=Record)


class Machine(Generic[EventT, ActionT, RecordT]):
    """One side of the protocol.

    An attempt has two alarms: *deadline*, which every live one has, and *resend*. They run in the
    states for which the table has a rule.

    Args:
        timers: of the protocol.
    """

    table: ClassVar[Table]
    states: ClassVar[type[Enum]]
    record_type: type[RecordT]
    sessions: Any
    """The side's `Sessions`."""

    def __init__(self, timers: TransferTimers) -> None:
        self.timers = timers
        self.context = Context()
        self.counters = self.context.counters
        self.live: dict[Attempt, RecordT] = {}
        self.ended = Tombstones(timers.tombstone)
        self._rules: dict[tuple[type | str, Any], Callable[[RecordT, Any], None]] = {}
        for row, rules in self.table.items():
            for state, rule in zip(self.states, rules, strict=True):
                if rule is not None:
                    self._rules[row, state] = getattr(self, rule.__name__)

    def handle(self, event: EventT, now: float) -> list[ActionT]:
        """Take in an event at a time in seconds; returns what to do, in order."""
        self.context.begin(now)
        if isinstance(event, AboutAttempt):
            record = self.live.get(event.attempt) or self.record(event.attempt)
            self._rules[type(event), record.state](record, event)
        elif isinstance(event, Tick):
            self._ring()
        else:
            self._react(event)
        return self.context.actions

    def take_actions(self) -> list[ActionT]:
        """What a `handle` that raised had decided until then, in order."""
        return self.context.actions

    def ledger(self) -> dict[str, Any]:
        """Attempts alive and what they hold."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When `Tick` is due, in seconds; None for never."""
        return self.context.next_alarm()

    def story(self, attempt: Attempt) -> list[str]:
        """What happened to an attempt, oldest line first, each with its time."""
        return list(self.context.stories.get(attempt, ()))

    def stories(self) -> dict[Attempt, list[str]]:
        """What happened to the latest attempts."""
        return {name: list(lines) for name, lines in self.context.stories.items()}

    def record(self, name: Attempt) -> RecordT:
        """The attempt of that name, or one that is not known or has ended, and is not kept."""
        if name in self.live:
            return self.live[name]
        outcome = self.ended.outcome(name, self.context.now)
        unknown, *_, ended = self.states
        return self.record_type(name, unknown if outcome is None else ended, outcome or "")

    def validate(self) -> None:
        """Check the invariants; raises `AssertionError`, with the story of what is wrong."""
        for record in self.live.values():
            problem = record.wrong()
            if problem is None and self.context.rings_at("deadline", record.name) is None:
                problem = f"no deadline in state {record.state.value}"
            if problem is not None:
                story = self.story(record.name)
                raise AssertionError("\n".join([f"{record.name}: {problem}", *story]))
        counters = self.counters
        done = counters.completed + counters.failed + counters.cancelled
        assert counters.started == done + len(self.live), f"{counters}, {len(self.live)} live"
        self.sessions.validate()

    # --- for the sides ---

    def _react(self, event: EventT) -> None:
        """Take in an event that is about no single attempt."""
        raise NotImplementedError

    def _apply(self, row: type | str, record: RecordT, given: Any) -> None:
        """Follow the rule for an event in the attempt's state."""
        self._rules[row, record.state](record, given)

    def _ring(self) -> None:
        """Time has passed."""
        while (alarm := self.context.take_alarm()) is not None:
            name, owner = alarm
            if isinstance(owner, Attempt):
                self._apply(name, self.record(owner), None)
            else:
                self.sessions.ring(owner)

    def _send(
        self, record: RecordT, kind: type[TransferMessage] | type[Refused], **fields: Any
    ) -> None:
        self.context.tell(record.name, f"> {kind.__name__}")
        fields |= {"transfer_id": record.name.transfer_id, "attempt": record.name.number}
        record.session.send(self.context, kind, **fields)

    def _set_state(self, record: RecordT, state: Enum) -> None:
        self.context.tell(record.name, f"{record.state.value} -> {state.value}")
        record.state = state
        for alarm in ALARMS:
            if (alarm, state) not in self._rules:
                self.context.clear(alarm, record.name)

    def _count_end(self, name: Attempt, outcome: str, counter: str) -> None:
        """An attempt is over: remember how it ended."""
        setattr(self.counters, counter, getattr(self.counters, counter) + 1)
        del self.live[name]
        self.ended.add(name, outcome, self.context.now)

    def _num_by_state(self) -> dict[str, int]:
        return dict(Counter(record.state.value for record in self.live.values()))

    # --- rules that both tables name ---

    def _drop(self, record: RecordT, given: Any) -> None:
        """Count it; the sender has its answer already."""
        self.context.count(f"late_{type(given).__name__.lower()}", dropped=True)

    def _ignore(self, record: RecordT, given: Any) -> None:
        """Nothing: it says nothing new, or engine or transport did not know yet that it is over."""
