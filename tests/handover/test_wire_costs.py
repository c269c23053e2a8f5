"""What KV takes to come here is found from what has come."""

from __future__ import annotations

import random

import pytest

from kvbaton.connectors.protocol.events import Crossing
from kvbaton.decode.wire_costs import HALF_S, MAX_PEERS, MIN_CROSSINGS, WireCosts
from kvbaton.messages.engine import Metrics
from kvbaton.server.node import wire_failures_of, wires_of

FETCH_S, HANDOVER_S, TOKEN_S = 0.004, 0.002, 5e-7
PEER = "tcp://p:1"


def told(costs: WireCosts, now: float) -> dict[str, dict[str, float]]:
    """As it gets into a heartbeat."""
    return wires_of(Metrics(counters={}, gauges={"kvbaton_other": 1.0, **costs.gauges(now)}))


def failures(costs: WireCosts) -> dict[str, int]:
    """Likewise."""
    return wire_failures_of(
        Metrics(counters={}, gauges={"kvbaton_other": 1.0, **costs.gauges(0.0)})
    )


def test_costs_of_a_way_are_found_through_noise() -> None:
    chance, costs, now = random.Random(0), WireCosts(), 0.0
    for _ in range(200):
        fetched, tokens = chance.random() < 0.5, chance.randrange(16, 20_000)
        seconds = (FETCH_S if fetched else HANDOVER_S) + TOKEN_S * tokens
        seconds *= chance.lognormvariate(0.0, 0.1)
        # Every third one waits for another that has begun before.
        waits = 0.02 if chance.random() < 0.3 else 0.0
        if waits:
            costs.observe(Crossing(PEER, False, 40_000, now, now + waits))
            seconds = TOKEN_S * tokens
        costs.observe(Crossing(PEER, fetched, tokens, now, now + waits + seconds))
        now += 1.0
    found = told(costs, now)[PEER]
    assert found["fetch_s"] == pytest.approx(FETCH_S, rel=0.25)
    assert found["handover_s"] == pytest.approx(HANDOVER_S, rel=0.25)
    assert found["token_s"] == pytest.approx(TOKEN_S, rel=0.1)


def test_little_is_no_basis_and_what_never_was_is_not_told() -> None:
    costs = WireCosts()
    for number in range(MIN_CROSSINGS):
        assert told(costs, 0.0) == {}
        costs.observe(Crossing(PEER, False, 64 * (number + 1), number, number + 0.01))
    assert told(costs, MIN_CROSSINGS).keys() == {PEER}
    assert told(costs, MIN_CROSSINGS)[PEER].keys() == {"handover_s", "token_s"}


def test_what_was_slow_once_is_tried_again() -> None:
    costs = WireCosts()
    for number in range(MIN_CROSSINGS):
        costs.observe(Crossing(PEER, True, 1000, float(number), number + 0.9))
    then, later = (sum(told(costs, now)[PEER].values()) for now in (2.9, 2.9 + 2 * HALF_S))
    assert later == pytest.approx(then / 4)


def test_peers_are_bounded() -> None:
    costs = WireCosts()
    for number in range(MAX_PEERS + 10):
        for _ in range(MIN_CROSSINGS):
            costs.observe(Crossing(f"tcp://p:{number}", True, 100, number, number + 0.1))
    assert len(told(costs, 99.0)) == MAX_PEERS
    assert "tcp://p:9" not in told(costs, 99.0)


def test_failures_in_a_row_are_told_until_something_comes() -> None:
    costs = WireCosts()
    costs.ended(PEER, failed=True)
    costs.ended(PEER, failed=True)
    assert failures(costs) == {PEER: 2}
    assert told(costs, 0.0) == {}, "which is no wire that costs nothing"
    costs.ended(PEER, failed=False)
    assert failures(costs) == {}
