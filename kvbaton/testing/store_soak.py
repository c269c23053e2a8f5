"""L5 of stores: a long random life against a dictionary, and an account of what was given back."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbaton.testing.accounts import Accounts, resident_bytes
from kvbaton.testing.kit import require
from kvbaton.testing.store_rig import StoreRig, case, views

ROUNDS = 5
MOST_BYTES = 8 << 20
"""Of the objects that live at one time in the random schedule."""


@case(5)
def random_schedule(rig: StoreRig) -> None:
    """After any sequence of calls the store holds what a dictionary would."""
    life = _Life(rig)
    end = time.monotonic() + 1.0 * rig.depth
    while time.monotonic() < end:
        for _ in range(20):
            life.step()
    rig.expect(life.there, "at the end of a random schedule")


class _Life:
    """A random sequence of calls, each compared with a dictionary."""

    def __init__(self, rig: StoreRig) -> None:
        self.rig = rig
        self.there: dict[bytes, bytes] = {}
        self.gone: list[bytes] = []
        capacity = rig.store.usage().capacity
        self.most_bytes = MOST_BYTES if capacity is None else min(MOST_BYTES, capacity // 3)
        steps = [self.store, self.store_again, self.load, self.lookup, self.cancel]
        deletes = rig.lacks("deletes") is None
        self.steps = [*steps, self.delete] if deletes else steps

    def step(self) -> None:
        """Do one thing."""
        self.steps[int(self.rig.random.integers(len(self.steps)))]()

    def store(self) -> None:
        """Some new objects."""
        held = sum(map(len, self.there.values()))
        most = min(60_000, (self.most_bytes - held) // 4)
        if most > 0:
            objects = self.rig.objects(self.rig.random.integers(0, most, 4).tolist())
            self.rig.put(objects)
            self.there |= objects

    def store_again(self) -> None:
        """One that is there."""
        for key in self.some(1):
            self.rig.put({key: self.there[key]})

    def load(self) -> None:
        """Some that are there."""
        self.rig.expect({key: self.there[key] for key in self.some(5)}, "in a random schedule")

    def lookup(self) -> None:
        """Some that are there and some that are gone, perhaps pinned for a moment."""
        there, gone = self.some(8), self.gone[-4:]
        pin = bool(self.rig.random.integers(2))
        found = self.rig.wait(self.rig.store.lookup([*there, *gone], pin=pin), "lookup")
        wanted = (True,) * len(there) + (False,) * len(gone)
        require(found.present == wanted, f"lookup said {found.present}, right is {wanted}")
        if found.ticket is not None:
            self.rig.store.release(found.ticket)

    def cancel(self) -> None:
        """A load that is given up."""
        keys = self.some(4)
        targets = views([bytearray(len(self.there[key])) for key in keys])
        future = self.rig.store.load(keys, targets)
        future.cancel()
        self.rig.settle([future], "a cancelled load")

    def delete(self) -> None:
        """Some that are there."""
        keys = self.some(3)
        count = self.rig.wait(self.rig.store.delete(keys), "delete")
        require(count == len(keys), f"{len(keys)} objects were deleted, the answer is {count}")
        for key in keys:
            del self.there[key]
        self.gone += keys

    def some(self, most: int) -> list[bytes]:
        """Keys that are there."""
        keys = list(self.there)
        count = min(len(keys), int(self.rig.random.integers(1, most + 1)))
        return [keys[i] for i in self.rig.random.permutation(len(keys))[:count]]


@case(5)
def gives_everything_back(rig: StoreRig) -> None:
    """A store that was used and closed leaves no descriptor, thread, process or temporary file."""
    with _temporary_files_in(rig.folder / "kit-temporary") as folder:
        for _ in range(2):
            _live(rig)
        before = Accounts.now()
        for _ in range(ROUNDS):
            _live(rig)
        rig.eventually(lambda: not Accounts.now().above(before, ROUNDS))
        grown = Accounts.now().above(before, ROUNDS)
        require(not grown, f"after {ROUNDS} lives of a store there are {grown}")
        left = [path.name for path in folder.iterdir()]
        require(not left, f"temporary files are left: {left[:3]}")


def _live(rig: StoreRig) -> None:
    store = rig.open("short-lived")
    objects = rig.objects([10, 100_000])
    rig.put(objects, store)
    rig.expect(objects, "in a short life", store)
    rig.found(list(objects), store)
    if rig.lacks("deletes") is None:
        rig.wait(store.delete(list(objects)), "delete")
    rig.close(store)


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = before


@case(5)
def calls_leave_nothing(rig: StoreRig) -> None:
    """Calls on an open store, also misses and cancelled ones, keep no descriptor or thread."""
    _calls(rig)
    before, rounds = Accounts.now(), 20
    for _ in range(rounds):
        _calls(rig)
    rig.eventually(lambda: not Accounts.now().above(before, rounds))
    grown = Accounts.now().above(before, rounds)
    require(not grown, f"after {rounds} rounds of calls there are {grown}")


def _calls(rig: StoreRig) -> None:
    objects = rig.objects([50_000, 10])
    rig.put(objects)
    rig.expect(objects, "among many calls")
    (key, _) = objects
    rig.get(key, 49_999)
    rig.get(rig.key(), 10)
    cancelled = rig.store.load([key], views([bytearray(50_000)]))
    cancelled.cancel()
    rig.settle([cancelled], "a cancelled load")
    if rig.lacks("deletes") is None:
        rig.wait(rig.store.delete(list(objects)), "delete")


@case(5, "deletes")
def memory_stays_level(rig: StoreRig) -> None:
    """What is stored, loaded and deleted leaves no memory behind."""
    size, rounds = 1 << 20, 96 * rig.depth  # far more than what the process may give back
    for half in (0, 1):
        for _ in range(rounds):
            objects = rig.objects([size])
            rig.put(objects)
            rig.expect(objects, "in a churn")
            rig.wait(rig.store.delete(list(objects)), "delete")
        if not half:
            before = resident_bytes()
    grown = resident_bytes() - before
    require(grown < rounds * size // 2, f"{rounds} MiB passed through, {grown >> 20} MiB are kept")


@case(5, "pins", "small")
def pins_are_given_back(rig: StoreRig) -> None:
    """After any use of pins, all released, the whole store can be filled again."""
    size = max(1, (rig.store.usage().capacity or 0) // 10)
    for _ in range(3):
        objects = rig.objects([size] * 6)
        rig.put(objects)
        found = [rig.wait(rig.store.lookup(list(objects), pin=True), "lookup") for _ in range(3)]
        rig.expect(objects, "pinned three times")
        rig.wait(rig.store.delete(list(objects)[:2]), "delete of what is pinned")
        for answer in found:
            rig.store.release(answer.ticket or 0)
    objects = rig.objects([size] * 8)
    rig.put(objects)
    require(all(rig.found(list(objects))), "what was pinned once still takes the room of others")
