"""Cases of stores at scale: many pieces, objects and loads, and races of microseconds."""

from __future__ import annotations

import gc
import hashlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from kvbaton.connectors.store import Pieces
from kvbaton.testing.kit import Accounts, allocated_bytes, require, resident_bytes
from kvbaton.testing.store_rig import StoreRig, case, targets_for, views

MANY_PIECES = (1023, 1024, 1025, 5000)
"""Numbers of pieces around the maximum of one system call (IOV_MAX), and far above."""
MANY_OBJECTS = 6000
STORE_S = 20.0
"""Maximum seconds for storing these objects; a slow store gets fewer."""
RACE_S = 1.0
LOADS = 20_000
"""Number of loads in each of two halves, if there is time."""
LOAD_S = 5.0
"""Seconds for the loads of one half."""
LEAKED_BYTES = 100
"""Bytes per load of the second half from which on they count as a leak, not as noise."""
SLACK_BYTES = 1 << 19
SLACK_BLOCKS = 300

COLLISIONS = {
    "adler32": (4205, 8368),
    "crc32": (6199, 55162),
    "djb2": (10874, 84678),
    "fnv1a": (39575, 61676),
    "murmur3": (8521, 19974),
    "xxh32": (16650, 17420),
    "the low half of xxh64": (61936, 85918),
    "the high half of xxh64": (72530, 110980),
    "the low half of xxh3": (7078, 103468),
    "the high half of xxh3": (33106, 211042),
    "the first bytes of md5": (127127, 168404),
    "the last bytes of md5": (57435, 57486),
    "the first bytes of sha1": (54054, 70617),
    "the last bytes of sha1": (27558, 104690),
    "the first bytes of sha256": (4798, 58229),
    "the last bytes of sha256": (1518, 45550),
    "the first bytes of blake2b": (3860, 59617),
    "the sum of words": (15189, 82457),
    "the exclusive or of words": (85247, 115112),
}
"""By 32-bit hash function: two numbers whose `hashed_key` have the same hash."""


def hashed_key(number: int) -> bytes:
    """The key of a number in `COLLISIONS`."""
    number_bytes = number.to_bytes(8, "little")
    return hashlib.blake2b(number_bytes, digest_size=32, person=b"collision").digest()


@case(1)
def many_pieces(rig: StoreRig) -> None:
    """An object may have thousands of pieces, as blocks of many layers do."""
    for count in MANY_PIECES:
        size = 3 * count
        key, data, target = rig.key(), rig.noise(size), bytearray(size)
        sources = [memoryview(data)[i : i + 3] for i in range(0, size, 3)]
        stored = rig.wait(rig.store.store([key], [sources]), "store")
        require(stored == [True], f"an object in {count} pieces was not kept")
        targets = [memoryview(target)[i : i + 3] for i in range(0, size, 3)]
        rig.expect_in(targets, key, data, f"in {count} pieces")


@case(1)
def keys_of_equal_hashes(rig: StoreRig) -> None:
    """Keys with equal 32-bit hashes name different objects."""
    for what, numbers in COLLISIONS.items():
        # Bytes derived from the keys, as a server may still have objects of an earlier run.
        objects = {key: key[:20] for key in map(hashed_key, numbers)}
        rig.put(objects)
        rig.expect(objects, f"beside a key of which {what} are the same")


@case(2)
def done_means_done(rig: StoreRig) -> None:
    """At the moment when a future is done, targets are filled, and sources are free."""
    for _ in range(4 * rig.depth):
        objects = rig.objects([300_000, 5000, 20])
        keys, sources = list(objects), [bytearray(data) for data in objects.values()]

        def spoil(_: object, sources: list[bytearray] = sources) -> None:
            for source in sources:
                source[:] = b"\xee" * len(source)

        _when_done(rig.store.store(keys, views(sources)), spoil, rig, "store")
        targets = targets_for(objects)
        seen: list[bytes] = []

        def look(_: object, targets: list[bytearray] = targets, seen: list[bytes] = seen) -> None:
            seen.extend(map(bytes, targets))

        _when_done(rig.store.load(keys, views(targets)), look, rig, "load")
        for found, data in zip(seen, objects.values(), strict=True):
            rig.compare(found, data, "the moment that its load was done")


