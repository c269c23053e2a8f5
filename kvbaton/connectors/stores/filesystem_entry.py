"""An object's file: a header, then its bytes, which begin so that direct I/O can move them.

The header is safetensors', padded with spaces as that format allows, and follows from key, length,
where the object begins, and what is told of it (`EntryLabels`). An object of `ALIGNED_FROM` bytes
or more begins so far into the header's last page that all of it but its first bytes, fewer than a
page, are whole pages of the file: a block's own header is such a beginning, and the block of KV
behind it lies on a page's border. Shorter objects begin behind `HEADER_BYTES`.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import logging
import mmap
import os
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
from kvbaton.connectors.stores.arena_copies import cut
from kvbaton.connectors.stores.filesystem_space import closing_file, remove_file

logger = logging.getLogger(__name__)

MOST_GONE = 10_000
"""Entries that are gone of which it is remembered when they would have expired."""
PAGE = 4096
"""Bytes of what direct I/O moves: where a piece begins, in memory and file, and its length."""
_MAX_PIECES = 1024
"""IOV_MAX."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FileMover:
    """Moves pieces from and to an open file, from its first byte on: by ``preadv``, ``pwritev``."""

    def move(self, file: int, pieces: Pieces, *, write: bool) -> bool:
        """Write the pieces, or fill them.

        False if the file ends before, or takes no more; raises `OSError` otherwise.
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
    """Moves past the page cache what lies on borders of pages, here and in memory.

    Where the file system refuses that it goes on as any `FileMover`.
    """

    def __init__(self) -> None:
        self.refused = False
        """Whether a file system has done so."""

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
"""Of the shortest header; what it tells is in its first so many bytes, however long it is."""
ALIGNED_FROM = 64 << 10

_LENGTH = struct.Struct("<Q")


class EntryLabels(NamedTuple):
    """What an entry's header tells of its `Hints`.

    Attributes:
        namespace: of it.
        tenant: of it.
        expires_at: seconds since 1970; None for never.
    """

    namespace: str = ""
    tenant: str = ""
    expires_at: float | None = None

    @classmethod
    def of(cls, hints: Hints) -> Self:
        """Those of an object that is stored now."""
        over = None if hints.ttl_s is None else round(time.time() + hints.ttl_s, 3)
        return cls(hints.namespace, hints.tenant, over)

    def is_over(self, now: float) -> bool:
        """Whether it has expired."""
        return self.expires_at is not None and self.expires_at <= now


NO_LABELS = EntryLabels()


class FoundEntry(NamedTuple):
    """What a file holds.

    Attributes:
        num_bytes: of the object.
        labels: of it.
    """

    num_bytes: int
    labels: EntryLabels


def start_of(num_bytes: int) -> int:
    """Where an object of that length begins in its file."""
    if num_bytes < ALIGNED_FROM:
        return HEADER_BYTES
    lead = num_bytes % PAGE
    return -(-(HEADER_BYTES + lead) // PAGE) * PAGE - lead


def header(key: bytes, num_bytes: int, start: int, labels: EntryLabels = NO_LABELS) -> bytes:
    """What stands before an object that begins at `start`: one tensor ``object`` of U8."""
    about = {"format": "kvbaton-object-2", "key": key.hex()}
    about |= {name: str(value) for name, value in labels._asdict().items() if value}
    tensor = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    told = msgspec.json.encode({"__metadata__": about, "object": tensor})
    return _LENGTH.pack(start - _LENGTH.size) + told.ljust(start - _LENGTH.size)


class _Head(Struct):
    about: dict[str, str] = msgspec.field(name="__metadata__")


_decode_head = msgspec.json.Decoder(_Head).decode


def labels_of(head: bytes) -> EntryLabels | None:
    """What a file's first `HEADER_BYTES` tell; None if they are none of ours."""
    try:
        about = _decode_head(head[_LENGTH.size :]).about
        at = about.get("expires_at")
        return EntryLabels(
            about.get("namespace", ""), about.get("tenant", ""), None if at is None else float(at)
        )
    except ValueError:
        return None


