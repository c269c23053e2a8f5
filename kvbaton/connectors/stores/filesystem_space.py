"""Room in a shared directory: what is used, who may use more, and what must go.

::

    usage        objects and bytes of each folder, 256 rows of two int64; changed under `flock`
    evicting     locked by the one process that evicts
    tmp/         files that are being written, or will be (`RecycledFiles`), named after their
                 writers
    claims/      who is about to store what (`EntryClaims`)
    expires      is there once any entry has a time to live
    00/ .. ff/   entries, by the first byte of their keys

Nothing of this is kept in memory, so any number of processes on any number of hosts agree. Entries
appear and go under the lock of ``usage``, each with its row. A crash between the two leaves the
row wrong by that entry, until an eviction visits the folder and counts it anew. A lock that its
holder does not give back (a stopped process) is waited for up to `LOCK_SECONDS`, then done without:
the worst that follows is a row that is wrong until then, or that two evict.

Keys are hashes, so a folder is a fair sample of all entries: eviction reads folders until it has
seen `SAMPLE` entries, not all of a million, and removes the oldest of these, now and later: what
was the oldest stays it until it is used. A store with fewer entries is evicted in exact order. Age
is the file's mtime, which use renews. One that is ahead by more than `AHEAD_SECONDS` is from before
the clock was set back, and so older than all that are not.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import math
import os
import random
import secrets
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

FOLDERS = 256
SUFFIX = ".safetensors"
SAMPLE = 4096
"""Entries from which the oldest are chosen."""
LOCK_SECONDS = 5.0
AHEAD_SECONDS = 60.0
"""The clocks of two hosts differ by less."""
STALE_SECONDS = 900.0
"""After that long without a byte, a writer on another host counts as dead."""

PART = 64
"""Of a large store a 64th is evicted at a time."""
SPARE_PART = 32
"""Each process may keep a 32nd of the limit as spare files."""

_BATCH = 64
"""Entries removed under one lock."""

Rows = npt.NDArray[np.int64]
"""Objects and bytes of each folder, [256, 2]."""


class Written(NamedTuple):
    """A whole file that shall become an entry."""

    temporary: str
    path: str
    num_bytes: int


class LastUse(NamedTuple):
    """When an entry was used, and what it would free."""

    mtime_ns: int
    path: str
    num_bytes: int


class SpaceManager:
    """The account of one directory, as one process keeps it.

    Args:
        root: the directory, absolute.
        max_bytes: most bytes of all entries, headers included; None for no limit.
        evicted: called with the paths of entries that it has evicted.
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
        self._hand = random.randrange(FOLDERS)  # the folder that was read last; processes differ
        self.usage = Usage(capacity=max_bytes)
        """As last read from the directory."""

    def open(self) -> None:
        """Make what is missing, count what is there if nobody has, make the limit hold."""
        self._writer = _writer_name(this_process())
        self._run, self._numbers = secrets.token_hex(8), itertools.count()
        os.makedirs(self._in("tmp"), 0o770, exist_ok=True)
        self._device = os.stat(self._root).st_dev
        self._sweep()
        with self._account() as rows:  # fails where locks don't work
            counted = rows.any()
        if not counted:  # by nobody, or a crash has emptied the file
            there = set(os.listdir(self._root))  # the first entry of a folder makes it
            for folder in range(FOLDERS):
                if f"{folder:02x}" in there:
                    self._visit(folder)
        self.make_room(0, None)
        self._recycled.clear()

    def look(self) -> None:
        """Bring `usage` up to date."""
        with self._open("usage") as file:
            self._totals(_read_rows(file))

    def close(self) -> None:
        """Remove the files that were kept to be written over."""
        self._recycled.clear()

    def begin(self, num_bytes: int) -> tuple[str, int]:
        """Path and descriptor of a file to fill; the caller publishes or removes it.

        Args:
            num_bytes: that will be written. It may have as many of an evicted entry already.
        """
        spare = self._recycled.take(num_bytes)
        if spare is not None:
            with suppress(OSError):  # swept, or another user's
                return spare, os.open(spare, os.O_WRONLY | os.O_CLOEXEC)
            remove_file(spare)
        path = self._temporary()
        return path, self.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open_file(self, path: str, flags: int) -> int:
        """Open a file of the directory, and make its folder if somebody took it away.

        Raises:
            OSError: it can't be opened; see `check_mounted`, too.
        """
        try:
            return os.open(path, flags | os.O_CLOEXEC, 0o660)
        except FileNotFoundError:
            self._make_folder(path)
            return os.open(path, flags | os.O_CLOEXEC, 0o660)

    def check_mounted(self) -> None:
        """Raise `OSError` if the directory is gone with the file system that it was on.

        To make it anew would fill the disk on which that one was mounted.
        """
        there = self._root
        while not os.path.exists(there):
            there = os.path.dirname(there)
        if there != self._root and os.stat(there).st_dev != self._device:
            raise OSError(errno.ENODEV, "the file system that it was on is not mounted any more")

    def publish(self, files: Sequence[Written], deadline: float) -> int:
        """Make entries of the first so many files, those for which there is room in time."""
        done = self._rename(files)
        while done < len(files) and self.make_room(files[done].num_bytes, deadline):
            done += self._rename(files[done:])
        return done

    def remove(self, paths: Sequence[str], *, spare: bool = False) -> tuple[int, int]:
        """Remove entries, or make spare files of them; how many were there, and their bytes."""
        gone = np.zeros(2, np.int64)
        for start in range(0, len(paths), _BATCH):
            with self._account() as rows:
                for path in paths[start : start + _BATCH]:
                    with suppress(FileNotFoundError):  # somebody else was faster
                        change = (1, os.stat(path).st_size)
                        if spare:
                            os.rename(path, kept := self._temporary())
                            os.utime(kept)  # or it would look like a dead writer's
                            self._recycled.add(kept, change[1])
                        else:
                            os.unlink(path)
                        rows[_folder_of(path)] -= change
                        gone += change
        return int(gone[0]), int(gone[1])

    def make_room(self, num_bytes: int, deadline: float | None) -> bool:
        """Evict until `num_bytes` more keep the limit; False if they won't in time.

        Args:
            num_bytes: of a new entry.
            deadline: of `time.monotonic`; None to wait as long as it takes.
        """
        if self._max_bytes is None:
            return True
        stuck = False
        while self._missing(num_bytes) > 0:
            late = deadline is not None and time.monotonic() > deadline
            if stuck or late or num_bytes > self._max_bytes:
                return False
            with self._locked("evicting"):
                missing = self._missing(num_bytes)  # who held the lock may have made room for us
                if missing > 0 and not self._remove_oldest(missing, spare=True):
                    if self._sample():
                        self._oldest.clear()  # other rows may be wrong, too: first look at them
                    else:
                        stuck = not self._remove_oldest(self._missing(num_bytes), spare=True)
        return True

    def evict(self, num_bytes: int) -> bool:
        """Free room on the disk: remove entries, least recently used first; False if none is there.

        Args:
            num_bytes: to free. It may be a little more, or less where a sample has no more to give.
        """
        self._recycled.clear()
        with self._locked("evicting"):
            self._sample()
            return self._remove_oldest(num_bytes, spare=False)

    def _missing(self, num_bytes: int) -> int:
        """Bytes by which a new entry would break the limit."""
        assert self._max_bytes is not None
        self.look()
        return (self.usage.num_bytes or 0) + num_bytes - self._max_bytes

    def _sample(self) -> bool:
        """Find entries that may go; whether rows were found wrong."""
        self._sweep()
        entries, corrected = list[LastUse](), False
        for _ in range(FOLDERS):
            self._hand = (self._hand + 1) % FOLDERS
            found, wrong = self._visit(self._hand)
            entries += found
            corrected = corrected or wrong
            if len(entries) >= SAMPLE:
                # Others were not seen: what is old among these may be young among all.
                self._oldest = deque(_by_age(entries)[: len(entries) // 16])
                break
        else:
            self._oldest = deque(_by_age(entries))
        return corrected

    def _remove_oldest(self, num_bytes: int, *, spare: bool) -> bool:
        """Whether it freed anything."""
        # To lock the account for one entry costs more than the entry.
        goal = max(num_bytes, (self.usage.num_bytes or 0) // PART)
        victims = list[str]()
        while goal > 0 and self._oldest:
            entry = self._oldest.popleft()
            status = status_of(entry.path)
            if status is not None and status.st_mtime_ns == entry.mtime_ns:  # not used since
                victims.append(entry.path)
                goal -= entry.num_bytes
        freed = self.remove(victims, spare=spare)[1] > 0
        self._evicted(victims)
        return freed

    def paths(self) -> Iterator[str]:
        """All entries."""
        for folder in range(FOLDERS):
            with suppress(FileNotFoundError), os.scandir(self._in(f"{folder:02x}")) as found:
                yield from [item.path for item in found if item.name.endswith(SUFFIX)]

    def _make_folder(self, path: str) -> None:
        self.check_mounted()
        os.makedirs(os.path.dirname(path), 0o770, exist_ok=True)

    def _temporary(self) -> str:
        return f"{self._root}/tmp/{self._writer}.{self._run}-{next(self._numbers)}"

    def _rename(self, files: Sequence[Written]) -> int:
        """How many, until one would break the limit."""
        with self._account() as rows:
            room = math.inf if self._max_bytes is None else self._max_bytes - _total(rows)[1]
            for count, (temporary, path, num_bytes) in enumerate(files):
                there = status_of(path)  # another process was faster, or that one is torn
                change = (1, num_bytes) if there is None else (0, num_bytes - there.st_size)
                if change[1] > room:
                    return count
                try:
                    os.rename(temporary, path)
                except FileNotFoundError:  # somebody took the folder away
                    self._make_folder(path)
                    os.rename(temporary, path)
                rows[_folder_of(path)] += change
                room -= change[1]
        return len(files)

    def _visit(self, folder: int) -> tuple[list[LastUse], bool]:
        """All entries of a folder; puts its row right, if nothing changed meanwhile."""
        with self._open("usage") as file:
            before = _read_rows(file)[folder]
        entries = list[LastUse]()
        with suppress(FileNotFoundError), os.scandir(self._in(f"{folder:02x}")) as found:
            for item in found:
                if not item.name.endswith(SUFFIX):  # a file server's own, say
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
        """Remove what dead writers left. A live one that loses its file only fails to store."""
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
                        os.unlink(item.path)

    @contextmanager
    def _account(self) -> Iterator[Rows]:
        """The rows, to change: nobody else does meanwhile."""
        with self._locked("usage", self._lock) as file:
            rows = _read_rows(file)
            try:
                yield rows
            finally:
                os.pwrite(file, rows.tobytes(), 0)
                self._totals(rows)

    @contextmanager
    def _locked(self, name: str, lock: threading.Lock | None = None) -> Iterator[int]:
        """An open file, locked; or not, if `LOCK_SECONDS` were not enough."""
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
    """Evicted files of one process, kept to be written over: a full store needs no new ones.

    To write over a file of the right size takes a fifth of what it takes to remove it and to make
    another: its inode, its blocks and often its pages are there already (docs/performance.md).

    Args:
        max_bytes: most bytes of them all.
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
        """A file of that size; if there is none, as many bytes of others go, since one is made."""
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
        """Remove them all."""
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
    """A descriptor, closed at the end of the block."""
    try:
        yield file
    finally:
        os.close(file)


def remove_file(path: str) -> None:
    """Remove a file, unless another process was faster."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def _read_rows(file: int) -> Rows:
    rows = np.zeros((FOLDERS, 2), np.int64)
    os.preadv(file, [rows.data.cast("B")], 0)
    return rows


def status_of(path: str) -> os.stat_result | None:
    """Of a file; None if there is none."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _by_age(entries: Sequence[LastUse]) -> list[LastUse]:
    """The oldest first."""
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
    """Whether a temporary file's writer is proven dead: it was on this host and is no more."""
    try:
        _, pid, start, _ = name.split(".")
        process = ProcessCard(host, int(pid), int(start))
    except ValueError:
        return False
    return name.startswith(_writer_name(process) + ".") and is_gone(process)
