"""Common base of `Source` and `Target`: dispatch from a table, sessions, alarms, event logs."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.pairing import GroupPairing, pair_groups
from kvbaton.connectors.protocol.events import AboutAttempt, Identity, Link, SendMessage, Tick
from kvbaton.messages import UNREADABLE, control
from kvbaton.messages.control import RankCard
from kvbaton.types import Attempt, NodeId, TransferTimers

MAX_RANKS = 1024
MAX_GROUPS = 64
MAX_BLOCK_SIZE = 1 << 16
MAX_BLOCKS = 1 << 40

_layouts = msgspec.msgpack.Decoder(list[KVLayout])


class SessionState(Enum):
    """State of a session. On D: hello, up, over. On P: up, ending, closing, over."""

    HELLO = "hello"
    """D has sent `Hello` and has no answer yet."""
    UP = "up"
    ENDING = "ending"
    """Nothing is posted any more; writes may be in flight."""
    CLOSING = "closing"
    """The transport's connections of the session are being closed."""
    OVER = "over"


@dataclass
class Session:
    """One control session, as one side sees it.

    Attributes:
        id: Random id, drawn by D.
        link: Link of the last message received; replies are sent there.
        node: The peer; None until D knows it.
        address: P's address, to be dialled while there is no link.
        last_in: Highest message number received.
        numbers: Numbers of messages sent. D has one counter for all of its sessions, so that P
            recognises a `Hello` that was overtaken by messages of later sessions.
        groups: The peer's layouts on rank 0; the fields that the machines use are the same on all
            ranks.
        pairings: Pairings of the groups of both sides.
        pairs: The (source rank, target rank) pairs that share bytes.
        receiver: The peer that sent messages name as their receiver; None until it is known.
        attempts: Live attempts bound to the session; on D including those in quarantine.
    """

    id: bytes
    state: SessionState
    link: Link | None = None
    node: NodeId | None = None
    address: str | None = None
    last_in: int = -1
    numbers: Iterator[int] = field(default_factory=itertools.count)
    groups: Sequence[KVLayout] = ()
    pairings: Sequence[GroupPairing] = ()
    pairs: frozenset[tuple[int, int]] = frozenset()
    receiver: NodeId | None = None
    attempts: dict[Attempt, Any] = field(default_factory=dict)


class RefusalError(Exception):
    """A peer's message is refused.

    Attributes:
        code: Code of the `Refused` to send.
        retry: The peer may ask again later.
    """

    def __init__(self, code: str, why: str, *, retry: bool = False) -> None:
        super().__init__(why)
        self.code, self.retry = code, retry


def decode_layouts(ranks: Sequence[RankCard]) -> list[list[KVLayout]]:
    """Layouts per rank; the fields that the machines use are checked.

    Raises:
        RefusalError: The layouts are invalid (code ``malformed``).
    """
    if not 1 <= len(ranks) <= MAX_RANKS or [card.rank for card in ranks] != list(range(len(ranks))):
        raise RefusalError("malformed", f"ranks must be numbered 0 to at most {MAX_RANKS - 1}")
    try:
        layouts = [_layouts.decode(card.layouts) for card in ranks]
    except UNREADABLE as error:
        raise RefusalError("malformed", f"layouts can't be read: {error}") from error
    # The fields that the machines use; `pair_groups` checks the others.
    shapes = [[(g.group, g.kind, g.block_size, g.num_blocks) for g in of] for of in layouts]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise RefusalError("malformed", f"rank {rank} has {shape}, rank 0 {shapes[0]}")
    if not 1 <= len(shapes[0]) <= MAX_GROUPS:
        raise RefusalError("malformed", f"{len(shapes[0])} groups, at most {MAX_GROUPS} may be")
    for number, (group, _, size, count) in enumerate(shapes[0]):
        if group != number or not (0 < size <= MAX_BLOCK_SIZE and 1 < count <= MAX_BLOCKS):
            why = f"group {number} is called {group}, and has {count} blocks of {size} tokens"
            raise RefusalError("malformed", why)
    return layouts


MAX_STORIES = 512
"""Maximum number of attempts whose log is kept."""
MAX_STORY_LINES = 64
"""Maximum number of lines in the log of one attempt; the oldest are dropped."""
MAX_TOMBSTONES = 16_384
"""Maximum number of ended attempts that are remembered."""
ALARMS = ("deadline", "resend")
"""Names of the alarms of an attempt."""
COUNTED_AS = {"cancelled": "cancelled"} | dict.fromkeys(
    ("delivered", "acked", "not_needed"), "completed"
)
"""Field of `Counters` by outcome of an attempt; all other outcomes count as failed."""


