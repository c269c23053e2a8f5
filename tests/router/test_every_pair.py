"""Policies look at few pairs, and choose what they would if they looked at every one.

The formulas are written out here once more, for every pair and node, as docs/routing.md tells them.
Numbers come from few values, so that many options cost the same: then the first one counts, or the
lowest ids.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.messages.nodes import WIRE_COSTS, NodeInfo
from kvbaton.router.choose import Wanted, choose, holders_of
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import BESIDE_HANDOVER, GUESSED_WIRE, CostModel
from kvbaton.router.loads import NodeLoad, NodeLoads
from kvbaton.router.membership import Member, ReadyNodes
from kvbaton.router.policies import (
    CERTAINTY,
    MISSED_S,
    NO_ROOM_S,
    SATURATED_SEQUENCES,
    LeastCost,
    LeastLoaded,
    Policy,
    PrefixAware,
    Sticky,
    Threshold,
)
from kvbaton.router.predictions import Decode, Prediction, Prefill
from kvbaton.router.route import MAX_HOLDERS, Options
from kvbaton.types import PromptLimits
from tests.router.test_pairing import ids, member

NOW, TOKENS = 128.0, 1024
EXACT = 1 / 1024
"""Seconds are sums of few powers of 2, so that sums in another order are often equal."""
SPEEDS = [
    {"step_s": 8 * EXACT, "prefill_token_s": EXACT / 32, "free_blocks": 99999.0},
    {"step_s": 8 * EXACT, "prefill_token_s": EXACT / 8, "decode_sequence_s": EXACT / 16},
    {"step_s": 16 * EXACT, "prefill_token_s": EXACT / 32, "waiting_tokens": 4096.0},
    {"step_s": 8 * EXACT, "prefill_token_s": EXACT / 16, "decode_context_s": EXACT / 64},
    {"step_s": 4 * EXACT, "prefill_token_s": EXACT / 32, "free_blocks": 1.0},
    {"decode_sequence_s": EXACT / 16},
]
WIRES = [
    {"fetch_s": EXACT, "handover_s": EXACT / 2, "token_s": EXACT / 1024},
    {"handover_s": 4 * EXACT, "token_s": EXACT / 16},
    {"fetch_s": 8 * EXACT, "token_s": EXACT / 128},
]
FREE = {"tcp://elsewhere:1": {"handover_s": 0.0}}
"""A wire that has been measured: others are believed to be as it is."""
ELSEWHERE = member("elsewhere", "decode").info
POLICIES: dict[str, type[Policy]] = {
    "cost": LeastCost,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
    "sticky": Sticky,
    "threshold": Threshold,
}


def cluster(chance: Random) -> list[Member]:
    """Nodes of all roles, not all of which can hand over to each other."""
    members = []
    roles = chance.choice([["any"], ["prefill", "decode"], ["any", "prefill", "decode"]])
    strangers, speeds = chance.random() < 0.3, chance.sample(SPEEDS, chance.randint(1, 3))
    wired = chance.choice([0.0, 0.3, 1.0])
    for number in range(chance.randint(1, 8)):
        one = member(
            f"n{chance.randrange(9)}{number}",
            chance.choice(roles),
            identity="bb" if strangers and chance.random() < 0.3 else "aa",
            transport="nixl" if strangers and chance.random() < 0.3 else "tcp",
            load=chance.choice(speeds),
            control_address=f"tcp://127.0.0.1:{number}",
            block_size=16,
            num_blocks=chance.choice([0, 300]),
            prompt_limits=chance.choice([None, PromptLimits(4096, 4096, choices=4)]),
            wires={
                f"tcp://127.0.0.1:{other}": chance.choice(WIRES)
                for other in range(8)
                if chance.random() < wired
            },
        )
        if strangers and chance.random() < 0.5:
            told = chance.sample(range(8), 5)
            one.told = frozenset(f"tcp://127.0.0.1:{number}" for number in told)
        members.append(one)
    return members


def work(chance: Random, members: list[Member]) -> NodeLoads:
    """What is in flight."""
    loads, busy = NodeLoads(lambda: NOW), chance.choice([0.5, 0.9])
    for one in members:
        if chance.random() < busy:
            queued = chance.choice([0, 0, 512, 2048, 8192])
            sequences = chance.choice([0, 1, 1, 2, 32])
            load = NodeLoad(
                prompt_tokens=queued,
                sequences=sequences,
                tokens=chance.choice([1024, 1024, 4096]),
                pending=min(sequences, chance.choice([0, 1])),
                late=min(sequences, chance.choice([0, 1])),
                prefill_us=queued * chance.choice([0, 31, 125]),
            )
            loads.own[one.info.node_id] = load
            if load.prefill_us and chance.random() < 0.7:
                since = NOW - chance.choice([0.0, 8 * EXACT, 1.0])
                loads.prefill_since[one.info.node_id] = since
    return loads


def every_pair(members: list[Member], avoid: frozenset[str]) -> list[tuple[NodeInfo, NodeInfo]]:
    """Who can hand over to whom, by the rule."""
    left = [one for one in members if one.info.node_id not in avoid]
    return [
        (p.info, d.info)
        for p in left
        for d in left
        if p is not d
        and p.info.role != "decode"
        and d.info.role != "prefill"
        and (p.info.identity, p.info.transport) == (d.info.identity, d.info.transport)
        and (d.told is None or p.info.control_address in d.told)
    ]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=500, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_policy_chooses_as_if_it_looked_at_every_pair(name: str, number: int) -> None:
    chance = Random(number)
    members = cluster(chance)
    names = [one.info.node_id for one in members]
    avoid = frozenset(chance.sample(names, 1) if chance.random() < 0.2 else ())
    nodes = [one.info for one in members if one.info.node_id not in avoid]
    loads = work(chance, members)
    cached = {name: chance.choice([16, 512, 1024]) for name in names if chance.random() < 0.5}
    asked = RoutingPolicy(
        policy=name,
        min_handover_tokens=chance.choice([0, 0, 0, 600, 1001]),
        ttft_slo=chance.choice([None, 50.0, 500.0]),
        itl_slo=chance.choice([None, 7.0, 20.0]),
        min_fetch_tokens=chance.choice([0, 256]),
    )
    costs, ready = CostModel(lambda: NOW), ReadyNodes(members)
    pairs = every_pair(members, avoid)
    assert [pair for pair in ready.pairs if avoid.isdisjoint(map(_id, pair))] == pairs
    late_s = chance.choice([[], [0.0, EXACT, 4 * EXACT, 8 * EXACT]])
    for pair in pairs if late_s else ():
        costs.handed_over(*pair, chance.choice(late_s))
    beside = chance.choice([0.0, 8 * EXACT, 64 * EXACT])
    for node in nodes if beside else ():  # of prompts that were computed here of late
        costs.assigned(node, ELSEWHERE, Prediction(beside, 0.0, 0.0, 0.0, 0.0, 0.0, work_s=beside))
    costs.ttft_slo_s = (asked.ttft_slo or math.inf) / 1e3
    for node in nodes if chance.random() < 0.5 else ():
        for place in range(chance.randrange(6)):
            lasts, full = chance.choice([EXACT, 32 * EXACT, 256 * EXACT]), chance.random() < 0.5
            late = full and chance.random() < 0.5
            waits = Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, work_s=lasts, full=full, late=late)
            costs.queued(f"{node.node_id} {place}", node, waits)
    wanted = Wanted(TOKENS, chance.choice([1, 128]), (), cached)
    found = choose(ready, loads, POLICIES[name](asked, costs), wanted, avoid=avoid)
    if not nodes:
        assert found is None
        return
    assert found is not None
    options = Options(
        ready.pairs.without(avoid),
        nodes,
        loads,
        TOKENS,
        min(costs.output_tokens, float(wanted.max_tokens)),
        cached,
        loads.prefill_since,
        costs.learn(ready.serving, loads),
        holders_of(
            ready.pairs.without(avoid).sources, loads, wanted, asked.min_fetch_tokens, ready
        ),
        asked.min_fetch_tokens,
    )
    node = found.prefills
    holder, held, saved_s = fetched(options, pairs, costs, node)
    assert (found.holder, found.held) == (holder, held)
    if options.measured:
        prefill = options.prefill(costs, node)
        assert (prefill.holder, prefill.held, prefill.saved_s) == (holder, held, saved_s)
        assert prefill.new == TOKENS - (held or options.hit(node))
        assert found.predicted == options.predict(costs, found, prefill)
        if found.source is not None and found.predicted is not None:
            assert found.predicted.wire_s == wire_s(options, costs, found.source, found.target)
    if name != "cost":
        assert ids(found) == by_rank(options, pairs, asked, name)
    elif options.measured:
        assert ids(found) == by_cost(options, pairs, costs, asked)
    else:
        assert ids(found) == by_rank(options, pairs, asked, "unmeasured")


def test_of_equal_pairs_the_first_is_chosen_even_if_a_later_one_seemed_cheaper() -> None:
    slow = member("p0", "prefill", load=SPEEDS[0])
    fast = member("p1", "prefill", load={**SPEEDS[0], "step_s": 4 * EXACT})
    d = member("d", "decode", load=SPEEDS[0], wires=FREE)
    costs = CostModel(lambda: NOW)
    policy = LeastCost(RoutingPolicy(), costs)

    def chosen() -> tuple[str | None, str] | None:
        return ids(choose(ReadyNodes([slow, fast, d]), NodeLoads(), policy, Wanted(TOKENS)))

    assert chosen() == ("p1", "d")
    costs.handed_over(fast.info, d.info, 8 * EXACT)  # a step until the first token, and its work
    assert chosen() == ("p0", "d")


def test_a_pair_waits_for_the_step_that_its_target_is_in() -> None:
    p = member("p", "prefill", load=SPEEDS[0])
    d = member("d", "any", load=SPEEDS[0], wires=FREE)
    loads = NodeLoads(lambda: NOW)
    loads.own["d"] = NodeLoad(8192, 1, 8192, prefill_us=500_000)
    costs = CostModel(lambda: NOW)
    policy = LeastCost(RoutingPolicy(), costs)
    without = choose(ReadyNodes([p, d]), loads, policy, Wanted(TOKENS))
    loads.prefill_since["d"] = NOW
    waits = choose(ReadyNodes([p, d]), loads, policy, Wanted(TOKENS))
    assert without is not None
    assert waits is not None
    assert waits.predicted is not None
    held_s = costs.step_wait_s(d.info, loads["d"], NOW)
    assert held_s > waits.predicted.ttft_s
    more = (waits.pair_cost_s or 0) - (without.pair_cost_s or 0)
    assert more == pytest.approx(held_s - waits.predicted.ttft_s)


def _id(node: NodeInfo) -> str:
    return node.node_id


Pair = tuple[NodeInfo, NodeInfo]


def by_rank(
    options: Options, pairs: list[Pair], asked: RoutingPolicy, kind: str
) -> tuple[str | None, str]:
    """What the policies choose that compare numbers in turn."""
    hits = {node.node_id: options.hit(node) for node in options.singles}
    if kind == "least-loaded":
        hits = dict.fromkeys(hits, 0)
    held = dict.fromkeys(hits, 0)
    if kind == "sticky":
        held, hits = _unsaturated(options, hits), dict.fromkeys(hits, 0)

    def rank(pair: Pair) -> tuple[Any, ...]:
        (p, d), (source, target) = map(_id, pair), map(options.load, pair)
        there = target.prompt_tokens, target.sequences, target.tokens - hits[d]
        to_do = source.prompt_tokens - hits[p]
        if kind == "unmeasured":
            goes_on = pair[1].role == "any" and 0 < target.sequences < SATURATED_SEQUENCES
            beside = target.prompt_tokens > 0, not goes_on
            return source.sequences > 0, to_do, *beside, *there, source.sequences, p, d
        return -held[p], -held[d], to_do, *there, source.sequences, p, d

    def rank_alone(node: NodeInfo) -> tuple[Any, ...]:
        load, name = options.load(node), node.node_id
        to_do, last = load.prompt_tokens - hits[name], node.role == "prefill"
        if kind in ("least-loaded", "sticky"):
            return -held[name], last, load.sequences, to_do, load.tokens, name
        return last, to_do, load.sequences, load.tokens, name

    node = min(options.singles, key=rank_alone)
    if kind == "threshold":
        hand_over = options.new(node) >= (asked.min_handover_tokens or 512)
    else:
        hand_over = asked.min_handover_tokens <= TOKENS
    if pairs and hand_over:
        source, target = min(pairs, key=rank)
        return source.node_id, target.node_id
    return None, node.node_id


def _unsaturated(options: Options, hits: dict[str, int]) -> dict[str, int]:
    held = dict(hits)
    for node in options.singles:
        load = options.load(node)
        alike = [options.load(other) for other in options.singles if other.role == node.role]
        tokens = load.prompt_tokens - min(other.prompt_tokens for other in alike)
        if tokens >= 8192 or load.sequences - min(other.sequences for other in alike) >= 16:
            held[node.node_id] = 0
    return held


def fetched(
    options: Options, pairs: list[Pair], costs: CostModel, node: NodeInfo
) -> tuple[NodeInfo | None, int, float | None]:
    """Of whom a node fetches the start of the prompt, how much, and what that saves."""
    hit, least = options.hit(node), options.cached.get(node.node_id, 0) + options.min_fetch_tokens
    if not options.min_fetch_tokens:
        return None, 0, None
    able = [p for p, d in pairs if d == node and options.cached.get(p.node_id, 0) >= least]
    able.sort(key=lambda p: (options.hit(p), -options.load(p).prompt_tokens, p.node_id))
    if not able or not options.measured:
        return (able[-1], options.cached[able[-1].node_id], None) if able else (None, 0, None)
    speed, best = costs.speed(node), (-math.inf, able[-1])
    for holder in able[: -1 - MAX_HOLDERS : -1]:
        wire, tokens = way(costs, holder, node), options.hit(holder)
        computed = speed.prefill_s(TOKENS - hit, hit) - speed.prefill_s(TOKENS - tokens, tokens)
        takes = wire["fetch_s"] + wire["token_s"] * (tokens - hit)
        saved = computed - takes if any(wire.values()) else computed * (1 - GUESSED_WIRE)
        best = max(best, (saved, holder), key=lambda saved: saved[0])
    saved_s, holder = best
    assert options.prefill(costs, node).saved_s == pytest.approx(saved_s, abs=1e-12)
    exact = options.prefill(costs, node).saved_s
    return (holder, options.hit(holder), exact) if saved_s >= 0 else (None, 0, exact)


def way(costs: CostModel, sender: NodeInfo, receiver: NodeInfo) -> dict[str, float]:
    """What is known of a pair, or of all pairs if it has not met."""
    told = receiver.wires.get(sender.control_address or "", {})
    nodes = costs._learned or ()
    every = [costs for node in nodes for costs in node.wires.values()]
    found = {}
    for term in WIRE_COSTS:
        known = [costs[term] for costs in every if term in costs]
        found[term] = told.get(term, sum(known) / len(known) if known else 0.0)
    return found


def wire_s(options: Options, costs: CostModel, source: NodeInfo, target: NodeInfo) -> float:
    """What is left of a hand-over when its prompt is computed."""
    prefill, wire = options.prefill(costs, source), way(costs, source, target)
    tokens, last = options.new(target), prefill.last
    before = prefill.work_s * (1 - last / prefill.new)
    token_s = wire["token_s"]
    if not any(wire.values()):
        token_s = GUESSED_WIRE * costs.speed(source).prefill_token_s
    return wire["handover_s"] + max(min(last, tokens) * token_s, tokens * token_s - before)


def by_cost(
    options: Options, pairs: list[Pair], costs: CostModel, asked: RoutingPolicy
) -> tuple[str | None, str]:
    """The first of the options that cost the least seconds."""
    output_tokens = options.output_tokens

    def missed(seconds: float, objective_ms: float | None) -> float:
        if objective_ms is None:
            return 0.0
        times = objective_ms / 1e3 / max(seconds, 1e-6)
        return MISSED_S / (1 + math.pow(times, CERTAINTY))

    def misses_more(there: Decode, longer_s: float) -> float:
        return missed(there.others_s + longer_s, asked.itl_slo) - missed(
            there.others_s, asked.itl_slo
        )

    def delay(there: Decode, slower_s: float, work_s: float) -> float:
        """Who has an ITL objective waits for no prompt: chunks keep it."""
        waits_s = work_s if asked.itl_slo is None else 0.0
        return costs.output_tokens * slower_s + waits_s + misses_more(there, slower_s)

    def generate(node: NodeInfo, decode: Decode, work_s: float, is_late: bool) -> float:
        misses = missed(decode.step_s, asked.itl_slo)
        late = missed(NO_ROOM_S / output_tokens, asked.itl_slo)
        cost = output_tokens * decode.itl_s
        if not decode.room:
            cost, misses = cost + NO_ROOM_S, max(misses, late)
        if not is_late:  # who is has missed its objectives
            cost += misses
        return cost + decode.sequences * delay(decode, decode.slower_s, work_s)

    def beside(node: NodeInfo) -> float:
        """KV that leaves, or comes, makes a step longer for all who are there."""
        there = options.decode(costs, node, math.inf)
        longer = BESIDE_HANDOVER * costs.speed(node).prefill_token_s * TOKENS
        return there.sequences * (longer + misses_more(there, longer))

    def compute(node: NodeInfo, prefill: Prefill) -> float:
        cost = prefill.ttft_s + prefill.work_s
        cost += prefill.late_share * missed(prefill.risk_s, asked.ttft_slo)
        if asked.ttft_slo is None:
            cost += prefill.work_s * prefill.wait_s * costs.prompts_per_s(node)
        return cost

    def of_pair(pair: Pair) -> float:
        source, target = pair
        prefill = options.prefill(costs, source)
        cost = compute(source, prefill)
        there = options.decode(costs, source, math.inf)
        late = prefill.decoding * delay(there, 0.0, prefill.work_s)
        cost += late + costs.handover(source, target) + beside(source) + beside(target)
        cost += generate(target, options.decode(costs, target, prefill.ttft_s), 0.0, prefill.late)
        if prefill.late:
            load, each = options.load(target), NO_ROOM_S
            taken = missed(load.taken(target, TOKENS), 1e3) - missed(load.taken(target), 1e3)
            each += missed(NO_ROOM_S / costs.output_tokens, asked.itl_slo)
            cost += prefill.ttft_s * costs.targets_per_s(target) * taken / MISSED_S * each
        held_s = options.step_wait_s(costs, target) - prefill.ttft_s
        return cost + max(0.0, held_s, wire_s(options, costs, source, target))

    def alone(node: NodeInfo) -> float:
        prefill = options.prefill(costs, node)
        return compute(node, prefill) + generate(
            node, options.decode(costs, node, prefill.ttft_s), prefill.work_s, prefill.late
        )

    singles = [n for n in options.singles if n.role != "prefill"] or options.singles
    node = min(singles, key=alone)
    if asked.itl_slo is not None:  # where chunks keep it, nodes of role any serve alone
        pairs = [pair for pair in pairs if pair[0].role == "prefill"]
    if pairs:
        source, target = min(pairs, key=of_pair)
        if of_pair((source, target)) <= alone(node) and asked.min_handover_tokens <= TOKENS:
            return source.node_id, target.node_id
    return None, node.node_id
