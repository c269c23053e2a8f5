"""Several processes on one port: who answers what, what they know, and who replaces whom."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import multiprocessing
import os
import signal
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from kvbaton.engine.client import LONG_COMMANDS
from kvbaton.engine.frontends import EngineEndpoints, FrontendServer
from kvbaton.engine.socket_folder import SocketFolder
from kvbaton.errors import ConfigError
from kvbaton.router.nodes import RESET_STORE_TIMEOUT_S
from kvbaton.server import supervisor as supervisor_module
from kvbaton.server.app import make_app
from kvbaton.server.auth import PEER
from kvbaton.server.config import EndpointConfig
from kvbaton.server.frontend import Frontend, FrontendConfig, ModelFacts
from kvbaton.server.metrics import HttpMetrics, MergedMetrics, merged
from kvbaton.server.network import bind, url_of
from kvbaton.server.sse import read_events, send_events
from kvbaton.server.supervisor import FORWARD_TIMEOUT_S, Supervisor, WorkerLink
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.version import __version__
from tests.support.scripted_source import ScriptedSource
from tests.support.waiting import eventually

PATIENCE_S = 20.0
BODY_TIMEOUT_S = 0.5


class Uncountable(Collector):
    """Can't tell the first time."""

    def __init__(self) -> None:
        self.asked = 0

    def collect(self) -> list[Metric]:
        self.asked += 1
        if self.asked == 1:
            raise ValueError("no counts yet")
        return []


@pytest.fixture(scope="module", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Forked off a process that has imported this file, for which each of them takes 0.4 s."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["tests.support.forked_worker", __name__])
    forkserver.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: forked)
        yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # other tests' imports more


async def worker(link: WorkerLink, payload: str) -> None:
    """Runs in a child."""
    if payload == "broken":
        raise ValueError("this worker can't start")
    if payload == "stuck":
        await asyncio.sleep(3600.0)
    registry = CollectorRegistry()
    if payload == "uncountable":
        registry.register(Uncountable())
    asked = Counter("asked", "Questions.", registry=registry)
    Gauge("up", "Workers.", registry=registry).set(1)
    state: list[bytes] = []
    link.on_state = state.append

    async def who(request: web.Request) -> web.Response:
        asked.inc()
        known = state[-1].decode() if state else None
        return web.json_response({"pid": os.getpid(), "state": known, "payload": payload})

    async def slow(request: web.Request) -> web.Response:
        link.report(b"slow")
        await asyncio.sleep(1.0)
        return web.json_response({"pid": os.getpid()})

    nothing = Tokenizer.of_nothing()
    frontend = Frontend(
        source=ScriptedSource(nothing),
        tokenizer=nothing,
        config=FrontendConfig(model_name="m", body_timeout_s=BODY_TIMEOUT_S),
        facts=lambda: ModelFacts(max_model_len=1, vocab_size=1),
    )
    routes = [
        web.get("/who", who),
        web.get("/slow", slow),
        web.route("*", "/control", link.forward),
        web.get("/events", link.forward),
    ]
    app = make_app(frontend, routes, text=False)
    grace_s = 60.0 if payload == "patient" else 5.0
    await link.serve(app, registry, EndpointConfig(shutdown_timeout_s=grace_s))


async def control(request: web.Request) -> web.Response:
    body = await request.text()
    return web.json_response(
        {"pid": os.getpid(), "path": request.path_qs, "body": body, "peer": request[PEER]},
        status=418,
        headers={"X-Seen": request.headers.get("X-Asked", "")},
    )


async def endless(request: web.Request) -> web.StreamResponse:
    """Event after event, each as soon as the one before has left."""

    async def events() -> AsyncIterator[bytes]:
        for number in itertools.count():
            yield b"data: %d\n\n" % number
            await asyncio.sleep(0.01)

    return await send_events(request, events())


@asynccontextmanager
async def supervised(count: int = 2, payload: str = "p") -> AsyncIterator[tuple[Supervisor, str]]:
    app = web.Application()
    app.router.add_route("*", "/control", control)
    app.router.add_get("/events", endless)
    with bind("127.0.0.1", 0) as listener:
        supervisor = Supervisor(worker, payload, listener, app, count=count)
        try:
            await supervisor.start()
            yield supervisor, url_of(listener)
        finally:
            await supervisor.stop(5.0)


def fresh_session(url: str) -> ClientSession:
    """Every request is a connection of its own, so that any worker may get it."""
    connector = TCPConnector(force_close=True)
    return ClientSession(url, connector=connector, timeout=ClientTimeout(total=20.0))


async def who(session: ClientSession) -> Any:
    async with session.get("/who") as response:
        return await response.json()


def value_of(text: bytes, sample: str) -> float:
    (line,) = [line for line in text.decode().splitlines() if line.startswith(f"{sample} ")]
    return float(line.split()[-1])


