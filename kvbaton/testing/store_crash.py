"""L3 of stores: processes are killed and files truncated; readers see whole objects or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

from kvbaton.connectors.store import Claiming
from kvbaton.errors import StoreError
from kvbaton.testing.kit import require
from kvbaton.testing.remote import start_worker
from kvbaton.testing.remote_worker import remote_objects
from kvbaton.testing.store_rig import StoreRig, case

SIZE = 2 << 20
COUNT = 3
FRACTIONS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Times at which a writer is killed, as fractions of the time that storing one object takes."""


class _Remote:
    """Another process that uses the same store, and its objects."""

    def __init__(self, rig: StoreRig, job: str, size: int = SIZE, count: int = COUNT) -> None:
        nonce = int.from_bytes(rig.key()[:6], "little")
        self.objects = remote_objects(nonce, size, count)
        words = (job, nonce, size, count)
        self.process = start_worker("store", rig.spec, *words, patience=rig.patience)

    def known_done(self) -> dict[bytes, bytes]:
        """Objects that the process had reported as stored before it was killed."""
        done = {int(words[1]) for words in self.process.all_lines() if words[0] == "done"}
        return {k: d for i, (k, d) in enumerate(self.objects.items()) if i in done}


@contextmanager
def _writer(rig: StoreRig) -> Iterator[_Remote]:
    """A writer that is ready to begin, and killed at the end of the block."""
    with rig.elsewhere():
        writer = _Remote(rig, "write")
        with writer.process as process:
            process.started()
            yield writer


def _seconds_of_one(writer: _Remote) -> float:
    """Let a writer store all of its objects; returns the mean seconds per object."""
    writer.process.tell("go")
    writer.process.line("begin")
    start = time.monotonic()
    for _ in range(COUNT):
        writer.process.line("done")
    return (time.monotonic() - start) / COUNT


@case(3, "persistent")
def a_killed_writer(rig: StoreRig) -> None:
    """Whenever a writer is killed, its objects are whole or absent; stored ones are there."""
    with _writer(rig) as writer:
        seconds = _seconds_of_one(writer)
    rig.reopen()
    rig.expect(writer.objects, "stored by a process that has ended")
    for number in range(len(FRACTIONS) * rig.depth):
        with _writer(rig) as writer:
            writer.process.tell("go")
            for _ in range(1 + number % COUNT):
                writer.process.line("begin")
            time.sleep(seconds * FRACTIONS[number % len(FRACTIONS)])
            writer.process.kill()
            done = writer.known_done()
        rig.reopen()  # check now: a small store evicts these objects for the next writer's
        found = rig.found(list(writer.objects))
        whole = rig.expect_whole(writer.objects, "stored by a process that was killed")
        there = [key in whole for key in writer.objects]
        told = f"lookup said {found} of what a killed writer left, load {there}"
        require(list(found) == there, told)
        rig.expect(done, "kept, as its writer was told before it was killed")


@case(3, "persistent")
def what_a_killed_writer_leaves(rig: StoreRig) -> None:
    """What a killed writer left behind does no harm: its objects can be stored again."""
    with _writer(rig) as writer:
        seconds = _seconds_of_one(writer)
    stored: dict[bytes, bytes] = {}
    for _ in range(2):
        with _writer(rig) as writer:
            writer.process.tell("go")
            writer.process.line("begin")
            time.sleep(seconds / 2)
        rig.put(writer.objects)
        rig.expect(writer.objects, "stored again after its first writer was killed")
        stored |= writer.objects
    rig.reopen()
    rig.expect(stored, "after the store was opened again")


