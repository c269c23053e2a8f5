"""Models with states: one crosses with the prompt's end, whatever the ranks and blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.kv_cache_manager import KVCacheManager
from kvbaton.engine.request import Tables
from kvbaton.types import BlockSpan, Spans
from tests.engine.test_models import greedy_along
from tests.support.engine_pair import Pair
from tests.support.prompts import prompt_of

QWEN3_NEXT: dict[str, Any] = {"family": "qwen3_next", "num_layers": 4, "head_dim": 32}
STATE_BYTES = 3 * 4 * (14 + 2 * 5) * 4 * 4
"""Of all three layers: key heads x (rows of the convolution + two value heads' keys) x values."""


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(**QWEN3_NEXT)


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ({}, {}),
        ({"block_size": 8}, {}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}),
        ({"tensor_parallel_size": 4, "block_size": 8}, {}),
        ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
    ids=["one-one", "block-sizes", "two-four", "four-one", "one-two"],
)
def test_tokens_are_those_of_transformers(
    folder: Path, reference: Any, p: dict[str, Any], d: dict[str, Any]
) -> None:
    pair = Pair(folder, p=p | {"num_blocks": 300}, d=d | {"num_blocks": 300, "debug_poison": True})
    try:
        expected = 0.0
        for length in (1, 8, 50):  # of which one ends with a block, and one takes four steps
            prompt = prompt_of(length)
            _, at_d = pair.hand_over(prompt, max_tokens=12)
            got = at_d.result()
            assert got == greedy_along(reference(folder), list(prompt), got, 12), f"{length}"
            ranks = d.get("tensor_parallel_size", 1)
            copies = max(1, ranks // 2)  # two KV heads
            expected += STATE_BYTES + length * 2 * 2 * 32 * 4 * copies
        pair.settle()
        counters = pair.d.counters()
        assert counters['kvbaton_prompt_tokens_total{source="transferred"}'] == 59
        assert pair.p.counters()["kvbaton_transfer_sent_bytes_total"] == expected
    finally:
        pair.close()


def test_choices_go_on_from_one_state(folder: Path) -> None:
    pair = Pair(folder)
    params: dict[str, Any] = {
        "n": 3,
        "seed": 5,
        "temperature": 1.0,
        "max_tokens": 10,
        "ignore_eos": True,
    }
    try:
        prompt = prompt_of(30)
        _, at_d = pair.hand_over(prompt, **params)
        at_d.result()
        pair.settle()  # P has no step after this one, which could make the copies for its forks
        alone = pair.p.generate(prompt, **params)
        alone.result()
        for choice in range(3):
            mine, theirs = (
                [t for o in call.outputs if o.choice == choice for t in o.token_ids]
                for call in (at_d, alone)
            )
            assert mine == theirs
            assert len(mine) == 10
        pair.settle()
    finally:
        pair.close()


def test_a_state_of_another_border_is_refused(
    folder: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant of P: it names the block of the snapshot before the one at the prompt's end."""
    right = KVCacheManager.spans

    def wrong(self: KVCacheManager, tables: Tables, start: int, end: int) -> Spans:
        spans = list(right(self, tables, start, end))
        for g, group in enumerate(self.groups):
            snapshot = tables[g][end // group.block_size - 1]
            if group.kind is GroupKind.STATE and snapshot:
                spans[g] = (BlockSpan(end - 1, (snapshot,)),)
        return tuple(spans)

    pair = Pair(folder)
    monkeypatch.setattr(KVCacheManager, "spans", wrong)
    try:
        prompt = prompt_of(50)
        _, at_d = pair.hand_over(prompt)
        got = at_d.result()
        assert got == greedy_along(reference(folder), list(prompt), got, 12)
        counters = pair.d.counters()
        assert counters["kvbaton_transfer_digests_failed_total"] > 0
        assert counters["kvbaton_load_failures_total"] == 1
        pair.settle()
    finally:
        pair.close()
