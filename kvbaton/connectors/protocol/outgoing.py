"""One attempt on P: what of it is ready, wanted and posted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.checks import ceil_div, covered_end, spans_slice
from kvbaton.connectors.protocol.events import BlocksReady, Post
from kvbaton.connectors.protocol.session import Group
from kvbaton.connectors.protocol.table import SourceState
from kvbaton.types import Attempt, BlockSpan, ChoiceStart

if TYPE_CHECKING:
    from kvbaton.connectors.protocol.source_sessions import SourceSession
    from kvbaton.messages.control import Reserve

Write = tuple[int, int, int]
"""Number of a write, source rank, target rank."""


@dataclass
class Outgoing:
    """One attempt on P.

    Attributes:
        reserve: what D asked for, extensions included.
        engaged: `Engage` was emitted, so a `Release` is owed.
        start: first token of the reservation.
        ready: tokens below this are reported ready.
        posted: tokens below this are posted; never goes back.
        blocks: per group, the source block behind each logical block, 0 where there is none; int64.
        sums: (start, end, sums) of each report.
        writes: (start, end) of each write, by number.
        flying: parts of writes that are not terminal.
    """

    name: Attempt
    state: SourceState = SourceState.UNKNOWN
    outcome: str = ""
    prompt_key: bytes = b""
    num_tokens: int = 0
    session: SourceSession | None = None
    reserve: Reserve | None = None
    engaged: bool = False
    start: int = 0
    ready: int = 0
    posted: int = 0
    blocks: list[npt.NDArray[np.int64]] = field(default_factory=list)
    sums: list[tuple[int, int, object]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    flying: set[Write] = field(default_factory=set)
    choices: tuple[ChoiceStart, ...] | None = None
    cached_tokens: int = 0
    evicted: bool = False

    @property
    def complete(self) -> bool:
        """Whether all is posted and the first tokens are known."""
        return self.choices is not None and self.posted == self.num_tokens

    def engage(self, groups: Sequence[Group]) -> None:
        """The engine starts to report, from the first token wanted on."""
        self.engaged = True
        self.ready = self.posted = self.start
        sizes = [ceil_div(self.num_tokens, group.block_size) for group in groups]
        self.blocks = [np.zeros(size, np.int64) for size in sizes]

    def take(self, report: BlocksReady) -> None:
        """Take in which blocks have become final.

        Raises:
            ValueError: it does not follow the last report.
        """
        if report.start != self.ready:
            raise ValueError(f"tokens from {report.start} are reported, expected {self.ready}")
        for known, spans in zip(self.blocks, report.spans, strict=True):
            for span in spans:
                known[span.first : span.first + len(span.blocks)] = span.blocks
        self.sums.append((report.start, report.end, report.sums))
        self.ready = report.end

    def posts(self, groups: Sequence[Group], num_ranks: int) -> Iterator[Post]:
        """Writes of what is ready and wanted, up to a border at which blocks of both sides begin.

        Args:
            groups: of this side.
            num_ranks: of this side.
        """
        session, reserve = self.session, self.reserve
        assert session is not None
        assert reserve is not None, "a session and a reservation come together"
        end = min(self.ready, covered_end(reserve.spans, session.groups, self.num_tokens))
        if end < self.num_tokens:
            end -= end % session.unit
        while self.posted < end:
            start = self.posted
            self.posted = min(end, start - start % session.unit + session.max_tokens)
            number = len(self.writes)
            self.writes.append((start, self.posted))
            ranks = range(num_ranks), range(session.num_ranks)
            self.flying |= {(number, source, target) for source in ranks[0] for target in ranks[1]}
            yield Post(
                session.id,
                self.name,
                number,
                start,
                self.posted,
                tuple(map(_spans, self._cuts(groups, start), self.blocks)),
                tuple(map(spans_slice, reserve.spans, self._cuts(session.groups, start))),
                tuple(s for low, high, s in self.sums if low < self.posted and start < high),
            )

    def _cuts(self, groups: Sequence[Group], start: int) -> Iterator[tuple[int, int]]:
        """Per group, the logical blocks that hold tokens from `start` to what is posted."""
        for group in groups:
            if group.kind is not GroupKind.STATE:
                yield start // group.block_size, ceil_div(self.posted, group.block_size)
            else:
                yield (0, 1 << 62) if self.posted == self.num_tokens else (0, 0)

    def wrong(self) -> str | None:
        """What is wrong with it, if anything."""
        over = self.state in (SourceState.ENGAGED, SourceState.COMPLETED)
        if self.engaged != over and self.state is not SourceState.STOPPING:
            return "engaged in a wrong state"
        if self.flying and not self.engaged:
            return "writes without a lease"
        if [start for start, _ in self.writes] != [self.start, *(e for _, e in self.writes)][:-1]:
            return f"writes do not join: {self.writes}"
        if self.state is SourceState.STOPPING and not self.flying:
            return "nothing is in flight and it has not ended"
        if self.engaged and not self.posted <= self.ready <= self.num_tokens:
            return f"posted {self.posted}, ready {self.ready} of {self.num_tokens}"
        return None


def _spans(cut: tuple[int, int], blocks: npt.NDArray[np.int64]) -> tuple[BlockSpan, ...]:
    """The blocks of a cut as spans of logical blocks that follow each other."""
    there = np.flatnonzero(blocks[cut[0] : cut[1]]) + cut[0]
    runs = np.split(there, np.flatnonzero(np.diff(there) != 1) + 1) if len(there) else []
    return tuple(BlockSpan(int(run[0]), tuple(blocks[run].tolist())) for run in runs)
