"""Two GPUs give what one gives: products, graphs, sampling, sums; and what one raises ends both."""

from __future__ import annotations

import itertools
import os
import signal
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.collectives import AbortedError
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan
from kvbaton.messages.engine import SamplingParams
from tests.engine.test_gpu import GPU, MIXTURES, MODELS, TOLERANCE, check_greedy
from tests.engine.test_tensor_parallel import GREEDY, PROMPTS, Served, tokens
from tests.support.digests import digest_of
from tests.support.prompts import random_tokens

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

Checkpoint = Callable[..., Path]
WHOLE = ("deepseek-v2-lite", "gpt-oss", "qwen3-moe")
"""A CPU tries whole experts of all kinds."""
MIXED = ("llama", "llama-biases", "mistral-window", "qwen3")
TWO: dict[str, Any] = GPU | {"tensor_parallel_size": 2}


@pytest.fixture(autouse=True)
def ieee_products() -> None:
    """transformers may have asked for TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    ("name", "dtype", "eager"),
    [
        *itertools.product(MIXED, ["float32", "bfloat16"], [False]),
        *itertools.product(MIXED[:1], ["float32", "bfloat16"], [True]),
    ],
)
def test_mixed_batches_generate_what_transformers_does(
    name: str, dtype: str, eager: bool, checkpoint: Checkpoint, reference: Any, drive: Any
) -> None:
    folder = checkpoint(**MODELS[name])
    driver = drive(folder, dtype=dtype, enforce_eager=eager, **TWO)
    rng = np.random.default_rng(1)
    prompts = [random_tokens(rng, count) for count in (1, 2, 5, 17, 33, 64, 150)]
    handles = [driver.add(prompt) for prompt in prompts]
    generated = driver.generate_mixed(handles, 12, rng, most_tokens=60)
    for prompt, got in zip(prompts, generated, strict=True):
        check_greedy(reference(folder, dtype), prompt, got, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "whole"),
    [*((name, False) for name in MIXTURES), *((name, True) for name in WHOLE)],
)
def test_experts_generate_what_transformers_does(
    name: str, whole: bool, checkpoint: Checkpoint, reference: Any, drive: Any
) -> None:
    folder = checkpoint(**MODELS[name])
    driver = drive(folder, dtype="float32", enable_expert_parallel=whole, **TWO)
    rng = np.random.default_rng(1)
    for count in (1, 40, 300):
        prompt = random_tokens(rng, count)
        got = driver.generate(driver.add(prompt), 12)
        check_greedy(reference(folder), prompt, got, TOLERANCE["float32"])


def test_requests_give_the_tokens_of_one_gpu(checkpoint: Checkpoint) -> None:
    wanted = [
        GREEDY,
        SamplingParams(temperature=1.1, seed=7, n=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=8, top_p=0.9, top_k=40, max_tokens=20),
        SamplingParams(temperature=0.7, seed=9, repetition_penalty=1.3, logprobs=2, max_tokens=20),
    ]
    requests = [(prompt, wanted[i % 4]) for i, prompt in enumerate(PROMPTS * 2)]
    found = []
    for size in (1, 2):
        settings = {"device": "cuda", "max_num_seqs": 8, "num_blocks": 19}
        engine = Served(checkpoint(tied=True), size, **settings)
        try:
            found.append(tokens(engine.run(requests)))
            assert engine.scheduler.counters()["kvbaton_preemptions_total"] > 0
        finally:
            engine.executor.close()
    assert found[1] == found[0]


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four CUDA devices")
def test_a_step_in_parts_gives_what_a_whole_one_gives(checkpoint: Checkpoint) -> None:
    """Of 1,910 tokens in a graph, of 4,334 without, and of one that decodes."""
    rng = np.random.default_rng(5)
    steps = [
        [(random_tokens(rng, count), GREEDY) for count in counts]
        for counts in ((950, 960), (2100, 2234))
    ]
    folder = checkpoint(family="qwen3", num_kv_heads=4, max_position_embeddings=4096)
    settings: dict[str, Any] = {
        "device": "cuda", "dtype": "float32", "num_blocks": 400, "max_model_len": 4096,
        "max_num_batched_tokens": 8192,
    }  # fmt: skip
    found = []
    for size in (1, 4):
        engine = Served(folder, size, **settings)
        try:
            found.append([tokens(engine.run(requests)) for requests in steps])
        finally:
            engine.executor.close()
    assert found[1] == found[0]


def test_kept_sums_are_those_of_the_bytes(checkpoint: Checkpoint, drive: Any) -> None:
    driver = drive(checkpoint(**MODELS["llama"]), dtype="bfloat16", **TWO)
    handle = driver.add(random_tokens(np.random.default_rng(4), 200))
    driver.generate(handle, 20, chunk=70)
    blocks, length = driver.tables[handle], driver.computed[handle]
    kept = driver.executor.sums(0, blocks)
    again = digest_of(driver.executor, 0, blocks, 0, 0, length)
    driver.wait(kept)
    driver.wait(again)
    assert [rank.cache.data.get_device() for rank in driver.executor.workers] == [0, 1]
    cells = driver.executor.workers[1].cache.data[blocks[0]].cpu()
    assert cells.isfinite().all(), "rank 1's process has not written what we see"
    assert cells.any(dim=-1).all()
    for mine, theirs in zip(kept.poll(), again.result(), strict=True):
        assert (mine == theirs).all()


def one_step(driver: Any, handle: int = 77) -> StepPlan:
    """A prompt of three tokens."""
    new = (NewSequence(handle, array("I", (5, 6, 7)), 3, 0, GREEDY),)
    step = SequenceStep(handle, 0, 3, ((driver.free.pop(),),), 1)
    return StepPlan(9, new=new, steps=(step,))


@pytest.mark.parametrize("how", ["raises", "dies", "hangs"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_a_rank_that_fails_ends_both(
    how: str, eager: bool, checkpoint: Checkpoint, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's GPU waits for a product that never comes, and is set free."""
    driver = drive(checkpoint(**MODELS["llama"]), enforce_eager=eager, **TWO)
    driver.generate(driver.add([5] * 20), 3)
    _, rank = driver.executor.workers
    began = time.monotonic()
    if how == "raises":  # told of a sequence that it does not know
        run, broken = rank.run, StepPlan(9, steps=(SequenceStep(78, 4, 1, ((),), 1),))
        monkeypatch.setattr(rank, "run", lambda plan: run(broken))
        error: tuple[type[Exception], str] = RuntimeError, "KeyError"
    elif how == "dies":
        os.kill(rank.pid, signal.SIGKILL)
        error = RuntimeError, "rank 1 ended with code -9"
    else:
        os.kill(rank.pid, signal.SIGSTOP)
        run = rank._channels[0].ask
        monkeypatch.setattr(
            rank._channels[0], "ask", lambda *args, **more: run(*args, patience_s=2.0, **more)
        )
        error = TimeoutError, "did not answer within 2 s"
    with pytest.raises(error[0], match=error[1]):
        driver.executor.launch(one_step(driver)).result()
    with pytest.raises((RuntimeError, AbortedError)):
        driver.executor.launch(one_step(driver, 79)).result()
    driver.executor.close()
    assert time.monotonic() - began < 20


def test_a_rank_that_lags_by_more_launches_than_a_driver_takes(
    checkpoint: Checkpoint, drive: Any
) -> None:
    folder = checkpoint(**MODELS["llama"], num_layers=96)
    driver = drive(folder, enforce_eager=True, **TWO)
    prompt = random_tokens(np.random.default_rng(7), 40)
    expected = driver.generate(driver.add(prompt), 1)
    _, late = driver.executor.workers
    os.kill(late.pid, signal.SIGSTOP)
    pending = []
    for handle in range(50, 56):
        blocks = tuple(driver.free.pop() for _ in range(3))
        new = (NewSequence(handle, array("I", prompt), 40, 0, GREEDY),)
        step = SequenceStep(handle, 0, 40, (blocks,), 1)
        pending.append(driver.executor.launch(StepPlan(handle, new=new, steps=(step,))))
    time.sleep(0.5)
    os.kill(late.pid, signal.SIGCONT)
    for step_pending in pending:
        assert list(step_pending.result().sampled[0].token_ids) == expected
