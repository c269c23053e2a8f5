"""D's records of an attempt (tokens reserved, landed, verified), of a session, and of a P."""

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
"""Maximum number of `NotNeeded` that wait for a session.

The oldest are dropped: P's timers forget these requests anyway.
"""


class TargetState(Enum):
    """State of an attempt on D."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    """There is no session yet; P knows nothing of the attempt."""
    RESERVED = "reserved"
    """`Reserve` is sent and not answered yet."""
    ENGAGED = "engaged"
    """P has answered."""
    COMPLETING = "completing"
    """`Complete` has arrived; some notices are missing, or some writes not verified."""
    DRAINING = "draining"
    """The attempt is over for the engine; its blocks are in quarantine."""
    ENDED = "ended"
    """The attempt has ended; its outcome is remembered to answer late messages."""


@dataclass
class TargetSession(Session):
    """A session with one P.

    Attributes:
        line: The line of that P.
        since: Time at which the session was opened.
        heard: Time of the last message received.
    """

    line: Line = field(kw_only=True, repr=False)
    since: float = 0.0
    heard: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the session has ended; its line does not use it any more."""
        return self.state is SessionState.OVER


@dataclass
class Line:
    """The address of a P, with the session in use and the attempts there.

    Attributes:
        member: Router or operator vouch for the address, so its session is kept open.
        used: Time at which the address was last used.
        opened: Time at which its last session was opened.
        node: The generation that answered last.
        attempts: Live attempts, including those that wait for a session or are in quarantine.
        unneeded: Attempts for which P gets `NotNeeded` once a session is up.
        mismatches: Times of digest mismatches.
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
        start: First token.
        end: One past the last token.
        missing: Rank pairs with missing parts.
        parts: Numbers of the parts that have landed, by rank pair.
        digests: P's digests.
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
        order: The engine's `Start`; order, targets and line are set when the attempt is started.
        targets: Per group, the block table of the prompt, see `plan.block_tables`.
        counted: Per group, the first token that digests cover; set with the session.
        num_tokens: Prompt length.
        start: First token of the reservation.
        began: Time at which the attempt was started.
        completed: Time at which `complete` arrived.
        crossed: Tokens before this one were verified at that time.
        until: Time limit of the attempt.
        num_blocks: Number of reserved blocks.
        line: The line of P.
        arrivals: What has landed, by write.
        claimed: Digest values received; at most one per rank pair, group and token.
        verified: Ranges that do not match, by verified write; empty for a good write.
        complete: P's `Complete`; None until it arrives.
        bad: Ranges that do not match; reported to P until it has drained.
        since: Time at which the quarantine began.
        times: When it was accepted, and its first and latest bytes landed.
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
        """Take in a notice of one of the session's rank pairs.

        Returns:
            The write, if this notice completes it; else None.

        Raises:
            RefusalError: The notice is invalid.
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
        """The action that compares the digests of a landed write."""
        there, tables = self.arrivals[write], (self.bound_to.pairings, self.targets, self.counted)
        return Verify(self.name, write, there.start, there.end, *tables, tuple(there.digests))

    def valid_through(self) -> int:
        """End of the verified tokens that are contiguous from the start of the reservation."""
        end, write = self.start, 0
        while write in self.verified and not self.verified[write]:
            if self.arrivals[write].start != end:
                break
            end = self.arrivals[write].end
            write += 1
        return end
