"""Costs of steps are found from steps, noise and all."""

from __future__ import annotations

import random

import pytest

from kvbaton.engine.step import SequenceStep
from kvbaton.engine.step_costs import MIN_STEPS, StepCosts, terms_of

TRUE = {
    "step_s": 0.005,
    "prefill_token_s": 3e-5,
    "prefill_context_s": 2e-6,
    "decode_sequence_s": 2e-5,
    "decode_context_s": 4e-6,
}


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


def test_costs_are_found_through_noise() -> None:
    chance, costs = random.Random(0), StepCosts()
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
    chance, costs = random.Random(1), StepCosts()
    for _ in range(MIN_STEPS - 1):
        steps = step(chance, prefill=True, decode=False)
        costs.observe(terms_of(steps), seconds_of(steps))
    assert costs.costs() == {}
    costs.observe(terms_of(steps), seconds_of(steps))
    assert costs.costs().keys() == {"step_s", "prefill_token_s", "prefill_context_s"}
