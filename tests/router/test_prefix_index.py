"""The index of prefixes says what the nodes' own schedulers would find."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connectors.keys import block_keys, root_key
from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.block_feed import BlockFeed
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_connector import Connectors
from kvbaton.messages.engine import (
    AddRequest,
    BlockChange,
    CachedBlocks,
    CachedGroup,
    Item,
    SamplingParams,
)
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.prefix_index import PrefixIndex
from tests.support.toy_engine import Loop, ask

IDENTITY = bytes(32)
SIZE = 4
GROUPS = (CachedGroup(SIZE),)
FULL = GroupSpec(SIZE, 40)
WINDOW = GroupSpec(SIZE, 40, GroupKind.WINDOW, 10)
CHUNK = GroupSpec(SIZE, 40, GroupKind.CHUNK, 10)


def node(node_id: str, generation: str = "1", identity: bytes = IDENTITY) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        generation=generation,
        role="decode",
        url="",
        model="m",
        identity=identity.hex(),
    )


def asked(tokens: list[int], salt: str = "", items: tuple[Item, ...] = ()) -> AddRequest:
    return AddRequest(
        request_id="r",
        token_ids=array("I", tokens),
        params=SamplingParams(),
        cache_salt=salt,
        items=items,
    )


def hashes(tokens: list[int], salt: str = "") -> bytes:
    keys = block_keys(root_key(IDENTITY, salt), tokens, SIZE)
    return b"".join(key[-8:] for key in keys)


def begun(index: PrefixIndex, *names: str) -> None:
    for name in names:
        index.take(node(name), CachedBlocks.beginning(GROUPS))


def stored(index: PrefixIndex, name: str, data: bytes, *, gone: bool = False) -> None:
    index.take(node(name), CachedBlocks(number=1, changes=(BlockChange(0, not gone, data),)))


class Told:
    """Where a feed says what it has; one watcher."""

    def __init__(self, index: PrefixIndex) -> None:
        self.block_watchers = {"router": None}
        self.index = index

    def begin(self, feed: BlockFeed) -> None:
        self.index.take(node("n"), CachedBlocks.beginning(feed.groups))
        for part in feed.snapshot():
            self.tell_watchers(part, feed)

    def tell_watchers(self, changes: tuple[BlockChange, ...], feed: Any) -> None:
        self.index.take(node("n"), CachedBlocks(number=1, changes=changes))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), groups=st.sampled_from([(FULL,), (FULL, WINDOW), (WINDOW,), (FULL, CHUNK)]))
def test_says_what_the_scheduler_would_find(
    data: st.DataObject, groups: tuple[GroupSpec, ...]
) -> None:
    """Shared prefixes, evictions, resets; snapshots at any time."""
    loop, index = Loop(groups, max_num_batched_tokens=16), PrefixIndex()
    blocks, told = loop.scheduler.blocks, Told(index)
    feed = BlockFeed(blocks, told)  # type: ignore[arg-type]
    loop.scheduler.connectors = Connectors((*loop.scheduler.connectors, feed))
    told.begin(feed)
    prompts = [random.Random(seed).choices(range(4, 20), k=40) for seed in range(3)]
    for number in range(data.draw(st.integers(2, 8))):
        tokens = data.draw(st.sampled_from(prompts))[: data.draw(st.integers(1, 40))]
        loop.add(ask(str(number), tokens, max_tokens=data.draw(st.integers(1, 8))))
        for _ in range(data.draw(st.integers(0, 6))):
            loop.step()
        event = data.draw(st.integers(0, 9))
        if event == 0:
            blocks.pool.reset_cache()
        feed.flush()
        if event == 1:
            told.begin(feed)
        for tokens in prompts:
            chain = block_keys(root_key(IDENTITY, ""), tokens, SIZE)
            found = blocks.match([chain] * len(groups), len(tokens)).num_tokens
            assert index.cached(asked(tokens)).get("n", 0) == found


def test_each_node_has_its_own_length() -> None:
    index, tokens = PrefixIndex(), list(range(40))
    begun(index, "a", "b", "c")
    known = hashes(tokens)
    stored(index, "a", known)
    stored(index, "b", known[: 3 * 8])
    assert index.cached(asked(tokens)) == {"a": 40, "b": 12}
    assert index.cached(asked([*tokens[:20], 7, *tokens[21:]])) == {"a": 20, "b": 12}
    stored(index, "a", known[8:16], gone=True)
    assert index.cached(asked(tokens)) == {"a": 4, "b": 12}, "a hole ends a prefix"


def test_salts_items_and_identities_are_kept_apart() -> None:
    index, tokens = PrefixIndex(), list(range(16))
    begun(index, "a")
    stored(index, "a", hashes(tokens))
    index.take(node("z", identity=b"z" * 32), CachedBlocks.beginning(GROUPS))
    assert index.cached(asked(tokens)) == {"a": 16}
    assert index.cached(asked(tokens, salt="s")) == {}
    item = Item(start=5, length=2, digest=bytes(32), grid=(1, 2, 1))
    assert index.cached(asked(tokens, items=(item,))) == {"a": 4}, "of the first block alone"


async def test_a_node_that_is_lost_is_forgotten_and_its_place_is_used_again() -> None:
    index, tokens = PrefixIndex(), list(range(40))
    begun(index, "a", "b")
    stored(index, "a", hashes(tokens))
    stored(index, "b", hashes(tokens)[:16])
    bit = index.nodes["a"].bit
    index.drop("a")
    assert index.cached(asked(tokens)) == {"b": 8}
    begun(index, "c")
    assert index.nodes["c"].bit != bit, "entries still say that bit"
    assert index.cached(asked(tokens)) == {"b": 8}
    await index.sweep()
    assert len(index) == 2, "only what b holds"
    begun(index, "d")
    assert index.nodes["d"].bit == bit


def test_a_new_snapshot_replaces_the_old_one() -> None:
    index, tokens = PrefixIndex(), list(range(40))
    begun(index, "a")
    stored(index, "a", hashes(tokens))
    begun(index, "a")
    assert index.cached(asked(tokens)) == {}


def test_what_another_life_of_a_node_says_is_not_heeded() -> None:
    index, tokens = PrefixIndex(), list(range(8))
    index.take(node("a", generation="2"), CachedBlocks.beginning(GROUPS))
    stored(index, "a", hashes(tokens))
    assert index.cached(asked(tokens)) == {}


def hostile() -> Iterator[CachedBlocks]:
    good = hashes(list(range(8)))
    yield CachedBlocks(number=1, changes=(BlockChange(5, True, good),))
    yield CachedBlocks(number=1, changes=(BlockChange(0, True, good[:-1]),))
    yield CachedBlocks(number=1, changes=(BlockChange(0, False, good),))
    yield CachedBlocks.beginning((CachedGroup(0),))
    yield CachedBlocks.beginning((CachedGroup(4),) * 1000)
    yield CachedBlocks.beginning(())


@pytest.mark.parametrize("message", list(hostile()))
def test_nonsense_is_harmless(message: CachedBlocks) -> None:
    index = PrefixIndex()
    begun(index, "a", "b")
    stored(index, "b", hashes(list(range(8))))
    index.take(node("a"), message)
    assert index.cached(asked(list(range(8)))) == {"b": 8}


def test_memory_is_bounded_in_all_and_per_node() -> None:
    index = PrefixIndex(max_blocks=12, max_node_blocks=8)
    begun(index, "a", "b")
    stored(index, "a", hashes(list(range(400))))
    assert len(index) == 8
    stored(index, "b", hashes(list(range(1000, 1400))))
    assert len(index) == 12
    assert index.dropped == 92 + 96
    stored(index, "b", hashes(list(range(1000, 1400)))[:16], gone=True)
    stored(index, "b", hashes(list(range(8))))
    assert index.cached(asked(list(range(8)))) == {"a": 8, "b": 8}
