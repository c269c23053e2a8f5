"""A store made of blocking calls: nothing waits where it need not, nothing is done too early."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.threaded import ThreadedStore
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import find, make_objects, pieces, read, save, wait


class Gated:
    """A dict as a backend; calls on a key in `held` wait until the test lets them go."""

    capabilities = StoreCapabilities(persistent=False, shared=False, pins=False)

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.held: set[bytes] = set()
        self.broken: set[bytes] = set()
        self.begun: list[bytes] = []
        self.entered, self.go_on = threading.Semaphore(0), threading.Event()
        self.closed = 0

    def open(self) -> None: ...

    def close(self) -> None:
        self.closed += 1

    def health(self) -> str | None:
        return None

    def usage(self) -> Usage:
        return Usage(len(self.kept))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.kept for key in keys]

    def get(self, key: bytes, target: Pieces) -> bool:
        self._pass(key)
        if key not in self.kept:
            return False
        data = self.kept[key]
        for piece in target:
            piece[:], data = data[: len(piece)], data[len(piece) :]
        return True

    def put(self, key: bytes, source: Pieces) -> bool:
        self._pass(key)
        self.kept[key] = b"".join(source)
        return True

    def remove(self, keys: Sequence[bytes]) -> int:
        return sum(self.kept.pop(key, None) is not None for key in keys)

    def _pass(self, key: bytes) -> None:
        self.begun.append(key)
        if key in self.broken:
            raise StoreError("broken")
        if key in self.held:
            self.entered.release()
            assert self.go_on.wait(30)


@pytest.fixture
def backend() -> Gated:
    return Gated()


@pytest.fixture
def store(backend: Gated) -> Iterator[ThreadedStore]:
    store = ThreadedStore("gated", backend, threads=2)
    store.open()
    yield store
    backend.go_on.set()
    store.close()


def test_threads_are_needed(backend: Gated) -> None:
    with pytest.raises(ConfigError, match="threads: must be at least 1, not 0"):
        ThreadedStore("gated", backend, threads=0)


class Unfinished:
    """As far as its author got."""

    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False)

    def open(self) -> None:
        """Nothing to do."""


class Declares(Gated):
    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False, claims=True)


class Undeclared(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities: Any = {"pins": False}


class Awaited(Gated):
    async def get(self, key: bytes, target: Pieces) -> bool:  # type: ignore[override]
        return False


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (None, "box's back end, a NoneType, is not a Backend: it lacks capabilities, close"),
        (Unfinished(), "lacks close, contains, get, health, put, remove, usage"),
        (Gated, "box's back end, a type, is the class Gated, not an object of it"),
        (Declares(), "box's back end, a Declares, declares claims, but lacks claim"),
        (Awaited(), "has a coroutine, get, but its calls block; a client that is asynchronous"),
        (Undeclared(), "a Undeclared, declares no valid capabilities: {'pins': False}"),
    ],
)
def test_what_is_no_back_end_is_told(backend: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        ThreadedStore("box", backend)


@pytest.mark.parametrize("started", [0, 1])
def test_threads_that_can_not_be_started(
    store: ThreadedStore, backend: Gated, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a call that was refused no target is touched; with one thread it takes longer."""
    objects = make_objects(6)
    assert save(store, objects) == [True] * 6
    first, start = next(iter(objects)), threading.Thread.start
    targets = [bytearray(len(data)) for data in objects.values()]
    left = [started]

    def begin(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    backend.held.add(first)
    if not started:
        with pytest.raises(RuntimeError):
            store.load([*objects], [[memoryview(target)] for target in targets])
        monkeypatch.undo()
        backend.held.clear()
        assert read(store, {first: objects[first]}) == [objects[first]]
        assert not any(map(any, targets))
        return
    done = store.load([*objects], [[memoryview(target)] for target in targets])
    assert backend.entered.acquire(timeout=30)
    assert not done.done()
    backend.go_on.set()
    assert wait(done) == [True] * 6
    assert targets == [*objects.values()]


def test_lookups_and_loads_never_wait_behind_what_is_stored(
    store: ThreadedStore, backend: Gated
) -> None:
    objects, slow = make_objects(3), make_objects(9, seed=1)
    save(store, objects)
    backend.held |= set(slow)
    stored = store.store(list(slow), [pieces(data) for data in slow.values()])
    assert backend.entered.acquire(timeout=30)
    assert read(store, objects) == list(objects.values())
    assert find(store, list(objects)).present == (True,) * 3
    assert not stored.done()
    backend.go_on.set()
    assert wait(stored) == [True] * 9


def test_cancelling_stops_what_has_not_begun_and_waits_for_what_has(
    store: ThreadedStore, backend: Gated
) -> None:
    objects = make_objects(20)
    backend.held |= set(objects)
    stored = store.store(list(objects), [pieces(data) for data in objects.values()])
    for _ in range(2):
        assert backend.entered.acquire(timeout=30)
    assert not stored.cancel()
    assert not stored.done(), "two threads still touch buffers"
    backend.go_on.set()
    answers = wait(stored)
    assert answers == [True, True] + [False] * 18
    assert len(backend.kept) == 2


def test_cancelling_what_waits_for_a_thread_is_done_at_once(
    store: ThreadedStore, backend: Gated
) -> None:
    first, second = make_objects(2), make_objects(2, seed=1)
    backend.held |= set(first)
    running = store.store(list(first), [pieces(data) for data in first.values()])
    waiting = store.store(list(second), [pieces(data) for data in second.values()])
    waiting.cancel()
    assert wait(waiting) == [False, False]
    backend.go_on.set()
    assert wait(running) == [True, True]


def test_an_error_is_the_answer_once_no_thread_touches_a_buffer(
    store: ThreadedStore, backend: Gated
) -> None:
    objects = make_objects(20)
    keys = list(objects)
    backend.held, backend.broken = {keys[0]}, {keys[1]}
    stored = store.store(keys, [pieces(data) for data in objects.values()])
    assert backend.entered.acquire(timeout=30)
    with pytest.raises(TimeoutError):
        stored.result(0.05)
    backend.go_on.set()
    with pytest.raises(StoreError, match="broken"):
        wait(stored)
    assert backend.begun == keys[:2], "what has not begun is left alone"


def test_closing_waits_for_what_runs_and_gives_up_the_rest(
    store: ThreadedStore, backend: Gated
) -> None:
    objects = make_objects(20)
    backend.held |= set(list(objects)[:2])
    stored = store.store(list(objects), [pieces(data) for data in objects.values()])
    later = store.store([bytes(32)], [pieces(b"x")])
    assert backend.entered.acquire(timeout=30)
    closing = threading.Thread(target=store.close)
    closing.start()
    assert wait(later) == [False]
    backend.go_on.set()
    closing.join(30)
    assert wait(stored) == [True, True] + [False] * 18
    store.close()
    assert backend.closed == 1
    with pytest.raises(StoreError, match="store gated is not open"):
        store.delete([])


class Batches(Gated):
    """Takes many objects in one call, and may answer for too few."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.left_out = 0

    def get_many(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> list[bool]:
        self.calls.append(len(keys))
        answers = [self.get(*item) for item in zip(keys, targets, strict=True)]
        return answers[self.left_out :]

    def put_many(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> list[bool]:
        self.calls.append(len(keys))
        return [self.put(*item) for item in zip(keys, sources, strict=True)]


def test_a_prompt_is_one_call_of_a_backend_that_takes_many() -> None:
    backend = Batches()
    store = ThreadedStore("batches", backend, threads=2)
    store.open()
    objects = make_objects(40, 1000)
    assert save(store, objects) == [True] * 40
    assert read(store, objects) == list(objects.values())
    assert backend.calls == [40, 40]
    many = make_objects(300, 10, seed=1)
    save(store, many)
    assert sorted(backend.calls[2:]) == [44, 128, 128]
    backend.left_out = 1
    with pytest.raises(ValueError, match="answered for 39 of 40 objects"):
        read(store, objects)
    store.close()