def _when_done(
    future: Future[list[bool]], act: Callable[[object], None], rig: StoreRig, what: str
) -> None:
    acted = threading.Event()

    def call(done: object) -> None:
        act(done)
        acted.set()

    future.add_done_callback(call)
    answers = rig.wait(future, what)
    require(all(answers), f"{what} said {answers}")
    require(acted.wait(rig.patience), f"{what} does not call back")


@case(2)
def small_objects_in_a_race(rig: StoreRig) -> None:
    """Small objects that are stored and loaded by many concurrent calls are all right."""
    objects = rig.stored([2000] * 32)
    end = time.monotonic() + RACE_S * rig.depth
    with _fast_switches():
        for number in itertools.count():
            new = rig.objects([2000] * 8)
            stores = rig.store_each(new)
            loads, targets = rig.load_each(objects)
            rig.settle([*loads, *stores], "small calls")
            rig.compare_each(loads, targets, objects, "in a race")
            if number % 4 == 0:
                rig.expect(new, "stored in a race")
            rig.drop(new)
            if time.monotonic() > end:
                return


@contextmanager
def _fast_switches() -> Iterator[None]:
    """Make Python switch threads every few microseconds, to provoke short races."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(2e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@case(5, slow=True)
def thousands_of_objects(rig: StoreRig) -> None:
    """Thousands of objects are all right; none is missing unless the store has a capacity."""
    batch = min(rig.store.capabilities.max_keys, 500)
    objects, end = dict[bytes, bytes](), time.monotonic() + STORE_S * rig.depth
    while len(objects) < MANY_OBJECTS and time.monotonic() < end:
        some = rig.stored([64] * batch)
        objects |= some
    whole = rig.store.usage().capacity is None
    for some in _batched(objects, batch):
        found, (loaded, targets) = rig.found(list(some)), rig.load(some)
        require(list(found) == loaded, "lookup and load disagree among thousands of objects")
        for there, target, data in zip(loaded, targets, some.values(), strict=True):
            if there or whole:
                rig.compare(bytes(target) if there else None, data, "among thousands of objects")
    for some in _batched(objects, batch):
        rig.drop(some)


def _batched(objects: dict[bytes, bytes], size: int) -> Iterator[dict[bytes, bytes]]:
    items = list(objects.items())
    for start in range(0, len(items), size):
        yield dict(items[start : start + size])


@case(5, slow=True)
def thousands_of_loads(rig: StoreRig) -> None:
    """Loads leak no descriptor, no thread, and no memory."""
    objects = rig.stored([64] * rig.at_once(64))
    keys: Sequence[bytes] = [*objects, *(rig.key() for _ in range(8))][: rig.at_once(72)]
    targets = [bytearray(64) for _ in keys]
    pieces: Sequence[Pieces] = views(targets)
    calls, end = 0, time.monotonic() + LOAD_S * rig.depth

    def load() -> None:
        rig.wait(rig.store.load(keys, pieces), "load")

    while calls * len(keys) < LOADS and time.monotonic() < end:
        load()
        calls += 1
    loads = calls * len(keys)
    told = f"after {loads} loads"
    for last in (False, True):
        gc.collect()
        accounts, held, blocks = Accounts.now(), _held_bytes(), sys.getallocatedblocks()
        for _ in range(calls):
            load()
        gc.collect()
        blocks = sys.getallocatedblocks() - blocks
        # Growing pools would have grown in the first half.
        grown = Accounts.now().above(accounts, rounds=max(3, calls // 100))
        require(not grown, f"{told} there are {grown}")
        few = blocks < loads // 20 + SLACK_BLOCKS
        require(few, f"{told} there are {blocks} more objects of Python in memory")
        kept = _held_bytes() - held
        if kept < loads * LEAKED_BYTES + SLACK_BYTES:
            break
        # Other threads may have allocated them: a leak shows again.
        require(not last, f"{told} {kept} bytes more are in memory, twice")
    rig.expect(dict(list(objects.items())[:3]), told)


def _held_bytes() -> int:
    """Allocated bytes, or else resident memory, which misses leaks into free heap memory."""
    allocated = allocated_bytes()
    return resident_bytes() if allocated is None else allocated
