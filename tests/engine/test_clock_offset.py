"""Another machine's clock, from nothing but messages that take their time."""

from __future__ import annotations

import random

import pytest

from kvbaton.engine.client import ClockOffset


@pytest.mark.parametrize("ahead", [-86_400.0, 3.5, 1e7])
@pytest.mark.parametrize("runs_off", [0.0, 1e-4, -1e-4])
def test_the_shortest_ways_tell(ahead: float, runs_off: float) -> None:
    """Ways of 0.2 to 30 ms, and an engine that reads its messages up to a second late."""
    rng, offset, now = random.Random(0), ClockOffset(), 500.0

    def theirs(at: float) -> float:
        return at * (1 + runs_off) + ahead

    for _ in range(2000):
        now += rng.expovariate(20.0)
        there = now + rng.choice((2e-4, 2e-4, 1e-3, 3e-2)) + rng.choice((0.0, 0.0, 0.3, 1.0))
        told = there + rng.uniform(0.01, 2.0)
        heard = told + rng.choice((2e-4, 2e-4, 1e-3, 3e-2))
        offset.observe(now, theirs(there), theirs(told), heard)
    at = now
    assert offset.seconds == pytest.approx(theirs(at) - at, abs=2e-3)


def test_one_machine_has_one_clock() -> None:
    offset = ClockOffset()
    assert offset.seconds == 0
    offset.observe(1.0, 1.2, 1.5, 1.5001)
    offset.observe(2.0, 2.0001, 2.4, 2.6)
    assert offset.seconds == 0


def test_a_clock_that_jumps_is_believed() -> None:
    offset = ClockOffset()
    offset.observe(1.0, 101.001, 101.0, 1.001)
    assert offset.seconds == pytest.approx(100, abs=0.01)
    offset.observe(2.0, 52.001, 52.0, 2.001)  # its machine was suspended
    assert offset.seconds == pytest.approx(50, abs=0.01)
