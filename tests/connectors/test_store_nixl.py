"""The store over NIXL's storage plugins, beside the kit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.stores.nixl import NixlStore
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import find, make_objects, read, save, wait


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NixlStore]:
    made = NixlStore("nixl", path=str(tmp_path))
    made.open()
    yield made
    made.close()


def test_a_directory_is_the_filesystem_stores_too(store: NixlStore, tmp_path: Path) -> None:
    other = load_store(f'filesystem:{{"path": "{tmp_path}"}}')
    other.open()
    for seed, (one, two) in enumerate(((store, other), (other, store))):
        objects = make_objects(3, 5000, seed=seed)
        assert save(one, objects) == [True] * 3
        assert find(two, list(objects)).present == (True,) * 3
        assert read(two, objects) == list(objects.values())
    other.close()


def test_registered_memory_is_not_registered_for_each_call(
    store: NixlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = memoryview(bytearray(os.urandom(100_000)))
    store.register([region])
    strange: list[int] = []
    register = store._plugin._api.register_memory

    def count(rows: list[tuple[int, int, int, str]], kind: str, backends: list[str]) -> object:
        strange.append(len(rows) if kind == "DRAM" else 0)
        return register(rows, kind, backends=backends)

    monkeypatch.setattr(store._plugin._api, "register_memory", count)
    key = bytes(32)
    assert wait(store.store([key], [[region[:40_000], region[50_000:]]])) == [True]
    assert set(strange) == {0, 1}  # the file, and its header in memory of the store's own
    strange.clear()
    beside = bytearray(90_000)
    assert wait(store.load([key], [[memoryview(beside)]])) == [True]
    assert beside == bytes(region[:40_000]) + bytes(region[50_000:])
    assert set(strange) == {0, 2}


def test_a_file_that_takes_no_bytes_is_an_error_and_no_entry(
    store: NixlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = make_objects(1, 5000)

    def full(num_bytes: int) -> tuple[str, int]:
        temporary = tmp_path / "kvbaton-1" / "tmp" / "full"
        temporary.touch()
        return str(temporary), os.open("/dev/full", os.O_RDWR)

    with monkeypatch.context() as broken:
        broken.setattr(store.backend._space, "begin", full)  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match="NIXL's POSIX"):
            save(store, objects)
    assert "NIXL's POSIX" in (store.health() or "")
    assert not list(tmp_path.rglob("*full"))
    assert save(store, objects) == [True]
    assert read(store, objects) == list(objects.values())
    assert store.health() is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ('{"backend": "NONE", "path": "{tmp}"}', "backend: NIXL has no plugin 'NONE', but .*POSIX"),
        ('{"backend": "OBJ", "params": {"bucket": "kv"}}', "can't start its plugin OBJ"),
        ("{}", "POSIX can't be used without path"),
        ('{"path": "{tmp}", "params": {"use_aio": 1, "use_uring": true}}', None),
        ('{"max_bytes": 100}', "max_bytes: needs path"),
    ],
)
def test_wrong_options_are_told(tmp_path: Path, options: str, told: str | None) -> None:
    with pytest.raises(ConfigError, match=told):
        load_store("nixl:" + options.replace("{tmp}", str(tmp_path))).open()
