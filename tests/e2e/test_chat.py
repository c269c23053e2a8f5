"""``kvbaton chat`` at a pseudo-terminal, and ``kvbaton up --chat``, over real nodes."""

from __future__ import annotations

import asyncio
import codecs
import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientTimeout, web
from aiohttp.test_utils import TestServer
from rich.console import Console

from kvbaton.cluster import chat as chat_module
from kvbaton.cluster.chat import Chat, ChatConfig
from tests.e2e.test_commands import STOP_S, UP, start
from tests.support.forked_command import ForkedCommand
from tests.support.gguf_files import write_gguf
from tests.support.served_pair import Pair

pytestmark = pytest.mark.e2e

PATIENCE_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FIGURES = re.compile(
    r"first token \d+ ms · [\d.]+ tokens/s · (?P<nodes>[^·]+) · (?P<crossed>\d[^·]*) handed over"
    r" · (?P<cached>\d+) of\s+(?P<prompt>\d+)\s+prompt\s+tokens\s+cached"
)


class Terminal:
    """A command at a pseudo-terminal of 200 columns.

    Args:
        words: of the command line.
        cache: folder for what it remembers.
        forked: do not execute Python anew; then it reads nothing that is typed.

    Attributes:
        said: what `until` has not yet seen.
        all: what it said since it began, with all escapes.
    """

    process: subprocess.Popen[bytes] | ForkedCommand

    def __init__(self, words: list[str], cache: Path, *, forked: bool = False) -> None:
        self._near, far = pty.openpty()
        env = {"COLUMNS": "200", "TERM": "xterm", "XDG_CACHE_HOME": str(cache)}
        if forked:
            self.process = ForkedCommand(words, far, env=env)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvbaton", *words],
                stdin=far,
                stdout=far,
                stderr=far,
                env={**os.environ, **env},
                start_new_session=True,
            )
        os.close(far)
        self.said = self.all = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def type(self, line: str) -> None:
        os.write(self._near, f"{line}\n".encode())

    def until(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        """What it says next that matches; what came before is forgotten."""
        limit = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, ESCAPES.sub("", self.said))):
            assert time.monotonic() < limit, f"{pattern} not in {self.said!r}"
            self._read()
        self.said = ESCAPES.sub("", self.said)[found.end() :]
        return found

    def read_to_end(self) -> None:
        """Take in what it says until it ends."""
        limit = time.monotonic() + PATIENCE_S
        while self._read() or self.process.poll() is None:
            assert time.monotonic() < limit, f"it does not end: {self.said!r}"

    def _read(self) -> bool:
        """Whether it said more, within a moment."""
        if not select.select([self._near], [], [], 0.2)[0]:
            return False
        try:
            more = os.read(self._near, 1 << 16)
        except OSError:  # nobody holds the other end
            return False
        text = self._decoder.decode(more)
        self.said += text
        self.all += text
        return bool(more)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._near)


def test_a_conversation_at_a_terminal(pair: Pair, tmp_path: Path) -> None:
    terminal = Terminal(["chat", pair.router.url, "--max-tokens=12"], tmp_path)
    try:
        terminal.until(r"d16, p16|p16, d16")
        terminal.until("> ")
        terminal.type("Tell me how a baton is handed over in a relay race.")
        first = terminal.until(FIGURES)
        assert "p16 (prefill)" in first["nodes"]
        assert "d16 (decode)" in first["nodes"]
        terminal.until("> ")
        terminal.type("And who runs last?")
        second = terminal.until(FIGURES)
        assert int(second["prompt"]) > int(first["prompt"]), "the history was not sent"
        assert int(second["cached"]) > 0
        terminal.until("> ")
        terminal.type("/reset")
        terminal.until("a new conversation")
        terminal.type("And who runs last?")
        third = terminal.until(FIGURES)
        assert int(third["prompt"]) < int(second["prompt"])
        terminal.type("/nonsense")
        terminal.until("/nonsense is no command")
        terminal.type("/exit")
        assert terminal.process.wait(STOP_S) == 0
        assert "who runs last" in (tmp_path / "kvbaton" / "chat_history").read_text()
    finally:
        terminal.close()


def test_nobody_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert start(["chat", "http://127.0.0.1:9"], log).wait(PATIENCE_S) == 1
    assert "nobody answers at http://127.0.0.1:9" in log.read_text()
    assert "Traceback" not in log.read_text()


async def test_a_wrong_key_is_told_from_an_address_where_nobody_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401)

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    async with TestServer(app) as server:
        chat = await Chat.open(ChatConfig(url=str(server.make_url(""))), Console())
    assert chat is None
    assert "answers 401 Unauthorized; give a right --api-key" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [[], {"data": {}}, {"data": [5]}, {"data": None}, "x"])
