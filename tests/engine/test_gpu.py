"""The engine on a real GPU against transformers, against itself, and against the CPU."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.kernels.digest import block_sums
from kvbaton.messages.engine import SamplingParams
from tests.support.digests import digest_of
from tests.support.prompts import random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SMALL = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
LATENTS = {
    "first_k_dense_replace": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **SMALL},
    "llama-tiny-heads": {"family": "llama"},
    "llama3-rope": {"family": "llama", "config": {"rope_scaling": ROPE}},
    "llama-biases": {"family": "llama", "config": {"attention_bias": True, "mlp_bias": True}},
    "mistral-window": {"family": "mistral", "config": {"sliding_window": 11}},
    "qwen2-windows": {"family": "qwen2", "config": WINDOWS},
    "qwen3": {"family": "qwen3", **SMALL},
    "gemma3": {"family": "gemma3", "num_layers": 7, "tied": True, **SMALL},
    "gemma4": {"family": "gemma4", "num_layers": 9, **SMALL},
    "gemma4-as-published": {
        "family": "gemma4",
        "num_layers": 4,
        "num_kv_heads": 4,
        "tied": True,
        **SMALL,
        "head_dim": 256,
        "config": {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 512,
            "num_kv_shared_layers": 0,
        },
    },
    "llama4": {"family": "llama4", "num_layers": 4, **SMALL},
    "deepseek-v2-lite": {"family": "deepseek_v2", **SMALL, "config": {"q_lora_rank": None}},
    "deepseek-v3": {"family": "deepseek_v3", **SMALL},
    "latents": {"family": "deepseek_v3", **SMALL, "config": LATENTS},
    "dots1": {"family": "dots1", **SMALL},
    "gpt-oss": {"family": "gpt_oss", "config": {"swiglu_limit": 7.0}, **SMALL},  # 5.17 has no other
    "mixtral": {"family": "mixtral", **SMALL},
    "qwen2-moe": {"family": "qwen2_moe", **SMALL},
    "qwen3-moe": {"family": "qwen3_moe", **SMALL},
    "qwen3-next": {"family": "qwen3_next", "num_layers": 4, **SMALL},
}
MIXTURES = (
    "deepseek-v2-lite",
    "deepseek-v3",
    "dots1",
    "gpt-oss",
    "llama4",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-next",
)
GPU: dict[str, Any] = {
    "device": "cuda", "max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 512,
}  # fmt: skip
TOLERANCE = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.15}


@pytest.fixture(autouse=True)
def ieee_products() -> None:
    """transformers may have asked for TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False


