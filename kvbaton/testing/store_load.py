"""L2 and L5 of stores: concurrent calls, cancellation, random schedules, and leaks."""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvbaton.testing.kit import require, require_no_growth, resident_bytes
from kvbaton.testing.store_rig import MIN_KEYS, StoreRig, case, targets_for, views

DELAYS = (0.0, 0.0, 0.0002, 0.001, 0.003, 0.01)
"""Seconds between a call and its cancellation."""
WATCH_S = 0.03
"""Seconds for which a buffer is watched for late accesses."""
STARVED_S = 0.2
"""Seconds above which a lookup was delayed by transfers, not by a busy machine."""
MARK = 0xA5
ROUNDS = 5
MAX_BYTES = 8 << 20
"""Maximum bytes of the objects held at one time in the random schedule."""
MAX_OBJECTS = 200
"""Maximum number of these objects, since a store may use a chunk for each, however small."""


@case(2)
def many_at_once(rig: StoreRig) -> None:
    """Hundreds of concurrent calls are all answered, each with its own bytes."""
    objects = rig.objects(rig.random.integers(0, 3000, 200).tolist())
    calls = rig.store_each(objects)
    rig.settle(calls, "many stores")
    require(all(call.result() == [True] for call in calls), "not all objects were kept")
    loads, targets = rig.load_each(objects)
    rig.settle(loads, "many loads")
    rig.compare_each(loads, targets, objects, "among many loads")


@case(2)
def done_once(rig: StoreRig) -> None:
    """A future is done exactly once, and calls each of its callbacks exactly once."""
    told: list[str] = []
    for name, call in rig.every_call(rig.objects([1, 300_000, 5])).items():
        future = call()
        future.add_done_callback(lambda _, name=name: told.append(name))  # type: ignore[misc]
        first = rig.wait(future, name)
        rig.eventually(lambda name=name: name in told)  # type: ignore[misc]
        time.sleep(WATCH_S)
        require(told.count(name) == 1, f"{name} called back {told.count(name)} times")
        require(future.result() is first, f"the answer of {name} has changed")


@case(2)
def calls_return_at_once(rig: StoreRig) -> None:
    """A call starts its work and returns; it never waits for bytes."""
    told = []
    for _ in range(3):
        calls, quick = rig.every_call(rig.objects([2 << 20] * rig.at_once(8))), True
        for name in ("store", "load"):
            start = time.monotonic()
            future = calls[name]()
            called = time.monotonic() - start
            rig.settle([future], name)
            done = time.monotonic() - start
            quick = quick and called < max(0.1, done / 2)
            told.append(f"{name} {called:.2f} of {done:.2f} s")
        if quick:
            return
    require(False, f"until it was done, the call alone took: {', '.join(told)}")


@case(2)
def lookups_overtake_bytes(rig: StoreRig) -> None:
    """A lookup does not wait for the bytes of earlier loads and stores."""
    # A fast store may finish few bytes before the lookup gets to run: repeat with more.
    for times in (1, 4, 16):
        there, new = rig.stored([256 << 10] * 24), rig.objects([256 << 10] * 24)
        moves = rig.store_each(new)
        for _ in range(times):
            moves += rig.load_each(there)[0]
        (key, *_), start = there, time.monotonic()
        require(rig.found([key]) == (True,), "a lookup behind bytes")
        last = all(move.done() for move in moves) and time.monotonic() - start > STARVED_S
        rig.settle(moves, "the bytes before a lookup")
        rig.drop([*there, *new])
        if not last:
            return
    require(False, "each time, a lookup was answered after all the bytes before it")


@case(2)
def overlapping_stores(rig: StoreRig) -> None:
    """An object stored by many concurrent calls is whole, and each call answers True."""
    objects = rig.objects([500_000, 7])
    calls = [rig.store.store(list(objects), views(objects.values())) for _ in range(12)]
    rig.settle(calls, "overlapping stores")
    answers = [call.result() for call in calls]
    require(answers == [[True, True]] * 12, f"overlapping stores of one object said {answers}")
    rig.expect(objects, "after overlapping stores")