async def test_an_address_of_something_else_is_told(
    answer: object, capsys: pytest.CaptureFixture[str]
) -> None:
    async def models(request: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        assert await Chat.open(ChatConfig(url=str(server.make_url(""))), Console()) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvbaton: nobody answers at http://127.0.0.1:")


async def said_of(events: str, page: str | None = None, status: int = 200) -> str:
    """What a user sees who says "hi" to an endpoint that answers so, and by a page elsewhere."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=events, content_type="text/event-stream", status=status)

    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html")

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", answer)])
    if page is not None:
        app.router.add_get("/{path:.*}", elsewhere)
    return await shown_by(app)


async def shown_by(app: web.Application, width: int | None = None) -> str:
    """What a user sees who says "hi" to an endpoint, on a console so wide."""
    said = Console(file=io.StringIO(), width=width)
    async with TestServer(app) as server:
        chat = await Chat.open(ChatConfig(url=str(server.make_url(""))), said)
        assert chat is not None
        await chat.take("hi")
        await chat.close()
    assert isinstance(said.file, io.StringIO)
    return said.file.getvalue()


async def test_an_event_that_is_no_object_ends_an_answer_and_not_the_conversation() -> None:
    assert "Expected `object`, got `str`" in await said_of('data: "x"\n\n')
    assert "too busy" in await said_of('data: {"error": "too busy"}\n\n')
    for odd in ('{"error": {}}', '{"choices": [5]}', '{"choices": 5}'):
        assert await said_of(f"data: {odd}\n\n")
    assert "the endpoint answers 502 Bad Gateway" in await said_of("<html></html>", status=502)


@pytest.mark.parametrize(
    "nodes", ["<html></html>", "[]", '{"nodes": null}', '{"nodes": [5]}', '{"nodes": [{}]}']
)
async def test_an_endpoint_may_answer_anything_where_a_router_lists_its_nodes(nodes: str) -> None:
    text = 'data: {"choices": [{"delta": {"content": "hello"}}]}\n\ndata: [DONE]\n\n'
    assert "hello" in await said_of(text, page=nodes)


async def test_who_served_is_told_of_this_answer_whoever_else_is_served_meanwhile() -> None:
    """It was told of all requests that the router had passed on until then."""
    served, asked = 0, list[Any]()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": "kvbaton"}]})

    async def answer(request: web.Request) -> web.Response:
        nonlocal served
        served += 1
        asked.append(await request.json())
        nodes = {"encoder-1": "e-0", "alone": "any-0"}
        told = json.dumps({"choices": [], "timings": {"nodes": nodes}})
        text = f"data: {told}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async def metrics(request: web.Request) -> web.Response:
        name = "kvbaton_router_node_requests_total"
        mine, others = f'{name}{{node="any-0",part="alone"}}', f'{name}{{node="d-9",part="alone"}}'
        return web.Response(text=f"{mine} {served}\n{others} {3 * served}\n")

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/metrics", metrics)])
    app.add_routes([web.post("/v1/chat/completions", answer)])
    assert " · e-0 (encode), any-0 (alone) · " in await shown_by(app, width=200)
    assert asked[0]["return_timings"]


async def test_who_takes_a_connection_and_says_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_module, "FIRST_LOOK", ClientTimeout(total=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with asyncio.timeout(PATIENCE_S):
            assert await Chat.open(ChatConfig(url=url), Console()) is None
    assert f"nobody answers at {url}: no answer in time" in capsys.readouterr().err


async def test_of_a_routers_keys_in_one_variable_the_first_is_presented() -> None:
    sent = list[str]()

    async def models(request: web.Request) -> web.Response:
        sent.append(request.headers["Authorization"])
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        config = ChatConfig(url=str(server.make_url("")), api_key="first second\n")
        chat = await Chat.open(config, Console(file=io.StringIO()))
        assert chat is not None
        await chat.close()
    assert sent == ["Bearer first"]


async def test_input_that_is_closed_or_no_text() -> None:
    """And an answer may be as long as fits, whatever the model's length."""
    asked = list[Any]()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(text="data: [DONE]\n\n", content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", answer)])
    async with TestServer(app) as server, asyncio.timeout(PATIENCE_S):
        command = f"{sys.executable} -m kvbaton chat {server.make_url('')}"
        for given in ("<&-", "<<< $'hi \\xff'"):
            process = await asyncio.create_subprocess_exec(
                *("bash", "-c", f"{command} {given}"), stderr=asyncio.subprocess.PIPE
            )
            _, said = await process.communicate()
            assert (process.returncode, said) == (0, b"")
    (body,) = asked
    assert body["messages"] == [{"role": "user", "content": "hi \ufffd"}]
    assert "max_tokens" not in body


@pytest.mark.slow  # `make demo` does the same with a real file
def test_up_answers_a_chat_with_a_gguf_file(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(checkpoint(), tmp_path / "tiny.gguf")
    log = tmp_path / "log"
    words = ["up", f"--model={tmp_path / 'tiny.gguf'}", "--transport=tcp", "--max-tokens=8", *UP]
    words.append("--policy=least-loaded")
    process = start([*words, "--chat=Who hands over the baton?"], log)
    try:
        status = process.wait(120.0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = log.read_text()
    assert status == 0, said
    assert re.search(r"served by +any-\d \((decode|prefill)\), any-\d \((decode|prefill)\)", said)
    assert re.search(r"tokens +\d+ in, 8 out", said)
    assert re.search(r"KV handed over [1-9]\d* bytes, [1-9]\d* prompt tokens", said)