@case(3, "shared")
def others_see_whole_objects(rig: StoreRig) -> None:
    """While another process stores an object, a load gets all of it or a miss; then all of it."""
    remote = _Remote(rig, "write", size=4 << 20, count=6)
    with remote.process as process:
        process.started()
        # A store that caches misses must still see what another process stores.
        require(not any(rig.found(list(remote.objects))), "lookup finds what nobody stored")
        absent = [rig.get(key, len(data)) is None for key, data in remote.objects.items()]
        require(all(absent), "what nobody stored was loaded")
        process.tell("go")
        for key, data in remote.objects.items():
            process.line("begin")
            rig.expect_whole({key: data}, "while another process stored it")
            if rig.found([key]) == (True,):
                rig.expect({key: data}, "found while another process stored it")
            process.line("done")
            seen = rig.eventually(lambda key=key: rig.found([key]) == (True,))  # type: ignore[misc]
            require(seen, "what another process has stored is never found")
            rig.expect({key: data}, "after another process had stored it")


@case(3, "shared")
def a_killed_reader(rig: StoreRig) -> None:
    """When a reader is killed, its objects stay, and can be deleted."""
    remote = _Remote(rig, "read", size=500_000, count=4)
    rig.put(remote.objects)
    with remote.process as process:
        process.started()
        process.tell("go")
        process.line("round")
        process.kill()
    rig.expect(remote.objects, "after a reader was killed")
    if rig.lacks("deletes") is None:
        rig.wait(rig.store.delete(list(remote.objects)), "delete")
        require(not any(rig.found(list(remote.objects))), "a dead reader keeps objects alive")
    rig.put(remote.objects)
    rig.expect(remote.objects, "stored again after a reader was killed")


@case(3, "persistent", "door.cut")
def cut_objects(rig: StoreRig) -> None:
    """An object truncated to its first bytes is a miss, and can be stored again."""
    for left in (0, 1, 50_000, 99_999):
        (key,) = objects = rig.stored([100_000])
        rig.door.cut(key, left)
        require(rig.get(key, 100_000) is None, f"loaded, though cut to {left} bytes")
        if rig.store.capabilities.persistent:
            rig.reopen()
            require(rig.get(key, 100_000) is None, f"loaded from disk, though cut to {left} bytes")
        rig.put(objects)
        rig.expect(objects, "stored again after it was cut")


@case(3, "persistent", "door.spoil")
def spoiled_objects(rig: StoreRig) -> None:
    """An object with one changed byte in the back end is a miss, and can be stored again."""
    for size in (1, 100_000):
        (key,) = objects = rig.stored([size])
        rig.door.spoil(key)
        require(rig.get(key, size) is None, f"loaded, though a byte of its {size} had changed")
        rig.put(objects)
        rig.expect(objects, "stored again after it was spoiled")


@case(3, "persistent", "door.fail")
def errors_are_told(rig: StoreRig) -> None:
    """While the back end fails, calls end with `StoreError`, and `health` says why."""
    # A miss or False would be believed, and an operator would see no error.
    (key,) = objects = rig.stored([1000])
    more = rig.objects([1000])
    calls = rig.every_call(objects) | {"store": rig.every_call(more)["store"]}
    if rig.lacks("deletes") is not None:
        del calls["delete"]
    if rig.lacks("claims") is None:
        calls["claim"] = lambda: cast(Claiming, rig.store).claim(list(more))
    rig.door.fail(True)
    try:
        begun = {name: _begun(call) for name, call in calls.items()}  # at once: each may take long
        for name, future in begun.items():
            try:
                answer = rig.wait(future, f"{name} while the back end fails")
            except StoreError:
                require(rig.store.health() is not None, f"{name} failed, and health says None")
                continue
            require(False, f"while the back end failed, {name} answered {answer}")
    finally:
        rig.door.fail(False)
    well = rig.eventually(lambda: _works(rig, key))
    require(well, "it does not work again, though its back end does")
    rig.expect(objects, "after its back end had failed")
    require(rig.store.health() is None, f"it works again, and health says {rig.store.health()!r}")


def _begun(call: Callable[[], Future[Any]]) -> Future[Any]:
    try:
        return call()
    except StoreError as error:
        failed = Future[Any]()
        failed.set_exception(error)
        return failed


def _works(rig: StoreRig, key: bytes) -> bool:
    try:
        return rig.found([key]) == (True,)
    except StoreError:
        return False
