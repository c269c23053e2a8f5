"""Steps before the first request: what they may touch, and what is known of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.config import SchedulerConfig
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.step import StepPlan
from kvbaton.engine.step_costs import TRIAL_S, Terms, step_costs, terms_of, try_steps
from kvbaton.messages.nodes import STEP_COSTS
from kvbaton.simulate.engine_model import load_engine
from tests.support.driver import Driver

H200 = replace(load_engine(), jitter=0.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "windows": {"family": "gemma3", "num_layers": 7, "tied": True},
    "states": {"family": "qwen3_next", "num_layers": 4},
    "latents": {"family": "deepseek_v3"},
}


def limits(
    num_blocks: int = 52_000,
    *,
    block_size: int = 16,
    groups: int = 1,
    max_model_len: int = 16_384,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 4096,
) -> SchedulerConfig:
    return SchedulerConfig(
        groups=(GroupSpec(block_size, num_blocks, GroupKind.FULL),) * groups,
        max_model_len=max_model_len,
        vocab_size=100,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def of_driver(driver: Driver) -> SchedulerConfig:
    """As the engine's scheduler would be set."""
    layouts = driver.executor.layouts[0]
    return replace(
        limits(max_model_len=128),
        groups=tuple(GroupSpec.of(layout, driver.block_size) for layout in layouts),
    )


class Recorder:
    """Takes as long for a step as a model says, and notes it."""

    def __init__(self, slower: float = 1.0) -> None:
        self.slower, self.plans, self.spent = slower, list[StepPlan](), 0.0

    def run(self, plan: StepPlan) -> float:
        self.plans.append(plan)
        took = self.slower * H200.step_s(terms_of(plan.steps)) if plan.steps else 0.0
        self.spent += took
        return took


def told(tried: list[tuple[Terms, float]]) -> dict[str, float]:
    costs = step_costs()
    costs.start(tried)
    return costs.costs()


def test_all_costs_of_an_h200_are_found_in_a_quarter_of_a_second() -> None:
    recorder = Recorder()
    found = told(try_steps(recorder.run, limits()))
    assert list(found.values()) == pytest.approx(H200.costs, rel=0.01)
    assert recorder.spent < 0.25


@pytest.mark.parametrize("slower", [4.0, 10.0, 40.0])
def test_a_slow_machine_is_not_kept_long_and_knows_its_usual_steps(slower: float) -> None:
    recorder = Recorder(slower)
    found = told(try_steps(recorder.run, limits()))
    assert recorder.spent < max(2 * TRIAL_S, 6 * slower * H200.costs[0])
    assert found["step_s"] == pytest.approx(slower * H200.costs[0], rel=0.01)
    assert found["decode_sequence_s"] == pytest.approx(slower * H200.costs[3], rel=0.05)
    assert found["prefill_token_s"] == pytest.approx(slower * H200.costs[1], rel=0.05)


def test_prompts_of_a_slow_node_are_not_free_though_short_ones_cost_nothing() -> None:
    """Reading the weights takes 0.3 s, and computing 4 ms a token meanwhile."""
    spent = []

    def run(plan: StepPlan) -> float:
        spent.append(max(0.3, 0.004 * plan.num_tokens) if plan.num_tokens else 0.0)
        return spent[-1]

    assert told(try_steps(run, limits()))["prefill_token_s"] == pytest.approx(0.004, rel=0.5)
    assert sum(spent) < 2.5


@pytest.mark.parametrize("slower", [10.0, 40.0])
def test_a_step_that_something_else_held_up_does_not_make_steps_free(slower: float) -> None:
    for held_up in range(1, 20):
        recorder = Recorder(slower)

        def run(plan: StepPlan, recorder: Recorder = recorder, held_up: int = held_up) -> float:
            return recorder.run(plan) * (30.0 if len(recorder.plans) == held_up else 1.0)

        found = told(try_steps(run, limits()))
        assert found["step_s"] > 0.4 * slower * H200.costs[0], held_up


