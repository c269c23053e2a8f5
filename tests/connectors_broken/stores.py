"""Memory stores with one defect each: every one must be caught by the case listed with it.

They prove that the kit can fail. Each is the built-in memory store with one thing changed, most of
them in its backend, the arena. `files.py` has those that need files and processes.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
from msgspec import structs

from kvbaton.connectors.base import Memory
from kvbaton.connectors.store import (
    NO_HINTS,
    AnyPieces,
    Found,
    Hints,
    Pieces,
    StoreCapabilities,
    Usage,
)
from kvbaton.connectors.stores.memory import Arena, MemoryStore
from kvbaton.errors import StoreError
from kvbaton.testing.store_objects import OWNED, Owner

CAPACITY = 32 << 20
_LEAKED: list[bytes] = []
_OPENED: list[int] = []
SLOW_S = 0.01
SLOW_SIZES = (200_000, 256 << 10, 300_000, 400_000)
"""Of objects over which calls are given up: what takes long with these can be caught at it."""


class PlainArena(Arena):
    """Without what contract 1.2 added: for what breaks that as well."""

    capabilities = StoreCapabilities(persistent=False, shared=False, pins=True)


class BrokenMemory(MemoryStore):
    """The memory store over the arena that a subclass breaks; as it is here, nothing is broken."""

    Broken: ClassVar[type[Arena]] = Arena

    def __init__(self, name: str, *, threads: int = 2) -> None:
        super().__init__(name, max_bytes=CAPACITY, threads=threads)
        self.backend = self.Broken(CAPACITY, 300.0, time.monotonic, self._evicted)
        self.capabilities = self.backend.capabilities


# --- L0 and L1: what one caller sees, one call after the other ---


class StartsInTheConstructor(BrokenMemory):
    """Starts a thread before it is opened."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        threading.Thread(target=time.sleep, args=(1.0,), daemon=True).start()


class FindsEverything(BrokenMemory):
    """Says yes to every key."""

    class Broken(Arena):
        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            return replace(super().find(keys, pin, prefix), present=(True,) * len(keys))


class MissIsAnError(BrokenMemory):
    """Raises where it should say False."""

    class Broken(Arena):
        def get(self, key: bytes, target: Pieces) -> bool:
            if not super().get(key, target):
                raise StoreError(f"no object {key.hex()}")
            return True


class WrongOffset(BrokenMemory):
    """Loads objects of more than a page one byte too early."""

    class Broken(Arena):
        def get(self, key: bytes, target: Pieces) -> bool:
            there = super().get(key, target)
            if there and sum(map(len, target)) > 4096:
                data = b"".join(target)
                fill(target, data[1:] + data[:1])
            return there


class PiecesInWrongOrder(BrokenMemory):
    """Fills the pieces of a target from the last to the first."""

    class Broken(Arena):
        def get(self, key: bytes, target: Pieces) -> bool:
            return super().get(key, target[::-1])


class TakesAllForRegistered(BrokenMemory):
    """Once memory is registered, it fills that and no other."""

    class Broken(Arena):
        region: memoryview | None = None

        def get(self, key: bytes, target: Pieces) -> bool:
            if self.region is None:
                return super().get(key, target)
            size = sum(map(len, target))
            return super().get(key, [self.region[:size]])

    def register(self, regions: AnyPieces) -> None:
        assert isinstance(self.backend, TakesAllForRegistered.Broken)
        if isinstance(regions[0], memoryview):
            self.backend.region = regions[0]


class TakesRegionsForPieces(BrokenMemory):
    """Fills registered memory that is named by address from its start on."""

    class Broken(Arena):
        region: Memory | None = None

        def get(self, key: bytes, target: Pieces) -> bool:
            at, moved = 0, list[Any]()
            for piece in cast("AnyPieces", target):
                if isinstance(piece, Memory) and self.region is not None:
                    moved.append(self.region.part(at, at := at + len(piece)))
                else:
                    moved.append(piece)
            return super().get(key, moved)

    def register(self, regions: AnyPieces) -> None:
        assert isinstance(self.backend, TakesRegionsForPieces.Broken)
        if isinstance(regions[0], Memory):
            self.backend.region = regions[0]


