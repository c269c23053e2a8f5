"""The file of an object: a header, then the object's bytes, placed so that direct I/O works.

The header is a safetensors header, padded with spaces as that format allows. It is determined by
the key, the length, the object's offset in the file and its `EntryLabels`. An object of
`ALIGNED_FROM` bytes or more begins within the header's last page, such that its end is on a page
boundary: all of it but its first bytes, fewer than a page, are whole pages of the file. With KV
blocks these first bytes are the block's own header, and its KV is aligned to pages. Shorter objects
begin at `HEADER_BYTES`.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import logging
import mmap
import os
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple, Self

import msgspec
import numpy as np
from msgspec import Struct

from kvbaton.connectors.store import CLAIM_S, Hints, Pieces
from kvbaton.connectors.stores.arena_copies import copy, cut
from kvbaton.connectors.stores.filesystem_space import closing_file, remove_file

logger = logging.getLogger(__name__)

MOST_GONE = 10_000
"""Minimum number of expiry times, also of removed entries, before stale ones are dropped."""
PAGE = 4096
"""Alignment of direct I/O in bytes: of a piece's address, file offset and length."""
_MAX_PIECES = 1024
"""IOV_MAX."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""


class FileMover:
    """Reads or writes pieces of an open file, from its start, by ``preadv`` or ``pwritev``."""

    def move(self, file: int, pieces: Pieces, *, write: bool) -> bool:
        """Write the pieces, or read into them.

        Returns False if the file ends early, or takes no more. Raises `OSError` otherwise.
        """
        move: Callable[[int, Sequence[memoryview], int], int] = os.pwritev if write else os.preadv
        if len(pieces) <= _MAX_PIECES and move(file, pieces, 0) == sum(map(len, pieces)):
            return True
        left, offset = deque(piece for piece in pieces if piece), 0
        while left:
            done = move(file, list(islice(left, _MAX_PIECES)), offset)
            if not done:
                return False
            offset += done
            while done:
                piece = left.popleft()
                if done < len(piece):
                    left.appendleft(piece[done:])
                done -= min(done, len(piece))
        return True


class DirectFileMover(FileMover):
    """Uses direct I/O, which bypasses the page cache, for pieces that are aligned to pages.

    If the file system refuses direct I/O, it continues like `FileMover`.
    """

    def __init__(self) -> None:
        self.refused = False
        """Whether a file system has refused direct I/O."""

    def move(self, file: int, pieces: Pieces, *, write: bool) -> bool:
        """See `FileMover.move`."""
        move = partial(super().move, file, pieces, write=write)
        if self.refused or not all(map(_is_aligned, pieces)):
            return move()
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            return move()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            logger.warning("no direct I/O: the file system refuses it (%s)", error)
            self.refused = True
        finally:
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return move()


def _is_aligned(piece: memoryview) -> bool:
    address: int = np.frombuffer(piece, np.uint8).ctypes.data if piece else 0
    return address % PAGE == 0 and len(piece) % PAGE == 0


HEADER_BYTES = 512
"""Length of the shortest header; all fields are within these first bytes of any header."""
ALIGNED_FROM = 64 << 10
"""Minimum length in bytes of objects that are aligned to pages."""

_LENGTH = struct.Struct("<Q")


class EntryLabels(NamedTuple):
    """The part of an object's `Hints` that its entry's header holds.

    Attributes:
        namespace: See `Hints`.
        tenant: See `Hints`.
        expires_at: Unix time in seconds; None for never.
    """

    namespace: str = ""
    tenant: str = ""
    expires_at: float | None = None

    @classmethod
    def of(cls, hints: Hints) -> Self:
        """Labels of an object that is stored now."""
        over = None if hints.ttl_s is None else round(time.time() + hints.ttl_s, 3)
        return cls(hints.namespace, hints.tenant, over)

    def is_expired(self, now: float) -> bool:
        """Whether the entry has expired."""
        return self.expires_at is not None and self.expires_at <= now


NO_LABELS = EntryLabels()


class FoundEntry(NamedTuple):
    """What a file holds.

    Attributes:
        num_bytes: Length of the object.
        labels: Its labels.
    """

    num_bytes: int
    labels: EntryLabels


def start_of(num_bytes: int) -> int:
    """Offset in its file of an object of this length."""
    if num_bytes < ALIGNED_FROM:
        return HEADER_BYTES
    lead = num_bytes % PAGE
    return -(-(HEADER_BYTES + lead) // PAGE) * PAGE - lead


def header(key: bytes, num_bytes: int, start: int, labels: EntryLabels = NO_LABELS) -> bytes:
    """Header of `start` bytes before an object; it describes one tensor ``object`` of U8."""
    about = {"format": "kvbaton-object-2", "key": key.hex()}
    about |= {name: str(value) for name, value in labels._asdict().items() if value}
    tensor = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    told = msgspec.json.encode({"__metadata__": about, "object": tensor})
    return _LENGTH.pack(start - _LENGTH.size) + told.ljust(start - _LENGTH.size)


class _Head(Struct):
    about: dict[str, str] = msgspec.field(name="__metadata__")


_decode_head = msgspec.json.Decoder(_Head).decode


def labels_of(head: bytes) -> EntryLabels | None:
    """Labels from a file's first `HEADER_BYTES`; None if these are no valid header."""
    try:
        about = _decode_head(head[_LENGTH.size :]).about
        at = about.get("expires_at")
        return EntryLabels(
            about.get("namespace", ""), about.get("tenant", ""), None if at is None else float(at)
        )
    except ValueError:
        return None


