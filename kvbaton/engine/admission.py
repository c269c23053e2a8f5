"""The one rule of admission: what to do with the first of the queue.

It gets all blocks that its known tokens need, beyond what running requests may claim at their next
step, or it waits, and all others wait behind it. Blocks in quarantine are not free, hence count as
absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbaton.engine.kv_cache_manager import Match, Need
from kvbaton.engine.kv_connector import PENDING, KVConnector
from kvbaton.engine.request import Sequence, State

if TYPE_CHECKING:
    from kvbaton.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Run:
    """Start computing after this prefix."""

    match: Match


@dataclass(frozen=True)
class BeginLoad:
    """Let a connector fill blocks after this prefix, up to `end`."""

    connector: KVConnector
    match: Match
    end: int


@dataclass(frozen=True)
class Park:
    """Wait beside the queue for a connector's answer."""


@dataclass(frozen=True)
class AwaitItem:
    """Wait for the encoder output that the token at `start` stands for."""

    start: int


@dataclass(frozen=True)
class Reject:
    """It can never run."""

    error: str


Decision = Run | BeginLoad | Park | AwaitItem | Reject


class Admission:
    """Decides about the first of the queue."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._config = scheduler.config

    def decide(self, sequence: Sequence) -> Decision | None:
        """What to do with the first of the queue; None lets it wait."""
        if sequence.pending or not self._has_slot(sequence):
            return None
        error = self._blocks.too_large(len(sequence.tokens))
        if error is not None:
            return Reject(error)
        match = self._match(sequence)
        for connector in self._scheduler.connectors:
            offer = connector.match(sequence, match.num_tokens)
            if offer is PENDING:
                return Park()
            if offer:
                if self._can_load(sequence, match):
                    return BeginLoad(connector, match, match.num_tokens + offer)
                # Room comes with the end of a load, which has a deadline.
                if connector.waits_for_room or self._scheduler.loading:
                    return None
        if self._is_forbidden(sequence, match):
            missing = len(sequence.request.prompt) - match.num_tokens
            return Reject(f"debug_forbid_prompt_compute: {missing} prompt tokens are not cached")
        return self._await_item(sequence, match) or self._run(sequence, match)

    def _has_slot(self, sequence: Sequence) -> bool:
        taken = sum(1 + s.unforked for s in self._holders())
        return taken + 1 + sequence.unforked <= self._config.max_num_seqs

    def _holders(self) -> Iterator[Sequence]:
        yield from self._scheduler.running
        yield from (load.sequence for load in self._scheduler.loading.values())

    def _match(self, sequence: Sequence) -> Match:
        if not (self._config.enable_prefix_caching and sequence.request.reads_cache):
            return Match(0, self._blocks.empty())
        return self._blocks.match(self._blocks.chains(sequence), len(sequence.tokens))

    def _is_forbidden(self, sequence: Sequence, match: Match) -> bool:
        last = len(sequence.request.prompt) - 1
        return self._config.debug_forbid_prompt_compute and match.num_tokens < last

    def _await_item(self, sequence: Sequence, match: Match) -> AwaitItem | None:
        """Whether the first token after a prefix needs an item that is not here."""
        start = min(match.num_tokens, len(sequence.tokens) - 1)
        lacks = self._scheduler.items.ready_until(sequence, start) <= start
        return AwaitItem(start) if lacks else None

    def _run(self, sequence: Sequence, match: Match) -> Run | AwaitItem | None:
        total = len(sequence.tokens)
        beside = self._reserved()
        copy_at = total - 1 if match.num_tokens == total else None
        need = self._blocks.need(match.tables, total, copy_at=copy_at)
        if self._blocks.fits(need, beside=beside, hits=match.tables):
            return Run(match)
        if copy_at is None:
            return None
        # The private copy of the last block has no room: compute that block instead.
        match = self._blocks.shorten(self._blocks.chains(sequence), match)
        need = self._blocks.need(match.tables, total)
        fits = self._blocks.fits(need, beside=beside, hits=match.tables)
        if not fits or self._is_forbidden(sequence, match):
            return None
        return self._await_item(sequence, match) or Run(match)

    def _can_load(self, sequence: Sequence, match: Match) -> bool:
        need = self._blocks.need(match.tables, len(sequence.tokens))
        fits = self._blocks.fits(need, beside=self._reserved(), hits=match.tables)
        return fits and all(self._under_cap(g, wanted) for g, wanted in enumerate(need))

    def _under_cap(self, g: int, wanted: int) -> bool:
        """Loads that have not come in may not reserve everything, unless one is alone."""
        incoming = self._blocks.num_incoming(g)
        cap = self._config.max_loading_share * self._blocks.pools[g].usable
        return incoming == 0 or incoming + wanted <= cap

    def _reserved(self) -> Need:
        """Blocks that running and loading sequences may want at their next step."""
        wanted = [self._next_need(sequence) for sequence in self._holders()]
        return tuple(sum(need[g] for need in wanted) for g in range(len(self._blocks.groups)))

    def _next_need(self, sequence: Sequence) -> Need:
        if sequence.is_ending:
            return (0,) * len(sequence.tables)
        forks = sequence.unforked
        whole = bool(forks) or sequence.state is State.LOADING
        scheduled = len(sequence.tokens) if whole else sequence.num_scheduled
        copy_at = scheduled if sequence.shares_tail else None
        need = self._blocks.need(sequence.tables, scheduled + 1, copy_at=copy_at)
        return tuple(wanted + forks for wanted in need)