class WritesBeyondTheTarget(BrokenMemory):
    """Writes one byte after the end of a target."""

    class Broken(PlainArena):
        def get(self, key: bytes, target: Pieces) -> bool:
            there = super().get(key, target)
            if there and target[-1].nbytes:
                # Of a `bytearray` that ends here, this is the zero that Python keeps behind it.
                last = np.frombuffer(target[-1], np.uint8)
                ctypes.memset(last.ctypes.data + last.nbytes, 0, 1)
            return there


class KeepsReferences(BrokenMemory):
    """Says that an object is kept, but reads its source only when somebody asks for it."""

    class Broken(PlainArena):
        def _clear(self) -> None:
            super()._clear()
            self._later: dict[bytes, Pieces] = {}

        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            self._catch_up()
            return super().find(keys, pin, prefix)

        def get(self, key: bytes, target: Pieces) -> bool:
            self._catch_up()
            return super().get(key, target)

        def remove(self, keys: Sequence[bytes]) -> int:
            self._catch_up()
            return super().remove(keys)

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            if sum(map(len, source)) > CAPACITY:
                return False
            self._later.setdefault(key, source)
            return True

        def _catch_up(self) -> None:
            later, self._later = self._later, {}
            for key, source in later.items():
                super().put(key, source)


class TakesShortTargets(BrokenMemory):
    """Fills a target that is shorter than the object, and calls that a hit."""

    class Broken(PlainArena):
        def get(self, key: bytes, target: Pieces) -> bool:
            with self._changed:
                entry = self._written(key)
            if entry is None or entry.num_bytes < sum(map(len, target)):
                return False
            whole = bytearray(entry.num_bytes)
            there = super().get(key, [memoryview(whole)])
            fill(target, whole)
            return there


class CutsKeys(BrokenMemory):
    """Ignores the last byte of a key."""

    class Broken(Arena):
        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            return super().find([key[:-1] for key in keys], pin, prefix)

        def get(self, key: bytes, target: Pieces) -> bool:
            return super().get(key[:-1], target)

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            return super().put(key[:-1], source, hints)

        def remove(self, keys: Sequence[bytes]) -> int:
            return super().remove([key[:-1] for key in keys])


class StoresAgain(BrokenMemory):
    """Replaces an object that is there."""

    class Broken(Arena):
        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            super().remove([key])
            return super().put(key, source, hints)


class StopsAtTheFirstMiss(BrokenMemory):
    """Looks up a prefix, as if the keys of a call were a chain."""

    class Broken(Arena):
        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            found = super().find(keys, pin, prefix)
            end = (*found.present, False).index(False)
            return replace(found, present=tuple(i < end for i in range(len(keys))))


class DeletesNothing(BrokenMemory):
    """Counts what it should delete, and keeps it."""

    class Broken(Arena):
        def remove(self, keys: Sequence[bytes]) -> int:
            return sum(self.contains(keys))


class FullIsAnError(BrokenMemory):
    """Raises where it should say that there is no room."""

    class Broken(Arena):
        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            if not super().put(key, source, hints):
                raise StoreError("no space left")
            return True


class ForgetsWhoseBytes(BrokenMemory):
    """Evicts an object's bytes, but not the object."""

    class Broken(Arena):
        def _forget(self, key: bytes) -> None:
            entry = self._entries[key]
            super()._forget(key)
            if self._free.num_bytes < CAPACITY // 2:
                entry.forgotten = False
                self._entries[key] = entry


class RaisesAtClose(BrokenMemory):
    """Closes, and complains."""

    def close(self) -> None:
        """Close, and raise."""
        super().close()
        raise RuntimeError("the other side was gone already")


class SlowUsage(BrokenMemory):
    """Counts its objects one by one whenever it is asked how many there are."""

    def usage(self) -> Usage:
        """Take time."""
        time.sleep(0.1)
        return super().usage()


class SlowHealth(BrokenMemory):
    """Asks its server whether all is well."""

    def health(self) -> str | None:
        """Take time."""
        time.sleep(0.1)
        return super().health()


