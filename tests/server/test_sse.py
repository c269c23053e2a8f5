"""Events for readers that are slow, or gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator

import pytest
from aiohttp import web

import kvbaton.server.sse
from kvbaton.server.sse import send_events
from tests.support.waiting import PATIENCE_S, eventually

EVENT = b"data: " + b"x" * (1 << 16) + b"\n\n"


async def test_a_reader_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvbaton.server.sse, "MAX_BEHIND_S", 0.2)
    asked = 0
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield EVENT

    async def handler(request: web.Request) -> web.StreamResponse:
        events = endless()
        try:
            async with contextlib.aclosing(events):
                return await send_events(request, events)
        finally:
            ended.set()

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with socket.create_connection(runner.addresses[0]) as reader:
            reader.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await ended.wait()
            # What was made is what its sockets hold, and no more than one event beside.
            assert asked * len(EVENT) < 64 << 20
            assert len(asyncio.all_tasks()) < 10
        await eventually(lambda: runner.server is not None and not runner.server.connections)
    finally:
        await runner.cleanup()
