"""The filesystem store where directories, pipes and links lie in the places of its files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbaton.connectors.store import Hints
from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.connectors.stores.filesystem_entry import HEADER_BYTES
from tests.support.store_objects import make_objects, read, save, wait

Put = Callable[[Path], None]
ENTRY = HEADER_BYTES + 1000
"""Bytes of a file with an object of 1,000."""
HOURS = 3600


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_bytes(b"not ours")


def listening_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        folder = os.open(path.parent, os.O_PATH)
        sock.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


FOREIGN: dict[str, Put] = {
    "directory": Path.mkdir,
    "full directory": full_directory,
    "pipe": os.mkfifo,
    "socket": listening_socket,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a file": lambda path: path.symlink_to("/etc/passwd"),
}
foreign = pytest.mark.parametrize("put", FOREIGN.values(), ids=FOREIGN)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FilesystemStore]:
    made = FilesystemStore("files", path=str(tmp_path), max_bytes=6 * ENTRY, threads=1)
    made.open()
    yield made
    made.close()


def file_of(tmp_path: Path, key: bytes) -> Path:
    return tmp_path / "kvbaton-1" / key.hex()[:2] / f"{key.hex()}.safetensors"


def replace_first(tmp_path: Path, objects: dict[bytes, bytes], put: Put) -> Path:
    """Put something in the place of the first object's entry, as the least recently used."""
    path = file_of(tmp_path, next(iter(objects)))
    path.unlink()
    put(path)
    os.utime(path, (0, HOURS), follow_symlinks=False)
    return path


@foreign
def test_it_is_a_miss_for_its_own_key_only_and_is_replaced(
    store: FilesystemStore, tmp_path: Path, put: Put
) -> None:
    objects = make_objects(3, 1000)
    save(store, objects)
    replace_first(tmp_path, objects, put)
    assert read(store, objects) == [None, *list(objects.values())[1:]]
    assert save(store, objects) == [True] * 3
    replace_first(tmp_path, objects, put)
    assert save(store, objects) == [True] * 3
    assert read(store, objects) == list(objects.values())


@foreign
def test_it_keeps_nobody_from_opening_counting_and_clearing(
    store: FilesystemStore, tmp_path: Path, put: Put
) -> None:
    objects = make_objects(3, 1000)
    sources = [[memoryview(data)] for data in objects.values()]
    hints = [Hints(ttl_s=HOURS)] * 3  # so that who opens the folder reads every header
    assert wait(store.store(list(objects), sources, hints=hints)) == [True] * 3
    replace_first(tmp_path, objects, put)
    later = FilesystemStore("later", path=str(tmp_path))
    later.open()
    assert wait(later.namespaces())[""].objects == 2
    assert wait(later.clear("")) == 2
    later.close()


@foreign
def test_it_is_evicted_like_an_entry(store: FilesystemStore, tmp_path: Path, put: Put) -> None:
    objects = make_objects(6, 1000)
    save(store, objects)
    path = replace_first(tmp_path, objects, put)
    for seed in range(4):
        later = make_objects(3, 1000, seed=10 + seed)
        assert save(store, later) == [True] * 3
    assert not os.path.lexists(path)
    assert read(store, later) == list(later.values())


def test_what_is_in_a_directory_in_an_entrys_place_is_kept(
    store: FilesystemStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    objects = make_objects(1, 1000)
    save(store, objects)
    path = replace_first(tmp_path, objects, full_directory)
    assert save(store, objects) == [True]
    [kept] = path.parent.rglob("precious")
    assert caplog.messages == [f"a directory in the place of an entry is now {kept.parent}"]


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_file_that_has_another_name_is_never_written_over(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    """Such as a backup made of hard links: evicted files are written over."""
    store = FilesystemStore("files", path=str(tmp_path), max_bytes=64 * ENTRY, threads=1)
    store.open()
    objects, other = make_objects(64, 1000), tmp_path / "other"
    save(store, objects)
    content = file_of(tmp_path, next(iter(objects))).read_bytes()
    other.write_bytes(content)
    os.utime(other, (0, HOURS))
    path = replace_first(tmp_path, objects, lambda path: link(path, other))
    for seed in range(3):
        assert save(store, make_objects(2, 1000, seed=10 + seed)) == [True] * 2
    assert not os.path.lexists(path)
    store.close()
    assert other.read_bytes() == content


@pytest.mark.parametrize("folder", ["tmp", "claims"])
def test_a_directory_among_its_own_files_is_left_alone(tmp_path: Path, folder: str) -> None:
    foreign = tmp_path / "kvbaton-1" / folder / "snapshots"
    foreign.mkdir(parents=True)
    os.utime(foreign, (0, HOURS))
    store = FilesystemStore("files", path=str(tmp_path))
    store.open()
    assert save(store, make_objects(1, 1000)) == [True]
    store.close()
    assert foreign.is_dir()
