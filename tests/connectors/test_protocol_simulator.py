"""Real nodes against each other in a hostile world, by the hundred."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from kvbaton.connectors.digest import BlockRange, PendingDigests, PendingSums
from kvbaton.connectors.protocol.source import Source
from kvbaton.engine.step import BlockCopy, NewSequence, SequenceStep, StepPlan
from kvbaton.messages.engine import SamplingParams
from tests.simulator.executor import SimulatedExecutor
from tests.simulator.run import REST_S, Simulation, main, simulate
from tests.simulator.world import SimulatedWorld, ViolationError, Weather

SCHEDULES = 80
OFTEN = {
    "delivered": 170,
    "failed": 100,
    "cancelled": 7,
    "mismatches": 7,
    "fences": 35,
    "preemptions": 7,
    "stale messages": 35,
    "source cancelled": 17,
    "source failed": 35,
    "source refused": 17,
    "items transferred": 35,
    "items cache": 17,
    "fetched": 14,
    "moves moved": 14,
    "moves failed": 2,
}
"""What must happen at least so often in these, or the weather shows too little."""


@pytest.mark.timeout(900)
def test_schedules_hold_all_laws() -> None:
    reports = [simulate(seed) for seed in range(SCHEDULES)]
    totals = sum((report.totals for report in reports), Counter[str]())
    for name, count in OFTEN.items():
        assert totals[name] >= count, f"too few {name}: {totals}"
    assert any(report.left for report in reports), "no quarantine outlived an unfenceable peer"


def test_slow_nodes_compute_for_as_long_as_clients_wait() -> None:
    simulation = Simulation(1373)  # the only decode node is of the slowest
    simulation.run()
    assert simulation.world.weather.calm
    assert simulation.world.now > simulation.world.weather.heal_at + REST_S


def test_nodes_of_both_sides_never_wait_for_each_other() -> None:
    simulate(863885)  # a prefix without room stood before a prompt that the room's owner waited for
    simulate(320007)  # a prompt for another node waited for room for a prefix of its own


def test_a_source_may_tell_its_target_that_a_client_left() -> None:
    simulate(805507)  # before the router does


def test_a_rest_that_new_nodes_end_is_none() -> None:
    simulate(
        911211
    )  # sessions of both nodes that came back stood beside those of their first lives


def test_a_target_of_which_tokens_were_lost_on_the_way_may_be_stopped() -> None:
    simulate(75)


def test_sums_of_received_blocks_that_are_written_over_are_those_of_their_bytes() -> None:
    world = SimulatedWorld(Random(0), Weather())
    executor = SimulatedExecutor(
        world,
        model=1,
        rots=False,
        ranks=2,
        groups=((4, 9, 0),),
        step_s=0.1,
        wake_core=lambda: None,
        wake_transfers=lambda: None,
    )

    def compute(handle: int, start: int, *blocks: int, copies: tuple[BlockCopy, ...] = ()) -> None:
        new = NewSequence(handle, array("I", range(8)), 8, 0, SamplingParams())
        step = SequenceStep(handle, start, 8 - start, (blocks,), 1)
        executor.launch(StepPlan(handle, (), copies, (), (new,), (step,)))
        world.run(world.now + 1.0)

    def poll(pending: PendingSums | PendingDigests) -> Any:
        world.run(world.now + 1.0)
        found = pending.poll()
        assert found is not None
        return found

    compute(1, 0, 1, 2)
    held = BlockRange(0, [1, 2], 0, 0, 8)
    (sums,) = poll(executor.digest([held], keep=True))
    compute(2, 7, 1, 3, copies=(BlockCopy(0, 2, 3),))
    assert np.array_equal(poll(executor.sums(0, [1, 3])), sums)
    assert np.array_equal(poll(executor.digest([held._replace(blocks=[1, 3])])), [sums])


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
@pytest.mark.parametrize("first", range(SCHEDULES, 3_570, 250))
def test_thousands_of_schedules(first: int) -> None:
    for seed in range(first, first + 240):  # one in eight moves requests, which takes longer
        simulate(seed)
