"""One attempt on D: what was asked for, what has landed, what is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.checks import ceil_div, check_landed, spans_slice
from kvbaton.connectors.protocol.events import Landed, Start, Verify
from kvbaton.connectors.protocol.session import Group
from kvbaton.connectors.protocol.table import TargetState
from kvbaton.messages.control import Complete, DigestRun
from kvbaton.types import Attempt, Spans

if TYPE_CHECKING:
    from kvbaton.connectors.protocol.target_sessions import Line, TargetSession


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
class Incoming:
    """One attempt on D.

    Attributes:
        order: what the engine asked for.
        start: first token of the reservation.
        deadline: hard limit.
        num_blocks: reserved.
        line: to P; None once it has ended.
        arrivals: what has landed, by write.
        verified: ranges that do not match, by verified write; empty for a good one.
        bad: ranges that do not match; told to P until it has drained.
        since: when the quarantine began.
    """

    name: Attempt
    state: TargetState = TargetState.UNKNOWN
    outcome: str = ""
    order: Start | None = None
    start: int = 0
    deadline: float = 0.0
    num_blocks: int = 0
    line: Line | None = None
    session: TargetSession | None = None
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    verified: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    complete: Complete | None = None
    bad: tuple[tuple[int, int], ...] = ()
    since: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt length."""
        assert self.order is not None, "only of an attempt that was started"
        return self.order.num_tokens

    def land(self, event: Landed, groups: Sequence[Group], num_ranks: int) -> Arrival | None:
        """Take in a notice; the write if that was its last one.

        Args:
            event: of this attempt's session, and of ranks that exist.
            groups: of this side.
            num_ranks: of this side.

        Raises:
            ValueError: it can't be; the text says why.
        """
        assert self.session is not None
        problem = check_landed(event, self.start, self.num_tokens, len(groups))
        if problem is not None:
            raise ValueError(problem)
        ranks = range(self.session.num_ranks), range(num_ranks)
        pairs = {(source, target) for source in ranks[0] for target in ranks[1]}
        arrival = self.arrivals.setdefault(event.write, Arrival(event.start, event.end, pairs))
        if (arrival.start, arrival.end) != (event.start, event.end):
            raise ValueError(f"write {event.write} is told of differently")
        pair = (event.source_rank, event.target_rank)
        parts = arrival.parts.setdefault(pair, set())
        if event.part in parts:
            return None
        parts.add(event.part)
        arrival.digests += event.digests
        if len(parts) == event.parts:
            arrival.missing.discard(pair)
        return None if arrival.missing else arrival

    def verification(self, write: int, groups: Sequence[Group]) -> Verify:
        """The order to compare the digests of a write.

        Args:
            write: its number.
            groups: of this side.
        """
        assert self.session is not None
        arrival = self.arrivals[write]
        start, end = arrival.start, arrival.end
        target, digests = self._cut(groups, start, end), tuple(arrival.digests)
        return Verify(self.session.id, self.name, write, start, end, target, digests)

    def _cut(self, groups: Sequence[Group], start: int, end: int) -> Spans:
        assert self.order is not None
        cut = []
        for group, spans in zip(groups, self.order.spans, strict=True):
            blocks = start // group.block_size, ceil_div(end, group.block_size)
            if group.kind is GroupKind.STATE:
                blocks = (0, 1 << 62) if end == self.num_tokens else (0, 0)
            cut.append(spans_slice(spans, blocks))
        return tuple(cut)

    def valid_through(self) -> int:
        """End of the verified tokens that follow each other from the start of the reservation."""
        end, write = self.start, 0
        while write in self.verified and not self.verified[write]:
            if self.arrivals[write].start != end:
                break
            end = self.arrivals[write].end
            write += 1
        return end

    def wrong(self) -> str | None:
        """What is wrong with it, if anything."""
        if (self.session is None) != (self.state is TargetState.WAITING):
            return "a session in a wrong state"
        if self.session is not None and self.session.attempts.get(self.name) is not self:
            return "its session does not know it"
        over = self.session is not None and self.session.over
        if over and self.state is not TargetState.DRAINING:
            return "alive in a session that is over"
        if self.complete is None and self.state is TargetState.COMPLETING:
            return "completing without Complete"
        if any(self.arrivals[write].missing for write in self.verified):
            return "verified before it has landed"
        return None
