"""What a GPU's steps take is known before the first request."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.config import SchedulerConfig
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.step_costs import Terms, step_costs
from tests.support.checkpoints import CheckpointSpec, write_config
from tests.support.prompts import random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HALF_OF_8B = CheckpointSpec(
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=16_384,
    dtype="bfloat16",
)
SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "num_blocks": 12_000,
    "max_num_seqs": 64, "max_model_len": 16_384, "max_num_batched_tokens": 2048,
}  # fmt: skip
PROMPT, SEQUENCES, CONTEXT, ROUNDS = 1500, 32, 500, 9
REST_S = 1.0
"""After 0.1 s of work the power cap lowers a GPU's clock by a sixth; trials are over by then."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_and_a_token_take_what_trials_say(ranks: int, tmp_path: Path, drive: Any) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    write_config(tmp_path, HALF_OF_8B)
    driver = drive(tmp_path, tensor_parallel_size=ranks, **SETTINGS)
    executor = driver.executor
    limits = SchedulerConfig(
        groups=tuple(GroupSpec.of(layout, driver.block_size) for layout in executor.layouts[0]),
        max_model_len=SETTINGS["max_model_len"],
        vocab_size=HALF_OF_8B.vocab_size,
        max_num_seqs=SETTINGS["max_num_seqs"],
        max_num_batched_tokens=SETTINGS["max_num_batched_tokens"],
    )
    began = time.perf_counter()
    tried = executor.try_steps(limits)
    assert time.perf_counter() - began < 0.5
    assert not any(worker.cache.counted.any() for worker in executor.workers)
    fit = step_costs()
    fit.start(tried)
    costs = fit.costs()
    assert len(costs) == 5, "all terms were tried"

    rng, prompts, texts = np.random.default_rng(0), list[float](), list[float]()
    handles = [driver.add(random_tokens(rng, CONTEXT)) for _ in range(SEQUENCES)]
    for handle in handles:
        driver.step((handle, CONTEXT, 1))
    for _ in range(ROUNDS):
        time.sleep(REST_S)
        prompt = driver.add(random_tokens(rng, PROMPT))
        for took, work in (
            (prompts, [(prompt, PROMPT, 1)]),
            (texts, [(handle, 1, 1) for handle in handles]),
        ):
            began = time.perf_counter()
            driver.step(*work)
            took.append(time.perf_counter() - began)
    of_prompt: Terms = 1.0, PROMPT, PROMPT * PROMPT / 2000, 0.0, 0.0
    of_texts: Terms = 1.0, 0.0, 0.0, SEQUENCES, SEQUENCES * CONTEXT / 1000
    for counts, observed in ((of_prompt, prompts), (of_texts, texts)):
        said = sum(cost * count for cost, count in zip(costs.values(), counts, strict=True))
        told = f"{said:.4f} of {sorted(observed)}: {costs}, {tried}"
        assert median(observed) / 1.5 < said < 1.5 * median(observed), told
