"""P's records of an attempt (tokens ready and posted, writes in flight) and of a session."""

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
"""A rank pair's share of a write: number of the write, source rank, target rank."""


class SourceState(Enum):
    """State of an attempt on P."""

    UNKNOWN = "unknown"
    ANNOUNCED = "announced"
    """The request has arrived, no `Reserve` yet; nothing is pinned."""
    RESERVED = "reserved"
    """`Reserve` has arrived, the request has not."""
    ENGAGED = "engaged"
    """Request and `Reserve` have arrived; P pushes the blocks that the engine reports."""
    COMPLETED = "completed"
    """All is posted and the first tokens are known; P repeats `Complete`."""
    STOPPING = "stopping"
    """The attempt is over, but a write may still read P's blocks or land at D."""
    ENDED = "ended"
    """The attempt has ended; its outcome is remembered to answer late messages."""


@dataclass
class SourceSession(Session):
    """A session with one D.

    Attributes:
        unit: Tokens from one common block border of both sides to the next.
        max_tokens: Maximum number of tokens of a write, a multiple of `unit`, so that its digests
            fit into a notice, and the next write can be posted while this one is in flight.
        in_flight: Shares of writes that are not terminal, by attempt; they may outlive the attempt
            and the session.
        pinned: Number of blocks pinned by its attempts by block keys.
        asked: The session is over, and D has asked for it within the last `tombstone`.
    """

    unit: int = 1
    max_tokens: int = 1
    in_flight: dict[Attempt, set[Write]] = field(default_factory=dict)
    pinned: int = 0
    asked: bool = True

    @property
    def drained(self) -> bool:
        """Whether no write of the session can land, now or later."""
        return self.state is not SessionState.UP and not any(self.in_flight.values())


@dataclass
class Outgoing(Record[SourceSession]):
    """One attempt on P.

    Attributes:
        reserve: D's `Reserve`; set with the session.
        until: Time at which D will have given up in any case.
        engaged: `Engage` was emitted, so a `Release` is owed.
        pinned: Number of blocks pinned because they were requested by key.
        start: First token of the reservation.
        end: One past the last token to be pushed; by block keys it is final with `FirstTokens`.
        ready: Tokens before this one are reported ready.
        posted: Tokens before this one are posted; never decreases.
        blocks: Per group, the source's block table, see `plan.block_tables`.
        targets: Per group, the target's block table.
        writes: Range (start, end) of each write, by number.
        in_flight: Shares of writes that are not terminal; `SourceSession.in_flight` has this set.
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
    in_flight: set[Write] = field(default_factory=set)
    choices: tuple[ChoiceStart, ...] | None = None
    cached_tokens: int = 0
    evicted: bool = False

    def engage(self, groups: Sequence[KVLayout]) -> None:
        """Prepare for the engine's reports, which begin at the first token of the reservation."""
        self.engaged = True
        self.ready = self.posted = self.start
        self.end = self.num_tokens
        self.blocks = block_tables(((),) * len(groups), groups, self.num_tokens)
        self.targets = block_tables(self.reserve.spans, self.bound_to.groups, self.num_tokens)

    def take(self, report: BlocksReady) -> None:
        """Take in a report of final blocks.

        Raises:
            ValueError: The report does not continue the last one.
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
        """Writes of the tokens that are ready, up to a common block border or the end."""
        session = self.bound_to
        for post in self._writes_until(self.ready):
            self.posted = post.end
            self.writes.append((post.start, post.end))
            self.in_flight.update((post.write, *pair) for pair in session.pairs)
            session.in_flight[self.name] = self.in_flight
            yield post

    def coming(self, report: BlocksReady) -> list[Post]:
        """Writes that will be posted once a report is final; none before `engage`."""
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