class TakesPiecesOfOneCall(BrokenMemory):
    """Fills as many pieces as one `readv` does."""

    class Broken(Arena):
        def get(self, key: bytes, target: Pieces) -> bool:
            there = super().get(key, target)
            for piece in target[1024:]:
                piece[:] = bytes(len(piece))
            return there


class HashesKeys(BrokenMemory):
    """Names objects by 32 bits of their keys' hash."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        del self.on_forget  # it would tell hashes

    def _evicted(self, key: bytes, pieces: Pieces | None) -> None:
        pass

    class Broken(PlainArena):
        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            return super().find([_short(key) for key in keys], pin, prefix)

        def get(self, key: bytes, target: Pieces) -> bool:
            return super().get(_short(key), target)

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            return super().put(_short(key), source, hints)

        def remove(self, keys: Sequence[bytes]) -> int:
            return super().remove([_short(key) for key in keys])


def _short(key: bytes) -> bytes:
    return zlib.crc32(key).to_bytes(4, "little")


# --- L2: much at once, and calls that are given up ---


class CallsBackTwice(BrokenMemory):
    """Tells callbacks twice that a load is done."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """Load, with a future that stutters."""
        inner, outer = super().load(keys, targets), _Stutter()
        outer.set_running_or_notify_cancel()
        inner.add_done_callback(lambda done: _pass_on(done, outer))
        return outer


class _Stutter(Future[list[bool]]):
    def add_done_callback(self, fn: Callable[[Future[list[bool]]], object]) -> None:
        super().add_done_callback(fn)
        super().add_done_callback(fn)


class WaitsInTheCall(BrokenMemory):
    """Answers a store only when its bytes are there."""

    class Broken(Arena):
        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            time.sleep(sum(map(len, source)) / (50 << 20))
            return super().put(key, source, hints)

    def store(
        self,
        keys: Sequence[bytes],
        sources: Sequence[Pieces],
        *,
        hints: Sequence[Hints] | None = None,
    ) -> Future[list[bool]]:
        """Store, and wait."""
        future = super().store(keys, sources, hints=hints)
        future.exception()
        return future


class _Slow(PlainArena):
    def get(self, key: bytes, target: Pieces) -> bool:
        time.sleep(SLOW_S if sum(map(len, target)) in SLOW_SIZES else 0)
        return super().get(key, target)

    def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
        time.sleep(SLOW_S if sum(map(len, source)) in SLOW_SIZES else 0)
        return super().put(key, source, hints)


class OneQueueForAll(BrokenMemory):
    """Looks up only when all bytes before it have been moved."""

    Broken = _Slow

    def __init__(self, name: str) -> None:
        super().__init__(name, threads=1)

    def open(self) -> None:
        """Let one thread do everything."""
        super().open()
        for job in ("lookup", "load"):
            self._pools[job].shutdown()
            self._pools[job] = self._pools["store"]

    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        """Look up in the queue."""
        return self._pool("lookup").submit(self.backend.find, list(keys), pin)


class ShowsPartsOfObjects(BrokenMemory):
    """Lets readers see an object before its bytes are there."""

    class Broken(Arena):
        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            if sum(map(len, source)) < 1 << 20 or self.contains([key])[0]:
                return super().put(key, source, hints)
            stored = super().put(key, [memoryview(bytes(sum(map(len, source))))], hints)
            if stored:
                time.sleep(SLOW_S)
                with self._changed:
                    fill(self._views(self._entries[key]), b"".join(source))
            return stored


class FindsTooEarly(BrokenMemory):
    """Finds an object that is only being stored."""

    class Broken(Arena):
        def _clear(self) -> None:
            super()._clear()
            self._coming: set[bytes] = set()

        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            found = super().find(keys, pin, prefix)
            pairs = zip(keys, found.present, strict=True)
            return replace(found, present=tuple(p or k in self._coming for k, p in pairs))

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            if sum(map(len, source)) <= CAPACITY:
                self._coming.add(key)
                time.sleep(SLOW_S if sum(map(len, source)) > 1 << 20 else 0)
            stored = super().put(key, source, hints)
            self._coming.discard(key)
            return stored


class DoneTooEarly(BrokenMemory):
    """Says that a load is done some microseconds before its last bytes are there."""

    Broken = PlainArena

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """Load, and hold the last byte back."""
        inner, outer = super().load(keys, targets), Future[list[bool]]()
        outer.set_running_or_notify_cancel()

        def finish(done: Future[list[bool]]) -> None:
            last = [piece for pieces in targets for piece in pieces if len(piece)][-1:]
            kept = [piece[-1] for piece in last]
            for piece in last:
                piece[-1] ^= 1
            _pass_on(done, outer)
            for piece, byte in zip(last, kept, strict=True):
                piece[-1] = byte

        inner.add_done_callback(finish)
        return outer


class SharesABuffer(BrokenMemory):
    """Its threads load objects of one size through one buffer, without a lock."""

    class Broken(Arena):
        def _clear(self) -> None:
            super()._clear()
            self._buffer = bytearray(2000)

        def get(self, key: bytes, target: Pieces) -> bool:
            size = sum(map(len, target))
            if size != 2000:
                return super().get(key, target)
            there = super().get(key, [memoryview(self._buffer)])
            time.sleep(0)  # others may run here, as they might in a copy that releases the GIL
            if there:
                fill(target, self._buffer)
            return there


class LosesACancelledLoad(BrokenMemory):
    """Calls a load cancelled that goes on writing its targets."""

    Broken = _Slow

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """Load, with a future that can always be cancelled."""
        return _cancellable(super().load(keys, targets))


class LosesACancelledStore(BrokenMemory):
    """Calls a store cancelled that goes on reading its sources."""

    Broken = _Slow

    def store(
        self,
        keys: Sequence[bytes],
        sources: Sequence[Pieces],
        *,
        hints: Sequence[Hints] | None = None,
    ) -> Future[list[bool]]:
        """Store, with a future that can always be cancelled."""
        return _cancellable(super().store(keys, sources, hints=hints))


class NeverEndsWhenCancelled(BrokenMemory):
    """Forgets a load that was cancelled, and its future with it."""

    Broken = _Slow

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """Load, with a future that ends only if nobody cancels it."""
        outer = _Abandoned()
        outer.set_running_or_notify_cancel()
        inner = super().load(keys, targets)
        inner.add_done_callback(lambda done: None if outer.given_up else _pass_on(done, outer))
        return outer


class _Abandoned(Future[list[bool]]):
    given_up = False

    def cancel(self) -> bool:
        self.given_up = not self.done()
        return False


class LoadsWhatIsGone(BrokenMemory):
    """Does not hold an object's bytes while it copies them."""

    class Broken(PlainArena):
        def get(self, key: bytes, target: Pieces) -> bool:
            with self._changed:
                entry = self._written(key)
            if entry is None or entry.num_bytes != sum(map(len, target)):
                return False
            time.sleep(SLOW_S if entry.num_bytes in SLOW_SIZES else 0)
            fill(target, b"".join(self._views(entry)))
            return True


