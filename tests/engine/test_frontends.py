"""A core and its frontends over the real sockets: who may ask what, who gets what, who is gone."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvbaton.engine.client import EngineClient
from kvbaton.engine.frontends import EngineEndpoints
from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    Command,
    Connect,
    Disconnected,
    FromCore,
    Output,
    Ready,
    Rejected,
    SamplingParams,
    Shutdown,
    encode_to_core,
)
from tests.support.scripted_core import ScriptedCore, scripted_core
from tests.support.waiting import PATIENCE_S, eventually, promised


@pytest.fixture
def core(tmp_path: Path) -> Iterator[ScriptedCore]:
    """A core that lets frontends in over Unix sockets."""
    with scripted_core(EngineEndpoints(local=f"ipc://{tmp_path}/e", host="127.0.0.1")) as core:
        yield core


def request(request_id: str = "r", **params: Any) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        token_ids=array("I", (1, 2, 3)),
        params=SamplingParams(**{"max_tokens": 4, **params}),
    )


async def tokens_of(client: EngineClient, asked: AddRequest) -> list[int]:
    """All tokens of the only choice."""
    found: list[int] = []
    async with aclosing(client.generate(asked)) as outputs:
        async for output in outputs:
            assert output.request_id == asked.request_id
            assert output.index == len(found)
            found += output.token_ids
    return found


@asynccontextmanager
async def connected(core: ScriptedCore, **options: Any) -> AsyncIterator[EngineClient]:
    client = await EngineClient.connect(core.address, **options)
    try:
        yield client
    finally:
        await client.close()


class Junk:
    """A frontend that says whatever it likes."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    async def say(self, *frames: Any) -> None:
        encoded = [f if isinstance(f, bytes) else encode_to_core(f) for f in frames]
        await self.socket.send_multipart(encoded)

    async def hear(self, kind: type) -> Any:
        """The next message of a kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message: FromCore = msgspec.msgpack.decode(await self.socket.recv(), type=FromCore)
                if isinstance(message, kind):
                    return message


@pytest.fixture
async def junk(core: ScriptedCore) -> AsyncIterator[Junk]:
    junk = Junk(core.address)
    yield junk
    junk.socket.close()


async def test_frontends_get_their_own_tokens(core: ScriptedCore) -> None:
    async with connected(core) as one, connected(core) as two:
        assert one.ready.num_blocks == 8
        assert one.ready.engine_address == core.address
        found = await asyncio.gather(
            *(tokens_of(client, request(f"r{i}")) for client in (one, two) for i in range(20))
        )
    assert found == [[0, 1, 2, 3]] * 40


async def test_two_frontends_may_use_one_request_id(core: ScriptedCore) -> None:
    async with connected(core) as one, connected(core) as two:
        core.paused.set()
        both = [
            asyncio.create_task(tokens_of(one, request("same", max_tokens=3))),
            asyncio.create_task(tokens_of(two, request("same", max_tokens=5))),
        ]
        await eventually(lambda: len(core.live) == 2)
        core.paused.clear()
        assert await asyncio.gather(*both) == [[0, 1, 2], [0, 1, 2, 3, 4]]


async def test_one_frontend_may_not_use_a_request_id_twice(core: ScriptedCore, junk: Junk) -> None:
    core.paused.set()
    await junk.say(Connect())
    for _ in range(2):
        await junk.say(request("twice"))
    rejected = await junk.hear(Rejected)
    assert (rejected.request_id, rejected.status) == ("twice", 409)
    assert list(core.live) == ["twice"]


async def test_leaving_a_stream_aborts_its_request_alone(core: ScriptedCore) -> None:
    async with connected(core) as one, connected(core) as two:
        core.paused.set()
        mine = asyncio.create_task(tokens_of(one, request("same", max_tokens=1000)))
        other = asyncio.create_task(tokens_of(two, request("same", max_tokens=3)))
        await eventually(lambda: len(core.live) == 2)
        mine.cancel()
        await eventually(lambda: len(core.live) == 1)
        core.paused.clear()
        assert await other == [0, 1, 2]


async def test_refusals_are_the_requests_alone(core: ScriptedCore) -> None:
    core.refuse = lambda asked: "no thanks" if asked.request_id == "bad" else None
    async with connected(core) as client:
        with pytest.raises(RequestError, match="no thanks"):
            await tokens_of(client, request("bad"))
        assert await tokens_of(client, request("good")) == [0, 1, 2, 3]


async def test_a_ping_is_answered(core: ScriptedCore) -> None:
    async with connected(core) as client:
        await client.ping(PATIENCE_S)


async def test_junk_foreign_aborts_and_commands_do_nothing(core: ScriptedCore, junk: Junk) -> None:
    async with connected(core) as client:
        core.paused.set()
        task = asyncio.create_task(tokens_of(client, request("r")))
        await eventually(lambda: core.live)
        before = len(core.seen)
        await junk.say(AbortRequest(request_id="r"))  # not even connected
        await junk.say(Connect())
        await junk.hear(Ready)
        hostile: list[tuple[Any, ...]] = [
            (b"",),
            (b"\xc1",),
            (b"\x91" * 5000,),
            (b"a", b"b"),
            ({"type": "nothing we know"},),
            ({"type": "abort"},),
            (AbortRequest(request_id="r"),),
            (Shutdown(grace_s=0.0),),
            *((Command(command_id=1, name=name),) for name in ("drain", "reset_prefix_cache")),
            (Command(command_id=1, name="members", argument=["tcp://10.0.0.1:1"]),),
        ]
        for frames in hostile:
            await junk.say(*frames)
        await junk.say(request("mine", max_tokens=1))  # comes after all of those
        await eventually(lambda: "mine" in core.live)
        assert core.seen[before:] == [request("mine", max_tokens=1)]
        dropped = core.counters()["kvbaton_frontend_messages_dropped_total"]
        assert dropped == len(hostile) - 1 + 1, "a foreign abort is none, an early one is"
        core.paused.clear()
        assert await task == [0, 1, 2, 3]


async def test_a_request_with_unknown_fields_is_refused_by_name(
    core: ScriptedCore, junk: Junk
) -> None:
    """A newer frontend asks for something that this engine would have to ignore."""
    await junk.say(Connect())
    asked = msgspec.msgpack.decode(encode_to_core(request("new")))
    asked["params"]["dry_multiplier"] = 0.8
    await junk.say(asked)
    rejected = await junk.hear(Rejected)
    assert rejected.request_id == "new"
    assert "dry_multiplier" in rejected.message


@pytest.mark.parametrize("versions", [(4, 5), (1, 2)])
async def test_versions_without_overlap_are_refused(
    core: ScriptedCore, junk: Junk, versions: tuple[int, int]
) -> None:
    await junk.say(Connect(min_version=versions[0], version=versions[1]))
    refused = await junk.hear(Disconnected)
    assert "versions 3 to 3" in refused.reason
    await junk.say(request())
    async with connected(core) as client:
        await client.ping(PATIENCE_S)
    assert not core.seen


async def test_a_lost_frontend_loses_its_requests(core: ScriptedCore) -> None:
    core.paused.set()
    async with connected(core) as client:
        other = asyncio.create_task(tokens_of(client, request("other")))
        gone = Junk(core.address)
        await gone.say(Connect())
        for i in range(3):
            await gone.say(request(f"gone{i}"))
        await eventually(lambda: len(core.live) == 4)
        gone.socket.close()
        await eventually(lambda: list(core.live) == ["other"], seconds=promised(2.0))
        assert core.counters()['kvbaton_frontends_lost_total{reason="gone"}'] == 1
        core.paused.clear()
        assert await other == [0, 1, 2, 3]


async def test_a_lost_core_ends_the_requests_at_once(tmp_path: Path) -> None:
    with scripted_core(EngineEndpoints(local=f"ipc://{tmp_path}/e", host="127.0.0.1")) as core:
        core.paused.set()
        async with connected(core) as client:
            task = asyncio.create_task(tokens_of(client, request()))
            await eventually(lambda: core.live)
            core.stop()
            async with asyncio.timeout(promised(2.0)):
                with pytest.raises(EngineDeadError, match="lost"):
                    await task
            assert client.dead is not None
            assert client.died.is_set()
            with pytest.raises(EngineDeadError):
                await tokens_of(client, request("late"))


async def test_a_frontend_that_does_not_read_is_dropped_alone(
    core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.engine.frontends.MAX_BACKLOG_BYTES", 1 << 16)
    deaf: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    deaf.linger = 0
    deaf.rcvhwm = 1
    deaf.rcvbuf = 4096
    deaf.connect(core.address)
    deaf.send(encode_to_core(Connect()))
    for i in range(50):
        deaf.send(encode_to_core(request(f"d{i}", max_tokens=10**6)))
    async with connected(core) as client:
        await eventually(lambda: len(core.live) == 50)
        await eventually(lambda: not core.live)
        lost = 'kvbaton_frontends_lost_total{reason="did_not_read"}'
        assert core.counters()[lost] == 1
        assert await tokens_of(client, request()) == [0, 1, 2, 3]
        reader = zmq.asyncio.Socket.from_socket(deaf)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = msgspec.msgpack.decode(await reader.recv(), type=FromCore)
                if isinstance(message, Disconnected):
                    break
        assert "did not read" in message.reason
    deaf.close()


async def test_outputs_merge_while_the_reader_is_behind(core: ScriptedCore) -> None:
    quick_s, core.step_s = core.step_s, 0.5  # until the first one has been read
    async with connected(core) as client:
        stream = client.generate(request(max_tokens=1000, n=2))
        first = await anext(stream)
        assert first.token_ids == (0,), "nobody was behind"
        core.step_s = quick_s
        await eventually(lambda: not core.live)
        await client.ping(PATIENCE_S)  # all before it has come
        rest: list[Output] = [output async for output in stream]
    assert len(rest) <= 3
    found: dict[int, list[int]] = {0: [], 1: []}
    for output in (first, *rest):
        assert output.index == len(found[output.choice])
        found[output.choice] += output.token_ids
    assert found == {0: list(range(1000)), 1: list(range(1000))}
    assert [output.finish_reason for output in rest[-2:]] == ["length", "length"]


async def test_a_reader_too_far_behind_loses_its_request_alone(
    core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.engine.outputs.MAX_BEHIND", 100)
    async with connected(core) as client:
        slow = client.generate(request("slow", max_tokens=10**6))
        await anext(slow)
        assert await tokens_of(client, request("quick", max_tokens=200)) == list(range(200))
        with pytest.raises(RequestError, match="slowly") as caught:
            async for _ in slow:
                pass
        assert caught.value.code == "too_slow"
        await eventually(lambda: not core.live)


async def test_only_holders_of_the_cluster_key_are_let_in(tmp_path: Path) -> None:
    endpoints = EngineEndpoints(local=f"ipc://{tmp_path}/e", host="127.0.0.1", cluster_key="key")
    with scripted_core(endpoints) as core:
        assert core.address.startswith("tcp://127.0.0.1:")
        for wrong in (None, "other"):
            with pytest.raises(EngineDeadError, match="cluster keys"):
                await EngineClient.connect(core.address, cluster_key=wrong, timeout_s=0.5)
        async with connected(core, cluster_key="key") as client:
            assert await tokens_of(client, request()) == [0, 1, 2, 3]
        assert all(isinstance(message, AddRequest) for message in core.seen)


async def test_a_client_finds_a_core_that_comes_later(tmp_path: Path) -> None:
    endpoints = EngineEndpoints(local=f"ipc://{tmp_path}/e", host="127.0.0.1")
    early = asyncio.create_task(EngineClient.connect(f"ipc://{tmp_path}/e-remote"))
    await asyncio.sleep(0)
    with scripted_core(endpoints):
        client = await early
        assert await tokens_of(client, request()) == [0, 1, 2, 3]
        await client.close()


async def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match="no engine answered"):
        await EngineClient.connect(f"ipc://{tmp_path}/nobody", timeout_s=0.2)
    with pytest.raises(ValueError, match="connect"):
        await EngineClient.connect("nonsense", timeout_s=0.2)


async def test_a_remote_frontend_hears_of_an_idle_core(core: ScriptedCore) -> None:
    async with connected(core) as client:
        heard_at = client.heard_at
        await eventually(lambda: client.heard_at > heard_at)


async def test_what_remote_frontends_ask_is_timed(core: ScriptedCore) -> None:
    async with connected(core) as client:
        await asyncio.gather(*(tokens_of(client, request(f"r{i}")) for i in range(5)))
    histograms = core.frontends.completed(_no_metrics()).histograms
    counts = {name: sum(found.counts) for name, found in histograms.items()}
    assert counts == {
        "kvbaton_time_to_first_token_seconds": 5,
        "kvbaton_inter_token_latency_seconds": 15,
        "kvbaton_e2e_request_latency_seconds": 5,
    }
    counters = core.counters()
    assert counters['kvbaton_frontend_requests_total{frontend="remote"}'] == 5
    assert counters['kvbaton_frontend_tokens_total{frontend="remote"}'] == 20


def _no_metrics() -> Any:
    from kvbaton.messages.engine import Metrics

    return Metrics(counters={}, gauges={})


async def test_a_receiver_is_told_once_what_came_at_once_and_of_a_failure_last(
    core: ScriptedCore,
) -> None:
    told: list[Output | None] = []

    class Receiver:
        def put(self, output: Output) -> None:
            told.append(output)

        def end(self, error: Exception | None) -> None:
            told.append(None)

        def flush(self) -> None: ...

    def answer(asked: AddRequest) -> tuple[Output, ...]:
        told = [(0, 0, None), (1, 0, None), (0, 1, None), (1, 1, None), (0, 2, "length")]
        return tuple(
            Output(
                request_id=asked.request_id,
                choice=choice,
                index=index,
                token_ids=() if reason == "error" else (index,),
                finish_reason=reason,
            )
            for choice, index, reason in [*told, (1, 2, "error")]
        )

    core.answer = answer
    async with connected(core) as client:
        client.submit(request(n=2), Receiver())
        await eventually(lambda: None in told)
    outputs = [(o.choice, o.index, o.token_ids, o.finish_reason) for o in told[:-1] if o]
    assert outputs == [(0, 0, (0, 1, 2), "length"), (1, 0, (0, 1), None), (1, 2, (), "error")]
    assert told[-1] is None
