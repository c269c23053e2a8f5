"""Space in a shared directory: accounting, limit and eviction.

::

    usage        objects and bytes of each folder, 256 rows of two int64; changed under `flock`
    evicting     locked by the one process that evicts
    tmp/         files being written, or kept for that (`RecycledFiles`), named by their writers
    claims/      claims of objects about to be stored (`EntryClaims`)
    expires      exists once any entry has a time to live
    00/ .. ff/   entries, by the first byte of their keys

None of this is cached in memory, so any number of processes on any number of hosts agree. An entry
and its folder's row change together, under the lock of ``usage``. A crash between the two leaves
the row wrong by that entry, until an eviction reads the folder and counts it again. If a lock is
held for longer than `LOCK_SECONDS` (by a stopped process), the caller continues without it. In the
worst case a row is wrong until the next count, or two processes evict at once.

Keys are hashes, so a folder is a fair sample of all entries. Eviction reads folders until it has
seen `SAMPLE` entries, instead of a million, and removes the oldest of them. The rest of this list
serves later evictions, since an entry stays among the oldest until it is used. A store with fewer
entries is evicted in exact LRU order. An entry's age is the file's mtime, which use renews. An
mtime in the future by more than `AHEAD_SECONDS` is from before the clock was set back, and counts
as older than all others.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import math
import os
import random
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.guard import ProcessCard, is_gone, this_process
from kvbaton.connectors.store import Usage

logger = logging.getLogger(__name__)

FOLDERS = 256
SUFFIX = ".safetensors"
SAMPLE = 4096
"""Number of entries from which the oldest are chosen."""
LOCK_SECONDS = 5.0
"""Maximum seconds to wait for a lock."""
AHEAD_SECONDS = 60.0
"""Seconds by which the clocks of two hosts may differ."""
STALE_SECONDS = 900.0
"""Seconds without a write after which a writer on another host counts as dead."""

PART = 64
"""An eviction removes at least 1 / `PART` of all bytes."""
SPARE_PART = 32
"""Each process may keep 1 / `SPARE_PART` of the limit as spare files."""

_BATCH = 64
"""Maximum number of entries removed under one lock."""

Rows = npt.NDArray[np.int64]
"""Objects and bytes of each folder, int64 [256, 2]."""


class Written(NamedTuple):
    """A complete temporary file that shall become the entry at `path`."""

    temporary: str
    path: str
    num_bytes: int


class LastUse(NamedTuple):
    """Time of an entry's last use, its path, and the bytes that its removal frees."""

    mtime_ns: int
    path: str
    num_bytes: int


