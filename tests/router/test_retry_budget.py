"""How often requests are tried again when nodes refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from kvbaton.errors import ConfigError, RequestError
from kvbaton.router.config import DispatchConfig
from kvbaton.router.dispatch import MOST_RETRIES, RETRIES_PER_S, RetryBudget
from tests.router.test_dispatch import collect, expected, request, tokens
from tests.support.waiting import eventually


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def spent(budget: RetryBudget) -> int:
    """All that is left of it."""
    count = 0
    while budget.spend():
        count += 1
    return count


def test_a_budget_grows_with_requests_and_time_up_to_a_bound() -> None:
    clock = Clock()
    budget = RetryBudget(0.25, clock)
    assert spent(budget) == MOST_RETRIES, "as many as may come at once"
    for _ in range(10):
        budget.request()
    assert spent(budget) == 2
    clock.now += 0.5
    assert spent(budget) == RETRIES_PER_S / 2
    clock.now += 1e6
    budget.request()
    assert spent(budget) == MOST_RETRIES


async def test_nodes_that_refuse_all_are_not_asked_thrice_by_all(make_rig: Any) -> None:
    rig = await make_rig(prefill=0, decode=3, dispatch=DispatchConfig(retry_budget=0.1))
    rig.dispatcher.retries = RetryBudget(0.1, Clock())
    nodes = list(rig.nodes.values())
    for node in nodes:
        node.status = 503
    for _ in range(100):
        with pytest.raises(RequestError, match="no") as caught:
            await collect(rig, request())
        assert caught.value.status == 503
    asked = sum(len(node.received) for node in nodes)
    assert 100 + MOST_RETRIES <= asked <= 100 + MOST_RETRIES + 10, "each has added a tenth"
    metrics = await (await rig.session.get("/metrics")).text()
    assert "kvbaton_router_retries_refused_total 0.0" not in metrics
    for node in nodes:
        node.status = None
    assert tokens(await collect(rig, request())) == expected(4)


async def test_requests_of_a_lost_node_are_always_tried_again(make_rig: Any) -> None:
    rig = await make_rig(prefill=0, decode=2, dispatch=DispatchConfig(retry_budget=0.0))
    rig.dispatcher.retries = budget = RetryBudget(0.0, Clock())
    spent(budget)
    rig.nodes["d0"].die_after = 2
    assert tokens(await collect(rig, request())) == expected(4)
    assert rig.nodes["d1"].received[0].resume_ids == tuple(expected(2))


async def test_what_a_node_that_stops_cuts_off_goes_on_elsewhere_at_no_cost(make_rig: Any) -> None:
    """It takes no attempt, and nothing of the budget."""
    rig = await make_rig(prefill=0, decode=2, dispatch=DispatchConfig(retry_budget=0.0))
    rig.dispatcher.retries = budget = RetryBudget(0.0, Clock())
    spent(budget)
    nodes = rig.nodes.values()
    for node in nodes:
        node.gate.clear()
    running = asyncio.create_task(collect(rig, request()))
    await eventually(lambda: any(node.arrived.is_set() for node in nodes))
    stopping, other = sorted(nodes, key=lambda node: not node.arrived.is_set())
    rig.directory.register(replace(stopping.info, state="draining"))
    stopping.status, stopping.body = 503, {"message": "it stops", "code": "shutting_down"}
    stopping.gate.set()
    other.gate.set()
    assert tokens(await running) == expected(4)
    assert (len(stopping.received), len(other.received)) == (1, 1)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="--retry-budget"):
        DispatchConfig(retry_budget=-0.1)