@case(2)
def readers_see_whole_objects(rig: StoreRig) -> None:
    """While an object is being stored, a load gets all of it or a miss."""
    for _ in range(4 * rig.depth):
        objects = rig.objects([3_000_000])
        call = rig.store.store(list(objects), views(objects.values()))
        while not call.done():
            rig.expect_whole(objects, "while it was being stored")
        require(rig.wait(call, "store") == [True], "an object that was read was not kept")
        rig.expect(objects, "once it was stored")


@case(2)
def what_lookup_promises(rig: StoreRig) -> None:
    """An object that a lookup has found can be loaded, also while it is being stored."""
    for _ in range(4 * rig.depth):
        objects = rig.objects([2_000_000])
        call = rig.store.store(list(objects), views(objects.values()))
        while not call.done():
            if all(rig.found(list(objects))):
                rig.expect(objects, "after a lookup had found it")
        rig.settle([call], "store")


@case(2)
def cancel_leaves_targets(rig: StoreRig) -> None:
    """Once the future of a load is done, cancelled or not, its targets are not written any more."""
    objects = rig.stored([200_000] * rig.at_once(12))
    for delay in DELAYS * rig.depth:
        targets = targets_for(objects)
        future = rig.store.load(list(objects), views(targets))
        time.sleep(delay)
        future.cancel()
        rig.settle([future], "a cancelled load")
        answers = [] if future.cancelled() else future.result()
        rig.compare_hits(answers, targets, objects, "said to be loaded, though cancelled")
        _watch(targets, "a target was written after the future of its load was done")
    rig.expect(objects, "after cancelled loads")


@case(2)
def cancel_leaves_sources(rig: StoreRig) -> None:
    """Once the future of a store is done, cancelled or not, its sources are not read any more."""
    for delay in DELAYS * rig.depth:
        objects = rig.objects([200_000] * rig.at_once(12))
        buffers = [bytearray(data) for data in objects.values()]
        future = rig.store.store(list(objects), views(buffers))
        time.sleep(delay)
        future.cancel()
        rig.settle([future], "a cancelled store")
        for buffer in buffers:
            buffer[:] = b"\xee" * len(buffer)
        time.sleep(WATCH_S)
        rig.expect_whole(objects, "after its store was cancelled and its source overwritten")
        rig.put(objects)
        rig.expect(objects, "stored again after a cancellation")


@case(2)
def cancelled_in_the_queue(rig: StoreRig) -> None:
    """Calls that are cancelled while queued end, and do not harm other calls."""
    objects = rig.objects([300_000] * 24)
    rig.settle(rig.store_each(objects), "stores")
    loads, targets = rig.load_each(objects)
    for load in loads[1::2]:
        load.cancel()
    rig.settle(loads, "loads of which every other was cancelled")
    _watch(targets[1::2], "the target of a cancelled load was written late")
    kept = dict(list(objects.items())[::2])
    rig.compare_each(loads[::2], targets[::2], kept, "beside cancelled loads")


def _watch(buffers: list[bytearray], otherwise: str) -> None:
    """Overwrite buffers, and check that they are not written for `WATCH_S`."""
    for buffer in buffers:
        buffer[:] = bytes([MARK]) * len(buffer)
    time.sleep(WATCH_S)
    require(all(buffer.count(MARK) == len(buffer) for buffer in buffers), otherwise)


@case(2, "deletes")
def delete_during_load(rig: StoreRig) -> None:
    """An object that is deleted during its load is loaded whole, or is a miss."""
    for _ in range(6 * rig.depth):
        objects, others = (rig.objects([400_000] * rig.at_once(6)) for _ in range(2))
        rig.put(objects)
        targets = targets_for(objects)
        load = rig.store.load(list(objects), views(targets))
        delete = rig.store.delete(list(objects))
        rig.put(others)
        answers = rig.wait(load, "a load of what is being deleted")
        rig.compare_hits(answers, targets, objects, "loaded while it was deleted")
        count = rig.wait(delete, "delete")
        told = f"{len(objects)} objects were deleted, the answer is {count}"
        require(count == len(objects), told)
        rig.drop(others)