class Alarms:
    """Alarms, at most one per name and owner: setting an alarm again moves it.

    Attributes:
        now: Current time in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._at: dict[tuple[str, Hashable], float] = {}
        self._heap: list[tuple[float, int, str, Hashable]] = []
        self._numbers = itertools.count()

    def ring_in(self, name: str, owner: Hashable, seconds: float) -> None:
        """Set an alarm some seconds from now."""
        at = self._at[name, owner] = self.now + seconds
        heapq.heappush(self._heap, (at, next(self._numbers), name, owner))
        if len(self._heap) > 8 * len(self._at) + 64:  # most of them were moved or cleared
            self._heap = [(at, next(self._numbers), *key) for key, at in self._at.items()]
            heapq.heapify(self._heap)

    def clear(self, name: str, owner: Hashable) -> None:
        """Cancel an alarm, if it is set."""
        self._at.pop((name, owner), None)

    def rings_at(self, name: str, owner: Hashable) -> float | None:
        """Time at which an alarm rings; None if it is not set."""
        return self._at.get((name, owner))

    def next_alarm(self) -> float | None:
        """Time at which the earliest alarm rings; None if none is set."""
        while self._heap:
            at, _, name, owner = self._heap[0]
            if self._at.get((name, owner)) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def take_alarm(self) -> tuple[str, Hashable] | None:
        """Take out the earliest alarm that is due; only one, as handling it may clear others."""
        at = self.next_alarm()
        if at is None or at > self.now:
            return None
        _, _, name, owner = heapq.heappop(self._heap)
        self.clear(name, owner)
        return name, owner


class Tombstones:
    """Outcomes of the latest ended attempts, so that late messages get the right answer.

    Args:
        seconds: How long each outcome is remembered.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._outcomes: OrderedDict[Attempt, tuple[str, float]] = OrderedDict()

    def add(self, name: Attempt, outcome: str, now: float) -> None:
        """Remember an outcome; beyond `MAX_TOMBSTONES` the oldest are forgotten."""
        self._outcomes[name] = outcome, now + self._seconds
        while len(self._outcomes) > MAX_TOMBSTONES or next(iter(self._outcomes.values()))[1] <= now:
            self._outcomes.popitem(last=False)

    def outcome(self, name: Attempt, now: float) -> str | None:
        """Outcome of an attempt; None if it is unknown or forgotten."""
        outcome, until = self._outcomes.get(name, ("", now))
        return outcome if until > now else None

    def __len__(self) -> int:
        return len(self._outcomes)


@dataclass
class Counters:
    """Totals of a machine; ``started == completed + failed + cancelled + live`` always holds."""

    started: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    mismatches: int = 0
    by_code: Counter[str] = field(default_factory=Counter)


Rule = Callable[..., None]
"""A machine's method for cells of its table; ``docs/protocol.md`` shows its docstring.

It takes the attempt's record and the event or message (None for an alarm).
"""

Table = Mapping["type | str", tuple[Rule | None, ...]]
"""Per type of event or message, or name of alarm: one rule per state, in the states' order.

None marks a case that can't occur.
"""

Reactions = Mapping[type, Callable[..., None]]
"""Methods that handle events of no single attempt, by type of event."""


Story = deque[tuple[float, str]]

SessionT = TypeVar("SessionT", bound=Session)


@dataclass
class Record(Generic[SessionT]):
    """An attempt, as one side knows it.

    Attributes:
        state: One of the side's states. The first state means unknown, the last one ended.
        outcome: How the attempt ends, once that is known.
        session: The session that it is bound to, if any.
        story: Log of the attempt: time and text of its latest events.
    """

    name: Attempt
    state: Any = None
    outcome: str = ""
    session: SessionT | None = None
    story: Story = field(default_factory=lambda: deque(maxlen=MAX_STORY_LINES), repr=False)

    @property
    def bound_to(self) -> SessionT:
        """The session of an attempt that is bound to one."""
        assert self.session is not None, f"{self.name} is bound to no session"
        return self.session


RecordT = TypeVar("RecordT", bound=Record[Any])


