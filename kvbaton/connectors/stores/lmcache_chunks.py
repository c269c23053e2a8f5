"""Objects as chunks of tokens, which is what LMCache keeps.

The key's 32 bytes, read as 16 numbers, are the tokens of a chunk, repeated up to its length. An
object takes as many chunks of a fixed number of bytes as it needs: LMCache chains their hashes, so
they can all have the same tokens. In front of the bytes stand their length and checksum; behind
them, up to the end of the last chunk, stands anything.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

from kvbaton.connectors.store import KEY_BYTES, Pieces
from kvbaton.connectors.stores.memory import copy
from kvbaton.connectors.stores.seal import SEAL_BYTES, seal
from kvbaton.errors import ConfigError

KEY_TOKENS = KEY_BYTES // 2
"""Fewest tokens of a chunk."""

_WORDS = struct.Struct(f"<{KEY_TOKENS}H")
_HEAD = struct.Struct(f"<Q{SEAL_BYTES}s")


class Verdict(enum.Enum):
    """What chunks turned out to hold."""

    RIGHT = enum.auto()
    OTHER_LENGTH = enum.auto()
    CORRUPT = enum.auto()


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise `ConfigError` unless chunks can have so many bytes."""
    if chunk_bytes < 1024 or chunk_bytes % 1024:
        raise ConfigError("chunk_bytes", f"must be a multiple of 1024, not {chunk_bytes}")


def tokens_of(key: bytes, chunk_tokens: int, chunks: int) -> list[int]:
    """Tokens of an object: `chunks` times `chunk_tokens` of them."""
    words = _WORDS.unpack(key) * (chunk_tokens // KEY_TOKENS + 1)
    return list(words[:chunk_tokens]) * chunks


def chunks_of(pieces: Pieces, chunk_bytes: int) -> int:
    """How many chunks an object takes."""
    return -(-(_HEAD.size + sum(map(len, pieces))) // chunk_bytes)


def fill(slots: Sequence[memoryview], numbers: Sequence[int], key: bytes, source: Pieces) -> None:
    """Write some chunks of an object.

    Args:
        slots: memory of these chunks, all of one length.
        numbers: which chunks of the object they are.
        key: of the object.
        source: all its bytes.
    """
    head = _HEAD.pack(sum(map(len, source)), seal(key, source))
    for slot, number in zip(slots, numbers, strict=True):
        part = cut([memoryview(head), *source], number * len(slot), len(slot))
        copy([slot[: sum(map(len, part))]], part)


def take(slots: Sequence[memoryview], key: bytes, target: Pieces) -> Verdict:
    """Fill `target` from all chunks of an object, and say whether it is the right one."""
    num_bytes, digest = _HEAD.unpack(slots[0][: _HEAD.size])
    if num_bytes != sum(map(len, target)):
        return Verdict.OTHER_LENGTH
    copy(target, cut(slots, _HEAD.size, num_bytes))
    return Verdict.RIGHT if seal(key, target) == digest else Verdict.CORRUPT


def cut(pieces: Pieces, start: int, num_bytes: int) -> list[memoryview]:
    """A run of the bytes of some pieces; what is beyond their end is left out."""
    parts = []
    for piece in pieces:
        part = piece[min(start, len(piece)) : start + num_bytes]
        start = max(start - len(piece), 0)
        num_bytes -= len(part)
        parts.append(part)
    return parts
