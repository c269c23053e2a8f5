"""``kvbaton bench serve`` against an endpoint whose tokens are known."""

import asyncio
import json
import math
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvbaton.bench.report import percentile
from kvbaton.bench.serve import (
    ServeLoad,
    Shot,
    make_prompts,
    measure,
    summary,
    tell_failures,
    tokens_of,
)
from kvbaton.cli import main
from tests.support.waiting import PATIENCE_S


class Endpoint:
    """Answers with the prompt's first token, again and again; tells ids only if asked to."""

    def __init__(self, *, tells_ids: bool = True) -> None:
        self.tells_ids = tells_ids
        self.bodies: list[dict[str, object]] = []
        self.at_once = self.most_at_once = 0
        self.at_least = 1
        self.most_tokens = 1 << 20
        self.on_request: Callable[[], None] = lambda: None
        self.url = ""
        self.are_here = asyncio.Event()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "echo"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if request.headers.get("Authorization") == "Bearer wrong":
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.on_request()
        if self.at_once >= self.at_least:
            self.are_here.set()
        await asyncio.wait_for(self.are_here.wait(), PATIENCE_S)
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(min(body["max_tokens"], self.most_tokens)):
            ids = {"token_ids": [body["prompt"][0]]} if self.tells_ids else {}
            chunk = {"choices": [{"index": 0, "text": "x", **ids}]}
            await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0)
        self.at_once -= 1
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def run(self, started: threading.Event, stop: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        started.set()
        await stop.wait()
        await runner.cleanup()


@pytest.fixture(params=[True, False], ids=["ids", "text"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    found, started, stop = Endpoint(tells_ids=request.param), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(found.run(started, stop)), daemon=True
    )
    thread.start()
    assert started.wait(PATIENCE_S)
    yield found
    loop.call_soon_threadsafe(stop.set)
    thread.join(PATIENCE_S)
    loop.close()


@pytest.mark.parametrize("more", [[], ["--rate", "500"]], ids=["closed", "open"])
def test_it_reports_what_clients_saw(endpoint: Endpoint, tmp_path: Path, more: list[str]) -> None:
    out = tmp_path / "serve.json"
    sizes = ["--requests", "6", "--input-len", "5", "--output-len", "4", "--concurrency", "2"]
    assert main(["bench", "serve", "--url", endpoint.url, *sizes, *more, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ok"] == 6
    assert row["failed"] == 0
    assert row["tokens/s"] == pytest.approx(4 * row["requests/s"])
    assert 0 < row["ttft_p50_ms"] <= row["second_p50_ms"]
    assert {body["model"] for body in endpoint.bodies} == {"echo"}
    assert [len(str(body["prompt"]).split(",")) for body in endpoint.bodies] == [5] * 6
    assert endpoint.most_at_once <= 2


def test_an_open_loop_waits_for_no_answer(endpoint: Endpoint) -> None:
    """It had 8 requests at a time, and the others waited where nobody measures."""
    endpoint.at_least = 20
    words = ["--requests", "20", "--rate", "1e6", "--input-len", "2", "--output-len", "2"]
    assert main(["bench", "serve", "--url", endpoint.url, *words]) == 0
    assert endpoint.most_at_once == 20


def test_what_was_measured_until_it_was_interrupted_is_told(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        if len(endpoint.bodies) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    endpoint.on_request = interrupt
    words = ["--requests", "5000", "--input-len", "2", "--output-len", "2", "--concurrency", "1"]
    out = tmp_path / "serve.json"
    assert main(["bench", "serve", "--url", endpoint.url, *words, "--out", str(out)]) == 130
    (row,) = json.loads(out.read_text())["rows"]
    assert 2 <= row["ok"] < 5000
    assert f"interrupted: {row['ok']} of 5000 requests had ended" in capsys.readouterr().out


def test_failures_are_counted_and_told(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "serve", "--url", endpoint.url, "--requests", "2", "--api-key", "wrong"]
    assert main(words) == 1
    assert "bad key" in capsys.readouterr().out


def test_a_key_may_come_from_the_environment(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the variable of a router, too, which may hold several."""
    monkeypatch.setenv("KVBATON_API_KEY", "wrong other")
    assert main(["bench", "serve", "--url", endpoint.url, "--requests", "2"]) == 1
    assert "bad key" in capsys.readouterr().out


async def shot_at(complete: Callable[[web.Request], Awaitable[web.Response]]) -> Shot:
    """The only request to an endpoint that answers so."""
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app) as server:
        load = ServeLoad(url=str(server.make_url("")), model="m", requests=1, input_len=1)
        (shot,), _ = await measure(load)
    return shot


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (b'"x"', "`object`"),
        (b'{"x": "\xff"}', "utf-8"),
        (b'{"x": ' + b"[" * 9999, "depth"),
        (b'{"choices": [5]}', "attributeerror"),
        (b'{"choices": {"a": 1}}', "keyerror"),
        (b'{"choices": [{"token_ids": 5}]}', "typeerror"),
    ],
)
async def test_an_event_that_is_something_else_is_a_failure_too(event: bytes, problem: str) -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=b"data: " + event + b"\n\n", content_type="text/event-stream")

    shot = await shot_at(complete)
    assert problem in (shot.error or "").lower()  # by msgspec 0.23 it is "UTF-8"


async def test_a_stream_that_breaks_off_is_a_failure() -> None:
    """A server that died behind a proxy looked like one with short answers, and fast."""

    async def complete(request: web.Request) -> web.Response:
        text = 'data: {"choices": [{"text": "a"}]}\n\n'
        return web.Response(text=text, content_type="text/event-stream")

    shot = await shot_at(complete)
    assert (shot.error, len(shot.times)) == ("the stream ended without [DONE]", 1)


def test_answers_shorter_than_asked_for_are_told(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "serve", "--url", endpoint.url, "--requests", "3", "--output-len", "4"]
    assert main(words) == 0
    assert "shorter" not in capsys.readouterr().out
    endpoint.most_tokens = 2
    assert main(words) == 0
    told = "3 of 3 answers were shorter than --output-len: 6 tokens in all"
    assert told in capsys.readouterr().out


def test_many_different_failures_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [*"aabcdefgh", None]
    tell_failures([Shot(0.0, (), error=error) for error in errors])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "failed: 2 of 10, a"
    assert len(lines) == 6
    assert lines[-1] == "failed: 3 of 10, by 3 other errors"


async def test_lines_may_end_as_the_standard_lets_them() -> None:
    events = ('{"choices": [{"text": "a"}]}', '{"choices": [{"text": "b"}]}', "[DONE]")

    async def complete(request: web.Request) -> web.Response:
        text = ": ping\r\n\r\n" + "".join(f"id: 1\r\ndata: {event}\r\n\r\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream")

    shot = await shot_at(complete)
    assert (shot.error, len(shot.times)) == (None, 2)


def test_an_address_where_nobody_serves_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvbaton: error: --url: can't tell what http://127.0.0.1:9 serves")


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--requests", "0"], "--requests: 0 is not positive"),
        (["--concurrency", "0", "--rate", "1"], "--concurrency: 0 is not positive"),
        (["--rate", "0"], "--rate: must be positive, not 0.0"),
        (["--input-len", "-1"], "--input-len: -1 is not positive"),
        (["--output-len", "0"], "--output-len: 0 is not positive"),
        (["--vocab-size", "-7"], "--vocab-size: -7 is not positive"),
        (["--vocab-size", "9" * 40], "--vocab-size: " + "9" * 40 + " is more than any model has"),
        (["--requests", "9" * 40], "--requests: prompts of more than 268435456 tokens in all"),
        (["--input-len", "1T"], "--requests: prompts of more than 268435456 tokens in all"),
        (["--url", "localhost:8000"], "--url: 'localhost:8000' is no http URL"),
        (["--url", "http://["], "--url: 'http://[' is no http URL"),
        (["--url", "http://127.0.0.1:99999"], "--url: 'http://127.0.0.1:99999' is no http URL"),
    ],
)
def test_a_load_that_is_none_is_refused(
    words: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some were tables of NaN, one a traceback, one never ended."""
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", *words]) == 2
    assert f"error: {wrong}" in capsys.readouterr().err


async def test_tokens_are_those_of_the_answer(endpoint: Endpoint) -> None:
    load = ServeLoad(url=endpoint.url, requests=3, input_len=2, output_len=3)
    shots, _ = await measure(load)
    assert [len(shot.times) for shot in shots] == [3, 3, 3]
    told = sorted(shot.token_ids for shot in shots)
    expected = sorted((prompt[0],) * 3 for prompt in make_prompts(load))
    assert told == (expected if endpoint.tells_ids else [(), (), ()])


def test_summary_leaves_failures_out() -> None:
    good = Shot(1.0, (1.5, 1.75, 2.25))
    late = Shot(1.0, (1.5, 3.25))
    row = summary([good, Shot(1.0, (), error="no")], 2.0)
    assert (row["ok"], row["failed"], row["tokens/s"]) == (1, 1, 1.5)
    assert row["requests/s"] == 0.5
    assert (row["ttft_p50_ms"], row["second_p50_ms"]) == (500, 750)
    assert row["itl_p50_ms"] == row["tpot_p50_ms"] == 375
    row = summary([good, late], 2.0)
    assert (row["itl_p50_ms"], row["tpot_p50_ms"]) == (500, (375 + 1750) / 2)


def test_percentile() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ({"choices": [{"text": "", "token_ids": [5]}]}, [5]),
        ({"choices": [{"text": "a"}]}, []),
        ({"choices": [{"text": "", "finish_reason": "length", "token_ids": []}]}, None),
        ({"choices": [], "usage": {}}, None),
    ],
)
def test_what_counts_as_a_token(chunk: dict[str, object], expected: list[int] | None) -> None:
    assert tokens_of(chunk) == expected
