"""Models with states and a store: a prompt goes on from the last snapshot that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_models import greedy_along
from tests.support.engine_pair import Pair
from tests.support.prompts import prompt_of
from tests.support.store_nodes import Nodes, count, rest
from tests.support.waiting import until

QWEN3_NEXT: dict[str, Any] = {"family": "qwen3_next", "num_layers": 4, "head_dim": 32}


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(**QWEN3_NEXT)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4)])
def test_a_second_life_goes_on_from_a_saved_state(
    folder: Path, reference: Any, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    nodes, store = Nodes(folder), f'filesystem:{{"path": "{tmp_path}"}}'
    whole = prompt_of(60)
    try:
        first = nodes.start(store, tensor_parallel_size=sizes[0])
        got = first.generate(whole[:50]).result()
        assert got == greedy_along(reference(folder), list(whole[:50]), got, 12)
        nodes.end(first)
        second = nodes.start(store, tensor_parallel_size=sizes[1])
        # Steps of 16 tokens left snapshots at 16, 32 and 48.
        for length, usable in ((50, 48), (40, 32), (60, 48)):
            second.ask("reset_prefix_cache")
            before = count(second, "prompt_tokens", source="store")
            prompt = list(whole[:length])
            got = second.generate(prompt).result()
            assert got == greedy_along(reference(folder), prompt, got, 12)
            assert count(second, "prompt_tokens", source="store") - before == usable
            rest(second)
        assert count(second, "store_load_blocks", outcome="corrupt") == 0
        nodes.end(second)
    finally:
        nodes.end_all()


def test_a_decode_node_saves_the_states_that_it_received_and_made(
    folder: Path, reference: Any, tmp_path: Path
) -> None:
    store = f'filesystem:{{"path": "{tmp_path}"}}'
    pair, nodes = Pair(folder, d={"store": store}), Nodes(folder)
    prompt = prompt_of(48)
    try:
        _, at_d = pair.hand_over(prompt)
        made = at_d.result()
        # Blocks of 59 tokens, and of three groups the states at 48, 52 and 56.
        until(lambda: count(pair.d, "store_save_blocks", outcome="stored") == 14 + 3 * 3, "saves")
    finally:
        pair.close()
    try:
        again, longer = nodes.start(store), [*prompt, *made, 7]
        got = again.generate(longer).result()
        assert got == greedy_along(reference(folder), longer, got, 12)
        assert count(again, "prompt_tokens", source="store") == 56
        assert count(again, "store_load_blocks", outcome="corrupt") == 0
    finally:
        nodes.end_all()
