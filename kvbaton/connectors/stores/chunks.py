"""Objects as chunks of tokens, for back ends that keep a model's KV by its tokens.

The key's 32 bytes, read as 16 numbers, are the tokens of a chunk, repeated up to its length. An
object takes as many chunks of a fixed number of bytes as it needs. In front of the bytes stand
their length and checksum; behind them, up to the end of the last chunk, stands anything.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvbaton.connectors.store import KEY_BYTES, Pieces
from kvbaton.connectors.stores.arena_copies import copy, cut
from kvbaton.connectors.stores.threaded import SEAL_BYTES, seal
from kvbaton.errors import ConfigError

KEY_TOKENS = KEY_BYTES // 2
"""Fewest tokens of a chunk, and what an LMCache engine's chunks have."""

HEAD = struct.Struct(f"<Q{SEAL_BYTES}s")
"""Length and checksum."""

_WORDS = struct.Struct(f"<{KEY_TOKENS}H")


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise `ConfigError` unless chunks can have so many bytes."""
    if chunk_bytes < 1024 or chunk_bytes % 1024:
        raise ConfigError("chunk_bytes", f"must be a multiple of 1024, not {chunk_bytes}")


def tokens_of(key: bytes, chunk_tokens: int = KEY_TOKENS, chunks: int = 1) -> list[int]:
    """Tokens of an object: `chunks` times `chunk_tokens` of them."""
    words = _WORDS.unpack(key) * (chunk_tokens // KEY_TOKENS + 1)
    return list(words[:chunk_tokens]) * chunks


def count(pieces: Pieces, chunk_bytes: int) -> int:
    """How many chunks an object takes."""
    return -(-(HEAD.size + sum(map(len, pieces))) // chunk_bytes)


def fill(slots: Sequence[memoryview], numbers: Sequence[int], key: bytes, source: Pieces) -> None:
    """Write some chunks of an object.

    Args:
        slots: memory of these chunks, all of one length.
        numbers: which chunks of the object they are.
        key: of the object.
        source: all its bytes.
    """
    head = HEAD.pack(sum(map(len, source)), seal(key, source))
    for slot, number in zip(slots, numbers, strict=True):
        part = cut([memoryview(head), *source], number * len(slot), len(slot))
        copy([slot[: sum(map(len, part))]], part)


def take(slots: Sequence[memoryview], key: bytes, target: Pieces) -> bool | None:
    """Fill `target` from all chunks of an object.

    Returns:
        Whether the bytes are right; None if they are not as many.
    """
    num_bytes, digest = HEAD.unpack(slots[0][: HEAD.size])
    if num_bytes != sum(map(len, target)):
        return None
    copy(target, cut(slots, HEAD.size, num_bytes))
    return bool(seal(key, target) == digest)
