"""Objects as safetensors files in a directory that many processes and hosts may share.

``PATH/kvbaton-1/ab/abcd...safetensors``: one file (*entry*) per object, in the folder of its key's
first byte. `filesystem_space.py` counts entries and bytes, and evicts.

- An entry is written to a temporary file and renamed when it is whole, so a reader sees all of it
  or nothing, even if the writer is killed or the disk is full.
- Its header is determined by key, length and labels (`filesystem_entry.py`, which also describes
  the alignment to pages), so truncated files, files of other objects and foreign files are
  recognised. The bytes have no checksum here: the engine verifies a digest of everything that it
  loads before use, and deletes what is wrong. This also finds entries whose bytes never reached the
  disk because of a power loss without `fsync`.
- Evicted files are overwritten, so a read counts only if its path still names the same file.
- An entry's header also holds its `Hints.namespace`, tenant and time of expiry, if it has them. An
  expired entry is removed by the process that stored it, or by one that opened the directory after
  that; once these have ended, by the next process that opens the directory or reads the entry.
- Of entries of one age, those deep in a prefix are evicted first: for each block before it an entry
  is stored as `DEPTH_SECONDS` older.
- What is no file in the place of an entry (a link, a pipe) is a miss and removed; a directory gets
  another name. A file with another hard link is never written over.
- Nothing but the directory counts: an entry that another process removed is a miss, and one that it
  stored is a hit, from the next call on. A network file system may show either a little later.
- If the directory is removed, it is made again. If its file system is unmounted, calls fail until
  it is mounted again.
- On a full disk the least recently used entries are evicted, and the write is retried; if that does
  not help, the answer is False.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from binascii import hexlify
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from kvbaton.connectors.store import KEY_BYTES, NO_HINTS, Hints, Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.filesystem_entry import (
    HEADER_BYTES,
    NO_ROOM,
    DirectFileMover,
    EntryBuffer,
    EntryClaims,
    EntryLabels,
    ExpiringEntries,
    FileMover,
    open_entry,
    read_labels,
    start_of,
)
from kvbaton.connectors.stores.filesystem_space import (
    FOLDERS,
    SUFFIX,
    SpaceManager,
    Written,
    closing_file,
    remove_file,
    status_of,
)
from kvbaton.connectors.stores.threaded import (
    ONE,
    BatchLimit,
    ClientBackend,
    ThreadedStore,
    usage_by_namespace,
)
from kvbaton.errors import ConfigError

logger = logging.getLogger(__name__)

STORE_BATCH = BatchLimit(64, 16 << 20)
"""Batch of one store call."""
LOAD_BATCH = BatchLimit(16, 2 << 20)
"""Batch of one load call: loading a small object costs little more than a switch of threads."""
MAKE_ROOM_SECONDS = 5.0
"""Maximum seconds that a store waits for evictions."""
DEPTH_SECONDS = 0.01
"""Seconds by which an entry is stored as older, per block of depth."""
MAX_DEPTH = 3000
"""Maximum depth that counts for `DEPTH_SECONDS`."""
USAGE_SECONDS = 1.0
"""Maximum age of `usage` in seconds while there are only lookups."""
WARN_S = 10.0
"""Minimum seconds between two warnings about damaged entries: there may be thousands."""

_GONE = (errno.ENOENT, errno.ESTALE)
_NO_FOLDER = -1
"""File descriptor in place of a missing folder; lookups in it find nothing."""


class FilesystemStore(ThreadedStore):
    """Keeps objects in a directory; see the module.

    Args:
        name: See `Store.name`.
        path: The directory; created if it is missing.
        max_bytes: Maximum bytes of all entries, headers included; None for no limit but the disk.
            All processes that share a directory should have the same limit. Each may keep evicted
            files of up to a 32nd of it, to overwrite them.
        threads: See `ThreadedStore`.
        fsync: Whether stored objects also survive a loss of power.
        touch_seconds: Minimum age in seconds at which use renews an entry's time of last use.
        direct: Use direct I/O, which bypasses the page cache, if the file system can and memory is
            aligned to pages (a GPU node's is).
    """

    backend: Files

    def __init__(
        self,
        name: str,
        *,
        path: str,
        max_bytes: int | None = None,
        threads: int = 4,
        fsync: bool = False,
        touch_seconds: float = 60.0,
        direct: bool = False,
    ) -> None:
        mover = DirectFileMover() if direct else FileMover()
        backend = Files(path, max_bytes, mover, fsync=fsync, touch_seconds=touch_seconds)
        super().__init__(name, backend, threads=threads)
        self.directory = backend.root
        self.load_limit, self.store_limit = LOAD_BATCH, ONE if fsync else STORE_BATCH

    @property
    def on_forget(self) -> Callable[[Sequence[bytes]], None] | None:
        """See `Forgetting`."""
        return self.backend.on_forget

    @on_forget.setter
    def on_forget(self, tell: Callable[[Sequence[bytes]], None] | None) -> None:
        self.backend.on_forget = tell


class Files(ClientBackend):
    """A backend that keeps objects as files; see the module.

    Args:
        path, max_bytes, fsync, touch_seconds: As for `FilesystemStore`.
        mover: Reads and writes the files' bytes.

    Attributes:
        root: Absolute path of the directory of all files.

    Raises:
        ConfigError: The path is empty, or the limit is below one header.
    """

    capabilities = StoreCapabilities(
        persistent=True,
        shared=True,
        pins=False,
        hints=True,
        expires=True,
        prefix=True,
        claims=True,
        namespaces=True,
    )
    prefix_step, prefix_growth = 32, 2

    def __init__(
        self,
        path: str,
        max_bytes: int | None,
        mover: FileMover,
        *,
        fsync: bool,
        touch_seconds: float,
    ) -> None:
        self._mover = mover
        if not path:  # perhaps from an unset variable; it would mean the working directory
            raise ConfigError("path", "must name a directory, not ''")
        if max_bytes is not None and max_bytes < HEADER_BYTES:
            raise ConfigError("max_bytes", f"must be at least {HEADER_BYTES}, not {max_bytes}")
        self.root = os.path.join(os.path.abspath(path), "kvbaton-1")
        self._max_bytes = max_bytes
        self._fsync = fsync
        self._touch_seconds = touch_seconds
        self.on_forget: Callable[[Sequence[bytes]], None] | None = None
        """See `Forgetting`."""
        self._space = SpaceManager(self.root, max_bytes, self._forgotten)
        self._claims = EntryClaims(os.path.join(self.root, "claims"), self._space.open_file)
        self._expiring = ExpiringEntries()
        self._some_expire = os.path.join(self.root, "expires")
        """Path of a file that exists once any entry has a time of expiry."""
        self._damaged, self._warn_at = 0, 0.0
        self._lock = threading.Lock()
        self._index = EntryIndex(self.root)
        self._looked = 0.0
        self._buffer = EntryBuffer()

    def open(self) -> None:
        """Create the directory, remove files of dead writers, and evict down to the limit.

        If entries of the directory can expire, this reads the header of every entry.

        Raises:
            StoreError: The directory can't be created, read or locked.
        """
        with self._accessing("open"):
            self._space.open()
            self._claims.open()
            if status_of(self._some_expire) is not None:
                found = ((labels.expires_at, path) for path, labels, _ in self._labelled())
                self._expiring.add((end, path) for end, path in found if end is not None)
                self._remove_expired()

    def close(self) -> None:
        """Close open folders, return claims, and remove files kept for reuse."""
        super().close()
        self._index.close()
        self._claims.close()
        self._space.close()

    def usage(self) -> Usage:
        """Entries of all processes, as last read; and the number of damaged ones removed here."""
        return replace(self._space.usage, counters={"damaged_entries": self._damaged})

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`."""
        with self._accessing("look into"):
            try:
                if time.monotonic() > self._looked + USAGE_SECONDS:
                    self._space.look()
                    self._looked = time.monotonic()
                self._remove_expired()
                return self._index.find(keys)
            except FileNotFoundError:  # the whole directory was removed
                self._space.check_mounted()
                return [False] * len(keys)

    def claim(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Claiming.claim`."""
        present = self.contains(keys)
        with self._accessing("claim in"):
            pairs = zip(keys, present, strict=True)
            taken = [key for key, there in pairs if not there and self._claims.take(key)]
        # A previous holder of the claim may have stored the object after `present` was read.
        stored = [key for key, there in zip(taken, self.contains(taken), strict=True) if there]
        self._claims.drop(stored)
        ours = set(taken).difference(stored)
        return [key in ours for key in keys]

    def namespaces(self) -> dict[str, Usage]:
        """See `Namespaced.namespaces`; it reads the header of every entry."""
        return usage_by_namespace(
            (labels.namespace, labels.tenant, num_bytes)
            for _, labels, num_bytes in self._labelled()
        )

    def clear(self, namespace: str) -> int:
        """See `Namespaced.clear`; it reads the header of every entry."""
        paths = [path for path, labels, _ in self._labelled() if labels.namespace == namespace]
        with self._accessing("delete from"):
            return self._space.remove(paths)

    def _labelled(self) -> Iterator[tuple[str, EntryLabels, int]]:
        """Path, labels and bytes, header included, of every entry with a readable header."""
        with self._accessing("look into"):
            for path in self._space.paths():
                found = read_labels(path)
                if found is not None:
                    yield path, *found

    def _forgotten(self, paths: Sequence[str]) -> None:
        if self.on_forget is not None and paths:
            names = (os.path.basename(path).removesuffix(SUFFIX) for path in paths)
            self.on_forget([bytes.fromhex(name) for name in names])

    def _remove_expired(self) -> None:
        """Remove expired entries that this process knows of, unless they were stored again."""
        now, gone = time.time(), list[str]()
        for path in self._expiring.due(now):
            found = read_labels(path)
            if found is not None and found[0].is_expired(now):
                gone.append(path)
        if gone:
            self._space.remove(gone)
            self._forgotten(gone)

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; a damaged entry is removed."""
        return self.get_many([key], [target])[0]

    def get_many(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> list[bool]:
        """See `BatchBackend.get_many`."""
        answers, now = [False] * len(keys), time.time()
        with self._accessing("read"):
            for number, (key, target) in enumerate(zip(keys, targets, strict=True)):
                try:
                    answers[number] = self._read(self._path(key), key, target, now)
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
        return answers

    def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
        """See `Backend.put`."""
        return self.put_many([key], [source], [hints])[0]

    def put_many(
        self, keys: Sequence[bytes], sources: Sequence[Pieces], hints: Sequence[Hints]
    ) -> list[bool]:
        """See `BatchBackend.put_many`; all entries are renamed and counted under one lock."""
        items = list(zip(keys, sources, hints, strict=True))
        with self._accessing("write to"):
            try:
                self._remove_expired()
                return self._store(items)
            except OSError as error:
                if error.errno not in (*NO_ROOM, *_GONE, errno.EFBIG):
                    raise
            finally:
                self._claims.drop(keys)
        return [False] if len(items) == 1 else [self.put(*item) for item in items]

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`."""
        with self._accessing("delete from"):
            return self._space.remove([self._path(key) for key in dict.fromkeys(keys)])

    def _read(self, path: str, key: bytes, target: Pieces, now: float) -> bool:
        file = open_entry(path)
        if file is None:
            self._remove_damaged(path)
            return False
        try:
            status, found = os.fstat(file), None
            if stat.S_ISREG(status.st_mode):
                found = self._buffer.read(self._mover, file, status.st_size, key, target)
            named = os.lstat(path)
            if (named.st_ino, named.st_dev) != (status.st_ino, status.st_dev):
                return False
            if found is None:
                self._remove_damaged(path)
                return False
            if found.labels.is_expired(now):  # stored since `open` by a process that has ended
                self._space.remove([path])
                self._forgotten([path])
                return False
            fits = found.num_bytes == sum(map(len, target))
            if fits:
                self._touch(file, status.st_mtime, now)
            return fits
        finally:
            os.close(file)

    def _remove_damaged(self, path: str) -> None:
        with self._lock:
            self._damaged += 1
            warn = time.monotonic() >= self._warn_at
            self._warn_at = time.monotonic() + WARN_S if warn else self._warn_at
        if warn:
            logger.warning("%s is not what was stored: removed", path)
        self._space.remove([path])

    def _store(self, items: Sequence[tuple[bytes, Pieces, Hints]]) -> list[bool]:
        """Store entries; if a single one finds the disk full, evict and retry once."""
        deadline = time.monotonic() + MAKE_ROOM_SECONDS
        lengths = (sum(map(len, source)) for _, source, _ in items)
        sizes = [start_of(num_bytes) + num_bytes for num_bytes in lengths]
        most = self._max_bytes or sum(sizes)
        stored = []
        for (key, _, _), num_bytes in zip(items, sizes, strict=True):
            status = status_of(path := self._path(key))
            stored.append(False)
            if status and stat.S_ISREG(status.st_mode) and status.st_size == num_bytes:
                stored[-1] = True
                self._touch(path, status.st_mtime, time.time())
        new = [n for n, there in enumerate(stored) if not there and sizes[n] <= most]
        if not new or not self._space.make_room(min(sum(sizes[n] for n in new), most), deadline):
            return stored
        try:
            done = self._write([(*items[n], sizes[n]) for n in new], deadline)
        except OSError as error:
            alone = error.errno in NO_ROOM and len(items) == 1
            if not alone or not self._space.evict(sizes[0]):
                raise
            done = self._write([(*items[0], sizes[0])], deadline)
        for n in new[:done]:
            stored[n] = True
        return stored

    def _write(self, items: Sequence[tuple[bytes, Pieces, Hints, int]], deadline: float) -> int:
        """Write files and publish them; returns how many became entries."""
        files, ends, done = list[Written](), list[tuple[float, str]](), 0
        try:
            for key, source, hints, num_bytes in items:
                temporary, file = self._space.begin(num_bytes)
                files.append(Written(temporary, self._path(key), num_bytes))
                with closing_file(file):
                    labels = EntryLabels.of(hints)
                    pieces = self._buffer.fill(key, source, labels)
                    if not self._mover.move(file, pieces, write=True):
                        raise OSError(errno.EIO, f"{temporary} takes no more bytes")
                    if hints.depth > 0:
                        age = min(hints.depth, MAX_DEPTH) * DEPTH_SECONDS
                        os.utime(file, (time.time(), time.time() - age))
                    if self._fsync:
                        os.fsync(file)
                    if labels.expires_at is not None:
                        ends.append((labels.expires_at, self._path(key)))
            if ends and status_of(self._some_expire) is None:
                os.close(self._space.open_file(self._some_expire, os.O_WRONLY | os.O_CREAT))
            done = self._space.publish(files, deadline)
        finally:
            self._expiring.add(ends)
            for written in files[done:]:
                remove_file(written.temporary)
        if self._fsync:  # makes the files' names durable, and those of new folders
            folders = {os.path.dirname(written.path) for written in files[:done]}
            for folder in (*folders, *{os.path.dirname(path) for path in folders}):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                with closing_file(os.open(folder, flags)) as file:
                    os.fsync(file)
        return done

    def _touch(self, file: int | str, mtime: float, now: float) -> None:
        if abs(now - mtime) >= self._touch_seconds:  # in the future if the clock was set back
            with suppress(OSError):  # another user's file: its age stays wrong
                os.utime(file)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.root}/{name[:2]}/{name}{SUFFIX}"

    def _accessing(self, what: str) -> AbstractContextManager[None]:
        return self._calling(f"can't {what} {self.root}", OSError)


class EntryIndex:
    """Looks up entries of one directory with one ``access(2)`` each.

    With a million entries most time is spent in the kernel's path walk. So the folders are kept
    open and each walk has one step, a fifth faster than a walk from ``/``. Only open folders are
    cached, never whether an entry exists; folders that were removed or replaced are noticed and
    opened again.

    Args:
        root: Absolute path of the directory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._root_id: tuple[int, int] | None = None
        self._folders = [_NO_FOLDER] * FOLDERS
        self._lock = threading.Lock()

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Per key, whether its entry exists.

        Raises:
            OSError: The directory can't be read.
        """
        with self._lock:
            status = os.stat(self._root)
            if self._root_id != (status.st_dev, status.st_ino):
                self._forget()
                self._root_id = (status.st_dev, status.st_ino)
            present = self._ask(keys)
            if all(present):
                return present
            # Open folders that were missing, or have been replaced.
            missed = {key[0] for key, there in zip(keys, present, strict=True) if not there}
            opened = False
            for folder in missed:
                descriptor = self._folders[folder]
                with suppress(OSError):  # a network file system may raise for a removed folder
                    if descriptor != _NO_FOLDER and os.fstat(descriptor).st_nlink:
                        continue
                self._close(folder)
                flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
                with suppress(FileNotFoundError):
                    self._folders[folder] = os.open(f"{self._root}/{folder:02x}", flags)
                    opened = True
            return self._ask(keys) if opened else present

    def close(self) -> None:
        """Close the folders."""
        with self._lock:
            self._forget()

    def _ask(self, keys: Sequence[bytes]) -> list[bool]:
        names = hexlify(b"".join(keys), b"/", KEY_BYTES).split(b"/")
        folders, access, exists, suffix = self._folders, os.access, os.F_OK, SUFFIX.encode()
        return [
            access(name + suffix, exists, dir_fd=folders[key[0]])
            for name, key in zip(names, keys, strict=False)
        ]

    def _forget(self) -> None:
        self._root_id = None
        for folder in range(FOLDERS):
            self._close(folder)

    def _close(self, folder: int) -> None:
        if self._folders[folder] != _NO_FOLDER:
            os.close(self._folders[folder])
            self._folders[folder] = _NO_FOLDER
