"""Objects as safetensors files in a directory that many processes and hosts may share.

``PATH/kvbaton-1/ab/abcd...safetensors``: one file per object (`filesystem_entry.py`), in the folder
of its key's first byte. `filesystem_space.py` keeps the account and evicts.

- An entry is written beside the others and renamed when it is whole, so a reader sees all of it or
  nothing, whoever is killed and whatever is full. Without `fsync`, a loss of power can leave an
  entry whose bytes never reached the disk: its checksum says so, it is a miss and removed.
- The directory is the only truth: an entry that another process removed is a miss, and one that it
  stored a hit, from the next call on. A network file system may show either a little later.
- A full disk evicts what was used least recently, then stores after all, or says False.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores import filesystem_entry
from kvbaton.connectors.stores.filesystem_entry import HEADER_BYTES, Verdict
from kvbaton.connectors.stores.filesystem_index import EntryIndex
from kvbaton.connectors.stores.filesystem_space import SUFFIX, SpaceManager, Written, status_of
from kvbaton.connectors.stores.threaded import ONE, Share, ThreadedStore
from kvbaton.errors import ConfigError, StoreError

logger = logging.getLogger(__name__)

SHARE = Share(64, 16 << 20)
"""Objects that are stored together."""
MAKE_ROOM_SECONDS = 5.0
"""The longest that one object waits for others to be evicted."""
LOOK_SECONDS = 1.0
"""How old `usage` may get while there are only lookups."""

_GONE = (errno.ENOENT, errno.ESTALE)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FilesystemStore(ThreadedStore):
    """Keeps objects in a directory; see the module.

    Args:
        name: see `Store.name`.
        path: the directory; made if it is missing.
        max_bytes: most bytes of all its entries, headers included; None for what the disk takes.
            Processes that share a directory should be given the same limit. Each may keep a 32nd as
            much of what it evicted, to write over it.
        threads: see `ThreadedStore`.
        fsync: whether an object that is stored also survives a loss of power.
        touch_seconds: how old the mark of an entry's last use gets before use renews it.
    """

    def __init__(
        self,
        name: str,
        *,
        path: str,
        max_bytes: int | None = None,
        threads: int = 4,
        fsync: bool = False,
        touch_seconds: float = 60.0,
    ) -> None:
        backend = Files(path, max_bytes, fsync=fsync, touch_seconds=touch_seconds)
        super().__init__(name, backend, threads=threads)
        self._files, self._share = backend, ONE if fsync else SHARE

    def store(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> Future[list[bool]]:
        """See `Store.store`; a thread takes several objects, unless each is waited for."""
        return self._move("store", self._files.put_some, keys, sources, self._share)


class Files:
    """The backend of `FilesystemStore`."""

    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False)

    def __init__(
        self, path: str, max_bytes: int | None, *, fsync: bool, touch_seconds: float
    ) -> None:
        self._root = os.path.join(os.path.abspath(path), "kvbaton-1")
        self._max_bytes = max_bytes
        self._fsync = fsync
        self._touch_seconds = touch_seconds
        self._space = SpaceManager(self._root, max_bytes)
        self._index = EntryIndex(self._root)
        self._looked = 0.0
        self._trouble: str | None = "not open"

    def open(self) -> None:
        """Make the directory, remove what dead writers left, make the limit hold.

        Raises:
            ConfigError: the limit is below one header.
            StoreError: the directory can't be made, read or locked.
        """
        if self._max_bytes is not None and self._max_bytes < HEADER_BYTES:
            raise ConfigError(
                "max_bytes", f"must be at least {HEADER_BYTES}, not {self._max_bytes}"
            )
        try:
            self._space.open()
        except OSError as error:
            raise self._failed("open", error) from error
        self._trouble = None

    def close(self) -> None:
        """Close what lookups keep open."""
        self._index.close()
        self._space.close()
        self._trouble = "not open"

    def health(self) -> str | None:
        """The error of the last call, if it had one."""
        return self._trouble

    def usage(self) -> Usage:
        """What all processes hold there, as this one last read."""
        return self._space.usage

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`."""
        try:
            if time.monotonic() > self._looked + LOOK_SECONDS:
                self._space.look()
                self._looked = time.monotonic()
            present = self._index.find(keys)
        except FileNotFoundError:  # somebody took the whole directory away
            return [False] * len(keys)
        except OSError as error:
            raise self._failed("look into", error) from error
        self._trouble = None
        return present

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; an entry that is not what it should be is removed."""
        try:
            right = self._read(self._path(key), key, target)
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise self._failed("read", error) from error
        self._trouble = None
        return right

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`."""
        return self.put_some([(key, source)])[0]

    def put_some(self, items: Sequence[tuple[bytes, Pieces]]) -> list[bool]:
        """Keep objects, each as by `put`; they appear, and are counted, under one lock."""
        try:
            stored = self._store(items)
        except OSError as error:
            if error.errno not in (*_NO_ROOM, *_GONE, errno.EFBIG):
                raise self._failed("write to", error) from error
            return [False] if len(items) == 1 else [self.put(*item) for item in items]
        self._trouble = None
        return stored

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`."""
        try:
            count, _ = self._space.remove([self._path(key) for key in dict.fromkeys(keys)])
        except OSError as error:
            raise self._failed("delete from", error) from error
        return count

    def _read(self, path: str, key: bytes, target: Pieces) -> bool:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            verdict = filesystem_entry.read(file, status.st_size, key, target)
            if verdict is Verdict.RIGHT:
                self._touch(file, status.st_mtime)
            # Evicted meanwhile, it may be another object's by now, or about to be.
            elif verdict is Verdict.CORRUPT and os.path.samestat(status, os.stat(path)):
                logger.warning("%s is not what was stored: removed", path)
                self._space.remove([path])
            return verdict is Verdict.RIGHT
        finally:
            os.close(file)

    def _is_stored(self, key: bytes, num_bytes: int) -> bool:
        path = self._path(key)
        status = status_of(path)
        if status is None or status.st_size != num_bytes:
            return False
        self._touch(path, status.st_mtime)
        return True

    def _store(self, items: Sequence[tuple[bytes, Pieces]]) -> list[bool]:
        """Write entries; when one alone finds the disk full, evict and try once more."""
        deadline = time.monotonic() + MAKE_ROOM_SECONDS
        sizes = [HEADER_BYTES + sum(map(len, source)) for _, source in items]
        most = self._max_bytes or sum(sizes)
        stored = [self._is_stored(key, n) for (key, _), n in zip(items, sizes, strict=True)]
        new = [n for n, there in enumerate(stored) if not there and sizes[n] <= most]
        if not new or not self._space.make(min(sum(sizes[n] for n in new), most), deadline):
            return stored
        try:
            done = self._write([(*items[n], sizes[n]) for n in new], deadline)
        except OSError as error:
            alone = error.errno in _NO_ROOM and len(items) == 1
            if not alone or not self._space.evict(sizes[0]):
                raise
            done = self._write([(*items[0], sizes[0])], deadline)
        for n in new[:done]:
            stored[n] = True
        return stored

    def _write(self, items: Sequence[tuple[bytes, Pieces, int]], deadline: float) -> int:
        """How many of them became entries."""
        files, done = list[Written](), 0
        try:
            for key, source, num_bytes in items:
                temporary, descriptor = self._space.begin(num_bytes)
                files.append(Written(temporary, self._path(key), num_bytes))
                self._write_whole(descriptor, key, source)
            done = self._space.publish(files, deadline)
        finally:
            for file in files[done:]:
                with suppress(FileNotFoundError):
                    os.unlink(file.temporary)
        if self._fsync:
            _sync_folders({os.path.dirname(file.path) for file in files[:done]})
        return done

    def _write_whole(self, file: int, key: bytes, source: Pieces) -> None:
        try:
            filesystem_entry.write(file, key, source)
            if self._fsync:
                os.fsync(file)
        finally:
            os.close(file)

    def _touch(self, file: int | str, mtime: float) -> None:
        if time.time() - mtime >= self._touch_seconds:
            # Another user's: it serves, its age just says less.
            with suppress(OSError):
                os.utime(file)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}{SUFFIX}"

    def _failed(self, doing: str, error: OSError) -> StoreError:
        self._trouble = f"can't {doing} {self._root}: {error}"
        return StoreError(self._trouble)


def _sync_folders(paths: set[str]) -> None:
    """Make names durable, the folders' own included."""
    for folder in (*paths, *{os.path.dirname(path) for path in paths}):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
