"""Models with sliding windows: what crosses, and what either side keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbaton.connectors.transfer.config import HandoverConfig
from kvbaton.roles import HandoverFactory
from tests.support.engine_node import Node
from tests.support.engine_pair import Pair
from tests.support.prompts import prompt_of

WINDOW = 11
MIXED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"family": "mistral", "config": {"sliding_window": WINDOW}},
    "gemma3": {"family": "gemma3", "num_layers": 7, "tied": True},
    "gpt-oss": {"family": "gpt_oss", "num_layers": 5},
    "gemma4": {"family": "gemma4", "num_layers": 7},
    "llama4": {"family": "llama4", "num_layers": 4, "config": {"attention_chunk_size": WINDOW}},
    "qwen2": {"family": "qwen2", "num_layers": 5, "config": MIXED},
}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(**MODELS[request.param])


@pytest.mark.parametrize("p_block_size", [4, 8])
def test_a_window_crosses_with_its_last_blocks_only(folder: Path, p_block_size: int) -> None:
    size = {"num_blocks": 300}
    factory = HandoverFactory(HandoverConfig(transport="memory"), "decode")
    alone = Node("alone", folder, factory, num_blocks=500, max_num_batched_tokens=256)
    of_p, of_d = size | {"block_size": p_block_size}, size | {"debug_poison": True}
    pair = Pair(folder, p=of_p, d=of_d)
    held: dict[str, dict[int, int]] = {"p": {}, "d": {}}

    def watch(name: str, node: Node) -> None:
        node._each_loop()
        blocks = node.scheduler.blocks
        for g, (group, owners) in enumerate(zip(blocks.groups, blocks.owners(), strict=True)):
            if group.window:
                count = owners["request"] + owners["incoming"] + owners["outgoing"]
                held[name][g] = max(held[name].get(g, 0), count)

    try:
        for name, node in (("p", pair.p), ("d", pair.d)):
            node.mailbox._each_loop = partial(watch, name, node)
        for length in (1, 9, 50, 203):
            prompt = prompt_of(length)
            _, at_d = pair.hand_over(prompt)
            assert at_d.result() == alone.generate(prompt).result(), f"a prompt of {length} tokens"
        pair.settle()
    finally:
        pair.close()
        alone.strike()
        alone.bury()
    assert held["p"]
    assert held["d"]
    # A window, what decodes, and a block that each border cuts; of 203 tokens it would be 51.
    assert all(count <= -(-WINDOW // 4) + 2 for count in held["d"].values()), held
    # P computes 16 tokens a step, and blocks of the last step pass their fence.
    assert all(count <= -(-(WINDOW + 2 * 16) // p_block_size) + 2 for count in held["p"].values())
