"""Stores over files with one defect each; see `stores.py`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from kvbaton.connectors.store import NO_HINTS, Hints, Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.filesystem import Files, FilesystemStore
from kvbaton.connectors.stores.filesystem_entry import HEADER_BYTES, FileMover, header
from kvbaton.connectors.stores.threaded import ONE
from kvbaton.errors import StoreError
from tests.conformance.back_doors import FilesystemBackDoor
from tests.connectors_broken.stores import fill

SLOW_BYTES = 1 << 20
"""From here on, what is slow is so slow that a writer can be killed in the middle of it."""


class PlainFiles(Files):
    """Without what contract 1.2 added."""

    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False)


class BrokenFilesystem(FilesystemStore):
    """The filesystem store over the files that a subclass breaks; nothing is broken here."""

    Broken: ClassVar[type[Files]] = Files
    max_bytes: ClassVar[int | None] = None

    def __init__(self, name: str, *, path: str) -> None:
        super().__init__(name, path=path)
        self.backend = self.Broken(
            path, self.max_bytes, FileMover(), fsync=False, touch_seconds=60.0
        )
        self.capabilities = self.backend.capabilities
        self.load_limit = self.store_limit = ONE  # by `get` and `put`, which subclasses break


class LosesAllAtClose(BrokenFilesystem):
    """Keeps objects in memory only."""

    class Broken(PlainFiles):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            self._objects: dict[bytes, bytes] = {}

        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            return [key in self._objects for key in keys]

        def get(self, key: bytes, target: Pieces) -> bool:
            data = self._objects.get(key)
            if data is None or len(data) != sum(map(len, target)):
                return False
            fill(target, data)
            return True

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            self._objects.setdefault(key, b"".join(source))
            return True

        def remove(self, keys: Sequence[bytes]) -> int:
            return len([key for key in keys if self._objects.pop(key, None) is not None])


class ServesStaleObjects(BrokenFilesystem):
    """Remembers what it has loaded, whatever others delete."""

    class Broken(PlainFiles):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            self._seen: dict[bytes, bytes] = {}

        def get(self, key: bytes, target: Pieces) -> bool:
            seen = self._seen.get(key)
            if seen is not None and len(seen) == sum(map(len, target)):
                fill(target, seen)
                return True
            there = super().get(key, target)
            if there:
                self._seen[key] = b"".join(target)
            return there

        def remove(self, keys: Sequence[bytes]) -> int:
            for key in keys:
                self._seen.pop(key, None)
            return super().remove(keys)


class ScramblesBytes(BrokenFilesystem):
    """Keeps other bytes than it was given, and gives back what it was given."""

    class Broken(PlainFiles):
        def get(self, key: bytes, target: Pieces) -> bool:
            there = super().get(key, target)
            fill(target, _flipped(target))
            return there

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            return super().put(key, [memoryview(_flipped(source))])


def _flipped(pieces: Pieces) -> bytes:
    return b"".join(pieces).translate(bytes(range(255, -1, -1)))


class WritesInPlace(BrokenFilesystem):
    """Writes objects where others find them; only its own process waits until they are whole."""

    class Broken(PlainFiles):
        writing: ClassVar[set[bytes]] = set()
        begun: ClassVar[Counter[bytes]] = Counter()
        lock: ClassVar[threading.Lock] = threading.Lock()

        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            found = super().contains(keys)
            return [there and k not in self.writing for k, there in zip(keys, found, strict=True)]

        def get(self, key: bytes, target: Pieces) -> bool:
            begun = self.begun[key]
            there = key not in self.writing and _read_unchecked(self._path(key), target)
            return there and self.begun[key] == begun  # no write began while it was read

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            with self.lock:
                if not self.contains([key])[0]:
                    self.writing.add(key)
                    self.begun[key] += 1
                    self._write_slowly(key, b"".join(source))
                    self.writing.discard(key)
            return True

        def _write_slowly(self, key: bytes, data: bytes) -> None:
            path = self._path(key)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb", buffering=0) as file:
                file.write(header(key, len(data), HEADER_BYTES))
                file.truncate(HEADER_BYTES + len(data))
                for start in range(0, len(data), 128 << 10):
                    time.sleep(0.004 if len(data) >= SLOW_BYTES else 0.0)
                    file.write(data[start : start + (128 << 10)])


class FindsWhatIsTorn(WritesInPlace):
    """Finds what a killed writer left in place, which no load takes, until it is stored again."""

    class Broken(WritesInPlace.Broken):
        def get(self, key: bytes, target: Pieces) -> bool:
            whole = self._is_whole(key, sum(map(len, target)))
            return whole and super().get(key, target)

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            with self.lock:
                if key not in self.writing and not self._is_whole(key, sum(map(len, source))):
                    self.writing.add(key)
                    self._write_slowly(key, b"".join(source))
                    with open(self._path(key) + ".whole", "w"):
                        self.writing.discard(key)
            return True

        def _is_whole(self, key: bytes, num_bytes: int) -> bool:
            path = self._path(key)
            with suppress(FileNotFoundError):
                return os.path.exists(path + ".whole") and os.path.getsize(path) >= num_bytes
            return False


class WritesLater(BrokenFilesystem):
    """Says that an object is kept, but writes it only when it is closed."""

    class Broken(PlainFiles):
        later: ClassVar[dict[bytes, bytes]] = {}

        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            found = super().contains(keys)
            return [there or k in self.later for k, there in zip(keys, found, strict=True)]

        def get(self, key: bytes, target: Pieces) -> bool:
            data = self.later.get(key)
            if data is None or len(data) != sum(map(len, target)):
                return data is None and super().get(key, target)
            fill(target, data)
            return True

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            if not self.contains([key])[0]:
                self.later[key] = b"".join(source)
            return True

        def remove(self, keys: Sequence[bytes]) -> int:
            count = sum(self.contains(list(dict.fromkeys(keys))))
            for key in keys:
                self.later.pop(key, None)
            super().remove(keys)
            return count

        def close(self) -> None:
            for key in list(self.later):
                super().put(key, [memoryview(self.later.pop(key))])


class WaitsForTheDead(BrokenFilesystem):
    """Locks an object that it stores, and never asks whether the lock's owner lives."""

    class Broken(PlainFiles):
        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            lock, limit = f"{self.root}-{key.hex()}.lock", time.monotonic() + 1.0
            while not _create(lock):
                if time.monotonic() > limit:
                    return False
                time.sleep(0.002)
            time.sleep(0.15 if sum(map(len, source)) >= SLOW_BYTES else 0.0)
            stored = super().put(key, source)
            os.unlink(lock)
            return stored


