"""Evicted files of the filesystem store, which are written over."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvbaton.connectors.stores import filesystem_space
from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.connectors.stores.filesystem_entry import HEADER_BYTES
from tests.support.store_objects import find, make_objects, read, save

SIZE = 1000
ENTRY = HEADER_BYTES + SIZE
COUNT = 2 * filesystem_space.PART
"""Objects that fill the store; two are evicted at a time, and kept as spares."""

Open = Callable[[], FilesystemStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    opened: list[FilesystemStore] = []

    def open_one() -> FilesystemStore:
        opened.append(FilesystemStore("files", path=str(tmp_path), max_bytes=COUNT * ENTRY))
        opened[-1].open()
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def full(open_store: Open, tmp_path: Path) -> FilesystemStore:
    """A full store, whose objects were all used long ago, the first ones before the others."""
    store, objects = open_store(), make_objects(COUNT, SIZE)
    assert all(save(store, objects))
    for number, key in enumerate(objects):
        os.utime(file_of(tmp_path, key), (number, number))
    return store


def file_of(tmp_path: Path, key: bytes) -> Path:
    return tmp_path / "kvbaton-1" / key.hex()[:2] / f"{key.hex()}.safetensors"


def inodes(tmp_path: Path) -> set[int]:
    return {path.stat().st_ino for path in tmp_path.rglob("*.safetensors")}


def spares(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "kvbaton-1" / "tmp").iterdir())


def save_one_by_one(store: FilesystemStore, objects: dict[bytes, bytes]) -> None:
    for item in objects.items():
        assert save(store, dict([item])) == [True]


def test_a_full_store_writes_over_what_it_evicts(
    full: FilesystemStore, open_store: Open, tmp_path: Path
) -> None:
    first, objects = inodes(tmp_path), make_objects(41, SIZE, seed=1)
    save_one_by_one(full, objects)
    assert inodes(tmp_path) < first
    assert (len(inodes(tmp_path)), len(spares(tmp_path))) == (COUNT - 1, 1)
    open_store()  # it removes what dead writers left, and this is not that
    objects |= make_objects(40, SIZE, seed=2)
    save_one_by_one(full, objects)
    assert inodes(tmp_path) < first
    assert read(full, objects) == list(objects.values())
    assert full.usage().objects == COUNT - 1
    full.close()
    assert spares(tmp_path) == []


def test_spares_of_another_size_make_room(full: FilesystemStore, tmp_path: Path) -> None:
    larger = make_objects(3, 2 * SIZE, seed=1)
    save_one_by_one(full, larger)
    assert read(full, larger) == list(larger.values())
    files = [*tmp_path.rglob("*.safetensors"), *spares(tmp_path)]
    assert sum(path.stat().st_size for path in files) <= COUNT * ENTRY


def test_spares_may_be_gone_or_closed_to_us(
    full: FilesystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = make_objects(4, SIZE, seed=1)
    (one, two, three, four) = (dict([item]) for item in objects.items())
    assert save(full, one) == [True]
    (spare,) = spares(tmp_path)
    spare.unlink()
    assert save(full, two) == save(full, three) == [True]
    (spare,) = spares(tmp_path)
    really = os.open

    def refuse(path: str, *words: int) -> int:
        if path == str(spare):
            raise PermissionError(errno.EACCES, "another user's", path)
        return really(path, *words)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert save(full, four) == [True]
    assert not spare.exists()
    assert read(full, objects) == list(objects.values())


def test_room_on_the_disk_is_made_of_spares(full: FilesystemStore, tmp_path: Path) -> None:
    save_one_by_one(full, make_objects(1, SIZE, seed=1))
    assert len(spares(tmp_path)) == 1
    room = filesystem_space.SpaceManager(str(tmp_path / "kvbaton-1"), COUNT * ENTRY)
    room.open()
    assert room.make_room(2 * ENTRY, None)
    assert len(spares(tmp_path)) == 3
    assert room.evict(ENTRY)
    assert len(spares(tmp_path)) == 1, "the other's"
    assert len(inodes(tmp_path)) == COUNT - 5


def test_a_full_disk_finds_room_although_the_account_is_wrong(
    full: FilesystemStore, tmp_path: Path
) -> None:
    (tmp_path / "kvbaton-1" / "usage").write_bytes((1 << 30).to_bytes(8, "little") * 512)
    room = filesystem_space.SpaceManager(str(tmp_path / "kvbaton-1"), None)
    room.open()
    assert room.evict(ENTRY)
    assert len(inodes(tmp_path)) < COUNT


@pytest.mark.parametrize("stored_again", [False, True])
@pytest.mark.parametrize("after_reads", [0, 1])
def test_what_is_written_over_while_it_is_read_is_a_miss(
    full: FilesystemStore,
    open_store: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    stored_again: bool,
    after_reads: int,
) -> None:
    """Before its header was read, and in the middle of its bytes."""
    objects = make_objects(COUNT, SIZE)
    victim = dict(list(objects.items())[:1])
    (key,) = victim
    inode = file_of(tmp_path, key).stat().st_ino
    others = make_objects(2, SIZE, seed=1)
    other, reads, calls = open_store(), os.preadv, list[int]()

    def late(file: int, pieces: Sequence[memoryview], at: int) -> int:
        if os.fstat(file).st_ino != inode:
            return reads(file, pieces, at)
        calls.append(file)
        if len(calls) == after_reads + 1:
            monkeypatch.undo()
            save_one_by_one(other, others)
            assert inode in {file_of(tmp_path, k).stat().st_ino for k in others}
            if stored_again:
                save_one_by_one(other, victim)
        first = [pieces[0]] if len(pieces) > 1 else [pieces[0][: SIZE // 2]]
        return reads(file, first, at)

    monkeypatch.setattr(os, "preadv", late)
    assert read(full, victim) == [None]
    assert len(calls) > after_reads, "it was not read meanwhile"
    assert not caplog.messages
    assert find(full, [key]).present == (stored_again,)
    assert read(full, others) == list(others.values())
