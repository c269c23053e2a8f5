"""Several ranks give what one gives; each holds its share; one that fails ends the others."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.build import make_executor, make_scheduler
from kvbaton.engine.collectives import AbortedError, Barrier, HostCollectives
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.executor import WorkerGroup, rank_threads
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.models import llama
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan
from kvbaton.engine.worker import CpuWorker
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import AddRequest, Output, SamplingParams
from tests.support.digests import digest_of
from tests.support.making import making
from tests.support.waiting import PATIENCE_S

Checkpoint = Callable[..., Path]
Outputs = dict[str, list[Output]]

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"config": {"attention_bias": True, "mlp_bias": True}},
    "llama-tied": {"tied": True},
    "llama-odd-vocab": {"vocab_size": 387},
    "mistral-window": {"family": "mistral", "config": {"sliding_window": 11}},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "deepseek-v2": {"family": "deepseek_v2"},
    "deepseek-v3": {"family": "deepseek_v3", "config": {"q_lora_rank": None}},
    "dots1": {"family": "dots1"},
    "gpt-oss": {"family": "gpt_oss"},
    "gemma4": {
        "family": "gemma4",
        "num_layers": 7,
        "config": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    },
    "llama4": {"family": "llama4", "num_layers": 4},
    "mixtral": {"family": "mixtral"},
    "qwen2-moe": {"family": "qwen2_moe"},
    "qwen3-next": {"family": "qwen3_next", "num_layers": 4, "head_dim": 32},
    "qwen3-moe": {"family": "qwen3_moe", "config": {"mlp_only_layers": [0]}},
}
WHOLE_EXPERTS = ("deepseek-v2", "dots1", "gpt-oss", "llama4", "qwen2-moe", "qwen3-moe")
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
rng = np.random.default_rng(3)
SHARED = rng.integers(3, 384, 40).tolist()
PROMPTS = [rng.integers(3, 384, count).tolist() for count in (1, 16, 37, 70)]
PROMPTS += [SHARED + rng.integers(3, 384, count).tolist() for count in (5, 9)]


class Served:
    """A scheduler over an executor, without processes."""

    def __init__(self, folder: Path, size: int, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "device": "cpu", "max_model_len": 128, "max_num_batched_tokens": 32,
        }  # fmt: skip
        config = EngineConfig(model=str(folder), tensor_parallel_size=size, **(defaults | settings))
        model = load_model_config(folder, config.dtype)
        self.executor = make_executor(config, model, track_sums=True)
        self.scheduler = make_scheduler(config, model, self.executor.layouts[0], bytes(32))

    def run(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> Outputs:
        """Outputs by request and choice, once all have ended."""
        found: Outputs = {}
        for number, (prompt, params) in enumerate(requests):
            self.scheduler.add(
                AddRequest(request_id=str(number), token_ids=array("I", prompt), params=params)
            )
        while self.scheduler.has_work():
            plan = self.scheduler.plan()
            assert plan is not None
            for output in self.scheduler.update(self.executor.launch(plan).result()):
                found.setdefault(f"{output.request_id}/{output.choice}", []).append(output)
        return found


@pytest.fixture
def served() -> Any:
    """Makes `Served`s, and closes them."""
    with making(Served, lambda served: served.executor.close()) as make:
        yield make


def tokens(outputs: Outputs) -> dict[str, list[int]]:
    return {name: [t for o in listed for t in o.token_ids] for name, listed in outputs.items()}


# --- what they compute ---


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_one_rank(
    name: str, checkpoint: Checkpoint, served: Any
) -> None:
    """Of ranks that split all, and of those that hold whole experts."""
    folder = checkpoint(**MODELS[name])
    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    one, two, four = (tokens(served(folder, n).run(requests)) for n in (1, 2, 4))
    assert two == one
    assert four == one
    if name not in WHOLE_EXPERTS:
        return
    engine = served(folder, 2, enable_expert_parallel=True)
    assert tokens(engine.run(requests)) == one
    for rank, worker in enumerate(engine.executor.workers):
        experts = worker.model.layers[1].mlp.experts
        assert experts.first == 4 * rank
        assert len(experts.gate_up_proj) == len(experts.down_proj) == 4


@pytest.mark.parametrize("family", ["llama-biases", "gpt-oss", "qwen3-moe"])
def test_a_step_in_parts_gives_what_a_whole_one_gives(
    family: str, checkpoint: Checkpoint, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(**MODELS[family])
    requests = [(PROMPTS[3], GREEDY), (PROMPTS[0], GREEDY), (PROMPTS[2], GREEDY)]
    expected = tokens(served(folder, 1, max_num_batched_tokens=300).run(requests))
    for name, value in {"PARTS_RANKS": 2, "PARTS_TOKENS": 4, "PART_ROWS": 2}.items():
        monkeypatch.setattr(llama, name, value)
    sizes: list[tuple[int, ...]] = []
    compute = llama.DecoderLayer.forward_in_parts

    def count(layer: Any, deltas: Any, streams: Any, *rest: Any) -> Any:
        sizes.append(tuple(map(len, streams)))
        return compute(layer, deltas, streams, *rest)

    monkeypatch.setattr(llama.DecoderLayer, "forward_in_parts", count)
    found = served(folder, 2, max_num_batched_tokens=300).run(requests)
    assert tokens(found) == expected
    assert {len(step) for step in sizes} == {2}
    assert any(len(set(step)) > 1 for step in sizes)  # the second part has what is left


def test_sampling_choices_and_preemption_are_those_of_one_rank(
    checkpoint: Checkpoint, served: Any
) -> None:
    wanted = [
        SamplingParams(temperature=1.1, seed=7, n=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=8, top_p=0.9, top_k=40, max_tokens=20),
        SamplingParams(temperature=0.7, seed=9, min_p=0.05, repetition_penalty=1.3, max_tokens=20),
        SamplingParams(temperature=0.0, frequency_penalty=0.5, logit_bias={9: 2.0}, max_tokens=20),
    ]
    requests = [(prompt, wanted[i % 4]) for i, prompt in enumerate(PROMPTS * 2)]
    found = []
    for n in (1, 2, 4):
        engine = served(checkpoint(), n, num_blocks=19)
        found.append(tokens(engine.run(requests)))
        assert engine.scheduler.counters()["kvbaton_preemptions_total"] > 0
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_cached_prefix_serves_all_ranks(checkpoint: Checkpoint, served: Any) -> None:
    engine = served(checkpoint(), 2)
    first = tokens(engine.run([(PROMPTS[4], GREEDY)]))
    assert tokens(engine.run([(PROMPTS[4], GREEDY)])) == first
    assert engine.scheduler.counters()['kvbaton_prompt_tokens_total{source="local_cache"}'] > 0


def test_logprobs_are_those_of_one_rank(checkpoint: Checkpoint, served: Any) -> None:
    params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=6)
    requests = [(prompt, params) for prompt in PROMPTS[2:4]]
    one, two = (served(checkpoint(), n).run(requests) for n in (1, 2))
    assert one.keys() == two.keys()
    for name in one:
        for kind in ("logprobs", "prompt_logprobs"):
            mine, theirs = (
                [m for output in run[name] for m in getattr(output, kind) or () if m]
                for run in (one, two)
            )
            assert mine
            for a, b in zip(mine, theirs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert (a.rank, [t.token for t in a.top]) == (b.rank, [t.token for t in b.top])


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.15), ("float16", 0.03)])
def test_logits_of_narrow_dtypes_are_close_to_those_of_one_rank(
    dtype: str, most: float, checkpoint: Checkpoint, drive: Any
) -> None:
    found = []
    for size in (1, 2):
        driver = drive(checkpoint(vocab_size=387), dtype=dtype, tensor_parallel_size=size)
        params = SamplingParams(temperature=0.0, prompt_logprobs=500)
        handle = driver.add(PROMPTS[3], params)
        told = driver.step((handle, 70, 1))[handle].prompt_logprobs
        rows = [sorted((t.token, t.logprob) for t in message.top) for message in told]
        found.append(np.array(rows)[..., 1])
    assert found[0].shape == found[1].shape == (69, 387), "padding counts as tokens"
    assert 0 < np.abs(found[0] - found[1]).max() < most


@pytest.mark.parametrize("size", [1, 2])
def test_sums_asked_for_during_a_step_are_those_after_it(
    size: int, checkpoint: Checkpoint, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = drive(checkpoint(), tensor_parallel_size=size)
    handle, asked, launch = driver.add(PROMPTS[3]), [], driver.executor.launch

    def launch_and_ask(plan: Any) -> Any:
        step = launch(plan)
        asked.append(driver.executor.sums(0, driver.tables[handle], in_flight=True))
        return step

    monkeypatch.setattr(driver.executor, "launch", launch_and_ask)
    driver.step((handle, 33, 0))
    driver.step((handle, 37, 1))
    blocks = driver.tables[handle]
    for pending, end in zip(asked, (33, 70), strict=True):
        driver.wait(pending)
        held = blocks[: -(-end // driver.block_size)]
        again = digest_of(driver.executor, 0, held, 0, 0, end)
        driver.wait(again)
        for mine, theirs in zip(pending.poll(), again.result(), strict=True):
            assert (mine == theirs).all()


def test_kept_sums_are_those_of_the_bytes(checkpoint: Checkpoint, drive: Any) -> None:
    driver = drive(checkpoint(), tensor_parallel_size=2)
    handle = driver.add(PROMPTS[3])
    driver.generate(handle, 10, chunk=33)
    blocks, length = driver.tables[handle], driver.computed[handle]
    kept = driver.executor.sums(0, blocks)
    again = digest_of(driver.executor, 0, blocks, 0, 0, length)
    driver.wait(kept)
    driver.wait(again)
    assert len(kept.poll()) == 2
    for mine, theirs in zip(kept.poll(), again.result(), strict=True):
        assert (mine == theirs).all()
    size = driver.block_size
    driver.wait(digest_of(driver.executor, 0, blocks[1:], size, size + 1, length, keep=True))
    driver.wait(kept := driver.executor.sums(0, blocks))
    for mine, theirs in zip(kept.poll(), again.result(), strict=True):
        assert (mine == theirs).all(), "of a block that counts in part none are kept"
    driver.executor.poison(blocks[:1])
    driver.wait(poisoned := digest_of(driver.executor, 0, blocks, 0, 0, length, keep=True))
    driver.wait(kept := driver.executor.sums(0, blocks))
    found = kept.poll(), poisoned.result(), again.result()
    for of_kept, mine, theirs in zip(*found, strict=True):
        assert (of_kept == mine).all()
        assert (mine[0] != theirs[0]).all()
        assert (mine[1:] == theirs[1:]).all()


# --- what they hold ---


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 1), (4, 1)])
def test_each_rank_holds_its_share(
    size: int, kv_heads: int, checkpoint: Checkpoint, drive: Any
) -> None:
    alone = drive(checkpoint()).executor.workers[0].model
    driver = drive(checkpoint(), tensor_parallel_size=size)
    replicated = ("norm.weight", "k_proj", "v_proj")
    for rank in driver.executor.workers:
        for (name, whole), (other, part) in zip(
            alone.named_parameters(), rank.model.named_parameters(), strict=True
        ):
            assert name == other
            if name.endswith("qkv_proj.weight"):
                rows = 4 * 16 // size + 2 * kv_heads * 16
                assert part.shape == (rows, whole.shape[1])
            elif name.endswith(replicated[:1]):
                assert part.shape == whole.shape
            else:
                assert part.numel() == whole.numel() / size, name
        assert rank.cache.data.shape[1] == kv_heads
    first = [layouts[0].planes[0].head_start for layouts in driver.executor.layouts]
    assert first == [rank * 2 // size for rank in range(size)]
    assert len({memory[0].address for memory in driver.executor.memories}) == size


def test_the_pools_are_as_large_as_the_smallest_fits(
    checkpoint: Checkpoint, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(settings: Any) -> int:
        return 44 - 2 * int(settings.shard.rank)

    monkeypatch.setattr("kvbaton.engine.worker.pool_blocks", fit)
    layouts = served(checkpoint(), 2).executor.layouts
    assert [groups[0].num_blocks for groups in layouts] == [42, 42]


@pytest.mark.parametrize(
    ("spec", "size", "told"),
    [
        ({}, 3, "3 does not divide .* heads 4, .* KV heads 2; give one of 1, 2, 4"),
        ({"num_heads": 6, "num_kv_heads": 2}, 3, "one of 1, 2$"),
        ({"intermediate_size": 129}, 2, "intermediate size 129 .* one of 1$"),
    ],
)
def test_a_size_that_does_not_divide_is_refused(
    spec: dict[str, Any], size: int, told: str, checkpoint: Checkpoint, served: Any
) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        served(checkpoint(**spec), size)
    assert raised.value.field == "--tensor-parallel-size"


@pytest.mark.parametrize(
    ("config", "experts", "told"),
    [
        ({"moe_intermediate_size": 33}, False, "experts' intermediate size 33 .* one of 1$"),
        ({"moe_intermediate_size": 33, "num_experts": 6}, True, None),
        ({"num_experts": 5}, True, "experts 5 and .* one of 1$"),
    ],
)
def test_what_ranks_split_of_experts_must_be_whole(
    config: dict[str, Any], experts: bool, told: str | None, checkpoint: Checkpoint, served: Any
) -> None:
    folder = checkpoint(family="qwen3_moe", intermediate_size=129, config=config)  # dense: none
    if told is None:
        served(folder, 2, enable_expert_parallel=experts)
        return
    with pytest.raises(ConfigError, match=told) as raised:
        served(folder, 2, enable_expert_parallel=experts)
    assert raised.value.field == "--tensor-parallel-size"


@pytest.mark.parametrize("size", [1, 2])
def test_experts_can_not_be_split_where_there_are_none(
    size: int, checkpoint: Checkpoint, served: Any
) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts") as raised:
        served(checkpoint(), size, enable_expert_parallel=True)
    assert raised.value.field == "--enable-expert-parallel"


# --- when one fails ---


def test_what_one_rank_raises_ends_the_step_and_the_ranks(
    checkpoint: Checkpoint, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(threading.enumerate())
    driver = drive(checkpoint(), tensor_parallel_size=4)
    driver.generate(driver.add(PROMPTS[2]), 2)

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("rank 2 broke")

    monkeypatch.setattr(driver.executor.workers[2].model.layers[1].mlp, "forward", broken)
    new = (NewSequence(77, array("I", (5, 6, 7)), 3, 0, GREEDY),)
    plan = StepPlan(9, new=new, steps=(SequenceStep(77, 0, 3, ((driver.free.pop(),),), 1),))
    began = time.monotonic()
    pending = [driver.executor.launch(plan) for _ in range(2)]
    with pytest.raises(ArithmeticError, match="rank 2 broke"):
        pending[0].result()
    with pytest.raises((ArithmeticError, AbortedError)):
        pending[1].result()
    assert all(step.ready() for step in pending)
    driver.executor.close()
    assert time.monotonic() - began < PATIENCE_S, "its patience is twice that"
    ranks = {thread for thread in threading.enumerate() if thread.name.startswith("rank")}
    assert not ranks - others


def test_a_rank_that_can_not_start_ends_the_others(
    checkpoint: Checkpoint, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(threading.enumerate())
    warm_up = CpuWorker.warm_up

    def broken(worker: CpuWorker) -> None:
        if worker.settings.shard.rank == 1:
            raise ArithmeticError("no warm-up")
        warm_up(worker)

    monkeypatch.setattr(CpuWorker, "warm_up", broken)
    with pytest.raises(ArithmeticError, match="no warm-up"):
        served(checkpoint(), 2)
    ranks = {thread for thread in threading.enumerate() if thread.name.startswith("rank")}
    assert not ranks - others


def test_a_rank_that_does_not_come_is_waited_for_so_long() -> None:
    barrier = Barrier(2, patience_s=0.2)
    collectives = HostCollectives(barrier, 0)
    with pytest.raises(AbortedError, match=r"within 0\.2 s"):
        collectives.all_reduce(torch.ones(3))
    with pytest.raises(AbortedError):
        HostCollectives(barrier, 1).all_reduce(torch.ones(3))


def test_a_step_that_does_not_end_is_given_up() -> None:
    release, aborted = threading.Event(), threading.Event()
    group = WorkerGroup(rank_threads(2), abort=aborted.set)
    futures = group.start(lambda rank: rank and release.wait(60))
    with pytest.raises(TimeoutError):
        group.gather(futures, 0.1)
    assert aborted.is_set()
    release.set()
    for thread in group.threads:
        thread.shutdown()


# --- how they meet ---


def test_collectives_of_many_rounds() -> None:
    """Tensors of a round are not mixed with those of the next, however ranks are delayed."""
    size, rounds = 3, 200
    barrier, found = Barrier(size), {}

    def work(rank: int) -> None:
        collectives, delays = HostCollectives(barrier, rank), np.random.default_rng(rank)
        sums, rows = [], []
        for number in range(rounds):
            part = torch.full((2, 2), float(number * (rank + 1)))
            if delays.random() < 0.05:
                time.sleep(0.001)
            sums.append(collectives.all_reduce(part))
            rows.append(collectives.all_gather(torch.full((1, 2), float(number + rank))))
        found[rank] = sums, rows

    group = WorkerGroup(rank_threads(size), abort=barrier.abort)
    group.call(work)
    for sums, rows in found.values():
        for number in range(rounds):
            assert (sums[number] == number * 6).all()
            assert rows[number].tolist() == [[number + rank for rank in (0, 0, 1, 1, 2, 2)]]
    for thread in group.threads:
        thread.shutdown()
