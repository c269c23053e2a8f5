"""Real nodes against each other in a hostile world, by the hundred."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connectors.protocol.source import Source
from kvbaton.testing.simulated_world import ViolationError
from kvbaton.testing.simulator import REST_S, Simulation, main, simulate

OFTEN = {
    "delivered": 250,
    "failed": 150,
    "cancelled": 10,
    "mismatches": 10,
    "fences": 50,
    "preemptions": 10,
    "stale messages": 50,
    "source cancelled": 25,
    "source failed": 50,
    "source refused": 25,
    "items transferred": 50,
    "items cache": 25,
    "fetched": 20,
}
"""What must happen at least so often in 150 schedules, or the weather shows too little."""


def test_schedules_hold_all_laws() -> None:
    reports = [simulate(seed) for seed in range(150)]
    totals = sum((report.totals for report in reports), Counter[str]())
    for name, count in OFTEN.items():
        assert totals[name] >= count, f"too few {name}: {totals}"
    assert any(report.left for report in reports), "no quarantine outlived an unfenceable peer"


@given(st.integers(min_value=1 << 20, max_value=1 << 40))
@settings(max_examples=30, deadline=None)
def test_any_seed_holds_all_laws(seed: int) -> None:
    simulate(seed)


def test_slow_nodes_compute_for_as_long_as_clients_wait() -> None:
    simulation = Simulation(943133)  # one prefill node, of the slowest, and long prompts
    simulation.run()
    assert simulation.world.weather.calm
    assert simulation.world.now > simulation.world.weather.heal_at + REST_S


def test_a_seed_repeats() -> None:
    assert simulate(11) == simulate(11)


def test_the_command_reports_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["3", "--first", "7"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("3 schedules from seed 7 in ")
    assert last.endswith(" events, no violation")


def test_the_command_names_the_seed_of_each_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "_push", lambda self, record: None)
    assert main(["4"]) == 1
    *story, last = capsys.readouterr().out.splitlines()
    told = [line.rpartition(" ")[2] for line in story if line.startswith("violated by: ")]
    assert told
    assert f" {len(told)} violation" in last
    with pytest.raises(ViolationError):
        simulate(int(told[0]))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(150, 3_650, 500))
def test_thousands_of_schedules(first: int) -> None:
    for seed in range(first, first + 500):
        simulate(seed)
