"""The block tables of all KV groups over one pool: prefix matching, allocation and trimming.

A *table set* is one block table per group: ``tables[g][i]`` is the physical block of logical block
i of group g, or the null block where the group does not need it.

A group with a sliding window holds only the blocks that the next token, and the tokens of the step
that computes it, attend to. Other blocks are not allocated, not loaded, and given back while a
sequence runs (`trim`), as in vLLM's hybrid KV cache manager. A group with chunked attention, whose
tokens attend to their own chunk only, gives all blocks of a chunk back where it ends.

In a group of states, block i holds the state after the last computed token in its range. The state
is overwritten until the block is full, and is then a snapshot of the prefix that ends there. The
next token needs the block of the token before it, as with a window of two. A step is given at most
two blocks: one for the state at its end, one for a snapshot at the last block boundary that it
passes. Prefixes are reused from snapshots only. vLLM's ``align`` mode keeps the same, but makes
steps end at block boundaries.
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
        block_size: Tokens per block; for states, tokens from one snapshot to the next.
        num_blocks: Blocks of the pool that all groups share, null block included.
        kind: Kind of attention or state.
        window: Tokens that a token attends to, itself included, or tokens of an attention chunk; 0
            unless `kind` is WINDOW or CHUNK.
    """

    block_size: int
    num_blocks: int
    kind: GroupKind = GroupKind.FULL
    window: int = 0

    @classmethod
    def of(cls, layout: KVLayout, block_size: int) -> GroupSpec:
        """The spec of a layout, for tables with `block_size` tokens per block."""
        return cls(block_size, layout.num_blocks, layout.kind, layout.window)

    @property
    def span_tokens(self) -> int:
        """Tokens per logical block in `Spans`, where a state is numbered by its last token."""
        return 1 if self.kind is GroupKind.STATE else self.block_size

    def span_number(self, block: int) -> int:
        """Number in `Spans` of a full block of a table."""
        return ((block + 1) * self.block_size - 1) // self.span_tokens

    @property
    def keeps_all(self) -> bool:
        """Whether a token attends to all tokens before it."""
        return self.kind is GroupKind.FULL

    def blocks_for(self, num_tokens: int) -> int:
        """Number of logical blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def first_needed(self, position: int) -> int:
        """First logical block that a token at `position` attends to."""
        return self.kind.first_attended(position, self.window) // self.block_size

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Maximum number of blocks that a sequence holds while a step computes some of it.

        Args:
            num_tokens: Length of the sequence.
            step_tokens: Maximum number of tokens in one step.
        """
        blocks = self.blocks_for(num_tokens)
        if self.kind is GroupKind.FULL:
            return blocks
        if self.kind is GroupKind.STATE:
            return min(blocks, 3)  # end of the previous step, a snapshot, end of this step
        seen = self.window - 1 + min(step_tokens, num_tokens)
        return min(blocks, -(-(seen - 1) // self.block_size) + 1)

    def first_whole(self, position: int) -> int:
        """First logical block all of whose tokens a token at `position` attends to."""
        if self.kind is GroupKind.STATE:
            return self.first_needed(position)
        return -(-self.kind.first_attended(position, self.window) // self.block_size)


@dataclass(frozen=True)
class Match:
    """A cached prefix.

    Attributes:
        num_tokens: Length.
        tables: Its blocks, not referenced yet.
    """

    num_tokens: int
    tables: Tables


class KVCacheManager:
    """The blocks of an engine: one pool, and the rules by which KV groups use it.

    Args:
        groups: One spec per group.
        enable_caching: Whether full blocks are kept for reuse.
        step_tokens: Maximum number of tokens in one step.

    Attributes:
        groups: One spec per group.
        caching: Whether full blocks are kept for reuse.
        pool: Blocks of all groups.
        alignment: Tokens; prefixes of a multiple of it end at block boundaries in all groups.
        has_states: Whether any group is one of states.
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
        self._fitting = 0  # sequences of up to so many tokens are known to fit
        self._windows = tuple((g, group) for g, group in enumerate(groups) if not group.keeps_all)
        self.has_states = any(group.kind is GroupKind.STATE for group in groups)

    # --- room ---

    def need(
        self, tables: Tables, num_tokens: int, *, start: int = 0, copy_at: int | None = None
    ) -> int:
        """Number of blocks that `tables` lack to compute tokens [start, num_tokens) in steps.

        Args:
            tables: A table set.
            num_tokens: Length of the sequence afterwards.
            start: Position of the next token.
            copy_at: Position about to be written; if its block exists, that block is shared and
                needs a private copy, which is counted too.
        """
        need = 0
        for group, table in zip(self.groups, tables, strict=True):
            behind = 0 if group.kind is GroupKind.FULL else group.first_needed(start)
            lacking = max(0, group.blocks_for(num_tokens) - max(len(table), behind))
            if group.kind is not GroupKind.FULL:
                most = group.most_blocks(num_tokens, self._step_tokens)
                lacking = min(lacking, max(0, most - max(0, len(table) - behind)))
            need += lacking
            if copy_at is not None and group.kind is not GroupKind.STATE:  # forks own their states
                need += copy_at // group.block_size < len(table)
        return need

    def owns(self, tables: Tables, position: int) -> bool:
        """Whether the existing blocks of a position belong to these `tables` alone.

        Then it may be written without a private copy.
        """
        pool, mine = self.pool, True
        for group, table in zip(self.groups, tables, strict=True):
            for block in table[position // group.block_size :][:1]:
                others = pool.refs[block] > 1 or pool.outgoing[block] or pool.keyed[block]
                mine = mine and (group.kind is GroupKind.STATE or not others)
        return mine

    def covers(self, tables: Tables, num_tokens: int) -> bool:
        """Whether `tables` have blocks for `num_tokens` tokens."""
        for group, table in zip(self.groups, tables, strict=True):
            if len(table) * group.block_size < num_tokens:
                return False
        return True

    def fits(self, need: int, *, beside: int = 0, hits: Tables | None = None) -> bool:
        """Whether `need` blocks can be allocated without evicting `hits`, and leave `beside`."""
        evictable = sum(map(self.pool.evictable, hits)) if hits else 0
        return need + beside + evictable <= self.pool.num_free

    def fits_soon(self, need: int) -> bool:
        """Whether `need` blocks could be allocated once the steps in flight are over."""
        return need <= self.pool.num_free + self.pool.num_fenced

    def too_large(self, num_tokens: int) -> str | None:
        """Why a sequence of `num_tokens` can never fit; None if it can."""
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

        A prefix of p tokens is usable if every block is cached that the next token to compute
        attends to: token p, or the last one if all tokens are cached. With groups of states, the
        whole sequence is never usable, since the last token can't be removed from a state.

        Args:
            chains: Per group, keys of the sequence's full blocks.
            num_tokens: Length of the sequence.
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
        """Length in tokens of the longest prefix that is usable in all groups.

        Args:
            hits: Per group and logical block, 0 if the block is missing. Lists of groups with full
                attention end before the first missing block.
            num_tokens: Length of the sequence.
        """
        groups = zip(hits, self.groups, strict=True)
        length = min(len(hit) * group.block_size for hit, group in groups)
        if self.has_states:
            length = min(length, num_tokens - 1)
        length -= length % self.alignment
        holes = []
        for g, group in self._windows:
            # found[n]: index of the last missing block among the first n; -1 if there is none.
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
            # Shorter prefixes attend at least as far back, so none across this hole is usable.
            length = hole * size // self.alignment * self.alignment

    def match_sequence(self, sequence: RequestSequence) -> Match:
        """`match` with a sequence's own keys."""
        chains = [sequence.chain(group.block_size) for group in self.groups]
        return self.match(chains, len(sequence.tokens))

    def shorten(self, sequence: RequestSequence, match: Match) -> Match:
        """The next shorter usable prefix, for when a private copy of the last block can't fit."""
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
        """Allocate the blocks that `tables` lack for `num_tokens` tokens; they must fit.

        Args:
            tables: A table set.
            num_tokens: Length of the sequence afterwards.
            start: Position of the next token to compute.
            end: End of the step that computes `start`: groups that don't keep all blocks get blocks
                up to there only. None for `num_tokens`.
        """
        self.skip_unneeded(tables, start)
        for g, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            past = num_tokens if end is None or group.kind is GroupKind.FULL else end
            lacking = group.blocks_for(past) - len(table)
            if lacking > 0 and group.kind is GroupKind.STATE:
                border = past // group.block_size - 1  # last block that becomes full
                table += [NULL_BLOCK] * lacking
                for i in {border, len(table) - 1} if self.caching else {len(table) - 1}:
                    if i >= len(table) - lacking:
                        (table[i],) = self.pool.allocate(1, g)
            elif lacking > 0:
                table += self.pool.allocate(lacking, g)

    def reserve(self, tables: Tables, num_tokens: int) -> Spans:
        """Extend tables as `extend` does, and mark the new blocks as incoming; returns them."""
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
        """Give back the blocks that no token from `position` on attends to.

        If `position` is the end of a finished step, no step in flight reads these blocks, and they
        were offered to the prefix cache, since all their tokens are computed.
        """
        for g, group in self._windows:
            first, behind = sequence.trimmed[g], group.first_needed(position)
            if first < behind:
                table = sequence.tables[g]
                self.pool.deref(table[first:behind])
                table[first:behind] = [NULL_BLOCK] * (behind - first)
                sequence.trimmed[g] = behind

    def skip_unneeded(self, tables: Tables, position: int) -> None:
        """Append null blocks for the part that the token at `position` does not attend to."""
        for g, group in self._windows:
            tables[g] += [NULL_BLOCK] * (group.first_needed(position) - len(tables[g]))

    def ref(self, tables: Tables) -> None:
        """Add a reference to all blocks of a table set."""
        for table in tables:
            self.pool.ref(table)

    def deref(self, tables: Tables) -> None:
        """Drop a reference to all blocks of a table set."""
        for table in tables:
            self.pool.deref(table)

    def clear(self, sequence: RequestSequence) -> None:
        """Take all blocks from a sequence, and mark its tokens as not computed."""
        self.deref(sequence.tables)
        sequence.reset(len(self.groups))

    def commit(self, sequence: RequestSequence) -> list[tuple[int, int, int]]:
        """Offer a sequence's blocks that became full and final to the prefix cache.

        Returns:
            The blocks offered, as (group, first, end) of logical blocks [first, end).
        """
        offered: list[tuple[int, int, int]] = []
        if not self.caching:
            return offered
        for g, group in enumerate(self.groups):
            first, end = sequence.committed[g], sequence.num_computed // group.block_size
            if end > first:
                if group.kind is GroupKind.STATE:  # the step has overwritten the earlier states
                    first = end - 1
                chain, table = sequence.chain(group.block_size), sequence.tables[g]
                for i in range(first, end):
                    self.pool.commit(table[i], chain[i])
                sequence.committed[g] = end
                offered.append((g, first, end))
        return offered

    # --- holds ---

    def hold_incoming(self, spans: Spans) -> None:
        """Mark blocks that a remote writer may write."""
        self.pool.hold_incoming(blocks_of(spans))

    def release_incoming(self, spans: Spans) -> None:
        """Unmark blocks in which no write can land any more."""
        self.pool.release_incoming(blocks_of(spans))

    def hold_outgoing(self, spans: Spans) -> None:
        """Mark blocks that a transfer may read."""
        self.pool.hold_outgoing(blocks_of(spans))

    def release_outgoing(self, spans: Spans) -> None:
        """Unmark blocks that the transfer no longer reads."""
        self.pool.release_outgoing(blocks_of(spans))

    def spans(self, tables: Tables, start: int, end: int) -> Spans:
        """Blocks of `tables` that hold tokens [start, end), without null blocks.

        For states, the block of the state after token ``end - 1``, the last one computed.
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
        """Remove blocks with tokens of the ranges `bad` from the prefix cache."""
        for group, group_spans in zip(self.groups, spans, strict=True):
            for span in group_spans:
                for i, block in enumerate(span.blocks, start=span.first):
                    start, end = i * group.span_tokens, (i + 1) * group.span_tokens
                    if any(low < end and start < high for low, high in bad):
                        self.pool.evict([block])

    # --- steps, cache, accounts ---

    def num_incoming(self) -> int:
        """Number of blocks that remote writers may write."""
        return int(np.count_nonzero(np.frombuffer(self.pool.incoming, np.int64)))

    def owners(self) -> list[Counter[str]]:
        """Per group, number of blocks by owner (the first that applies); unowned ones are left out.

        Steps wait for it and a pool may have 200,000 blocks, so it is vectorised with NumPy.
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
    """All physical blocks in spans."""
    return [block for group_spans in spans for span in group_spans for block in span.blocks]
