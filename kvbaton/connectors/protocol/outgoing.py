"""What P keeps of an attempt (what of it is ready, wanted and posted) and of a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.plan import BlockTable, block_tables
from kvbaton.connectors.protocol.events import BlocksReady, Post
from kvbaton.connectors.protocol.machine import Record, Session, SessionState
from kvbaton.messages.control import Reserve
from kvbaton.types import Attempt, ChoiceStart

Write = tuple[int, int, int]
"""Number of a write, source rank, target rank."""


class SourceState(Enum):
    """State of an attempt on P."""

    UNKNOWN = "unknown"
    ANNOUNCED = "announced"
    """The request is here, nobody has reserved; nothing is pinned."""
    RESERVED = "reserved"
    """D has reserved, the request has not come."""
    ENGAGED = "engaged"
    """Both are here; P pushes what the engine reports."""
    COMPLETED = "completed"
    """All is posted and the first tokens are known; P repeats `Complete`."""
    STOPPING = "stopping"
    """Over, but a write may still read P's blocks or land at D."""
    ENDED = "ended"
    """Over; remembered to answer late messages."""


@dataclass
class SourceSession(Session):
    """A session with one D.

    Attributes:
        unit: tokens between two borders at which blocks of both sides begin.
        max_tokens: most tokens of a write, a multiple of `unit`: its digests fit into a notice, and
            what follows it can be posted while it crosses.
        flying: writes that are not terminal, by attempt; they may outlive both.
        pinned: blocks that its attempts hold because they were named by key.
        asked: it is over, and D has asked after it in the last `tombstone`.
    """

    unit: int = 1
    max_tokens: int = 1
    flying: dict[Attempt, set[Write]] = field(default_factory=dict)
    pinned: int = 0
    asked: bool = True

    @property
    def drained(self) -> bool:
        """Whether no write of it can land any more, nor ever will."""
        return self.state is not SessionState.UP and not any(self.flying.values())


@dataclass
class Outgoing(Record[SourceSession]):
    """One attempt on P.

    Attributes:
        reserve: what D asked for; set with the session.
        until: when D will have given up in any case.
        engaged: `Engage` was emitted, so a `Release` is owed.
        pinned: blocks that it holds because they were named by key.
        start: first token of the reservation.
        end: past the last token to be pushed; of block keys it is known with `FirstTokens`.
        ready: tokens below this are reported ready.
        posted: tokens below this are posted; never goes back.
        blocks: per group, the source block behind each logical block, see `plan.block_tables`.
        targets: likewise the target's.
        writes: (start, end) of each write, by number.
        flying: parts of writes that are not terminal; its session's `flying` has the same set.
    """

    state: SourceState = SourceState.UNKNOWN
    prompt_key: bytes = b""
    num_tokens: int = 0
    reserve: Reserve = field(init=False, repr=False)
    until: float = 0.0
    engaged: bool = False
    pinned: int = 0
    start: int = 0
    end: int = 0
    ready: int = 0
    posted: int = 0
    blocks: list[BlockTable] = field(default_factory=list)
    targets: list[BlockTable] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    flying: set[Write] = field(default_factory=set)
    choices: tuple[ChoiceStart, ...] | None = None
    cached_tokens: int = 0
    evicted: bool = False

    def engage(self, groups: Sequence[KVLayout]) -> None:
        """The engine starts to report, from the first token wanted on."""
        self.engaged = True
        self.ready = self.posted = self.start
        self.end = self.num_tokens
        self.blocks = block_tables(((),) * len(groups), groups, self.num_tokens)
        self.targets = block_tables(self.reserve.spans, self.bound_to.groups, self.num_tokens)

    def take(self, report: BlocksReady) -> None:
        """Take in which blocks have become final.

        Raises:
            ValueError: it does not follow the last report.
        """
        if report.start != self.ready:
            raise ValueError(f"tokens from {report.start} are reported, expected {self.ready}")
        self._note(report)
        self.ready = report.end

    def _note(self, report: BlocksReady) -> None:
        for known, spans in zip(self.blocks, report.spans, strict=True):
            for span in spans:
                known[span.first : span.first + len(span.blocks)] = span.blocks

    def posts(self) -> Iterator[Post]:
        """Writes of what is ready, up to a border where blocks of both sides begin."""
        session = self.bound_to
        for post in self._writes_until(self.ready):
            self.posted = post.end
            self.writes.append((post.start, post.end))
            self.flying.update((post.write, *pair) for pair in session.pairs)
            session.flying[self.name] = self.flying
            yield post

    def coming(self, report: BlocksReady) -> list[Post]:
        """Writes to be posted once the next report counts; none before the engine is asked."""
        if not self.engaged or report.start != self.ready:
            return []
        self._note(report)
        return list(self._writes_until(report.end))

    def _writes_until(self, end: int) -> Iterator[Post]:
        session, posted, number = self.bound_to, self.posted, len(self.writes)
        if end < self.end:
            end -= end % session.unit
        while posted < end:
            start, posted = posted, min(end, posted - posted % session.unit + session.max_tokens)
            tables = self.blocks, self.targets
            yield Post(self.name, session.id, number, start, posted, session.pairings, *tables)
            number += 1
