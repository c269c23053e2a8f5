"""Connections that bring no request do not stay open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from kvbaton.server.app import make_app, serve_on
from kvbaton.server.config import EndpointConfig
from kvbaton.server.network import bind
from kvbaton.text.tokenizer import Tokenizer
from tests.server.conftest import make_frontend
from tests.support.scripted_source import ScriptedSource
from tests.support.waiting import eventually

KEEP_ALIVE_S = 0.3
PATIENCE_S = 30.0
HEAD = b"GET /version HTTP/1.1\r\nHost: here\r\n"


@pytest.fixture
async def source(tokenizer: Tokenizer) -> ScriptedSource:
    return ScriptedSource(tokenizer, "Hello wide world.")


@pytest.fixture
async def port(source: ScriptedSource, tokenizer: Tokenizer) -> AsyncIterator[int]:
    app = make_app(make_frontend(source, tokenizer))
    config = EndpointConfig(timeout_keep_alive_s=KEEP_ALIVE_S)
    runner = await serve_on(bind("127.0.0.1", 0), app, config)
    yield runner.addresses[0][1]
    await runner.cleanup()


async def test_without_files_a_connection_waits_and_is_tried_now_and_then(
    source: ScriptedSource, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried 128 times over, and again for each of these later, it takes all of a core."""
    tries: list[float] = []

    class Listener(socket.socket):
        def accept(self) -> Any:
            tries.append(time.monotonic())
            if len(tries) <= 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.05)
    with bind("127.0.0.1", 0) as bound:
        listener = Listener(fileno=bound.detach())
    runner = await serve_on(listener, make_app(make_frontend(source, tokenizer)), EndpointConfig())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        writer.write(HEAD + b"\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).endswith(b"200 OK\r\n")
        assert tries[2] - tries[0] >= 0.1
        writer.close()
        await writer.wait_closed()
    finally:
        await runner.cleanup()


async def test_an_answer_of_a_server_that_stops_says_that_the_connection_closes() -> None:
    """Else a client sends its next request on the connection that is just being closed."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        begun.set()
        await may_end.wait()
        return web.Response(text="done")

    stopping = asyncio.Event()

    async def note(app: web.Application) -> None:
        stopping.set()

    app = web.Application()
    app.router.add_get("/slow", slow)
    app.on_shutdown.append(note)
    config = EndpointConfig(shutdown_timeout_s=PATIENCE_S)
    runner = await serve_on(bind("127.0.0.1", 0), app, config)
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
    async with asyncio.timeout(PATIENCE_S):
        writer.write(b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n")
        await begun.wait()
        ending = asyncio.create_task(runner.cleanup())
        await stopping.wait()
        may_end.set()
        head = await reader.readuntil(b"\r\n\r\n")
        await ending
    writer.close()
    assert b"200 OK" in head
    assert b"Connection: close" in head


async def test_a_client_that_does_not_take_its_answer_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would have us keep the answer for as long as it likes."""
    monkeypatch.setattr("kvbaton.server.app.ANSWER_S", 0.1)

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(1 << 25))

    app = web.Application()
    app.router.add_get("/version", large)
    runner = await serve_on(bind("127.0.0.1", 0), app, EndpointConfig())
    reader, writer = await asyncio.open_connection(*runner.addresses[0], limit=1024)
    try:
        writer.write(HEAD + b"\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).endswith(b"200 OK\r\n")
            server = runner.server
            assert server is not None
            await eventually(lambda: not server.connections)
            assert len(await reader.read()) < 1 << 25
    finally:
        writer.close()
        await writer.wait_closed()
        await runner.cleanup()


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n", HEAD + b"\r\n" + HEAD])
async def test_no_head_or_half_of_one_ends_the_connection(port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200 OK") == sent.count(b"\r\n\r\n")
    finally:
        writer.close()
        await writer.wait_closed()


async def test_drop_by_drop_is_no_longer(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def drip() -> None:
        writer.write(HEAD)
        while True:
            writer.write(b"X-Drop: 1\r\n")
            await asyncio.sleep(KEEP_ALIVE_S / 10)

    dripping = asyncio.create_task(drip())
    try:
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionResetError):  # more drops reach a closed socket
                assert await reader.read() == b""
    finally:
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.transport.abort()


async def test_an_answer_may_take_longer(port: int, source: ScriptedSource) -> None:
    async def gate(index: int) -> None:
        await asyncio.sleep(KEEP_ALIVE_S if index == 1 else 0)
        await asyncio.sleep(KEEP_ALIVE_S if index == 2 else 0)

    source.gate = gate
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 4, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head % len(body) + body)
        async with asyncio.timeout(PATIENCE_S):
            answer: Any = await reader.read()
        assert b"data: [DONE]" in answer
    finally:
        writer.close()
        await writer.wait_closed()