def expected_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Of the token after each position, on the GPU: [positions, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model.cuda()(torch.tensor([ids], device="cuda")).logits[0]
    return logits.float()


def check_greedy(model: Any, prompt: list[int], got: list[int], tolerance: float) -> None:
    """Every token is the best one, or as good as it within the tolerance."""
    logits = expected_logits(model, [*prompt, *got][:-1])[len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(got, device="cuda")[:, None])[:, 0]
    gaps = logits.amax(-1) - chosen
    best = logits.argmax(-1).tolist()
    assert gaps.max() <= tolerance, f"below the best by {gaps.tolist()}: {got}, best {best}"


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_generate_what_transformers_does(
    name: str,
    dtype: str,
    eager: bool,
    checkpoint: Callable[..., Path],
    reference: Any,
    drive: Any,
) -> None:
    if eager and dtype == "float16":
        pytest.skip("float32 and bfloat16 show it")
    if name in MIXTURES and dtype != "float32":
        pytest.skip("two experts that a router rates almost alike change places")
    folder = checkpoint(**MODELS[name])
    driver = drive(folder, dtype=dtype, enforce_eager=eager, **GPU)
    rng = np.random.default_rng(1)
    prompts = [random_tokens(rng, count) for count in (1, 2, 5, 17, 33, 64, 150)]
    handles = [driver.add(prompt) for prompt in prompts]
    generated = driver.generate_mixed(handles, 12, rng, most_tokens=60)
    for prompt, got in zip(prompts, generated, strict=True):
        check_greedy(reference(folder, dtype), prompt, got, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["latents", "llama"])
def test_long_prompts_in_chunks_and_from_a_cached_prefix(
    name: str, dtype: str, checkpoint: Callable[..., Path], reference: Any, drive: Any
) -> None:
    folder = checkpoint(**MODELS[name])
    settings = GPU | {"max_model_len": 6000, "max_num_batched_tokens": 2300, "num_blocks": 1024}
    driver = drive(folder, dtype=dtype, **settings)
    rng = np.random.default_rng(2)
    prompt = random_tokens(rng, 5000)
    for chunk in (2300, 1111):
        handle = driver.add(prompt)
        got = driver.generate(handle, 6, chunk=chunk)
        check_greedy(reference(folder, dtype), prompt, got, TOLERANCE[dtype])
    other = prompt[:3200] + random_tokens(rng, 1500)
    cached = driver.add(other, cached=driver.tables[handle][:200])
    got = driver.generate(cached, 6, chunk=2300)
    check_greedy(reference(folder, dtype), other, got, TOLERANCE[dtype])


def test_equal_prompts_share_a_launch(
    checkpoint: Callable[..., Path], reference: Any, drive: Any
) -> None:
    folder = checkpoint(**MODELS["llama"])
    settings = GPU | {"max_model_len": 2000, "max_num_batched_tokens": 8000, "num_blocks": 1024}
    driver = drive(folder, dtype="bfloat16", **settings)
    rng = np.random.default_rng(6)
    lengths = (1, 40, 1100, 1100, 1100, 1024, 1024, 30)
    prompts = [random_tokens(rng, count) for count in lengths]
    handles = [driver.add(prompt) for prompt in prompts]
    driver.step(*((handle, driver.left(handle), 1) for handle in handles))
    for _ in range(3):
        driver.step(*((handle, 1, 1) for handle in handles))
    for handle, prompt in zip(handles, prompts, strict=True):
        got = driver.tokens[handle][len(prompt) :]
        check_greedy(reference(folder, "bfloat16"), prompt, got, TOLERANCE["bfloat16"])


def test_seeded_sampling_gives_the_tokens_of_the_cpu(
    checkpoint: Callable[..., Path], drive: Any
) -> None:
    folder = checkpoint(**MODELS["llama"])
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, count) for count in (9, 40, 100, 7, 30)]
    wanted = [
        SamplingParams(temperature=1.0, seed=11),
        SamplingParams(temperature=0.6, seed=(1 << 64) - 3),
        SamplingParams(temperature=0.9, seed=5, top_p=0.9, frequency_penalty=0.5, logprobs=2),
        SamplingParams(seed=4, allowed_token_ids=tuple(range(40, 52))),
        SamplingParams(temperature=0.0, bad_words_token_ids=tuple((a,) for a in range(3, 384, 2))),
    ]
    tokens = []
    for device in ("cuda", "cpu"):
        driver = drive(folder, **GPU | {"device": device})
        for group in ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3, 4)):
            handles = [driver.add(prompts[i], wanted[i]) for i in group]
            driver.step(*((h, driver.left(h), 1) for h in handles))
            for _ in range(20):
                driver.step(*((h, 1, 1) for h in handles))
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_penalties_give_the_tokens_of_the_cpu(
    eager: bool, checkpoint: Callable[..., Path], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the step: alone, beside rows without any, in chunks, and in rows used before."""
    folder, rng = checkpoint(**MODELS["llama"]), np.random.default_rng(10)
    wanted = [
        SamplingParams(temperature=0.7, seed=1, top_k=20, top_p=0.8, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, frequency_penalty=0.6),
        SamplingParams(temperature=0.9, seed=2),
        SamplingParams(temperature=0.0, repetition_penalty=0.8, presence_penalty=0.5),
        SamplingParams(temperature=1.1, seed=3, top_p=0.7, presence_penalty=1.5),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=4, min_p=0.05, frequency_penalty=-0.2),
    ]
    prompts = [random_tokens(rng, count) for count in (9, 40, 300, 7, 30, 1, 200)]
    tokens = []
    for device in ("cpu", "cuda"):
        driver = drive(folder, **GPU | {"device": device, "enforce_eager": eager})
        if device == "cuda":  # which is for what the step itself can't
            monkeypatch.setattr("kvbaton.engine.runner.sample", None)
        for group in ((0,), (3, 1), range(7)):
            handles = [driver.add(prompts[i], wanted[i]) for i in group]
            driver.generate_mixed(handles, 24, np.random.default_rng(11), most_tokens=60)
            driver.step((handles[-1], 1, 1), ended=tuple(handles[:-1]))
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]


def test_kept_sums_are_those_of_the_bytes(checkpoint: Callable[..., Path], drive: Any) -> None:
    driver = drive(checkpoint(**MODELS["llama"]), dtype="bfloat16", **GPU)
    handle = driver.add(random_tokens(np.random.default_rng(4), 200))
    driver.generate(handle, 20, chunk=70)
    blocks, length = driver.tables[handle], driver.computed[handle]
    kept = driver.wait(driver.executor.sums(0, blocks))
    again = driver.wait(digest_of(driver.executor, 0, blocks, 0, 0, length))
    cache = driver.executor.workers[0].cache.data
    reference = block_sums(cache.cpu(), torch.tensor(blocks), 0, 0, length).numpy()
    assert (kept == again).all()
    assert (kept.view(np.int64) == reference).all()
    driver.executor.poison(blocks[1:2])
    inside = digest_of(driver.executor, 0, blocks[1:], 16, 20, length, keep=True)
    assert (driver.wait(inside)[0] != kept[1]).any()
    assert (driver.wait(driver.executor.sums(0, blocks)) == kept).all(), "a cut block's are not"
    poisoned = driver.wait(digest_of(driver.executor, 0, blocks, 0, 0, length, keep=True))
    assert (poisoned[1] != kept[1]).all()
    assert (driver.wait(driver.executor.sums(0, blocks)) == poisoned).all()


def noting_replays(monkeypatch: pytest.MonkeyPatch) -> list[torch.cuda.CUDAGraph]:
    """Graphs, in the order in which they are replayed from now on."""
    found, replay = list[torch.cuda.CUDAGraph](), torch.cuda.CUDAGraph.replay

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        found.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noted)
    return found


def test_steps_with_prompts_are_graphs(
    checkpoint: Callable[..., Path], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = drive(checkpoint(**MODELS["llama"]), **GPU)
    rng, replays = np.random.default_rng(7), noting_replays(monkeypatch)
    handles = [driver.add(random_tokens(rng, count)) for count in (40, 470, 5, 7, 9, 11, 13)]
    pieces = len(driver.executor.workers[0].model.layers) + 1
    driver.step((handles[0], 40, 1))
    assert len(replays) == 1
    driver.step((handles[0], 1, 1), (handles[1], 470, 1))  # one decodes beside it
    assert len(replays) == 2
    driver.step(*((handle, 2, 0) for handle in handles[2:6]))
    assert len(replays) == 3
    driver.step(*((handle, driver.left(handle), 1) for handle in handles[2:]))  # more than few
    assert len(replays) == 3 + pieces
    assert replays[0] is not replays[1]
    assert len(set(replays[2:])) == 1 + pieces, "40 and 8 tokens may share a size, the rest never"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama"])
def test_a_long_prompt_alone_is_one_graph(
    name: str,
    dtype: str,
    checkpoint: Callable[..., Path],
    reference: Any,
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any length; what pads a prompt is left over from the one before."""
    if name in MIXTURES and dtype != "float32":
        pytest.skip("two experts that a router rates almost alike change places")
    folder = checkpoint(**MODELS[name])
    settings = GPU | {"max_model_len": 3000, "max_num_batched_tokens": 2300, "num_blocks": 4096}
    driver = drive(folder, dtype=dtype, **settings)
    rng, replays = np.random.default_rng(9), noting_replays(monkeypatch)
    for number, length in enumerate((2048, 1030, 1500, 1700), 1):
        prompt = random_tokens(rng, length)
        handle = driver.add(prompt)
        driver.step((handle, length, 1))
        assert len(set(replays)) == number
        for _ in range(3):  # its blocks hold its keys
            driver.step((handle, 1, 1))
        del replays[number:]
        got = driver.tokens[handle][length:]
        check_greedy(reference(folder, dtype), prompt, got, TOLERANCE[dtype])


def test_whole_steps_of_prompts_give_what_eager_ones_do(
    checkpoint: Callable[..., Path], drive: Any
) -> None:
    """Of prompts alone, and of prompts beside some that decode already."""
    rng, folder = np.random.default_rng(8), checkpoint(**MODELS["llama"])
    prompts = [random_tokens(rng, count) for count in (400, 3, 130, 17, 300)]
    found = []
    for eager in (False, True):
        driver = drive(folder, dtype="float32", enforce_eager=eager, **GPU)
        handles = [driver.add(prompt) for prompt in prompts]
        for beside in (False, True):
            while any(driver.left(handle) > 1 for handle in handles):
                work = [(h, min(driver.left(h), 97)) for h in handles if driver.left(h) > 1][:4]
                work += [(h, 1) for h in handles if beside and driver.left(h) == 1]
                work.sort(key=lambda one: one[1] > 1)
                driver.step(*((h, count, int(count == driver.left(h))) for h, count in work))
            handles += [driver.add(prompt[::-1]) for prompt in prompts] if not beside else []
        for _ in range(8):
            driver.step(*((handle, 1, 1) for handle in handles))
        found.append([driver.tokens[handle] for handle in handles])
    assert found[0] == found[1]


def test_sums_asked_for_during_a_step_are_those_after_it(
    checkpoint: Callable[..., Path], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are fetched on a stream of their own, which waits for the step."""
    driver = drive(checkpoint(**MODELS["llama"]), dtype="bfloat16", **GPU)
    handle = driver.add(random_tokens(np.random.default_rng(6), 200))
    asked, launch = [], driver.executor.launch

    def launch_and_ask(plan: Any) -> Any:
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles: 0.1 s
        step = launch(plan)
        asked.append(driver.executor.sums(0, driver.tables[handle], in_flight=True))
        assert asked[-1].poll() is None, "the step has not even begun"
        return step

    monkeypatch.setattr(driver.executor, "launch", launch_and_ask)
    for count, samples in ((96, 0), (104, 1)):
        driver.step((handle, count, samples))
        kept = driver.wait(asked.pop())
        blocks, length = driver.tables[handle], driver.computed[handle]
        again = driver.wait(digest_of(driver.executor, 0, blocks, 0, 0, length))
        assert (kept == again).all()


def test_sums_of_a_step_in_flight_are_without_the_next_step(
    checkpoint: Callable[..., Path], drive: Any
) -> None:
    """A source may go on in the last block of a prompt before the sums are fetched."""
    from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan

    driver = drive(checkpoint(**MODELS["llama"]), **GPU)
    executor, prompt = driver.executor, random_tokens(np.random.default_rng(5), 20)
    new = (NewSequence(1, array("I", prompt), 20, 0, SamplingParams(temperature=0.0)),)
    first = executor.launch(StepPlan(1, new=new, steps=(SequenceStep(1, 0, 20, ((1, 2),), 1),)))
    with torch.cuda.stream(executor.workers[0]._later_sums_stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles: 0.1 s
    asked = executor.sums(0, [1, 2], in_flight=True)
    second = executor.launch(StepPlan(2, steps=(SequenceStep(1, 20, 1, ((),), 1),)))
    first.result()
    second.result()
    assert asked.poll() is None, "they were not to be fetched before the second step"
    kept = driver.wait(asked)
    for count in (20, 21):
        again = driver.wait(digest_of(executor, 0, [1, 2], 0, 0, count))
        assert bool((kept == again).all()) == (count == 20)


def test_two_steps_in_flight(checkpoint: Callable[..., Path], reference: Any, drive: Any) -> None:
    from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan

    folder = checkpoint(**MODELS["llama"])
    executor = drive(folder, **GPU).executor
    prompt, params = random_tokens(np.random.default_rng(5), 20), SamplingParams(temperature=0.0)
    new = (NewSequence(1, array("I", prompt), 20, 0, params),)
    flying = [executor.launch(StepPlan(0, new=new, steps=(SequenceStep(1, 0, 20, ((1, 2),), 1),)))]
    got: list[int] = []
    for number in range(1, 12):
        step = SequenceStep(1, 19 + number, 1, ((),), 1)
        flying.append(executor.launch(StepPlan(number, steps=(step,))))
        got += flying.pop(0).result().sampled[0].token_ids
    check_greedy(reference(folder), prompt, got, 1e-3)


def test_graphs_are_captured_anew_when_tensors_have_moved(
    checkpoint: Callable[..., Path], reference: Any, drive: Any
) -> None:
    folder = checkpoint(**MODELS["llama"])
    driver = drive(folder, **GPU | {"max_num_seqs": 2})
    rng = np.random.default_rng(6)
    prompts = [random_tokens(rng, count) for count in (20, 9, 5, 7, 11, 3)]
    first = driver.add(prompts[0])
    driver.step((first, 20, 1))
    driver.step((first, 1, 1))
    others = [driver.add(prompt) for prompt in prompts[1:]]  # more than there are rows for
    for handle, prompt in zip(others, prompts[1:], strict=True):
        driver.step((handle, len(prompt), 1))
    for handle in others[:4]:
        for _ in range(3):
            driver.step((first, 1, 1), (handle, 1, 1))
    got = driver.tokens[first][20:]
    assert len(got) == 14
    check_greedy(reference(folder, "float32"), prompts[0], got, TOLERANCE["float32"])