async def test_workers_share_a_port_a_state_and_their_counts() -> None:
    async with supervised() as (supervisor, url), fresh_session(url) as session:
        supervisor.publish(b"first")
        seen: set[int] = set()
        asked = 0

        async def both() -> bool:
            nonlocal asked
            answers = await asyncio.gather(*(who(session) for _ in range(8)))
            asked += len(answers)
            assert {answer["payload"] for answer in answers} == {"p"}
            seen.update(answer["pid"] for answer in answers if answer["state"] == "first")
            return len(seen) == 2

        await eventually(both)
        assert os.getpid() not in seen
        text = await supervisor.metrics(b"# HELP mine M.\n# TYPE mine gauge\nmine 4.0\n")
        assert value_of(text, "asked_total") == asked
        assert value_of(text, "up") == 2
        assert value_of(text, "mine") == 4


def test_without_a_folder_for_temporary_files_it_is_said_what_to_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose file systems are all read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="TMPDIR: must name a folder that can be written to"):
        SocketFolder()


async def test_a_long_path_of_temporary_files_is_too_long_for_sockets_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    async with supervised() as (_, url), fresh_session(url) as session:
        assert await who(session)
    sockets = SocketFolder()
    FrontendServer(EngineEndpoints(local=f"ipc://{sockets.path}/engine", host="127.0.0.1")).close()
    sockets.close()


async def test_what_is_the_supervisors_is_passed_on() -> None:
    async with supervised(count=1) as (_, url), fresh_session(url) as session:
        headers = {"X-Asked": "yes", "X-Kvbaton-Peer": "10.1.2.3"}
        asked = session.post("/control?a=%2F", data=b"hello", headers=headers)
        async with asked as response:
            assert (response.status, response.headers["X-Seen"]) == (418, "yes")
            answer = await response.json()
            said = {"path": "/control?a=/", "body": "hello", "peer": "127.0.0.1"}
            assert answer == {"pid": os.getpid()} | said


@pytest.mark.parametrize(
    "names", ["X-Kvbaton-Peer", "x-kvbaton-peer", "X-Kvbaton-Peer x-kvbaton-peer"]
)
async def test_a_client_can_not_say_on_which_machine_it_is(names: str) -> None:
    """Otherwise any client of a worker could pass for one on this machine: for an operator."""
    async with supervised(count=1) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        claims = "".join(f"{name}: 10.1.2.3\r\n" for name in names.split())
        writer.write(
            f"GET /control HTTP/1.1\r\nHost: x\r\n{claims}Connection: close\r\n\r\n".encode()
        )
        _, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
        writer.close()
    assert json.loads(body)["peer"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"Content-Length: 10\r\n\r\nhalf", b"408"),
        (b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", b"408"),
        (b"Transfer-Encoding: chunked\r\n\r\nnone\r\n", b"400"),
    ],
)
async def test_a_body_to_pass_on_must_come_in_time_and_whole(
    body: bytes, status: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async with supervised(count=1) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST /control HTTP/1.1\r\nHost: x\r\n" + body)
        answer = await asyncio.wait_for(reader.readline(), PATIENCE_S)
        writer.close()
    assert answer.split()[1] == status
    assert "Traceback" not in capfd.readouterr().err


async def test_bytes_that_are_no_http_are_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    async with supervised(count=1) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /who HTTP/1.1\r\n\x00: of a scanner\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
    assert "Traceback" not in capfd.readouterr().err


async def test_events_are_passed_on_as_they_come_and_end_with_the_worker() -> None:
    stack = AsyncExitStack()
    async with stack, supervised(count=1, payload="patient") as (supervisor, url):
        session = await stack.enter_async_context(fresh_session(url))
        response = await stack.enter_async_context(session.get("/events"))
        assert response.content_type == "text/event-stream"
        events = read_events(response.content)
        assert [await anext(events) for _ in range(3)] == [b"0", b"1", b"2"]
        async with asyncio.timeout(15):  # with its grace it would be 20
            await supervisor.stop(15.0)


async def test_a_worker_that_dies_is_replaced_and_its_counts_stay() -> None:
    async with supervised(count=1) as (supervisor, url), fresh_session(url) as session:
        supervisor.publish(b"known")
        first = (await who(session))["pid"]
        assert value_of(await supervisor.metrics(), "asked_total") == 1
        os.kill(first, signal.SIGKILL)

        async def replaced() -> bool:
            answer = await who(session)  # waits in the socket's backlog meanwhile
            return bool(answer["pid"] != first and answer["state"] == "known")

        await eventually(replaced)
        text = await supervisor.metrics()
        assert value_of(text, "asked_total") >= 2
        assert value_of(text, "up") == 1


async def test_a_worker_that_does_not_read_costs_no_more_than_a_state() -> None:
    async with supervised(count=1) as (supervisor, url), fresh_session(url) as session:
        pid = (await who(session))["pid"]
        os.kill(pid, signal.SIGSTOP)
        tracemalloc.start()
        try:
            for number in range(64):
                supervisor.publish(b"%d" % number + b" " * (1 << 20))
                await asyncio.sleep(0)
            assert await supervisor.metrics() is not None, "it is not waited for"
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            os.kill(pid, signal.SIGCONT)
        assert held < 8 << 20

        async def has_the_newest() -> bool:
            return str((await who(session))["state"]).strip() == "63"

        await eventually(has_the_newest)


async def test_a_worker_that_cannot_start_is_an_error() -> None:
    with pytest.raises(ConfigError, match="before it could serve"):
        async with supervised(payload="broken"):
            raise AssertionError("it started")


async def test_workers_that_do_not_serve_in_time_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "START_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match=r"^--workers: .*within 0.5 s"):
        async with supervised(count=1, payload="stuck"):
            raise AssertionError("it started")


async def test_a_worker_that_can_not_count_goes_on_listening() -> None:
    async with supervised(count=1, payload="uncountable") as (supervisor, url):
        assert b"asked_total" not in await supervisor.metrics()
        supervisor.publish(b"later")
        async with fresh_session(url) as session:

            async def knows() -> bool:
                return bool((await who(session))["state"] == "later")

            await eventually(knows, PATIENCE_S)
        assert b"asked_total" in await supervisor.metrics()


async def test_a_worker_that_died_before_the_end_is_not_replaced_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with supervised(count=1) as (supervisor, url), fresh_session(url) as session:
        os.kill((await who(session))["pid"], signal.SIGKILL)
        await eventually(lambda: "starting another" in caplog.text)
        supervisor.stop_replacing()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*supervisor._keepers)


