"""Memory stores whose one defect shows with special bytes, keys, sizes or pairs of calls only."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from kvbaton.connectors.store import NO_HINTS, AnyPieces, Found, Hints, Pieces, Usage
from kvbaton.connectors.stores.memory import Arena
from tests.connectors_broken.stores import BrokenMemory, PlainArena, fill


class StripsObjects(BrokenMemory):
    """Loads an object without the zeros at its end, and fills up with whatever there was."""

    class Broken(PlainArena):
        def get(self, key: bytes, target: Pieces) -> bool:
            before = b"".join(target)
            there = super().get(key, target)
            if there:
                kept = b"".join(target).rstrip(b"\0")
                fill(target, kept + before[len(kept) :])
            return there


class TakesZerosForNothing(BrokenMemory):
    """Takes an object of nothing but zeros for a hole."""

    class Broken(PlainArena):
        def get(self, key: bytes, target: Pieces) -> bool:
            there = super().get(key, target)
            return there and (not any(map(len, target)) or any(map(any, target)))


class SharesEqualHeads(BrokenMemory):
    """Keeps one copy of objects that have the same length and begin with the same bytes."""

    class Broken(PlainArena):
        def _clear(self) -> None:
            super()._clear()
            self._alike: dict[tuple[int, bytes], bytes] = {}

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            data = b"".join(source)
            if len(data) < 64:
                return super().put(key, source, hints)
            kept = self._alike.setdefault((len(data), data[:64]), data)
            return super().put(key, [memoryview(kept)], hints)


class WrongAtAPowerOfTwo(BrokenMemory):
    """Loses the last byte of objects of whole MiB."""

    class Broken(PlainArena):
        def get(self, key: bytes, target: Pieces) -> bool:
            there = super().get(key, target)
            size = sum(map(len, target))
            if there and size and size % (1 << 20) == 0:
                data = b"".join(target)
                fill(target, data[:-1] + bytes([data[-1] ^ 1]))
            return there


class FoldsCase(BrokenMemory):
    """Names objects without regard to case, as some file systems and databases do."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        del self.on_forget

    def _evicted(self, key: bytes, pieces: Pieces | None) -> None:
        pass

    class Broken(PlainArena):
        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            return super().find([key.lower() for key in keys], pin, prefix)

        def get(self, key: bytes, target: Pieces) -> bool:
            return super().get(key.lower(), target)

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            return super().put(key.lower(), source, hints)

        def remove(self, keys: Sequence[bytes]) -> int:
            return super().remove([key.lower() for key in keys])


class DeletesByPrefix(BrokenMemory):
    """Deletes all whose keys begin with the same 16 bytes."""

    class Broken(Arena):
        def remove(self, keys: Sequence[bytes]) -> int:
            heads = {key[:16] for key in keys}
            count = sum(self.contains(list(dict.fromkeys(keys))))
            super().remove([key for key in self._entries if key[:16] in heads])
            return count


class LoadsWhatWasThere(BrokenMemory):
    """Keeps what it has loaded in front of the store, and does not drop it with its object."""

    class Broken(PlainArena):
        def _clear(self) -> None:
            super()._clear()
            self._seen: dict[tuple[bytes, int], bytes] = {}

        def get(self, key: bytes, target: Pieces) -> bool:
            place = key, sum(map(len, target))
            if place in self._seen and self.contains([key])[0] and place[1] < 1 << 16:
                fill(target, self._seen[place])
                return True
            there = super().get(key, target)
            if there and place[1] < 1 << 16:
                self._seen.setdefault(place, b"".join(target))
            return there


class IgnoresItsCapacity(BrokenMemory):
    """Keeps whatever comes, and tells that it holds no more than it may."""

    class Broken(PlainArena):
        def __init__(self, max_bytes: int, *words: Any) -> None:
            super().__init__(3 * max_bytes, *words)
            self._told_bytes = max_bytes

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            return sum(map(len, source)) <= self._told_bytes and super().put(key, source, hints)

        def usage(self) -> Usage:
            usage, most = super().usage(), self._told_bytes
            return replace(usage, capacity=most, num_bytes=min(most, usage.num_bytes or 0))


class CountsTwice(BrokenMemory):
    """Subtracts what was deleted once more than it was added."""

    class Broken(Arena):
        _sign = -1

        def _clear(self) -> None:
            super()._clear()
            self._deleted = 0

        def remove(self, keys: Sequence[bytes]) -> int:
            count = super().remove(keys)
            self._deleted += count
            return count

        def usage(self) -> Usage:
            usage = super().usage()
            return replace(usage, objects=(usage.objects or 0) + self._sign * self._deleted)


class CountsWhatIsGone(BrokenMemory):
    """Its count of objects only ever grows."""

    class Broken(CountsTwice.Broken):
        _sign = 1


