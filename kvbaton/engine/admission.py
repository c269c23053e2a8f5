"""The one rule of admission, as a decision without side effects.

The first of the queue gets all blocks that its known tokens need, beyond what running requests may
claim at their next step, or it waits, and all others wait behind it. Blocks in quarantine are not
free, hence count as absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbaton.engine.encoder.cache_manager import EncoderCacheManager
from kvbaton.engine.kv_cache_manager import Match, Need
from kvbaton.engine.request import Sequence, State
from kvbaton.engine.store_connector import StoreConnector

if TYPE_CHECKING:
    from kvbaton.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Run:
    """Start computing after this prefix."""

    match: Match


@dataclass(frozen=True)
class Load:
    """Reserve blocks for what a hand-over shall bring after this prefix."""

    match: Match


@dataclass(frozen=True)
class Fetch:
    """Load what the store has after this prefix."""

    match: Match


@dataclass(frozen=True)
class Follow:
    """Wait for what the store is loading for another one after this prefix."""

    match: Match


@dataclass(frozen=True)
class Await:
    """Wait for the encoder output that the token at `start` stands for."""

    start: int


@dataclass(frozen=True)
class Reject:
    """It can never run."""

    error: str


class Admission:
    """Decides about the first of the queue."""

    def __init__(
        self, scheduler: Scheduler, stash: StoreConnector | None, items: EncoderCacheManager | None
    ) -> None:
        self._scheduler = scheduler
        self._stash = stash
        self._items = items
        self._blocks = scheduler.blocks
        self._config = scheduler.config

    def decide(self, sequence: Sequence) -> Run | Load | Fetch | Follow | Await | Reject | None:
        """What to do with the first of the queue; None lets it wait."""
        if sequence.pending or not self._has_slot(sequence):
            return None
        error = self._blocks.too_large(len(sequence.tokens))
        if error is not None:
            return Reject(error)
        match = self._match(sequence)
        if self._stash is not None and self._stash.offers(sequence, match):
            if self._stash.is_coming(sequence, match):
                return Follow(match)
            if self._can_load(sequence, match):
                return Fetch(match)
            if self._scheduler.loading:  # room comes with the end of a load, which has a deadline
                return None
        if sequence.request.attempt is not None and match.num_tokens < len(sequence.tokens):
            return Load(match) if self._can_load(sequence, match) else None
        if self._is_forbidden(sequence, match):
            missing = len(sequence.request.prompt) - match.num_tokens
            return Reject(f"debug_forbid_prompt_compute: {missing} prompt tokens are not cached")
        return self._await(sequence, match) or self._run(sequence, match)

    def _has_slot(self, sequence: Sequence) -> bool:
        taken = sum(1 + s.unforked for s in self._holders())
        return taken + 1 + sequence.unforked <= self._config.max_num_seqs

    def _holders(self) -> Iterator[Sequence]:
        yield from self._scheduler.running
        yield from self._scheduler.loading.values()

    def _match(self, sequence: Sequence) -> Match:
        if not (self._config.enable_prefix_caching and sequence.request.reads_cache):
            return Match(0, self._blocks.empty())
        return self._blocks.match(self._chains(sequence), len(sequence.tokens))

    def _chains(self, sequence: Sequence) -> list[list[bytes]]:
        return [sequence.chain(group.block_size) for group in self._blocks.groups]

    def _is_forbidden(self, sequence: Sequence, match: Match) -> bool:
        last = len(sequence.request.prompt) - 1
        return self._config.debug_forbid_prompt_compute and match.num_tokens < last

    def _await(self, sequence: Sequence, match: Match) -> Await | None:
        """Whether the first token after a prefix needs an item that is not here."""
        start = min(match.num_tokens, len(sequence.tokens) - 1)
        lacks = self._items is not None and self._items.ready_until(sequence, start) <= start
        return Await(start) if lacks else None

    def _run(self, sequence: Sequence, match: Match) -> Run | Await | None:
        total = len(sequence.tokens)
        beside = self._claims()
        copy_at = total - 1 if match.num_tokens == total else None
        need = self._blocks.need(match.tables, total, copy_at=copy_at)
        if self._blocks.fits(need, beside=beside, hits=match.tables):
            return Run(match)
        if copy_at is None:
            return None
        # The private copy of the last block has no room: compute that block instead.
        match = self._blocks.shorten(self._chains(sequence), match)
        need = self._blocks.need(match.tables, total)
        fits = self._blocks.fits(need, beside=beside, hits=match.tables)
        if not fits or self._is_forbidden(sequence, match):
            return None
        return self._await(sequence, match) or Run(match)

    def _can_load(self, sequence: Sequence, match: Match) -> bool:
        need = self._blocks.need(match.tables, len(sequence.tokens))
        fits = self._blocks.fits(need, beside=self._claims(), hits=match.tables)
        return fits and all(self._under_cap(g, wanted) for g, wanted in enumerate(need))

    def _under_cap(self, g: int, wanted: int) -> bool:
        """Hand-overs that have not come in may not reserve everything, unless one is alone."""
        reserved = self._blocks.num_incoming(g)
        cap = self._config.max_loading_share * self._blocks.pools[g].usable
        return reserved == 0 or reserved + wanted <= cap

    def _claims(self) -> Need:
        """Blocks that running and loading sequences may want at their next step."""
        claims = [self._claim(sequence) for sequence in self._holders()]
        return tuple(sum(claim[g] for claim in claims) for g in range(len(self._blocks.groups)))

    def _claim(self, sequence: Sequence) -> Need:
        if sequence.is_ending:
            return (0,) * len(sequence.tables)
        forks = sequence.unforked
        whole = bool(forks) or sequence.state is State.LOADING
        scheduled = len(sequence.tokens) if whole else sequence.num_scheduled
        copy_at = scheduled if sequence.shares_tail else None
        need = self._blocks.need(sequence.tables, scheduled + 1, copy_at=copy_at)
        return tuple(wanted + forks for wanted in need)
