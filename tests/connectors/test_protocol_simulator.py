"""The two machines against each other, by the hundred."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.testing.simulator import main, simulate


def test_three_hundred_schedules_hold_all_laws() -> None:
    reports = [simulate(seed) for seed in range(300)]
    assert sum(report.delivered for report in reports) > 900, "the weather lets too little through"
    for outcome in ("completed", "failed", "cancelled", "refused", "mismatches"):
        assert sum(report.outcomes[outcome] for report in reports) > 20, f"too few {outcome}"
    assert any(report.left for report in reports), "no quarantine outlived an unfenceable peer"


@given(st.integers(min_value=1 << 20, max_value=1 << 40))
@settings(max_examples=40, deadline=None)
def test_any_seed_holds_all_laws(seed: int) -> None:
    simulate(seed)


def test_a_seed_repeats() -> None:
    assert simulate(11) == simulate(11)


def test_outputs_of_items_cross_and_fail_in_all_ways() -> None:
    reports = [simulate(seed) for seed in range(2, 360, 3)]
    for outcome in ("completed", "failed", "cancelled"):
        assert sum(report.items[outcome] for report in reports) > 20, f"too few {outcome}"


def test_the_command_reports_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["3"]) == 0
    assert capsys.readouterr().out.startswith("3 schedules, ")


@pytest.mark.slow
def test_thousands_of_schedules() -> None:
    for seed in range(300, 6000):
        simulate(seed)
