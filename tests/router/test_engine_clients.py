"""Connections to engines that die at an awkward moment."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engine.client import EngineClient
from kvbaton.engine.frontends import EngineEndpoints, FrontendServer
from kvbaton.errors import EngineDeadError
from kvbaton.messages.engine import FromCore, Ready
from kvbaton.router.nodes import EngineClients
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.types import NodeId
from tests.router.test_pairing import member


class Dying:
    """An engine that is gone as soon as it has been connected to."""

    def __init__(self) -> None:
        self.died, self.dead, self.idle, self.closed = asyncio.Event(), "gone", True, False
        self.died.set()

    def watch_blocks(self, on_blocks: object) -> None:
        raise EngineDeadError("gone")

    async def close(self) -> None:
        self.closed = True


async def test_an_engine_that_dies_before_it_is_watched_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dying, died = Dying(), list[str]()

    async def connect(*args: Any, **kwargs: Any) -> Dying:
        return dying

    monkeypatch.setattr(EngineClient, "connect", connect)
    clients = EngineClients("key", lambda node, reason: died.append(reason), PrefixIndex())
    with pytest.raises(EngineDeadError):
        await clients.reach(member("p0", "prefill", engine_address="tcp://127.0.0.1:1").info)
    await asyncio.sleep(0)
    assert died == ["its engine: gone"]
    await clients.close()
    assert dying.closed


@pytest.mark.parametrize("spare", range(3))
async def test_a_process_with_too_many_open_files_says_so(tmp_path: Path, spare: int) -> None:
    """It tries again later: whoever connects must go on."""
    address = f"ipc://{tmp_path}/nobody"
    with pytest.raises(EngineDeadError):  # ZMQ opens some that stay
        await EngineClient.connect(address, timeout_s=0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + spare, hard))
    try:
        with pytest.raises(EngineDeadError):
            await EngineClient.connect(address, timeout_s=0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_connection_that_is_cancelled_as_it_is_made_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FrontendServer(EngineEndpoints(local=f"ipc://{tmp_path}/engine"))
    server.send(
        Ready(node=NodeId("d0", bytes(16)), control_address=None, num_blocks=8, block_size=16,
              max_model_len=400, eos_token_ids=())
    )  # fmt: skip
    take = EngineClient._take

    def take_and_cancel(client: EngineClient, message: FromCore) -> None:
        take(client, message)
        connecting.cancel()

    monkeypatch.setattr(EngineClient, "_take", take_and_cancel)
    connecting = asyncio.create_task(EngineClient.connect(f"ipc://{tmp_path}/engine"))
    wake = os.eventfd(0)
    try:
        while not connecting.done():
            list(server.receive(0.0, wake))
            await asyncio.sleep(0.001)
        assert connecting.cancelled()
    finally:
        server.close()
        os.close(wake)