class SpaceManager:
    """Accounts for the space of one directory, and evicts.

    Args:
        root: Absolute path of the directory.
        max_bytes: Maximum bytes of all entries, headers included; None for no limit.
        evicted: Called with the paths of evicted entries.
    """

    def __init__(
        self,
        root: str,
        max_bytes: int | None,
        evicted: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        self._evicted = evicted
        self._root = root
        self._max_bytes = max_bytes
        self._writer = ""
        self._lock = threading.Lock()
        self._recycled = RecycledFiles((max_bytes or 0) // SPARE_PART)
        self._oldest = deque[LastUse]()
        self._hand = random.randrange(FOLDERS)  # the folder last sampled; random per process
        self.usage = Usage(capacity=max_bytes)
        """Usage as last read from the directory."""

    def open(self) -> None:
        """Create the directory, count its entries if none are counted, evict down to the limit."""
        self._writer = _writer_name(this_process())
        self._run, self._numbers = secrets.token_hex(8), itertools.count()
        os.makedirs(self._in("tmp"), 0o770, exist_ok=True)
        self._device = os.stat(self._root).st_dev
        self._sweep()
        with self._account() as rows:  # fails if the file system has no locks
            counted = rows.any()
        if not counted:  # not counted yet, or a crash has emptied the file
            there = set(os.listdir(self._root))  # a folder is created with its first entry
            for folder in range(FOLDERS):
                if f"{folder:02x}" in there:
                    self._visit(folder)
        self.make_room(0, None)
        self._recycled.clear()

    def look(self) -> None:
        """Read `usage` again."""
        with self._open("usage") as file:
            self._totals(_read_rows(file))

    def close(self) -> None:
        """Remove the files kept for reuse."""
        self._recycled.clear()

    def begin(self, num_bytes: int) -> tuple[str, int]:
        """Path and descriptor of a file to write; the caller publishes or removes it.

        Args:
            num_bytes: Bytes that will be written. The file may be an evicted one of this size.
        """
        spare = self._recycled.take(num_bytes)
        if spare is not None:
            with suppress(OSError):  # removed by a sweep, or another user's
                return spare, os.open(spare, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            remove_file(spare)
        path = self._temporary()
        return path, self.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open_file(self, path: str, flags: int) -> int:
        """Open a file of the directory, and create its folder if it was removed.

        Raises:
            OSError: The file can't be opened; or see `check_mounted`.
        """
        try:
            return os.open(path, flags | os.O_CLOEXEC, 0o660)
        except FileNotFoundError:
            self._make_folder(path)
            return os.open(path, flags | os.O_CLOEXEC, 0o660)

    def check_mounted(self) -> None:
        """Raise `OSError` if the directory's file system was unmounted.

        Creating the directory again would fill the disk below the mount point.
        """
        there = self._root
        while not os.path.exists(there):
            there = os.path.dirname(there)
        if there != self._root and os.stat(there).st_dev != self._device:
            raise OSError(errno.ENODEV, "the file system that it was on is not mounted any more")

    def publish(self, files: Sequence[Written], deadline: float) -> int:
        """Rename files to entries, in order, while there is room in time; returns how many."""
        done = self._rename(files)
        while done < len(files) and self.make_room(files[done].num_bytes, deadline):
            done += self._rename(files[done:])
        return done

    def remove(self, paths: Sequence[str], *, spare: bool = False) -> int:
        """Remove entries, or make spare files of them; returns how many were there."""
        gone = 0
        for start in range(0, len(paths), _BATCH):
            with self._account() as rows:
                for path in paths[start : start + _BATCH]:
                    with suppress(FileNotFoundError):  # another process was faster
                        status = os.lstat(path)
                        num_bytes = status.st_size
                        # To write over a link would write over a file that is not ours.
                        if spare and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                            os.rename(path, kept := self._temporary())
                            os.utime(kept)  # an old mtime would look like a dead writer's
                            self._recycled.add(kept, num_bytes)
                        else:
                            _remove_entry(path)
                        rows[_folder_of(path)] -= (1, num_bytes)
                        gone += 1
        return gone

    def make_room(self, num_bytes: int, deadline: float | None) -> bool:
        """Evict until `num_bytes` more keep the limit; False if that fails or takes too long.

        Args:
            num_bytes: Bytes of a new entry.
            deadline: Deadline on the monotonic clock; None for none.
        """
        if self._max_bytes is None:
            return True
        stuck = False
        while self._missing(num_bytes) > 0:
            late = deadline is not None and time.monotonic() > deadline
            if stuck or late or num_bytes > self._max_bytes:
                return False
            with self._locked("evicting"):
                missing = self._missing(num_bytes)  # the lock's last holder may have made room
                if missing > 0 and not self._remove_oldest(missing, spare=True):
                    if self._sample():
                        self._oldest.clear()  # rows were wrong: count again before evicting
                    else:
                        stuck = not self._remove_oldest(self._missing(num_bytes), spare=True)
        return True

    def evict(self, num_bytes: int) -> bool:
        """Remove entries, least recently used first, to free the disk; False if there are none.

        Args:
            num_bytes: Bytes to free; approximate, as whole entries of one sample are removed.
        """
        self._recycled.clear()
        with self._locked("evicting"):
            self._sample()
            return self._remove_oldest(num_bytes, spare=False)

    def _missing(self, num_bytes: int) -> int:
        """Bytes by which a new entry would exceed the limit."""
        assert self._max_bytes is not None
        self.look()
        return (self.usage.num_bytes or 0) + num_bytes - self._max_bytes

    def _sample(self) -> bool:
        """Sample folders for the oldest entries; returns whether rows were wrong."""
        self._sweep()
        entries, corrected = list[LastUse](), False
        for _ in range(FOLDERS):
            self._hand = (self._hand + 1) % FOLDERS
            found, wrong = self._visit(self._hand)
            entries += found
            corrected = corrected or wrong
            if len(entries) >= SAMPLE:
                # Only the oldest of a sample are also old among all entries.
                self._oldest = deque(_by_age(entries)[: len(entries) // 16])
                break
        else:
            self._oldest = deque(_by_age(entries))
        return corrected

    def _remove_oldest(self, num_bytes: int, *, spare: bool) -> bool:
        """Remove entries from the list of the oldest; returns whether there were any."""
        # Locking the account for each single entry would cost more than removing it.
        goal = max(num_bytes, (self.usage.num_bytes or 0) // PART)
        victims = list[str]()
        while goal > 0 and self._oldest:
            entry = self._oldest.popleft()
            status = status_of(entry.path)
            if status is not None and status.st_mtime_ns == entry.mtime_ns:  # not used since
                victims.append(entry.path)
                goal -= entry.num_bytes
        gone = self.remove(victims, spare=spare)
        self._evicted(victims)
        return gone > 0

    def paths(self) -> Iterator[str]:
        """Paths of all entries."""
        for folder in range(FOLDERS):
            with suppress(FileNotFoundError), os.scandir(self._in(f"{folder:02x}")) as found:
                yield from [item.path for item in found if item.name.endswith(SUFFIX)]

    def _make_folder(self, path: str) -> None:
        self.check_mounted()
        os.makedirs(os.path.dirname(path), 0o770, exist_ok=True)

    def _temporary(self) -> str:
        return f"{self._root}/tmp/{self._writer}.{self._run}-{next(self._numbers)}"

    def _rename(self, files: Sequence[Written]) -> int:
        """Rename files to entries until one would exceed the limit; returns how many."""
        with self._account() as rows:
            room = math.inf if self._max_bytes is None else self._max_bytes - _total(rows)[1]
            for count, (temporary, path, num_bytes) in enumerate(files):
                there = status_of(path)  # stored by another process, or damaged
                change = (1, num_bytes) if there is None else (0, num_bytes - there.st_size)
                if change[1] > room:
                    return count
                try:
                    os.rename(temporary, path)
                except FileNotFoundError:  # the folder was removed, or does not exist yet
                    self._make_folder(path)
                    os.rename(temporary, path)
                except IsADirectoryError:
                    _remove_entry(path)
                    os.rename(temporary, path)
                rows[_folder_of(path)] += change
                room -= change[1]
        return len(files)

    def _visit(self, folder: int) -> tuple[list[LastUse], bool]:
        """Entries of a folder, and whether its row was wrong; corrects it unless it has changed."""
        with self._open("usage") as file:
            before = _read_rows(file)[folder]
        entries = list[LastUse]()
        with suppress(FileNotFoundError), os.scandir(self._in(f"{folder:02x}")) as found:
            for item in found:
                if not item.name.endswith(SUFFIX):  # for example a file server's own files
                    continue
                with suppress(FileNotFoundError):  # evicted by another process
                    status = item.stat(follow_symlinks=False)
                    entries.append(LastUse(status.st_mtime_ns, item.path, status.st_size))
        seen = np.array([len(entries), sum(entry.num_bytes for entry in entries)])
        wrong = bool((seen != before).any())
        if wrong:
            with self._account() as rows:
                wrong = bool((rows[folder] == before).all())
                if wrong:
                    rows[folder] = seen
        return entries, wrong

    def _sweep(self) -> None:
        """Remove files of dead writers. If a live writer loses its file, only that store fails."""
        host = this_process().host
        with self._open("evicting") as file:
            os.utime(file)
            now = os.fstat(file).st_mtime  # the file server's clock
        with suppress(FileNotFoundError), os.scandir(self._in("tmp")) as found:
            for item in found:
                with suppress(FileNotFoundError):
                    age = now - item.stat(follow_symlinks=False).st_mtime
                    ours = item.name.startswith(f"{self._writer}.")
                    if age > STALE_SECONDS or (not ours and _is_dead(item.name, host)):
                        remove_file(item.path)

    @contextmanager
    def _account(self) -> Iterator[Rows]:
        """The rows, locked for changes; written back at the end of the block."""
        with self._locked("usage", self._lock) as file:
            rows = _read_rows(file)
            try:
                yield rows
            finally:
                os.pwrite(file, rows.tobytes(), 0)
                self._totals(rows)

    @contextmanager
    def _locked(self, name: str, lock: threading.Lock | None = None) -> Iterator[int]:
        """An open file with an exclusive lock, or without it after `LOCK_SECONDS`."""
        deadline = time.monotonic() + LOCK_SECONDS
        mine = lock is not None and lock.acquire(timeout=LOCK_SECONDS)
        try:
            with self._open(name) as file:
                while True:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() > deadline:
                            break
                    time.sleep(0.0005)
                yield file
        finally:
            if lock is not None and mine:
                lock.release()

    def _open(self, name: str) -> AbstractContextManager[int]:
        return closing_file(self.open_file(self._in(name), os.O_RDWR | os.O_CREAT))

    def _totals(self, rows: Rows) -> None:
        objects, num_bytes = _total(rows)
        self.usage = Usage(objects, num_bytes, self._max_bytes)

    def _in(self, name: str) -> str:
        return f"{self._root}/{name}"


class RecycledFiles:
    """Evicted files of one process, kept to be overwritten, so that a full store needs no new ones.

    Overwriting a file of the right size takes a fifth of the time of removing it and creating
    another: its inode, its blocks and often its pages exist already (docs/performance.md).

    Args:
        max_bytes: Maximum bytes of all kept files.
    """

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._lock = threading.Lock()
        self._by_size: dict[int, list[str]] = {}

    def add(self, path: str, num_bytes: int) -> None:
        """Keep a file, or remove it if there are enough."""
        with self._lock:
            if num_bytes <= self._room:
                self._room -= num_bytes
                self._by_size.setdefault(num_bytes, []).append(path)
                return
        remove_file(path)

    def take(self, num_bytes: int) -> str | None:
        """A file of this size; if there is none, removes as many bytes of others for a new file."""
        with self._lock:
            if num_bytes in self._by_size:
                return self._pop(num_bytes)
            others = list[str]()
            while self._by_size and num_bytes > 0:
                size = next(iter(self._by_size))
                others.append(self._pop(size))
                num_bytes -= size
        for path in others:
            remove_file(path)
        return None

    def clear(self) -> None:
        """Remove all kept files."""
        with self._lock:
            spares, self._by_size = self._by_size, {}
            self._room += sum(size * len(paths) for size, paths in spares.items())
        for paths in spares.values():
            for path in paths:
                remove_file(path)

    def _pop(self, size: int) -> str:
        path = self._by_size[size].pop()
        self._room += size
        if not self._by_size[size]:
            del self._by_size[size]
        return path


@contextmanager
def closing_file(file: int) -> Iterator[int]:
    """Context that closes a file descriptor."""
    try:
        yield file
    finally:
        os.close(file)


def remove_file(path: str) -> None:
    """Remove a file, unless another process was faster; a directory is left as it is."""
    with suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(path)


def _remove_entry(path: str) -> None:
    """Remove what has an entry's name; a directory, which is not ours, gets another name."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        aside = f"{path}.{secrets.token_hex(8)}"
        os.rename(path, aside)
        logger.warning("a directory in the place of an entry is now %s", aside)


def _read_rows(file: int) -> Rows:
    rows = np.zeros((FOLDERS, 2), np.int64)
    os.preadv(file, [rows.data.cast("B")], 0)
    return rows


def status_of(path: str) -> os.stat_result | None:
    """`os.lstat` of a file; None if it does not exist."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _by_age(entries: Sequence[LastUse]) -> list[LastUse]:
    """Entries sorted by age, the oldest first."""
    ahead_ns = time.time_ns() + int(AHEAD_SECONDS * 1e9)
    return sorted(entries, key=lambda entry: (entry.mtime_ns <= ahead_ns, entry))


def _folder_of(path: str) -> int:
    return int(os.path.basename(os.path.dirname(path)), 16)


def _total(rows: Rows) -> tuple[int, int]:
    objects, num_bytes = rows.clip(0).sum(0).tolist()
    return objects, num_bytes


def _writer_name(process: ProcessCard) -> str:
    host = hashlib.blake2b(process.host.encode(), digest_size=8).hexdigest()
    return f"{host}.{process.pid}.{process.start}"


def _is_dead(name: str, host: str) -> bool:
    """Whether the writer of a temporary file was a process of this host that is proven dead."""
    try:
        _, pid, start, _ = name.split(".")
        process = ProcessCard(host, int(pid), int(start))
    except ValueError:
        return False
    return name.startswith(_writer_name(process) + ".") and is_gone(process)
