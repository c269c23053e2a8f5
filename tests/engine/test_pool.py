from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbaton.connectors.layout import GroupKind, contiguous_plane
from kvbaton.connectors.layout import KVLayout as Layout
from kvbaton.engine.block_pool import BlockPool
from kvbaton.engine.kv_cache_manager import GroupSpec, KVCacheManager, Match
from kvbaton.engine.kv_groups import LayerKV, block_bytes, kv_groups
from kvbaton.types import BlockSpan


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def cached(pool: BlockPool, numbers: list[int], group: int = 0) -> list[int]:
    """Leave blocks with these keys in the cache, the first one used last."""
    blocks = pool.allocate(len(numbers), group)
    for block, number in zip(blocks, numbers, strict=True):
        pool.commit(block, key(number))
    pool.deref(blocks)
    return blocks


# --- one pool ---


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    pool.ref([0])
    pool.deref([0])
    assert pool.num_free == 0


def test_blocks_handed_out_together_are_in_order() -> None:
    pool = BlockPool(9)
    first, second = pool.allocate(3), pool.allocate(5)
    pool.deref([second[4], first[1], second[0], first[0], second[2]])
    assert pool.allocate(5) == [1, 2, 4, 6, 8]


def test_uncached_blocks_go_first_then_the_longest_unused_and_a_tail_before_its_head():
    pool = BlockPool(6)
    old = cached(pool, [1, 2])
    new = cached(pool, [3])
    assert set(pool.allocate(2)).isdisjoint(old + new)
    assert [*pool.allocate(1), *pool.allocate(1)] == [old[1], old[0]]
    assert pool.match([key(1)]) == []
    assert pool.match([key(3)]) == new


def test_a_hit_is_used_again_and_leaves_the_order_of_eviction():
    pool = BlockPool(3)
    first, second = cached(pool, [1])[0], cached(pool, [2])[0]
    pool.ref(pool.match([key(1)]))
    pool.deref([first])
    assert pool.allocate(1) == [second]


def test_match_is_a_prefix():
    pool = BlockPool(6)
    one, two = cached(pool, [1, 2])
    assert pool.match([key(1), key(2), key(9)]) == [one, two]
    assert pool.match([key(9), key(1)]) == []


def test_a_key_keeps_its_first_block():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.commit(first, key(1))
    pool.commit(second, key(1))
    assert pool.match([key(1)]) == [first]
    pool.deref([second])
    assert pool.lists()["free"][-1] == second


@pytest.mark.parametrize("hold", ["outgoing", "incoming"])
def test_a_held_block_is_not_free_until_it_is_released(hold: str):
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    getattr(pool, f"hold_{hold}")(blocks)
    pool.deref(blocks)
    assert pool.num_free == 1
    getattr(pool, f"release_{hold}")(blocks)
    assert pool.num_free == 2
    with pytest.raises(AssertionError):
        getattr(pool, f"release_{hold}")(blocks)


def test_a_block_waits_for_the_step_that_may_touch_it():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.launched = 1
    pool.deref(blocks[:1])
    pool.launched = 2
    pool.hold_outgoing(blocks[1:])
    pool.deref(blocks[1:])
    pool.release_outgoing(blocks[1:])
    assert (pool.num_free, pool.num_fenced) == (0, 2)
    pool.settle(1)
    assert (pool.num_free, pool.num_fenced) == (1, 1)
    pool.settle(2)
    assert (pool.num_free, pool.num_fenced) == (2, 0)


def test_a_fenced_hit_can_be_referred_to_again():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.commit(block, key(1))
    pool.launched = 1
    pool.deref([block])
    pool.ref(pool.match([key(1)]))
    pool.settle(1)
    assert pool.num_free == 1
    pool.deref([block])
    assert pool.num_free == 2


def test_evicted_blocks_are_no_hits_and_those_in_use_stay_in_use():
    pool = BlockPool(4)
    used, idle = pool.allocate(1), cached(pool, [2])
    pool.commit(used[0], key(1))
    assert pool.evict(used + idle + [3]) == 2
    assert pool.match([key(1)]) == []
    assert pool.match([key(2)]) == []
    assert pool.num_free == 2
    assert pool.reset_cache() == 0


