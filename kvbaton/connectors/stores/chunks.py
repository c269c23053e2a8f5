"""Objects as chunks of tokens, for back ends that store KV by token ids.

The key's 32 bytes, read as 16 numbers, are the token ids of a chunk, repeated up to its length. An
object is split into chunks of a fixed number of bytes. Its bytes follow their length and checksum;
the rest of the last chunk may contain anything.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvbaton.connectors.store import KEY_BYTES, Pieces
from kvbaton.connectors.stores.arena_copies import copy, cut
from kvbaton.connectors.stores.threaded import SEAL_BYTES, seal
from kvbaton.errors import ConfigError

KEY_TOKENS = KEY_BYTES // 2
"""Minimum number of tokens of a chunk, and the number that an LMCache engine's chunks have."""

HEAD = struct.Struct(f"<Q{SEAL_BYTES}s")
"""Length and checksum of an object, before its bytes."""

_WORDS = struct.Struct(f"<{KEY_TOKENS}H")


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise `ConfigError` unless chunks can have this many bytes."""
    if chunk_bytes < 1024 or chunk_bytes % 1024:
        raise ConfigError("chunk_bytes", f"must be a multiple of 1024, not {chunk_bytes}")


def tokens_of(key: bytes, chunk_tokens: int = KEY_TOKENS, chunks: int = 1) -> list[int]:
    """Token ids of an object: `chunks` times those of a chunk of `chunk_tokens`."""
    words = _WORDS.unpack(key) * (chunk_tokens // KEY_TOKENS + 1)
    return list(words[:chunk_tokens]) * chunks


def count(pieces: Pieces, chunk_bytes: int) -> int:
    """Number of chunks of an object."""
    return -(-(HEAD.size + sum(map(len, pieces))) // chunk_bytes)


def fill(slots: Sequence[memoryview], numbers: Sequence[int], key: bytes, source: Pieces) -> None:
    """Write some chunks of an object.

    Args:
        slots: Memory of these chunks, all of one length.
        numbers: Numbers of these chunks in the object.
        key: Key of the object.
        source: All bytes of the object.
    """
    head = HEAD.pack(sum(map(len, source)), seal(key, source))
    for slot, number in zip(slots, numbers, strict=True):
        part = cut([memoryview(head), *source], number * len(slot), len(slot))
        copy([slot[: sum(map(len, part))]], part)


def take(slots: Sequence[memoryview], key: bytes, target: Pieces) -> bool | None:
    """Read an object from all of its chunks into `target`.

    Returns:
        Whether the bytes are right; None if the object has another length.
    """
    num_bytes, digest = HEAD.unpack(slots[0][: HEAD.size])
    if num_bytes != sum(map(len, target)):
        return None
    copy(target, cut(slots, HEAD.size, num_bytes))
    return bool(seal(key, target) == digest)
