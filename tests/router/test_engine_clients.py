"""Connections to engines that die at an awkward moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvbaton.engine.client import EngineClient
from kvbaton.errors import EngineDeadError
from kvbaton.router.nodes import EngineClients
from kvbaton.router.prefix_index import PrefixIndex
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
