"""The block tables of all KV groups over one pool: matching, and what sequences still need.

A *table set* is one block table per group: ``tables[g][i]`` is the physical block of logical block
i of group g, or the null block where the group does not need it.

A group with a sliding window holds the blocks that the next token, and what a step computes with
it, attend to: others are not allocated, not loaded, and given back while a sequence runs (`trim`).
vLLM's hybrid KV cache manager does the same. So does one whose tokens attend to their own chunk
alone: where a chunk ends, all of its blocks are given back.

In a group of states, block i holds the state after its last token that is computed: it is written
over until the block is full, and is then a snapshot of the prefix that ends there. The next token
needs the block of the token before it, as with a window of two. A step is given two blocks at most,
one for where it ends, one for a snapshot at the last border of blocks that it passes; prefixes are
reused from snapshots only. That is what vLLM's ``align`` mode keeps, but steps need not end at
borders for it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.engine.block_pool import NULL_BLOCK, BlockPool
from kvbaton.engine.request import Sequence as RequestSequence
from kvbaton.engine.request import Tables
from kvbaton.types import BlockSpan, Spans


@dataclass(frozen=True)
class GroupSpec:
    """What the scheduler knows of a KV group.

    Attributes:
        block_size: tokens per block; of states, from snapshot to snapshot.
        num_blocks: blocks of the pool that all groups share, the null block included.
        kind: what a block means.
        window: tokens that a token attends to, itself included, or of a chunk; 0 unless `kind` is
            WINDOW or CHUNK.
    """

    block_size: int
    num_blocks: int
    kind: GroupKind = GroupKind.FULL
    window: int = 0

    @classmethod
    def of(cls, layout: KVLayout, block_size: int) -> GroupSpec:
        """The group that a layout describes, with tables of blocks of so many tokens."""
        return cls(block_size, layout.num_blocks, layout.kind, layout.window)

    @property
    def span_tokens(self) -> int:
        """Tokens of a logical block in `Spans`: there, a state is named by its last token."""
        return 1 if self.kind is GroupKind.STATE else self.block_size

    def span_number(self, block: int) -> int:
        """Number in spans of a full block of a table."""
        return ((block + 1) * self.block_size - 1) // self.span_tokens

    @property
    def keeps_all(self) -> bool:
        """Whether a token needs the blocks of all before it."""
        return self.kind is GroupKind.FULL

    def blocks_for(self, num_tokens: int) -> int:
        """Logical blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def first_needed(self, position: int) -> int:
        """First logical block that a token at `position` attends to."""
        return self.kind.first_attended(position, self.window) // self.block_size

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds while a step computes some of them.

        Args:
            num_tokens: in all.
            step_tokens: most tokens of one step.
        """
        blocks = self.blocks_for(num_tokens)
        if self.kind is GroupKind.FULL:
            return blocks
        if self.kind is GroupKind.STATE:
            return min(blocks, 3)  # where the step before has ended, a snapshot, where it ends
        seen = self.window - 1 + min(step_tokens, num_tokens)
        return min(blocks, -(-(seen - 1) // self.block_size) + 1)

    def first_whole(self, position: int) -> int:
        """First logical block of which a token at `position` attends to each token."""
        if self.kind is GroupKind.STATE:
            return self.first_needed(position)
        return -(-self.kind.first_attended(position, self.window) // self.block_size)


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
    """All blocks of an engine.

    Args:
        groups: one spec per group.
        enable_caching: keep full blocks for reuse.
        step_tokens: most tokens that a step computes.

    Attributes:
        groups: one spec per group.
        caching: whether full blocks are kept for reuse.
        pool: the blocks of all groups.
        alignment: tokens; a prefix that ends at a multiple ends no group inside a block.
        has_states: whether a group's blocks are states.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        enable_caching: bool = True,
        step_tokens: int = sys.maxsize,
    ) -> None:
        (num_blocks,) = {group.num_blocks for group in groups}
        self.groups = tuple(groups)
        self.caching = enable_caching
        self.pool = BlockPool(num_blocks, len(groups))
        self.alignment = math.lcm(*(group.block_size for group in groups))
        self._step_tokens = step_tokens
        self._fitting = 0  # so many tokens, and fewer, are known to fit
        self._windows = tuple((g, group) for g, group in enumerate(groups) if not group.keeps_all)
        self.has_states = any(group.kind is GroupKind.STATE for group in groups)

    # --- room ---

    def need(
        self, tables: Tables, num_tokens: int, *, start: int = 0, copy_at: int | None = None
    ) -> int:
        """Blocks that `tables` lack to compute tokens [start, num_tokens), in as many steps.

        Args:
            tables: a table set.
            num_tokens: how long the sequence shall be.
            start: the next token.
            copy_at: position that is about to be written; if its block is there, it is shared and
                a private copy is needed too.
        """
        need = 0
        for group, table in zip(self.groups, tables, strict=True):
            behind = 0 if group.kind is GroupKind.FULL else group.first_needed(start)
            lacking = max(0, group.blocks_for(num_tokens) - max(len(table), behind))
            if group.kind is not GroupKind.FULL:
                most = group.most_blocks(num_tokens, self._step_tokens)
                lacking = min(lacking, max(0, most - max(0, len(table) - behind)))
            need += lacking
            if copy_at is not None and group.kind is not GroupKind.STATE:  # a fork has its states
                need += copy_at // group.block_size < len(table)
        return need

    def covers(self, tables: Tables, num_tokens: int) -> bool:
        """Whether `tables` reach as far as `num_tokens` tokens."""
        for group, table in zip(self.groups, tables, strict=True):
            if len(table) * group.block_size < num_tokens:
                return False
        return True

    def fits(self, need: int, *, beside: int = 0, hits: Tables | None = None) -> bool:
        """Whether `need` can be allocated now and leaves `beside`, without evicting `hits`."""
        evictable = sum(map(self.pool.evictable, hits)) if hits else 0
        return need + beside + evictable <= self.pool.num_free

    def fits_soon(self, need: int) -> bool:
        """Whether `need` could be allocated once the steps in flight are over."""
        return need <= self.pool.num_free + self.pool.num_fenced

    def too_large(self, num_tokens: int) -> str | None:
        """Why so many tokens can never fit, or None if they can."""
        if num_tokens <= self._fitting:
            return None
        most = [group.most_blocks(num_tokens, self._step_tokens) for group in self.groups]
        wanted, usable = sum(most), self.pool.usable
        if wanted <= usable:
            self._fitting = num_tokens
            return None
        sizes = " and ".join(str(size) for size in sorted({g.block_size for g in self.groups}))
        return (
            f"{num_tokens} tokens need {wanted} KV blocks of {sizes} tokens, "
            f"but the pool has {usable}"
        )

    # --- matching ---

    def match(self, chains: Sequence[Sequence[bytes]], num_tokens: int) -> Match:
        """The longest cached prefix that is usable in all groups.

        A prefix of p tokens is usable if the token computed next (p, or the last one if all are
        cached) finds every block that it attends to. With states all are never: the last token
        can't be taken out of a state.

        Args:
            chains: per group, the keys of the sequence's full blocks.
            num_tokens: length of the sequence.
        """
        hits = list[list[int]]()
        for g, (group, chain) in enumerate(zip(self.groups, chains, strict=True)):
            if group.kind is GroupKind.FULL:
                hits.append(self.pool.match(chain, g))
            else:
                by_key = self.pool.by_key[g]
                hits.append([by_key.get(key, NULL_BLOCK) for key in chain])
        tables, length = Tables(), self.usable(hits, num_tokens)
        for group, hit in zip(self.groups, hits, strict=True):
            end = length // group.block_size
            first = 0
            if group.kind is not GroupKind.FULL:
                first = min(group.first_needed(min(length, num_tokens - 1)), end)
            tables.append([NULL_BLOCK] * first + hit[first:end])
        return Match(length, tables)

    def usable(self, hits: Sequence[Sequence[int]], num_tokens: int) -> int:
        """Tokens of the longest prefix that is usable in all groups.

        Args:
            hits: per group, for each logical block 0 if it is not there. Of full groups all are.
            num_tokens: length of the sequence.
        """
        groups = zip(hits, self.groups, strict=True)
        length = min(len(hit) * group.block_size for hit, group in groups)
        if self.has_states:
            length = min(length, num_tokens - 1)
        length -= length % self.alignment
        holes = []
        for g, group in self._windows:
            # Per number of blocks n, the last null block among the first n; -1 if there is none.
            found = [-1]
            for i, block in enumerate(hits[g]):
                found.append(i if block == NULL_BLOCK else found[-1])
            holes.append((group, found))
        while True:
            position = min(length, num_tokens - 1)
            hole, size = -1, 1
            for group, last_hole in holes:
                hole, size = last_hole[length // group.block_size], group.block_size
                if group.first_needed(position) <= hole:
                    break
            else:
                return length
            # No prefix with this hole in it is usable: shorter ones look back as far or farther.
            length = hole * size // self.alignment * self.alignment

    def match_sequence(self, sequence: RequestSequence) -> Match:
        """`match` of a sequence's own keys."""
        chains = [sequence.chain(group.block_size) for group in self.groups]
        return self.match(chains, len(sequence.tokens))

    def shorten(self, sequence: RequestSequence, match: Match) -> Match:
        """The next shorter usable prefix: for when a private copy of the last block has no room."""
        end = match.num_tokens - self.alignment
        chains = [sequence.chain(g.block_size)[: end // g.block_size] for g in self.groups]
        return self.match(chains, match.num_tokens)

    # --- tables ---

    def empty(self) -> Tables:
        """A table set without blocks."""
        return [[] for _ in self.groups]

    def extend(
        self, tables: Tables, num_tokens: int, *, start: int = 0, end: int | None = None
    ) -> None:
        """Allocate what `tables` lack for `num_tokens` tokens; it must fit.

        Args:
            tables: a table set.
            num_tokens: how long the sequence shall be.
            start: the next token to be computed.
            end: where the step with that token ends: groups that don't keep all blocks get theirs
                up to there.
        """
        self.skip_unneeded(tables, start)
        for g, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            past = num_tokens if end is None or group.kind is GroupKind.FULL else end
            lacking = group.blocks_for(past) - len(table)
            if lacking > 0 and group.kind is GroupKind.STATE:
                border = past // group.block_size - 1  # the last block that will be full
                table += [NULL_BLOCK] * lacking
                for i in {border, len(table) - 1} if self.caching else {len(table) - 1}:
                    if i >= len(table) - lacking:
                        (table[i],) = self.pool.allocate(1, g)
            elif lacking > 0:
                table += self.pool.allocate(lacking, g)

    def reserve(self, tables: Tables, num_tokens: int) -> Spans:
        """As `extend`, and mark the new blocks as incoming; returns them."""
        first = [len(table) for table in tables]
        self.extend(tables, num_tokens)
        starts = [at * group.block_size for at, group in zip(first, self.groups, strict=True)]
        spans = tuple(
            () if start >= num_tokens else self._spans(group, table, start, num_tokens)
            for group, table, start in zip(self.groups, tables, starts, strict=True)
        )
        self.hold_incoming(spans)
        return spans

    def trim(self, sequence: RequestSequence, position: int) -> None:
        """Give back blocks behind the windows of the tokens from `position` on.

        After a step, with its end as the position, no step in flight reads them; and they were
        offered to the prefix cache, since all of their tokens are computed.
        """
        for g, group in self._windows:
            first, behind = sequence.trimmed[g], group.first_needed(position)
            if first < behind:
                table = sequence.tables[g]
                self.pool.deref(table[first:behind])
                table[first:behind] = [NULL_BLOCK] * (behind - first)
                sequence.trimmed[g] = behind

    def skip_unneeded(self, tables: Tables, position: int) -> None:
        """Pad tables with the null block where the token at `position` will not attend to."""
        for g, group in self._windows:
            tables[g] += [NULL_BLOCK] * (group.first_needed(position) - len(tables[g]))

    def ref(self, tables: Tables) -> None:
        """Refer to all blocks of a table set once more."""
        for table in tables:
            self.pool.ref(table)

    def deref(self, tables: Tables) -> None:
        """Give a table set's references back."""
        for table in tables:
            self.pool.deref(table)

    def clear(self, sequence: RequestSequence) -> None:
        """Take all its blocks from a sequence, and with them what was computed."""
        self.deref(sequence.tables)
        sequence.tables = self.empty()
        sequence.num_computed = sequence.num_scheduled = 0
        sequence.committed = [0] * len(self.groups)
        sequence.trimmed = [0] * len(self.groups)
        sequence.shares_tail = False

    def commit(self, sequence: RequestSequence) -> list[tuple[int, int, int]]:
        """Offer the blocks of a sequence that have become full and final to the prefix cache.

        Returns:
            what is new, as group and logical blocks [first, end).
        """
        offered: list[tuple[int, int, int]] = []
        if not self.caching:
            return offered
        for g, group in enumerate(self.groups):
            first, end = sequence.committed[g], sequence.num_computed // group.block_size
            if end > first:
                if group.kind is GroupKind.STATE:  # of the others, a later one was written over
                    first = end - 1
                chain, table = sequence.chain(group.block_size), sequence.tables[g]
                for i in range(first, end):
                    self.pool.commit(table[i], chain[i])
                sequence.committed[g] = end
                offered.append((g, first, end))
        return offered

    # --- holds ---

    def hold_incoming(self, spans: Spans) -> None:
        """A remote writer may write these blocks."""
        self.pool.hold_incoming(blocks_of(spans))

    def release_incoming(self, spans: Spans) -> None:
        """No write can land in these blocks any more."""
        self.pool.release_incoming(blocks_of(spans))

    def hold_outgoing(self, spans: Spans) -> None:
        """A transfer may read these blocks."""
        self.pool.hold_outgoing(blocks_of(spans))

    def release_outgoing(self, spans: Spans) -> None:
        """The transfer reads these blocks no more."""
        self.pool.release_outgoing(blocks_of(spans))

    def spans(self, tables: Tables, start: int, end: int) -> Spans:
        """Blocks of `tables` that hold tokens [start, end), without those that are not kept.

        Of states it is the one after token ``end - 1``, which must be the last one computed.
        """
        groups = zip(self.groups, tables, strict=True)
        return tuple(self._spans(group, table, start, end) for group, table in groups)

    def _spans(
        self, group: GroupSpec, table: Sequence[int], start: int, end: int
    ) -> tuple[BlockSpan, ...]:
        past = group.blocks_for(end)
        first = past - 1 if group.kind is GroupKind.STATE else start // group.block_size
        while first < past and table[first] == NULL_BLOCK:
            first += 1
        if first >= past:
            return ()
        at = end - 1 if group.kind is GroupKind.STATE else first
        return (BlockSpan(at, tuple(table[first:past])),)

    def evict(self, spans: Spans, bad: Sequence[tuple[int, int]]) -> None:
        """Take blocks that hold tokens of the ranges `bad` out of the prefix cache."""
        for group, group_spans in zip(self.groups, spans, strict=True):
            for span in group_spans:
                for i, block in enumerate(span.blocks, start=span.first):
                    start, end = i * group.span_tokens, (i + 1) * group.span_tokens
                    if any(low < end and start < high for low, high in bad):
                        self.pool.evict([block])

    # --- steps, cache, accounts ---

    def num_incoming(self) -> int:
        """Blocks that a remote writer may write."""
        return int(np.count_nonzero(np.frombuffer(self.pool.incoming, np.int64)))

    def owners(self) -> list[Counter[str]]:
        """Per group its blocks by owner, the first that applies; of no group are those of nobody.

        It is made while steps wait, and a pool may have 200,000 blocks: no loop over them is
        Python's.
        """
        pool, words = self.pool, np.frombuffer
        marks = {
            "request": words(pool.refs, np.int64) > 0,
            "incoming": words(pool.incoming, np.int64) > 0,
            "outgoing": words(pool.outgoing, np.int64) > 0,
            "fenced": words(pool.fences, np.int64) > pool.updated,
            "cached": words(pool.keyed, np.bool_),
        }
        kinds = np.select(list(marks.values()), range(len(marks)), default=-1)
        kinds[NULL_BLOCK] = -1
        owned = kinds >= 0
        places = words(pool.group, np.int64)[owned] * len(marks) + kinds[owned]
        counts = np.bincount(places, minlength=len(self.groups) * len(marks))
        rows = counts.reshape(len(self.groups), -1).tolist()
        return [Counter(dict(zip(marks, row, strict=True))) for row in rows]


def blocks_of(spans: Spans) -> list[int]:
    """All blocks that spans name."""
    return [block for group_spans in spans for span in group_spans for block in span.blocks]
