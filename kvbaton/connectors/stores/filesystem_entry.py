"""An object's file: a header, then its bytes, which begin so that direct I/O can move them.

The header is safetensors', padded with spaces as that format allows, and follows from key, length,
where the object begins, and what is told of it (`EntryLabels`). An object of `ALIGNED_FROM` bytes
or more begins so far into the header's last page that all of it but its first bytes, fewer than a
page, are whole pages of the file: a block's own header is such a beginning, and the block of KV
behind it lies on a page's border. Shorter objects, and all that were written by earlier versions,
begin behind `HEADER_BYTES`.
"""

from __future__ import annotations

import mmap
import struct
import time
from binascii import hexlify
from functools import lru_cache
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from kvbaton.connectors.store import KEY_BYTES, Hints, Pieces
from kvbaton.connectors.stores.filesystem_mover import PAGE, FileMover

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
    before, spaces = _around(start)
    return b"".join((before, key.hex().encode(), _behind_key(num_bytes, labels), spaces))


_ABOUT = b'{"__metadata__":{"format":"kvbaton-object-2","key":"'
_KEY_AT = _LENGTH.size + len(_ABOUT)
_KEY_END = _KEY_AT + 2 * KEY_BYTES


@lru_cache(maxsize=64)
def _around(start: int) -> tuple[bytes, bytes]:
    """What a header that long has before the key, and behind its first `HEADER_BYTES`."""
    return _LENGTH.pack(start - _LENGTH.size) + _ABOUT, b" " * (start - HEADER_BYTES)


def _behind_key(num_bytes: int, labels: EntryLabels) -> bytes:
    """The rest of a header's first `HEADER_BYTES`."""
    told = {name: str(value) for name, value in labels._asdict().items() if value}
    more = b"," + msgspec.json.encode(told)[1:-1] if told else b""
    tensor = f'{{"dtype":"U8","shape":[{num_bytes}],"data_offsets":[0,{num_bytes}]}}'
    return b"".join((b'"', more, f'}},"object":{tensor}}}'.encode())).ljust(HEADER_BYTES - _KEY_END)


@lru_cache(maxsize=64)
def _found(behind_key: bytes, num_bytes: int) -> FoundEntry | None:
    """What the rest of a header's first bytes tells; None if it is none of such an object.

    Objects of one size that are told the same of have the same rest, so it is read once.
    """
    labels = labels_of(bytes(_LENGTH.size) + _ABOUT + behind_key)
    if labels is None or behind_key != _behind_key(num_bytes, labels):
        return None
    return FoundEntry(num_bytes, labels)


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
    except (msgspec.DecodeError, ValueError):
        return None


class EntryBuffer:
    """Memory for the header's pages and the object's first bytes; for one thread at a time."""

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
        if start in (HEADER_BYTES, start_of(num_bytes)):
            first, rest = _cut(target, start, num_bytes)
            end = start + sum(map(len, first))
            if mover.read(file, [self._pages[:end], *rest]):
                found = self._check(key, num_bytes, start)
                if found is not None:
                    for piece in first:
                        piece[:] = self._pages[start : start + len(piece)]
                        start += len(piece)
                    return found
        if size < HEADER_BYTES or not mover.read(file, [self._pages[: _LENGTH.size]]):
            return None
        start = _LENGTH.size + _LENGTH.unpack(self._pages[: _LENGTH.size])[0]
        num_bytes = size - start
        if num_bytes < 0 or start not in (HEADER_BYTES, start_of(num_bytes)):
            return None
        if not mover.read(file, [self._pages[:start]]):
            return None
        return self._check(key, num_bytes, start)

    def _check(self, key: bytes, num_bytes: int, start: int) -> FoundEntry | None:
        """What the header in our pages tells, if it is this object's."""
        head, (before, spaces) = self._memory[:start], _around(start)
        if not (head.startswith(before) and head.endswith(spaces)):
            return None
        if head[_KEY_AT:_KEY_END] != hexlify(key):
            return None
        return _found(head[_KEY_END:HEADER_BYTES], num_bytes)


def _cut(pieces: Pieces, start: int, num_bytes: int) -> tuple[Pieces, Pieces]:
    """Pieces up to the first border of a page, and the rest: none, or all, of an unaligned."""
    lead = num_bytes % PAGE if (start + num_bytes) % PAGE == 0 else 0
    if not lead:
        return [], pieces
    rest = list(pieces)
    first = list[memoryview]()
    for number, piece in enumerate(pieces):
        if lead < len(piece):
            rest = [piece[lead:], *pieces[number + 1 :]]
            if lead:
                first.append(piece[:lead])
            break
        first.append(piece)
        lead -= len(piece)
    else:
        rest = []
    return first, rest
