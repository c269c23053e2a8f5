"""What keeps a cluster going."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
from typing_extensions import override

from kvbaton.cluster import launcher
from kvbaton.cluster.config import ClusterConfig
from kvbaton.cluster.launcher import Cluster
from kvbaton.cluster.placement import NodeProcess, Placement
from kvbaton.engine.config import EngineConfig
from kvbaton.errors import ConfigError
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