@case(2, "small")
def eviction_during_load(rig: StoreRig) -> None:
    """An object that may be evicted during its load is loaded whole, or is a miss."""
    size = max(1, (rig.store.usage().capacity or 0) // 12)
    for _ in range(3 * rig.depth):
        objects, others, more = (rig.objects([size] * count) for count in (4, 7, 5))
        rig.ask_store(objects)
        rig.ask_store(others)  # the store is full now
        targets = targets_for(objects)
        load = rig.store.load(list(objects), views(targets))
        rig.ask_store(more)
        answers = rig.wait(load, "a load of what is being evicted")
        rig.compare_hits(answers, targets, objects, "loaded while others were stored")


@case(2, "pins", "small")
def pinned_objects_stay(rig: StoreRig) -> None:
    """Pinned objects stay until `release`, however much is stored meanwhile."""
    capacity = rig.store.usage().capacity or 0
    pinned = rig.stored([max(1, capacity // 8)] * 2)
    found = rig.wait(rig.store.lookup(list(pinned), pin=True), "lookup")
    other = rig.wait(rig.store.lookup(list(pinned), pin=True), "lookup")
    rig.store.release(other.ticket or 0)  # one of two pins
    for _ in range(20):
        rig.ask_store(rig.objects([max(1, capacity // 10)]))
    rig.expect(pinned, "pinned, while more was stored than fits")
    rig.store.release(found.ticket or 0)
    for _ in range(3):
        rig.put(rig.objects([max(1, capacity // 2)]))


@case(2)
def close_ends_everything(rig: StoreRig) -> None:
    """`close` returns amid running calls; all futures are done then, and no buffer is accessed."""
    objects, more = rig.stored([400_000] * 16), rig.objects([400_000] * 16)
    store = rig.store
    loads, targets = rig.load_each(objects)
    calls: list[Future[Any]] = [
        *loads,
        *rig.store_each(more),
        store.lookup(list(objects)[:MIN_KEYS]),
    ]
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(rig.patience)
    require(not closing.is_alive(), f"close did not return within {rig.patience:g} s")
    late = [call for call in calls if not call.done()]
    require(not late, f"{len(late)} of {len(calls)} futures are not done after close")
    _watch(targets, "a target was written after close")


# --- L5 ---


@case(5)
def random_schedule(rig: StoreRig) -> None:
    """After any sequence of calls the store has the same content as a dictionary."""
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
        self.most_bytes = MAX_BYTES if capacity is None else min(MAX_BYTES, capacity // 3)
        steps = [self.store, self.store_again, self.load, self.lookup, self.cancel]
        deletes = rig.lacks("deletes") is None
        self.steps = [*steps, self.delete] if deletes else steps

    def step(self) -> None:
        """Make one random call."""
        self.steps[int(self.rig.random.integers(len(self.steps)))]()

    def store(self) -> None:
        """Store some new objects."""
        held = sum(map(len, self.there.values()))
        most = min(60_000, (self.most_bytes - held) // 4)
        if most > 0 and len(self.there) < MAX_OBJECTS:
            objects = self.rig.stored(self.rig.random.integers(0, most, 4).tolist())
            self.there |= objects

    def store_again(self) -> None:
        """Store an existing object again."""
        for key in self.some(1):
            self.rig.put({key: self.there[key]})

    def load(self) -> None:
        """Load some existing objects."""
        self.rig.expect({key: self.there[key] for key in self.some(5)}, "in a random schedule")

    def lookup(self) -> None:
        """Look up existing and deleted objects, maybe with a short pin."""
        there = self.some(self.rig.at_once(8))
        gone = self.gone[-4:][: self.rig.at_once(12) - len(there)]
        pin = bool(self.rig.random.integers(2))
        found = self.rig.wait(self.rig.store.lookup([*there, *gone], pin=pin), "lookup")
        wanted = (True,) * len(there) + (False,) * len(gone)
        require(found.present == wanted, f"lookup said {found.present}, right is {wanted}")
        if found.ticket is not None:
            self.rig.store.release(found.ticket)

    def cancel(self) -> None:
        """Start a load and cancel it."""
        keys = self.some(4)
        targets = views([bytearray(len(self.there[key])) for key in keys])
        future = self.rig.store.load(keys, targets)
        future.cancel()
        self.rig.settle([future], "a cancelled load")

    def delete(self) -> None:
        """Delete some existing objects."""
        keys = self.some(3)
        count = self.rig.wait(self.rig.store.delete(keys), "delete")
        require(count == len(keys), f"{len(keys)} objects were deleted, the answer is {count}")
        for key in keys:
            del self.there[key]
        self.gone += keys

    def some(self, most: int) -> list[bytes]:
        """Random keys of existing objects."""
        keys = list(self.there)
        count = min(len(keys), int(self.rig.random.integers(1, most + 1)))
        return [keys[i] for i in self.rig.random.permutation(len(keys))[:count]]


@case(5)
def gives_everything_back(rig: StoreRig) -> None:
    """A store that was used and closed leaves no descriptor, thread, process or temporary file."""
    folder = rig.folder / "kit-temporary"
    folder.mkdir()
    usual, tempfile.tempdir = tempfile.tempdir, str(folder)
    with rig.elsewhere():
        try:
            what, live = "lives of a store", partial(_live, rig)
            require_no_growth(what, live, rounds=ROUNDS, before=2, patience=rig.patience)
        finally:
            tempfile.tempdir = usual
    left = [path.name for path in folder.iterdir()]
    require(not left, f"temporary files are left: {left[:3]}")


def _live(rig: StoreRig) -> None:
    store = rig.open("short-lived")
    objects = rig.stored([10, 100_000], store)
    rig.expect(objects, "in a short life", store)
    rig.found(list(objects), store)
    rig.drop(objects, store)
    rig.close(store)


@case(5)
def calls_leave_nothing(rig: StoreRig) -> None:
    """Calls on an open store, also misses and cancelled ones, leak no descriptor or thread."""

    def use() -> None:
        objects = rig.stored([50_000, 10])
        rig.expect(objects, "among many calls")
        (key, _) = objects
        rig.get(key, 49_999)
        rig.get(rig.key(), 10)
        cancelled = rig.store.load([key], views([bytearray(50_000)]))
        cancelled.cancel()
        rig.settle([cancelled], "a cancelled load")
        rig.drop(objects)

    require_no_growth("rounds of calls", use, rounds=20, before=1, patience=rig.patience)


@case(5, "deletes")
def memory_stays_level(rig: StoreRig) -> None:
    """Storing, loading and deleting objects leaks no memory."""
    size, rounds = 4 << 20, 24 * rig.depth  # far more than the noise in resident memory
    for half in (0, 1):
        for _ in range(rounds):
            objects = rig.stored([size])
            rig.expect(objects, "in a churn")
            rig.wait(rig.store.delete(list(objects)), "delete")
        if not half:
            before = resident_bytes()
    grown = resident_bytes() - before
    passed = rounds * size
    require(grown < passed // 2, f"{passed >> 20} MiB passed through, {grown >> 20} MiB are kept")


@case(5, "pins", "small")
def pins_are_given_back(rig: StoreRig) -> None:
    """Once all pins are released, the whole store can be filled again."""
    size = max(1, (rig.store.usage().capacity or 0) // 10)
    for _ in range(3):
        objects = rig.stored([size] * rig.at_once(6))
        found = [rig.wait(rig.store.lookup(list(objects), pin=True), "lookup") for _ in range(3)]
        rig.expect(objects, "pinned three times")
        rig.wait(rig.store.delete(list(objects)[:2]), "delete of what is pinned")
        for answer in found:
            rig.store.release(answer.ticket or 0)
    objects = rig.stored([size] * 8)
    require(all(rig.found(list(objects))), "what was pinned once still takes the room of others")
