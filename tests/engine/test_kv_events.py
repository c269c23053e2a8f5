"""KV events: what is told of the prefix caches is what is in them, for everyone who follows."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engine.config import KVEventsConfig
from kvbaton.engine.kv_cache_manager import GroupSpec, KVCacheManager
from kvbaton.engine.kv_connector import Connectors
from kvbaton.engine.kv_events import EventBatch, KVEventLog, KVEventPublisher
from kvbaton.errors import ConfigError
from kvbaton.types import ChoiceStart
from tests.support.engine_node import Node
from tests.support.kv_subscriber import Index, Subscriber
from tests.support.making import making
from tests.support.toy_engine import FULL, WINDOW, Loop, ask, target
from tests.support.waiting import until

LOOPBACK = "tcp://127.0.0.1:*"
TOLD = json.dumps(
    {"enable_kv_cache_events": True, "endpoint": LOOPBACK, "replay_endpoint": LOOPBACK}
)


def encode(events: list[Any]) -> bytes:
    return msgspec.msgpack.encode(EventBatch(0.0, events))


def check(index: Index, blocks: KVCacheManager, ints: bool = True) -> None:
    """An indexer's view equals the pools'."""
    for g, by_key in enumerate(blocks.pool.by_key):
        keys = {int.from_bytes(key[-8:], "big") if ints else key for key in by_key}
        assert index.hashes(g) == keys


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(4, 20), k=length)


# --- the log, as a model ---


def log_of(loop: Loop, ints: bool = True) -> KVEventLog:
    """Hears a loop's scheduler from now on."""
    log = KVEventLog(loop.scheduler.blocks, int_block_hashes=ints)
    loop.scheduler.connectors = Connectors((*loop.scheduler.connectors, log))
    return log


@settings(deadline=None, max_examples=60)
@given(data=st.data(), groups=st.sampled_from([(FULL,), (FULL, WINDOW)]), ints=st.booleans())
def test_follows_pools_through_everything(
    data: st.DataObject, groups: tuple[GroupSpec, ...], ints: bool
) -> None:
    """Shared prefixes, evictions, preemptions, aborts, resets; a snapshot may come at any time."""
    loop = Loop(groups, max_num_batched_tokens=16)
    blocks = loop.scheduler.blocks
    log = log_of(loop, ints)
    index, late = Index(), list[Index]()
    for number in range(data.draw(st.integers(3, 10))):
        tokens = prompt(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 40)))
        salt = data.draw(st.sampled_from(["", "s"]))
        loop.add(ask(str(number), tokens, max_tokens=data.draw(st.integers(1, 8)), cache_salt=salt))
        for _ in range(data.draw(st.integers(0, 6))):
            loop.step()
            if data.draw(st.integers(0, 9)) == 0:
                late.append(Index(strict=False))
                late[-1].apply(encode(list(log.contents())))
        if data.draw(st.integers(0, 9)) == 0:
            loop.scheduler.blocks.pool.reset_cache()
            log.reset_prefix_cache()
        follow(log, blocks, index, *late, ints=ints)
    loop.run()
    follow(log, blocks, index, *late, ints=ints)
    assert index.salts <= {"s"}


def follow(log: KVEventLog, blocks: KVCacheManager, *followers: Index, ints: bool) -> None:
    """Everyone hears what has happened, and knows the same: what is."""
    batch = encode(log.take())
    for follower in followers:
        follower.apply(batch)
        check(follower, blocks, ints)
        for g in range(len(blocks.groups)):
            assert follower.blocks.get(g, {}) == followers[0].blocks.get(g, {})


def test_names_parents_and_tokens() -> None:
    loop = Loop((FULL,))
    log = log_of(loop)
    tokens = prompt(0, 12)
    loop.add(ask("a", tokens, max_tokens=1, cache_salt="s"))
    loop.run()
    (stored,) = msgspec.msgpack.decode(encode(log.take()))[1]
    hashes = stored[1]
    assert len(hashes) == 3
    assert all(isinstance(number, int) and number < 2**64 for number in hashes)
    assert stored == [
        "BlockStored", hashes, None, tokens, 4, None, "GPU", None, [["s"], None, None],
        0, "full_attention", None,
    ]  # fmt: skip
    longer = [*tokens, *prompt(1, 5)]
    loop.add(ask("b", longer, max_tokens=1, cache_salt="s"))
    loop.run()
    (stored,) = msgspec.msgpack.decode(encode(log.take()))[1]
    assert stored[2] == hashes[-1], "the parent is the last block that was there"
    assert stored[3] == longer[12:16]
    assert stored[8] is None


def test_equal_prompts_are_told_once() -> None:
    """Two that are computed at the same time end in one cached block each."""
    loop = Loop((FULL,))
    log = log_of(loop)
    for name in "ab":
        loop.add(ask(name, prompt(0, 12), max_tokens=1))
    loop.run()
    index = Index()
    index.apply(encode(log.take()))
    check(index, loop.scheduler.blocks)
    assert len(index.hashes()) == 3


