"""What D keeps of an attempt (what was asked for, has landed, is verified), a session, and a P."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kvbaton.connectors.plan import BlockTable
from kvbaton.connectors.protocol.checks import check_landed
from kvbaton.connectors.protocol.events import Landed, Start, Verify
from kvbaton.connectors.protocol.machine import Record, RefusalError, Session, SessionState
from kvbaton.messages.control import Complete, DigestRun
from kvbaton.types import Attempt, NodeId

MAX_UNNEEDED = 1024
"""Messages `NotNeeded` that may wait for a session; older ones are dropped: P forgets by itself."""


class TargetState(Enum):
    """State of an attempt on D."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    """There is no session yet; P was told nothing."""
    RESERVED = "reserved"
    """`Reserve` is sent and unanswered."""
    ENGAGED = "engaged"
    """P has answered."""
    COMPLETING = "completing"
    """`Complete` is here; notices are missing, or not verified."""
    DRAINING = "draining"
    """Over for the engine; the blocks are in quarantine."""
    ENDED = "ended"
    """Over; remembered to answer late messages."""


@dataclass
class TargetSession(Session):
    """A session with one P.

    Attributes:
        line: to that P.
        since: when it was opened.
        heard: when the last message of it came.
    """

    line: Line = field(kw_only=True, repr=False)
    since: float = 0.0
    heard: float = 0.0

    @property
    def over(self) -> bool:
        """Whether it has ended: its line uses it no more."""
        return self.state is SessionState.OVER


@dataclass
class Line:
    """An address of a P: the session in use, and what waits for it.

    Attributes:
        member: router or operator vouch for the address: its session is kept open.
        used: when something was last asked of it.
        opened: when its last session was opened.
        node: the generation that answered last.
        attempts: alive, those included that wait for a session or are in quarantine.
        unneeded: what P is told when there is one.
        mismatches: when digests did not match.
    """

    address: str
    member: bool = False
    used: float = 0.0
    opened: float = -math.inf
    node: NodeId | None = None
    session: TargetSession | None = None
    attempts: dict[Attempt, Incoming] = field(default_factory=dict)
    unneeded: deque[Attempt] = field(default_factory=lambda: deque(maxlen=MAX_UNNEEDED))
    mismatches: list[float] = field(default_factory=list)

    @property
    def up(self) -> TargetSession | None:
        """The session in use, if it is up."""
        session = self.session
        return session if session and session.state is SessionState.UP else None

    def waiting(self) -> list[Incoming]:
        """Attempts that wait for a session."""
        return [r for r in self.attempts.values() if r.state is TargetState.WAITING]


@dataclass
class Arrival:
    """What has landed of a write.

    Attributes:
        start: first token.
        end: past the last token.
        missing: rank pairs of which a part is missing.
        parts: parts that are here, by rank pair.
        digests: what P claims.
    """

    start: int
    end: int
    missing: set[tuple[int, int]]
    parts: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    digests: list[DigestRun] = field(default_factory=list)


@dataclass
class Incoming(Record[TargetSession]):
    """One attempt on D.

    Attributes:
        order: what the engine asked for; order, targets and line are set when it is started.
        targets: per group, the block table of the prompt, see `plan.block_tables`.
        counted: per group, the first token that digests count; set with the session.
        num_tokens: prompt length.
        start: first token of the reservation.
        began: when it was started.
        completed: when `complete` came.
        crossed: tokens before this one had been verified by then.
        until: hard limit.
        num_blocks: reserved.
        line: to P.
        arrivals: what has landed, by write.
        claimed: values in their digests; a pair has one per group and unit, of a token at least.
        verified: ranges that do not match, by verified write; empty for a good one.
        bad: ranges that do not match; told to P until it has drained.
        since: when the quarantine began.
        times: when it was accepted, and its first and latest bytes landed.
    """

    state: TargetState = TargetState.UNKNOWN
    order: Start = field(init=False, repr=False)
    targets: list[BlockTable] = field(init=False, repr=False)
    counted: tuple[int, ...] = ()
    num_tokens: int = 0
    start: int = 0
    began: float = 0.0
    completed: float = 0.0
    crossed: int = 0
    until: float = 0.0
    num_blocks: int = 0
    line: Line = field(init=False, repr=False)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    claimed: int = 0
    verified: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    complete: Complete | None = None
    bad: tuple[tuple[int, int], ...] = ()
    since: float = 0.0
    times: dict[str, float] = field(default_factory=dict, repr=False)

    def land(self, event: Landed) -> Arrival | None:
        """Take in a notice, of ranks that write in its session; the write if that was its last one.

        Raises:
            RefusalError: it can't be.
        """
        if problem := check_landed(event, self.start, self.num_tokens, len(self.targets)):
            raise RefusalError("malformed", problem)
        pairs = set(self.bound_to.pairs)
        arrival = self.arrivals.setdefault(event.write, Arrival(event.start, event.end, pairs))
        if (arrival.start, arrival.end) != (event.start, event.end):
            raise RefusalError("malformed", f"write {event.write} is told of differently")
        pair = (event.source_rank, event.target_rank)
        parts = arrival.parts.setdefault(pair, set())
        if event.part in parts:
            return None
        parts.add(event.part)
        self.claimed += sum(max(1, len(run.values) // 8) for run in event.digests)
        if self.claimed > len(self.targets) * len(pairs) * (self.num_tokens - self.start):
            raise RefusalError("malformed", "it claims digests of more than was reserved")
        arrival.digests += event.digests
        if len(parts) == event.parts:
            arrival.missing.discard(pair)
        return None if arrival.missing else arrival

    def verification(self, write: int) -> Verify:
        """The order to compare the digests of a write."""
        there, tables = self.arrivals[write], (self.bound_to.pairings, self.targets, self.counted)
        return Verify(self.name, write, there.start, there.end, *tables, tuple(there.digests))

    def valid_through(self) -> int:
        """End of the verified tokens that follow each other from the start of the reservation."""
        end, write = self.start, 0
        while write in self.verified and not self.verified[write]:
            if self.arrivals[write].start != end:
                break
            end = self.arrivals[write].end
            write += 1
        return end
