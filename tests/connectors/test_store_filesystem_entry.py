"""Where objects lie in their files, and how they are moved."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.connectors.stores.filesystem_entry import (
    ALIGNED_FROM,
    HEADER_BYTES,
    NO_LABELS,
    PAGE,
    DirectFileMover,
    EntryLabels,
    header,
    labels_of,
    start_of,
)
from tests.support.store_objects import find, wait

KEY = bytes(range(32))
LABELS = [
    NO_LABELS,
    EntryLabels("llama-3.1_8b", "alice", 4e9),
    EntryLabels("n" * 64, "t" * 64, 4102444800.125),
]

SETTINGS = settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # examples share the directory
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FilesystemStore]:
    made = FilesystemStore("files", path=str(tmp_path))
    made.open()
    yield made
    made.close()


def file_of(folder: Path) -> Path:
    path = folder / "kvbaton-1" / KEY.hex()[:2] / f"{KEY.hex()}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def load(store: FilesystemStore, num_bytes: int) -> bytes | None:
    target = bytearray(num_bytes)
    there = wait(store.load([KEY], [[memoryview(target)]]))
    return bytes(target) if there == [True] else None


@given(lead=st.integers(0, PAGE - 1), cuts=st.lists(st.integers(0, 5 * PAGE), max_size=4))
@SETTINGS
def test_a_block_behind_its_header_lies_on_a_page(
    store: FilesystemStore, lead: int, cuts: list[int]
) -> None:
    size = ALIGNED_FROM + lead
    assert (start_of(size) + lead) % PAGE == 0
    data = random.Random(lead).randbytes(size)
    ends = [0, *sorted(cuts), size]
    pieces = [memoryview(data)[low:high] for low, high in itertools.pairwise(ends)]
    target = bytearray(size)
    filled = [memoryview(target)[low:high] for low, high in itertools.pairwise(ends)]
    wait(store.delete([KEY]))
    assert wait(store.store([KEY], [pieces])) == [True]
    assert wait(store.load([KEY], [filled])) == [True]
    assert target == data
    for delta in {-1, 1, -lead, PAGE} - {0}:
        assert load(store, size + delta) is None
    assert find(store, [KEY]).present == (True,), "it was not what it should be"


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("size", [0, 1000, ALIGNED_FROM, ALIGNED_FROM + 3585, 2**40 - 1])
def test_labels_are_in_the_first_bytes_of_every_header(size: int, labels: EntryLabels) -> None:
    start = start_of(size)
    head = header(KEY, size, start, labels)
    assert len(head) == start
    assert labels_of(head) == labels_of(head[:HEADER_BYTES]) == labels


@given(
    size=st.sampled_from([1, 1000, ALIGNED_FROM, ALIGNED_FROM + 3585, 80_001]),
    labels=st.sampled_from(LABELS),
    data=st.data(),
)
@SETTINGS
def test_what_is_not_whole_is_never_served(
    store: FilesystemStore,
    tmp_path: Path,
    size: int,
    labels: EntryLabels,
    data: st.DataObject,
) -> None:
    """Cut, longer, of another key, or with any bit of its header flipped."""
    start = start_of(size)
    body = random.Random(size).randbytes(size)
    whole = bytearray(header(KEY, size, start, labels) + body)
    spoil = data.draw(st.sampled_from(["cut", "longer", "other key", "flip"]))
    if spoil == "cut":
        last = len(whole) - 1
        places = st.sampled_from([0, 8, start, len(whole) - size, last]) | st.integers(0, last)
        del whole[data.draw(places) :]
    elif spoil == "longer":
        whole += bytes(data.draw(st.sampled_from([1, PAGE, start_of(size) - HEADER_BYTES or 1])))
    elif spoil == "other key":
        whole[:start] = header(KEY[::-1], size, start, labels)
    else:
        text = len(whole[:start].rstrip())
        place = data.draw(st.integers(0, text - 1) | st.integers(0, start - 1))
        whole[place] ^= 1 << data.draw(st.integers(0, 7))
    path = file_of(tmp_path)
    path.write_bytes(whole)
    read = load(store, size)
    if spoil == "flip" and labels != NO_LABELS:
        assert read in (body, None), "a label may be another, the object may not"
    else:
        assert read is None
        assert not path.exists()


def test_direct_io_moves_blocks_past_the_page_cache(tmp_path: Path) -> None:
    store = FilesystemStore("files", path=str(tmp_path), direct=True)
    store.open()
    size = 40 * PAGE
    pool = memoryview(mmap.mmap(-1, 2 * size))
    data = random.Random(1).randbytes(100 + size)
    pool[:size] = data[100:]
    flags, move = list[int](), os.preadv

    def note(file: int, pieces: Sequence[memoryview], at: int) -> int:
        flags.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        return move(file, pieces, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", note)
        head = memoryview(bytearray(data[:100]))
        assert wait(store.store([bytes(32)], [[head, pool[:size]]])) == [True]
        head[:] = bytes(100)
        assert wait(store.load([bytes(32)], [[head, pool[size:]]])) == [True]
        assert bytes(head) + bytes(pool[size:]) == data
        apart = memoryview(bytearray(100 + size + 1))[1:]  # not on a page's border
        assert wait(store.load([bytes(32)], [[apart]])) == [True]
        assert apart == data
    mover = store.backend._mover
    assert isinstance(mover, DirectFileMover)
    assert [bool(flag) for flag in flags][-2:] == [not mover.refused, False]
    store.close()


def test_a_file_system_that_refuses_direct_io_is_used_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    control = fcntl.fcntl

    def refuse(file: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    store, size = FilesystemStore("files", path=str(tmp_path), direct=True), 40 * PAGE
    store.open()
    pool = memoryview(mmap.mmap(-1, size))
    pool[:] = data = random.Random(1).randbytes(size)
    for _ in range(2):
        assert wait(store.store([bytes(32)], [[pool]])) == [True]
        pool[:] = bytes(size)
        assert wait(store.load([bytes(32)], [[pool]])) == [True]
        assert pool == data
    assert [m for m in caplog.messages if "no direct I/O" in m] == [caplog.messages[0]]
    store.close()