def open_entry(path: str) -> int | None:
    """Open an entry to read it, without waiting; None if a link or a socket is in its place.

    Raises:
        OSError: It can't be opened.
    """
    # Non-blocking: never wait for a pipe that somebody put there.
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        return None


def read_labels(path: str) -> tuple[EntryLabels, int] | None:
    """Labels of the entry at `path`, and its bytes, header included.

    None if it is gone, has no valid header, is not a file, or may not be read.
    """
    with suppress(FileNotFoundError, PermissionError):
        file = open_entry(path)
        if file is None:
            return None
        with closing_file(file):
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode):
                labels = labels_of(os.pread(file, HEADER_BYTES, 0))
                return None if labels is None else (labels, status.st_size)
    return None


class EntryBuffer(threading.local):
    """Page-aligned memory for the header and the object's first bytes; one per thread."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * PAGE)
        self._pages = memoryview(self._memory)

    def fill(self, key: bytes, source: Pieces, labels: EntryLabels) -> list[memoryview]:
        """The content of an object's file in pieces, valid until the next call."""
        num_bytes = sum(map(len, source))
        start = start_of(num_bytes)
        first, rest = _cut(source, start, num_bytes)
        end = start + sum(map(len, first))
        self._pages[:start] = header(key, num_bytes, start, labels)
        copy([self._pages[start:end]], first)
        return [self._pages[:end], *rest]

    def read(
        self, mover: FileMover, file: int, size: int, key: bytes, target: Pieces
    ) -> FoundEntry | None:
        """Read a file of `size` bytes into a target.

        Returns:
            What the file holds, None if it is damaged. If the result is None or has another length
            than the target, the target may contain anything.
        """
        num_bytes = sum(map(len, target))
        start = size - num_bytes
        if start == start_of(num_bytes):
            first, rest = _cut(target, start, num_bytes)
            end = start + sum(map(len, first))
            if mover.move(file, [self._pages[:end], *rest], write=False):
                found = self._check(key, num_bytes, start)
                if found is not None:
                    copy(first, [self._pages[start:end]])
                    return found
        if size < HEADER_BYTES or not mover.move(file, [self._pages[:size]], write=False):
            return None
        start = _LENGTH.size + _LENGTH.unpack(self._pages[: _LENGTH.size])[0]
        return self._check(key, size - start, start) if start == start_of(size - start) else None

    def _check(self, key: bytes, num_bytes: int, start: int) -> FoundEntry | None:
        """What the header in the buffer says, or None if it is not the header of this object."""
        head = self._memory[:start]
        labels = labels_of(head[:HEADER_BYTES])
        if labels is None or head != header(key, num_bytes, start, labels):
            return None
        return FoundEntry(num_bytes, labels)


