"""The router over real sockets, against stand-ins for nodes."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from array import array
from contextlib import aclosing
from typing import Any
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest

from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item, Output, SamplingParams
from kvbaton.messages.nodes import Members, NodeInfo
from kvbaton.router.config import DispatchConfig, MembershipTimers, RelayTimers
from kvbaton.router.dispatch import _NodeCall
from kvbaton.router.loads import NodeLoad
from kvbaton.router.node_request import NodeRequest
from kvbaton.router.policies import LeastLoaded
from kvbaton.router.relay import RequestRelay
from kvbaton.router.route import Options, Route
from kvbaton.server.network import registration_token
from tests.support.stand_in import stand_in
from tests.support.waiting import PATIENCE_S, eventually

PROMPT = (1, 2, 3, 4)
ids = itertools.count()


def expected(count: int, choice: int = 0, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return [(sum(prompt) * 31 + index * 17 + choice * 7) % 500 for index in range(count)]


def request(max_tokens: int = 4, n: int = 1, **fields: object) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    request_id = f"r{next(ids)}"  # as all endpoints make it: unique
    return AddRequest(request_id=request_id, token_ids=array("I", PROMPT), params=params, **fields)  # type: ignore[arg-type]


async def collect(rig: Any, add: AddRequest) -> list[Output]:
    async with asyncio.timeout(PATIENCE_S), aclosing(rig.dispatcher.generate(add)) as stream:
        return [output async for output in stream]


def tokens(outputs: list[Output], choice: int = 0) -> list[int]:
    return [token for o in outputs if o.choice == choice for token in o.token_ids]


async def test_both_legs_get_their_parts_at_once(make_rig: Any) -> None:
    rig = await make_rig()
    p, d = rig.nodes["p0"], rig.nodes["d0"]
    p.gate.clear()
    d.gate.clear()
    running = asyncio.create_task(collect(rig, request()))
    await asyncio.wait_for(asyncio.gather(p.arrived.wait(), d.arrived.wait()), PATIENCE_S)
    source, target = (node.received[0].transfer for node in (p, d))
    assert source is not None
    assert target is not None
    assert (source.role, target.role) == ("source", "target")
    assert source.transfer_id == target.transfer_id
    assert len(source.transfer_id) == 16
    assert (target.peer_node, target.peer) == ("p0", "tcp://127.0.0.1:7048")
    assert p.received[0].params.seed == d.received[0].params.seed is not None
    p.gate.set()
    d.gate.set()
    assert tokens(await running) == expected(4)
    await eventually(lambda: rig.loads() == {})


async def test_a_timed_request_ends_also_if_its_source_says_nothing(make_rig: Any) -> None:
    rig = await make_rig()
    rig.nodes["p0"].gate.clear()
    assert tokens(await collect(rig, request(timed=True))) == expected(4)
    await eventually(lambda: rig.nodes["p0"].cancelled == 1)


@pytest.mark.parametrize(
    "asked",
    [
        {"max_itl": 20.0},
        {"itl_slo": 20.0},
        {"max_itl": 20.0, "itl_slo": 50.0},
    ],
)
async def test_nodes_are_told_what_tokens_may_take(make_rig: Any, asked: dict[str, Any]) -> None:
    rig = await make_rig(dispatch=DispatchConfig(**asked, policy="least-loaded"))
    await collect(rig, request())
    p, d = rig.nodes["p0"], rig.nodes["d0"]
    await asyncio.wait_for(p.arrived.wait(), PATIENCE_S)  # whose part d's does not wait for
    assert [node.received[0].itl_s for node in (p, d)] == [0.02, 0.02]


async def test_a_dead_prefill_node_costs_no_request(make_rig: Any) -> None:
    rig = await make_rig()
    await rig.nodes["p0"].stop()
    assert tokens(await collect(rig, request())) == expected(4)
    await eventually(lambda: rig.states()["p0"] == "unhealthy")
    outputs = await collect(rig, request())
    assert tokens(outputs) == expected(4)
    assert rig.nodes["d0"].received[-1].transfer is None, "decode serves it alone"


async def test_a_decode_node_that_dies_mid_stream_is_replaced(
    make_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await make_rig(decode=2)
    rig.nodes["d0"].die_after = 3
    outputs = await collect(rig, request(max_tokens=6))
    assert tokens(outputs) == expected(6)
    assert [o.finish_reason for o in outputs if o.finish_reason] == ["length"]
    assert rig.nodes["d1"].received[0].resume_ids == tuple(expected(3))
    metrics = await (await rig.session.get("/metrics")).text()
    assert "kvbaton_router_retries_total 1.0" in metrics
    assert " (finished): attempt 0: target d0: " in caplog.text, "the log tells how it ended, too"


async def test_a_decode_node_that_freezes_is_replaced_once_its_probes_fail(make_rig: Any) -> None:
    rig = await make_rig(decode=2)
    d0 = rig.nodes["d0"]
    d0.gate.clear()
    running = asyncio.create_task(collect(rig, request()))
    await asyncio.wait_for(d0.arrived.wait(), PATIENCE_S)
    rig.directory.unreachable(d0.info, "frozen")
    assert tokens(await running) == expected(4)
    assert len(rig.nodes["d1"].received) == 1


async def test_without_any_decode_node_left_prefill_serves_alone(make_rig: Any) -> None:
    rig = await make_rig()
    rig.nodes["d0"].die_after = 2
    assert tokens(await collect(rig, request())) == expected(4)
    assert rig.nodes["p0"].received[-1].transfer is None


async def test_an_answer_goes_on_with_the_weights_that_it_began_with(make_rig: Any) -> None:
    rig = await make_rig(decode=2, dispatch=DispatchConfig(policy="least-loaded"))
    d0, d1 = rig.nodes["d0"], rig.nodes["d1"]
    d1.info = msgspec.structs.replace(d1.info, identity="bb")
    await rig.register("d1")
    d0.die_after = 3
    assert tokens(await collect(rig, request(max_tokens=6))) == expected(6)
    assert rig.nodes["p0"].received[-1].resume_ids == tuple(expected(3))
    assert d1.received == []


async def test_an_answer_is_not_continued_by_other_weights(make_rig: Any) -> None:
    rig = await make_rig(decode=2, dispatch=DispatchConfig(policy="least-loaded"))
    for name, node in rig.nodes.items():
        node.info = msgspec.structs.replace(node.info, identity=name)
        node.die_after = 3
        await rig.register(name)
    with pytest.raises(RequestError, match="failed") as raised:
        await collect(rig, request(max_tokens=6))
    assert (raised.value.status, raised.value.code) == (502, "node_failed")
    assert sum(bool(node.received) for node in rig.nodes.values()) == 1


@pytest.mark.parametrize("when", ["before the first token", "after it"])
async def test_leaving_cancels_both_legs(make_rig: Any, when: str) -> None:
    rig = await make_rig()
    p, d = rig.nodes["p0"], rig.nodes["d0"]
    d.gate.clear()
    p.gate.clear()
    stream = rig.dispatcher.generate(request())
    first = asyncio.create_task(anext(stream))
    await asyncio.wait_for(asyncio.gather(p.arrived.wait(), d.arrived.wait()), PATIENCE_S)
    if when == "after it":
        p.gate.set()
        await first
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await stream.aclose()
    await eventually(lambda: d.cancelled == 1)
    await eventually(lambda: p.cancelled == (when == "before the first token"))
    await eventually(lambda: rig.loads() == {})


async def test_a_request_that_prefill_finds_wrong_is_the_clients_to_mend(make_rig: Any) -> None:
    rig = await make_rig()
    p, d = rig.nodes["p0"], rig.nodes["d0"]
    d.gate.clear()
    p.status, p.body = 400, {"message": "too long", "param": "token_ids", "code": "too_long"}
    with pytest.raises(RequestError, match="too long") as caught:
        await collect(rig, request())
    assert (caught.value.status, caught.value.param) == (400, "token_ids")
    await eventually(lambda: d.cancelled == 1)


async def test_a_decode_node_whose_engine_hangs_is_given_up(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.engine.client.HUNG_S", 1.0)
    rig = await make_rig(decode=2, dispatch=DispatchConfig(RelayTimers(idle_s=0.2)))
    rig.nodes["d0"].attends.clear()
    assert tokens(await collect(rig, request())) == expected(4)
    assert (rig.nodes["d0"].received, len(rig.nodes["d1"].received)) == ([], 1)


async def test_a_request_may_wait_in_a_queue_for_longer_than_a_node_may_be_silent(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[NodeRequest] = []
    check = _NodeCall.check

    def count(call: _NodeCall) -> None:
        checked.append(call._asked)
        check(call)

    monkeypatch.setattr(_NodeCall, "check", count)
    rig = await make_rig(decode=2, dispatch=DispatchConfig(RelayTimers(idle_s=0.02)))
    p0, d0, d1 = (rig.nodes[name] for name in ("p0", "d0", "d1"))
    p0.gate.clear()
    d0.gate.clear()
    running = asyncio.create_task(collect(rig, request()))
    await eventually(lambda: len(checked) >= 6)
    assert {asked.side for asked in checked} == {"source", "target"}
    p0.gate.set()
    d0.gate.set()
    assert tokens(await running) == expected(4)
    assert (len(d0.received), d1.received) == (1, [])


async def test_tokens_that_wait_for_their_reader_become_one_output(make_rig: Any) -> None:
    rig = await make_rig()
    rig.nodes["d0"].pause = 0.005  # so that the first is read before others come
    async with aclosing(rig.dispatcher.generate(request(40, n=2))) as stream:
        first = await asyncio.wait_for(anext(stream), PATIENCE_S)
        await eventually(lambda: rig.loads() == {})  # all was said
        rest = [output async for output in stream]
    late = [output for output in (first, *rest) if len(output.token_ids) > 1]
    assert sorted((output.choice, output.finish_reason) for output in late) == [
        (0, "length"),
        (1, "length"),
    ]
    assert len(rest) <= 3, "beside these, what came with the first"
    for choice in range(2):
        assert tokens([first, *rest], choice) == expected(40, choice)


async def test_a_reader_that_is_too_slow_hurts_only_itself(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.engine.outputs.MAX_BEHIND", 20)
    rig = await make_rig()
    rig.nodes["d0"].pause = 0.005
    async with aclosing(rig.dispatcher.generate(request(100))) as stream:
        first = await asyncio.wait_for(anext(stream), PATIENCE_S)
        await eventually(lambda: rig.loads() == {})
        assert tokens(await collect(rig, request(10))) == expected(10)
        rest = await anext(stream)
        assert tokens([first, rest]) == expected(len(tokens([first, rest])))
        with pytest.raises(RequestError, match="slowly") as caught:
            await anext(stream)
    assert caught.value.status == 503
    await eventually(lambda: rig.nodes["d0"].cancelled == 1)


async def test_what_runs_on_a_node_that_leaves_goes_on(make_rig: Any) -> None:
    rig = await make_rig(membership=MembershipTimers(heartbeat_s=60.0, probe_period_s=0.02))
    d = rig.nodes["d0"]
    d.gate.clear()
    running = asyncio.create_task(collect(rig, request()))
    await asyncio.wait_for(d.arrived.wait(), PATIENCE_S)
    rig.directory.remove("d0")
    d.healthy = False
    await asyncio.sleep(0.1)  # some probes
    d.gate.set()
    assert tokens(await running) == expected(4)
    assert (d.cancelled, len(d.received)) == (0, 1)


async def test_a_second_drain_asks_again_to_move_what_could_not_be_moved(make_rig: Any) -> None:
    rig = await make_rig()
    left: list[str] = []
    rig.directory.on_leaving = left.append
    rig.directory.drain("d0")
    rig.directory.drain("d0")
    assert left == ["d0", "d0"]


async def test_a_move_that_breaks_ends_nothing_and_may_be_asked_again(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await make_rig()
    d = rig.nodes["d0"]
    d.gate.clear()
    running = asyncio.create_task(collect(rig, request()))
    await asyncio.wait_for(d.arrived.wait(), PATIENCE_S)
    monkeypatch.setattr(RequestRelay, "can_move", Mock(side_effect=RuntimeError("a bug")))
    for times in (1, 2):
        rig.dispatcher.leave("d0")
        assert caplog.text.count("could not be moved from d0") == times
    d.gate.set()
    assert tokens(await running) == expected(4)


class Breaking(LeastLoaded):
    """A policy of somebody else's, with a bug."""

    breaks = False

    def choose(self, options: Options) -> Route:
        if self.breaks:
            raise ZeroDivisionError("a bug")
        return super().choose(options)


