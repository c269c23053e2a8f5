"""Mixtures of experts through P and D: the tokens of transformers, however the ranks split them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_models import greedy_along
from tests.support.engine_pair import Pair
from tests.support.prompts import prompt_of

TWO: dict[str, Any] = {"tensor_parallel_size": 2}
EXPERTS: dict[str, Any] = TWO | {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("family", "p", "d"),
    [
        ("mixtral", {}, {}),
        ("mixtral", EXPERTS, TWO),
        ("dots1", EXPERTS, {}),
        ("qwen3_moe", {}, EXPERTS),
        ("qwen3_moe", TWO, {}),
    ],
    ids=["one-one", "experts-two", "experts-one", "one-experts", "two-one"],
)
def test_tokens_are_those_of_transformers(
    family: str,
    p: dict[str, Any],
    d: dict[str, Any],
    checkpoint: Callable[..., Path],
    reference: Any,
) -> None:
    folder = checkpoint(family=family)
    pair = Pair(folder, p=p, d=d)
    try:
        for length in (1, 5, 50):
            prompt = prompt_of(length)
            _, at_d = pair.hand_over(prompt, max_tokens=12)
            got = at_d.result()
            assert got == greedy_along(reference(folder), list(prompt), got, 12)
        pair.settle()
        transferred = pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}']
        assert transferred == 56
    finally:
        pair.close()
