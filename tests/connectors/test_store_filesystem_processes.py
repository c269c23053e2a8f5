"""The filesystem store between processes: killed writers, full disks, evictions of others."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.connectors.stores.filesystem_entry import HEADER_BYTES
from tests.support.store_objects import WAIT_S, find, make_objects, read, save, wait

SIZE = 1_000_000
PRELUDE = """
import os, sys, time
from kvbaton.connectors.stores.filesystem import FilesystemStore
from tests.support.store_objects import find, make_objects, pieces, read, save, wait
def tell(word): print(word, flush=True)
def open_store(**options):
    store = FilesystemStore("far", path=sys.argv[1], **options)
    store.open()
    return store
"""


@contextmanager
def child(path: Path, code: str, *before: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `code`; killed at the end."""
    script = PRELUDE + textwrap.dedent(code)
    process = subprocess.Popen(
        [*before, sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def open_store(path: Path, max_bytes: int | None = None) -> FilesystemStore:
    store = FilesystemStore("near", path=str(path), max_bytes=max_bytes)
    store.open()
    return store


def entries(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors"))


def leftovers(path: Path) -> list[str]:
    return os.listdir(path / "kvbaton-1" / "tmp")


@pytest.mark.parametrize("call", [0, 1, 2, "rename"])
def test_a_writer_killed_in_a_put_leaves_nothing_to_see(tmp_path: Path, call: object) -> None:
    """It is stopped before the header, before or in the middle of the bytes, before the rename."""
    code = f"""
        store, calls, write, rename = open_store(), 0, os.pwritev, os.rename
        def stop():
            tell("stopped")
            time.sleep(600)
        def write_or_stop(*args):
            global calls
            if calls == {call!r}: stop()
            calls += 1
            return write(args[0], [args[1][0][:{SIZE} // 2]], args[2])
        def rename_or_stop(*args):
            if {call!r} == "rename": stop()
            return rename(*args)
        os.pwritev, os.rename = write_or_stop, rename_or_stop
        save(store, make_objects(1, {SIZE}))
    """
    objects = make_objects(1, SIZE)
    with child(tmp_path, code) as process:
        assert heard(process) == "stopped"
        reader = open_store(tmp_path)
        assert find(reader, list(objects)).present == (False,)
        assert len(leftovers(tmp_path)) == 1, "a living writer's file was swept"
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
    assert find(reader, list(objects)).present == (False,)
    assert read(reader, objects) == [None]
    again = open_store(tmp_path)
    assert leftovers(tmp_path) == []
    assert again.usage().objects == 0
    assert save(again, objects) == [True]
    assert read(reader, objects) == list(objects.values())
    for store in (reader, again):
        store.close()


def test_no_reader_ever_sees_torn_bytes(tmp_path: Path) -> None:
    """Writers store and delete as fast as they can, and are killed at any moment."""
    code = f"""
        store, objects = open_store(), make_objects(4, {SIZE})
        tell("ready")
        while True:
            save(store, objects)
            wait(store.delete(list(objects)))
    """
    objects, reader, rng = make_objects(4, SIZE), open_store(tmp_path), random.Random(1)
    hits = 0
    for _ in range(4):
        with child(tmp_path, code) as process:
            assert heard(process) == "ready"
            end = time.monotonic() + rng.uniform(0.2, 0.5)
            while time.monotonic() < end:
                for got, right in zip(read(reader, objects), objects.values(), strict=True):
                    assert got in (None, right)
                    hits += got is not None
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
        there = find(reader, list(objects)).present
        whole = [got is not None for got in read(reader, objects)]
        assert tuple(whole) == there, "what a killed writer left is not whole"
    assert hits, "the reader never met an entry"
    reader.close()
    open_store(tmp_path).close()
    assert leftovers(tmp_path) == []


def test_processes_that_share_a_limit_keep_it(tmp_path: Path) -> None:
    """Each stores, loads and deletes among far more than fits; loads are right or misses."""
    limit = 12 * (HEADER_BYTES + 50_000)
    code = f"""
        store, objects = open_store(max_bytes={limit}), make_objects(40, 50_000)
        keys = list(objects)
        tell("ready")
        input()
        for turn in range(6):
            for key in keys[turn % 3 :: 3] if turn % 2 else keys[::-1]:
                assert save(store, {{key: objects[key]}}) == [True], store.health()
                (got,) = read(store, {{key: objects[key]}})
                assert got in (None, objects[key])
            wait(store.delete(keys[:3]))
        store.close()
        tell("done")
    """
    with child(tmp_path, code) as one, child(tmp_path, code) as other:
        for process in (one, other):
            assert heard(process) == "ready"
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        while one.poll() is None or other.poll() is None:
            sizes = []
            for file in entries(tmp_path):
                if file.exists():
                    sizes.append(HEADER_BYTES + 50_000)
            # Entries may come and go while they are listed: that many were never there at once.
            assert sum(sizes) <= limit + 8 * (HEADER_BYTES + 50_000)
        assert (heard(one), heard(other)) == ("done", "done")
    files = entries(tmp_path)
    store = open_store(tmp_path, limit)
    assert sum(file.stat().st_size for file in files) <= limit
    assert store.usage().objects == len(files)
    assert leftovers(tmp_path) == []
    store.close()


def test_what_another_process_stores_and_deletes_is_seen(tmp_path: Path) -> None:
    code = """
        store, objects = open_store(), make_objects(5)
        tell(save(store, objects) == [True] * 5)
        input()
        tell(wait(store.delete(list(objects)[:2])) == 2)
        store.close()
    """
    store, objects = open_store(tmp_path), make_objects(5)
    assert find(store, list(objects)).present == (False,) * 5
    with child(tmp_path, code) as process:
        assert heard(process) == "True"
        assert find(store, list(objects)).present == (True,) * 5
        assert read(store, objects) == list(objects.values())
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert heard(process) == "True"
        assert find(store, list(objects)).present == (False, False, True, True, True)
    assert wait(store.delete(list(objects))) == 3
    store.close()


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A tmpfs of 4 MiB takes four objects of a little less than 1 MiB; then the oldest leave."""
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4m none "$0" && exec "$@"']
    where = str(tmp_path)
    if subprocess.run([*mount, where, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    code = f"""
        store = open_store()
        for seed in range(12):
            objects = make_objects(1, {SIZE}, seed=seed)
            assert save(store, objects) == [True], store.health()
            assert read(store, objects) == list(objects.values())
            assert os.listdir(sys.argv[1] + "/kvbaton-1/tmp") == []
        assert save(store, make_objects(1, 5 << 20, seed=99)) == [False]
        assert os.listdir(sys.argv[1] + "/kvbaton-1/tmp") == []
        assert save(store, make_objects(1, {SIZE}, seed=100)) == [True]
        tell(store.usage().objects)
        store.close()
    """
    with child(tmp_path, code, *mount, where) as process:
        assert heard(process) in ("1", "2", "3", "4")
        assert process.wait(WAIT_S) == 0


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    code = """
        import resource
        store = open_store()
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
        tell(save(store, make_objects(1, 1_000_000)) == [False])
        tell(save(store, make_objects(1, 500_000)) == [True])
        store.close()
    """
    with child(tmp_path, code) as process:
        assert (heard(process), heard(process)) == ("True", "True")
        assert process.wait(WAIT_S) == 0
    assert leftovers(tmp_path) == []
    assert len(entries(tmp_path)) == 1