class PinsInWordsOnly(BrokenMemory):
    """Gives a ticket for pins, and pins nothing."""

    class Broken(Arena):
        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            found = super().find(keys, pin, prefix)
            if found.ticket is not None:
                super().release(found.ticket)
            return found


class ForgetsFuturesAtClose(BrokenMemory):
    """Closes without a word to those who wait."""

    Broken = _Slow

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """Load, with a future that ends only while the store is open."""
        outer: Future[list[bool]] = Future()
        outer.set_running_or_notify_cancel()
        inner = super().load(keys, targets)
        inner.add_done_callback(lambda done: _pass_on(done, outer) if self._pools else None)
        return outer


class ClosesNeverWhenBusy(BrokenMemory):
    """Waits at its end for calls that it does not carry out any more."""

    Broken = _Slow

    def close(self) -> None:
        """Hang, if there is work left."""
        busy = [pool._work_queue.qsize() for pool in self._pools.values()]
        time.sleep(12.0 if any(busy) else 0.0)
        super().close()


# --- L5: leaks ---


class LeaksDescriptors(BrokenMemory):
    """Opens a file in each life, and closes none."""

    def open(self) -> None:
        """Open, and open one file more."""
        super().open()
        os.open("/dev/null", os.O_RDONLY)


class LeavesTemporaryFiles(BrokenMemory):
    """Makes a temporary file in each life, and removes none."""

    def open(self) -> None:
        """Open, and make a file."""
        super().open()
        file, _ = tempfile.mkstemp()
        os.close(file)


