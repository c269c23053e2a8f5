"""The memory store: exact LRU within its bytes, pins that end, and bytes that never mix."""

import ctypes
import errno
import mmap
import os
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Evicting, Hints, Pieces, Store
from kvbaton.connectors.stores import memory
from kvbaton.connectors.stores.arena_copies import LARGE_BYTES, copy
from kvbaton.connectors.stores.memory import FreeList, MemoryStore
from kvbaton.errors import ConfigError, StoreError

TIMEOUT_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def body(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def cut(data: bytes | bytearray, *at: int) -> list[memoryview]:
    view, ends = memoryview(data), [*at, len(data)]
    return [view[a:b] for a, b in zip([0, *at], ends, strict=True)]


def save(store: Store, *items: tuple[int, bytes]) -> list[bool]:
    numbers, bodies = [key(n) for n, _ in items], [cut(data) for _, data in items]
    return store.store(numbers, bodies).result(TIMEOUT_S)


def load(store: Store, number: int, size: int) -> bytes | None:
    target = bytearray(size)
    (there,) = store.load([key(number)], [cut(target)]).result(TIMEOUT_S)
    return bytes(target) if there else None


def present(store: Store, numbers: Sequence[int]) -> list[int]:
    found = store.lookup([key(n) for n in numbers]).result(TIMEOUT_S)
    return [n for n, there in zip(numbers, found.present, strict=True) if there]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[MemoryStore]:
    """Room for four objects of 100 bytes."""
    store = MemoryStore("host", max_bytes=400, pin_seconds=10, clock=clock)
    store.open()
    yield store
    store.close()


def fill(store: MemoryStore, count: int = 4) -> None:
    for n in range(count):  # those of one call may be stored in any order
        assert save(store, (n, body(n, 100))) == [True]


def test_it_is_found_by_name_and_declares_what_it_can() -> None:
    store = load_store('memory:{"max_bytes": 1000}')
    assert isinstance(store, MemoryStore)
    assert isinstance(store, Evicting)
    can = store.capabilities
    assert (can.pins, can.deletes, can.persistent, can.shared) == (True, True, False, False)


def test_the_least_recently_used_leaves_first(store: MemoryStore) -> None:
    fill(store)
    assert load(store, 0, 100) is not None  # use: to load,
    assert save(store, (1, body(1, 100))) == [True]  # to store again,
    ticket = store.lookup([key(2)], pin=True).result(TIMEOUT_S).ticket  # to pin
    assert ticket is not None
    store.release(ticket)
    assert present(store, range(4)) == [0, 1, 2, 3]  # to be looked at is none
    for n, left in ((4, [0, 1, 2, 4]), (5, [1, 2, 4, 5]), (6, [2, 4, 5, 6])):
        assert save(store, (n, body(n, 100))) == [True]
        assert present(store, range(7)) == left
    assert store.usage().num_bytes == 400


def test_no_more_is_evicted_than_must_be(store: MemoryStore) -> None:
    fill(store)
    assert save(store, (4, body(4, 101))) == [True]
    assert present(store, range(5)) == [2, 3, 4]
    assert save(store, (5, body(5, 401))) == [False]
    assert present(store, range(6)) == [2, 3, 4]


def test_what_is_pinned_stays_until_it_is_released(store: MemoryStore) -> None:
    fill(store)
    found = store.lookup([key(0), key(9), key(1)], pin=True).result(TIMEOUT_S)
    assert found.present == (True, False, True)
    again = store.lookup([key(1)], pin=True).result(TIMEOUT_S)
    assert found.ticket is not None
    assert again.ticket is not None
    for n in range(4, 8):
        assert save(store, (n, body(n, 100))) == [True]
    assert present(store, range(8)) == [0, 1, 6, 7]
    assert save(store, (8, body(8, 201))) == [False]
    store.release(found.ticket)
    store.release(found.ticket)
    store.release(-1)
    assert save(store, (8, body(8, 300))) == [True]
    assert present(store, range(9)) == [1, 8]
    store.release(again.ticket)
    assert save(store, (9, body(9, 400))) == [True]
    assert store.usage().num_bytes == 400


def test_a_pin_that_nobody_releases_ends(store: MemoryStore, clock: Clock) -> None:
    fill(store)
    ticket = store.lookup([key(n) for n in range(4)], pin=True).result(TIMEOUT_S).ticket
    clock.now = 9.9
    assert save(store, (4, body(4, 100))) == [False]
    clock.now = 10.0
    assert save(store, (4, body(4, 100))) == [True]
    assert ticket is not None
    store.release(ticket)
    assert save(store, (5, body(5, 400))) == [True]


def test_deleting_what_is_pinned_hides_it_and_frees_it_at_release(store: MemoryStore) -> None:
    fill(store)
    ticket = store.lookup([key(0)], pin=True).result(TIMEOUT_S).ticket
    assert store.delete([key(0), key(0), key(9)]).result(TIMEOUT_S) == 1
    assert present(store, range(4)) == [1, 2, 3]
    assert store.usage().num_bytes == 400
    assert save(store, (0, body(5, 100))) == [True]
    assert load(store, 0, 100) == body(5, 100)
    assert ticket is not None
    store.release(ticket)
    assert store.usage().num_bytes == 300
    assert store.usage().objects == 3


def test_any_free_bytes_can_be_used_however_scattered(store: MemoryStore) -> None:
    assert all(save(store, *((n, body(n, 20)) for n in range(20))))
    assert store.delete([key(n) for n in range(0, 20, 2)]).result(TIMEOUT_S) == 10
    assert save(store, (50, body(50, 200))) == [True]
    assert load(store, 50, 200) == body(50, 200)
    assert all(load(store, n, 20) == body(n, 20) for n in range(1, 20, 2))


def test_evicted_objects_are_told_with_their_bytes(store: MemoryStore) -> None:
    told: list[tuple[bytes, bytes]] = []

    def note(gone: bytes, pieces: Pieces) -> None:
        told.append((gone, b"".join(pieces)))

    store.on_evict = note
    fill(store)
    store.delete([key(3)]).result(TIMEOUT_S)
    assert save(store, (4, body(4, 250))) == [True]
    assert told == [(key(n), body(n, 100)) for n in (0, 1)]


def test_the_arena_can_be_pinned(store: MemoryStore) -> None:
    fill(store, 1)
    memory = store.backend.memory
    assert (memory.num_bytes, memory.device) == (400, "cpu")
    assert body(0, 100) in ctypes.string_at(memory.address, memory.num_bytes)


def test_after_close_nothing_is_left(store: MemoryStore) -> None:
    fill(store)
    store.close()
    assert store.health() == "not open"
    with pytest.raises(StoreError, match="not open"):
        store.backend.memory  # noqa: B018
    with pytest.raises(StoreError, match="not open"):
        store.load([key(0)], [cut(bytearray(100))])
    store.open()
    assert store.health() is None
    assert present(store, range(4)) == []
    assert store.usage().num_bytes == 0


def test_an_impossible_size_is_refused_by_name() -> None:
    store = MemoryStore("host", max_bytes=1 << 60)
    with pytest.raises(ConfigError, match="max_bytes: can't map"):
        store.open()


class SmallPages(mmap.mmap):
    """Of a kernel that was built without larger ones."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", SmallPages)
    store = MemoryStore("host", max_bytes=4096)
    store.open()
    assert save(store, (1, b"body")) == [True]
    assert load(store, 1, 4) == b"body"
    store.close()


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"max_bytes": -1}, {"pin_seconds": 0}, {"tenant_max_bytes": 0}]
)
def test_what_no_machine_could_do_is_refused_before_it_is_opened(options: dict[str, int]) -> None:
    """A model is loaded in between. Pins that end at once would be none."""
    (name,) = options
    with pytest.raises(ConfigError, match=f"^{name}: must be"):
        MemoryStore("host", **options)  # type: ignore[arg-type]


def test_many_threads_never_mix_bytes_and_leak_none() -> None:
    """Far more objects than fit, all sizes, evicted, deleted and pinned while others copy them."""
    store = MemoryStore("host", max_bytes=600_000, threads=4)
    store.open()
    sizes = [1, 4096, 30_000, LARGE_BYTES + 1]
    bodies = {n: body(n, sizes[n % 4]) for n in range(24)}
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            n = rng.randrange(24)
            step = rng.randrange(8)
            if step < 4:
                save(store, (n, bodies[n]), (n, bodies[n]))
            elif step < 6 and load(store, n, len(bodies[n])) not in (None, bodies[n]):
                wrong.append(n)
            elif step == 6:
                ticket = store.lookup([key(n)], pin=True).result(TIMEOUT_S).ticket
                if ticket is not None:
                    if load(store, n, len(bodies[n])) not in (None, bodies[n]):
                        wrong.append(n)
                    store.release(ticket)
            else:
                store.delete([key(n)]).result(TIMEOUT_S)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    store.delete([key(n) for n in range(24)]).result(TIMEOUT_S)
    assert (store.usage().objects, store.usage().num_bytes) == (0, 0)
    assert save(store, (99, bytes(600_000))) == [True], "a hold was leaked"
    store.close()


class Held:
    """Stops copies of several pieces after the first one, until the test lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(memory, "copy", self._copy)

    def _copy(self, targets: Iterable[memoryview], sources: Iterable[memoryview]) -> None:
        copy(self._stop(targets), self._stop(sources))

    def _stop(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for index, piece in enumerate(pieces):
            if index == 1:
                self.reached.set()
                assert self.go_on.wait(TIMEOUT_S)
            yield piece


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def test_nothing_is_seen_before_its_bytes_are_there(store: MemoryStore, held: Held) -> None:
    stored = store.store([key(1)], [cut(body(1, 100), 50)])
    assert held.reached.wait(TIMEOUT_S)
    assert present(store, [1]) == []
    assert load(store, 1, 100) is None
    again = store.store([key(1)], [cut(body(1, 100))])
    with pytest.raises(TimeoutError):
        again.result(0.05)
    held.go_on.set()
    assert stored.result(TIMEOUT_S) == again.result(TIMEOUT_S) == [True]
    assert load(store, 1, 100) == body(1, 100)
    assert store.usage().num_bytes == 100


def test_a_batch_that_ends_half_way_keeps_nobody_waiting(store: MemoryStore) -> None:
    """Of a GPU's blocks some are taken before another one makes room, which others may fail."""

    def fail(key: bytes, pieces: Pieces) -> None:
        raise MemoryError("no room for a copy")

    fill(store, 3)
    store.on_evict = fail
    with pytest.raises(MemoryError):
        store.backend.put_many([key(4), key(5)], [cut(bytes(100))] * 2, [Hints()] * 2)
    assert save(store, (4, body(4, 100))) == [True]
    assert load(store, 4, 100) == body(4, 100)
    assert present(store, range(6)) == [0, 1, 2, 4]


def test_deleting_what_is_being_stored_leaves_nothing(store: MemoryStore, held: Held) -> None:
    stored = store.store([key(1)], [cut(body(1, 400), 50)])
    assert held.reached.wait(TIMEOUT_S)
    assert store.delete([key(1)]).result(TIMEOUT_S) == 1
    assert save(store, (2, body(2, 1))) == [False]
    held.go_on.set()
    assert stored.result(TIMEOUT_S) == [False]
    assert save(store, (2, body(2, 400))) == [True]


def test_bytes_stay_while_they_are_loaded(store: MemoryStore, held: Held) -> None:
    assert save(store, (1, body(1, 400))) == [True]
    data = bytearray(400)
    loaded = store.load([key(1)], [cut(data, 200)])
    assert held.reached.wait(TIMEOUT_S)
    assert save(store, (2, body(2, 400))) == [False]
    store.delete([key(1)]).result(TIMEOUT_S)
    assert save(store, (3, body(3, 400))) == [False]
    held.go_on.set()
    assert loaded.result(TIMEOUT_S) == [True]
    assert data == body(1, 400)
    assert save(store, (3, body(3, 400))) == [True]


class Model:
    """A dict with LRU eviction by bytes: what the store must do, without threads or an arena."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sizes: OrderedDict[int, int] = OrderedDict()
        self.pins: dict[int, tuple[float, list[int]]] = {}

    def pinned(self, n: int) -> bool:
        return any(n in numbers for _, numbers in self.pins.values())

    def store(self, n: int, size: int) -> bool:
        if n in self.sizes:
            self.sizes.move_to_end(n)
            return True
        if size > self.capacity - sum(s for m, s in self.sizes.items() if self.pinned(m)):
            return False
        while sum(self.sizes.values()) + size > self.capacity:
            del self.sizes[next(m for m in self.sizes if not self.pinned(m))]
        self.sizes[n] = size
        return True


NUMBER = st.integers(0, 7)
STEP = st.one_of(
    st.tuples(st.just("store"), NUMBER),
    st.tuples(st.just("load"), NUMBER),
    st.tuples(st.just("pin"), st.lists(NUMBER, max_size=3)),
    st.tuples(st.just("release"), st.integers(0, 3)),
    st.tuples(st.just("delete"), NUMBER),
    st.tuples(st.just("wait"), st.integers(1, 6)),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(STEP, min_size=10, max_size=50))
def test_it_behaves_like_a_dict_with_lru_eviction(steps: list[tuple[str, int]]) -> None:
    clock, model = Clock(), Model(100)
    store = MemoryStore("host", max_bytes=100, pin_seconds=10, clock=clock, threads=1)
    store.open()
    tickets: list[int] = []
    for what, argument in steps:
        run_step(store, model, clock, tickets, what, argument)
        assert present(store, range(8)) == sorted(model.sizes)
    store.close()


def run_step(
    store: MemoryStore, model: Model, clock: Clock, tickets: list[int], what: str, argument: object
) -> None:
    for ticket in [t for t, (end, _) in model.pins.items() if end <= clock.now]:
        del model.pins[ticket]
    if isinstance(argument, list):
        found = store.lookup([key(n) for n in argument], pin=True).result(TIMEOUT_S)
        hits = [n for n in argument if n in model.sizes]
        assert found.present == tuple(n in model.sizes for n in argument)
        if found.ticket is not None:
            tickets.append(found.ticket)
            model.pins[found.ticket] = (clock.now + 10, hits)
        for n in hits:
            model.sizes.move_to_end(n)
        return
    assert isinstance(argument, int)
    n, data = argument, body(argument, argument * 13)
    if what == "store":
        assert save(store, (n, data)) == [model.store(n, len(data))]
    elif what == "load":
        assert load(store, n, len(data)) == (data if n in model.sizes else None)
        if n in model.sizes:
            model.sizes.move_to_end(n)
    elif what == "release" and n < len(tickets):
        store.release(tickets[n])
        model.pins.pop(tickets[n], None)
    elif what == "delete" and not model.pinned(n):
        assert store.delete([key(n)]).result(TIMEOUT_S) == int(model.sizes.pop(n, None) is not None)
    elif what == "wait":
        clock.now += n


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 60), max_size=40), st.randoms(use_true_random=False))
def test_extents_never_overlap_and_none_is_lost(sizes: list[int], rng: random.Random) -> None:
    free, taken = FreeList(100), list[list[tuple[int, int]]]()
    for size in sizes:
        if size > free.num_bytes:
            free.give(taken.pop(rng.randrange(len(taken))))
            continue
        taken.append(free.take(size))
        assert sum(length for _, length in taken[-1]) == size
        used = [at for run in taken for start, n in run for at in range(start, start + n)]
        assert len(used) == len(set(used)) == 100 - free.num_bytes
        assert all(0 <= at < 100 for at in used)
    for run in taken:
        free.give(run)
    assert free.take(100) == [(0, 100)]


def save_with(store: MemoryStore, hints: Mapping[int, Hints], size: int = 10) -> list[bool]:
    data = [[memoryview(body(n, size))] for n in hints]
    keys = [key(n) for n in hints]
    return store.store(keys, data, hints=list(hints.values())).result(TIMEOUT_S)


def test_hints_choose_among_the_oldest(clock: Clock) -> None:
    """Among the oldest eighth: the least important, then what fewer share, then the deepest."""
    store = MemoryStore("host", max_bytes=400, threads=1, clock=clock)
    told: list[bytes] = []
    store.on_forget = told.extend
    store.open()
    oldest = [
        Hints(depth=1, uses=2),
        Hints(depth=9, uses=2),
        Hints(depth=2, uses=1),
        Hints(depth=1, uses=9, priority=3),
        Hints(depth=0, uses=2, priority=-1),
    ]
    assert save_with(store, dict(enumerate(oldest + [Hints(uses=99)] * 35))) == [True] * 40
    for n, gone in enumerate((3, 2, 1, 0)):
        assert save_with(store, {100 + n: Hints()}) == [True]
        assert told[n] == key(gone), n
    assert store.usage().counters == {"evicted_objects": 4, "expired_objects": 0}
    store.close()


def test_a_tenant_makes_room_among_its_own(clock: Clock) -> None:
    store = MemoryStore("host", max_bytes=100, tenant_max_bytes=30, threads=1, clock=clock)
    store.open()
    assert save_with(store, {0: Hints(tenant="a"), 1: Hints(tenant="b"), 2: Hints()}) == [True] * 3
    for n in range(3, 8):
        assert save_with(store, {n: Hints(tenant="a")}) == [True]
    assert present(store, range(8)) == [1, 2, 5, 6, 7]
    assert store.usage().tenants == {"a": 30, "b": 10}
    assert save_with(store, {8: Hints(tenant="a")}, 31) == [False]
    assert present(store, range(8)) == [1, 2, 5, 6, 7]
    assert store.delete([key(5), key(6), key(7)]).result(TIMEOUT_S) == 3
    assert store.usage().tenants == {"b": 10}
    store.close()


def test_what_has_expired_goes_before_all_others(clock: Clock) -> None:
    store = MemoryStore("host", max_bytes=40, threads=1, clock=clock)
    told: list[bytes] = []
    store.on_forget = told.extend
    store.open()
    hints = {0: Hints(), 1: Hints(ttl_s=5), 2: Hints(ttl_s=50), 3: Hints(ttl_s=5)}
    assert save_with(store, hints) == [True] * 4
    clock.now += 5
    assert save_with(store, {4: Hints()}) == [True]
    assert present(store, range(5)) == [0, 2, 4]
    assert sorted(told) == sorted([key(1), key(3)])
    assert store.usage().counters == {"evicted_objects": 0, "expired_objects": 2}
    assert store.usage().num_bytes == 30
    store.close()


def test_what_was_evicted_before_it_expired_is_forgotten(clock: Clock) -> None:
    """A time to live of days must not keep a note of all that was stored in them."""
    store = MemoryStore("host", max_bytes=100_000, clock=clock)
    store.open()
    for number in range(6_000):
        if number == 2_500:
            before = sys.getallocatedblocks()
        store.backend.put(key(number), cut(bytes(1000)), Hints(ttl_s=1e6))
    grown = sys.getallocatedblocks() - before
    assert store.usage().objects == 100
    clock.now = 2e6
    assert present(store, range(5_900, 6_000)) == []
    store.close()
    assert grown < 3_000
