"""How many nodes of role ``any`` only generate, by what comes."""

from __future__ import annotations

import math
from collections.abc import Set

import pytest
from msgspec.structs import replace

from kvbaton.router.choose import Wanted, choose
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.loads import IDLE, NodeLoad, NodeLoads
from kvbaton.router.membership import ReadyNodes
from kvbaton.router.policies import load_policy
from kvbaton.router.predictions import Prediction
from kvbaton.router.role_plan import RolePlan
from tests.router.test_pairing import member
from tests.router.test_policies import H200
from tests.router.test_text_lengths import generated
from tests.support.toy_engine import Clock

STEP = 0.0045, 4.5e-5, 0.095
"""Of an H200, 8B: a step, what a text of 1,400 tokens adds to it, and a full prompt."""
CHUNKS = 0.0135, 0.75
"""Seconds that steps with chunks take, and of a first token that is late for it."""


def loads(*sequences: int, pending: int = 0) -> dict[str, NodeLoad]:
    return {
        f"n{i}": NodeLoad(sequences=count + pending, pending=pending)
        for i, count in enumerate(sequences)
    }


def plan(
    roles: RolePlan,
    at: float,
    there: dict[str, NodeLoad],
    step_s: float,
    sequence_s: float,
    full_s: float,
    output_tokens: float,
    own: float | None = None,
) -> Set[str]:
    """By a router of one process, unless it is told how many texts are its own."""
    everybody = sum(load.sequences - load.pending for load in there.values())
    own = everybody if own is None else own
    return roles.plan(at, there, step_s, sequence_s, full_s, output_tokens, own)


def given(
    roles: RolePlan, per_s: float, work_s: float, until: float = 2.0, since: float = 0.0
) -> None:
    """Prompts that come evenly."""
    for number in range(int((until - since) * per_s)):
        roles.given(since + number / per_s, work_s)


@pytest.mark.parametrize("forgiven", [None, 0.05])
def test_as_many_generate_as_texts_need(forgiven: float | None) -> None:
    """At 15 ms a node has room for 217 texts; 130 a second that live 3 s are 400."""
    roles = RolePlan(0.015, forgiven, *CHUNKS)
    given(roles, 130.0, 0.016)
    assert plan(roles, 2.0, loads(0, 5, 3, 210), *STEP, 230.0) == {"n3", "n1"}
    assert roles.generating == {"n3", "n1"}
    assert roles.per_s == pytest.approx(65.0, rel=0.02)
    given(roles, 130.0, 0.016, 2.2, 2.0)
    assert plan(roles, 2.2, loads(40, 30, 3, 210), *STEP, 230.0) == set(), "nobody else"
    assert roles.generating == {"n3", "n1"}, "those that do go on, whoever has more texts"


@pytest.mark.parametrize("forgiven", [None, 0.05])
@pytest.mark.parametrize(
    ("step_s", "sequence_s", "full_s", "work_s"),
    [(0.016, 0.0, 0.095, 0.016), (0.0045, 4.5e-5, 0.0, 0.016), (0.0045, 4.5e-5, 0.095, 0.0)],
    ids=["a step too long, its texts free", "a chunk that costs nothing", "prompts that do"],
)
def test_a_cost_measured_as_nothing_divides_nothing(
    forgiven: float | None, step_s: float, sequence_s: float, full_s: float, work_s: float
) -> None:
    """Nodes report costs that are never negative: what noise hides is 0."""
    roles = RolePlan(0.015, forgiven, *CHUNKS)
    given(roles, 130.0, work_s)
    plan(roles, 2.0, loads(0, 5, 3, 210), step_s, sequence_s, full_s, 230.0)
    assert roles.generating <= {"n1", "n3"}, "if any, those that generate now"


def test_short_texts_need_no_node_more_than_they_have() -> None:
    roles = RolePlan(0.015, 0.05, *CHUNKS)
    given(roles, 130.0, 0.016)
    assert plan(roles, 2.0, loads(0, 0, 0, 60), *STEP, 40.0) == set()
    assert not roles.generating


