"""Runner and executor: choices, copies, log probabilities, dirty blocks, digest sums, pool size."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvbaton.connectors.layout import ALIGNMENT
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.runner import Runner
from kvbaton.engine.step import BlockCopy, Fork, NewSequence, SequenceStep, StepPlan
from kvbaton.engine.worker import choose_device, cpu_executor
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import SamplingParams
from kvbaton.types import TokenLogprobs
from tests.support.digests import digest_of

Checkpoint = Callable[..., Path]
PROMPT = np.random.default_rng(9).integers(3, 384, 37).tolist()
SAMPLED = SamplingParams(temperature=1.2, seed=1234, n=3)


def expected_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Of the token after each position, [positions, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)


def check_logprobs(got: tuple[TokenLogprobs, ...], expected: torch.Tensor, ids: list[int]) -> None:
    assert len(got) == len(ids) == len(expected)
    for message, row, token in zip(got, expected, ids, strict=True):
        assert message.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert message.rank == int((row > row[token]).sum()) + 1
        best = row.topk(3)
        assert [top.token for top in message.top] == best.indices.tolist()
        assert [top.logprob for top in message.top] == pytest.approx(best.values.tolist(), abs=1e-4)


# --- log probabilities ---


def test_logprobs_are_those_of_the_raw_logits(
    checkpoint: Checkpoint, reference: Any, drive: Any
) -> None:
    driver = drive(checkpoint())
    params = SamplingParams(
        temperature=0.7, seed=3, logprobs=3, top_k=2, repetition_penalty=1.4, logit_bias={9: 2.0}
    )
    told, plain = driver.add(PROMPT, params), driver.add(PROMPT[:5])
    got = [driver.step((told, 37, 1), (plain, 5, 1))[told].logprobs[0]]
    for _ in range(5):
        result = driver.step((plain, 1, 1), (told, 1, 1))
        assert result[plain].logprobs is None
        got.append(result[told].logprobs[0])
    tokens = driver.tokens[told]
    expected = expected_logprobs(reference(checkpoint()), tokens[:-1])[36:]
    check_logprobs(tuple(got), expected, tokens[37:])


@pytest.mark.parametrize("chunk", [1, 10, 36, 37])
def test_prompt_logprobs_come_with_their_chunks(
    chunk: int,
    checkpoint: Checkpoint,
    reference: Any,
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbaton.engine.runner.LOGITS_ELEMENTS", 384 * 7)
    driver = drive(checkpoint())
    other = driver.add(PROMPT[:9])
    handle = driver.add(PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=3))
    driver.step((other, 9, 1))
    got: list[TokenLogprobs] = []
    while left := driver.left(handle):
        count = min(left, chunk)
        last = int(count == left)
        result = driver.step((other, 1, 1), (handle, count, last))
        if handle in result:
            assert result[handle].logprobs is None
            got += result[handle].prompt_logprobs or ()
        if last:
            break
    expected = expected_logprobs(reference(checkpoint()), PROMPT[:-1])
    check_logprobs(tuple(got), expected, PROMPT[1:])
    assert driver.step((handle, 1, 1))[handle].prompt_logprobs is None


# --- choices, forks, preemption ---


def alone(driver: Any, choice: int, count: int) -> list[int]:
    """What one choice generates when nothing else is there."""
    tokens: list[int] = driver.generate(driver.add(PROMPT, SAMPLED, choice=choice), count)
    return tokens


@pytest.mark.parametrize("parent_ends", [False, True])
def test_choices_fork_from_one_prefill(
    parent_ends: bool, checkpoint: Checkpoint, drive: Any
) -> None:
    driver = drive(checkpoint())
    parent = driver.add(PROMPT, SAMPLED)
    first = driver.step((parent, 37, 3))[parent].token_ids
    assert len(set(first)) == 3
    children, copies = [], []
    for choice in (1, 2):
        child = driver.add([*PROMPT, first[choice]], SAMPLED, choice=choice)
        driver._new.pop(child)
        tail = driver.free.pop()
        copies.append(BlockCopy(0, driver.tables[parent][-1], tail))
        driver.tables[child] = []
        driver.computed[child] = 37
        children.append((child, [*driver.tables[parent][:-1], tail]))
    forks = tuple(Fork(parent, child, n) for n, (child, _) in enumerate(children, 1))
    if not parent_ends:
        driver.step((parent, 1, 1))  # the parent may be ahead when the forks are made
    steps = tuple(SequenceStep(child, 37, 1, (tuple(table),), 1) for child, table in children)
    plan = StepPlan(50, (parent,) if parent_ends else (), tuple(copies), forks, (), steps)
    result = driver.executor.launch(plan).result()
    for (child, table), sampled in zip(children, result.sampled, strict=True):
        driver.tables[child] = table
        driver.computed[child] += 1
        driver.tokens[child].append(sampled.token_ids[0])
    for choice, (child, _) in enumerate(children, 1):
        driver.generate(child, 6)
        assert driver.tokens[child][37:] == alone(driver, choice, 8)
    if not parent_ends:
        driver.generate(parent, 6)
        assert driver.tokens[parent][37:] == alone(driver, 0, 8)


def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(
    checkpoint: Checkpoint, drive: Any
) -> None:
    driver = drive(checkpoint())
    params = SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.7, repetition_penalty=1.2)
    expected = driver.generate(driver.add(PROMPT, params), 12)
    handle = driver.add(PROMPT, params)
    driver.generate(handle, 5)
    known = driver.tokens[handle]
    new = NewSequence(handle, array("I", known), 37, 0, params)
    driver._new[handle] = (new, ())
    driver.tables[handle], driver.computed[handle] = [], 0
    driver.generate(handle, 7)
    assert driver.tokens[handle][37:] == expected


def test_two_steps_in_flight_need_no_host(checkpoint: Checkpoint, drive: Any) -> None:
    driver = drive(checkpoint())
    expected = driver.generate(driver.add(PROMPT), 6)
    new = NewSequence(99, array("I", PROMPT), 37, 0, SamplingParams(temperature=0.0))
    blocks = tuple(driver.free.pop() for _ in range(3))
    pending = [
        driver.executor.launch(
            StepPlan(1, new=(new,), steps=(SequenceStep(99, 0, 37, (blocks,), 1),))
        )
    ]
    for position in range(37, 42):
        step = SequenceStep(99, position, 1, ((),), 1)
        pending.append(driver.executor.launch(StepPlan(2, steps=(step,))))
    assert [step.result().sampled[0].token_ids[0] for step in pending] == expected
    assert all(step.ready() for step in pending)


def test_more_sequences_than_expected_are_fine(checkpoint: Checkpoint, drive: Any) -> None:
    driver = drive(checkpoint(), max_num_seqs=2)
    prompts = [PROMPT[n:] for n in range(9)]
    handles = [driver.add(prompt) for prompt in prompts]
    driver.step(*((handle, driver.left(handle), 1) for handle in handles))
    driver.step(*((handle, 1, 1) for handle in handles), ended=())
    for handle, prompt in zip(handles, prompts, strict=True):
        assert driver.tokens[handle][len(prompt) :] == driver.generate(driver.add(prompt), 2)


def test_a_plan_may_only_end_sequences(checkpoint: Checkpoint, drive: Any) -> None:
    driver = drive(checkpoint())
    handle = driver.add(PROMPT)
    driver.generate(handle, 2)
    assert driver.step(ended=(handle, 12345)) == {}


def test_a_broken_plan_raises_where_its_result_is_asked_for(
    checkpoint: Checkpoint, drive: Any
) -> None:
    driver = drive(checkpoint())
    pending = driver.executor.launch(StepPlan(1, steps=(SequenceStep(7, 0, 1, ((1,),), 1),)))
    with pytest.raises(KeyError):
        pending.result()
    assert len(driver.generate(driver.add(PROMPT), 2)) == 2


# --- memory ---


@pytest.mark.parametrize("window", [None, 10])
def test_unwritten_slots_may_hold_nan(
    window: int | None, checkpoint: Checkpoint, drive: Any
) -> None:
    folder = checkpoint(family="mistral", config={"sliding_window": window})
    clean, dirty = drive(folder, block_size=8), drive(folder, block_size=8)
    dirty.executor.poison(list(range(1, 256)))
    prompts = [PROMPT[:count] for count in (3, 37, 8, 20, 5)]
    for driver in (clean, dirty):
        handles = [driver.add(prompt) for prompt in prompts]
        driver.step(*((handle, min(driver.left(handle), 11), 0) for handle in handles))
        for handle in handles:
            driver.computed[handle] -= 1 if driver.left(handle) == 0 else 0
        driver.step(*((handle, driver.left(handle), 1) for handle in handles))
        for _ in range(10):
            driver.step(*((handle, 1, 1) for handle in handles))
        for _ in range(5):  # a draft's blocks are behind the token before it, too
            drafts = dict.fromkeys(handles, (7, 8, 9))
            driver.step(*((handle, 1, 1) for handle in handles), drafts=drafts)
    assert dirty.tokens == clean.tokens
    data = dirty.executor.workers[0].cache.data
    assert data[0].eq(0).all()
    assert data.isnan().any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layout_says_where_every_element_is(
    dtype: str, checkpoint: Checkpoint, drive: Any
) -> None:
    executor = drive(checkpoint(), dtype=dtype, num_blocks=20).executor
    (memory,), (layout,) = executor.memories[0], executor.layouts[0]
    (plane,) = layout.planes
    data = executor.workers[0].cache.data
    assert memory.address % ALIGNMENT == 0
    assert memory.num_bytes == data.nbytes
    assert plane.shape == tuple(data.shape) == (20, 2, 2, 2, 16, 16)
    assert (plane.layers, plane.head_start, plane.head_total) == ((0, 1), 0, 2)
    index = (19, 1, 0, 1, 7, 3)
    data[index] = 5.0
    offset = plane.offset + sum(i * s for i, s in zip(index, plane.strides, strict=True))
    raw = ctypes.string_at(memory.address + offset, plane.item_size)
    assert torch.frombuffer(bytearray(raw), dtype=data.dtype)[0] == 5.0


# --- digest sums ---


def kept(driver: Any, handle: int) -> npt.NDArray[np.uint64]:
    found: npt.NDArray[np.uint64] = driver.wait(driver.executor.sums(0, driver.tables[handle]))
    return found


def recomputed(driver: Any, handle: int) -> npt.NDArray[np.uint64]:
    table, end = driver.tables[handle], driver.computed[handle]
    found: npt.NDArray[np.uint64] = driver.wait(digest_of(driver.executor, 0, table, 0, 0, end))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 7, 37])
def test_sums_of_steps_equal_those_of_the_bytes(
    chunk: int, dtype: str, checkpoint: Checkpoint, drive: Any
) -> None:
    driver = drive(checkpoint(), dtype=dtype)
    driver.executor.poison(list(range(1, 256)))
    first, second = driver.add(PROMPT), driver.add(PROMPT[:20])
    driver.generate(first, 30, chunk=chunk)
    driver.generate(second, 3)
    for handle in (first, second):
        assert kept(driver, handle).shape == (len(driver.tables[handle]), 2, 2, 2)
        assert (kept(driver, handle) == recomputed(driver, handle)).all()
    driver.executor.workers[0].cache.data[driver.tables[first][1], 0, 0, 1, 3, 2] += 1
    wrong = kept(driver, first) != recomputed(driver, first)
    assert np.argwhere(wrong).tolist() == [[1, 0, 1, 0]]


def test_reused_blocks_start_anew(checkpoint: Checkpoint, drive: Any) -> None:
    driver = drive(checkpoint())
    first = driver.add(PROMPT)
    driver.generate(first, 2)
    driver.free += driver.tables[first]
    second = driver.add(PROMPT[::-1])
    driver.generate(second, 4)
    assert set(driver.tables[second]) & set(driver.tables[first])
    assert (kept(driver, second) == recomputed(driver, second)).all()


@pytest.mark.parametrize("again", [1, 5])
def test_a_private_copy_may_be_written_again(
    again: int, checkpoint: Checkpoint, drive: Any
) -> None:
    driver = drive(checkpoint())
    first = driver.add(PROMPT)
    driver.generate(first, 6)
    source, target = driver.tables[first][-1], driver.free.pop()
    second = driver.add(PROMPT, SamplingParams(temperature=2.0, seed=8))
    new, _ = driver._new.pop(second)
    driver.tables[second] = [*driver.tables[first][:-1], target]
    driver.computed[second] = 37
    step = SequenceStep(second, 37 - again, again, (tuple(driver.tables[second]),), 1)
    copies = (BlockCopy(0, source, target),)
    before = kept(driver, first)
    result = driver.executor.launch(StepPlan(9, (), copies, (), (new,), (step,))).result()
    assert (kept(driver, second) == recomputed(driver, second)).all()
    driver.tokens[second].append(result.sampled[0].token_ids[0])
    expected = driver.generate(driver.add(PROMPT, SamplingParams(temperature=2.0, seed=8)), 8)
    driver.generate(second, 7)
    assert driver.tokens[second][37:] == expected
    assert (kept(driver, second) == recomputed(driver, second)).all()
    assert (kept(driver, first) == before).all()


@pytest.mark.parametrize("again", [0, 1, 3])
def test_adopted_blocks_are_as_if_computed_here(
    again: int, checkpoint: Checkpoint, drive: Any
) -> None:
    source, target = drive(checkpoint()), drive(checkpoint())
    expected = source.generate(source.add(PROMPT), 9)
    handle = source.add(PROMPT)
    token = source.generate(handle, 1)[0]
    blocks = [target.free.pop() for _ in source.tables[handle]]
    pools = [driver.executor.workers[0].cache.data for driver in (source, target)]
    pools[1][blocks] = pools[0][source.tables[handle]]
    sums = digest_of(target.executor, 0, blocks, 0, 0, 37, keep=True)
    assert (target.wait(sums) == kept(source, handle)).all()
    new = NewSequence(1, array("I", (*PROMPT, token)), 37, 0, SamplingParams(temperature=0.0))
    step = SequenceStep(1, 37 - again, 1 + again, (tuple(blocks),), 1)
    result = target.executor.launch(StepPlan(1, new=(new,), steps=(step,))).result()
    target.tokens[1] = [*PROMPT, token, result.sampled[0].token_ids[0]]
    target.tables[1], target.computed[1] = blocks, 38
    target.generate(1, 7)
    assert target.tokens[1][37:] == expected
    assert (kept(target, 1) == recomputed(target, 1)).all()


def test_sums_can_be_left_out(checkpoint: Checkpoint, drive: Any) -> None:
    with_sums, without = drive(checkpoint()), drive(checkpoint(), track_sums=False)
    for driver in (with_sums, without):
        driver.generate(driver.add(PROMPT), 3)
    assert (recomputed(without, 1) == kept(with_sums, 1)).all()
    without.wait(digest_of(without.executor, 0, [1], 0, 0, 16, keep=True))
    with pytest.raises(AssertionError, match="without digest sums"):
        without.wait(without.executor.sums(0, [1]))


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "field", "told"),
    [
        ({"num_blocks": 8, "max_model_len": 128}, "--num-blocks", "--num-blocks 9"),
        ({"kv_cache_memory_bytes": 40_000}, "--kv-cache-memory-bytes", "--num-blocks 33"),
        ({"num_blocks": 2**40}, "--num-blocks", "can't be had"),
        ({"kv_cache_memory_bytes": 2**53}, "--kv-cache-memory-bytes", "can't be had"),
        ({"max_model_len": 513}, "--max-model-len", "512"),
        ({"max_model_len": 1}, "--max-model-len", "1 is not within 2"),
        ({"device": "cuda"}, "--device", "no CUDA"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size", "one of 1, 2, 4"),
    ],
)
def test_settings_that_can_not_be_met_are_named(
    settings: dict[str, Any], field: str, told: str, checkpoint: Checkpoint
) -> None:
    if field == "--device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    config = EngineConfig(model=str(checkpoint()), **{"device": "cpu", **settings})
    with pytest.raises(ConfigError, match=told) as raised:
        cpu_executor(config, load_model_config(checkpoint()))
    assert raised.value.field == field


def test_sequences_that_memory_does_not_hold_are_told_by_their_flags(
    checkpoint: Checkpoint, drive: Any
) -> None:
    worker = drive(checkpoint()).executor.workers[0]
    with pytest.raises(ConfigError, match=r"--max-num-seqs: .* --max-model-len") as raised:
        # Beyond all address spaces.
        Runner(worker.model, worker.cache, max_model_len=512, max_num_seqs=2**40)
    assert len(str(raised.value).splitlines()) == 1


def test_blocks_must_be_aligned(checkpoint: Checkpoint) -> None:
    folder = checkpoint(num_layers=1, num_kv_heads=1, head_dim=8, hidden_size=32)
    config = EngineConfig(model=str(folder), block_size=3, device="cpu")
    with pytest.raises(ConfigError, match="192 bytes, not a multiple of 128"):
        cpu_executor(config, load_model_config(folder))


def test_the_pool_is_as_large_as_asked_for(checkpoint: Checkpoint) -> None:
    model = load_model_config(checkpoint())
    for settings, expected in (
        ({"max_num_seqs": 3}, 3 * 32 + 1),
        ({"kv_cache_memory_bytes": 8192 * 50}, 50),
        ({"num_blocks": 77, "kv_cache_memory_bytes": 1}, 77),
    ):
        config = EngineConfig(model=str(checkpoint()), device="cpu", **settings)  # type: ignore[arg-type]
        executor = cpu_executor(config, model)
        assert executor.layouts[0][0].num_blocks == expected
        executor.close()


def test_auto_takes_the_device_that_is_there() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device(EngineConfig(model="x")).type == expected
