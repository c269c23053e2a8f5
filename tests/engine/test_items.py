"""Prompts with images give the tokens of transformers, however their steps are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.cuda.warm_up import TrialSteps
from kvbaton.engine.step import BlockCopy, Fork, SequenceStep, StepPlan
from kvbaton.messages.engine import SamplingParams
from tests.engine.test_cuda_runner import RUNNERS, CpuExecutor, driver_of
from tests.support.pictures import FAMILIES, GREEDY, Pictures, Prompt

Checkpoint = Callable[..., Path]
SAMPLED = SamplingParams(temperature=1.2, seed=1234, n=2)
MIXED: list[tuple[Any, ...]] = [
    (5, (1, 4, 6), 7),
    (1, (1, 16, 10), 1, (1, 2, 2), 9),
    (30,),
    (3, (1, 4, 4), 2, (1, 8, 4), 1, (1, 2, 6), 2, (1, 6, 6), 1),
    (1,),
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Path:
    return checkpoint(family=request.param)


@pytest.fixture(scope="module")
def pictures(folder: Path) -> Pictures:
    return Pictures(folder)


@pytest.fixture(params=RUNNERS)
def driver(request: pytest.FixtureRequest, folder: Path, pictures: Pictures, drive: Any) -> Any:
    return driver_of(request.param, folder, pictures.pool, drive)


@pytest.fixture
def plain(folder: Path, pictures: Pictures, drive: Any) -> Any:
    made = drive(folder, block_size=4)
    made.executor.attach_encoder(pictures.pool)
    return made


def short(pictures: Pictures) -> Prompt:
    """17 tokens: text, an image of 6 rows, text, one of 4, text."""
    return pictures.prompt(np.random.default_rng(3), 3, (1, 4, 6), 1, (1, 4, 4), 3)


def test_mixed_batches_generate_what_transformers_does(driver: Any, pictures: Pictures) -> None:
    rng = np.random.default_rng(1)
    prompts = [pictures.prompt(rng, *parts) for parts in MIXED]
    handles = [pictures.add(driver, prompt) for prompt in prompts]
    generated = driver.generate_mixed(handles, 10, rng)
    for prompt, got in zip(prompts, generated, strict=True):
        expected = pictures.greedy_along(prompt, got, len(got))
        assert got == expected, f"items {prompt.items}"


def test_a_chunk_may_end_anywhere(driver: Any, pictures: Pictures) -> None:
    prompt = short(pictures)
    expected = pictures.generate(prompt, 4)
    for end in range(1, len(prompt.ids)):
        handle = pictures.add(driver, prompt)
        driver.step((handle, end, 0))
        assert driver.generate(handle, 4) == expected, f"cut before token {end}"


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_short_chunks(chunk: int, driver: Any, pictures: Pictures) -> None:
    prompt = short(pictures)
    handle = pictures.add(driver, prompt)
    assert driver.generate(handle, 6, chunk=chunk) == pictures.generate(prompt, 6)


def test_logits_are_those_of_transformers(
    plain: Any, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = plain.record_logits(monkeypatch)
    prompt = pictures.prompt(np.random.default_rng(8), 3, (1, 4, 6), 1, (1, 4, 4), 4)
    got = plain.generate(pictures.add(plain, prompt), 5, chunk=6)
    assert pictures.vision.image_token_id not in got, "transformers would take it for a picture"
    expected = pictures.logits(prompt, got)
    torch.testing.assert_close(torch.cat(seen), expected, atol=1e-4, rtol=1e-4)
    other = Prompt(prompt.ids, prompt.items, prompt.patches.flip(0))
    assert (pictures.logits(other, got) - expected).abs().max() > 0.1, "any image would do"


def test_a_prompt_may_end_with_an_image(driver: Any, pictures: Pictures) -> None:
    prompt = pictures.prompt(np.random.default_rng(4), 4, (1, 4, 6))
    for chunks in ((9,), (4, 5), ()):
        handle = pictures.add(driver, prompt)
        for count in chunks:
            driver.step((handle, count, 0))
        got = driver.generate(handle, 5)
        assert got == pictures.logits(prompt, got).argmax(-1).tolist()


def test_a_cached_prefix_needs_no_rows(driver: Any, pictures: Pictures) -> None:
    rng = np.random.default_rng(6)
    start = pictures.prompt(rng, 3, (1, 6, 8), 9)
    first = pictures.add(driver, start)
    driver.generate(first, 2)
    prompt = Prompt([*start.ids, *rng.integers(10, 384, 5).tolist()], start.items, start.patches)
    blocks = driver.tables[first][:1]
    cached = pictures.add(driver, prompt, cached=blocks, item_rows=())
    assert driver.left(cached) == 13
    assert driver.generate(cached, 6) == pictures.generate(prompt, 6)


def test_a_preempted_sequence_goes_on(driver: Any, pictures: Pictures) -> None:
    prompt = short(pictures)
    expected = pictures.generate(prompt, 9)
    more = Prompt([*prompt.ids, *expected[:4]], prompt.items, prompt.patches)
    handle = pictures.add(driver, more, num_prompt=len(prompt.ids))
    assert driver.generate(handle, 5, chunk=8) == expected[4:]


def test_forks_keep_their_positions(driver: Any, pictures: Pictures) -> None:
    prompt = short(pictures)
    parent = pictures.add(driver, prompt, SAMPLED)
    first = driver.step((parent, 17, 2))[parent].token_ids
    child = driver.add([*prompt.ids, first[1]], SAMPLED, choice=1)
    del driver._new[child]
    driver.tables[child] = [*driver.tables[parent][:-1], driver.free.pop()]
    steps = (SequenceStep(child, 17, 1, (tuple(driver.tables[child]),), 1),)
    copies = (BlockCopy(0, driver.tables[parent][-1], driver.tables[child][-1]),)
    plan = StepPlan(50, (parent,), copies, (Fork(parent, child, 1),), (), steps)
    (sampled,) = driver.executor.launch(plan).result().sampled
    driver.tokens[child] += sampled.token_ids
    driver.computed[child] = 18
    driver.generate(child, 4)
    alone = pictures.add(driver, prompt, SAMPLED, choice=1)
    assert driver.tokens[child][17:] == driver.generate(alone, 6)


def test_rows_of_sequences_that_ended_are_text_again(driver: Any, pictures: Pictures) -> None:
    text = pictures.prompt(np.random.default_rng(7), 20)
    ended: tuple[int, ...] = ()
    for _ in range(5):
        with_image = pictures.add(driver, short(pictures), GREEDY)
        driver.step((with_image, 17, 1), ended=ended)
        handle = pictures.add(driver, text)
        driver.step((handle, 20, 1), ended=(with_image,))
        for _ in range(3):
            driver.step((handle, 1, 1))
        assert driver.tokens[handle][20:] == pictures.generate(text, 4)
        ended = (handle,)


def test_trials_of_a_multimodal_model_are_all_image(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = CpuExecutor(folder).runner
    trial, gathered = TrialSteps(runner), []
    assert runner.encoder is not None
    gather = runner.encoder.gather

    def record(blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        gathered.append(len(blocks))
        return gather(blocks, offsets)

    monkeypatch.setattr(runner.encoder, "gather", record)
    trial.run([1, 2, 70])
    trial.run([20], prefixes=[50])
    assert gathered == [72, 20]
