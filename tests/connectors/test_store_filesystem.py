"""The filesystem store in one process: its files, its account, what is corrupt, full or removed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kvbaton.connectors.guard import this_process
from kvbaton.connectors.registry import load_store
from kvbaton.connectors.stores import filesystem_space
from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.connectors.stores.filesystem_entry import ALIGNED_FROM, HEADER_BYTES, start_of
from kvbaton.connectors.stores.filesystem_space import SpaceManager
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import find, make_objects, read, save, wait

ENTRY = HEADER_BYTES + 1000
"""Bytes of a file with an object of 1,000."""

Make = Callable[..., FilesystemStore]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Opens stores of one directory; closes them at the end."""
    opened: list[FilesystemStore] = []

    def open_one(**options: object) -> FilesystemStore:
        store = FilesystemStore("files", path=str(tmp_path / "shared"), **options)  # type: ignore[arg-type]
        store.open()
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


def root(tmp_path: Path) -> Path:
    return tmp_path / "shared" / "kvbaton-1"


def file_of(tmp_path: Path, key: bytes) -> Path:
    return root(tmp_path) / key.hex()[:2] / f"{key.hex()}.safetensors"


def entries(tmp_path: Path) -> list[Path]:
    return sorted(root(tmp_path).rglob("*.safetensors"))


def leftovers(tmp_path: Path) -> list[str]:
    return os.listdir(root(tmp_path) / "tmp")


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def by_age(tmp_path: Path, objects: dict[bytes, bytes]) -> None:
    """Make the objects' last uses an hour apart, the first one's the longest ago."""
    for hours, key in enumerate(reversed(objects)):
        age(file_of(tmp_path, key), 3600 * (hours + 1))


def one(number: int = 0, size: int = 1000) -> dict[bytes, bytes]:
    return make_objects(1, size, seed=number)


def held(store: FilesystemStore, objects: dict[bytes, bytes]) -> list[int]:
    """Which of the objects are there, by their places."""
    return [n for n, there in enumerate(find(store, list(objects)).present) if there]


def counted(store: FilesystemStore) -> tuple[int | None, int | None]:
    return store.usage().objects, store.usage().num_bytes


def test_it_is_found_by_name_and_declares_what_it_can(tmp_path: Path) -> None:
    store = load_store(f'filesystem:{{"path": "{tmp_path}/new/folder"}}')
    assert isinstance(store, FilesystemStore)
    assert not (tmp_path / "new").exists(), "the constructor did I/O"
    can = store.capabilities
    assert (can.pins, can.deletes, can.persistent, can.shared) == (False, True, True, True)


@pytest.mark.parametrize(
    "size", [0, 1, 1000, ALIGNED_FROM - 1, ALIGNED_FROM, ALIGNED_FROM + 4000, 1_200_001]
)
def test_bytes_come_back(make: Make, size: int) -> None:
    store, objects = make(), make_objects(3, size)
    assert save(store, objects) == [True] * 3
    assert read(store, objects) == list(objects.values())
    assert counted(store) == (3, 3 * (start_of(size) + size))


def test_a_short_write_or_read_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store, objects = make(), make_objects(2, 5_000)
    write, fill = os.pwritev, os.preadv

    def some(pieces: Sequence[memoryview]) -> list[memoryview]:
        return [pieces[0][:7]] if len(pieces[0]) > 7 else list(pieces[:1])

    monkeypatch.setattr(os, "pwritev", lambda file, pieces, at: write(file, some(pieces), at))
    monkeypatch.setattr(os, "preadv", lambda file, pieces, at: fill(file, some(pieces), at))
    assert save(store, objects) == [True, True]
    assert read(store, objects) == list(objects.values())


def test_files_are_safetensors_that_name_their_key(make: Make, tmp_path: Path) -> None:
    objects = one()
    save(make(), objects)
    ((key, data),) = objects.items()
    with safe_open(file_of(tmp_path, key), "np") as file:
        assert list(file.keys()) == ["object"]
        assert file.get_tensor("object").tobytes() == data
        about = file.metadata()
    assert about == {"format": "kvbaton-object-2", "key": key.hex()}


def test_storing_again_writes_nothing(make: Make, tmp_path: Path) -> None:
    store, objects = make(), one()
    save(store, objects)
    (file,) = entries(tmp_path)
    number = file.stat().st_ino
    assert save(store, objects) == [True]
    assert file.stat().st_ino == number
    assert counted(store) == (1, ENTRY)


def test_two_that_store_one_key_at_once_count_it_once(make: Make, tmp_path: Path) -> None:
    stores, objects = [make(), make()], one(size=300_000)
    for _ in range(10):
        answers = [
            store.store(list(objects), [[memoryview(data)] for data in objects.values()])
            for store in stores
        ]
        assert [wait(answer) for answer in answers] == [[True], [True]]
        find(stores[0], [])
        assert counted(make()) == (1, start_of(300_000) + 300_000)
        wait(stores[0].delete(list(objects)))
    assert leftovers(tmp_path) == []


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def flip(at: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return change


SPOILS = {
    **{f"cut to {n}": cut_to(n) for n in (0, 1, 8, 100, HEADER_BYTES, ENTRY - 1)},
    "longer": cut_to(ENTRY + 1),
    **{f"flip {n}": flip(n) for n in (0, 8, 60, 300, HEADER_BYTES - 1)},
    "all zero, as a loss of power may leave it": lambda path: path.write_bytes(bytes(ENTRY)),
    "no JSON": lambda path: path.write_bytes(b'{"' * (ENTRY // 2)),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_spoiled_entry_is_a_miss_and_removed(
    make: Make,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, objects = make(), make_objects(2, 1000)
    save(store, objects)
    path = file_of(tmp_path, next(iter(objects)))
    spoil(path)
    assert read(store, objects) == [None, list(objects.values())[1]]
    assert held(store, objects) == [1]
    assert len(entries(tmp_path)) == 1
    assert caplog.messages == [f"{path} is not what was stored: removed"]
    assert save(store, objects) == [True, True]
    assert read(store, objects) == list(objects.values())


def test_a_pipe_in_an_entrys_place_is_a_miss_and_waits_for_nobody(
    make: Make, tmp_path: Path
) -> None:
    store, objects = make(threads=1), one()
    save(store, objects)
    path = file_of(tmp_path, next(iter(objects)))
    path.unlink()
    os.mkfifo(path)
    assert read(store, objects) == [None]
    assert not path.exists()


def test_many_spoiled_entries_are_counted_and_told_once(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store, objects = make(), make_objects(30, 1000)
    save(store, objects)
    for key in objects:
        file_of(tmp_path, key).write_bytes(b"")
    assert read(store, objects) == [None] * 30
    assert len(caplog.messages) == 1
    assert store.usage().counters == {"damaged_entries": 30}


def test_an_entry_under_another_key_is_a_miss(make: Make, tmp_path: Path) -> None:
    store, objects = make(), make_objects(2, 1000)
    save(store, objects)
    first, second = (file_of(tmp_path, key) for key in objects)
    shutil.copy(first, second)
    assert read(store, objects) == [next(iter(objects.values())), None]


def test_a_torn_entry_is_replaced_by_storing_again(make: Make, tmp_path: Path) -> None:
    store, objects = make(), one()
    save(store, objects)
    os.truncate(file_of(tmp_path, next(iter(objects))), 0)
    assert save(store, objects) == [True]
    assert read(store, objects) == list(objects.values())


def test_the_least_recently_used_leaves_first(make: Make, tmp_path: Path) -> None:
    store, objects = make(max_bytes=4 * ENTRY), make_objects(6, 1000)
    first = dict(list(objects.items())[:4])
    assert save(store, first) == [True] * 4
    by_age(tmp_path, first)
    key = list(objects)
    assert None not in read(store, {key[0]: objects[key[0]]})  # use: to load,
    assert save(store, {key[2]: objects[key[2]]}) == [True]  # to store again
    assert held(store, first) == [0, 1, 2, 3]  # to be looked at is none
    assert save(store, {key[4]: objects[key[4]]}) == [True]
    assert held(store, objects) == [0, 2, 3, 4]
    assert save(store, {key[5]: objects[key[5]]}) == [True]
    assert held(store, objects) == [0, 2, 4, 5]
    assert counted(store) == (4, 4 * ENTRY)


def test_a_look_at_all_serves_many_evictions_in_exact_order(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, objects = make(max_bytes=8 * ENTRY), make_objects(8, 1000)
    save(store, objects)
    by_age(tmp_path, objects)
    looks, really = 0, os.scandir

    def look(path: str) -> object:
        nonlocal looks
        looks += path.endswith("/tmp")
        return really(path)

    monkeypatch.setattr(os, "scandir", look)
    left = list(range(8))
    for number in range(3):
        assert save(store, one(number + 1)) == [True]
        left.pop(0)
        assert held(store, objects) == left
    assert None not in read(store, dict([list(objects.items())[3]]))  # used since it was looked at
    assert save(store, one(4)) == [True]
    assert held(store, objects) == [3, 5, 6, 7]
    assert looks == 1


def test_what_is_from_before_the_clock_was_set_back_leaves_first(
    make: Make, tmp_path: Path
) -> None:
    """Else it would stay for as long as the clock was ahead, and what is new would leave."""
    before, after = make_objects(4, 1000, 1), make_objects(4, 1000, 2)
    save(make(), before)
    for day, key in enumerate(before, start=1):
        age(file_of(tmp_path, key), -86_400 * day)
    store = make(max_bytes=8 * ENTRY)
    assert save(store, after) == [True] * 4
    assert read(store, dict(list(before.items())[:1])) == [before[next(iter(before))]]
    assert save(store, make_objects(3, 1000, 3)) == [True] * 3
    assert held(store, before) == [0], "used since the clock was set back"
    assert held(store, after) == [0, 1, 2, 3]


def test_use_renews_the_mark_only_when_it_is_old(make: Make, tmp_path: Path) -> None:
    store, objects = make(touch_seconds=60.0), one()
    save(store, objects)
    (file,) = entries(tmp_path)
    for seconds, renewed in ((30, False), (90, True)):
        age(file, seconds)
        before = file.stat().st_mtime_ns
        read(store, objects)
        assert (file.stat().st_mtime_ns != before) is renewed


def test_the_limit_holds_while_many_threads_store(make: Make, tmp_path: Path) -> None:
    store = make(max_bytes=20 * ENTRY, threads=4)
    for seed in range(4):
        objects = make_objects(40, 1000, seed=seed)
        answers = save(store, objects)
        assert all(answers)
        assert sum(file.stat().st_size for file in entries(tmp_path)) <= 20 * ENTRY
    files = entries(tmp_path)
    assert counted(store) == (len(files), len(files) * ENTRY)
    assert len(files) >= 19
    assert leftovers(tmp_path) == []


def test_what_is_larger_than_the_limit_is_refused_and_evicts_nothing(make: Make) -> None:
    store, objects = make(max_bytes=3 * ENTRY), make_objects(3, 1000)
    assert save(store, objects) == [True] * 3
    assert save(store, one(9, 3 * ENTRY)) == [False]
    assert held(store, objects) == [0, 1, 2]


def test_a_lower_limit_is_kept_from_the_opening_on(make: Make, tmp_path: Path) -> None:
    objects = make_objects(10, 1000)
    save(make(), objects)
    by_age(tmp_path, objects)
    assert held(make(max_bytes=4 * ENTRY), objects) == [6, 7, 8, 9]


def test_a_large_store_is_evicted_by_sample(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all folders are read, what leaves is old, and the limit holds."""
    objects = make_objects(600, 10)
    save(make(), objects)
    by_age(tmp_path, objects)
    size = HEADER_BYTES + 10
    monkeypatch.setattr(filesystem_space, "SAMPLE", 64)
    folders: list[str] = []
    scan = os.scandir

    def note(path: str) -> Iterator[os.DirEntry[str]]:
        folders.append(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", note)
    store = make(max_bytes=600 * size)
    folders.clear()
    assert save(store, one(7, 10)) == [True]
    assert 10 < len(folders) < 80
    gone = set(range(600)) - set(held(store, objects))
    assert gone
    assert max(gone) < 150, "the oldest quarter of what was seen leaves first"
    assert len(entries(tmp_path)) * size <= 600 * size


def test_foreign_files_are_left_alone(make: Make, tmp_path: Path) -> None:
    store, objects = make(max_bytes=2 * ENTRY), make_objects(4, 1000)
    for folder in range(256):
        (root(tmp_path) / f"{folder:02x}").mkdir(exist_ok=True)
        (root(tmp_path) / f"{folder:02x}" / ".nfs0001").write_bytes(bytes(5_000))
    assert save(store, objects) == [True] * 4
    assert len(list(root(tmp_path).rglob(".nfs*"))) == 256
    assert len(entries(tmp_path)) == 2


def test_a_sample_gives_up_only_its_oldest(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, size = make_objects(600, 10), HEADER_BYTES + 10
    save(make(), objects)
    by_age(tmp_path, objects)
    monkeypatch.setattr(filesystem_space, "SAMPLE", 64)
    left = held(make(max_bytes=300 * size), objects)
    assert 280 <= len(left) <= 300
    assert sum(number >= 450 for number in left) > 140, "young ones left before old ones"


def test_an_account_that_is_too_high_costs_no_entry(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, size = make_objects(300, 10), HEADER_BYTES + 10
    save(make(), objects)
    (root(tmp_path) / "usage").write_bytes((1 << 30).to_bytes(8, "little") * 512)
    monkeypatch.setattr(filesystem_space, "SAMPLE", 64)
    store = make(max_bytes=300 * size)
    assert len(held(store, objects)) == 300
    assert counted(store) == (300, 300 * size)


@pytest.mark.parametrize("left", [bytes(4096), b""], ids=["zeros", "nothing"])
def test_an_account_that_a_crash_has_emptied_is_made_anew(
    make: Make, tmp_path: Path, left: bytes
) -> None:
    """Some file systems leave that of what was written last; the limit would be kept twice over."""
    save(make(), make_objects(8, 1000))
    (root(tmp_path) / "usage").write_bytes(left)
    assert counted(make(max_bytes=6 * ENTRY)) == (6, 6 * ENTRY)
    assert len(entries(tmp_path)) == 6


@pytest.mark.parametrize("wrong", ["lost", "too high", "too low"])
def test_a_wrong_account_is_put_right(make: Make, tmp_path: Path, wrong: str) -> None:
    objects = make_objects(8, 1000)
    save(make(), objects)
    usage = root(tmp_path) / "usage"
    if wrong == "lost":
        usage.unlink()
    elif wrong == "too high":
        usage.write_bytes((1 << 30).to_bytes(8, "little") * 512)
    else:
        usage.write_bytes((1).to_bytes(8, "little") * 512)
    store = make(max_bytes=8 * ENTRY)
    if wrong == "too low":  # noticed when next it evicts
        save(store, make_objects(9, 1000, seed=1))
        save(store, make_objects(1, 1000, seed=2))
    files = entries(tmp_path)
    assert counted(store) == (len(files), len(files) * ENTRY)
    assert 7 <= len(files) <= 8


def test_the_account_holds_after_all_kinds_of_change(make: Make, tmp_path: Path) -> None:
    store, objects = make(), make_objects(20, 1000)
    save(store, objects)
    wait(store.delete(list(objects)[:5]))
    flip(60)(file_of(tmp_path, list(objects)[7]))
    read(store, objects)
    assert counted(store)[0] == 14
    save(store, objects)
    assert counted(store) == counted(make()) == (20, 20 * ENTRY)


class FullDisk:
    """`os.pwritev` of a disk that has room for so many more calls, each of 512 KiB at most."""

    def __init__(self, calls: int, number: int = errno.ENOSPC) -> None:
        self.calls, self.number = calls, number
        self.write = os.pwritev
        self.lock = threading.Lock()

    def __call__(self, file: int, pieces: Sequence[memoryview], at: int) -> int:
        with self.lock:
            self.calls -= 1
            if self.calls < 0:
                raise OSError(self.number, os.strerror(self.number))
        return self.write(file, [pieces[0][: 512 << 10]], at)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_full_disk_is_no_error_and_leaves_nothing_behind(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, number: int
) -> None:
    store, objects = make(), one(size=1_200_000)
    monkeypatch.setattr(os, "pwritev", FullDisk(calls, number))
    assert save(store, objects) == [False]
    assert leftovers(tmp_path) == []
    assert held(store, objects) == []
    assert counted(store) == (0, 0)
    assert store.health() is None


def test_a_full_disk_evicts_the_oldest_and_stores_after_all(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, objects = make(), make_objects(3, 1000)
    save(store, objects)
    by_age(tmp_path, objects)

    class RoomAfterRemoval(FullDisk):
        def __call__(self, file: int, pieces: Sequence[memoryview], at: int) -> int:
            if len(entries(tmp_path)) >= 3:
                self.calls = 0
            else:
                self.calls = 9
            return super().__call__(file, pieces, at)

    monkeypatch.setattr(os, "pwritev", RoomAfterRemoval(0))
    assert save(store, one(5)) == [True]
    assert held(store, objects) == [1, 2]
    assert leftovers(tmp_path) == []


def test_of_objects_stored_together_those_stay_for_which_there_is_room(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, objects, write = make(), make_objects(8, 1000), os.pwritev

    def write_four_files(file: int, pieces: Sequence[memoryview], at: int) -> int:
        if len(entries(tmp_path)) + len(leftovers(tmp_path)) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, pieces, at)

    monkeypatch.setattr(os, "pwritev", write_four_files)
    monkeypatch.setattr(SpaceManager, "evict", lambda *_: False)
    assert save(store, objects) == [True] * 4 + [False] * 4
    assert held(store, objects) == [0, 1, 2, 3]
    assert leftovers(tmp_path) == []
    assert counted(store) == (4, 4 * ENTRY)


def test_objects_stored_together_may_be_more_than_the_limit(make: Make, tmp_path: Path) -> None:
    store, objects = make(max_bytes=3 * ENTRY), make_objects(8, 1000)
    (huge,) = one(9, 3 * ENTRY).items()
    assert save(store, {huge[0]: huge[1], **objects}) == [False] + [True] * 8
    assert len(held(store, objects)) == 3
    assert held(store, dict([huge])) == []
    assert counted(store) == (3, 3 * ENTRY)
    assert leftovers(tmp_path) == []


def test_a_key_given_twice_is_one_entry(make: Make, tmp_path: Path) -> None:
    store, objects = make(), one()
    ((key, data),) = objects.items()
    assert wait(store.store([key, key], [[memoryview(data)]] * 2)) == [True, True]
    assert counted(store) == (1, ENTRY)
    assert read(store, objects) == [data]
    assert leftovers(tmp_path) == []


def test_objects_stored_together_are_counted_under_one_lock(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lock, locked = make(), fcntl.flock, list[int]()

    def note(file: int, how: int) -> None:
        locked.append(file)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", note)
    assert save(store, make_objects(32, 1000)) == [True] * 32
    assert len(locked) == 1


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_stay(
    make: Make, tmp_path: Path
) -> None:
    store = make()
    folder = root(tmp_path) / "tmp"
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host = filesystem_space._writer_name(this_process()).split(".")[0]
    me = this_process()
    names = {
        "dead": f"{host}.{dead.pid}.1.abc",
        "reused pid": f"{host}.{me.pid}.{me.start + 1}.abc",
        "living": f"{host}.{me.pid}.{me.start}.abc",
        "other host": f"0011223344556677.{dead.pid}.1.abc",
        "other host, old": f"0011223344556677.{dead.pid}.2.abc",
        "strange": "what is this",
    }
    dead.communicate(b"\n", 30)
    for name in names.values():
        (folder / name).write_bytes(b"x")
    age(folder / names["other host, old"], filesystem_space.STALE_SECONDS + 60)
    make()
    assert sorted(os.listdir(folder)) == sorted(
        names[case] for case in ("living", "other host", "strange")
    )
    assert store.health() is None


def test_a_writer_whose_file_was_swept_stores_nothing_and_raises_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, objects, write = make(), one(), os.pwritev

    def sweep(file: int, pieces: Sequence[memoryview], at: int) -> int:
        for name in leftovers(tmp_path):
            (root(tmp_path) / "tmp" / name).unlink()
        return write(file, pieces, at)

    monkeypatch.setattr(os, "pwritev", sweep)
    assert save(store, objects) == [False]
    assert counted(store) == (0, 0)


def test_a_removed_directory_is_empty_and_can_be_used_again(make: Make, tmp_path: Path) -> None:
    store, objects = make(), make_objects(50, 100)
    save(store, objects)
    assert len(held(store, objects)) == 50
    os.rename(root(tmp_path), tmp_path / "aside")
    assert held(store, objects) == []
    assert read(store, objects) == [None] * 50
    assert save(store, objects) == [True] * 50
    assert len(held(store, objects)) == 50
    assert read(store, objects) == list(objects.values())
    for folder in root(tmp_path).glob("[0-9a-f][0-9a-f]"):
        shutil.rmtree(folder)
    assert held(store, objects) == []
    assert save(make(), objects) == [True] * 50
    assert len(held(store, objects)) == 50, "lookups stay in a folder that is gone"


def test_a_directory_that_went_with_its_file_system_is_not_made_where_that_was(
    make: Make, tmp_path: Path
) -> None:
    mount, objects = tmp_path / "shared", make_objects(3, 100)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        if os.stat(disk).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("TMPDIR is in /dev/shm, so there is no other file system")
        mount.symlink_to(disk)
        store = make()
        save(store, objects)
        mount.unlink()
        mount.mkdir()
        for call in (
            lambda: find(store, list(objects)),
            lambda: save(store, make_objects(1, 100, seed=1)),
            lambda: wait(store.delete(list(objects))),
            lambda: wait(store.claim(list(objects))),
        ):
            with pytest.raises(StoreError, match="file system that it was on is not mounted"):
                call()
        assert read(store, objects) == [None] * 3
        assert not list(mount.iterdir())
        mount.rmdir()
        mount.symlink_to(disk)
        assert read(store, objects) == list(objects.values())
        assert store.health() is None
        store.close()


def test_a_lock_that_nobody_gives_back_is_done_without(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem_space, "LOCK_SECONDS", 0.02)
    store, objects = make(max_bytes=2 * ENTRY), make_objects(4, 1000)
    with (
        open(root(tmp_path) / "usage", "rb") as usage,
        open(root(tmp_path) / "evicting", "rb") as evicting,
    ):
        fcntl.flock(usage, fcntl.LOCK_EX)
        fcntl.flock(evicting, fcntl.LOCK_EX)
        for key, data in objects.items():
            assert save(store, {key: data}) == [True]
    assert held(store, objects) == [2, 3]


def test_fsync_makes_bytes_durable_before_the_name(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.rename

    def note_sync(file: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    def note_rename(source: str, target: str) -> None:
        done.append("rename")
        rename(source, target)

    store, objects = make(fsync=True), one()
    save(store, one(2))
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    assert save(store, objects) == [True]
    folder = str(file_of(tmp_path, next(iter(objects))).parent)
    assert "/tmp/" in done[0].removeprefix(str(tmp_path))
    assert done[1] == "rename"
    assert folder in done[2:]
    assert str(root(tmp_path)) in done[2:]


def test_what_an_operator_must_see_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = FilesystemStore("files", path=str(tmp_path / "file"))
    with pytest.raises(StoreError, match=r"can't open .*file.*Not a directory"):
        store.open()
    assert "Not a directory" in (store.health() or "")
    with pytest.raises(ConfigError, match="max_bytes"):
        FilesystemStore("files", path=str(tmp_path), max_bytes=1)  # before a model is loaded
    with pytest.raises(ConfigError, match="path: must name a directory"):
        FilesystemStore("files", path="")


def test_a_disk_that_fails_is_an_error_and_unhealthy_until_it_works(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, objects = make(), one()
    save(store, objects)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "preadv", fail)
        with pytest.raises(StoreError, match=r"can't read .*Input/output error"):
            read(store, objects)
        assert "Input/output error" in (store.health() or "")
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(StoreError, match="can't write"):
            save(store, one(1))
    assert read(store, objects) == list(objects.values())
    assert store.health() is None


def test_after_close_no_descriptor_and_no_thread_is_left(make: Make) -> None:
    files = set(os.listdir("/proc/self/fd"))
    store, objects = make(), make_objects(20)
    save(store, objects)
    read(store, objects)
    held(store, objects)
    assert set(os.listdir("/proc/self/fd")) != files
    store.close()
    store.close()
    assert set(os.listdir("/proc/self/fd")) == files
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("files-")]
    with pytest.raises(StoreError, match="not open"):
        store.lookup([])
    store.open()
    assert read(store, objects) == list(objects.values())


NUMBER = st.integers(0, 5)
STEP = st.one_of(
    st.tuples(st.sampled_from(["store", "load", "delete", "spoil", "cut"]), NUMBER),
    st.tuples(st.sampled_from(["reopen", "recount"]), st.just(0)),
)


@settings(deadline=None, max_examples=30)
@given(st.lists(STEP, min_size=5, max_size=40), st.integers(1, 400_000))
def test_it_behaves_like_a_dict(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], size: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("model")
    objects = list(make_objects(6, size).items())
    model: dict[bytes, bytes] = {}
    spoiled: set[bytes] = set()
    store = FilesystemStore("files", path=str(tmp_path / "shared"), threads=1)
    store.open()
    for what, number in steps:
        key, data = objects[number]
        if what == "store" and key not in spoiled:
            assert save(store, {key: data}) == [True]
            model[key] = data
        elif what == "load":
            right = None if key in spoiled else model.get(key)
            assert read(store, {key: data}) == [right]
            if key in spoiled:
                spoiled.remove(key)
                del model[key]
        elif what == "delete":
            spoiled.discard(key)
            assert wait(store.delete([key])) == int(model.pop(key, None) is not None)
        elif what in ("spoil", "cut") and key in model and key not in spoiled:
            # Of the header: payloads have no checksum here, the engine has.
            (flip(60) if what == "spoil" else cut_to(size // 2))(file_of(tmp_path, key))
            spoiled.add(key)
        elif what in ("reopen", "recount"):
            store.close()
            if what == "recount":
                (root(tmp_path) / "usage").unlink()
            store.open()
        assert held(store, dict(objects)) == [
            n for n, (key, _) in enumerate(objects) if key in model
        ]
        assert store.usage().objects == len(model)
    store.close()
    shutil.rmtree(tmp_path)