BREAKING = DispatchConfig(policy=f"{__name__}:Breaking")


async def test_a_policy_that_breaks_leaves_nothing_behind(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig(dispatch=BREAKING)
    monkeypatch.setattr(Breaking, "breaks", True)
    with pytest.raises(ZeroDivisionError):
        await collect(rig, request())
    assert (rig.dispatcher.running, rig.dispatcher.totals().failed) == ({}, 1)
    monkeypatch.setattr(Breaking, "breaks", False)
    assert tokens(await collect(rig, request())) == expected(4)


async def test_a_policy_that_breaks_costs_no_other_request(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig(dispatch=BREAKING)
    d = rig.nodes["d0"]
    d.pause = 0.01
    running = asyncio.create_task(collect(rig, request(40)))
    await asyncio.wait_for(d.arrived.wait(), PATIENCE_S)
    d.gate.clear()
    refused = asyncio.create_task(collect(rig, request()))
    await eventually(lambda: len(rig.dispatcher.running) == 2)
    monkeypatch.setattr(Breaking, "breaks", True)
    d.status = 500
    d.gate.set()
    with pytest.raises(RequestError) as caught:
        await refused
    assert (caught.value.status, caught.value.code) == (502, "node_failed")
    assert not running.done(), "else nothing was seen"
    assert tokens(await running) == expected(40)
    assert (d.cancelled, len(d.received)) == (0, 2)


async def test_nodes_are_looked_after_also_when_that_failed_once(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await make_rig()
    membership = rig.directory.membership
    tick, fails = membership.tick, iter([True])

    def fails_once(now: float) -> Any:
        if next(fails, False):
            raise RuntimeError("a bug")
        return tick(now)

    monkeypatch.setattr(membership, "tick", fails_once)
    await eventually(lambda: "a bug" in caplog.text)
    rig.nodes["d0"].healthy = False
    await eventually(lambda: rig.states()["d0"] == "unhealthy")


async def test_an_engine_that_dies_is_noticed_at_once_and_found_again(make_rig: Any) -> None:
    slow = MembershipTimers(heartbeat_s=60.0, probe_period_s=30.0, failures=100)
    rig = await make_rig(membership=slow)
    d = rig.nodes["d0"]
    d.engine.die()
    await eventually(lambda: rig.states()["d0"] == "unhealthy", 20.0)
    assert tokens(await collect(rig, request())) == expected(4), "the prefill node serves alone"
    d.offer_socket(rig.sockets)
    d.info = msgspec.structs.replace(d.info, generation="2")
    await rig.register("d0")
    assert tokens(await collect(rig, request())) == expected(4)
    assert len(d.received) == 1


async def test_two_living_nodes_with_one_id_do_not_displace_each_other(make_rig: Any) -> None:
    rig = await make_rig()
    d = rig.nodes["d0"]
    d.gate.clear()
    running = asyncio.create_task(collect(rig, request()))
    await asyncio.wait_for(d.arrived.wait(), PATIENCE_S)
    other = stand_in("decode", "d0")
    await other.start()
    other.info = msgspec.structs.replace(other.info, generation="2")
    try:
        for _ in range(3):
            status, answer = await post_node(rig, other.info)
            assert (status, json.loads(answer)["error"]["code"]) == (503, "node_id_in_use")
            assert d.info.url in json.loads(answer)["error"]["message"]
            assert (await post_node(rig, d.info))[0] == 200
        d.gate.set()
        assert tokens(await running) == expected(4)
        assert (d.cancelled, len(d.received)) == (0, 1)
        assert rig.states()["d0"] == "ready"
    finally:
        await other.stop()


async def test_a_node_whose_socket_is_not_here_says_why_it_is_not_used(make_rig: Any) -> None:
    rig = await make_rig(decode=0)
    d = stand_in("decode", "d0")
    d.info = msgspec.structs.replace(d.info, engine_address="ipc:///nowhere/at/all")
    await d.start()
    try:
        assert (await post_node(rig, d.info))[0] == 200
        failures = rig.directory.membership.timers.failures

        async def shown() -> str:
            listed = await (await rig.session.get("/nodes")).json()
            return str(next(n["reason"] for n in listed["nodes"] if n["node_id"] == "d0"))

        await eventually(lambda: rig.directory.membership.members["d0"].failed_probes >= failures)
        assert "/nowhere/at/all" in await shown()
        assert "--cluster-key" in await shown()
        assert tokens(await collect(rig, request())) == expected(4), "the prefill node serves alone"
    finally:
        await d.stop()


async def test_load_spreads(make_rig: Any) -> None:
    rig = await make_rig(prefill=2, decode=2)
    for node in rig.nodes.values():
        node.gate.clear()
    running = [asyncio.create_task(collect(rig, request())) for _ in range(4)]
    await eventually(lambda: sum(len(n.received) for n in rig.nodes.values()) == 8)
    assert [len(node.received) for node in rig.nodes.values()] == [2, 2, 2, 2]
    for node in rig.nodes.values():
        node.gate.set()
    for task in running:
        assert tokens(await task) == expected(4)


# --- items ---


def items(count: int = 1, length: int = 100) -> tuple[Item, ...]:
    return tuple(
        Item(start=i, length=length, digest=bytes([i]) * 32, grid=(1, 2, 2), data=b"\x89PNG")
        for i in range(count)
    )


async def test_all_legs_get_their_parts_of_an_item_at_once(make_rig: Any) -> None:
    rig = await make_rig(encode=1)
    p, d, e = (rig.nodes[name] for name in ("p0", "d0", "e0"))
    for node in (p, d, e):
        node.gate.clear()
    running = asyncio.create_task(collect(rig, request(items=items())))
    await asyncio.wait_for(asyncio.gather(*(n.arrived.wait() for n in (p, d, e))), PATIENCE_S)
    assert rig.loads()["e0"] == NodeLoad(rows=100)
    assert rig.loads()["p0"] == NodeLoad(prompt_tokens=4)
    [item] = p.received[0].items
    assert (item.transfer.peer, item.transfer.peer_node) == ("tcp://127.0.0.1:8048", "e0")
    told = e.received[0].transfer
    assert (told.transfer_id, told.attempt) == (item.transfer.transfer_id, 0)
    assert e.received[0].items == items()
    assert d.received[0].items == items()
    assert told.transfer_id != p.received[0].transfer.transfer_id
    for node in (p, d, e):
        node.gate.set()
    assert tokens(await running) == expected(4)
    await eventually(lambda: rig.loads() == {})
    metrics = await (await rig.session.get("/metrics")).text()
    assert 'kvbaton_router_items_total{where="encoder"} 1.0' in metrics
    assert 'kvbaton_router_node_requests_total{node="e0",part="encoder"} 1.0' in metrics


async def test_small_items_stay_and_count_as_load_where_they_stay(make_rig: Any) -> None:
    rig = await make_rig(encode=1)
    for node_id in ("p0", "d0"):  # the target alone would end it
        rig.nodes[node_id].gate.clear()
    running = asyncio.create_task(collect(rig, request(items=(*items(1, 9), *items(1, 9)))))
    await asyncio.wait_for(rig.nodes["p0"].arrived.wait(), PATIENCE_S)
    assert rig.loads()["p0"] == NodeLoad(prompt_tokens=4, rows=9), "equal items are encoded once"
    for node_id in ("p0", "d0"):
        rig.nodes[node_id].gate.set()
    assert tokens(await running) == expected(4)
    assert rig.nodes["e0"].received == []
    await eventually(lambda: rig.loads() == {})
    metrics = await (await rig.session.get("/metrics")).text()
    assert 'kvbaton_router_items_total{where="prefill"} 1.0' in metrics


@pytest.mark.parametrize("how", ["gone", "500", "dies", "lost"])
async def test_an_encoder_that_fails_costs_no_request_and_no_time(make_rig: Any, how: str) -> None:
    rig = await make_rig(encode=2, dispatch=DispatchConfig(min_encode_rows=0))
    for node in rig.nodes.values():
        node.gate.clear()
    running = asyncio.create_task(collect(rig, request(items=items())))
    await asyncio.wait_for(rig.nodes["p0"].arrived.wait(), PATIENCE_S)
    # Nobody answers until the encoder has failed, so no token can come before that.
    used = rig.nodes[rig.nodes["p0"].received[0].items[0].transfer.peer_node]
    if how == "gone":
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await used.stop()
        running = asyncio.create_task(collect(rig, request(items=items())))
    else:
        await asyncio.wait_for(used.arrived.wait(), PATIENCE_S)
    if how == "500":
        used.status = 500
        used.gate.set()
    elif how == "dies":
        used.die_after = 0
        used.gate.set()
    elif how == "lost":
        rig.directory.unreachable(used.info, "frozen")
    p = rig.nodes["p0"]
    await eventually(lambda: p.received[-1].items[0].transfer.peer_node != used.info.node_id)
    for node in rig.nodes.values():
        node.gate.set()
    assert tokens(await running) == expected(4)
    if how == "gone":
        await eventually(lambda: rig.states()[used.info.node_id] == "unhealthy")


async def test_a_request_outlives_any_number_of_nodes_that_are_told_to_stop(make_rig: Any) -> None:
    rig = await make_rig(prefill=0, decode=5)
    for node in rig.nodes.values():
        node.gate.clear()
    running = asyncio.create_task(collect(rig, request()))
    for _ in range(4):
        arrived = [asyncio.create_task(n.arrived.wait()) for n in rig.nodes.values()]
        await asyncio.wait(arrived, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in arrived:
            task.cancel()
        (name,) = [name for name, node in rig.nodes.items() if node.arrived.is_set()]
        rig.directory.drain(name)
        await rig.nodes.pop(name).stop()
    (last,) = rig.nodes.values()
    last.gate.set()
    assert tokens(await running) == expected(4)


async def test_encoder_nodes_alone_serve_nothing_but_are_shown(make_rig: Any) -> None:
    rig = await make_rig(prefill=0, decode=0, encode=1)
    assert (await rig.session.get("/health")).status == 503
    status, body, response = await complete(rig)
    assert (status, body["error"]["code"]) == (503, "no_node_ready")
    assert "Retry-After" in response.headers
    other = await make_rig(encode=1)
    listed = await (await other.session.get("/nodes")).json()
    assert listed["encoder_pairs"] == [["e0", "p0"], ["e0", "d0"]]
    assert ">encode</td>" in await (await other.session.get("/")).text()


# --- through the endpoint ---


async def complete(rig: Any, **fields: object) -> tuple[int, Any, aiohttp.ClientResponse]:
    body = {"model": "tiny", "prompt": list(PROMPT), "max_tokens": 4, **fields}
    async with rig.session.post("/v1/completions", json=body) as response:
        if not fields.get("stream"):
            return response.status, await response.json(), response
        return response.status, {"events": await read_stream(response)}, response


async def read_stream(response: aiohttp.ClientResponse) -> list[object]:
    lines = [line async for line in response.content if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"
    return [json.loads(line[6:]) for line in lines[:-1]]


def text(ids: list[int]) -> str:
    return " ".join(f"t{i}" for i in ids)


async def test_a_completion_is_whole_or_streamed(make_rig: Any) -> None:
    rig = await make_rig()
    rig.nodes["d0"].pause = 0.01  # so that the prefill node is heard
    status, body, _ = await complete(rig)
    assert status == 200
    assert body["choices"][0]["text"].strip() == text(expected(4))
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    _, streamed, _ = await complete(rig, stream=True)
    pieces = [c["text"] for event in streamed["events"] for c in event["choices"]]
    assert "".join(pieces).strip() == text(expected(4))


async def test_a_router_that_ends_tells_whom_it_does_not_serve_any_more(make_rig: Any) -> None:
    """Streams were cut off and others got no answer, after twice the time that they had."""
    rig = await make_rig()
    p, d = rig.nodes["p0"], rig.nodes["d0"]
    p.pause = d.pause = 0.1
    body = {"model": "tiny", "prompt": list(PROMPT), "max_tokens": 300}
    whole = asyncio.create_task(complete(rig, max_tokens=300))
    async with rig.session.post("/v1/completions", json={**body, "stream": True}) as stream:
        assert await stream.content.readline()
        await eventually(lambda: len(rig.dispatcher.running) == 2)
        await rig.runner.cleanup()
        last = json.loads((await stream.content.read()).split(b"data: ")[-1])
    status, told, _ = await whole
    assert status == 503
    assert told["error"]["code"] == last["error"]["code"] == "shutting_down"
    assert rig.loads() == {}


async def test_the_page_and_the_metrics_show_the_nodes(make_rig: Any) -> None:
    rig = await make_rig()
    await complete(rig)
    page = await (await rig.session.get("/")).text()
    assert re.search(r"<th scope=.row.[^>]*>p0<", page)
    assert ">ready</span></td>" in page
    metrics = await (await rig.session.get("/metrics")).text()
    assert 'kvbaton_router_node_requests_total{node="d0",part="target"} 1.0' in metrics
    assert 'kvbaton_router_requests_total{outcome="finished"} 1.0' in metrics
    assert "kvbaton_router_first_token_seconds_count 1.0" in metrics
    assert 'kvbaton_router_nodes{node="d0",role="decode",state="ready"} 1.0' in metrics
    assert (await rig.session.get("/health")).status == 200
    assert (await rig.session.post("/ping")).status == 200
    assert await (await rig.session.get("/load")).json() == {"server_load": 0}


# --- membership over HTTP ---


async def post_node(rig: Any, info: NodeInfo, **headers: str) -> tuple[int, bytes]:
    body = msgspec.json.encode(info)
    async with rig.session.post("/nodes", data=body, headers=headers) as response:
        return response.status, await response.read()


async def test_nodes_come_drain_and_go(make_rig: Any) -> None:
    rig = await make_rig()
    status, answer = await post_node(rig, rig.nodes["d0"].info)
    assert status == 200
    members = msgspec.json.decode(answer, type=Members)
    assert members.control_addresses == (rig.nodes["p0"].info.control_address,)
    listed = await (await rig.session.get("/nodes")).json()
    assert [(n["node_id"], n["state"]) for n in listed["nodes"]] == [
        ("d0", "ready"),
        ("p0", "ready"),
    ]
    assert listed["pairs"] == [["p0", "d0"]]
    drained = await rig.session.post("/nodes/d0/drain")
    assert await drained.json() == {"draining": "d0", "requests": 0}
    await complete(rig)
    assert rig.nodes["d0"].received == []
    assert (await rig.session.delete("/nodes/d0")).status == 200
    assert (await post_node(rig, rig.nodes["d0"].info))[0] == 410
    assert (await rig.session.delete("/nodes/d0")).status == 404
    assert list(rig.states()) == ["p0"]


async def test_a_silent_node_expires(make_rig: Any) -> None:
    timers = MembershipTimers(heartbeat_s=0.02, probe_period_s=0.02, forget_s=0.3)
    rig = await make_rig(prefill=0, decode=0, membership=timers)
    other = await make_rig(prefill=0)
    assert (await post_node(rig, other.nodes["d0"].info))[0] == 200
    await eventually(lambda: rig.states().get("d0") == "unhealthy")
    await eventually(lambda: rig.states() == {})


async def test_static_nodes_are_found_and_found_again(make_rig: Any) -> None:
    other = await make_rig()
    urls = {name: node.info.url for name, node in other.nodes.items()}
    rig = await make_rig(prefill=0, decode=0, static=(urls["p0"], urls["d0"]))
    await eventually(lambda: set(rig.states().items()) == {("p0", "ready"), ("d0", "ready")})
    other.nodes["d0"].pause = 0.01  # so that the prefill node is not called off unheard
    assert tokens(await collect(rig, request())) == expected(4)
    assert other.nodes["p0"].received


async def test_registration_needs_the_token_of_the_cluster(make_rig: Any) -> None:
    rig = await make_rig(prefill=0, decode=0, cluster_key="secret")
    other = await make_rig(prefill=0)
    info = other.nodes["d0"].info
    assert (await post_node(rig, info))[0] == 401
    assert (await post_node(rig, info, Authorization="Bearer secret"))[0] == 401
    token = registration_token("secret")
    assert "secret" not in token
    assert (await post_node(rig, info, Authorization=f"Bearer {token}"))[0] == 200


async def test_a_malformed_registration_names_the_field(make_rig: Any) -> None:
    rig = await make_rig(prefill=0, decode=0)
    async with rig.session.post("/nodes", json={"node_id": 3}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "node_id"
