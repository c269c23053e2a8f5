"""Decisions as clients and operators see them: headers, `/debug/routes`, refusals, pauses."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import msgspec
import pytest

from kvbaton.connectors.keys import block_keys, root_key
from kvbaton.messages.engine import (
    AddRequest,
    BlockChange,
    CachedBlocks,
    CachedGroup,
    SamplingParams,
)
from kvbaton.router.api import CHOOSER
from kvbaton.router.config import DispatchConfig
from kvbaton.router.loads import IDLE, NodeLoad
from kvbaton.types import PromptLimits
from tests.support.router_rig import MakeRig, Rig
from tests.support.waiting import PATIENCE_S, eventually

MEASURED = {"step_s": 0.001, "prefill_token_s": 1e-5, "step_tokens": 512.0}
IDENTITY = "ab" * 32


def measured(rig: Rig, **load: float) -> None:
    """All nodes say how fast they and their wires are, and that they share KV."""
    wires = {"tcp://elsewhere:1": {"handover_s": 0.0}}
    for node in rig.nodes.values():
        told = {"load": {**MEASURED, **load}, "wires": wires, "identity": IDENTITY}
        node.info = msgspec.structs.replace(node.info, **told)
        rig.directory.register(node.info)


async def complete(rig: Rig, **more: Any) -> Any:
    body = {"model": "tiny", "prompt": [1] * 40, "max_tokens": 4}
    return await rig.session.post("/v1/completions", json=body, **more)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_asks_is_told_where_its_request_went(
    make_rig: MakeRig, stream: bool
) -> None:
    rig = await make_rig(dispatch=DispatchConfig(policy="cost"))
    measured(rig)
    body = {"model": "tiny", "prompt": [1] * 40, "max_tokens": 4, "stream": stream}
    async with rig.session.post(
        "/v1/completions", json=body, headers={"X-KVBaton-Route": "1"}
    ) as response:
        await response.read()
        assert response.status == 200
        told = response.headers["X-KVBaton-Route"]
    assert told.startswith("policy=cost; nodes=p0>d0; cached=0/40; pairs=1; singles=2; ttft=")
    assert "X-KVBaton-Route" not in (await complete(rig)).headers


async def test_operators_see_what_was_expected_and_what_came_of_it(make_rig: MakeRig) -> None:
    rig = await make_rig(dispatch=DispatchConfig(policy="cost"))
    measured(rig)
    assert (await complete(rig)).status == 200
    async with rig.session.get("/debug/routes") as response:
        view = json.loads(await response.read())
    (route,) = view["routes"]
    assert (route["source"], route["target"], route["num_tokens"]) == ("p0", "d0", 40)
    assert route["ttft_s"] == pytest.approx(0.001 + 40e-5)
    assert route["observed_ttft_s"] > 0
    assert route["observed_itl_s"] > 0
    assert min(route["pair_cost_s"], route["single_cost_s"]) > route["model_s"]
    async with rig.session.get("/metrics") as response:
        metrics = (await response.read()).decode()
    assert "kvbaton_router_ttft_error_ratio_count 1.0" in metrics
    assert "kvbaton_router_ttft_error_seconds_count 1.0" in metrics
    assert "kvbaton_router_itl_error_ratio_count 1.0" in metrics


async def test_what_the_target_computes_is_no_part_of_a_handover(make_rig: MakeRig) -> None:
    rig = await make_rig(dispatch=DispatchConfig(policy="least-loaded"))
    measured(rig, step_tokens=100_000.0)
    chooser, costs = rig.app[CHOOSER], rig.app[CHOOSER].policy.costs
    p, d = rig.nodes["p0"].info, rig.nodes["d0"].info

    def handed_over(name: str, busy: NodeLoad) -> float:
        request = AddRequest(
            request_id=name, token_ids=array("I", (1,) * 40), params=SamplingParams()
        )
        route = chooser.route(request, 40, (), frozenset())
        assert route is not None
        assert (route.source, route.target) == (p, d)
        rig.dispatcher.loads.change("d0", IDLE, busy)
        chooser.first_token(name, 0.1)
        chooser.handed_over(name, 0.25)
        rig.dispatcher.loads.change("d0", busy, IDLE)
        return costs.handover(p, d)

    prompt = NodeLoad(50_000, 1, 50_000, pending=1, prefill_us=500_000)
    assert handed_over("first", prompt) == 0.0, "it waited for half a second of another's prompt"
    assert handed_over("second", IDLE) == pytest.approx(0.249 / 2, rel=0.01), "the median of two"


@pytest.mark.parametrize("from_source", [1, 2])
async def test_a_hand_over_is_judged_by_the_targets_first_token(
    make_rig: MakeRig, from_source: int
) -> None:
    """The source's second token does not wait for it."""
    rig = await make_rig(dispatch=DispatchConfig(policy="least-loaded"))
    measured(rig)
    p, d = rig.nodes["p0"], rig.nodes["d0"]
    p.goes_on, d.pause = from_source == 2, 0.02
    d.gate.clear()
    asked = asyncio.create_task(complete(rig))
    await asyncio.wait_for(asyncio.gather(p.arrived.wait(), d.arrived.wait()), PATIENCE_S)
    (relay,) = (running.relay for running in rig.dispatcher.running.values())
    await eventually(lambda: relay.num_tokens == from_source)
    (decision,) = rig.app[CHOOSER].decisions
    assert decision.observed_late_s is None
    d.gate.set()
    assert (await asked).status == 200
    assert decision.observed_late_s is not None
    assert decision.observed_itl_s == pytest.approx(0.02, rel=0.9)


