"""What keeps a cluster going."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import msgspec
import pytest
from aiohttp import web
from typing_extensions import override

from kvbaton.cluster import launcher
from kvbaton.cluster.config import ClusterConfig
from kvbaton.cluster.launcher import Cluster, run
from kvbaton.cluster.placement import NodeProcess, Placement
from kvbaton.engine.config import EngineConfig
from kvbaton.errors import ConfigError
from kvbaton.messages.nodes import NodesView, NodeView
from kvbaton.router.config import RoutingPolicy
from tests.support.listening import listen
from tests.support.waiting import eventually


class Process(NodeProcess):
    """One that ends when it is told to."""

    def __init__(self) -> None:
        super().__init__("any-0")
        self.ended = asyncio.Event()
        self.exited = asyncio.create_task(self._run())

    async def _run(self) -> str:
        await self.ended.wait()
        return "ended with status 1"

    @override
    async def stop(self, grace_s: float) -> None:
        self.kill()

    @override
    def kill(self) -> None:
        self.ended.set()


class FullMachine(Placement):
    """Has no room for another process the first time that it is asked."""

    address = "127.0.0.1"
    asked = 0

    @override
    async def open(self) -> None: ...

    @override
    async def start(self, index: int, router_url: str) -> NodeProcess:
        self.asked += 1
        if self.asked == 1:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return Process()

    @override
    def close(self) -> None: ...


def test_two_nodes_are_started_unless_others_are_named() -> None:
    def roles(**counts: Any) -> list[str]:
        config = ClusterConfig(engine=EngineConfig(model="m"), **counts)
        return [role for role, _ in config.node_names]

    assert roles() == ["any", "any"]
    assert roles(num_encode=1) == ["any", "any", "encode"]
    assert roles(num_prefill=1, num_decode=1) == ["prefill", "decode"]
    assert roles(num_any=0, num_prefill=1, num_decode=1) == ["prefill", "decode"]
    assert roles(num_any=1) == ["any"]
    for encoders in (0, 1):
        with pytest.raises(ConfigError, match="--any: give 1 or more, or --prefill"):
            roles(num_any=0, num_encode=encoders)


@pytest.mark.parametrize("status", [503, 200, 500])
async def test_a_node_that_only_a_restart_helps_is_killed(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = 0

    async def live(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=status, text="the engine has not been heard of")

    async def nodes(request: web.Request) -> web.Response:
        view = [
            NodeView(
                node_id=name, generation="1", role="any", url=cluster.url, state=state, reason="",
                paused=False, model="m", control_address=None, requests=0, prompt_tokens=0,
                item_rows=0,
            )
            for name, state in (("any-0", "unhealthy"), ("other", "unhealthy"), ("x", "ready"))
        ]  # fmt: skip
        body = msgspec.json.encode(NodesView(nodes=view, pairs=[], encoder_pairs=[]))
        return web.Response(body=body)

    monkeypatch.setattr(launcher, "LIVE_S", 0.01)
    app = web.Application()
    app.router.add_get("/live", live)
    app.router.add_get("/nodes", nodes)
    runner, _ = await listen(app, "127.0.0.1", 0, grace_s=0.1)
    cluster = Cluster(FullMachine(ClusterConfig(engine=EngineConfig(model="m"))))
    cluster.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    cluster.nodes.append(Process())
    killing = asyncio.create_task(cluster._kill_broken())
    most = 2 * launcher.LIVE_FAILURES
    await eventually(lambda: killing.done() or asked > most)
    assert not killing.done()
    killing.cancel()
    await asyncio.gather(killing, return_exceptions=True)
    process = cluster.nodes[0]
    assert isinstance(process, Process)
    assert process.ended.is_set() == (status == 503)
    told = "any-0: killed, as it is broken: the engine has not been heard of"
    assert (told in capsys.readouterr().err) == (status == 503)
    await cluster.shutdown()
    await runner.cleanup()


async def test_a_node_for_which_there_is_no_room_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "PAUSE_S", 0.01)
    cluster = Cluster(FullMachine(ClusterConfig(engine=EngineConfig(model="m"))))
    first = Process()
    cluster.nodes.append(first)
    keeping = asyncio.create_task(cluster._keep(0))
    first.kill()
    await eventually(lambda: keeping.done() or cluster.nodes != [first])
    assert not keeping.done()
    assert "any-0 can't be started, trying on: " in capsys.readouterr().err
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await cluster.shutdown()


def test_a_policy_that_there_is_not_is_found_before_anything_starts() -> None:
    routing = RoutingPolicy(policy="nope")
    with pytest.raises(ConfigError, match="unknown policy 'nope'; known are cost, "):
        run(ClusterConfig(engine=EngineConfig(model="m"), routing=routing))
