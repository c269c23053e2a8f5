"""Costs of steps are found from steps, noise and all."""

from __future__ import annotations

import random
from itertools import product

import pytest

from kvbaton.engine.step import SequenceStep
from kvbaton.engine.step_costs import MIN_STEPS, step_costs, terms_of

TRUE = {
    "step_s": 0.005,
    "prefill_token_s": 3e-5,
    "prefill_context_s": 2e-6,
    "decode_sequence_s": 2e-5,
    "decode_context_s": 4e-6,
}

H200 = dict(zip(TRUE, (0.00455, 2.06e-5, 9e-7, 1.67e-5, 1.87e-5), strict=True))
"""Of an 8B model (`kvbaton/simulate/h200-8b.json`)."""


def step(chance: random.Random, *, prefill: bool, decode: bool) -> list[SequenceStep]:
    steps = [
        SequenceStep(i, chance.randrange(4000), 1, (), 1) for i in range(chance.randrange(1, 64))
    ]
    steps = steps if decode else []
    if prefill:
        steps.append(SequenceStep(99, chance.randrange(8000), chance.randrange(2, 2048), (), 0))
    return steps


def seconds_of(steps: list[SequenceStep]) -> float:
    return sum(c * t for c, t in zip(TRUE.values(), terms_of(steps), strict=True))


def test_terms_are_counts_of_the_plan() -> None:
    steps = [SequenceStep(1, 500, 1, (), 1), SequenceStep(2, 1000, 200, (), 0)]
    assert terms_of(steps) == (1.0, 200.0, 200 * 1100 / 1000, 1.0, 0.5)


def test_a_draft_is_no_prompt() -> None:
    """Its tokens are computed as sequences of their own; steps that only decode have no prompt."""
    steps = [SequenceStep(1, 500, 3, (), 1, draft=(7, 8))]
    assert terms_of(steps) == (1.0, 0.0, 0.0, 3.0, 1.5)


def test_costs_are_found_through_noise() -> None:
    chance, costs = random.Random(0), step_costs()
    for _ in range(2000):
        kind = chance.choice([(True, False), (False, True), (True, True)])
        steps = step(chance, prefill=kind[0], decode=kind[1])
        noise = chance.lognormvariate(0.0, 0.1) * (30.0 if chance.random() < 0.002 else 1.0)
        costs.observe(terms_of(steps), seconds_of(steps) * noise)
    found = costs.costs()
    assert found.keys() == TRUE.keys()
    for _ in range(50):
        steps = step(chance, prefill=True, decode=True)
        said = sum(c * t for c, t in zip(found.values(), terms_of(steps), strict=True))
        assert said == pytest.approx(seconds_of(steps), rel=0.1)


def test_what_no_step_had_is_not_told() -> None:
    chance, costs = random.Random(1), step_costs()
    for _ in range(MIN_STEPS - 1):
        steps = step(chance, prefill=True, decode=False)
        costs.observe(terms_of(steps), seconds_of(steps))
    assert costs.costs() == {}
    costs.observe(terms_of(steps), seconds_of(steps))
    assert costs.costs().keys() == {"step_s", "prefill_token_s", "prefill_context_s"}


@pytest.mark.parametrize("first", [0, 4])
def test_work_that_a_node_never_had_is_no_outlier(first: int) -> None:
    """A prompt takes 40 times what a node that has only decoded, or had tiny prompts, expects."""
    chance, costs = random.Random(2), step_costs()
    true = {**TRUE, "step_s": 0.02, "prefill_token_s": 8e-4}

    def observe(steps: list[SequenceStep]) -> None:
        terms = terms_of(steps)
        seconds = sum(c * t for c, t in zip(true.values(), terms, strict=True))
        costs.observe(terms, seconds * chance.lognormvariate(0.0, 0.1))

    for number in range(40):
        steps = step(chance, prefill=False, decode=True)
        if first and number % 8 == 0:
            steps.append(SequenceStep(99, 0, first, (), 0))
        observe(steps)
    costs.costs()
    for _ in range(6):
        observe([SequenceStep(99, 0, 1024, (), 0)])
        costs.costs()
        for _ in range(8):
            observe(step(chance, prefill=False, decode=True))
    found = costs.costs()
    terms = terms_of([SequenceStep(99, 0, 1024, (), 0)])
    said = sum(c * t for c, t in zip(found.values(), terms, strict=True))
    assert said == pytest.approx(0.02 + 1024 * 8e-4, rel=0.15)


@pytest.mark.parametrize("tried", [False, True], ids=["seen", "tried"])
def test_a_kind_of_step_is_remembered_however_long_ago_it_was(tried: bool) -> None:
    """A node that decodes for ten minutes told of prompts that they take next to nothing."""
    chance, costs = random.Random(3), step_costs()
    prompts = [step(chance, prefill=True, decode=False) for _ in range(20)]
    seen = [(terms_of(steps), seconds_of(steps)) for steps in prompts]
    if tried:
        costs.start(seen)
    else:
        for row in seen:
            costs.observe(*row)
    decodes = [step(chance, prefill=False, decode=True) for _ in range(256)]
    rows = [(terms_of(steps), seconds_of(steps)) for steps in decodes]
    for _ in range(300):
        for row in rows:
            costs.observe(*row)
        found = costs.costs()
        for name in ("prefill_token_s", "prefill_context_s"):
            assert found[name] == pytest.approx(TRUE[name], rel=0.02)


def test_trials_tell_at_once_and_count_as_steps() -> None:
    """Twice too slow ones, as of a machine that was busy then, are made up for by 300 steps."""
    chance, costs = random.Random(4), step_costs()
    kinds = [(True, False), (False, True), (True, True)] * 4
    trials = [step(chance, prefill=prefill, decode=decode) for prefill, decode in kinds]
    costs.start([(terms_of(steps), 2 * seconds_of(steps)) for steps in trials])
    assert costs.costs() == pytest.approx({name: 2 * cost for name, cost in TRUE.items()})
    for prefill, decode in kinds * 25:
        steps = step(chance, prefill=prefill, decode=decode)
        costs.observe(terms_of(steps), seconds_of(steps))
    for _ in range(50):
        steps = step(chance, prefill=True, decode=True)
        assert costs.predict(terms_of(steps)) == pytest.approx(seconds_of(steps), rel=0.15)


def test_first_steps_do_not_say_what_ten_times_as_many_texts_take() -> None:
    """Every other one of a node's first steps takes longer since a prompt's KV comes to it."""

    def texts(number: int, tokens: int) -> list[SequenceStep]:
        return [SequenceStep(i, tokens, 1, (), 1) for i in range(number)]

    def true(steps: list[SequenceStep]) -> float:
        return sum(c * t for c, t in zip(H200.values(), terms_of(steps), strict=True))

    tried = [texts(number, 0) for number in (1, 4, 16, 64)] + [texts(64, 2048)]
    for start, tokens in ((0, 16), (0, 64), (0, 256), (0, 1024), (7168, 1024)):
        tried.append([SequenceStep(99, start, tokens, (), 1)])
    many = texts(200, 1500)
    for seed, count in product(range(8), (15, 25, 40)):
        chance, costs = random.Random(seed), step_costs()
        costs.start([(terms_of(s), true(s) * chance.lognormvariate(0.0, 0.03)) for s in tried])
        for number in range(count):
            steps = texts(1 + number // 3, chance.randrange(400, 3000))
            took = true(steps) * chance.lognormvariate(0.0, 0.03) + number % 2 * 0.00056
            costs.observe(terms_of(steps), took)
        assert costs.predict(terms_of(many)) == pytest.approx(true(many), rel=0.15)
