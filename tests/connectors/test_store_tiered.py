"""Several stores answer as one, and one that fails does not matter to the others."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kvbaton.connectors.registry import Spec, load_store
from kvbaton.connectors.store import Forgetting, Found, Hints, Namespaced, Store
from kvbaton.connectors.stores.faulty import FaultyStore
from kvbaton.connectors.stores.tiered import TieredStore
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import HeldStore, find, make_objects, pieces, read, save, wait
from tests.support.waiting import until

OBJECTS = make_objects(6)
KEYS, DATA = list(OBJECTS), list(OBJECTS.values())
MEMORY: Spec = {"memory": {"max_bytes": 1 << 20, "threads": 1}}
QUIET = {"promote": False, "prefetch": False}


@contextmanager
def tiered(*tiers: Spec, **options: Any) -> Iterator[TieredStore]:
    store = TieredStore("tiered", tiers=tiers or (MEMORY, MEMORY), **options)
    store.open()
    try:
        yield store
    finally:
        store.close()


def some(*indices: int) -> dict[bytes, bytes]:
    return {KEYS[i]: DATA[i] for i in indices}


def inner(store: TieredStore, depth: int) -> Store:
    return store.tiers[depth].store


def has(store: Store, *indices: int) -> list[bool]:
    return list(find(store, [KEYS[i] for i in indices]).present)


def faults(**options: Any) -> Spec:
    return {"faulty": {"inner": {"memory": {"threads": 1}}, **options}}


def test_the_answer_is_that_of_all_tiers() -> None:
    with tiered(MEMORY, MEMORY, MEMORY, **QUIET) as store:
        save(inner(store, 0), some(0, 3))
        save(inner(store, 1), some(1, 3))
        save(inner(store, 2), some(2))
        assert has(store, 0, 1, 2, 3, 4) == [True] * 4 + [False]
        assert read(store, OBJECTS) == [*DATA[:4], None, None]
        assert [tier.hits for tier in store.tiers] == [2, 1, 1]
        assert [tier.name for tier in store.tiers] == ["memory", "memory-1", "memory-2"]


def test_what_comes_from_a_slow_tier_is_promoted_into_all_faster_ones() -> None:
    with tiered(MEMORY, MEMORY, MEMORY, prefetch=False) as store:
        save(inner(store, 2), some(0, 1))
        assert read(store, some(0)) == [DATA[0]]
        until(lambda: store.counts["promoted"] == 1, "promoted")
        assert [has(inner(store, depth), 0, 1) for depth in range(3)] == [
            [True, False],
            [True, False],
            [True, True],
        ]
        assert read(store, some(0)) == [DATA[0]]
        assert [tier.hits for tier in store.tiers] == [1, 0, 1]


def test_nothing_is_promoted_beyond_the_bytes_of_copies() -> None:
    with tiered(prefetch=False, copy_bytes=2 * 1_001 + 1_000) as store:
        save(inner(store, 1), OBJECTS)
        assert read(store, OBJECTS) == DATA
        until(lambda: store.counts["promoted"] == 2, "promoted")
        assert store.counts["left"] == 4
        assert sum(has(inner(store, 0), *range(6))) == 2
        assert read(store, OBJECTS) == DATA
        until(lambda: store.counts["promoted"] == 4, "promoted: the bytes were given back")


def test_what_is_promoted_from_a_call_with_one_key_twice_is_copied_once() -> None:
    with tiered(prefetch=False, copy_bytes=2 * 1_001) as store:
        save(inner(store, 1), OBJECTS)
        twice = [pieces(bytes(len(DATA[0]))) for _ in range(2)]
        assert wait(store.load([KEYS[0]] * 2, twice)) == [True, True]
        until(lambda: store.counts["promoted"] == 1, "promoted")
        assert read(store, some(1, 2)) == DATA[1:3]
        until(lambda: store.counts["promoted"] == 3, "promoted: the bytes were given back")


def test_a_miss_falls_to_the_next_tier() -> None:
    with tiered(faults(lose=[0], partial=[2]), MEMORY, **QUIET) as store:
        assert save(store, OBJECTS) == [True] * 6
        assert read(store, OBJECTS) == DATA
        assert [tier.hits for tier in store.tiers] == [4, 2]


def test_writing_through_reaches_every_tier_and_outlives_the_process(tmp_path: Path) -> None:
    files: Spec = {"filesystem": {"path": str(tmp_path)}}
    with tiered(MEMORY, files) as store:
        assert (store.capabilities.persistent, store.capabilities.shared) == (True, False)
        assert save(store, OBJECTS) == [True] * 6
        assert has(inner(store, 0), *range(6)) == has(inner(store, 1), *range(6)) == [True] * 6
    with tiered(MEMORY, files) as store:
        assert read(store, OBJECTS) == DATA
        assert [tier.hits for tier in store.tiers] == [0, 6]


def test_what_is_evicted_is_written_into_the_next_tier() -> None:
    small: Spec = {"memory": {"max_bytes": 3 * 1_001, "threads": 1}}
    with tiered(small, MEMORY, write="on_eviction", **QUIET) as store:
        assert (store.capabilities.persistent, store.capabilities.pins) == (False, True)
        assert save(store, some(0, 1, 2)) == [True] * 3
        assert has(inner(store, 1), 0, 1, 2) == [False] * 3
        assert save(store, some(3, 4, 5)) == [True] * 3
        until(lambda: store.counts["demoted"] == 3, "demoted")
        assert has(inner(store, 1), *range(6)) == [True] * 3 + [False] * 3
        assert has(inner(store, 0), *range(6)) == [False] * 3 + [True] * 3
        assert read(store, OBJECTS) == DATA


def test_what_is_too_large_for_a_tier_goes_to_the_next() -> None:
    small: Spec = {"memory": {"max_bytes": 1_000, "threads": 1}}
    with tiered(small, MEMORY, write="on_eviction", **QUIET) as store:
        assert save(store, OBJECTS) == [True] * 6
        assert read(store, OBJECTS) == DATA


def test_a_lookup_prefetches_what_only_slow_tiers_have() -> None:
    with tiered(promote=False) as store:
        save(inner(store, 1), make_objects(40) | make_objects(3, 77, seed=1))
        save(store, make_objects(1, seed=2) | make_objects(1, 77, seed=3))  # teaches both lengths
        wanted = [*make_objects(40), *make_objects(3, 77, seed=1)]
        assert all(find(store, wanted).present)
        until(lambda: store.counts["prefetched"] == 43, "prefetched")
        assert all(find(inner(store, 0), wanted).present)
        assert read(store, make_objects(40)) == list(make_objects(40).values())
        assert [tier.hits for tier in store.tiers] == [40, 0]


def test_a_load_waits_for_what_is_under_way() -> None:
    with tiered(MEMORY, faults(delay=[0], delay_s=0.2)) as store:
        save(store, some(5))
        save(inner(store, 1), some(0))
        find(store, KEYS[:1])
        assert read(store, some(0)) == [DATA[0]]
        assert (store.tiers[0].hits, store.counts["prefetched"]) == (1, 1)


def test_a_tier_that_fails_is_passed_over_and_asked_again() -> None:
    gone = faults(disconnect=[0], outage_s=0.3)
    with tiered(gone, MEMORY, retry_s=0.3, **QUIET) as store:
        save(store, OBJECTS)
        assert read(store, OBJECTS) == DATA
        assert store.tiers[0].failures == 1
        assert store.outages() == {"faulty": "injected disconnect"}
        assert store.health() is None
        assert has(store, *range(6)) == [True] * 6
        until(lambda: not store.outages(), "the tier is back")
        assert read(store, OBJECTS) == DATA
        assert [tier.hits for tier in store.tiers] == [6, 6]


@pytest.mark.parametrize("error", [SystemExit("out of luck"), KeyError("a bug")])
@pytest.mark.parametrize("where", ["call", "future", "health"])
def test_a_tier_that_raises_anything_else_is_passed_over_likewise(
    where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **options: Any) -> Future[Any]:
        if where != "future":
            raise error
        future = Future[Any]()
        future.set_exception(error)
        return future

    with tiered(MEMORY, MEMORY, retry_s=60.0, **QUIET) as store:
        save(store, OBJECTS)
        for call in ("health",) if where == "health" else ("lookup", "load"):
            monkeypatch.setattr(inner(store, 0), call, fail)
        assert read(store, OBJECTS) == DATA
        assert has(store, *range(6)) == [True] * 6
        assert store.tiers[0].failures == 1
        told = "SystemExit: out of luck" if isinstance(error, SystemExit) else "KeyError: 'a bug'"
        assert store.outages() == {"memory": told}


class NoText(Exception):
    def __str__(self) -> str:
        raise AttributeError("code")


@pytest.mark.parametrize("error", [SystemExit("out of luck"), NoText()])
def test_a_tier_that_can_tell_nothing_spoils_nothing(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **options: Any) -> Any:
        raise error

    with tiered(MEMORY, MEMORY, **QUIET) as store:
        for depth in range(2):
            save(inner(store, depth), some(depth))
        ticket = find(store, KEYS[:2], pin=True).ticket
        assert ticket is not None
        released: list[int] = []
        monkeypatch.setattr(inner(store, 1), "release", released.append)
        for call in ("health", "usage", "release"):
            monkeypatch.setattr(inner(store, 0), call, fail)
        store.release(ticket)
        until(lambda: len(released) == 1, "the pins of the other tier are given back")
        assert store.health() is None
        assert list(store.outages()) == ["memory"]
        told = store.usage()
        assert (told.objects, told.gauges["tier0_memory_passed_over"]) == (None, 1.0)
        assert [line for line in caplog.messages if "tier memory fails" in line]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([], "it answered for 0 of 6 keys"),
        (None, "TypeError: object of type 'NoneType' has no len()"),
        ("cancelled", "the call was cancelled"),
    ],
)
@pytest.mark.parametrize("call", ["lookup", "load", "store"])
def test_a_tier_that_answers_wrongly_is_passed_over_likewise(
    call: str, answer: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(*_: Any, **options: Any) -> Future[Any]:
        future = Future[Any]()
        if answer == "cancelled":
            future.cancel()
            future.set_running_or_notify_cancel()
        else:
            future.set_result(Found(tuple(answer)) if call == "lookup" and answer == [] else answer)
        return future

    with tiered(MEMORY, MEMORY, retry_s=60.0, **QUIET) as store:
        if call != "store":
            save(store, OBJECTS)
        monkeypatch.setattr(inner(store, 0), call, answered)
        if call == "store":
            assert save(store, OBJECTS) == [True] * 6
        if call == "lookup":
            assert has(store, *range(6)) == [True] * 6
        assert read(store, OBJECTS) == DATA
        assert store.tiers[0].failures == 1
        assert store.outages() == {"memory": told}


def test_a_store_that_would_end_the_process_leaves_the_others_their_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tiered(MEMORY, MEMORY, **QUIET) as store:
        save(store, OBJECTS)
        for call in ("release", "delete"):
            monkeypatch.setattr(inner(store, 0), call, lambda *_: sys.exit("out of luck"))
        ticket = wait(store.lookup(KEYS, pin=True)).ticket
        assert ticket is not None
        store.release(ticket)
        with pytest.raises(SystemExit):
            wait(store.delete(KEYS[:1]))
        assert read(store, OBJECTS)[1:] == DATA[1:]


def test_a_tier_that_failed_is_not_asked_for_a_while() -> None:
    with tiered(faults(error=1.0), MEMORY, retry_s=60.0, **QUIET) as store:
        save(store, OBJECTS)
        for _ in range(3):
            assert read(store, OBJECTS) == DATA
        assert (store.tiers[0].failures, store.outages()) == (1, {"faulty": "injected error"})


def test_a_tier_is_used_again_whose_health_is_how_its_last_call_went(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So says that of all stores over a client: nobody but another call can tell that it works."""
    folder = tmp_path / "kv"
    files: Spec = {"filesystem": {"path": str(folder)}}
    with tiered(MEMORY, files, retry_s=0.05, **QUIET) as store:
        save(store, some(0))
        folder.rename(tmp_path / "away")
        folder.touch()
        save(store, some(1))
        assert store.outages().keys() == {"filesystem"}
        assert store.usage().gauges["tier1_filesystem_passed_over"] == 1
        folder.unlink()
        (tmp_path / "away").rename(folder)

        def is_back() -> bool:
            save(store, some(2))  # the files are looked at, since a lookup would be such a call
            return any(folder.rglob(f"{KEYS[2].hex()}*"))

        until(is_back, "the tier takes objects again")
        assert store.outages() == {}
        told = store.usage()
    (line,) = caplog.messages
    assert line.startswith("tier filesystem is passed over: can't")
    assert told.gauges["tier1_filesystem_passed_over"] == 0
    assert told.counters["tier1_filesystem_failures"] >= 1
    assert told.counters["tier1_filesystem_stored_bytes"] == len(DATA[0]) + len(DATA[2])