def test_all_do_both_where_that_is_within_the_objective() -> None:
    """Many texts, but 2 ms more for a prompt now and then."""
    for forgiven in (None, 0.05):
        roles = RolePlan(0.015, forgiven, *CHUNKS)
        given(roles, 130.0, 0.002)
        plan(roles, 2.0, loads(90, 90, 90, 90), *STEP, 230.0)
        assert not roles.generating
    given(roles, 130.0, 0.016, 4.0, 2.0)
    plan(roles, 4.0, loads(90, 90, 90, 90), *STEP, 230.0)
    assert roles.generating, "prompts of 16 ms are in more than one step of 20"


STEPS = 0.0044, 8.4e-5, 0.05
"""Of an H200 with texts of 1,000 tokens after 2,000."""


def steady(
    per_s: float,
    work_s: float,
    seconds: int = 20,
    tokens: float = 1000.0,
    here: int = 40,
    own: float | None = None,
) -> RolePlan:
    """Of two nodes at 12 ms, after prompts that came evenly, with texts of so many tokens."""
    roles = RolePlan(0.012, 0.05, 0.0108, 0.75)
    for second in range(seconds):
        given(roles, per_s, work_s, second + 1, second)
        plan(roles, second + 1, loads(here, here), *STEPS, tokens, own=own)
    return roles


def test_chunks_fit_where_they_keep_up_with_what_came_for_long() -> None:
    """A node that has 40 texts in steps of 8 ms has a quarter of its time for prompts."""
    assert steady(10.0, 0.03).fits
    assert not steady(10.0, 0.03, seconds=8).fits, "a burst may follow"
    assert not steady(10.0, 0.06).fits, "nobody keeps up with that"
    assert not steady(3.0, 0.03).fits, "few say nothing"
    assert steady(5.0, 0.03, here=14).fits
    assert steady(5.0, 0.06, here=44).fits
    assert not steady(5.0, 0.06, here=44, own=44).fits, (
        "another worker of this router gives as many"
    )
    assert not steady(5.0, 0.03, own=0).fits, "all are of others, whose prompts nobody knows here"
    assert not steady(10.0, 0.03, tokens=200).fits, "texts are over before nodes change"


def test_steps_that_take_nothing_say_nothing_of_chunks() -> None:
    roles = RolePlan(0.012, 0.05, 0.0108, 0.75)
    for second in range(20):
        given(roles, 10.0, 0.03, second + 1, second)
        plan(roles, second + 1, loads(40, 40), 0.0, 0.0, 0.0, 1000.0)
    assert not roles.fits


def test_chunks_fit_no_prompts_that_would_be_late_in_them() -> None:
    """As much work, but most of it in prompts of 0.8 s."""
    for works_s, fit in (([0.08], True), ([0.79] + 9 * [0.001], False)):
        roles = RolePlan(0.025, 0.05, 0.0225, 2.25)
        for second in range(20):
            for place in range(10):
                roles.given(second + place / 10, works_s[place % len(works_s)])
            plan(roles, second + 0.95, loads(5, 5), *STEPS, 200.0)
        assert roles.fits is fit, works_s


def test_chunks_that_fit_go_on_a_little_longer() -> None:
    """Who gathers texts at one node for a moment has too many there for as long as they take."""
    roles = steady(10.0, 0.03)
    for second in range(20, 30):
        given(roles, 10.0, 0.0365, second + 1, second)
        plan(roles, second + 1.0, loads(55, 55), *STEPS, 1000.0)
    assert roles.fits
    assert not steady(10.0, 0.0365, here=55).fits, "who comes to that does not begin with it"
    for second in range(30, 36):
        given(roles, 20.0, 0.06, second + 1, second)
        plan(roles, second + 1.0, loads(80, 80), *STEPS, 1000.0)
    assert not roles.fits


def test_fewer_prompts_than_before_still_fit() -> None:
    """The texts of those before are still there: that is no sign of another worker's."""
    roles = steady(10.0, 0.03, here=50)
    given(roles, 5.0, 0.03, 26.0, 20.0)
    for second in range(21, 27):
        plan(roles, float(second), loads(50, 50), *STEPS, 1000.0)
        assert roles.fits, second


