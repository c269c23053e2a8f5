"""LMCache in this process, and chunks of its server behind the store's back."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Store
from kvbaton.connectors.stores import chunks
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import find, make_objects, read, save
from tests.support.store_servers import CHUNK_BYTES, Server, lmcache_server, need, running
from tests.support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler.*:DeprecationWarning")


@pytest.fixture(scope="module")
def lmcache() -> Any:
    """The module, which can't be imported without LMCache."""
    need("lmcache", find_spec("lmcache"), "pip install 'kvbaton[lmcache]'")
    return import_module("kvbaton.connectors.stores.lmcache")


@pytest.fixture
def engine(lmcache: Any) -> Iterator[Any]:
    store = load_store(f'lmcache:{{"max_bytes": {64 * CHUNK_BYTES}, "chunk_bytes": {CHUNK_BYTES}}}')
    store.open()
    yield store
    store.close()


def test_the_process_stays_as_it_was(engine: Store) -> None:
    assert gc.isenabled()
    assert multiprocessing.get_start_method(allow_none=True) is None


def test_a_corrupt_object_is_a_miss(lmcache: Any, engine: Any) -> None:
    objects = make_objects(2, 3 * CHUNK_BYTES, 50)
    [key, _] = objects
    assert all(save(engine, objects))

    def spoil(slots: list[memoryview]) -> None:
        slots[2][77] ^= 1

    engine.backend._engine.retrieve(chunks.tokens_of(key, chunks=4), move=spoil)
    assert read(engine, objects) == [None, objects[list(objects)[1]]]
    assert find(engine, list(objects)).present == (False, True)
    assert save(engine, objects) == [True, True]
    assert read(engine, objects) == list(objects.values())


def test_a_full_engine(engine: Store) -> None:
    assert save(engine, make_objects(1, 64 * CHUNK_BYTES, 60)) == [False], "larger than the engine"
    objects = make_objects(40, 3 * CHUNK_BYTES - 100, 61)
    assert all(save(engine, objects)), "old ones make room"
    loaded = read(engine, objects)
    assert {None} < set(loaded) <= {None, *objects.values()}
    assert loaded[-1] == list(objects.values())[-1]


@pytest.mark.usefixtures("lmcache")
def test_unknown_settings() -> None:
    with pytest.raises(ConfigError, match="no_such"):
        load_store('lmcache:{"options": {"no_such": 1}}').open()
    with pytest.raises(ConfigError, match="chunk_bytes"):
        load_store('lmcache:{"chunk_bytes": 1000}')


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(lmcache_server(1 / 16)) as server:
        yield server


class Instance:
    """Stands for one that the server knows, of which it has nothing."""

    def hits(self, wanted: Sequence[Any]) -> list[int]:
        return [0] * len(wanted)

    def is_old(self) -> bool:
        return False


class Emptied(deque[Any]):
    """Another thread has taken the last one since this one looked."""

    def __bool__(self) -> bool:
        return True


def test_an_idle_instance_that_another_thread_took_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "kvbaton.connectors.stores.lmcache"
    for stood_in in (name, f"{name}_server"):  # without LMCache they can't be imported
        monkeypatch.setitem(sys.modules, stood_in, ModuleType(stood_in))
    del sys.modules[f"{name}_server"]
    module, made = import_module(f"{name}_server"), list[Instance]()

    def make(*_: object) -> Instance:
        made.append(Instance())
        return made[-1]

    monkeypatch.setattr(module, "LMCacheInstance", make)
    backend = module.LMCacheServerBackend("tcp://127.0.0.1:1", CHUNK_BYTES, 1.0)
    backend._idle = Emptied()
    for _ in range(2):
        assert backend.contains([bytes(32)]) == [False]
    assert len(made) == 1, "the second time it was idle"
    assert backend.health() is None


def test_a_corrupt_chunk_of_the_server(server: Server) -> None:
    objects = make_objects(2, 2 * CHUNK_BYTES, 70)
    with server.store() as store:
        assert all(save(store, objects))
        spoil_in_memory(server, next(iter(objects.values()))[-500:-400])
        assert read(store, objects) == [None, list(objects.values())[1]]


def spoil_in_memory(server: Server, some: bytes) -> None:
    """Change the first of these bytes in whichever file of the server's memory has them."""
    for path in Path(f"/proc/{server.process.pid}/map_files").iterdir():
        if "/dev/shm/" in str(path.readlink()):
            with path.open("r+b") as memory:
                start = memory.read().find(some)
                if start >= 0:
                    memory.seek(start)
                    memory.write(bytes([some[0] ^ 1]))
                    return
    pytest.fail("the server does not keep these bytes")


def test_a_server_without_room(server: Server) -> None:
    with server.store() as store:
        assert save(store, make_objects(1, 70 << 20, 80)) == [False]
        objects = make_objects(150, 8 * CHUNK_BYTES, 81)
        kept = save(store, objects)
        loaded = read(store, objects)
        assert any(kept)
        for data, found in zip(objects.values(), loaded, strict=True):
            assert found in (None, data)


def test_locks_are_given_back(server: Server) -> None:
    """Whatever was read can be evicted afterwards, so new objects find room again and again."""
    with server.store() as store:
        for seed in range(90, 96):
            objects = make_objects(30, 8 * CHUNK_BYTES, seed)
            # The server makes room behind our backs, and says no until there is some.
            until(lambda: all(save(store, objects)), "room for others")  # noqa: B023
            assert all(find(store, list(objects)).present)
            assert read(store, objects) == list(objects.values())


@pytest.mark.usefixtures("lmcache")
def test_nobody_listens() -> None:
    store = load_store('lmcache_server:{"url": "tcp://127.0.0.1:9", "timeout_s": 0.2}')
    with pytest.raises(StoreError, match="no answer to get_chunk_size within"):
        store.open()
    assert "no answer" in str(store.health())
