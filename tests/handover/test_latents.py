"""Latent attention through P and D: every rank keeps whole rows, and each gets them once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.connectors.pairing import pair_groups
from tests.engine.test_models import greedy_along
from tests.support.engine_pair import Pair
from tests.support.prompts import prompt_of

ROW_BYTES = 4 * (48 + 16)
LAYERS = 2


@pytest.mark.parametrize(
    ("family", "p", "d", "p_block_size"),
    [
        ("deepseek_v3", 1, 1, 8),
        ("deepseek_v2", 2, 1, 4),
        ("deepseek_v3", 1, 2, 4),
        ("deepseek_v3", 2, 4, 8),
        ("deepseek_v2", 4, 2, 2),
    ],
)
def test_each_rank_gets_each_row_once(
    family: str,
    p: int,
    d: int,
    p_block_size: int,
    checkpoint: Callable[..., Path],
    reference: Any,
) -> None:
    folder = checkpoint(family=family)
    of_p: dict[str, Any] = {"tensor_parallel_size": p, "block_size": p_block_size}
    of_d: dict[str, Any] = {"tensor_parallel_size": d, "debug_poison": True}
    pair = Pair(folder, p=of_p | {"num_blocks": 257}, d=of_d)
    try:
        for length in (1, 5, 50):
            prompt = prompt_of(length)
            _, at_d = pair.hand_over(prompt, max_tokens=12)
            got = at_d.result()
            assert got == greedy_along(reference(folder), list(prompt), got, 12)
        pair.settle()
        counters = pair.d.counters()
        assert counters['kvbaton_prompt_tokens_total{source="transferred"}'] == 56
        posted = pair.p.counters()["kvbaton_transfer_posted_bytes_total"]
        assert posted == 56 * LAYERS * ROW_BYTES * d
        layouts = [node.core.executor.layouts for node in (pair.p, pair.d)]
        (pairing,) = pair_groups(*layouts)
        assert sorted(pairing.shares) == sorted((rank % p, rank) for rank in range(d))
    finally:
        pair.close()


def test_rows_in_fp8_cross_in_a_quarter_of_the_bytes(checkpoint: Callable[..., Path]) -> None:
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    pair = Pair(checkpoint(family="deepseek_v2"), p=fp8, d=fp8 | {"tensor_parallel_size": 2})
    try:
        prompt = prompt_of(50)
        _, at_d = pair.hand_over(prompt, max_tokens=12)
        tokens = at_d.result()
        pair.settle()
        posted = pair.p.counters()["kvbaton_transfer_posted_bytes_total"]
        assert posted == 50 * LAYERS * ROW_BYTES // 4 * 2
        assert tokens == pair.p.generate(prompt, max_tokens=12).result()
    finally:
        pair.close()
