"""Prompts with images on real GPUs: as transformers, in graphs, without waiting, on two ranks."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan
from tests.engine.sync_debug import waiting_is_an_error
from tests.engine.test_gemma3_images import MIXED as SEEN_WHOLE
from tests.engine.test_gemma3_images import WINDOWS
from tests.engine.test_gpu import GPU, SMALL, TOLERANCE
from tests.engine.test_items import MIXED
from tests.support.pictures import FAMILIES, GREEDY, Pictures

Checkpoint = Callable[..., Path]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def ieee_products() -> None:
    """transformers may have asked for TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def check_mixed_batches(
    driver: Any, pictures: Pictures, tolerance: float, mixed: list[tuple[Any, ...]] = MIXED
) -> None:
    """Every token is the best one of transformers, or as good as it within the tolerance."""
    driver.executor.attach_encoder(pictures.pool)
    rng = np.random.default_rng(1)
    prompts = [pictures.prompt(rng, *parts) for parts in mixed]
    handles = [pictures.add(driver, prompt) for prompt in prompts]
    prompt_of = dict(zip(handles, prompts, strict=True))

    def whole(handle: int, count: int) -> int:
        return pictures.uncut(prompt_of[handle], driver.computed[handle], count)

    generated = driver.generate_mixed(handles, 10, rng, cut=whole)
    for prompt, got in zip(prompts, generated, strict=True):
        if pictures.vision.image_token_id in got:
            got = got[: got.index(pictures.vision.image_token_id) + 1]
        logits = pictures.logits(prompt, got)
        chosen = logits.gather(1, torch.tensor(got, device="cuda")[:, None])[:, 0]
        gap = float((logits.amax(-1) - chosen).max())
        assert gap <= tolerance, f"a token is {gap:.3f} below the best, items {prompt.items}"


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_generate_what_transformers_does(
    family: str, size: str, dtype: str, eager: bool, checkpoint: Checkpoint, drive: Any
) -> None:
    if eager and dtype == "float16":
        pytest.skip("float32 and bfloat16 show it")
    folder = checkpoint(family=family, **(SMALL if size == "small" else {}))
    driver = drive(folder, dtype=dtype, enforce_eager=eager, **GPU)
    check_mixed_batches(driver, Pictures(folder, dtype=dtype, device="cuda"), TOLERANCE[dtype])


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", WINDOWS.values())
def test_images_that_are_seen_whole(
    window: int, dtype: str, eager: bool, checkpoint: Checkpoint, drive: Any
) -> None:
    folder = checkpoint(
        family="gemma3_vl", tied=True, config={"text_config": {"sliding_window": window}},
        **SMALL | {"num_layers": 7},
    )  # fmt: skip
    driver = drive(folder, dtype=dtype, enforce_eager=eager, **GPU)
    pictures = Pictures(folder, dtype=dtype, device="cuda")
    check_mixed_batches(driver, pictures, TOLERANCE[dtype], SEEN_WHOLE)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_take_rows_from_one_pool(family: str, checkpoint: Checkpoint, drive: Any) -> None:
    folder = checkpoint(family=family, **SMALL)
    driver = drive(folder, tensor_parallel_size=2, **GPU)
    check_mixed_batches(driver, Pictures(folder, device="cuda"), TOLERANCE["float32"])


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_waits_for_the_device(family: str, checkpoint: Checkpoint, drive: Any) -> None:
    folder = checkpoint(family=family, **SMALL)
    driver, pictures = drive(folder, **GPU), Pictures(folder, device="cuda")
    driver.executor.attach_encoder(pictures.pool)
    prompt = pictures.prompt(np.random.default_rng(2), 5, (1, 16, 10), 9, (1, 4, 4), 12)
    handle = pictures.add(driver, prompt)
    expected = driver.generate(handle, 3, chunk=30)  # all kernels are compiled by now
    rows, blocks = driver.item_rows[handle], tuple(driver.tables[handle])
    length = len(prompt.ids)
    new = NewSequence(99, array("I", prompt.ids), length, 0, GREEDY, prompt.items)
    plans = [
        StepPlan(1, new=(new,), steps=(SequenceStep(99, 0, 30, (blocks,), 0, rows[:1]),)),
        StepPlan(2, steps=(SequenceStep(99, 30, length - 30, ((),), 1, rows),)),
        StepPlan(3, steps=(SequenceStep(99, length, 1, ((),), 1),)),
        StepPlan(4, steps=(SequenceStep(99, length + 1, 1, ((),), 1),)),
    ]
    with waiting_is_an_error():
        steps = [driver.executor.launch(plan) for plan in plans]
    results = [step.result() for step in steps]
    assert [result.sampled[0].token_ids[0] for result in results[1:]] == expected
