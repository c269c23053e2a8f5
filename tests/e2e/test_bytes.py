"""Bytes are counted where they move, and D may not make up for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.oracle import Oracle
from tests.support.served_pair import Pair, settle
from tests.support.servers import HttpFailure

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]
LAYERS, KV_HEADS, HEAD_DIM, FLOAT32 = 2, 2, 16, 4
BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * FLOAT32
"""Of the model in `tests/conftest.py`: K and V of each layer."""


@pytest.mark.parametrize("length", [1, 16, 17, 75])
def test_exactly_the_valid_tokens_cross(pair: Pair, prompt: Prompt, length: int) -> None:
    pair.tokens(prompt(length), max_tokens=4)
    settle(pair.p, pair.d)  # D may answer before P has counted
    p, d = pair.at_p(), pair.at_d()
    assert p("kvbaton_transfer_posted_bytes_total") == length * BYTES_PER_TOKEN
    assert d("kvbaton_prompt_tokens_total", source="transferred") == length
    assert d("kvbaton_prompt_tokens_total", source="computed") == 0
    assert d("kvbaton_step_tokens_total") == 3, "D computes nothing but the tokens after the first"


def test_only_what_the_target_lacks_crosses(pair: Pair, prompt: Prompt) -> None:
    shared = prompt(48)
    pair.tokens(shared + prompt(10), max_tokens=2)
    settle(pair.p, pair.d)
    before = pair.at_p()
    pair.tokens(shared + prompt(21), max_tokens=2)
    settle(pair.p, pair.d)
    sent = (pair.at_p() - before)("kvbaton_transfer_posted_bytes_total")
    assert sent == 21 * BYTES_PER_TOKEN


def test_a_target_that_may_not_compute_does_not(pair: Pair, prompt: Prompt) -> None:
    """Shows that the flag under which all other tests run has teeth."""
    with pytest.raises(HttpFailure, match="debug_forbid_prompt_compute: 20 prompt tokens"):
        pair.d.generate(prompt(20), max_tokens=2)
    pair.moves = "nothing"


def test_every_write_is_noticed_and_verified(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(100)
    assert pair.tokens(ids, max_tokens=4) == oracle.greedy(ids, 4)
    settle(pair.p, pair.d)
    d, writes = pair.at_d(), pair.at_p()("kvbaton_transfer_writes_total")
    assert 1 <= writes <= 4, "of 4 chunks, those computed before the reservation go together"
    assert d("kvbaton_transfer_notices_total") == writes
    assert d("kvbaton_transfer_digests_checked_total") == writes
