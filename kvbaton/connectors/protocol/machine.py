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
from kvbaton.types import Attempt, TransferTimers

MAX_STORIES = 512
MAX_STORY_LINES = 64
MAX_TOMBSTONES = 16_384
ALARMS = ("deadline", "resend")
COUNTED_AS = {"cancelled": "cancelled"} | dict.fromkeys(
    ("delivered", "acked", "not_needed"), "completed"
)
"""By outcome of an attempt, what it is in `Counters`; all others have failed."""


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
        while len(self._outcomes) > MAX_TOMBSTONES or next(iter(self._outcomes.values()))[1] <= now:
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
    mismatches: int = 0
    by_code: Counter[str] = field(default_factory=Counter)


Rule = Callable[..., None]
"""A method of a machine: it takes the record and what has come; its docstring is its text."""

Table = Mapping["type | str", tuple[Rule | None, ...]]
"""By kind of event or name of alarm, a rule per state, in their order; None can't happen."""

Reactions = Mapping[type, Callable[..., None]]
"""By kind of event that is about no single attempt, the method that takes it."""


Story = deque[tuple[float, str]]


@dataclass
class Record:
    """An attempt, as one side knows it.

    Attributes:
        state: one of the side's; the first is that of an attempt that is not known, the last that
            of one that has ended.
        outcome: how it ends, once that is known.
        session: the one that it is bound to.
        story: what happened to it and when, the latest lines.
    """

    name: Attempt
    state: Any = None
    outcome: str = ""
    session: Any = None
    story: Story = field(default_factory=lambda: deque(maxlen=MAX_STORY_LINES), repr=False)


RecordT = TypeVar("RecordT", bound=Record)


class Machine(Alarms, Generic[RecordT]):
    """One side of the protocol.

    An attempt has two alarms: *deadline*, which every live one has, and *resend*. They run in the
    states for which the table has a rule. Other owners of alarms belong to `ring`.

    Args:
        timers: of the protocol.

    Attributes:
        actions: what the event that is being handled has led to so far, in order; stays if `handle`
            raises.
        do: decides on an action.
        live: attempts that have not ended.
        ended: how the others did.
        stories: of the latest attempts, the oldest first.
    """

    table: ClassVar[Table]
    reactions: ClassVar[Reactions]
    states: ClassVar[type[Enum]]
    record_type: type[RecordT]

    def __init__(self, timers: TransferTimers) -> None:
        super().__init__()
        self.timers = timers
        self.counters = Counters()
        self.actions: list[Any] = []
        self.do: Callable[[Any], None] = self.actions.append
        self.live: dict[Attempt, RecordT] = {}
        self.ended = Tombstones(timers.tombstone)
        self.stories: dict[Attempt, Story] = {}
        self._rules: dict[tuple[type | str, Any], Callable[[RecordT, Any], None]] = {
            (row, state): getattr(self, rule.__name__)
            for row, rules in self.table.items()
            for state, rule in zip(self.states, rules, strict=True)
            if rule is not None
        }

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take in an event at a time in seconds; returns what to do, in order."""
        self.now, self.actions = now, []
        self.do = self.actions.append
        if isinstance(event, AboutAttempt):
            record = self.live.get(event.attempt) or self.record(event.attempt)
            self._rules[type(event), record.state](record, event)
        elif isinstance(event, Tick):
            while (alarm := self.take_alarm()) is not None:
                name, owner = alarm
                if isinstance(owner, Attempt):
                    self.apply(name, self.record(owner), None)
                else:
                    self.ring(owner)
        else:
            getattr(self, self.reactions[type(event)].__name__)(event)
        return self.actions

    def ring(self, owner: Any) -> None:
        """An alarm rings that is no attempt's."""
        raise NotImplementedError

    def ledger(self) -> dict[str, Any]:
        """Attempts alive and what they hold."""
        raise NotImplementedError

    def record(self, name: Attempt) -> RecordT:
        """The attempt of that name, or one that is not known or has ended, and is not kept."""
        if (live := self.live.get(name)) is not None:
            return live
        outcome = self.ended.outcome(name, self.now)
        unknown, *_, ended = self.states
        record = self.record_type(name, unknown if outcome is None else ended, outcome or "")
        record.story = self.stories.get(name, record.story)
        return record

    # --- for the sides ---

    def remember(self, record: RecordT) -> None:
        """Keep an attempt's story from now on."""
        self.stories.setdefault(record.name, record.story)
        if len(self.stories) > MAX_STORIES:
            del self.stories[next(iter(self.stories))]

    def count(self, code: str) -> None:
        """Count something by its name."""
        self.counters.by_code[code] += 1

    def apply(self, row: type | str, record: RecordT, given: Any) -> None:
        """Follow the rule for an event in the attempt's state."""
        self._rules[row, record.state](record, given)

    def _set_state(self, record: RecordT, state: Enum) -> None:
        """An attempt that was not known is live from now on."""
        if record.state is next(iter(self.states)):
            self.live[record.name] = record
            self.counters.started += 1
            self.remember(record)
        record.story.append((self.now, f"{record.state.value} -> {state.value}"))
        record.state = state
        for alarm in ALARMS:
            if (alarm, state) not in self._rules:
                self._at.pop((alarm, record.name), None)

    def _finish(self, record: RecordT, outcome: str) -> None:
        """A live attempt is over: remember how it ended."""
        *_, ended = self.states
        self._set_state(record, ended)
        counter = COUNTED_AS.get(outcome, "failed")
        setattr(self.counters, counter, getattr(self.counters, counter) + 1)
        del self.live[record.name]
        self.ended.add(record.name, outcome, self.now)

    def _num_by_state(self) -> dict[str, int]:
        return dict(Counter(record.state.value for record in self.live.values()))

    # --- rules that both tables name ---

    def _drop(self, record: RecordT, given: Any) -> None:
        """Count it; the sender has its answer already."""
        self.count(f"late_{type(given).__name__.lower()}")

    def _ignore(self, record: RecordT, given: Any) -> None:
        """Nothing: it says nothing new, or engine or transport did not know yet that it is over."""
