"""Which nodes each policy chooses, and what the cost model predicts; no socket needed."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from kvbaton.engine.chunk_limit import LEAST, chunk_tokens
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import AddRequest, PrefixAt, SamplingParams
from kvbaton.router.choose import Wanted, choose, successor
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.loads import IDLE, NodeLoad, NodeLoads
from kvbaton.router.membership import Member, NodeState, ReadyNodes
from kvbaton.router.node_request import node_requests
from kvbaton.router.overheads import Overhead
from kvbaton.router.policies import (
    BUILT_IN,
    SATURATED_SEQUENCES,
    SATURATED_TOKENS,
    LeastLoaded,
    load_policy,
)
from kvbaton.router.predictions import Prediction
from kvbaton.router.route import Route
from kvbaton.types import PromptLimits
from tests.router.test_pairing import ids, member
from tests.router.test_text_lengths import generated
from tests.support.toy_engine import Clock

H200 = {
    "step_s": 0.006,
    "prefill_token_s": 3e-5,
    "prefill_context_s": 2e-6,
    "decode_sequence_s": 2e-5,
    "decode_context_s": 2e-6,
    "step_tokens": 8192.0,
    "mixed_tokens": 8192.0,
    "free_blocks": 10_000.0,
}
SLOW = {**H200, "prefill_token_s": 3e-4}


def nodes(count: int = 2, **fields: Any) -> list[Member]:
    roles = {"p": "prefill", "d": "decode"}
    return [
        member(f"{letter}{i}", role, **fields)
        for letter, role in roles.items()
        for i in range(count)
    ]


def route(
    name: str,
    members: list[Member],
    tokens: int = 1000,
    loads: dict[str, NodeLoad] | None = None,
    *,
    cached: dict[str, int] | None = None,
    costs: CostModel | None = None,
    max_tokens: int = 128,
    **settings: Any,
) -> Route:
    policy = load_policy(RoutingPolicy(policy=name, **settings), costs or CostModel(Clock()))
    in_flight = NodeLoads()
    in_flight.own.update(loads or {})
    wanted = Wanted(tokens, max_tokens, (), cached or {})
    found = choose(ReadyNodes(members), in_flight, policy, wanted)
    assert found is not None
    return found


def test_of_a_queue_goes_ahead_what_priorities_and_fair_shares_let() -> None:
    loads = NodeLoads()
    assert loads.ahead("p", (0, "b"), 20) == 1.0
    loads.change("p", IDLE, NodeLoad(300), (0, "a"))
    loads.other_queues = {"p": {(0, "a"): 300, (0, "b"): 40, (1, "c"): 60}}
    assert loads.ahead("p", (0, "a"), 20) == (600 + 40) / 700
    assert loads.ahead("p", (0, "b"), 20) == (60 + 40) / 700
    assert loads.ahead("p", (1, "b"), 20) == (600 + 40 + 20) / 700
    assert loads.ahead("p", (-1, "b"), 20) == 0.0
    loads.change("p", NodeLoad(300), IDLE, (0, "a"))
    assert (loads.queues, loads.ahead("p", (0, "a"), 400)) == ({}, (300 + 40) / 400)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_policy_serves_with_whatever_there_is(name: str) -> None:
    p, d = member("p0", "prefill"), member("d0", "decode")
    assert ids(route(name, [p, d], 5000)) == ("p0", "d0")
    assert ids(route(name, [p], 5000)) == (None, "p0")
    assert ids(route(name, [d], 1)) == (None, "d0")
    a, b = member("a", "any"), member("b", "any")
    assert ids(route(name, [a, b], 5000)) in (("a", "b"), ("b", "a"))
    assert ids(route(name, [a], 5000)) == (None, "a")
    assert ids(route(name, [a, p], 5000)) == ("p0", "a")
    assert ids(route(name, [a, d], 5000)) == ("a", "d0")


@pytest.mark.parametrize("name", ["least-loaded", "prefix-aware", "cost"])
def test_who_generates_much_prefills_for_others(name: str) -> None:
    members = [member(name, "any", load=H200) for name in ("a", "b")]
    decoding = NodeLoad(sequences=20, tokens=20_000)
    assert ids(route(name, members, 2000, {"b": decoding}))[1] == "a"  # type: ignore[index]
    assert ids(route(name, members, 2000, {"a": decoding}))[1] == "b"  # type: ignore[index]
    measured = member("p0", "prefill", load=H200)
    assert ids(route(name, [measured])) == (None, "p0")


def limits(computed: int, received: int, choices: int = 8) -> PromptLimits:
    return PromptLimits(computed, received, choices, choice_tokens=16)


@pytest.mark.parametrize("load", [{}, H200], ids=["unmeasured", "measured"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_no_policy_chooses_who_can_not_take_the_prompt(name: str, load: dict[str, float]) -> None:
    """It would be computed for a target that then computes it again."""

    def node(node_id: str, role: str, *most: int) -> Member:
        return member(node_id, role, load=load, prompt_limits=limits(*most))

    a, b = (node(letter, "any", 8000, 4000) for letter in "ab")
    d, p = node("d0", "decode", 8000, 8000), node("p0", "prefill", 8000, 0, 0)
    small = node("d1", "decode", 3000, 3000)
    assert ids(route(name, [a, b], 4000)) is not None
    policy = load_policy(RoutingPolicy(policy=name), CostModel(Clock()))
    for members, allowed in (
        ([a, b], {(None, "a"), (None, "b")}),
        ([p, small], {(None, "p0")}),
        ([p, d, small], {("p0", "d0"), (None, "d0"), (None, "p0")}),
        ([p, a, d], {("p0", "d0"), ("a", "d0"), (None, "a"), (None, "d0"), (None, "p0")}),
    ):
        for _ in range(8):  # one goes round
            found = choose(ReadyNodes(members), NodeLoads(), policy, Wanted(4001))
            assert ids(found) in allowed
    assert choose(ReadyNodes([small]), NodeLoads(), policy, Wanted(4001)) is None


def test_further_choices_take_room_and_seats() -> None:
    a, b = (member(letter, "any", prompt_limits=limits(8000, 4000)) for letter in "ab")
    policy = load_policy(RoutingPolicy(policy="least-loaded"), CostModel())

    def is_handed_over(tokens: int, choices: int) -> bool:
        wanted = Wanted(tokens, choices=choices)
        found = choose(ReadyNodes([a, b]), NodeLoads(), policy, wanted)
        assert found is not None
        return found.source is not None

    assert is_handed_over(4000, 1)
    assert is_handed_over(4000 - 7 * 16, 8)
    assert not is_handed_over(4000 - 7 * 16 + 1, 8)
    assert not is_handed_over(100, 9)


def test_who_says_nothing_of_prompts_takes_all() -> None:
    assert ids(route("least-loaded", nodes(), 1 << 20)) == ("p0", "d0")


def test_a_policy_of_another_package_is_found_by_its_path() -> None:
    assert ids(route(f"{LeastLoaded.__module__}:LeastLoaded", nodes())) == ("p0", "d0")
    for wrong in ("no-such", "json:loads", "no.such:Thing"):
        with pytest.raises(ConfigError, match="--policy"):
            route(wrong, nodes())


def test_round_robin_goes_round_all_pairs() -> None:
    policy = load_policy(RoutingPolicy(policy="round-robin"), CostModel())
    seen = Counter(
        ids(choose(ReadyNodes(nodes()), NodeLoads(), policy, Wanted(10))) for _ in range(8)
    )
    assert seen == {(p, d): 2 for p in ("p0", "p1") for d in ("d0", "d1")}


def test_prefix_aware_weighs_what_is_cached_against_what_is_queued() -> None:
    cached = {"p1": 900}
    assert ids(route("prefix-aware", nodes(), cached=cached)) == ("p1", "d0")
    assert route("prefix-aware", nodes(), cached=cached).cached == 900
    loads = {"p1": NodeLoad(prompt_tokens=901)}
    assert ids(route("prefix-aware", nodes(), loads=loads, cached=cached)) == ("p0", "d0")


def test_sticky_stays_until_the_node_is_saturated() -> None:
    cached = {"p1": 16, "d1": 900}
    busy = {"p1": NodeLoad(prompt_tokens=SATURATED_TOKENS - 1)}
    assert ids(route("sticky", nodes(), loads=busy, cached=cached)) == ("p1", "d1")
    full = {"p1": NodeLoad(prompt_tokens=SATURATED_TOKENS)}
    assert ids(route("sticky", nodes(), loads=full, cached=cached)) == ("p0", "d1")
    full = {"d1": NodeLoad(sequences=SATURATED_SEQUENCES)}
    assert ids(route("sticky", nodes(), loads=full, cached=cached)) == ("p1", "d0")


def test_threshold_counts_new_tokens_only() -> None:
    assert ids(route("threshold", nodes(), 600)) == ("p0", "d0")
    assert ids(route("threshold", nodes(), 600, cached={"d1": 100})) == (None, "d1")
    assert ids(route("threshold", nodes(), 600, min_handover_tokens=601)) == (None, "d0")


# --- costs ---


def test_without_measurements_cost_is_prefix_aware() -> None:
    assert ids(route("cost", nodes(), cached={"p1": 500})) == ("p1", "d0")
    assert route("cost", nodes()).predicted is None


def test_cost_prefers_the_faster_the_idler_and_the_one_that_knows_the_prompt() -> None:
    quick, slow = nodes(1, load=H200), [member("p1", "prefill", load=SLOW)]
    assert ids(route("cost", [*quick, *slow], 4000)) in {("p0", "d0"), (None, "d0")}
    loads = {"p0": NodeLoad(prompt_tokens=80_000, prefill_us=3_000_000), "d0": NodeLoad(9, 64, 9)}
    assert route("cost", [*quick, *slow], 4000, loads).prefills.node_id == "p1"
    cached = {"p1": 3900}
    found = route("cost", nodes(load=H200), 4000, cached=cached)
    assert (found.prefills.node_id, found.cached) == ("p1", 3900)


def test_cost_spares_sequences_that_decode() -> None:
    """A long prompt on a node where 64 sequences wait for it costs them more than a hand-over."""
    one = nodes(1, load=H200)
    loads = {"d0": NodeLoad(sequences=64, tokens=64 * 1000)}
    assert ids(route("cost", one, 8000, loads)) == ("p0", "d0")
    waits = {"p0": NodeLoad(prompt_tokens=200_000, prefill_us=8_000_000)}
    assert ids(route("cost", one, 100, waits)) == (None, "d0"), "P is far behind"


def test_an_objective_moves_the_choice() -> None:
    """To where tokens come in time, though the first one waits for a second."""
    both = [member(f"a{i}", "any", load=H200) for i in range(2)]
    loads = {
        "a0": NodeLoad(sequences=64, tokens=64_000),
        "a1": NodeLoad(prompt_tokens=30_000, prefill_us=1_000_000),
    }
    assert ids(route("cost", both, 100, loads)) == (None, "a0")
    assert ids(route("cost", both, 100, loads, itl_slo=7.0)) == (None, "a1")
    with pytest.raises(ConfigError, match="--itl-slo"):
        RoutingPolicy(itl_slo=0.0)
    with pytest.raises(ConfigError, match="--max-itl: 11 ms would break --itl-slo, 10 ms"):
        RoutingPolicy(itl_slo=10.0, max_itl=11.0)


def test_a_node_of_any_role_that_decodes_for_many_computes_no_prompts() -> None:
    both = [member(f"a{i}", "any", load=H200) for i in range(2)]
    for busy, idle in (("a0", "a1"), ("a1", "a0")):
        loads = {busy: NodeLoad(sequences=64, tokens=64 * 1000)}
        assert route("cost", both, 8000, loads, itl_slo=12.0).prefills.node_id == idle


def test_with_an_itl_objective_nodes_of_any_role_hand_nothing_over() -> None:
    """Hand-overs evened out queues, but gathered the sequences at one node, whose chunks shrank."""
    loads = {"b": NodeLoad(sequences=1, tokens=1000)}

    def found(role: str, **slos: Any) -> tuple[str | None, str] | None:
        """Of a node that computes prompts quickly, and one that decodes quickly."""
        both = wired(QUICK, (role, "any"))
        for one, load in zip(both, ({**H200, "step_s": 0.02}, SLOW), strict=True):
            one.info = replace(one.info, load=load)
        return ids(route("cost", both, 2000, loads, ttft_slo=1000.0, **slos))

    assert found("any") == ("a", "b")
    assert found("any", itl_slo=25.0) in {(None, "a"), (None, "b")}
    assert found("prefill", itl_slo=25.0) == ("a", "b"), "that is what it is for"


def test_without_objectives_who_comes_while_a_prompt_is_computed_counts() -> None:
    wires = {"tcp://elsewhere:1": {"handover_s": 0.0}}
    both = [member(f"a{i}", "any", load=H200, wires=wires) for i in range(2)]
    clock = Clock()
    costs, elsewhere = CostModel(clock), member("gone", "prefill").info
    loads = {"a1": NodeLoad(prompt_tokens=30_000, prefill_us=1_000_000)}
    assert route("cost", both, 8000, loads, costs=costs).prefills.node_id == "a0"
    predicted = Prediction(0.1, 0.006, 0.006, 0.0, 0.1, 0.0, work_s=0.0)
    for _ in range(160):  # 20 a second
        costs.assigned(elsewhere, both[0].info, predicted)
        clock.now += 0.05
    assert route("cost", both, 8000, loads, costs=costs).prefills.node_id == "a1"
    clock.now += 60.0
    assert route("cost", both, 8000, loads, costs=costs).prefills.node_id == "a0"


def test_prompts_that_are_said_to_take_nothing_divide_nothing() -> None:
    free = {**H200, "prefill_token_s": 0.0, "prefill_context_s": 0.0}
    clock, before = Clock(), [member(f"a{i}", "any", load=H200) for i in range(2)]
    costs = CostModel(clock)
    costs.learn([one.info for one in before], NodeLoads())
    predicted = Prediction(0.1, 0.006, 0.006, 0.0, 0.1, 0.0, work_s=0.1)
    for one in before:
        costs.assigned(one.info, one.info, predicted)
    both = [member(f"a{i}", "any", load=free) for i in range(2)]
    loads = {one.info.node_id: NodeLoad(2000, sequences=4, prefill_us=50_000) for one in both}
    slos: dict[str, Any] = {"ttft_slo": 1000.0, "itl_slo": 12.0}
    found = route("cost", both, 3000, loads, costs=costs, **slos)
    assert found.predicted is not None
    assert math.isfinite(found.single_cost_s or math.nan)


def test_what_a_node_was_given_is_no_more_once_texts_are_known_to_be_short() -> None:
    """Sums over four seconds were taken for sums over one, and nodes for four times as busy."""
    clock = Clock()
    costs, (p, d) = CostModel(clock), nodes(1, load=H200)
    costs.learn([p.info, d.info], NodeLoads())
    predicted = Prediction(0.1, 0.006, 0.006, 0.0, 0.1, 0.0, work_s=0.02)
    for _ in range(400):
        clock.now += 0.1
        costs.assigned(p.info, d.info, predicted)
    before = costs.prefill_share(p.info), costs.targets_per_s(d.info)
    assert before[0] == pytest.approx(0.2, rel=0.1)
    assert before[1] == pytest.approx(10, rel=0.1)
    for _ in range(300):
        generated(costs, 18)
    costs.learn([p.info, d.info], NodeLoads())
    assert (costs.prefill_share(p.info), costs.targets_per_s(d.info)) == pytest.approx(before)


def test_unmeasured_nodes_that_generate_compute_prompts_last() -> None:
    several = [member(f"a{i}", "any") for i in range(3)]
    begun = {"a1": NodeLoad(sequences=3, tokens=3000)}
    assert ids(route("cost", several, 1000, begun)) == ("a0", "a1")
    busy = {**begun, "a0": NodeLoad(prompt_tokens=1000, prefill_us=0)}
    assert ids(route("cost", several, 1000, busy)) == ("a2", "a1")
    many = {"a1": NodeLoad(sequences=SATURATED_SEQUENCES, tokens=3000)}
    assert route("cost", several, 1000, many).target.node_id != "a1"


def test_where_prompts_were_computed_of_late_tokens_are_expected_to_come_slowly() -> None:
    clock = Clock()
    costs, (p, d) = CostModel(clock), nodes(1, load=H200)
    costs.learn([p.info, d.info], NodeLoads())
    alone = costs.decode(d.info, IDLE, None, 1000)
    assert alone.itl_s == alone.step_s
    predicted = Prediction(0.1, 0.006, 0.006, 0.0, 0.1, 0.0, work_s=0.05)
    for _ in range(400):  # half of the time
        costs.assigned(d.info, p.info, predicted)
        clock.now += 0.1
    assert costs.prefill_share(d.info) == pytest.approx(0.5, rel=0.2)
    beside = costs.decode(d.info, IDLE, None, 1000)
    assert beside.itl_s == pytest.approx(2 * alone.itl_s, rel=0.25)
    assert costs.decode(p.info, IDLE, None, 1000).itl_s == alone.itl_s
    clock.now += 60.0
    assert costs.decode(d.info, IDLE, None, 1000).itl_s == pytest.approx(alone.itl_s, rel=0.01)


def test_where_kv_came_of_late_steps_are_expected_to_be_longer() -> None:
    """Each hand-over was charged to who was there then, and the next text believed in none."""
    clock = Clock()
    costs, (p, d) = CostModel(clock), nodes(1, load=H200)
    costs.learn([p.info, d.info], NodeLoads())
    before = costs.decode(d.info, IDLE, None, 1000)
    for _ in range(400):
        clock.now += 0.01
        costs.handover_begun(p.info, d.info, 5000)
    share = costs.handover_slowdown_s(d.info, 5000) / 0.01
    assert costs.handover_share(d.info) == pytest.approx(share, rel=0.1)
    after = costs.decode(d.info, IDLE, None, 1000)
    assert after.step_s == pytest.approx(before.step_s / (1 - share), rel=0.05)
    assert after.others_s == pytest.approx(before.others_s / (1 - share), rel=0.05)
    assert costs.decode(d.info, IDLE, None, 1000, alone=True).step_s == before.step_s
    clock.now += 60.0
    assert costs.decode(d.info, IDLE, None, 1000).step_s == pytest.approx(before.step_s, rel=0.01)


def test_a_chat_that_is_alone_stays_where_its_first_turn_was_computed() -> None:
    """Its own first prompt was taken for a sign that others would come in between."""
    clock = Clock()
    costs, members = CostModel(clock), wired(QUICK)
    first = route("cost", members, 8192, costs=costs)
    assert first.predicted is not None
    home = first.target
    costs.assigned(home, home, first.predicted)
    clock.now += 0.5
    assert costs.prefill_share(home) > 0.05
    turn = route("cost", members, 8356, cached={home.node_id: 8192}, costs=costs)
    assert (turn.source, turn.target.node_id) == (None, home.node_id)


def test_full_nodes_are_left_out_while_others_have_room() -> None:
    full = member("d0", "decode", load={**H200, "free_blocks": 3.0})
    roomy = member("d1", "decode", load=H200)
    p = member("p0", "prefill", load=H200)
    loads = {"d1": NodeLoad(sequences=8, tokens=8000)}
    assert route("cost", [p, full, roomy], 1000, loads).target.node_id != "d0"


def test_sequences_whose_prompts_wait_elsewhere_neither_meet_nor_fit_beyond_capacity() -> None:
    """32 are given to a node of which each waits 9 s and generates for less than one."""
    node = member("d0", "decode", load=H200)
    costs, load = CostModel(Clock()), NodeLoad(sequences=32, tokens=320_000, pending=30)
    costs.learn([node.info], NodeLoads())
    crowded = costs.decode(node.info, load, None, 1000)
    assert crowded.sequences == 32, "nobody has been seen to wait"
    for _ in range(40):
        predicted = Prediction(9.0, 0.006, 0.006, 0.0, 9.0, 9.0, work_s=0.0)
        costs.assigned(node.info, node.info, predicted)
    met = costs.decode(node.info, load, None, 1000)
    assert 2 <= met.sequences < 8
    assert met.step_s < crowded.step_s
    assert met.room
    small = replace(node.info, num_blocks=320_000 // node.info.block_size)
    costs.learn([small], NodeLoads())
    assert not costs.decode(small, load, None, 1000).room
    here = costs.decode(node.info, replace(load, pending=0), None, 1000)
    assert here.sequences == 32


def test_what_a_node_never_did_is_taken_from_those_that_did() -> None:
    """A prefill node has never decoded: that is not free."""
    knows = {"step_s": 0.006, "prefill_token_s": 3e-5, "prefill_context_s": 2e-6}
    p, d = member("p0", "prefill", load=knows), member("d0", "decode", load=H200)
    costs = CostModel(Clock())
    assert costs.learn([p.info, d.info], NodeLoads())
    assert costs.speed(p.info).decode_sequence_s == H200["decode_sequence_s"]


def test_a_prediction_adds_queue_steps_and_own_tokens() -> None:
    clock = Clock()
    costs, (p, *_) = CostModel(clock), nodes(1, load={**H200, "step_tokens": 1000.0})
    costs.learn([p.info], NodeLoads())
    idle = costs.prefill(p.info, NodeLoad(), None, 1500, 500)
    attended = 1500 * (500 + 750) / 1000
    assert idle.ttft_s == pytest.approx(2 * 0.006 + 1500 * 3e-5 + attended * 2e-6)
    queued = NodeLoad(prompt_tokens=1000, prefill_us=400_000)
    later = costs.prefill(p.info, queued, clock.now - 0.1, 1500, 500)
    assert later.ttft_s == pytest.approx(idle.ttft_s + 0.3 + 0.006)
    nearly = costs.prefill(p.info, queued, clock.now - 0.403, 1500, 500)
    assert nearly.ttft_s == pytest.approx(idle.ttft_s + 0.003), "some of that time was for steps"
    done = costs.prefill(p.info, queued, clock.now - 100.0, 1500, 500)
    assert done.ttft_s == pytest.approx(idle.ttft_s)
    assert done.wait_s == 0.0
    told = member("p0", "prefill", load={**p.info.load, "waiting_tokens": 2000.0})
    costs.learn([told.info], NodeLoads())
    elsewhere = costs.prefill(told.info, NodeLoad(), None, 1500, 500)
    assert elsewhere.ttft_s > idle.ttft_s + 2000 * 3e-5, "another router has work there"


def test_small_chunks_beside_texts_are_predicted() -> None:
    costs, (node, *_) = CostModel(Clock()), nodes(1, load={**H200, "step_tokens": 1000.0})
    busy = NodeLoad(sequences=8, tokens=8000)

    def ttft_s(load: NodeLoad) -> float:
        costs.learn([node.info], NodeLoads())  # a new list: objectives have changed
        return costs.prefill(node.info, load, None, 1500, 0).ttft_s

    plain, idle = ttft_s(busy), ttft_s(NodeLoad())
    speed = costs.speed(node.info)
    each = speed.step_s + speed.decode_s(8, 8000)
    few = nodes(1, load={**H200, "step_tokens": 1000.0, "mixed_tokens": 500.0})[0].info
    costs.learn([few], NodeLoads())
    assert costs.prefill(few, busy, None, 1500, 0).ttft_s == pytest.approx(plain + each)
    assert costs.prefill(few, NodeLoad(), None, 1500, 0).ttft_s == idle
    costs.max_itl_s = 1.5 * each
    assert ttft_s(NodeLoad()) == idle, "nobody is there to be spared"
    chunk = chunk_tokens(costs.max_itl_s, each, speed.prefill_token_s, 1000, 1000)
    assert LEAST <= chunk < 500
    assert ttft_s(busy) == pytest.approx(plain + (math.ceil(1500 / chunk) - 2) * each)
    small = ttft_s(busy)
    costs.ttft_slo_s = small
    assert ttft_s(busy) == small, "though it would be late"
    costs.max_itl_s = 0.5 * each
    assert ttft_s(busy) == pytest.approx(plain), "it can't be kept"
    costs.max_itl_s, costs.ttft_slo_s = math.inf, plain
    costs.learn([few], NodeLoads())
    late = costs.prefill(few, busy, None, 1500, 0)
    assert late.ttft_s == pytest.approx(plain), "without an ITL objective large chunks are taken"


def test_no_token_is_expected_later_than_a_step_with_a_chunk() -> None:
    """Where more prompts were given than it can compute, a mean of 20 steps was expected."""
    clock = Clock()
    costs, (node, *_) = CostModel(clock), nodes(1, load={**H200, "mixed_tokens": 500.0})
    costs.learn([node.info], NodeLoads())
    for _ in range(400):
        costs.assigned(
            node.info, node.info, Prediction(0.1, 0.006, 0.006, 0.0, 0.1, 0.0, work_s=0.2)
        )
        clock.now += 0.1
    busy = NodeLoad(20_000, 8, 8000, prefill_us=600_000)
    assert costs.decode(node.info, busy, None, 1000).itl_s > 0.05
    costs.max_itl_s = 0.016
    costs.learn([replace(node.info)], NodeLoads())
    decode = costs.decode(node.info, busy, None, 1000)
    assert decode.step_s < decode.itl_s < 0.016


def test_a_report_that_counted_our_own_prompt_is_no_work_of_other_routers() -> None:
    """A heartbeat was made while our prompt waited; when it is next looked at, that has gone."""
    waiting = {**H200, "waiting_tokens": 5000.0}
    p, d = member("p0", "prefill", load=waiting), member("d0", "decode", load=H200)
    costs, loads = CostModel(Clock()), NodeLoads()
    ours = NodeLoad(prompt_tokens=3500, prefill_us=120_000, cached_tokens=500)
    loads.change("p0", IDLE, ours)
    loads.change("p0", ours, IDLE)
    assert costs.learn([p.info, d.info], loads)
    speed = costs.speed(p.info)
    expected = costs.prefill(p.info, loads.get("p0", IDLE), None, 100, 0)
    assert expected.wait_s == pytest.approx(speed.prefill_s(1000, 0)), "only the rest is theirs"


def test_work_of_other_routers_is_done_as_time_passes() -> None:
    clock = Clock()
    costs, p = CostModel(clock), member("p0", "prefill", load={**H200, "waiting_tokens": 5000.0})
    for later in (0.0, 0.05, 10.0):
        costs.learn([p.info], NodeLoads())
        wait = costs.prefill(p.info, IDLE, None, 100, 0).wait_s
        left = max(0.0, costs.speed(p.info).prefill_s(5000, 0) - later)
        assert wait == pytest.approx(left)
        clock.now = 100.0 + (0.05 if later == 0.0 else 10.0)


def test_a_pair_waits_for_what_its_target_computes() -> None:
    """P is idle, but D computes a prompt of 3 s, beside which it would generate slowly."""
    busy = {"d0": NodeLoad(100_000, 1, 100_000, pending=1, prefill_us=3_000_000)}
    idle, members = route("cost", nodes(1, load=H200), 4000), nodes(1, load=H200)
    policy = load_policy(RoutingPolicy(policy="cost"), CostModel())
    loads = NodeLoads()
    for node_id, load in busy.items():
        loads.change(node_id, IDLE, load)
    found = choose(ReadyNodes(members), loads, policy, Wanted(4000, 128))
    assert found is not None
    assert found.pair_cost_s is not None
    assert idle.pair_cost_s is not None
    step_s = 0.006 + 8192 * 3e-5 + 8192 * 4.096 * 2e-6
    assert 3.0 - 0.2 < found.pair_cost_s - idle.pair_cost_s < 3.0 + step_s
    assert found.predicted is not None
    assert idle.predicted is not None
    assert found.predicted.itl_s > 2 * idle.predicted.itl_s
    assert found.predicted.step_s < 1.1 * idle.predicted.step_s


def test_one_slow_handover_does_not_keep_a_pair_from_being_tried_again() -> None:
    clock = Clock()
    costs, (p, d) = CostModel(clock), nodes(1)
    for late in (3.0, 0.01, 0.01):
        costs.handed_over(p.info, d.info, late)
    assert costs.handover(p.info, d.info) == pytest.approx(0.01), "the median"
    costs.handed_over(d.info, p.info, 3.0)
    assert costs.handover(d.info, p.info) == pytest.approx(3.0)
    clock.now += 300.0
    assert costs.handover(d.info, p.info) < 0.01


def test_cost_says_what_both_ways_cost() -> None:
    found = route("cost", nodes(1, load=H200), 4000)
    assert found.pair_cost_s is not None
    assert found.single_cost_s is not None
    cheaper = found.pair_cost_s <= found.single_cost_s
    assert (found.source is not None) == cheaper
    assert route("least-loaded", nodes(1, load=H200)).pair_cost_s is None


def test_what_lies_beyond_the_nodes_is_learned() -> None:
    """Of all nodes together: "b" has computed long prompts only, and "c" none."""
    overhead = Overhead()
    for i in range(40):
        modelled = 0.01 * (1 + i % 7)
        overhead.observe("a", modelled, 0.004 + 1.3 * modelled)
        overhead.observe("b", 0.2, 0.004 + 1.3 * 0.2)
    for name in "abc":
        assert overhead.predict(name, 0.2) == pytest.approx(0.264, rel=0.04)
        assert overhead.predict(name, 0.005) == pytest.approx(0.0105, rel=0.04)


def test_a_slow_node_does_not_make_others_look_slow() -> None:
    overhead = Overhead()
    for i in range(100):
        modelled = 0.01 * (1 + i % 7)
        overhead.observe("a", modelled, modelled)
        overhead.observe("b", modelled, 2 * modelled)
    assert overhead.predict("a", 0.03) == pytest.approx(0.03, rel=0.05)
    assert overhead.predict("b", 0.03) == pytest.approx(0.06, rel=0.05)


def test_a_few_late_tokens_do_not_move_what_is_expected_of_most() -> None:
    overhead = Overhead()
    for i in range(400):
        modelled = 0.01 * (1 + i % 7)
        overhead.observe("a", modelled, modelled * (6.0 if i % 5 == 0 else 1.0))
    for modelled in (0.01, 0.04, 0.07):
        assert overhead.predict("a", modelled) == pytest.approx(modelled, rel=0.25)


def test_what_another_node_holds_is_fetched() -> None:
    members = [member(name, "any", load=H200) for name in ("a", "b")]
    busy = {"a": NodeLoad(prompt_tokens=9000)}
    found = route("prefix-aware", members, 1500, busy, cached={"a": 1000, "b": 100})
    assert ids(found) == ("b", "a")
    assert found.holder is not None
    assert (found.holder.node_id, found.held, found.cached) == ("a", 1000, 100)
    assert found.predicted is not None
    alone = route("prefix-aware", members, 1500, busy, cached={"b": 100})
    assert alone.holder is None
    assert alone.predicted is not None
    assert found.predicted.ttft_s < alone.predicted.ttft_s, "what is fetched is not computed"
    asked = node_requests(
        AddRequest(request_id="r", token_ids=array("I", (1,) * 1500), params=SamplingParams()),
        found,
        0,
        transfer_id=bytes(16),
        item_ids=(),
    )
    fetches = {one.side: (one.request.prefix, one.load.prompt_tokens) for one in asked}
    address = members[0].info.control_address
    assert address is not None
    assert fetches == {
        "target": (None, 0),
        "source": (PrefixAt(peer=address, num_tokens=1000), 500),
    }


@pytest.mark.parametrize("policy", ["prefix-aware", "cost"])
def test_no_more_is_fetched_than_its_holder_lends_at_once(policy: str) -> None:
    """Beyond what is there already; else it would refuse all of it."""
    busy = {"a": NodeLoad(prompt_tokens=40_000, sequences=40, tokens=99_999, prefill_us=2_000_000)}

    def held(lent: int | None) -> int:
        members = wired(QUICK)
        told = PromptLimits(8000, 8000, 8, lent=lent)
        members[0].info = replace(members[0].info, prompt_limits=told)
        found = route(policy, members, 5000, busy, cached={"a": 4000, "b": 512}, ttft_slo=500.0)
        assert found.prefills.node_id == "b"
        return found.held

    assert (held(None), held(4000), held(1600), held(160)) == (4000, 4000, 512 + 1600, 0)


@pytest.mark.parametrize("state", ["paused", "draining", "gone", "unhealthy"])
def test_who_gets_no_more_requests_still_sends_what_it_holds(state: str) -> None:
    members = [member(name, "any", load=H200) for name in ("a", "b")]
    members[0].paused = state == "paused"
    if not members[0].paused:
        members[0].state = NodeState(state)
    found = route("prefix-aware", members, 1500, cached={"a": 1000})
    sends = state in ("paused", "draining")
    assert ids(found) == (None, "b")
    assert (found.holder and found.holder.node_id) == ("a" if sends else None)


def test_a_prefix_is_fetched_only_where_it_pays_and_may_cross() -> None:
    busy = {"a": NodeLoad(prompt_tokens=9000, sequences=9)}

    def holder(roles: tuple[str, str], cached: dict[str, int], **settings: Any) -> str | None:
        members = [member(name, role) for name, role in zip("ab", roles, strict=True)]
        found = route("prefix-aware", members, 1500, busy, cached=cached, **settings).holder
        return None if found is None else found.node_id

    assert holder(("any", "any"), {"a": 1000}) == "a"
    assert holder(("any", "any"), {"a": 1000, "b": 900}) is None
    assert holder(("any", "any"), {"a": 1000, "b": 900}, min_fetch_tokens=100) == "a"
    assert holder(("any", "any"), {"a": 1000}, min_fetch_tokens=0) is None
    assert holder(("any", "prefill"), {"a": 1000}) is None, "b is no target"
    members = [member("a", "prefill"), member("b", "decode")]
    alone = route("threshold", members, 400, busy, cached={"a": 390})
    assert (ids(alone), alone.holder and alone.holder.node_id) == ((None, "b"), "a")


@pytest.mark.parametrize("load", [{}, H200], ids=["unmeasured", "measured"])
def test_who_has_no_room_for_what_another_node_holds_fetches_nothing(
    load: dict[str, float],
) -> None:
    """It would compute what was priced as fetched."""

    def held(role: str, received: int, choices: int = 1) -> int:
        b = member("b", role, load=load, prompt_limits=limits(8000, received))
        members = [member("a", "prefill", load=load), b]
        members[0].paused = True  # it still sends
        policy = load_policy(RoutingPolicy(policy="cost"), CostModel(Clock()))
        wanted = Wanted(1500, cached={"a": 1000}, choices=choices)
        found = choose(ReadyNodes(members), NodeLoads(), policy, wanted)
        assert found is not None
        assert ids(found) == (None, "b")
        return found.held

    assert held("any", 1500) == 1000
    assert held("any", 1499) == 0
    assert held("any", 1500, choices=2) == 0
    assert held("decode", 1000, choices=2) == 1000, "only what crosses has to fit"
    assert held("decode", 999) == 0


def test_nothing_moves_to_who_has_no_room_for_it() -> None:
    def goes_to(received: int) -> str | None:
        members = [
            member("a", "any", load=H200),
            member("b", "any", load=H200, prompt_limits=limits(8000, received)),
        ]
        ready, a = ReadyNodes(members), members[0].info
        policy = load_policy(RoutingPolicy(policy="cost"), CostModel(Clock()))
        found = successor(a, ready.receivers(a), ready, NodeLoads(), policy, Wanted(1500))
        return None if found is None else found.target.node_id

    assert goes_to(1500) == "b"
    assert goes_to(1499) is None


# --- wires ---

QUICK = {"fetch_s": 0.002, "handover_s": 0.002, "token_s": 1e-6}
CRAWLS = {"fetch_s": 0.002, "handover_s": 0.002, "token_s": 1e-2}


def wired(wire: dict[str, float], roles: tuple[str, str] = ("any", "any")) -> list[Member]:
    """Two nodes that know what KV takes from the other."""
    pair = dict(zip("ab", roles, strict=True))
    return [
        member(
            name,
            role,
            load=H200,
            control_address=f"tcp://{name}:1",
            wires={f"tcp://{other}:1": wire for other in pair if other != name},
        )
        for name, role in pair.items()
    ]


@pytest.mark.parametrize("name", ["prefix-aware", "cost"])
def test_a_prefix_is_fetched_where_that_is_faster_than_to_compute_it(name: str) -> None:
    busy = {"a": NodeLoad(prompt_tokens=40_000, sequences=40, tokens=99_999, prefill_us=2_000_000)}
    cached = {"a": 4000}

    def at_b(wire: dict[str, float]) -> Route:
        found = route(name, wired(wire), 5000, busy, cached=cached, ttft_slo=500.0)
        assert found.prefills.node_id == "b"
        assert found.predicted is not None
        return found

    quick, slow = at_b(QUICK), at_b(CRAWLS)
    assert (quick.holder and quick.holder.node_id, quick.held) == ("a", 4000)
    assert (slow.holder, slow.held) == (None, 0)
    assert quick.predicted is not None
    assert slow.predicted is not None
    assert quick.predicted.fetch_s == pytest.approx(0.002 + 4000e-6)
    own = H200["prefill_token_s"] * 1000 + H200["prefill_context_s"] * 4.5 * 1000
    assert quick.predicted.model_s == pytest.approx(0.006 + own + 0.006)
    saved = H200["prefill_token_s"] * 4000 + H200["prefill_context_s"] * 2 * 4000 - 0.006
    assert slow.predicted.model_s == pytest.approx(quick.predicted.model_s + saved)
    assert quick.margin_s is not None
    assert quick.margin_s == pytest.approx(saved) if name != "cost" else quick.margin_s <= saved


def test_a_wire_that_nobody_has_measured_is_not_free() -> None:
    members = [member(name, "any", load=SLOW) for name in ("a", "b")]
    turn = route("cost", members, 1148, cached={"a": 1040})
    assert (turn.prefills.node_id, turn.holder) == ("a", None), "what a holds, b need not fetch"
    busy = {"a": NodeLoad(prompt_tokens=40_000, sequences=40, tokens=99_999, prefill_us=2_000_000)}
    away = route("cost", members, 1148, busy, cached={"a": 1040}, ttft_slo=500.0)
    assert (away.prefills.node_id, away.holder and away.holder.node_id) == ("b", "a")
    assert away.predicted is not None
    assert away.predicted.fetch_s > 0
    members[1] = member("b", "any", load={**SLOW, "step_s": 0.0059})
    turn = route("cost", members, 1148, cached={"a": 1040})
    assert ids(turn) == (None, "a"), "nor have a hand it over to generate a little faster"


def test_who_has_sent_much_is_asked_for_no_more_while_it_sends() -> None:
    clock = Clock()
    costs, members = CostModel(clock), wired({**QUICK, "token_s": 1e-5})
    busy = {"a": NodeLoad(prompt_tokens=9000, sequences=9)}

    def fetches() -> bool:
        found = route("prefix-aware", members, 1500, busy, cached={"a": 1000}, costs=costs)
        return found.holder is not None

    assert fetches()
    costs.wires.sent(members[0].info, members[1].info, 100_000)
    assert not fetches(), "a second of others' KV comes before"
    clock.now += 1.0
    assert fetches()


def test_a_way_that_nobody_has_tried_is_as_the_others_are() -> None:
    members = [*wired(CRAWLS), member("c", "any", load=H200, control_address="tcp://c:1")]
    costs = CostModel(Clock())
    costs.learn([one.info for one in members], NodeLoads())
    a, b, c = (one.info for one in members)
    assert costs.wires.speed(a, c) == costs.wires.speed(a, b) == costs.wires.speed(c, b)
    costs.learn([one.info for one in nodes(load=H200)], NodeLoads())
    assert costs.wires.speed(a, b).token_s == 0.0, "who has left tells nothing"


def test_a_prompt_is_not_handed_over_by_a_wire_that_is_slower_than_to_wait() -> None:
    def handed_over(wire: dict[str, float]) -> bool:
        there = {"b": NodeLoad(sequences=40, tokens=40_000)}
        chosen = route("cost", wired(wire, ("prefill", "any")), 2000, there, max_tokens=64)
        assert chosen.pair_cost_s is not None
        assert chosen.single_cost_s is not None
        return ids(chosen) == ("a", "b")

    assert handed_over(QUICK)
    assert not handed_over(CRAWLS)


def test_of_a_long_prompt_the_last_step_is_still_on_its_way() -> None:
    def wire_s(token_s: float) -> float:
        members = wired({"handover_s": 0.002, "token_s": token_s}, ("prefill", "decode"))
        predicted = route("least-loaded", members, 20_000).predicted
        assert predicted is not None
        return predicted.wire_s

    last = 20_000 - 2 * 8192
    assert wire_s(1e-6) == pytest.approx(0.002 + last * 1e-6)
    step_s, attended = 3 * 0.006, 20_000 * 10_000 / 1000
    work_s = 20_000 * H200["prefill_token_s"] + attended * H200["prefill_context_s"] + step_s
    behind = 20_000 * 1e-3 - work_s * (1 - last / 20_000)
    assert wire_s(1e-3) == pytest.approx(0.002 + behind), "slower than the source computes"
