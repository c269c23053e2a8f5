"""The checksum that stores without one of their own keep in front of an object's bytes.

It covers key and bytes (XXH3, 128 bits), so bytes of another object are not right either.
"""

from __future__ import annotations

import xxhash

from kvbaton.connectors.store import Pieces

SEAL_BYTES = 16


def seal(key: bytes, pieces: Pieces) -> bytes:
    """The checksum of an object: `SEAL_BYTES` bytes."""
    checksum = xxhash.xxh3_128(key)
    for piece in pieces:
        checksum.update(piece)
    return checksum.digest()


def unseal(key: bytes, sealed: memoryview) -> memoryview | None:
    """The bytes behind a checksum, None if they are not the right ones."""
    body = sealed[SEAL_BYTES:]
    return body if seal(key, [body]) == sealed[:SEAL_BYTES] else None