def test_snapshot_is_few_events() -> None:
    """Blocks of one sequence are told in one piece, however they came."""
    loop = Loop((FULL,))
    log = log_of(loop)
    for length in (8, 16, 24):
        loop.add(ask(str(length), prompt(0, length), max_tokens=1))
        loop.run()
    (event,) = log.contents()
    assert event.token_ids == prompt(0, 24)
    assert event.parent_block_hash is None


def test_blocks_behind_a_window_are_not_there() -> None:
    """A target gets only the last window of a prompt: what it lacks is not told."""
    loop = Loop((FULL, WINDOW))
    log = log_of(loop)
    loop.add(ask("a", prompt(0, 21), transfer=target(1)))
    loop.run_until(lambda: bool(loop.admitted))
    (admitted,) = loop.admitted
    loop.ranks.receive(admitted.spans, prompt(0, 21), 21)
    loop.emit(loop.loaded("a", [ChoiceStart(5)], 0))
    index = Index()
    index.apply(encode(log.take()))
    check(index, loop.scheduler.blocks)
    assert [len(index.hashes(g)) for g in (0, 1)] == [5, 1]


def test_store_keeps_blocks() -> None:
    """What a store has is told beside what the pool has, and survives that the pool is emptied."""
    loop = Loop((FULL,))
    log = log_of(loop)
    loop.add(ask("a", prompt(0, 12), max_tokens=1))
    loop.run()
    keys = list(loop.scheduler.blocks.pool.by_key[0])
    log.saved("filesystem", 0, [keys[0], keys[2], b"?" * 32])
    index = Index()
    index.apply(encode(log.take()))
    loop.scheduler.blocks.pool.reset_cache()
    log.reset_prefix_cache()
    index.apply(encode(log.take()))
    assert index.hashes() == set()
    kept = {int.from_bytes(key[-8:], "big") for key in (keys[0], keys[2])}
    assert index.elsewhere == {"filesystem": kept}


# --- the publisher ---


@pytest.fixture
def loop() -> Loop:
    return Loop((FULL,))


Publish = Callable[..., KVEventPublisher]


@pytest.fixture
def publish(loop: Loop) -> Iterator[Publish]:
    def publish(**fields: Any) -> KVEventPublisher:
        known: dict[str, Any] = {"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, **fields}
        publisher = KVEventPublisher(KVEventsConfig(**known), loop.scheduler.blocks)
        loop.scheduler.connectors = Connectors((*loop.scheduler.connectors, publisher))
        return publisher

    with making(publish, KVEventPublisher.close) as make:
        yield make


Subscribe = Callable[[KVEventPublisher], Subscriber]


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    def subscribe(publisher: KVEventPublisher, topic: str = "") -> Subscriber:
        return Subscriber(publisher.endpoint, publisher.replay_endpoint, topic)

    with making(subscribe, Subscriber.close) as make:
        yield make


def work(loop: Loop, publisher: KVEventPublisher, requests: int, start: int = 0) -> None:
    for number in range(start, start + requests):
        loop.add(ask(str(number), prompt(number, 13), max_tokens=1))
        loop.run()
        publisher.flush()


def connect(subscriber: Subscriber, publisher: KVEventPublisher) -> None:
    """Wait until a subscription has reached the publisher: it can't be asked, only be seen."""
    limit = time.monotonic() + 20.0
    while not subscriber.missed():
        assert time.monotonic() < limit
        publisher.reset_prefix_cache()
        publisher.flush()
    subscriber.missed()


def test_gap_is_seen_and_repeated(loop: Loop, publish: Publish, subscribe: Subscribe) -> None:
    publisher = publish(topic="kv@node@model")
    subscriber = subscribe(publisher)
    connect(subscriber, publisher)
    work(loop, publisher, 4)
    assert len(subscriber.missed()) == 4
    work(loop, publisher, 3, start=4)
    subscriber.follow(publisher.published - 1)
    assert subscriber.gaps == 1
    check(subscriber.index, loop.scheduler.blocks)
    assert subscriber.index.blocks[0]


def test_late_subscriber(loop: Loop, publish: Publish, subscribe: Subscribe) -> None:
    """What can't be repeated any more is in a snapshot."""
    publisher = publish(buffer_steps=2)
    subscriber = subscribe(publisher)
    assert subscriber.ask(b"snapshot") == [], "nothing was published yet"
    work(loop, publisher, 6)
    assert [number for number, _ in subscriber.ask(bytes(8))] == [4, 5]
    subscriber.load()
    assert subscriber.last == 5
    check(subscriber.index, loop.scheduler.blocks)
    connect(subscriber, publisher)
    subscriber.load()
    work(loop, publisher, 3, start=6)
    subscriber.follow(publisher.published - 1)
    check(subscriber.index, loop.scheduler.blocks)


def test_full_queue_delays_nobody(loop: Loop, publish: Publish, subscribe: Subscribe) -> None:
    """Batches that find no room are dropped, seen as a gap, and made good by a snapshot."""
    publisher = publish(max_queue_size=1, hwm=1)
    busy = publisher._forward
    stuck = [True]
    publisher._forward = lambda: True if stuck[0] else busy()  # type: ignore[method-assign]
    work(loop, publisher, 12)
    assert publisher.dropped > 0
    assert publisher.published == 12
    stuck[0] = False
    subscriber = subscribe(publisher)
    numbers = [number for number, _ in subscriber.ask(bytes(8))]
    assert 0 < len(numbers) == 12 - publisher.dropped
    subscriber.load()
    assert subscriber.last == 11
    check(subscriber.index, loop.scheduler.blocks)


@pytest.mark.parametrize(
    "frames", [(b"",), (b"123456789",), (bytes(8), bytes(8)), (b"\xff" * 8,), ()]
)
def test_odd_requests(
    frames: tuple[bytes, ...], loop: Loop, publish: Publish, subscribe: Subscribe
) -> None:
    """They hurt nobody."""
    publisher = publish()
    work(loop, publisher, 1)
    subscriber = subscribe(publisher)
    subscriber._ask.send_multipart((b"", *frames))
    if frames == (b"\xff" * 8,):
        assert subscriber._ask.recv_multipart() == [b"", b"\xff" * 8, b""]
    assert [number for number, _ in subscriber.ask(bytes(8))] == [0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "truncated"),
        ('{"endpoints": "tcp://*:1"}', "endpoints"),
        ('{"publisher": "kafka"}', r"'kafka'.*publisher \(zmq, null\), endpoint"),
        ('{"hwm": 0}', r">= 1 - at `\$.hwm`"),
        ('{"buffer_steps": "many"}', "buffer_steps"),
    ],
)
def test_settings_are_checked(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        KVEventsConfig.parse(text)
    assert caught.value.field == "--kv-events-config"


def test_address_in_use(publish: Publish) -> None:
    taken = publish().endpoint
    with pytest.raises(ConfigError, match=r"in use.*port \* takes a free one"):
        publish(endpoint=taken)
    with pytest.raises(ConfigError, match="endpoint 'nonsense'"):
        publish(endpoint="nonsense")


def test_off_by_default() -> None:
    assert not KVEventsConfig.parse(None).enabled
    assert not KVEventsConfig.parse('{"endpoint": "tcp://*:5557"}').enabled
    assert not KVEventsConfig.parse('{"enable_kv_cache_events": true, "publisher": "null"}').enabled
    assert KVEventsConfig.parse('{"enable_kv_cache_events": true}').enabled


# --- a real engine ---


def test_engine_tells_what_it_has(checkpoint: Callable[..., Path]) -> None:
    """A subscriber's view of a running engine, through evictions and a reset."""
    small = {"num_blocks": 25, "max_model_len": 64}
    node = Node("node", checkpoint(), **small, kv_events_config=TOLD)
    (publisher,) = (c for c in node.core.connectors if isinstance(c, KVEventPublisher))
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint)
    try:
        for seed in range(8):
            node.generate(prompt(seed, 40), max_tokens=9).result()
        node.ask("state")
        catch_up(subscriber, publisher)
        check(subscriber.index, node.scheduler.blocks)
        assert len(subscriber.index.hashes()) == 24, "the pool is full, older blocks had to go"
        assert subscriber.index.cleared == 0
        assert node.ask("reset_prefix_cache") == 24
        node.generate(prompt(9, 8), max_tokens=1).result()
        node.ask("state")
        catch_up(subscriber, publisher)
        check(subscriber.index, node.scheduler.blocks)
        assert len(subscriber.index.hashes()) == 2
        assert subscriber.index.cleared == 1
        assert node.counters()["kvbaton_kv_event_batches_total"] == publisher.published
        assert node.counters()["kvbaton_kv_event_batches_dropped_total"] == 0
    finally:
        subscriber.close()
        node.mailbox.kill()
        node.bury()


def catch_up(subscriber: Subscriber, publisher: KVEventPublisher) -> None:
    """By replay alone: as a subscriber that hears nothing at all."""
    for number, payload in subscriber.ask((subscriber.last + 1).to_bytes(8, "big")):
        subscriber.take(number, payload)
    assert subscriber.last == publisher.published - 1


def test_engine_tells_what_its_store_has(checkpoint: Callable[..., Path]) -> None:
    node = Node("node", checkpoint(), store="memory", kv_events_config=TOLD)
    (publisher,) = (c for c in node.core.connectors if isinstance(c, KVEventPublisher))
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint)
    try:
        node.generate(prompt(0, 40), max_tokens=1).result()
        until(lambda: bool(node.ask("drain")), "all is saved")
        node.ask("state")
        catch_up(subscriber, publisher)
        assert len(subscriber.index.hashes()) == 10
        assert subscriber.index.elsewhere == {"memory": subscriber.index.hashes()}
    finally:
        subscriber.close()
        node.mailbox.kill()
        node.bury()