def test_only_private_uncached_blocks_may_be_written_by_a_peer():
    pool = BlockPool(4)
    shared, kept = pool.allocate(2)
    pool.ref([shared])
    pool.commit(kept, key(1))
    for block in (shared, kept):
        with pytest.raises(AssertionError):
            pool.hold_incoming([block])


class PoolMachine(RuleBasedStateMachine):
    """Any use of a pool, against plain multisets of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.held: list[int] = []
        self.outgoing: list[int] = []
        self.incoming: list[int] = []
        self.touched: dict[int, int] = {}
        self.number = 0
        self.keys = 0

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        blocks = self.pool.allocate(data.draw(st.integers(1, self.pool.num_free)))
        for block in blocks:
            assert block not in {0, *self.held, *self.outgoing, *self.incoming}
            assert self.touched.get(block, 0) <= self.pool.updated
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def deref(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.touched[block] = self.pool.launched
        self.pool.deref([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), again=st.booleans())
    def commit(self, data: st.DataObject, again: bool) -> None:
        block = data.draw(st.sampled_from(self.held))
        if self.pool.keys[block] is None:
            self.keys += not again
            self.pool.commit(block, key(self.keys))

    @precondition(lambda self: self.pool.by_key[0])
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        blocks = self.pool.match([data.draw(st.sampled_from(sorted(self.pool.by_key[0])))])
        self.pool.ref(blocks)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block not in self.incoming:
            self.outgoing.append(block)
            self.pool.hold_outgoing([block])

    @precondition(lambda self: self.outgoing)
    @rule(data=st.data())
    def sent(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.outgoing))
        self.outgoing.remove(block)
        self.pool.release_outgoing([block])

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def reserve(self) -> None:
        blocks = self.pool.allocate(1)
        self.pool.hold_incoming(blocks)
        self.held += blocks
        self.incoming += blocks

    @precondition(lambda self: self.incoming)
    @rule(data=st.data())
    def unquarantine(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.incoming))
        self.incoming.remove(block)
        self.pool.release_incoming([block])

    @precondition(lambda self: self.number - self.pool.updated < 2)
    @rule()
    def launch(self) -> None:
        self.number += 1
        self.pool.launched = self.number

    @precondition(lambda self: self.pool.updated < self.number)
    @rule()
    def settle(self) -> None:
        self.pool.settle(self.pool.updated + 1)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.pool.evict([data.draw(st.integers(1, 8))])

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        listed = [block for part in self.pool.lists().values() for block in part]
        owned = {*self.held, *self.outgoing, *self.incoming}
        assert sorted([*listed, *owned]) == list(range(1, 9))
        assert all(self.pool.refs[b] == self.held.count(b) for b in range(1, 9))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


# --- several groups ---


def keys_of(count: int) -> list[bytes]:
    return [key(i + 1) for i in range(count)]


def blocks_with(groups: list[GroupSpec], cached_in: list[list[int]]) -> KVCacheManager:
    """A pool that holds these logical blocks of one sequence in its caches."""
    blocks = KVCacheManager(groups)
    for group, numbers in enumerate(cached_in):
        cached(blocks.pool, [number + 1 for number in numbers], group)
    return blocks


def lengths(match: Match) -> tuple[int, list[int]]:
    return match.num_tokens, [sum(block != 0 for block in table) for table in match.tables]


FULL4 = GroupSpec(block_size=4, num_blocks=20)
FULL8 = GroupSpec(block_size=8, num_blocks=20)
WINDOW = GroupSpec(block_size=4, num_blocks=20, kind=GroupKind.WINDOW, window=6)
STATE = GroupSpec(block_size=4, num_blocks=20, kind=GroupKind.STATE)
CHUNK = GroupSpec(block_size=4, num_blocks=20, kind=GroupKind.CHUNK, window=8)


def test_the_usable_prefix_is_valid_in_all_groups():
    blocks = blocks_with([FULL4, FULL8], [[0, 1, 2, 3, 4], [0, 1]])
    assert lengths(blocks.match([keys_of(6), keys_of(3)], 24)) == (16, [4, 2])
    blocks = blocks_with([FULL4, FULL8], [[0, 1, 2], [0, 1]])
    assert lengths(blocks.match([keys_of(6), keys_of(3)], 24)) == (8, [2, 1])


def test_a_window_needs_its_last_blocks_only():
    blocks = blocks_with([FULL4, WINDOW], [[0, 1, 2, 3], [2, 3]])
    match = blocks.match([keys_of(4), keys_of(4)], 18)
    assert lengths(match) == (16, [4, 2])
    assert match.tables[1][:2] == [0, 0]


def test_a_window_with_a_hole_shortens_the_prefix():
    blocks = blocks_with([FULL4, WINDOW], [[0, 1, 2, 3], [0, 1, 3]])
    assert lengths(blocks.match([keys_of(4), keys_of(4)], 18)) == (8, [2, 2])
    blocks = blocks_with([FULL4, WINDOW], [[0, 1, 2, 3], [3]])
    assert lengths(blocks.match([keys_of(4), keys_of(4)], 18)) == (0, [0, 0])


def test_a_full_hit_needs_the_window_of_the_last_token():
    exact = GroupSpec(block_size=4, num_blocks=20, kind=GroupKind.WINDOW, window=5)
    blocks = blocks_with([exact], [[1, 2]])
    assert lengths(blocks.match([keys_of(3)], 13)) == (12, [1])  # token 12 looks back to 8
    assert lengths(blocks.match([keys_of(3)], 12)) == (12, [2])  # token 11 looks back to 7
    blocks = blocks_with([exact], [[2]])
    assert lengths(blocks.match([keys_of(3)], 13)) == (12, [1])
    assert lengths(blocks.match([keys_of(3)], 12)) == (0, [0])


def test_a_chunk_needs_its_own_blocks_only():
    blocks = blocks_with([FULL4, CHUNK], [[0, 1, 2, 3, 4], [2, 4]])
    assert lengths(blocks.match([keys_of(5)] * 2, 22)) == (20, [5, 1])
    assert lengths(blocks.match([keys_of(4)] * 2, 18)) == (16, [4, 0]), "token 16 begins a chunk"
    blocks = blocks_with([FULL4, CHUNK], [[0, 1, 2, 3], [3]])
    assert lengths(blocks.match([keys_of(4)] * 2, 16)) == (8, [2, 0]), "token 15 is computed again"


def test_a_prefix_ends_where_a_snapshot_of_the_state_is_kept():
    blocks = blocks_with([FULL4, STATE], [[0, 1, 2, 3], [0, 2]])
    match = blocks.match([keys_of(4), keys_of(4)], 18)
    assert lengths(match) == (12, [3, 1])
    assert match.tables[1][:2] == [0, 0]
    assert lengths(blocks.match([keys_of(4)] * 2, 12)) == (4, [1, 1]), "the last token is computed"


def test_a_step_gets_a_block_for_its_last_border_and_one_for_its_end():
    for caching, kept in ((True, [2, 3]), (False, [3])):
        blocks = KVCacheManager([FULL4, STATE], enable_caching=caching)
        tables = blocks.empty()
        blocks.extend(tables, 30, start=0, end=14)
        assert [i for i, block in enumerate(tables[1]) if block] == kept
        assert blocks.spans(tables, 0, 14)[1] == (BlockSpan(13, (tables[1][3],)),)
        blocks.extend(tables, 30, start=14, end=16)
        assert len(tables[1]) == 4, "a block is written over until it is full"
        blocks.extend(tables, 30, start=16, end=17)
        assert len(tables[1]) == 5


@settings(deadline=None, max_examples=300)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(GroupKind), st.integers(1, 11)), min_size=1, max_size=3
    ),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3),
    num_tokens=st.integers(1, 40),
    data=st.data(),
)
def test_a_match_is_the_longest_prefix_whose_next_token_finds_all_that_it_attends_to(
    kinds: list[tuple[GroupKind, int]], sizes: list[int], num_tokens: int, data: st.DataObject
) -> None:
    groups = [
        GroupSpec(size, 200, kind, window if kind in (GroupKind.WINDOW, GroupKind.CHUNK) else 0)
        for size, (kind, window) in zip(sizes, kinds, strict=False)
    ]
    blocks = KVCacheManager(groups)
    there = []
    for g, group in enumerate(groups):
        count = num_tokens // group.block_size
        numbers = data.draw(st.sets(st.integers(0, count - 1)) if count else st.just(set[int]()))
        cached(blocks.pool, [number + 1 for number in sorted(numbers)], g)
        there.append(numbers)

    def sees(length: int) -> bool:
        """Whether all that the next token attends to before itself is cached."""
        at = min(length, num_tokens - 1)
        for group, numbers in zip(groups, there, strict=True):
            if group.kind is GroupKind.STATE:
                snapshot = length // group.block_size - 1
                if length and (at < length or length % group.block_size or snapshot not in numbers):
                    return False
                continue
            low = max(0, at - group.window + 1) if group.window else 0
            if group.kind is GroupKind.CHUNK:
                low = at // group.window * group.window
            if any(p // group.block_size not in numbers for p in range(low, length)):
                return False
            if length % group.block_size:
                return False
        return True

    match = blocks.match([keys_of(num_tokens // group.block_size) for group in groups], num_tokens)
    assert match.num_tokens == max(length for length in range(num_tokens + 1) if sees(length))
    for g, table in enumerate(match.tables):
        for i, block in enumerate(table):
            assert block in (0, blocks.pool.by_key[g].get(key(i + 1)))


def test_layers_of_one_window_share_a_group_and_large_kinds_are_split() -> None:
    def sizes(windows: list[int]) -> list[tuple[int, int]]:
        groups = kv_groups([LayerKV(window=window, heads=1, head_dim=8) for window in windows])
        layers = [layer for group in groups for layer in group.layers]
        assert sorted(layers) == list(range(len(windows)))
        assert all(windows[layer] == group.window for group in groups for layer in group.layers)
        return [(group.window, len(group.layers)) for group in groups]

    assert sizes([0] * 32) == [(0, 32)]
    assert sizes([4096] * 32) == [(4096, 32)]
    assert sizes([128, 0] * 12) == [(0, 12), (128, 12)]
    gemma = [0 if layer % 6 == 5 else 1024 for layer in range(62)]
    assert sizes(gemma) == [(0, 10), *[(1024, n) for n in (10, 10, 11, 10, 11)]]
    assert len(sizes([0] * 27 + [8])) == 8, "few groups, though one of them wastes room"


def test_groups_of_other_sizes_share_blocks_of_equal_bytes() -> None:
    sliding = LayerKV(window=1024, heads=16, head_dim=256)
    full = LayerKV(heads=4, head_dim=512)
    groups = kv_groups([full if layer % 6 == 5 else sliding for layer in range(60)])
    assert [(g.window, len(g.layers)) for g in groups] == [
        (0, 10),
        *[(1024, n) for n in [7] * 6 + [8]],
    ]
    sizes = {(g.heads * g.head_dim * 2 * len(g.layers)) for g in groups}
    assert block_bytes(groups, 16, 1, "bfloat16") == max(sizes) * 16 * 2
    # Of eight ranks each has two heads of the one kind, and one of the other, which two share.
    assert block_bytes(groups, 16, 8, "bfloat16") == 10 * 512 * 2 * 16 * 2
    small = LayerKV(window=8, heads=1, head_dim=24)
    groups = kv_groups([LayerKV(heads=1, head_dim=16), small, small])
    assert block_bytes(groups, 4, 1, "float32") % (4 * 4 * 48) == 0, "whole pages of either"


def test_layers_that_read_others_are_in_no_group() -> None:
    own, window = LayerKV(heads=1, head_dim=8), LayerKV(window=8, heads=1, head_dim=8)
    groups = kv_groups([window, own, window, None, None])
    assert sorted(layer for group in groups for layer in group.layers) == [0, 1, 2]


def test_room_counts_what_a_hit_would_take_from_the_evictable():
    blocks = blocks_with([GroupSpec(block_size=4, num_blocks=5)], [[0, 1]])
    match = blocks.match([keys_of(4)], 16)
    assert blocks.fits(2, hits=match.tables)
    assert not blocks.fits(3, hits=match.tables)
    assert not blocks.fits(2, hits=match.tables, beside=1)


def test_group_specs_come_from_layouts():
    plane = contiguous_plane(
        num_blocks=7, block_size=4, num_heads=1, head_dim=8, layers=(0,), dtype="float32"
    )
    layout = Layout(0, GroupKind.WINDOW, 4, 7, (plane,), window=9)
    spec = GroupSpec(block_size=4, num_blocks=7, kind=GroupKind.WINDOW, window=9)
    assert GroupSpec.of(layout, 4) == spec
    state = Layout(1, GroupKind.STATE, 1, 7, (plane,))
    assert GroupSpec.of(state, 16) == GroupSpec(16, 7, GroupKind.STATE)