def test_the_bytes_of_each_tier_are_told() -> None:
    with tiered(MEMORY, MEMORY, **QUIET) as store:
        save(store, some(0, 1))
        wait(inner(store, 0).delete([KEYS[1]]))
        assert read(store, some(0, 1)) == DATA[:2]
        counters = store.usage().counters
    stored = len(DATA[0]) + len(DATA[1])
    for depth, loaded in enumerate(DATA[:2]):
        name = ("tier0_memory", "tier1_memory_1")[depth]
        assert counters[f"{name}_stored_bytes"] == stored
        assert counters[f"{name}_loaded_bytes"] == len(loaded)


def test_without_any_tier_it_fails_and_says_why() -> None:
    gone = faults(disconnect=[0], outage_s=60.0)
    with tiered(gone, gone) as store:
        with pytest.raises(StoreError, match="no tier of tiered can serve"):
            read(store, OBJECTS)
        assert store.health() == "faulty: injected disconnect; faulty-1: injected disconnect"
        with pytest.raises(StoreError, match="no tier"):
            find(store, KEYS)
        with pytest.raises(StoreError, match="no tier"):
            save(store, OBJECTS)
        with pytest.raises(StoreError, match="injected"):
            wait(store.delete(KEYS))


def test_a_write_that_one_tier_refuses_is_kept_by_the_other() -> None:
    with tiered(faults(error=1.0, on=["store"]), MEMORY, **QUIET) as store:
        assert save(store, OBJECTS) == [True] * 6
        assert (store.tiers[0].failures, has(inner(store, 1), 0)) == (1, [True])


