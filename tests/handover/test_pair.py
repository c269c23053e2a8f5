"""The harness itself: a hand-over works in it, and its checks can fail."""

from __future__ import annotations

import pytest

from kvbaton.engine.block_pool import BlockPool
from tests.support.engine_pair import Expected, Pair
from tests.support.prompts import prompt_of


@pytest.mark.parametrize("length", [1, 3, 4, 5, 50])
def test_tokens_are_those_of_one_node(pair: Pair, expected: Expected, length: int) -> None:
    prompt = prompt_of(length)
    _, at_d = pair.hand_over(prompt)
    assert at_d.result() == expected(prompt)
    assert pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}'] == length
    pair.settle()


def test_a_leak_is_seen(pair: Pair) -> None:
    pool: BlockPool = pair.d.scheduler.blocks.pool
    pool.refs[5] += 1
    pair.d.ask("metrics")
    with pytest.raises(AssertionError, match="ledger was off"):
        pair.check()
    pool.refs[5] -= 1
    pair.d.imbalance = 0
