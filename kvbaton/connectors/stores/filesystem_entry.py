"""One object as one safetensors file: how its bytes are written, read and checked.

A file is a safetensors header of fixed size, padded with spaces as that format allows, and the
object's bytes as one tensor ``object`` of U8. The header names format, key and checksum (XXH3, 128
bits) and follows from them and the length alone. So it is checked by making it once more from the
key that was asked for and the bytes that were read: whatever differs, the file is not that object.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence

import xxhash

from kvbaton.connectors.store import Pieces

HEADER_BYTES = 512

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 512 << 10
"""Hashed right before it is written, or after it was read, while it is in the core's cache."""
_CHUNK_PIECES = 512
"""Below IOV_MAX."""


class Verdict(enum.Enum):
    """What a file turned out to be."""

    RIGHT = enum.auto()
    OTHER_LENGTH = enum.auto()
    """Whole by its own account, but of another length than the caller's target."""
    CORRUPT = enum.auto()


class _EndedError(OSError):
    """The file gives or takes no more bytes."""


def header(key: bytes, num_bytes: int, digest: bytes) -> bytes:
    """The first `HEADER_BYTES` of a file: of key, length and checksum of its object."""
    about = f'{{"format":"kvbaton-object-1","key":"{key.hex()}","xxh3_128":"{digest.hex()}"}}'
    tensor = f'{{"dtype":"U8","shape":[{num_bytes}],"data_offsets":[0,{num_bytes}]}}'
    text = f'{{"__metadata__":{about},"object":{tensor}}}'.encode()
    room = HEADER_BYTES - _LENGTH.size
    return _LENGTH.pack(room) + text.ljust(room)


def write(file: int, key: bytes, source: Pieces) -> None:
    """Fill a file, all of it. The header comes last: before that, it is no entry of that key.

    The first chunk waits for the header, so that both are one call, often the only one.

    Raises:
        OSError: there is no room, or the file can't be written.
    """
    checksum, offset, first = xxhash.xxh3_128(), HEADER_BYTES, list[memoryview]()
    for chunk in _chunks(source):
        for piece in chunk:
            checksum.update(piece)
        if first:
            offset = _move_all(os.pwritev, file, chunk, offset)
        else:
            first, offset = chunk, offset + sum(map(len, chunk))
    top = header(key, offset - HEADER_BYTES, checksum.digest())
    _move_all(os.pwritev, file, [memoryview(top), *first], 0)


def read(file: int, size: int, key: bytes, target: Pieces) -> Verdict:
    """Fill `target` from a file of `size` bytes, and say whether it holds the right ones.

    Raises:
        OSError: the file can't be read.
    """
    first = memoryview(bytearray(HEADER_BYTES))
    num_bytes = sum(map(len, target))
    if size != HEADER_BYTES + num_bytes:
        os.preadv(file, [first], 0)
        return Verdict.OTHER_LENGTH if size == _size_claimed(first) else Verdict.CORRUPT
    checksum, offset = xxhash.xxh3_128(), 0
    for chunk in _chunks([first, *target]):
        try:
            offset = _move_all(os.preadv, file, chunk, offset)
        except _EndedError:  # cut while it was read
            return Verdict.CORRUPT
        for piece in chunk[1:] if chunk[0] is first else chunk:
            checksum.update(piece)
    right = first == header(key, num_bytes, checksum.digest())
    return Verdict.RIGHT if right else Verdict.CORRUPT


def _size_claimed(first: memoryview) -> int | None:
    try:
        about = json.loads(bytes(first[_LENGTH.size :]))
        return HEADER_BYTES + int(about["object"]["shape"][0])
    except (ValueError, TypeError, LookupError):
        return None


def _chunks(pieces: Pieces) -> Iterator[list[memoryview]]:
    """The bytes in order, a limited number of bytes and of pieces at a time."""
    chunk, room = list[memoryview](), _CHUNK_BYTES
    for piece in pieces:
        while len(piece) > room or (piece and len(chunk) == _CHUNK_PIECES):
            chunk.append(piece[:room])
            yield chunk
            piece = piece[room:]
            chunk, room = [], _CHUNK_BYTES
        if piece:
            chunk.append(piece)
            room -= len(piece)
    if chunk:
        yield chunk


def _move_all(
    move: Callable[[int, Sequence[memoryview], int], int],
    file: int,
    chunk: Sequence[memoryview],
    offset: int,
) -> int:
    """Read or write a whole chunk; the offset after it."""
    while chunk:
        done = move(file, chunk, offset)
        offset += done
        if done == sum(map(len, chunk)):
            break
        if not done:
            raise _EndedError(errno.EIO, f"the file ends at byte {offset}")
        chunk = _after(chunk, done)
    return offset


def _after(chunk: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of a chunk once `done` bytes of it have moved."""
    rest = []
    for piece in chunk:
        if done < len(piece):
            rest.append(piece[done:])
        done = max(done - len(piece), 0)
    return rest