def test_writing_through_is_enough_if_one_tier_has_room() -> None:
    small: Spec = {"memory": {"max_bytes": 1_000}}
    with tiered(small, MEMORY, **QUIET) as store:
        assert save(store, OBJECTS) == [True] * 6
        assert read(store, OBJECTS) == DATA


def test_one_ticket_holds_pins_in_all_tiers() -> None:
    small: Spec = {"memory": {"max_bytes": 1_001, "threads": 1}}
    with tiered(small, small, **QUIET) as store:
        save(inner(store, 0), some(0))
        save(inner(store, 1), some(1))
        found = find(store, KEYS[:2], pin=True)
        assert (found.present, found.ticket) == ((True, True), 1)
        assert save(store, some(2)) == [False]
        store.release(1)
        assert save(store, some(2)) == [True]
        store.release(1)
        store.release(7)
        assert find(store, KEYS[3:], pin=True).ticket is None


def test_a_slow_lookup_is_not_waited_for_and_its_pins_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = {"memory": {"max_bytes": 1_001, "threads": 1}}
    late: Spec = {"faulty": {"inner": slow, "delay": [0], "delay_s": 0.3, "on": ["lookup"]}}
    with tiered(MEMORY, late, lookup_s=0.05, retry_s=0.0, **QUIET) as store:
        outer = inner(store, 1)
        assert isinstance(outer, FaultyStore)
        released: list[int] = []
        monkeypatch.setattr(outer.inner, "release", released.append)
        save(outer, some(0))
        assert find(store, KEYS[:1], pin=True).present == (False,)
        assert store.tiers[1].failures == 1
        assert released == []
        until(lambda: released == [1], "the pins were given back")


def test_deleting_reaches_every_tier() -> None:
    with tiered() as store:
        save(store, OBJECTS)
        save(inner(store, 1), make_objects(1, seed=9))
        assert wait(store.delete([*KEYS[:2], *make_objects(1, seed=9), b"x" * 32])) == 3
        assert read(store, OBJECTS) == [None, None, *DATA[2:]]


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("slow", ["load", "store"])
def test_what_is_deleted_does_not_come_back_from_what_is_under_way(
    prefetch: bool, slow: str
) -> None:
    objects, late = make_objects(40), faults(delay=1.0, delay_s=0.05, on=[slow])
    tiers = (MEMORY, late) if slow == "load" else (late, MEMORY)
    with tiered(*tiers, prefetch=prefetch) as store:
        save(store, make_objects(1, seed=9))
        for _ in range(3):
            save(inner(store, 1), objects)
            find(store, list(objects))
            targets = [pieces(data) for data in objects.values()]
            loading = None if prefetch else store.load(list(objects), targets)
            assert wait(store.delete(list(objects))) == 40
            assert loading is None or len(wait(loading)) == 40
            until(lambda: store._allowance.take(256 << 20), "nothing is under way")
            store._allowance.give(256 << 20)
            assert not any(find(store, list(objects)).present)


def test_what_is_deleted_does_not_come_back_from_the_older_of_two_moves() -> None:
    """It is prefetched while it is stored, and evicted, which is over before the prefetch."""
    held, small = "tests.support.store_objects:HeldStore", {"memory": {"max_bytes": 2 * 1_001}}
    with tiered(small, held, write="on_eviction", promote=False) as store:
        save(store, some(5))
        save(inner(store, 1), some(0))
        HeldStore.gate.clear()
        assert has(store, 0) == [True]
        save(store, some(0, 1))
        save(store, some(2, 3))
        until(lambda: store.counts["demoted"] == 3 and len(store._moving) <= 1, "demoted")
        deleting = store.delete(KEYS[:1])
        futures.wait([deleting], 0.3)  # it must wait for the prefetch, so this can't be all of it
        HeldStore.gate.set()
        assert wait(deleting) == 1
        until(lambda: store._allowance.take(256 << 20), "nothing is under way")
        assert has(store, 0) == [False]


def test_what_was_read_before_it_was_deleted_is_not_kept_after() -> None:
    with tiered(MEMORY, "tests.support.store_objects:HeldStore", prefetch=False) as store:
        save(inner(store, 1), OBJECTS)
        HeldStore.gate.clear()
        loading = store.load(KEYS, [pieces(data) for data in DATA])
        assert wait(store.delete(KEYS)) == 6
        HeldStore.gate.set()
        assert wait(loading) == [True] * 6
        until(lambda: not store._moving, "nothing is under way")
        assert has(store, *range(6)) == [False] * 6


def test_what_is_read_while_it_is_being_deleted_is_not_kept_after() -> None:
    slow = faults(delay=1.0, delay_s=0.3, on=["delete"])
    with tiered(MEMORY, slow, prefetch=False) as store:
        save(inner(store, 1), OBJECTS)
        deleting = store.delete(KEYS)
        assert read(store, OBJECTS) == DATA
        assert not deleting.done()
        assert wait(deleting) == 6
        assert has(store, *range(6)) == [False] * 6


@pytest.mark.parametrize("write", ["through", "on_eviction"])
def test_hints_go_to_the_tiers_that_are_written(write: str) -> None:
    hints = [Hints(namespace="a"), Hints(namespace="b"), Hints()]
    with tiered(write=write) as store:
        call = store.store(KEYS[:3], [pieces(data) for data in DATA[:3]], hints=hints)
        assert wait(call) == [True] * 3
        held = [wait(cast(Namespaced, tier.store).namespaces()) for tier in store.tiers]
        assert held[0].keys() == {"a", "b", ""}
        assert held[1].keys() == ({"a", "b", ""} if write == "through" else set())


def test_time_to_live_binds_only_without_copies() -> None:
    with tiered() as store:
        assert not store.capabilities.expires, "what was promoted would stay"
    with tiered(**QUIET) as store:
        assert store.capabilities.expires
        call = store.store(KEYS[:1], [pieces(DATA[0])], hints=[Hints(ttl_s=0.1)])
        assert wait(call) == [True]
        until(lambda: has(store, 0) == [False], "the object expires in both tiers")


def test_a_prefix_may_lie_in_several_tiers() -> None:
    with tiered(MEMORY, MEMORY, MEMORY, **QUIET) as store:
        for depth, indices in enumerate([(0, 3, 5), (1,), (2, 4)]):
            save(inner(store, depth), some(*indices))
        assert find(store, KEYS, prefix=True).present == (True,) * 6
        wait(inner(store, 2).delete(KEYS[2:3]))
        assert find(store, KEYS, prefix=True).present == (True, True) + (False,) * 4
        assert find(store, KEYS).present == (True, True, False, True, True, True)
        assert find(store, KEYS[2:], prefix=True).present == (False,) * 4
    assert not TieredStore("tiered", tiers=[MEMORY, faults()]).capabilities.prefix


def test_what_no_tier_has_any_more_is_told() -> None:
    small: Spec = {"memory": {"max_bytes": 4096, "threads": 1}}
    told = list[bytes]()
    with tiered(small, MEMORY, **QUIET) as store:
        store.on_forget = told.extend
        assert save(store, OBJECTS) == [True] * 6
        assert has(inner(store, 0), *range(6)).count(False) > 1, "evicted, but kept below"
        wait(inner(store, 1).delete(KEYS))
        save(inner(store, 0), make_objects(6, seed=5))
        until(lambda: len(told) > 1, "what was only in the first tier is told")
        assert not any(find(store, list(told)).present)
    assert not isinstance(TieredStore("tiered", tiers=[MEMORY, faults()]), Forgetting)


def test_usage_is_that_of_all_tiers() -> None:
    with tiered() as store:
        save(store, OBJECTS)
        used = store.usage()
        assert (used.objects, used.num_bytes) == (12, 12 * 1_001)
        assert used.capacity == 2 << 20


@pytest.mark.parametrize("seed", range(4))
def test_under_faults_a_load_is_right_or_a_miss_and_nothing_leaks(seed: int) -> None:
    draw, objects = random.Random(seed), make_objects(60, 3_000, seed)
    tiers = [
        {"faulty": {"inner": {"memory": {"max_bytes": size}}, "seed": seed + size, **options}}
        for size, options in (
            (60_000, {"error": 0.002, "delay": 0.01, "delay_s": 0.01, "lose": 0.1}),
            (100_000, {"disconnect": 0.005, "outage_s": 0.02, "partial": 0.1}),
            (1 << 20, {"error": 0.002, "lose": 0.02}),
        )
    ]
    before = threading.active_count()
    with tiered(*tiers, retry_s=0.01, copy_bytes=50_000) as store:
        right = failed = 0
        for _ in range(150):
            part = dict(draw.sample(list(objects.items()), 20))
            try:
                if draw.random() < 0.4:
                    save(store, part)
                store.release(find(store, list(part), pin=True).ticket or 0)
                found = read(store, part)
            except StoreError:
                failed += 1
                continue
            assert all(f in (None, d) for f, d in zip(found, part.values(), strict=True))
            right += len(found) - found.count(None)
        assert right > 1_000 > 300 > failed
        assert min(tier.hits for tier in store.tiers) > 0
        assert store.counts["promoted"] > 0
        until(lambda: store._allowance.take(50_000), "every byte of copies was given back")
    assert threading.active_count() == before


def test_closing_ends_what_is_under_way() -> None:
    before = threading.active_count()
    store = TieredStore("tiered", tiers=[MEMORY, faults(delay=1.0, delay_s=60.0)])
    store.open()
    waiting = store.load(KEYS[:1], [pieces(DATA[0])])
    store.close()
    assert wait(waiting) == [False]
    store.close()
    assert threading.active_count() == before
    with pytest.raises(StoreError, match="not open"):
        store.lookup(KEYS)


def test_a_tier_that_fails_to_close_keeps_nothing_open_and_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.active_count()
    held = faults(delay=1.0, delay_s=60.0)
    store = TieredStore("tiered", tiers=[MEMORY, held, MEMORY], retry_s=60.0)
    store.open()
    waiting = store.load(KEYS[:1], [pieces(DATA[0])])
    broken = inner(store, 0)
    close = broken.close

    def fail() -> None:
        close()
        raise OSError("it does not like to be closed")

    monkeypatch.setattr(broken, "close", fail)
    with pytest.raises(OSError, match="does not like"):
        store.close()
    assert waiting.done()
    assert [tier.store.health() for tier in store.tiers] == ["not open"] * 3
    assert threading.active_count() == before


def test_a_tier_that_does_not_open_closes_the_others() -> None:
    before = threading.active_count()
    store = TieredStore("tiered", tiers=[MEMORY, {"memory": {"max_bytes": 1 << 60}}])
    with pytest.raises(ConfigError, match="max_bytes"):
        store.open()
    assert threading.active_count() == before
    assert [tier.store.health() for tier in store.tiers] == ["not open", "not open"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tiers": []}, "tiers must be a list of specs"),
        ({"tiers": "memory"}, "tiers must be a list of specs"),
        ({"tiers": ["memory"], "write": "back"}, "write must be through or on_eviction"),
        ({"tiers": ["memory"], "lookup_s": 0}, "lookup_s: must be above 0"),
        ({"tiers": ["memory", "no-such-store"]}, "unknown store"),
        ({"tiers": ["faulty", "memory"], "write": "on_eviction"}, "does not tell what it evicts"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TieredStore("x", **options)


def test_specs_nest_as_text() -> None:
    store = load_store('tiered:{"tiers": ["memory", {"faulty": {"inner": "memory"}}]}')
    assert isinstance(store, TieredStore)
    assert [tier.name for tier in store.tiers] == ["memory", "faulty"]
