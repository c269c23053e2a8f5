"""The pools of all KV groups as one: matching, block tables, and what they still need.

A *table set* is one block table per group: ``tables[g][i]`` is the physical block of logical block
i of group g, or the null block where the group does not need it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.engine.block_pool import NULL_BLOCK, BlockPool
from kvbaton.engine.request import Sequence as RequestSequence
from kvbaton.engine.request import Tables
from kvbaton.errors import ConfigError
from kvbaton.types import BlockSpan, Spans

Need = tuple[int, ...]
"""Blocks wanted, per group."""


@dataclass(frozen=True)
class GroupSpec:
    """What the scheduler knows of a KV group.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks of its pool, the null block included.
        kind: FULL or WINDOW.
        window: tokens that a token attends to, itself included; 0 for FULL.
    """

    block_size: int
    num_blocks: int
    kind: GroupKind = GroupKind.FULL
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind is GroupKind.STATE:
            raise ConfigError("--model", "state-space groups are unsupported")
        if self.kind is GroupKind.WINDOW and self.window < 1:
            raise ConfigError("--model", f"a window group needs a window, not {self.window}")
        if self.num_blocks < 2:
            raise ConfigError("--num-blocks", f"{self.num_blocks} is too few; at least 2")

    @classmethod
    def of(cls, layout: KVLayout) -> GroupSpec:
        """The group that a layout describes."""
        return cls(layout.block_size, layout.num_blocks, layout.kind, layout.window)

    def blocks_for(self, num_tokens: int) -> int:
        """Logical blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def first_needed(self, position: int) -> int:
        """First logical block that a token at `position` attends to."""
        if self.kind is GroupKind.FULL:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def first_whole(self, position: int) -> int:
        """First logical block of which a token at `position` attends to each token."""
        if self.kind is GroupKind.FULL:
            return 0
        return -(-max(0, position - self.window + 1) // self.block_size)


@dataclass(frozen=True)
class Match:
    """A cached prefix.

    Attributes:
        num_tokens: its length.
        tables: its blocks; not referenced yet.
    """

    num_tokens: int
    tables: Tables


class KVCacheManager:
    """All block pools of an engine.

    Attributes:
        groups: one spec per group.
        caching: whether full blocks are kept for reuse.
        pools: one pool per group.
        alignment: tokens; a prefix that ends at a multiple ends no group inside a block.
    """

    def __init__(self, groups: Sequence[GroupSpec], *, enable_caching: bool = True) -> None:
        self.groups = tuple(groups)
        self.caching = enable_caching
        self.pools = [BlockPool(group.num_blocks) for group in groups]
        self.alignment = math.lcm(*(group.block_size for group in groups))

    # --- room ---

    def need(self, tables: Tables, num_tokens: int, *, copy_at: int | None = None) -> Need:
        """Blocks that `tables` lack for `num_tokens` tokens.

        Args:
            tables: a table set.
            num_tokens: how long the sequence shall be.
            copy_at: position that is about to be written; if its block is there, it is shared and
                a private copy is needed too.
        """
        need = []
        for group, table in zip(self.groups, tables, strict=True):
            lacking = max(0, -(-num_tokens // group.block_size) - len(table))
            shared = copy_at is not None and copy_at // group.block_size < len(table)
            need.append(lacking + shared)
        return tuple(need)

    def covers(self, tables: Tables, num_tokens: int) -> bool:
        """Whether `tables` have a block for each of `num_tokens` tokens."""
        for group, table in zip(self.groups, tables, strict=True):
            if len(table) * group.block_size < num_tokens:
                return False
        return True

    def fits(self, need: Need, *, beside: Need | None = None, hits: Tables | None = None) -> bool:
        """Whether `need` can be allocated now and leaves `beside`, without evicting `hits`."""
        for g, (wanted, pool) in enumerate(zip(need, self.pools, strict=True)):
            taken = wanted + (beside[g] if beside else 0)
            if taken + (pool.evictable(hits[g]) if hits else 0) > pool.num_free:
                return False
        return True

    def fits_soon(self, need: Need) -> bool:
        """Whether `need` could be allocated once the steps in flight are over."""
        return all(
            wanted <= pool.num_free + pool.num_fenced
            for wanted, pool in zip(need, self.pools, strict=True)
        )

    def too_large(self, num_tokens: int) -> str | None:
        """Why so many tokens can never fit, or None if they can."""
        for group in self.groups:
            wanted, usable = -(-num_tokens // group.block_size), group.num_blocks - 1
            if wanted > usable:
                return (
                    f"{num_tokens} tokens need {wanted} KV blocks of {group.block_size} tokens, "
                    f"but the pool has {usable}"
                )
        return None

    # --- matching ---

    def match(self, chains: Sequence[Sequence[bytes]], num_tokens: int) -> Match:
        """The longest cached prefix that is usable in all groups.

        A prefix of p tokens is usable if the token computed next (p, or the last one if all are
        cached) finds every block that it attends to.

        Args:
            chains: per group, the keys of the sequence's full blocks.
            num_tokens: length of the sequence.
        """
        hits, length = [], sys.maxsize if self.groups else 0
        for group, pool, chain in zip(self.groups, self.pools, chains, strict=True):
            if group.kind is GroupKind.FULL:
                hit = pool.match(chain)
            else:
                hit = [pool.by_key.get(key, NULL_BLOCK) for key in chain]
            hits.append(hit)
            length = min(length, len(hit) * group.block_size)
        length -= length % self.alignment
        while True:
            tables, usable = [], True
            position = min(length, num_tokens - 1)
            for group, hit in zip(self.groups, hits, strict=True):
                end = length // group.block_size
                first = min(group.first_needed(position), end)
                tables.append([NULL_BLOCK] * first + hit[first:end])
                usable = usable and NULL_BLOCK not in hit[first:end]
            if usable:
                return Match(length, tables)
            length -= self.alignment

    def match_sequence(self, sequence: RequestSequence) -> Match:
        """`match` of a sequence's own keys."""
        return self.match(self.chains(sequence), len(sequence.tokens))

    def chains(self, sequence: RequestSequence) -> list[list[bytes]]:
        """Per group, the keys of a sequence's full blocks."""
        return [sequence.chain(group.block_size) for group in self.groups]

    def shorten(self, chains: Sequence[Sequence[bytes]], match: Match) -> Match:
        """The next shorter usable prefix: for when a private copy of the last block has no room."""
        end = match.num_tokens - self.alignment
        cut = [chain[: end // g.block_size] for chain, g in zip(chains, self.groups, strict=True)]
        return self.match(cut, match.num_tokens)

    # --- tables ---

    def empty(self) -> Tables:
        """A table set without blocks."""
        return [[] for _ in self.groups]

    def extend(self, tables: Tables, num_tokens: int) -> None:
        """Allocate what `tables` lack for `num_tokens` tokens; it must fit."""
        for group, pool, table in zip(self.groups, self.pools, tables, strict=True):
            lacking = -(-num_tokens // group.block_size) - len(table)
            if lacking > 0:
                table += pool.allocate(lacking)

    def reserve(self, tables: Tables, num_tokens: int) -> Spans:
        """As `extend`, and mark the new blocks as incoming; returns them."""
        first = [len(table) for table in tables]
        self.extend(tables, num_tokens)
        spans = tuple(
            (BlockSpan(start, tuple(table[start:])),) if start < len(table) else ()
            for start, table in zip(first, tables, strict=True)
        )
        self.hold_incoming(spans)
        return spans

    def skip_unneeded(self, tables: Tables, position: int) -> None:
        """Pad tables with the null block where the token at `position` will not attend to."""
        for group, table in zip(self.groups, tables, strict=True):
            table += [NULL_BLOCK] * (group.first_needed(position) - len(table))

    def ref(self, tables: Tables) -> None:
        """Refer to all blocks of a table set once more."""
        for pool, table in zip(self.pools, tables, strict=True):
            pool.ref(table)

    def deref(self, tables: Tables) -> None:
        """Give a table set's references back."""
        for pool, table in zip(self.pools, tables, strict=True):
            pool.deref(table)

    def clear(self, sequence: RequestSequence) -> None:
        """Take all its blocks from a sequence, and with them what was computed."""
        self.deref(sequence.tables)
        sequence.tables = self.empty()
        sequence.num_computed = sequence.num_scheduled = 0
        sequence.committed = [0] * len(self.groups)
        sequence.shares_tail = False

    def commit(self, sequence: RequestSequence) -> list[tuple[int, int, int]]:
        """Offer the blocks of a sequence that have become full and final to the prefix cache.

        Returns:
            what is new, as group and logical blocks [first, end).
        """
        offered: list[tuple[int, int, int]] = []
        if not self.caching:
            return offered
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            first, end = sequence.committed[g], sequence.num_computed // group.block_size
            if end > first:
                chain, table = sequence.chain(group.block_size), sequence.tables[g]
                for i in range(first, end):
                    pool.commit(table[i], chain[i])
                sequence.committed[g] = end
                offered.append((g, first, end))
        return offered

    # --- holds ---

    def hold_incoming(self, spans: Spans) -> None:
        """A remote writer may write these blocks."""
        for pool, blocks in self._by_pool(spans):
            pool.hold_incoming(blocks)

    def release_incoming(self, spans: Spans) -> None:
        """No write can land in these blocks any more."""
        for pool, blocks in self._by_pool(spans):
            pool.release_incoming(blocks)

    def hold_outgoing(self, spans: Spans) -> None:
        """A transfer may read these blocks."""
        for pool, blocks in self._by_pool(spans):
            pool.hold_outgoing(blocks)

    def release_outgoing(self, spans: Spans) -> None:
        """The transfer reads these blocks no more."""
        for pool, blocks in self._by_pool(spans):
            pool.release_outgoing(blocks)

    def spans(self, tables: Tables, start: int, end: int) -> Spans:
        """Blocks of `tables` that hold tokens [start, end), without those that are not kept."""
        found = []
        for group, table in zip(self.groups, tables, strict=True):
            first, past = start // group.block_size, group.blocks_for(end)
            while first < past and table[first] == NULL_BLOCK:
                first += 1
            found.append((BlockSpan(first, tuple(table[first:past])),) if first < past else ())
        return tuple(found)

    def evict(self, spans: Spans, bad: Sequence[tuple[int, int]]) -> None:
        """Take blocks that hold tokens of the ranges `bad` out of the prefix cache."""
        for group, pool, group_spans in zip(self.groups, self.pools, spans, strict=True):
            for span in group_spans:
                for i, block in enumerate(span.blocks, start=span.first):
                    start, end = i * group.block_size, (i + 1) * group.block_size
                    if any(low < end and start < high for low, high in bad):
                        pool.evict([block])

    def _by_pool(self, spans: Spans) -> Iterable[tuple[BlockPool, list[int]]]:
        for pool, group_spans in zip(self.pools, spans, strict=True):
            yield pool, [block for span in group_spans for block in span.blocks]

    # --- steps, cache, accounts ---

    def launch(self, number: int) -> None:
        """A step was planned."""
        for pool in self.pools:
            pool.launch(number)

    def settle(self, number: int) -> None:
        """A step is over."""
        for pool in self.pools:
            pool.settle(number)

    def reset_cache(self) -> int:
        """Empty the prefix caches; returns how many blocks left them."""
        return sum(pool.reset_cache() for pool in self.pools)

    def num_incoming(self, g: int) -> int:
        """Blocks of group `g` that a remote writer may write."""
        return int(np.count_nonzero(np.frombuffer(self.pools[g].incoming, np.int64)))

    def owners(self, g: int) -> Counter[str]:
        """Blocks of group `g` by owner; the sum is all blocks. The first that applies counts."""
        pool = self.pools[g]
        refs, incoming, outgoing = (
            np.frombuffer(counts, np.int64) > 0
            for counts in (pool.refs, pool.incoming, pool.outgoing)
        )
        counts: Counter[str] = Counter({name: len(part) for name, part in pool.lists().items()})
        counts["null"] = 1
        counts["request"] = int(np.count_nonzero(refs))
        counts["incoming"] = int(np.count_nonzero(incoming & ~refs))
        counts["outgoing"] = int(np.count_nonzero(outgoing & ~incoming & ~refs))
        return counts
