"""``kvbaton drain`` against whatever may answer it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvbaton.cluster.drain import DrainConfig, run
from kvbaton.errors import ConfigError
from kvbaton.server.app import serve_on
from kvbaton.server.config import EndpointConfig
from kvbaton.server.network import TlsConfig, bind
from tests.support.certificates import write_certificates

IDLE, BUSY = '{"idle": true}', '{"idle": false}'
STARTING = '{"error": {"message": "soon", "type": "x", "code": "starting"}}'
REFUSED = '{"error": {"message": "only from loopback", "type": "x", "code": null}}'


class Answers:
    """A server that answers ``POST /drain`` from a list, the last again and again."""

    def __init__(self) -> None:
        self.script: list[tuple[int, str]] = []
        self.asked = 0
        self.keys = set[str | None]()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.keys.add(request.headers.get("Authorization"))
        status, text = self.script[min(self.asked, len(self.script)) - 1]
        return web.Response(status=status, text=text, content_type="application/json")

    async def drain(self, **settings: Any) -> int:
        return await asyncio.to_thread(run, DrainConfig(url=self.url, **settings))


@pytest.fixture
async def server() -> AsyncIterator[Answers]:
    answers = Answers()
    app = web.Application()
    app.router.add_post("/drain", answers.answer)
    async with TestServer(app) as running:
        answers.url = str(running.make_url(""))
        yield answers


async def test_it_waits_until_nothing_runs(
    server: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = [(200, BUSY), (500, "?"), (200, BUSY), (200, IDLE)]
    assert await server.drain() == 0
    assert server.asked == 4
    assert capsys.readouterr().out == f"drained: {server.url}\n"


async def test_it_waits_for_load_balancers(server: Answers) -> None:
    server.script = [(200, IDLE)]
    assert await server.drain(settle_s=0.3) == 0
    assert server.asked > 1


async def test_an_operators_key_lets_in(server: Answers) -> None:
    """The refusal asks for one; a process's own variable may hold several."""
    server.script = [(200, IDLE)]
    assert await server.drain(operator_key="first second") == 0
    assert server.keys == {"Bearer first"}


async def test_it_gives_up(server: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = [(200, BUSY)]
    assert await server.drain(timeout_s=0.0) == 1
    assert "still works after 0 s" in capsys.readouterr().err


async def test_who_has_not_begun_has_nothing_to_finish(server: Answers) -> None:
    server.script = [(503, STARTING)]
    assert await server.drain() == 0


async def test_who_is_not_there_has_nothing_to_finish(
    server: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    server.url = "http://127.0.0.1:9"
    assert await server.drain() == 0
    assert "nobody listens at http://127.0.0.1:9" in capsys.readouterr().err


async def test_who_can_not_be_asked_is_not_taken_for_gone(server: Answers) -> None:
    plain, server.url = server.url, server.url.replace("http:", "https:")
    with pytest.raises(
        ConfigError, match=r"URL: https://\S+ can't be asked: .*; it may want http://"
    ):
        await server.drain()
    server.url = "http://224.0.0.1:9"  # no connection goes there
    with pytest.raises(ConfigError, match=r"can't be asked: .*nreachable"):
        await server.drain()
    server.url = plain.partition("://")[2]
    with pytest.raises(ConfigError, match="is no http URL"):
        await server.drain()


async def test_plain_http_where_tls_is_spoken_is_told(
    server: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, certificate, key = map(str, write_certificates(tmp_path))
    tls = TlsConfig(ssl_certfile=certificate, ssl_keyfile=key)
    runner = await serve_on(bind("127.0.0.1", 0), web.Application(), EndpointConfig(tls=tls))
    try:
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        assert await server.drain(timeout_s=0.1) == 1
    finally:
        await runner.cleanup()
    assert "it may want https://" in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 403])
async def test_who_is_not_let_in_is_told(server: Answers, status: int) -> None:
    server.script = [(status, REFUSED)]
    with pytest.raises(ConfigError, match="does not let itself be drained: only from loopback"):
        await server.drain()


async def test_who_is_something_else_is_told_at_once(server: Answers) -> None:
    server.script = [(404, "<html></html>")]
    with pytest.raises(ConfigError, match="does not let itself be drained: it answers 404"):
        await server.drain()
    assert server.asked == 1