def test_a_pool_of_next_to_nothing_is_left_alone() -> None:
    assert try_steps(Recorder().run, limits(2, block_size=1, max_model_len=1)) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_blocks": 2, "block_size": 16, "max_model_len": 16},
        {"num_blocks": 3, "block_size": 1, "max_model_len": 1},
        {"num_blocks": 65, "block_size": 4, "max_model_len": 256, "max_num_batched_tokens": 16},
        {"num_blocks": 70, "groups": 3, "max_model_len": 300},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"block_size": 256, "num_blocks": 40},
    ],
)
def test_no_step_is_more_than_the_engine_allows(settings: Any) -> None:
    allowed, recorder = limits(**settings), Recorder()
    found = told(try_steps(recorder.run, allowed))
    assert {"step_s", "decode_sequence_s"} <= found.keys()
    size, groups = allowed.groups[0].block_size, len(allowed.groups)
    tables = dict[int, list[list[int]]]()
    lengths = dict[int, int]()
    for plan in recorder.plans:
        assert plan.num_tokens <= allowed.max_num_batched_tokens
        assert len(plan.steps) <= allowed.max_num_seqs
        for new in plan.new:
            tables[new.handle] = [[] for _ in range(groups)]
            lengths[new.handle] = len(new.token_ids)
        for step in plan.steps:
            for table, blocks in zip(tables[step.handle], step.new_blocks, strict=True):
                table += blocks
                assert len(table) * size >= step.start + step.count
            assert step.start + step.count <= lengths[step.handle] <= allowed.max_model_len + 1
            lengths[step.handle] = step.start + step.count + 1
        used = [block for table in tables.values() for part in table for block in part]
        assert len(used) == len(set(used)), "two sequences write into one block"
        assert all(1 <= block < allowed.groups[0].num_blocks for block in used)
        for handle in plan.ended:
            del tables[handle]
    assert not tables, "all are over"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_is_as_fresh_after_trials_as_before(
    family: str, checkpoint: Callable[..., Path], drive: Any
) -> None:
    folder = checkpoint(**FAMILIES[family])
    answers = []
    for tries in (False, True):
        driver = drive(folder, num_blocks=1024, block_size=16)
        if tries:
            driver.executor.try_steps(of_driver(driver))
        driver.free.sort(reverse=True)  # the trials' blocks first
        handles = [driver.add(range(5, 5 + count)) for count in (3, 40)]
        tokens = [driver.generate(handle, 6, chunk=17) for handle in handles]
        sums = [
            driver.wait(driver.executor.sums(0, driver.tables[handle])).tolist()
            for handle in handles
        ]
        answers.append((tokens, sums))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_known_of_a_cpu_is_of_the_right_size(
    ranks: int, checkpoint: Callable[..., Path], drive: Any
) -> None:
    """Other programs make steps slower at times: once in five times they may let both alone."""
    folder = checkpoint(max_position_embeddings=2048)
    tries = []
    for _ in range(5):
        driver = drive(folder, num_blocks=4096, max_model_len=2048, tensor_parallel_size=ranks)
        tries.append(_said_and_observed(driver))
        if all(min(seconds) / 4 < said < 4 * max(seconds) for said, seconds in tries[-1]):
            return
    raise AssertionError(tries)


def _said_and_observed(driver: Driver) -> list[tuple[float, list[float]]]:
    """Of a prompt and of 32 texts: what a step should take, and what ten took."""
    found = told(driver.executor.try_steps(replace(of_driver(driver), max_model_len=2048)))
    prompts = [driver.add(range(5, 305)) for _ in range(10)]
    texts = [driver.add([7]) for _ in range(32)]
    observed: dict[Terms, list[float]] = {}

    def observe(*work: tuple[int, int, int]) -> None:
        counts = float(sum(count for _, count, _ in work if count > 1))
        terms = 1.0, counts, counts * counts / 2000, float(len(work)) if not counts else 0.0, 0.0
        began = time.perf_counter()
        driver.step(*work)
        observed.setdefault(terms, []).append(time.perf_counter() - began)

    for prompt in prompts:
        observe((prompt, 300, 1))
        observe(*((text, 1, 1) for text in texts))
    assert len(observed) == 2
    return [
        # A slow machine has no time to try what a context costs, which is not told then.
        (sum(found.get(name, 0.0) * n for name, n in zip(STEP_COSTS, terms, strict=True)), seconds)
        for terms, seconds in observed.items()
    ]
