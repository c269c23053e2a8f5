"""Prompts are computed in chunks that are short enough for who decodes beside them."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine import scheduler
from kvbaton.engine.chunk_limit import AIM, LEAST, LONG_CHUNKS, ChunkLimit, chunk_tokens
from kvbaton.engine.cuda.prompt_graphs import padded_sizes
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.step import StepPlan
from kvbaton.engine.step_costs import terms_of
from tests.support.toy_engine import Loop, ask

MOST = 512
POOL = GroupSpec(block_size=16, num_blocks=400, kind=GroupKind.WINDOW, window=6)
"""Attention over few tokens is quick to play."""
ITL_S, TTFT_S = 0.012, 1.0


def step_s(prompts: float, decodes: float, each: float = 1e-3) -> float:
    """Of a GPU: weights are read once, for few tokens in the time that their products take."""
    return 0.003 + each * decodes + max(0.002, 2e-5 * prompts)


class Node:
    """A loop whose steps take a time by what is in them, and tell it the limit.

    Attributes:
        mixed: (tokens of prompts, seconds) of each step that also decoded.
        gaps: seconds between the tokens of each request.
    """

    def __init__(self, each: float = 1e-3, mixed: int = MOST, **settings: Any) -> None:
        settings |= {"max_num_batched_tokens": MOST, "max_num_mixed_tokens": mixed}
        self.loop = Loop((POOL,), max_model_len=6000, **settings)
        self.each, self.noise = each, random.Random(0)
        self.mixed: list[tuple[int, float]] = []
        self.gaps: dict[str, list[float]] = {}
        self._told_at: dict[str, float] = {}
        self._running: deque[StepPlan] = deque()

    def add(self, name: str, length: int, tokens: int, **objectives: float) -> None:
        prompt = [(sum(name.encode()) + 7 * i) % 23 for i in range(length)]
        self.loop.add(replace(ask(name, prompt, max_tokens=tokens, ignore_eos=True), **objectives))

    def step(self) -> None:
        while len(self.loop.in_flight) < self.loop.depth and self.loop.launch():
            self._running.append(self.loop.plans[-1])
        terms = terms_of(self._running.popleft().steps)
        seconds = step_s(terms[1], terms[3], self.each) * self.noise.uniform(0.97, 1.03)
        self.loop.clock.now += seconds
        self.loop.scheduler.chunk_limit.observe(terms, seconds)
        if terms[1] and terms[3]:
            self.mixed.append((int(terms[1]), seconds))
        before, now = len(self.loop.outputs), self.loop.clock.now
        self.loop.update()
        for name in {output.request_id for output in self.loop.outputs[before:]}:
            if name in self._told_at:
                self.gaps.setdefault(name, []).append(now - self._told_at[name])
            self._told_at[name] = now

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(2000):
            if done():
                return
            self.step()
        raise AssertionError("it never ends")


def decoding(node: Node, **objectives: float) -> None:
    for i in range(3):
        node.add(f"d{i}", 8, 2000, **objectives)
    for _ in range(20):
        node.step()


def ended(node: Node, name: str) -> Callable[[], bool]:
    return lambda: node.loop.streams[name, 0].finish is not None


def test_chunks_grow_to_the_objective_and_not_beyond() -> None:
    node = Node()
    decoding(node, itl_s=ITL_S)
    node.add("prompt", 4000, 1)
    node.until(ended(node, "prompt"))
    tokens = [count for count, _ in node.mixed]
    assert tokens[0] == LEAST
    late = sum(seconds > ITL_S for _, seconds in node.mixed)
    assert late <= 0.05 * len(node.mixed)
    possible = (ITL_S - 0.003 - 3e-3) / 2e-5
    assert max(tokens) <= 1.05 * possible
    assert sum(tokens[10:-1]) / len(tokens[10:-1]) > 0.7 * possible


@pytest.mark.parametrize(
    ("decodes", "waits"), [({}, {}), ({}, {"itl_s": ITL_S}), ({"itl_s": 0.0}, {})]
)
def test_without_an_objective_chunks_are_whole(
    decodes: dict[str, float], waits: dict[str, float]
) -> None:
    node = Node()
    decoding(node, **decodes)
    node.add("prompt", 4000, 1, **waits)
    node.until(ended(node, "prompt"))
    assert all(count == MOST - 3 for count, _ in node.mixed[:-1])


def test_a_step_that_decodes_has_few_tokens_in_all() -> None:
    node = Node(mixed=128)
    decoding(node)
    node.add("prompt", 4000, 1)
    node.until(ended(node, "prompt"))
    assert len(node.mixed) > 30
    assert all(count == 128 - 3 for count, _ in node.mixed[:-1])
    many = ChunkLimit(128).for_step(133, math.inf)
    assert many == 256 - 133, "128 more for 128 of them"


def test_what_would_be_late_by_that_has_all_of_a_step() -> None:
    node = Node(mixed=128)
    decoding(node)
    node.add("known", 500, 1)
    node.until(ended(node, "known"))
    for name, ttft_s in (("late", 0.1), ("in time", 10.0)):
        node.mixed.clear()
        node.add(name, 4000, 1, ttft_s=ttft_s)
        node.until(ended(node, name))
        expected = MOST if name == "late" else 128
        assert all(count == expected - 3 for count, _ in node.mixed[:-1])


def test_far_from_its_start_a_prompt_has_all_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "FAR_PREFIX", 1000)
    node = Node(mixed=128)
    decoding(node)
    node.add("prompt", 4000, 1)
    node.until(ended(node, "prompt"))
    counts = [count for count, _ in node.mixed]
    assert counts[:8] == [125] * 8
    assert counts[8:-1] == [MOST - 3] * 5
    node.mixed.clear()
    node.add("wants", 8, 2000, itl_s=ITL_S)
    node.add("other", 4000, 1)
    node.until(ended(node, "other"))
    assert max(count for count, _ in node.mixed) < MOST - 3 - 100


def test_alone_a_prompt_has_all_of_a_step() -> None:
    node = Node()
    node.add("first", 1000, 1, itl_s=ITL_S)
    node.step()
    (step,) = node.loop.plans[-1].steps
    assert step.count == MOST


def test_where_decoding_alone_is_late_few_steps_are() -> None:
    node = Node(each=5e-3)  # three take 20 ms
    decoding(node, itl_s=ITL_S)
    node.add("prompt", 1500, 1)
    node.until(ended(node, "prompt"))
    assert all(count == MOST - 3 for count, _ in node.mixed[:-1])


def test_a_first_token_that_will_be_late_makes_no_sequence_miss_its_objective() -> None:
    node = Node()
    decoding(node, itl_s=ITL_S)
    for name, ttft_s in (("late", 0.1), ("in time", 10.0)):
        node.mixed.clear()
        node.add(name, 4000, 1, itl_s=ITL_S, ttft_s=ttft_s)
        node.until(ended(node, name))
        chunks = [count for count, _ in node.mixed[:-1]]
        # The first one has told how many tokens there is time for.
        assert all(LEAST < count < MOST / 1.5 for count in chunks[1:])


@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_with_drafts_an_objective_is_kept_and_chunks_grow(depth: int, apart: int) -> None:
    """A sequence with drafts waits for its tokens, so a step of prompts alone delayed it."""
    node = Node(each=3e-4, depth=depth, drafts=2)
    for i in range(3):
        node.add(f"d{i}", 8, 2000, itl_s=ITL_S)
        for _ in range(apart):  # their tokens come in different steps, as those of choices do
            node.step()
    for _ in range(20):
        node.step()
    node.gaps.clear()
    began = node.loop.clock.now
    node.add("prompt", 4000, 1)
    node.until(ended(node, "prompt"))
    gaps = [gap for name in ("d0", "d1", "d2") for gap in node.gaps[name]]
    assert max(gaps) < 1.1 * ITL_S
    assert node.loop.clock.now - began < 0.22, "small chunks take longer"


def test_a_longer_objective_lets_chunks_grow_again() -> None:
    limit = ChunkLimit(MOST)
    for _ in range(50):
        count = limit.for_step(3, ITL_S)
        limit.observe((1.0, float(count), 0.0, 3.0, 0.0), step_s(count, 3))
    tight = limit.current
    for _ in range(50):
        count = limit.for_step(3, 2 * ITL_S)
        limit.observe((1.0, float(count), 0.0, 3.0, 0.0), step_s(count, 3))
    assert tight < 320
    assert limit.current == MOST


def padded_s(prompts: float, decodes: float) -> float:
    """As `step_s`, of a GPU whose graphs have these many tokens."""
    rows = min(size for size in padded_sizes(4096) if size >= prompts + decodes)
    return 0.003 + 8e-5 * decodes + max(0.002, 2e-5 * rows)


@pytest.mark.parametrize("objective_ms", [14, 16, 18, 20, 22, 25, 40])
def test_a_step_is_not_padded_beyond_its_objective(objective_ms: int) -> None:
    """Between 512 and 640 tokens of a graph one more makes a step a fifth longer."""
    objective_s, limit = objective_ms / 1e3, ChunkLimit(2048)
    for _ in range(50):
        limit.observe((1.0, 0.0, 0.0, 60.0, 0.0), padded_s(0, 60))
    took = []
    for step in range(300):
        decodes = 60 + step % 7
        count = limit.for_step(decodes, objective_s)
        took.append(padded_s(count, decodes))
        limit.observe((1.0, float(count), 0.0, float(decodes), 0.0), took[-1])
        rows = decodes + count
        assert count == LEAST or rows in padded_sizes(1024) or (rows > 1024 and rows % 128 == 0)
    late = sum(seconds > (AIM + 0.02) * objective_s for seconds in took[20:])
    assert late <= 0.05 * len(took[20:])
    assert sum(took[20:]) / len(took[20:]) > 0.7 * objective_s


def test_who_went_too_far_does_not_go_there_again_and_again() -> None:
    """A chunk of the next size would be in time, by what this one took, and is not."""
    objective_s, alone_s, limit = 0.025, 0.011, ChunkLimit(2048)
    took_s = {512: 0.0165, 640: 0.0195, 768: 0.0245, 896: 0.028, 1024: 0.032}
    for _ in range(50):
        limit.observe((1.0, 0.0, 0.0, 70.0, 0.0), alone_s)
    rows = []
    for _ in range(400):
        rows.append(70 + limit.for_step(70, objective_s))
        seconds = took_s.get(rows[-1], 0.014)
        limit.observe((1.0, rows[-1] - 70.0, 0.0, 70.0, 0.0), seconds)
    assert rows[40:].count(768) <= 0.15 * len(rows[40:])
    assert rows[40:].count(640) >= 0.8 * len(rows[40:])


def test_if_the_smallest_chunk_is_too_long_chunks_are_as_without_an_objective() -> None:
    """On a CPU each prompt token takes as long as any other: all small chunks would be late."""
    limit, token_s, chunks = ChunkLimit(MOST, 256), 1e-3, list[int]()

    def step(objective_s: float) -> None:
        count = limit.for_step(3, objective_s)
        chunks.append(count)
        for prompts in (0.0, float(count)):
            limit.observe((1.0, prompts, 0.0, 3.0, 0.0), 0.01 + token_s * prompts)

    for _ in range(3 * (1 + LONG_CHUNKS)):
        step(0.05)
    assert chunks == [LEAST, *[256 - 3] * LONG_CHUNKS] * 3, "the smallest is tried now and then"
    for _ in range(100):
        step(0.1)
    assert all(count < 90 for count in chunks[-100:]), "now it fits"
    token_s = 3e-3
    for _ in range(100):
        step(0.1)
    assert chunks[-100:].count(256 - 3) >= 85
    token_s = 1e-3
    for _ in range(30):
        step(0.1)
    assert chunks[-1] < 90


def test_the_end_of_a_prompt_tells_nothing_unless_it_was_late() -> None:
    limit = ChunkLimit(MOST)
    for seconds in [step_s(0, 3)] * 50:
        limit.observe((1.0, 0.0, 0.0, 3.0, 0.0), seconds)
    for _ in range(20):
        count = limit.for_step(3, ITL_S)
        limit.observe((1.0, float(count), 0.0, 3.0, 0.0), step_s(count, 3))
    learned = limit.current
    assert 200 < learned < MOST
    limit.observe((1.0, 10.0, 0.0, 3.0, 0.0), step_s(10, 3))
    assert limit.current == learned
    limit.observe((1.0, 10.0, 0.0, 3.0, 0.0), 2 * ITL_S)
    assert limit.current == learned // 2


@given(
    st.lists(
        st.tuples(
            st.integers(0, MOST),
            st.integers(0, 300),
            st.floats(1e-6, 10.0),
            st.sampled_from([ITL_S, 1e-3, 1.0, math.inf]),
        ),
        max_size=60,
    ),
    st.integers(0, 2 * MOST),
)
def test_limits_are_within_bounds(steps: list[tuple[int, int, float, float]], least: int) -> None:
    limit = ChunkLimit(MOST, least=least)
    for prompts, decodes, seconds, objective_s in steps:
        found = limit.for_step(3, objective_s)
        assert min(MOST, max(LEAST, least)) <= found <= MOST
        assert found == max(MOST - 3, min(MOST, least)) or objective_s < math.inf
        limit.observe((1.0, float(prompts), 0.0, float(decodes), 0.0), seconds)


@given(st.floats(1e-4, 0.1), st.floats(1e-4, 0.1), st.floats(0.0, 1e-3), st.integers(1, 9000))
def test_what_a_router_expects_of_it(
    objective_s: float, alone_s: float, token_s: float, most: int
) -> None:
    found = chunk_tokens(objective_s, alone_s, token_s, most, most)
    assert 1 <= found <= most
    if LEAST < found < most:
        assert alone_s + found * token_s <= objective_s


def test_items_that_are_seen_whole_fit() -> None:
    limit = ChunkLimit(MOST, least=300)
    assert limit.for_step(3, ITL_S) == 300