def _cut(pieces: Pieces, start: int, num_bytes: int) -> tuple[Pieces, Pieces]:
    """Pieces before the object's first page boundary, and the rest; all are rest if unaligned."""
    lead = num_bytes % PAGE if (start + num_bytes) % PAGE == 0 else 0
    if not lead:
        return [], pieces
    return cut(pieces, 0, lead), cut(pieces, lead, num_bytes - lead)


class ExpiringEntries:
    """Expiry times of entries that this process knows of; most of removed entries are dropped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._most = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entries: Iterable[tuple[float, str]]) -> None:
        """Add (time, path) of entries that expire; those of missing files may be dropped."""
        some = list[tuple[float, str]]()
        with self._lock:
            for entry in entries:
                heapq.heappush(self._heap, entry)
            if len(self._heap) > self._most:
                some, self._heap = self._heap, some
        if some:  # drop evicted entries, which might have expired only days later
            some = [entry for entry in some if os.path.exists(entry[1])]
            with self._lock:
                self._heap += some
                heapq.heapify(self._heap)
                self._most = max(MOST_GONE, 2 * len(self._heap))

    def due(self, now: float) -> list[str]:
        """Paths of entries that have expired since the last call."""
        due = list[str]()
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                due.append(heapq.heappop(self._heap)[1])
        return due


class EntryClaims:
    """Claims of objects about to be stored, shared by all processes that use a directory.

    A claim is an empty file named by the entry's key, which only one process can create. It is
    removed when its object is stored; the claim of a process that died is void after `CLAIM_S`. If
    two processes find a void claim at the same instant, both may get it: the object is then written
    twice and kept once.

    Args:
        folder: Absolute path of the folder of all claims.
        open_file: See `SpaceManager.open_file`.
    """

    def __init__(self, folder: str, open_file: Callable[[str, int], int]) -> None:
        self._folder, self._open_file = folder, open_file
        self._lock = threading.Lock()
        self._ours: dict[bytes, tuple[int, int]] = {}
        """Inode and mtime of the files of own claims; inodes alone are reused at once."""

    def open(self) -> None:
        """Create the folder, and remove void claims."""
        os.makedirs(self._folder, 0o770, exist_ok=True)
        with os.scandir(self._folder) as found:
            for item in found:
                if self._is_void(item.path):
                    remove_file(item.path)

    def take(self, key: bytes) -> bool:
        """Try to claim a key; returns whether this process may store its object.

        On a full disk it may, without a file: storing either makes room or answers False.
        """
        path = self._path(key)
        try:
            made = self._make(path)
            if made is None and self._is_void(path):
                remove_file(path)
                made = self._make(path)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return True
        if made is not None:
            with self._lock:
                self._ours[key] = made
        return made is not None

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove own claims of `keys` that were not taken over."""
        with self._lock:
            ours = {key: self._ours.pop(key) for key in keys if key in self._ours}
        for key, made in ours.items():
            path = self._path(key)
            with suppress(FileNotFoundError):
                if _which(os.lstat(path)) == made:
                    os.unlink(path)

    def close(self) -> None:
        """Remove all own claims."""
        self.drop(tuple(self._ours))

    def _make(self, path: str) -> tuple[int, int] | None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            file = self._open_file(path, flags)
        except FileExistsError:
            return None
        with closing_file(file):
            return _which(os.fstat(file))

    def _is_void(self, path: str) -> bool:
        try:
            # A time as far in the future is void as well: the clock was set back.
            return abs(time.time() - os.lstat(path).st_mtime) > CLAIM_S
        except FileNotFoundError:
            return True

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}"


def _which(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns
