"""What a router expects of nodes that serve their queues by an objective of first tokens."""

from __future__ import annotations

import pytest

from kvbaton.router.choose import Wanted, choose
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.loads import NodeLoad, NodeLoads
from kvbaton.router.membership import ReadyNodes
from kvbaton.router.policies import LeastCost
from kvbaton.router.predictions import Prediction
from kvbaton.router.prompt_queue import PromptQueue
from kvbaton.types import PromptLimits
from tests.router.test_pairing import member

SPEED = {"step_s": 0.005, "prefill_token_s": 25e-6, "decode_sequence_s": 2e-5}


def test_the_longest_that_has_not_begun_steps_back_and_begins_when_nobody_else_waits() -> None:
    queue = PromptQueue()
    queue.add("begun", 0.9, full=False, late=False)
    queue.add("long", 0.5, full=False, late=False)
    queue.add("short", 0.1, full=True, late=False)
    assert (queue.deferred_s, queue.longest_s) == (0.5, 0.1)
    queue.add("longest", 2.0, full=True, late=True)
    assert queue.deferred_s == 2.5
    assert queue.remove("begun")
    assert not queue.remove("short"), "that it took another's turn was not sure"
    assert queue.deferred_s == 2.0, "the first that stepped back is computed now"
    assert not queue.remove("long")
    assert not queue.remove("longest")
    assert (queue.deferred_s, queue.longest_s) == (0.0, 0.0)
    assert queue.remove("never seen")


def test_a_prompt_does_not_wait_for_those_that_have_stepped_back() -> None:
    """Of a queue of seven seconds it was expected to be the last, and was served within one."""
    one, costs = member("p0", "prefill", load=SPEED), CostModel(lambda: 0.0)
    costs.ttft_slo_s = 1.0
    costs.learn([one.info], NodeLoads())
    for number in range(70):
        load = NodeLoad(prefill_us=number * 100_000)
        expected = costs.prefill(one.info, load, None, 4000, 0)
        predicted = Prediction(
            expected.ttft_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, full=expected.risk_s > 1, late=False
        )
        costs.queued(str(number), one.info, predicted)
    load = NodeLoad(prompt_tokens=280_000, prefill_us=7_000_000)
    short = costs.prefill(one.info, load, None, 3900, 0)
    assert not short.late
    assert short.late_share == pytest.approx(0.975), "the rest of the longer one's work is saved"
    assert short.ttft_s < 1 < short.risk_s, "one is late, but not this one"
    long = costs.prefill(one.info, load, None, 20_000, 0)
    assert long.late
    assert long.ttft_s > 7
    assert long.late_share == 1.0
    assert costs.wait_s(one.info, load, None) <= short.ttft_s


def test_times_of_prompts_that_stepped_back_are_no_sign_of_a_slow_node() -> None:
    one, costs = member("p0", "prefill", load=SPEED), CostModel(lambda: 0.0)
    costs.ttft_slo_s = 1.0
    costs.learn([one.info], NodeLoads())
    usual = costs.prefill(one.info, NodeLoad(), None, 4000, 0).ttft_s
    of_queue = Prediction(9.0, 0.0, 0.0, 0.0, 9.0, 8.9, 0.1, full=True, late=True)
    for _ in range(20):
        costs.observed("p0", of_queue, 0.5)
    assert costs.prefill(one.info, NodeLoad(), None, 4000, 0).ttft_s == usual
    alone = Prediction(usual, 0.0, 0.0, 0.0, usual, 0.0, usual)
    for late in (1.0, 1.0, 1.0, 1.0, 50.0):
        costs.observed("p0", alone, late * usual)
    after = costs.prefill(one.info, NodeLoad(), None, 4000, 0).ttft_s
    assert after == pytest.approx(usual, rel=0.35), "one that stood still is not all of them"


def test_a_sequence_whose_first_token_was_late_is_no_reason_to_keep_prompts_away() -> None:
    one, costs = member("a0", "any", load=SPEED), CostModel(lambda: 0.0)
    costs.learn([one.info], NodeLoads())
    there, late = NodeLoad(sequences=4, tokens=4000), NodeLoad(sequences=4, tokens=4000, late=3)
    assert costs.prefill(one.info, there, None, 100, 0).decoding == 4
    assert costs.prefill(one.info, late, None, 100, 0).decoding == 1
    assert costs.decode(one.info, late, None, 100).sequences == 1
    steps = [costs.decode(one.info, load, None, 100).step_s for load in (there, late)]
    assert steps[0] == steps[1], "its steps take as long"


def test_a_prompt_that_is_late_takes_no_room_at_a_target_that_others_need() -> None:
    """It would hold blocks and a seat for as long as it waits, and has nothing more to lose."""
    limits = PromptLimits(100_000, 75_000, choices=128)
    nodes = [
        member(
            name,
            role,
            load=SPEED,
            num_blocks=6250,
            prompt_limits=limits,
            wires={f"tcp://{other}:1": {"handover_s": 0.0} for other in ("a0", "a1")},
            control_address=f"tcp://{name}:1",
        )
        for name, role in (("a0", "prefill"), ("a1", "any"))
    ]
    settings = RoutingPolicy(policy="cost", ttft_slo=1000.0, itl_slo=25.0)
    clock = [0.0]

    def chosen(pending: int) -> str | None:
        costs = CostModel(lambda: clock[0])
        costs.ttft_slo_s = 1.0
        costs.learn([one.info for one in nodes], NodeLoads())
        quick = Prediction(0.5, 0.006, 0.006, 0.0, 0.5, 0.4, 0.05)
        for _ in range(200):
            clock[0] += 0.02
            costs.assigned(nodes[0].info, nodes[1].info, quick)
        loads = NodeLoads(lambda: clock[0])
        loads.own["a0"] = NodeLoad(prompt_tokens=40_000, prefill_us=900_000)
        loads.own["a1"] = NodeLoad(
            prompt_tokens=80_000,
            sequences=pending + 8,
            tokens=500 * (pending + 8),
            pending=pending,
            prefill_us=1_900_000,
        )
        route = choose(ReadyNodes(nodes), loads, LeastCost(settings, costs), Wanted(8000))
        assert route is not None
        assert route.predicted is not None
        assert route.predicted.late
        return None if route.source is None else route.target.node_id

    assert chosen(10) == "a1"
    assert chosen(110) is None


def test_a_request_that_is_given_to_a_second_node_has_left_the_first() -> None:
    nodes = [member(name, "any", load=SPEED).info for name in ("a", "b")]
    costs = CostModel(lambda: 0.0)
    costs.ttft_slo_s = 1.0
    costs.learn(nodes, NodeLoads())
    long = Prediction(2.0, 0.0, 0.0, 0.0, 0.0, 0.0, work_s=2.0)
    for node in nodes:
        costs.queued("moved", node, long)
    costs.queued("begun", nodes[0], long)
    after = costs.prefill(nodes[0], NodeLoad(prefill_us=2_000_000), None, 4000, 0)
    assert after.late, "nobody steps back for it: the only one there has begun"