class EntryBuffer(threading.local):
    """Memory for the header's pages and the object's first bytes; each thread has its own."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * PAGE)  # begins at a page's border
        self._pages = memoryview(self._memory)

    def fill(self, key: bytes, source: Pieces, labels: EntryLabels) -> list[memoryview]:
        """All of an object's file, in pieces, valid until the next call."""
        num_bytes = sum(map(len, source))
        start = start_of(num_bytes)
        first, rest = _cut(source, start, num_bytes)
        self._pages[:start] = header(key, num_bytes, start, labels)
        for piece in first:
            self._pages[start : start + len(piece)] = piece
            start += len(piece)
        return [self._pages[:start], *rest]

    def read(
        self, mover: FileMover, file: int, size: int, key: bytes, target: Pieces
    ) -> FoundEntry | None:
        """Fill a target from a file of `size` bytes.

        Returns:
            What the file has, None if nothing that is whole. If that is of another length than the
            target, or None, the target's bytes may be anything.
        """
        num_bytes = sum(map(len, target))
        start = size - num_bytes
        if start == start_of(num_bytes):
            first, rest = _cut(target, start, num_bytes)
            end = start + sum(map(len, first))
            if mover.move(file, [self._pages[:end], *rest], write=False):
                found = self._check(key, num_bytes, start)
                if found is not None:
                    for piece in first:
                        piece[:] = self._pages[start : start + len(piece)]
                        start += len(piece)
                    return found
        if size < HEADER_BYTES or not mover.move(file, [self._pages[:size]], write=False):
            return None
        start = _LENGTH.size + _LENGTH.unpack(self._pages[: _LENGTH.size])[0]
        return self._check(key, size - start, start) if start == start_of(size - start) else None

    def _check(self, key: bytes, num_bytes: int, start: int) -> FoundEntry | None:
        """What the header in our pages tells, if it is the one of this object."""
        head = self._memory[:start]
        labels = labels_of(head[:HEADER_BYTES])
        if labels is None or head != header(key, num_bytes, start, labels):
            return None
        return FoundEntry(num_bytes, labels)


def _cut(pieces: Pieces, start: int, num_bytes: int) -> tuple[Pieces, Pieces]:
    """Pieces up to the first border of a page, and the rest: none, or all, of an unaligned."""
    lead = num_bytes % PAGE if (start + num_bytes) % PAGE == 0 else 0
    if not lead:
        return [], pieces
    return cut(pieces, 0, lead), cut(pieces, lead, num_bytes - lead)


class ExpiringEntries:
    """When entries expire that this process has stored, but for most of those that are gone."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._most = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entries: Iterable[tuple[float, str]]) -> None:
        """Note when files expire, by their paths; those that are no entries may be forgotten."""
        some = list[tuple[float, str]]()
        with self._lock:
            for entry in entries:
                heapq.heappush(self._heap, entry)
            if len(self._heap) > self._most:
                some, self._heap = self._heap, some
        if some:  # evicted, perhaps days before they would have expired
            some = [entry for entry in some if os.path.exists(entry[1])]
            with self._lock:
                self._heap += some
                heapq.heapify(self._heap)
                self._most = max(MOST_GONE, 2 * len(self._heap))

    def due(self, now: float) -> list[str]:
        """Paths of those that have expired since the last call."""
        due = list[str]()
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                due.append(heapq.heappop(self._heap)[1])
        return due


class EntryClaims:
    """Who is about to store which entry of a directory, as all processes that share it see it.

    A claim is an empty file named by the entry's key, which only one process can make. It is
    removed with the store of its object; that of a process that died is void after `CLAIM_S`. Two
    who find one void at the same instant may both get it: then an object is written twice, and kept
    once.

    Args:
        folder: where all processes keep theirs, absolute.
        open_file: see `SpaceManager.open_file`.
    """

    def __init__(self, folder: str, open_file: Callable[[str, int], int]) -> None:
        self._folder, self._open_file = folder, open_file
        self._lock = threading.Lock()
        self._ours: dict[bytes, tuple[int, int]] = {}
        """Which files they are; inodes are used again at once, so with the time."""

    def open(self) -> None:
        """Make the folder, and remove what is void."""
        os.makedirs(self._folder, 0o770, exist_ok=True)
        with os.scandir(self._folder) as found:
            for item in found:
                if self._is_void(item.path):
                    remove_file(item.path)

    def take(self, key: bytes) -> bool:
        """Whether it is ours from now on.

        So it is without a file where there is no room for one: to store makes some, or says no.
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
        """Give back those of them that are ours, and were not taken over."""
        with self._lock:
            ours = {key: self._ours.pop(key) for key in keys if key in self._ours}
        for key, made in ours.items():
            path = self._path(key)
            with suppress(FileNotFoundError):
                if _which(os.stat(path)) == made:
                    os.unlink(path)

    def close(self) -> None:
        """Give all back."""
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
            # Or as far ahead: the clock was set back since.
            return abs(time.time() - os.stat(path).st_mtime) > CLAIM_S
        except FileNotFoundError:
            return True

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}"


def _which(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns
