"""What files tell of their hints, to processes that come later, too."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.connectors.store import CLAIM_S, Hints
from kvbaton.connectors.stores import filesystem_entry
from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.connectors.stores.filesystem_entry import HEADER_BYTES, EntryClaims, header
from tests.support.waiting import until

TIMEOUT_S = 30.0
SIZE = 1000


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def body(number: int) -> bytes:
    return bytes([number]) * SIZE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FilesystemStore]:
    made = FilesystemStore("files", path=str(tmp_path))
    made.open()
    yield made
    made.close()


def save(store: FilesystemStore, hints: dict[int, Hints]) -> list[bool]:
    data = [[memoryview(body(number))] for number in hints]
    call = store.store([key(n) for n in hints], data, hints=list(hints.values()))
    return call.result(TIMEOUT_S)


def load(store: FilesystemStore, number: int) -> bool:
    target = bytearray(SIZE)
    (there,) = store.load([key(number)], [[memoryview(target)]]).result(TIMEOUT_S)
    assert not there or target == body(number)
    return there


def present(store: FilesystemStore, *numbers: int) -> list[int]:
    found = store.lookup([key(n) for n in numbers]).result(TIMEOUT_S).present
    return [n for n, there in zip(numbers, found, strict=True) if there]


def test_a_header_without_hints_tells_of_none() -> None:
    about = f'{{"format":"kvbaton-object-2","key":"{key(1).hex()}"}}'
    tensor = '{"dtype":"U8","shape":[7],"data_offsets":[0,7]}'
    text = f'{{"__metadata__":{about},"object":{tensor}}}'
    written = header(key(1), 7, HEADER_BYTES)
    assert (len(written), written[8:].rstrip()) == (HEADER_BYTES, text.encode())


def test_labels_are_in_the_file_and_others_list_them(
    store: FilesystemStore, tmp_path: Path
) -> None:
    long = "n" * 64
    hints = {
        1: Hints(namespace=long, tenant="t" * 64, depth=5, ttl_s=1e9),
        2: Hints(namespace=long, tenant="bob"),
        3: Hints(namespace="other"),
    }
    assert save(store, hints) == [True] * 3
    (path,) = tmp_path.rglob(f"{key(1).hex()}*")
    about = json.loads(path.read_bytes()[8:HEADER_BYTES])["__metadata__"]
    assert (about["namespace"], about["tenant"]) == (long, "t" * 64)
    later = FilesystemStore("later", path=str(tmp_path))
    later.open()
    assert all(load(later, n) for n in (1, 2, 3))
    found = later.namespaces().result(TIMEOUT_S)
    entry = HEADER_BYTES + SIZE
    assert found[long].tenants == {"t" * 64: entry, "bob": entry}
    assert (found[long].objects, found["other"].num_bytes) == (2, entry)
    assert later.clear(long).result(TIMEOUT_S) == 2
    assert present(store, 1, 2, 3) == [3]
    later.close()


def test_what_expired_after_its_writer_ended_is_found_out_when_it_is_read(
    store: FilesystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save(store, {1: Hints(ttl_s=60), 2: Hints(ttl_s=6000)}) == [True] * 2
    told: list[bytes] = []
    later = FilesystemStore("later", path=str(tmp_path))
    later.on_forget = told.extend
    later.open()
    assert load(later, 1)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert not load(later, 1)
    assert load(later, 2)
    assert told == [key(1)]
    assert present(later, 1, 2) == [2]
    later.close()


def test_who_opens_a_folder_removes_what_expires_of_writers_that_ended(
    store: FilesystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody need ever read it."""
    ends = {1: Hints(ttl_s=60), 2: Hints(ttl_s=120), 3: Hints(ttl_s=6000), 4: Hints()}
    assert save(store, ends) == [True] * 4
    store.close()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    later, told = FilesystemStore("later", path=str(tmp_path)), list[bytes]()
    later.on_forget = told.extend
    later.open()
    assert told == [key(1)]
    monkeypatch.setattr(time, "time", lambda: now + 121)
    assert present(later, 1, 2, 3, 4) == [3, 4]
    assert len(list(tmp_path.rglob("*.safetensors"))) == later.usage().objects == 2
    later.close()