class RemembersAbsence(BrokenFilesystem):
    """Does not ask again for what was not there, unless its own process has stored it since."""

    class Broken(PlainFiles):
        absent: ClassVar[set[bytes]] = set()

        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            asked = [key for key in keys if key not in self.absent]
            found = dict(zip(asked, super().contains(asked), strict=True))
            self.absent.update(key for key, there in found.items() if not there)
            return [found.get(key, False) for key in keys]

        def get(self, key: bytes, target: Pieces) -> bool:
            return key not in self.absent and super().get(key, target)

        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            self.absent.discard(key)
            return super().put(key, source)


class SwallowsErrors(BrokenFilesystem):
    """Takes whatever goes wrong for a miss."""

    class Broken(PlainFiles):
        def get(self, key: bytes, target: Pieces) -> bool:
            with suppress(StoreError):
                return super().get(key, target)
            return False

        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            with suppress(StoreError):
                return super().contains(keys)
            return [False] * len(keys)


class DeletesInSilence(BrokenFilesystem):
    """Says that there was nothing to delete, whatever goes wrong."""

    class Broken(PlainFiles):
        def remove(self, keys: Sequence[bytes]) -> int:
            with suppress(StoreError):
                return super().remove(keys)
            return 0


class TakesCutFiles(BrokenFilesystem):
    """Takes what is left of a file for the object, and zeros for the rest."""

    class Broken(PlainFiles):
        def get(self, key: bytes, target: Pieces) -> bool:
            return _read_unchecked(self._path(key), target)


class TakesSpoiledFiles(BrokenFilesystem):
    """Claims, by its back door, to notice a changed byte, and has no checksum."""


class SpoilingBackDoor(FilesystemBackDoor):
    """Changes a byte of what is kept, too."""

    def spoil(self, key: bytes) -> None:
        path = self._path(key)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


class ClaimsForAll(BrokenFilesystem):
    """Tells everybody to store what is not there."""

    class Broken(Files):
        def claim(self, keys: Sequence[bytes]) -> list[bool]:
            return [not there for there in self.contains(keys)]


class ClaimsWhatHasNoRoom(BrokenFilesystem):
    """Gives a claim back only with an object that is kept."""

    max_bytes = 20_000_000

    class Broken(Files):
        def put_many(
            self, keys: Sequence[bytes], sources: Sequence[Pieces], hints: Sequence[Hints]
        ) -> list[bool]:
            ours = self._claims._ours.copy()
            answers = super().put_many(keys, sources, hints)
            for key, kept in zip(keys, answers, strict=True):
                if not kept and key in ours:
                    self._claims.take(key)
            return answers


class RemembersNamespaces(BrokenFilesystem):
    """Lists the namespaces that there were when it was first asked."""

    class Broken(Files):
        _listed: dict[str, Usage] | None = None

        def namespaces(self) -> dict[str, Usage]:
            if self._listed is None:
                self._listed = super().namespaces()
            return self._listed


def _read_unchecked(path: str, target: Pieces) -> bool:
    """Fill a target from a file whose header claims its length, whatever the bytes are."""
    num_bytes = sum(map(len, target))
    with suppress(OSError, ValueError, LookupError):
        with open(path, "rb") as file:
            data = file.read()
        start = 8 + int.from_bytes(data[:8], "little")
        if json.loads(data[8:start])["object"]["shape"] == [num_bytes]:
            fill(target, data[start:].ljust(num_bytes, b"\0"))
            return True
    return False


def _create(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


Door = Callable[[Any], Any] | None

BROKEN_FILES: dict[type[BrokenFilesystem], tuple[str, Door]] = {
    LosesAllAtClose: ("L1.outlives-close", None),
    ClaimsForAll: ("L1.one-of-several-claims", None),
    ClaimsWhatHasNoRoom: ("L1.one-of-several-claims", None),
    RemembersNamespaces: ("L1.namespaces-are-cleared-alone", None),
    ServesStaleObjects: ("L1.others-see-it", FilesystemBackDoor),
    ScramblesBytes: ("L1.what-is-kept-is-what-was-stored", FilesystemBackDoor),
    WritesInPlace: ("L3.a-killed-writer", FilesystemBackDoor),
    FindsWhatIsTorn: ("L3.a-killed-writer", None),
    WritesLater: ("L3.a-killed-writer", None),
    WaitsForTheDead: ("L3.what-a-killed-writer-leaves", FilesystemBackDoor),
    RemembersAbsence: ("L3.others-see-whole-objects", FilesystemBackDoor),
    SwallowsErrors: ("L3.errors-are-told", FilesystemBackDoor),
    DeletesInSilence: ("L3.errors-are-told", FilesystemBackDoor),
    TakesCutFiles: ("L3.cut-objects", FilesystemBackDoor),
    TakesSpoiledFiles: ("L3.spoiled-objects", SpoilingBackDoor),
}
"""Each broken store, the case that must catch it before any other does, and its back door."""
