"""Everything is there, and its numbers are what they should be in the cache's dtype."""

from __future__ import annotations

import numpy as np
import pytest

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.stores.decode_bench import TEMPLATE_BYTES, DecodeBenchStore
from kvbaton.errors import ConfigError
from tests.support.store_objects import find, make_objects, save, wait

KEYS = list(make_objects(5))


def load(num_bytes: int, **options: object) -> bytes:
    store = load_store({"decode_bench": options})
    store.open()
    target = bytearray(num_bytes)
    whole = memoryview(target)
    assert find(store, KEYS).present == (True,) * 5
    assert wait(store.load(KEYS[:1], [[whole[:128], whole[128:]]])) == [True]
    store.close()
    return bytes(target[128:])


def numbers(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        halves = np.frombuffer(data, np.uint16).astype(np.uint32)
        return (halves << 16).view(np.float32)
    return np.frombuffer(data, dtype).astype(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_numbers_have_the_mean_and_the_deviation(dtype: str) -> None:
    size = 128 + 2 * TEMPLATE_BYTES + 4_000
    constant = numbers(load(size, dtype=dtype), dtype)
    assert np.allclose(constant, 0.015, rtol=0.01)
    spread = numbers(load(size, dtype=dtype, mean=1.0, std=0.5, seed=3), dtype)
    assert np.mean(spread) == pytest.approx(1.0, abs=0.01)
    assert np.std(spread) == pytest.approx(0.5, abs=0.01)
    assert load(size, dtype=dtype, std=0.5, seed=3) == load(size, dtype=dtype, std=0.5, seed=3)


def test_numbers_for_bfloat16_are_right_for_float32_as_well() -> None:
    assert np.allclose(numbers(load(4_224), "float32"), 0.015, rtol=0.01)


def test_it_keeps_nothing_and_says_that_it_makes_things_up() -> None:
    store = DecodeBenchStore("bench")
    store.open()
    assert store.capabilities.synthetic
    assert not store.capabilities.deletes
    assert save(store, make_objects(3)) == [True] * 3
    assert (store.usage().objects, store.health()) == (0, None)
    store.close()
    assert store.health() == "not open"


def test_a_dtype_that_it_can_not_write_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype: must be one of bfloat16"):
        DecodeBenchStore("bench", dtype="int4")