class LeaksThreads(BrokenMemory):
    """Starts a thread for each miss, which stays."""

    class Broken(Arena):
        def get(self, key: bytes, target: Pieces) -> bool:
            there = super().get(key, target)
            if not there:
                threading.Thread(target=time.sleep, args=(60.0,), daemon=True).start()
            return there


class LeaksADescriptorNowAndThen(BrokenMemory):
    """Every tenth load opens a file that stays open."""

    class Broken(Arena):
        loads = 0

        def get(self, key: bytes, target: Pieces) -> bool:
            self.loads += 1
            if self.loads % 10 == 0:
                _OPENED.append(os.open("/dev/null", os.O_RDONLY))
            return super().get(key, target)

        def close(self) -> None:
            """Be tidy, so that other tests have descriptors left."""
            while _OPENED:
                os.close(_OPENED.pop())
            super().close()


class LeaksALittle(BrokenMemory):
    """Each load leaves 200 bytes behind."""

    class Broken(Arena):
        def get(self, key: bytes, target: Pieces) -> bool:
            _LEAKED.append(key * 5 + bytes(7))
            return super().get(key, target)


class LeaksOutsideOfPython(BrokenMemory):
    """Each load leaves 200 bytes behind that Python knows nothing of."""

    class Broken(Arena):
        def get(self, key: bytes, target: Pieces) -> bool:
            ctypes.memset(_malloc(200), 1, 200)
            return super().get(key, target)


_malloc = ctypes.CDLL(None).malloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]


class WrongAmongMany(BrokenMemory):
    """Its table is full after 5,000 objects, and then begins anew."""

    class Broken(Arena):
        def _clear(self) -> None:
            super()._clear()
            self._places: dict[bytes, int] = {}

        def get(self, key: bytes, target: Pieces) -> bool:
            there = super().get(key, target)
            if there and self._places.get(key, 0) > 5000:
                target[0][:1] = b"?"
            return there

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            self._places.setdefault(key, len(self._places))
            return super().put(key, source, hints)


class LeaksMemory(BrokenMemory):
    """Keeps a copy of each object that is deleted."""

    class Broken(Arena):
        def _forget(self, key: bytes) -> None:
            _LEAKED.append(b"".join(self._views(self._entries[key])))
            super()._forget(key)


class LeaksPins(BrokenMemory):
    """Goes on holding a pinned object that was deleted meanwhile."""

    class Broken(Arena):
        def release(self, ticket: int) -> None:
            deadline, entries = self._pins.get(ticket, (0.0, []))
            self._pins[ticket] = (deadline, [e for e in entries if not e.forgotten])
            super().release(ticket)


def fill(target: Sequence[memoryview], data: bytes | bytearray) -> None:
    """Copy bytes into pieces."""
    start = 0
    for piece in target:
        piece[:] = data[start : start + len(piece)]
        start += len(piece)


def _pass_on(done: Future[list[bool]], outer: Future[list[bool]]) -> None:
    if (error := done.exception()) is not None:
        outer.set_exception(error)
    else:
        outer.set_result(done.result())


def _cancellable(inner: Future[list[bool]]) -> Future[list[bool]]:
    outer: Future[list[bool]] = Future()

    def finish(done: Future[list[bool]]) -> None:
        if outer.set_running_or_notify_cancel():
            _pass_on(done, outer)

    inner.add_done_callback(finish)
    return outer