def test_what_another_user_keeps_for_itself_keeps_nobody_out(
    store: FilesystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save(store, {1: Hints(ttl_s=60), 2: Hints(ttl_s=60)}) == [True] * 2

    really = os.open

    def refuse(path: str, *flags: Any, **options: Any) -> int:
        if key(1).hex() in path:
            raise PermissionError(errno.EACCES, "not yours", path)
        return really(path, *flags, **options)

    monkeypatch.setattr(os, "open", refuse)
    later = FilesystemStore("later", path=str(tmp_path))
    later.open()
    assert later.namespaces().result(TIMEOUT_S)[""].objects == 1
    later.close()


def test_its_own_are_removed_when_they_expire_unless_stored_anew(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bytes] = []
    store.on_forget = told.extend
    assert save(store, {1: Hints(ttl_s=60), 2: Hints(ttl_s=60)}) == [True] * 2
    assert store.delete([key(2)]).result(TIMEOUT_S) == 1
    assert save(store, {2: Hints()}) == [True]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert present(store, 1, 2) == [2]
    assert told == [key(1)]


def test_what_was_evicted_before_it_expired_is_forgotten(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time to live of days must not keep a note of all that was stored in them."""
    monkeypatch.setattr(filesystem_entry, "MOST_GONE", 8)
    assert save(store, {200: Hints(ttl_s=0.2), 201: Hints(ttl_s=1e6)})
    for number in range(40):
        assert save(store, {number: Hints(ttl_s=1e6)})
        assert store.delete([key(number)]).result(TIMEOUT_S) == 1
    assert len(store.backend._expiring) <= 8
    until(lambda: present(store, 200, 201) == [201], "only the first expires")


def test_the_deepest_of_one_age_are_evicted_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # however long it takes to store them
    room = 16 * (HEADER_BYTES + SIZE)
    store = FilesystemStore("files", path=str(tmp_path), max_bytes=room, threads=1)
    told: list[bytes] = []
    store.on_forget = told.extend
    store.open()
    for depth in range(16):
        assert save(store, {depth: Hints(depth=depth)}) == [True]
    for more in range(4):
        assert save(store, {100 + more: Hints()}) == [True]
    assert told == [key(n) for n in (15, 14, 13, 12)]
    store.close()


def test_a_claim_of_one_that_died_is_void(store: FilesystemStore, tmp_path: Path) -> None:
    other = FilesystemStore("other", path=str(tmp_path))
    other.open()
    keys = [key(1), key(2)]
    assert store.claim(keys).result(TIMEOUT_S) == [True, True]
    assert other.claim(keys).result(TIMEOUT_S) == [False, False]
    (path,) = (tmp_path / "kvbaton-1" / "claims").glob(key(1).hex())
    for seconds in (-CLAIM_S - 1, 3600):  # long ago, or the clock was set back since
        then = time.time() + seconds
        os.utime(path, (then, then))
        assert other.claim(keys).result(TIMEOUT_S) == [True, False]
    store.close()  # gives its own back
    assert other.claim(keys).result(TIMEOUT_S) == [False, True]
    other.close()
    assert list((tmp_path / "kvbaton-1" / "claims").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_who_finds_no_room_for_a_claim_is_to_store(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """To store makes room; nobody would if claims failed."""
    opened = store.backend._space.open_file

    def full(path: str, flags: int) -> int:
        if "/claims/" in path:
            raise OSError(number, os.strerror(number), path)
        return opened(path, flags)

    monkeypatch.setattr(store.backend._claims, "_open_file", full)
    assert save(store, {1: Hints()}) == [True]
    assert store.claim([key(1), key(2)]).result(TIMEOUT_S) == [False, True]
    assert save(store, {2: Hints()}) == [True]


def test_nobody_claims_what_was_stored_while_they_asked(
    store: FilesystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FilesystemStore("other", path=str(tmp_path))
    other.open()
    assert store.claim([key(1)]).result(TIMEOUT_S) == [True]
    usual = EntryClaims.take

    def take(claims: EntryClaims, wanted: bytes) -> bool:
        assert save(store, {1: Hints()}) == [True]
        return usual(claims, wanted)

    monkeypatch.setattr(EntryClaims, "take", take)
    assert other.claim([key(1)]).result(TIMEOUT_S) == [False]
    assert list((tmp_path / "kvbaton-1" / "claims").iterdir()) == []
    other.close()


def test_a_failed_store_gives_its_claim_back(tmp_path: Path) -> None:
    small = FilesystemStore("small", path=str(tmp_path), max_bytes=2 * HEADER_BYTES)
    small.open()
    assert small.claim([key(1)]).result(TIMEOUT_S) == [True]
    assert small.claim([key(1)]).result(TIMEOUT_S) == [False]
    assert save(small, {1: Hints()}) == [False]
    assert small.claim([key(1)]).result(TIMEOUT_S) == [True]
    small.close()


@pytest.mark.parametrize("gap", [0, 31, 32, 100])
def test_a_prefix_ends_where_it_does(store: FilesystemStore, gap: int) -> None:
    assert all(save(store, {n: Hints() for n in range(100) if n != gap}))
    keys = [key(n) for n in range(100)]
    found = store.lookup(keys, prefix=True).result(TIMEOUT_S).present
    assert found == (True,) * gap + (False,) * (100 - gap)