def test_prompts_that_would_all_be_late_for_it_are_weighed() -> None:
    """Three nodes that compute, or two: what texts gain, prompts lose."""
    roles = RolePlan(0.015, 0.05, *CHUNKS)
    given(roles, 130.0, 0.027)
    plan(roles, 2.0, loads(0, 0, 0, 150), *STEP, 150.0)
    assert not roles.generating, "one generates without being told"


def test_few_requests_say_nothing_and_old_ones_are_forgotten() -> None:
    roles = RolePlan(0.015, 0.05, *CHUNKS)
    given(roles, 130.0, 0.016, 0.2)
    plan(roles, 0.2, loads(0, 5, 3, 210), *STEP, 230.0)
    assert not roles.generating
    given(roles, 130.0, 0.016, 2.0, 0.2)
    plan(roles, 2.0, loads(0, 5, 3, 210), *STEP, 230.0)
    assert roles.generating
    plan(roles, 6.5, loads(0, 5, 3, 210), *STEP, 230.0)
    assert not roles.generating


def test_it_is_judged_now_and_then() -> None:
    roles = RolePlan(0.015, 0.05, *CHUNKS)
    assert roles.is_due(1.0, 500)
    plan(roles, 1.0, {"a": IDLE, "b": IDLE}, *STEP, 230.0)
    assert not roles.is_due(1.05, 500)
    assert roles.is_due(1.2, 500)
    assert 900 < roles.prompt_tokens < 1000, "and follows how long prompts are"


def test_prompts_are_computed_elsewhere_and_texts_meet_none() -> None:
    """`a1` has no queue. But as soon as it only generates, it computes no more."""
    clock = Clock()
    costs = CostModel(clock)
    ready = ReadyNodes([member(f"a{i}", "any", load=H200) for i in range(4)])
    policy = load_policy(RoutingPolicy(policy="cost", ttft_slo=1000.0, itl_slo=15.0), costs)
    in_flight = NodeLoads()
    there = {"a0": (0, 0.8), "a1": (5, 0.0), "a2": (0, 0.8), "a3": (300, 0.0)}
    for name, (sequences, queued_s) in there.items():
        tokens, prompt_tokens = 1400 * sequences, int(30_000 * queued_s)
        load = NodeLoad(prompt_tokens, sequences, tokens, prefill_us=int(1e6 * queued_s))
        in_flight.own[name] = load
    before = choose(ready, in_flight, policy, Wanted(1000, 128))
    assert before is not None
    assert before.prefills.node_id == "a1"
    for _ in range(300):
        generated(costs, 400)
    assert costs.roles is not None
    predicted = Prediction(0.5, 0.006, 0.006, 0.0, 0.5, 0.0, work_s=0.014)
    for number in range(260):  # in 2 s
        source = ready.serving[2 * (number % 2)]
        costs.assigned(source, ready.serving[3], predicted)
        clock.now += 1 / 130
    after = choose(ready, in_flight, policy, Wanted(1000, 128))
    assert after is not None
    assert costs.roles.generating == {"a1", "a3"}
    assert after.prefills.node_id in ("a0", "a2")
    assert after.target.node_id == "a1"
    assert costs.prefill_share(after.target) == 0.0


def test_prompts_go_where_they_wait_least_if_chunks_of_them_fit() -> None:
    """`a0` has more texts and no queue: else all its texts would seem to wait for the prompt."""
    costs = CostModel(Clock())
    ready = ReadyNodes([member(f"a{i}", "any", load=H200) for i in range(2)])
    asked = RoutingPolicy(policy="cost", ttft_slo=1000.0, itl_slo=25.0, itl_percentile=95.0)
    policy, in_flight = load_policy(asked, costs), NodeLoads()
    for name, sequences, queued_s in (("a0", 60, 0.0), ("a1", 20, 0.2)):
        load = NodeLoad(int(30_000 * queued_s), sequences, 2500 * sequences)
        in_flight.own[name] = replace(load, prefill_us=int(1e6 * queued_s))
    chosen = list[str]()
    for fits in (False, True):
        assert costs.roles is not None
        costs.roles.fits, costs.roles._due = fits, math.inf
        found = choose(ready, in_flight, policy, Wanted(2000, 1000))
        assert found is not None
        chosen.append(found.prefills.node_id)
    assert chosen == ["a1", "a0"]