async def test_open_requests_end_before_the_workers() -> None:
    reported = asyncio.Event()
    async with supervised(count=1) as (supervisor, url), fresh_session(url) as session:
        supervisor.on_report = lambda index, data: reported.set()

        async def ask() -> int:
            async with session.get("/slow") as response:
                return response.status

        asked = asyncio.create_task(ask())
        await asyncio.wait_for(reported.wait(), PATIENCE_S)
        stopping = asyncio.create_task(supervisor.stop(5.0))
        await asyncio.sleep(0.0)  # until it waits for its workers
        assert supervisor._listener.fileno() == -1, "else clients wait there, for nobody"
        await stopping
        assert await asked == 200


def test_counts_add_up_and_gauges_of_the_dead_do_not() -> None:
    def text(times: int) -> str:
        from prometheus_client import generate_latest

        registry = CollectorRegistry()
        Counter("c", "C.", ["k"], registry=registry).labels('a "b" \\ d').inc(times)
        histogram = Histogram("h_seconds", "H.", registry=registry, buckets=(1.0,))
        for _ in range(times):
            histogram.observe(0.5)
        Gauge("g", "G.", registry=registry).set(times)
        return (generate_latest(registry) + generate_latest(HttpMetrics().registry)).decode()

    metrics = MergedMetrics()
    for worker_id, times in enumerate((1, 2, 4)):
        metrics.update(worker_id, text(times))
    metrics.retire(2)
    metrics.update(2, text(8))
    metrics.retire(2)
    found = metrics.text(text(16)).encode()
    assert value_of(found, 'c_total{k="a \\"b\\" \\\\ d"}') == 31
    assert value_of(found, 'h_seconds_bucket{le="+Inf"}') == 31
    assert value_of(found, "h_seconds_sum") == 15.5
    assert value_of(found, "g") == 19
    assert value_of(found, f'kvbaton_build_info{{version="{__version__}"}}') == 1
    assert merged([found.decode()]) == found.decode()
    assert merged(["# HELP x X.\n# TYPE x gauge\nx +Inf\n"]).endswith("x +Inf\n")


async def test_a_worker_that_can_not_be_replaced_now_is_replaced_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervised(count=1) as (supervisor, url), fresh_session(url) as session:
        before = (await who(session))["pid"]
        spawn, tries = supervisor.spawn, itertools.count()

        def out_of_files(index: int, link: Any) -> Any:
            if next(tries) < 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return spawn(index, link)

        monkeypatch.setattr(supervisor, "spawn", out_of_files)
        os.kill(before, signal.SIGKILL)
        assert (await who(session))["pid"] != before


def test_a_worker_waits_longer_than_its_supervisor_for_an_engine() -> None:
    assert max(RESET_STORE_TIMEOUT_S, *LONG_COMMANDS.values()) < FORWARD_TIMEOUT_S