class LoadsInTheCall(BrokenMemory):
    """Answers a load only when its bytes are there."""

    class Broken(Arena):
        def get(self, key: bytes, target: Pieces) -> bool:
            time.sleep(sum(map(len, target)) / (50 << 20))
            return super().get(key, target)

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """Load, and wait."""
        future = super().load(keys, targets)
        future.exception()
        return future


class UnpinsForAll(BrokenMemory):
    """Whoever releases an object that several have pinned unpins it for all."""

    class Broken(Arena):
        def release(self, ticket: int) -> None:
            if ticket in self._pins:
                released = {id(entry) for entry in self._pins[ticket][1]}
                for other in list(self._pins):
                    if any(id(entry) in released for entry in self._pins[other][1]):
                        super().release(other)


class FindsAKeyOnce(BrokenMemory):
    """A lookup answers only the first of equal keys."""

    class Broken(Arena):
        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            found = super().find(keys, pin, prefix)
            first = [keys.index(key) == place for place, key in enumerate(keys)]
            pairs = zip(found.present, first, strict=True)
            return replace(found, present=tuple(there and new for there, new in pairs))


class DeletesOneBatch(BrokenMemory):
    """Deletes the first 32 objects of a call, and says that it deleted all."""

    class Broken(Arena):
        def remove(self, keys: Sequence[bytes]) -> int:
            count = sum(self.contains(list(dict.fromkeys(keys))))
            super().remove(keys[:32])
            return count


class LoadsWholePages(BrokenMemory):
    """Of a target that begins with a page of registered memory it writes the whole last page."""

    class Broken(PlainArena):
        regions: Sequence[tuple[int, int]] = ()

        def get(self, key: bytes, target: Pieces) -> bool:
            there = super().get(key, target)
            if there and len(target) == 1 and (size := len(target[0])) % 4096:
                start = np.frombuffer(target[0], np.uint8).ctypes.data
                inside = any(low <= start and start + size < high for low, high in self.regions)
                if inside and start % 4096 == 0:
                    self._spoil(start, size)
            return there

        def _spoil(self, start: int, size: int) -> None:
            ctypes.memset(start + size, 0, -size % 4096)

    def register(self, regions: AnyPieces) -> None:
        """Remember where they are."""
        assert isinstance(self.backend, LoadsWholePages.Broken)
        places = [
            (np.frombuffer(r, np.uint8).ctypes.data, len(r))
            for r in regions
            if isinstance(r, memoryview)
        ]
        self.backend.regions = [(start, start + size) for start, size in places]


class LoadsNoOddTail(LoadsWholePages):
    """Of such a target it leaves the part of a page at the end as it was."""

    class Broken(LoadsWholePages.Broken):
        def _spoil(self, start: int, size: int) -> None:
            ctypes.memset(start + size - size % 4096, 0, size % 4096)


class ClearsByPrefix(BrokenMemory):
    """Clears also the namespaces that begin with the name of one."""

    class Broken(Arena):
        def clear(self, namespace: str) -> int:
            with self._changed:
                count = sum(e.hints.namespace == namespace for e in self._entries.values())
                self.remove(
                    [
                        key
                        for key, entry in self._entries.items()
                        if entry.hints.namespace.startswith(namespace or "-")
                    ]
                )
            return count


class RefusesTogether(BrokenMemory):
    """Says no to all objects of a call of which one has no room."""

    def store(
        self,
        keys: Sequence[bytes],
        sources: Sequence[Pieces],
        *,
        hints: Sequence[Hints] | None = None,
    ) -> Future[list[bool]]:
        """Store, and give one answer for all."""
        inner = super().store(keys, sources, hints=hints)
        outer: Future[list[bool]] = Future()
        outer.set_running_or_notify_cancel()

        def finish(done: Future[list[bool]]) -> None:
            answers = done.result()
            outer.set_result([all(answers)] * len(answers))

        inner.add_done_callback(finish)
        return outer


BROKEN_SUBTLE: dict[type[BrokenMemory], str] = {
    StripsObjects: "L1.sizes",
    TakesZerosForNothing: "L1.sizes",
    SharesEqualHeads: "L1.sizes",
    WrongAtAPowerOfTwo: "L1.sizes",
    FoldsCase: "L1.every-byte-of-a-key-counts",
    DeletesByPrefix: "L1.every-byte-of-a-key-counts",
    FindsAKeyOnce: "L1.one-key-twice",
    LoadsWhatWasThere: "L1.deleted-is-gone",
    DeletesOneBatch: "L1.deleted-is-gone",
    LoadsWholePages: "L1.registered-pages",
    LoadsNoOddTail: "L1.registered-pages",
    RefusesTogether: "L1.a-full-store-says-no",
    IgnoresItsCapacity: "L1.a-full-store-stays-right",
    ClearsByPrefix: "L1.namespaces-are-cleared-alone",
    CountsTwice: "L1.metrics-of-its-own",
    CountsWhatIsGone: "L1.metrics-of-its-own",
    LoadsInTheCall: "L2.calls-return-at-once",
    UnpinsForAll: "L2.pinned-objects-stay",
}
"""See `stores.BROKEN`."""