BROKEN: dict[type[BrokenMemory], str] = {
    RaisesAtClose: "L0.has-every-method",
    StartsInTheConstructor: "L0.constructor-does-nothing",
    FindsEverything: "L0.a-miss-is-no-error",
    MissIsAnError: "L0.a-miss-is-no-error",
    SlowUsage: "L0.health-and-usage-are-quick",
    SlowHealth: "L0.health-and-usage-are-quick",
    WrongOffset: "L1.sizes",
    PiecesInWrongOrder: "L1.pieces",
    TakesAllForRegistered: "L1.registered-memory",
    TakesRegionsForPieces: "L1.registered-by-address",
    WritesBeyondTheTarget: "L1.only-the-target",
    KeepsReferences: "L1.sources-are-free-once-done",
    TakesShortTargets: "L1.another-length-is-a-miss",
    CutsKeys: "L1.every-byte-of-a-key-counts",
    StoresAgain: "L1.storing-again-does-nothing",
    StopsAtTheFirstMiss: "L1.answers-are-in-order",
    DeletesNothing: "L1.deleted-is-gone",
    FullIsAnError: "L1.a-full-store-says-no",
    ForgetsWhoseBytes: "L1.a-full-store-stays-right",
    TakesPiecesOfOneCall: "L1.many-pieces",
    HashesKeys: "L1.keys-of-equal-hashes",
    CallsBackTwice: "L2.done-once",
    WaitsInTheCall: "L2.calls-return-at-once",
    OneQueueForAll: "L2.lookups-overtake-bytes",
    ShowsPartsOfObjects: "L2.readers-see-whole-objects",
    FindsTooEarly: "L2.what-lookup-promises",
    LosesACancelledLoad: "L2.cancel-leaves-targets",
    NeverEndsWhenCancelled: "L2.cancel-leaves-targets",
    LosesACancelledStore: "L2.cancel-leaves-sources",
    LoadsWhatIsGone: "L2.delete-during-load",
    PinsInWordsOnly: "L2.pinned-objects-stay",
    ForgetsFuturesAtClose: "L2.close-ends-everything",
    ClosesNeverWhenBusy: "L2.close-ends-everything",
    DoneTooEarly: "L2.done-means-done",
    SharesABuffer: "L2.small-objects-in-a-race",
    LeaksDescriptors: "L5.gives-everything-back",
    LeavesTemporaryFiles: "L5.gives-everything-back",
    LeaksThreads: "L5.calls-leave-nothing",
    LeaksMemory: "L5.memory-stays-level",
    LeaksPins: "L5.pins-are-given-back",
    WrongAmongMany: "L5.thousands-of-objects",
    LeaksADescriptorNowAndThen: "L5.thousands-of-loads",
    LeaksALittle: "L5.thousands-of-loads",
    LeaksOutsideOfPython: "L5.thousands-of-loads",
}
"""Each broken store and the case that must catch it, before any other does."""


# --- L4: names that let strangers share ---


_keys = Owner.keys


def _blind(**fields: Any) -> Callable[[Owner], list[bytes]]:
    return lambda owner: _keys(replace(owner, **fields))


def _record_blind(*fields: str) -> Callable[[Owner], list[bytes]]:
    def name(owner: Owner) -> list[bytes]:
        record = structs.replace(owner.record, **dict.fromkeys(fields, ""))
        return _keys(replace(owner, record=record))

    return name


def _by_chance(owner: Owner) -> list[bytes]:
    return _keys(replace(owner, salt=secrets.token_hex()))


BROKEN_NAMES: dict[str, tuple[Callable[[Owner], list[bytes]], str]] = {
    "differ from call to call": (_by_chance, "L4.equals-share"),
    "ignore the salt": (_blind(salt=""), "L4.another-salt"),
    "ignore the request's adapter": (_blind(adapter=b""), "L4.another-adapter"),
    "ignore a merged adapter": (_record_blind("adapter"), "L4.another-adapter"),
    "ignore the weights' revision": (_record_blind("revision"), "L4.another-model"),
    "ignore images": (_blind(items=()), "L4.another-item"),
    "ignore the encoder": (_record_blind("encoder"), "L4.another-item"),
    "ignore the dtype": (_record_blind("dtype"), "L4.another-dtype"),
    "ignore the KV dtype": (_record_blind("kv_dtype"), "L4.another-dtype"),
    "ignore the layout": (_blind(layouts=OWNED.layouts()), "L4.another-layout"),
}
"""Each broken way to name objects, and the case that must catch it, before any other does."""