class Machine(Alarms, Generic[RecordT, SessionT]):
    """One side of the protocol.

    An attempt has two alarms: *deadline*, which every live attempt has, and *resend*. An alarm runs
    in the states for which the table has a rule. Alarms of other owners are handled by `ring`.

    Args:
        identity: How this node identifies itself.
        timers: Timers of the protocol.

    Attributes:
        actions: Actions of the event being handled so far, in order; kept if `handle` raises.
        do: Appends an action to `actions`.
        live: Attempts that have not ended.
        ended: Outcomes of the latest ended attempts.
        stories: Logs of the latest attempts, the oldest first.
        groups: This side's layouts on rank 0, one per group.
        known: Sessions by id.
    """

    is_source: ClassVar[bool]
    table: ClassVar[Table]
    reactions: ClassVar[Reactions]
    states: ClassVar[type[Enum]]
    record_type: type[RecordT]

    def __init__(self, identity: Identity, timers: TransferTimers) -> None:
        super().__init__()
        self.identity = identity
        self.layouts = decode_layouts(identity.ranks)
        self.groups = self.layouts[0]
        self.known: dict[bytes, SessionT] = {}
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
        """Handle an event at time `now` in seconds; returns the actions to carry out, in order."""
        self.now, self.actions = now, []
        self.do = self.actions.append
        if isinstance(event, AboutAttempt):
            record = self.live.get(event.attempt) or self.record(event.attempt)
            try:  # inlined `apply`: this runs for every block
                self._rules[type(event), record.state](record, event)
            except RefusalError as refusal:
                self.refuse(record, refusal)
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
        """Handle an alarm whose owner is not an attempt."""
        raise NotImplementedError

    def refuse(self, record: RecordT, refusal: RefusalError) -> None:
        """Handle a rule's refusal of a peer's message about an attempt."""
        raise NotImplementedError

    def ledger(self) -> dict[str, Any]:
        """Totals, live attempts by state, and sessions in use or whose writes may still land."""
        return {
            "totals": {**vars(self.counters), "by_code": dict(self.counters.by_code)},
            "attempts": dict(Counter(record.state.value for record in self.live.values())),
            "sessions": [
                {
                    "session": session.id.hex(),
                    "address": session.address,
                    "node": session.node.node if session.node else None,
                    "generation": session.node.generation.hex() if session.node else None,
                    "state": session.state.value,
                    "attempts": len(session.attempts),
                }
                for session in self.known.values()
            ],
        }

    def record(self, name: Attempt) -> RecordT:
        """The record of a live attempt, or a temporary one of an unknown or ended attempt."""
        if (live := self.live.get(name)) is not None:
            return live
        outcome = self.ended.outcome(name, self.now)
        unknown, *_, ended = self.states
        record = self.record_type(name, unknown if outcome is None else ended, outcome or "")
        record.story = self.stories.get(name, record.story)
        return record

    # --- for the sides ---

    def remember(self, record: RecordT) -> None:
        """Keep the log of an attempt from now on."""
        self.stories.setdefault(record.name, record.story)
        if len(self.stories) > MAX_STORIES:
            del self.stories[next(iter(self.stories))]

    def count(self, code: str) -> None:
        """Count an event by a name of its own."""
        self.counters.by_code[code] += 1

    def apply(self, row: type | str, record: RecordT, given: Any) -> None:
        """Apply the rule for an event, message or alarm in the attempt's state."""
        try:
            self._rules[row, record.state](record, given)
        except RefusalError as refusal:
            self.refuse(record, refusal)

    def _set_state(self, record: RecordT, state: Enum) -> None:
        """Change the state; an attempt that was unknown becomes live."""
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
        """End a live attempt and remember its outcome."""
        *_, ended = self.states
        self._set_state(record, ended)
        counter = COUNTED_AS.get(outcome, "failed")
        setattr(self.counters, counter, getattr(self.counters, counter) + 1)
        del self.live[record.name]
        self.ended.add(record.name, outcome, self.now)

    # --- sessions ---

    def sessions_with(self, node: NodeId | None) -> list[SessionT]:
        """The known sessions with a generation."""
        return [session for session in self.known.values() if session.node == node]

    def send(self, session: Session, kind: type[control.Message], **fields: Any) -> None:
        """Send a message on a session's link, or to its address if it has none."""
        fields |= {"session": session.id, "seq": next(session.numbers)}
        message: Any = kind(receiver=session.receiver, **fields)
        address = session.address if session.link is None else None
        self.do(SendMessage(message, link=session.link, address=address))

    def _send(
        self,
        record: RecordT,
        kind: type[control.TransferMessage] | type[control.Refused],
        **fields: Any,
    ) -> None:
        """Send a message about an attempt, in the session that it is bound to."""
        record.story.append((self.now, f"> {kind.__name__}"))
        fields |= {"transfer_id": record.name.transfer_id, "attempt": record.name.number}
        self.send(record.bound_to, kind, **fields)

    def admit(self, session: Session, link: Link, seq: int) -> bool:
        """Whether a message is newer than all before it; if so, replies use its link from now."""
        if seq <= session.last_in:
            self.count("stale_seq")
            return False
        session.last_in, session.link = seq, link
        return True

    def pair_up(self, session: Session, ranks: Sequence[control.RankCard]) -> None:
        """Pair the ranks of both sides, and keep the result in the session.

        Raises:
            RefusalError: They can't be paired; the message names both values.
        """
        theirs = decode_layouts(ranks)
        source, target = (self.layouts, theirs) if self.is_source else (theirs, self.layouts)
        try:
            session.pairings = pair_groups(source, target)
        except (ValueError, ArithmeticError, LookupError, TypeError) as error:
            # A peer's layouts may be wrong in ways that no check foresees.
            raise RefusalError("layout", str(error) or type(error).__name__) from error
        session.groups = theirs[0]
        session.pairs = frozenset(pair for one in session.pairings for pair in one.shares)

    # --- rules that both tables name ---

    def _drop(self, record: RecordT, given: Any) -> None:
        """Only count it: the sender already has its answer."""
        self.count(f"late_{type(given).__name__.lower()}")

    def _ignore(self, record: RecordT, given: Any) -> None:
        """Do nothing: it is not news, or engine or transport did not know of the end yet."""