async def test_a_request_goes_where_its_prefix_is(make_rig: MakeRig) -> None:
    rig = await make_rig(prefill=2, dispatch=DispatchConfig(policy="prefix-aware"))
    measured(rig)
    index = rig.directory.index
    assert index is not None
    keys = block_keys(root_key(bytes.fromhex(IDENTITY), ""), [1] * 40, 16)
    hashes = b"".join(key[-8:] for key in keys)
    info = rig.nodes["p1"].info
    index.take(info, CachedBlocks.beginning((CachedGroup(16),)))
    index.take(info, CachedBlocks(number=1, changes=(BlockChange(0, True, hashes),)))
    assert (await complete(rig)).status == 200
    (decision,) = rig.app[CHOOSER].decisions
    assert (decision.source, decision.cached_tokens) == ("p1", 32)
    await rig.nodes["p1"].stop()
    await eventually(lambda: "p1" not in index.nodes)
    assert (await complete(rig)).status == 200
    assert rig.app[CHOOSER].decisions[-1].source == "p0"


async def test_what_would_wait_too_long_is_refused_with_a_time_to_come_again(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig(dispatch=DispatchConfig(max_ttft=500.0))
    measured(rig)
    assert (await complete(rig)).status == 200
    measured(rig, waiting_tokens=900_000.0)  # 9 s of prompts
    async with await complete(rig) as response:
        assert response.status == 429
        assert 9 <= int(response.headers["Retry-After"]) <= 12
        error = json.loads(await response.read())["error"]
    assert error["code"] == "overloaded"
    assert rig.dispatcher.running == {}
    assert rig.loads() == {}
    measured(rig)
    assert (await complete(rig)).status == 200


async def test_a_tenant_waits_for_its_own_prompts_and_as_much_of_another_one(
    make_rig: MakeRig,
) -> None:
    settings = DispatchConfig(policy="least-loaded", max_ttft=190_000.0)
    rig = await make_rig(api_keys=("flood", "polite"), dispatch=settings)
    measured(rig, prefill_token_s=1.0)  # 40 s a prompt
    for node in rig.nodes.values():
        node.gate.clear()

    async def sent(key: str, count: int, **fields: Any) -> list[asyncio.Task[int]]:
        """Requests that the router has decided on: their statuses, of those let in once all go."""

        async def one() -> int:
            body = {"model": "tiny", "prompt": [1] * 40, "max_tokens": 4, **fields}
            headers = {"Authorization": f"Bearer {key}"}
            async with rig.session.post("/v1/completions", json=body, headers=headers) as response:
                await response.read()
            return response.status

        before = len(rig.dispatcher.running)
        tasks = [asyncio.create_task(one()) for _ in range(count)]

        def decided() -> bool:
            let_in = len(rig.dispatcher.running) - before
            return let_in + sum(task.done() for task in tasks) == count

        await eventually(decided)
        return tasks

    def refused(tasks: list[asyncio.Task[int]]) -> int:
        assert {task.result() for task in tasks if task.done()} <= {429}
        return sum(task.done() for task in tasks)

    flood = await sent("flood", 12)
    assert refused(flood) == 8, "five would take 200 s"
    polite = await sent("polite", 3)
    assert refused(polite) == 1, "the third waits for two of each"
    later = await sent("polite", 1, priority=1)
    assert refused(later) == 1, "it goes behind all of them"
    for node in rig.nodes.values():
        node.gate.set()
    statuses = await asyncio.gather(*flood, *polite, *later)
    assert statuses.count(200) == 6
    assert rig.loads() == {}
    assert not rig.dispatcher.loads.queues


def limited(rig: Rig, **most: PromptLimits) -> None:
    """Nodes say how long prompts may be there."""
    for name, limits in most.items():
        node = rig.nodes[name]
        node.info = msgspec.structs.replace(node.info, prompt_limits=limits)
        rig.directory.register(node.info)


async def test_a_client_is_told_who_was_left_out(make_rig: MakeRig) -> None:
    rig = await make_rig(decode=2, dispatch=DispatchConfig(policy="least-loaded"))
    asking = {"headers": {"X-KVBaton-Route": "1"}}
    limited(rig, d0=PromptLimits(100, 39, 8, 0), d1=PromptLimits(39, 39, 8, 0))
    async with await complete(rig, **asking) as response:
        assert response.status == 200
        told = response.headers["X-KVBaton-Route"]
    assert "too-large=d1; too-large-as-target=d0,d1" in told
    assert "; pairs=0; singles=2; " in told
    async with rig.session.get("/debug/routes") as response:
        (route,) = json.loads(await response.read())["routes"]
    assert (route["too_large"], route["too_large_as_target"]) == (["d1"], ["d0", "d1"])
    limited(rig, d0=PromptLimits(100, 40, 8, 0))
    async with await complete(rig, **asking) as response:
        told = response.headers["X-KVBaton-Route"]
    assert "nodes=p0>d0; cached=0/40; pairs=1; singles=2; too-large=d1" in told


async def test_a_prompt_that_no_node_can_take_is_refused_before_anybody_is_asked(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig()
    limited(rig, p0=PromptLimits(39, 0, 0, 0), d0=PromptLimits(32, 32, 8, 0))
    async with await complete(rig) as response:
        assert response.status == 400
        error = json.loads(await response.read())["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "has 40 tokens" in error["message"]
    assert "39 is the most" in error["message"]
    assert [node.received for node in rig.nodes.values()] == [[], []]
    assert rig.dispatcher.running == {}
    limited(rig, p0=PromptLimits(40, 0, 0, 0))
    assert (await complete(rig)).status == 200
    rig.directory.pause("p0", paused=True)  # it could, later
    assert (await complete(rig)).status == 503


async def test_a_long_prompt_is_not_refused_for_being_long(make_rig: MakeRig) -> None:
    rig = await make_rig(dispatch=DispatchConfig(max_ttft=0.1))
    measured(rig)
    assert (await complete(rig)).status == 200


async def test_a_paused_node_gets_nothing_until_it_is_resumed(make_rig: MakeRig) -> None:
    rig = await make_rig(prefill=0, decode=2)
    rig.nodes["d0"].gate.clear()
    first = asyncio.create_task(complete(rig))
    await asyncio.wait_for(rig.nodes["d0"].arrived.wait(), PATIENCE_S)
    assert (await rig.session.post("/nodes/d0/pause")).status == 200
    rig.nodes["d0"].gate.set()
    assert (await first).status == 200, "what it has goes on"
    for _ in range(3):
        assert (await complete(rig)).status == 200
    assert len(rig.nodes["d0"].received) == 1
    async with rig.session.get("/nodes") as response:
        nodes = {n["node_id"]: n for n in json.loads(await response.read())["nodes"]}
    assert (nodes["d0"]["paused"], nodes["d1"]["paused"]) == (True, False)
    assert (await rig.session.post("/nodes/d0/resume")).status == 200
    assert (await complete(rig)).status == 200
    assert len(rig.nodes["d0"].received) == 2
    assert (await rig.session.post("/nodes/nobody/pause")).status == 404
    assert (await rig.session.post("/nodes/d1/drain")).status == 200
    async with rig.session.post("/nodes/d1/resume") as refused:
        assert refused.status == 409
        assert "draining" in (await refused.read()).decode()
