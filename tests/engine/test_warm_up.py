"""What the warm-up of a GPU tries, seen without one: its steps, not what they compile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbaton.engine.cuda.warm_up import TrialSteps, _expert_tiles
from kvbaton.engine.moe_config import read_moe
from kvbaton.engine.step import StepPlan

CONTENT = {
    "num_hidden_layers": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
}


class Runner:
    """Notes how many tokens each sequence of a step has."""

    def __init__(self, max_model_len: int, num_blocks: int, *, experts: bool = True) -> None:
        moe = read_moe(CONTENT, "Qwen3MoeForCausalLM") if experts else None
        self.model = SimpleNamespace(config=SimpleNamespace(moe=moe, vision=None))
        self.cache = SimpleNamespace(block_size=16, num_blocks=num_blocks, groups=(None,))
        self.sequences = SimpleNamespace(tokens=torch.empty(1, max_model_len + 2))
        self.ran: list[list[int]] = []

    def run(self, plan: StepPlan) -> None:
        if plan.steps:
            self.ran.append([step.count for step in plan.steps])


@pytest.mark.parametrize(
    ("runner", "most", "expected"),
    [
        (Runner(4096, 400), 4096, [[1], [9], [161], [257], [385], [2049]]),
        (Runner(1000, 400), 4096, [[1], [9], [161], [257], [385], [683, 683, 683]]),
        (Runner(4096, 400), 2048, [[1], [9], [161], [257], [385]]),
        (Runner(4096, 100), 4096, [[1], [9], [161], [257], [385]]),
        (Runner(64, 400), 4096, [[1], [9], [53, 54, 54]]),
        (Runner(4096, 400, experts=False), 4096, []),
    ],
    ids=["whole", "split", "short steps", "small pool", "too many prompts", "no experts"],
)
def test_each_form_of_the_experts_products_is_tried_where_a_step_can_need_it(
    runner: Any, most: int, expected: list[list[int]]
) -> None:
    config: Any = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=most)
    _expert_tiles(TrialSteps(runner), runner, config)
    assert runner.ran == expected
