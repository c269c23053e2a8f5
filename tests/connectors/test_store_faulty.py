"""Each fault does what it says, to the objects it is meant for, and again with the same seed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Store
from kvbaton.connectors.stores.faulty import FaultyStore
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import find, make_objects, pieces, read, save, wait

OBJECTS = make_objects(6)
KEYS, DATA = list(OBJECTS), list(OBJECTS.values())


@contextmanager
def faulty(**options: Any) -> Iterator[FaultyStore]:
    store = FaultyStore("faulty", **options)
    store.open()
    try:
        yield store
    finally:
        store.close()


def wrong(found: bytes | None, right: bytes) -> int:
    assert found is not None
    return sum(a != b for a, b in zip(found, right, strict=True))


def test_a_corrupt_load_is_said_to_be_right_and_the_next_one_is() -> None:
    with faulty(corrupt=[1, 4]) as store:
        save(store, OBJECTS)
        found = read(store, OBJECTS)
        assert [wrong(f, d) for f, d in zip(found, DATA, strict=True)] == [0, 8, 0, 0, 8, 0]
        assert read(store, OBJECTS) == DATA
        assert store.injected == {"corrupt": 2}


def test_what_is_stored_corrupt_stays_so_and_the_source_is_left_alone() -> None:
    with faulty(corrupt=[1], on=["store"]) as store:
        sources = [pieces(data) for data in DATA]
        wait(store.store(KEYS, sources))
        assert [b"".join(source) for source in sources] == DATA
        for _ in range(2):
            found = read(store, OBJECTS)
            assert [wrong(f, d) for f, d in zip(found, DATA, strict=True)] == [0, 8, 0, 0, 0, 0]


@pytest.mark.parametrize("num_bytes", [1, 2, 7, 8, 9, 64])
def test_corrupt_hits_objects_of_any_length(num_bytes: int) -> None:
    objects = make_objects(20, num_bytes)
    with faulty(corrupt=1.0) as store:
        save(store, objects)
        pairs = zip(read(store, objects), objects.values(), strict=True)
        assert all(1 <= wrong(found, data) <= 8 for found, data in pairs)


def test_a_lost_object_is_missed_by_a_load_and_absent_for_a_lookup() -> None:
    with faulty(lose=[2, 6]) as store:
        save(store, OBJECTS)
        target = pieces(b"left alone")
        assert read(store, OBJECTS) == [*DATA[:2], None, *DATA[3:]]
        assert wait(store.load([KEYS[0]], [target])) == [False]
        assert b"".join(target) == b"left alone"
        assert find(store, KEYS).present == (True,) * 6
    with faulty(lose=[2], on=["lookup"]) as store:
        save(store, OBJECTS)
        assert find(store, KEYS).present == (True, True, False, True, True, True)


def test_a_lost_store_is_said_to_be_kept() -> None:
    with faulty(lose=[0], on=["store"]) as store:
        assert save(store, OBJECTS) == [True] * 6
        assert find(store, KEYS).present == (False, *(True,) * 5)


def test_a_partial_load_is_a_miss_with_the_first_half_in_place() -> None:
    with faulty(partial=[0]) as store:
        save(store, OBJECTS)
        target = pieces(bytes(1_001))
        assert wait(store.load(KEYS[:1], [target])) == [False]
        assert b"".join(target) == DATA[0][:500] + b"\xff" * 501


def test_a_partial_store_is_a_torn_write() -> None:
    with faulty(partial=[0], on=["store"]) as store:
        assert save(store, OBJECTS) == [True] * 6
        assert find(store, KEYS).present == (True,) * 6
        assert read(store, OBJECTS) == [None, *DATA[1:]]
        assert read(store, {KEYS[0]: DATA[0][:500]}) == [DATA[0][:500]]


def test_an_error_fails_the_call_that_has_the_object() -> None:
    with faulty(error=[2], on=["lookup", "load"]) as store:
        save(store, OBJECTS)
        find(store, KEYS[:2])
        with pytest.raises(StoreError, match="injected error"):
            read(store, OBJECTS)
        assert read(store, OBJECTS) == DATA


def test_a_delayed_load_fills_its_buffer_late() -> None:
    with faulty(delay=[0], delay_s=0.2) as store:
        save(store, OBJECTS)
        target = pieces(bytes(1_001))
        began = time.monotonic()
        slow = store.load(KEYS[:1], [target])
        assert not slow.cancel()
        assert read(store, dict(list(OBJECTS.items())[1:])) == DATA[1:]
        if time.monotonic() - began < 0.1:
            assert b"".join(target) == bytes(1_001)
        assert wait(slow) == [True]
        assert time.monotonic() - began >= 0.2
        assert b"".join(target) == DATA[0]


def test_a_disconnect_fails_all_for_a_while() -> None:
    with faulty(disconnect=[1], outage_s=0.3) as store:
        save(store, OBJECTS)
        assert store.health() is None
        with pytest.raises(StoreError, match="injected disconnect"):
            read(store, OBJECTS)
        began = time.monotonic()
        assert store.health() == "injected disconnect"
        if time.monotonic() - began < 0.1:
            with pytest.raises(StoreError, match="injected disconnect"):
                find(store, KEYS)
        time.sleep(max(0.0, began + 0.3 - time.monotonic()))
        assert store.health() is None
        assert read(store, OBJECTS) == DATA


def test_probabilities_repeat_with_the_seed() -> None:
    objects = make_objects(300)

    def missed(seed: int) -> list[int]:
        with faulty(lose=0.1, seed=seed) as store:
            save(store, objects)
            found = read(store, objects)
            assert store.injected["lose"] == found.count(None)
            return [i for i, data in enumerate(found) if data is None]

    assert 10 < len(missed(1)) < 60
    assert missed(1) == missed(1)
    assert missed(1) != missed(2)


def test_closing_fails_what_is_delayed_and_leaves_no_thread() -> None:
    before = threading.active_count()
    store = FaultyStore("faulty", delay=1.0, delay_s=60.0)
    store.open()
    waiting = store.load(KEYS[:1], [pieces(DATA[0])])
    store.close()
    with pytest.raises(StoreError, match="closed"):
        wait(waiting)
    store.close()
    assert threading.active_count() == before
    with pytest.raises(StoreError, match="not open"):
        store.lookup(KEYS)


def test_pins_and_tickets_pass() -> None:
    inner = {"memory": {"max_bytes": 2_002, "threads": 1}}
    with faulty(inner=inner) as store:
        save(store, dict(zip(KEYS[:2], DATA[:2], strict=True)))
        ticket = find(store, KEYS[:2], pin=True).ticket
        assert ticket is not None
        assert save(store, {KEYS[2]: DATA[2]}) == [False]
        store.release(ticket)
        assert save(store, {KEYS[2]: DATA[2]}) == [True]


@pytest.mark.parametrize("inner", ['"memory"', '"memory:{\\"threads\\": 1}"', '{"memory": {}}'])
def test_specs_nest(inner: str) -> None:
    store = load_store(f'faulty:{{"inner": {inner}, "corrupt": 0.01}}')
    assert isinstance(store, FaultyStore)
    assert isinstance(store, Store)
    assert (store.name, store.inner.name) == ("faulty", "memory")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"corrupt": 1.5}, "corrupt must be"),
        ({"lose": "often"}, "lose must be"),
        ({"delay": ["0"]}, "delay must be"),
        ({"on": ["loads"]}, "on must be of"),
        ({"inner": {"memory": {}, "faulty": {}}}, "neither a spec nor"),
        ({"inner": "no-such-store"}, "unknown store"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FaultyStore("x", **options)
