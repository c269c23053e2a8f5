"""What a node tells routers when it becomes ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvbaton.engine.config import EngineConfig
from kvbaton.messages.nodes import STEP_COSTS, Members, NodeInfo
from kvbaton.server.config import NodeConfig
from kvbaton.server.node import Node
from tests.support.engine_node import ENGINE


@pytest.mark.parametrize("heartbeat_s", [0.02, 60.0])
async def test_a_node_that_is_ready_says_how_fast_it_is(
    checkpoint: Callable[..., Path], heartbeat_s: float
) -> None:
    """Until it did, a router could not compare it with others: a second or two of guesses."""
    told: asyncio.Queue[NodeInfo] = asyncio.Queue()

    async def register(request: web.Request) -> web.Response:
        told.put_nowait(msgspec.json.decode(await request.read(), type=NodeInfo))
        answer = Members(control_addresses=(), heartbeat_s=heartbeat_s)
        return web.Response(body=msgspec.json.encode(answer))

    app = web.Application()
    app.router.add_post("/nodes", register)
    async with TestServer(app) as router:
        engine = EngineConfig(model=str(checkpoint()), **ENGINE)
        url = str(router.make_url(""))
        config = NodeConfig(engine=engine, routers=(url,), node_id="n", role="any")
        node = Node(config, [])
        try:
            await node.start()
            while (first := await told.get()).state != "ready":
                pass
        finally:
            await node.stop()
    # A slow machine has no time to try what contexts cost, and any one cost may be too little.
    costs = {name: first.load[name] for name in STEP_COSTS if name in first.load}
    assert costs.keys() >= {"step_s", "prefill_token_s", "decode_sequence_s"}
    assert sum(costs.values()) > 0
