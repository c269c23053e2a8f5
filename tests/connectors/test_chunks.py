"""Objects in chunks of a fixed number of bytes, and the tokens that name them."""

from __future__ import annotations

import random

import pytest

from kvbaton.connectors.stores import chunks
from tests.support.store_objects import make_objects, pieces


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 1000, 1001, 1024, 5000])
def test_chunks_hold_all_bytes(num_bytes: int) -> None:
    [(key, data)] = make_objects(1, num_bytes, 30).items()
    count = chunks.count(pieces(data), 1024)
    slots = [memoryview(bytearray(random.Random(i).randbytes(1024))) for i in range(count)]
    for i in reversed(range(count)):
        chunks.fill([slots[i]], [i], key, pieces(data))
    target = pieces(bytes(num_bytes))
    assert chunks.take(slots, key, target) is True
    assert b"".join(target) == data
    assert chunks.take(slots, bytes(32), target) is False
    assert chunks.take(slots, key, pieces(bytes(num_bytes + 1))) is None


def test_tokens_name_the_key() -> None:
    keys = [bytes(32), *(bytes(i) + b"\x01" + bytes(31 - i) for i in range(32))]
    for chunk in (16, 20, 256):
        tokens = [chunks.tokens_of(key, chunk, 3) for key in keys]
        assert {len(some) for some in tokens} == {3 * chunk}
        assert len({tuple(some[:chunk]) for some in tokens}) == len(keys)
