"""The router against a bare streaming proxy, over the same mock nodes, in one run.

A mock node is a small server that makes tokens without a model: one per step for each running
request, as an engine does. The bare proxy (aiohttp, no parsing) forwards a client's request to the
mock's OpenAI endpoint and streams the answer back. The router tokenizes, asks a prefill and a
decode mock, relays and detokenizes. Mocks report step costs and cached blocks, so that the router
chooses nodes as it does for real ones. Three loads:

- *full*: `--clients` clients at once, mocks as fast as they can: requests/s as a share of the
  proxy's, CPU time per request and per token, and for each further number of `--workers` its
  requests/s as a multiple of that of the first.
- *light*: one client, one request after the other: the latency that the router adds to the proxy's.
- *paced*: clients that keep up, mocks with a step every `--pace` ms: CPU time of the router per
  request and per token (from requests of two lengths), and chunks per token, which must be 1.

With ``--watchers N``, instead: full loads in turns without and with N open pages of the router
(streams of `GET /events`), and the CPU time of the pages without other load.

On two cores, which all processes share, only ratios and CPU times are meaningful. With more cores,
the load must not be the limit: ``--workers 1 2 --mocks 8 --client-processes 8 --clients 128``,
which takes less than two minutes. The shares of a core of the busiest mock and client are printed;
if one is near 1, use more of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvbaton.bench.report import publish
from kvbaton.connectors.keys import block_keys, root_key
from kvbaton.engine.frontends import EngineEndpoints, FrontendServer
from kvbaton.messages.engine import (
    BLOCK_HASH_BYTES,
    AbortRequest,
    AddRequest,
    BlockChange,
    CachedGroup,
    Output,
    Outputs,
    Ready,
)
from kvbaton.messages.nodes import NodeInfo
from kvbaton.types import NodeId

MODEL = "mock"
WORDS = 200
SHORT, LONG = 8, 200
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
START_TIMEOUT_S = 60.0
IDLE_S = 0.2
"""Interval in seconds at which an idle mock polls its frontends."""
LOAD_TIMEOUT_S = 300.0
BLOCK_SIZE = 16
LOAD = {
    "step_s": 0.004,
    "prefill_token_s": 2e-5,
    "prefill_context_s": 1e-6,
    "decode_sequence_s": 1e-5,
    "decode_context_s": 1e-5,
    "step_tokens": 4096.0,
}
"""Step costs that a mock reports, for policies that count in seconds."""


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each load")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of full loads; medians count")
    parser.add_argument("--pace", type=float, default=20.0, help="ms per step of a paced mock")
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="numbers of workers")
    parser.add_argument("--clients", type=int, default=32, help="concurrent clients")
    parser.add_argument("--client-processes", type=int, default=1, help="for all clients")
    parser.add_argument("--mocks", type=int, default=1, help="pairs of nodes, a process each")
    parser.add_argument("--watchers", type=int, default=0, help="measure N open pages instead")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(SERVERS[args.serve](args))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        args.folder = folder
        rows = asyncio.run(measure(args))
    publish("router", vars(args), rows, args.out)


# --- measuring ---


async def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """Run all loads; one row per figure."""
    async with Clients.started(args.client_processes) as clients:
        if args.watchers:
            with mocks("mock", args) as behind:
                return await watched(args, clients, behind)
        with mocks("mock", args) as behind, started("proxy", args, behind) as proxy:
            rows = await full_and_light(args, clients, proxy, behind)
        with mocks("paced", args) as behind, started("proxy", args, behind) as proxy:
            rows += await paced(args, clients, "proxy", proxy)
            with started_router(args, behind, args.workers[0]) as router:
                return rows + await paced(args, clients, "router", router)


async def full_and_light(
    args: argparse.Namespace, clients: Clients, proxy: Server, behind: list[Server]
) -> list[dict[str, object]]:
    """Requests/s of all servers at full load, and latency of single requests."""
    rows: list[dict[str, object]] = []
    with contextlib.ExitStack() as stack:
        servers = {"bare proxy": proxy}
        for workers in args.workers:
            server = stack.enter_context(started_router(args, behind, workers))
            servers[f"router of {workers}"] = server
        first = f"router of {args.workers[0]}"
        cost: dict[str, list[float]] = {name: [] for name in servers}
        for tokens in (SHORT, LONG):
            loads: dict[str, list[Full]] = {name: [] for name in servers}
            for server in servers.values():
                await clients.load(server, tokens, count=args.clients, seconds=1.0)
            for _ in range(args.rounds):
                for name, server in servers.items():
                    loads[name].append(await full(args, clients, server, behind, tokens))
            middle = {name: Full.median(of) for name, of in loads.items()}
            for name, found in middle.items():
                what = f"full, {tokens} tokens: {name}"
                cost[name].append(found.cpu_s)
                rows.append(row(f"{what}, requests/s", found.rate))
                rows.append(row(f"{what}, CPU per request, ms", found.cpu_s * 1e3))
                rows.append(row(f"{what}, busiest mock, cores", found.mock))
                rows.append(row(f"{what}, busiest client process, cores", found.client))
                if name != "bare proxy":
                    share = found.rate / middle["bare proxy"].rate
                    rows.append(row(f"{what}, share of the bare proxy", share))
                if name not in ("bare proxy", first):
                    rows.append(row(f"{what}, times {first}", found.rate / middle[first].rate))
        for name, (short, long) in cost.items():
            per_token = (long - short) / (LONG - SHORT)
            rows.append(row(f"full: {name}, CPU per token, us", per_token * 1e6))
        latency = {}
        for name, server in (("bare proxy", proxy), (first, servers[first])):
            done = await clients.load(server, SHORT, count=1, seconds=args.seconds)
            latency[name] = statistics.median(done.seconds) * 1e3
            rows.append(row(f"light, {SHORT} tokens: {name}, ms", latency[name]))
    added = latency[first] - latency["bare proxy"]
    return [*rows, row("light: added by the router, ms", added)]


@dataclass(frozen=True)
class Full:
    """Result of one full load.

    Attributes:
        rate: Requests per second.
        cpu_s: CPU seconds of the server per request.
        mock: Share of a core that the busiest mock used.
        client: Share of a core that the busiest client process used.
    """

    rate: float
    cpu_s: float
    mock: float
    client: float

    @classmethod
    def median(cls, loads: Sequence[Full]) -> Full:
        """Median of each figure by itself."""
        columns = zip(*map(dataclasses.astuple, loads), strict=True)
        return cls(*map(statistics.median, columns))


async def full(
    args: argparse.Namespace, clients: Clients, server: Server, behind: list[Server], tokens: int
) -> Full:
    """Load a server with all clients."""
    watched = [server, *behind]
    before, began = [one.cpu_s() for one in watched], time.monotonic()
    done = await clients.load(server, tokens, count=args.clients, seconds=args.seconds)
    took = time.monotonic() - began
    used, *mocked = (one.cpu_s() - old for one, old in zip(watched, before, strict=True))
    return Full(done.rate, used / len(done.seconds), max(mocked) / took, done.cores)


async def watched(
    args: argparse.Namespace, clients: Clients, behind: list[Server]
) -> list[dict[str, object]]:
    """Cost of open pages: requests/s and CPU time in pairs of loads, and idle CPU time."""
    rows: list[dict[str, object]] = []
    with started_router(args, behind, args.workers[0]) as router:

        async def idle() -> float:
            used = router.cpu_s()
            await asyncio.sleep(args.seconds)
            return (router.cpu_s() - used) / float(args.seconds)

        alone = await idle()
        with started("watchers", args, [router], args.watchers):
            rows.append(row("idle, cores", alone))
            rows.append(row(f"idle with {args.watchers} pages, cores", await idle()))
        for tokens in (SHORT, LONG):
            await clients.load(router, tokens, count=args.clients, seconds=1.0)
            pairs: list[tuple[Full, Full]] = []
            for number in range(args.rounds):
                found: dict[bool, Full] = {}
                for pages in (number % 2 == 0, number % 2 == 1):
                    with contextlib.ExitStack() as stack:
                        if pages:
                            stack.enter_context(started("watchers", args, [router], args.watchers))
                        found[pages] = await full(args, clients, router, behind, tokens)
                pairs.append((found[False], found[True]))
            what = f"full, {tokens} tokens"
            for name, index in (("no page", 0), (f"{args.watchers} pages", 1)):
                middle = Full.median([pair[index] for pair in pairs])
                rows.append(row(f"{what}, {name}: requests/s", middle.rate))
                rows.append(row(f"{what}, {name}: CPU per request, ms", middle.cpu_s * 1e3))
            rates = sorted(with_them.rate / without.rate for without, with_them in pairs)
            cost = [with_them.cpu_s / without.cpu_s for without, with_them in pairs]
            rows.append(row(f"{what}: requests/s with pages, share", statistics.median(rates)))
            rows.append(row(f"{what}: the least share of a pair", rates[0]))
            rows.append(row(f"{what}: the greatest share of a pair", rates[-1]))
            rows.append(row(f"{what}: CPU per request with pages, times", statistics.median(cost)))
    return rows


async def paced(
    args: argparse.Namespace, clients: Clients, name: str, server: Server
) -> list[dict[str, object]]:
    """CPU time per request and per token, and chunks per token, of clients that keep up."""
    cost: dict[int, float] = {}
    chunks: dict[int, float] = {}
    for tokens in (SHORT, LONG):
        await clients.load(server, tokens, count=args.clients, seconds=1.0)
        before = server.cpu_s()
        done = await clients.load(server, tokens, count=args.clients, seconds=2 * args.seconds)
        cost[tokens] = (server.cpu_s() - before) / len(done.seconds)
        chunks[tokens] = done.chunks / (tokens * len(done.seconds))
    per_token = (cost[LONG] - cost[SHORT]) / (LONG - SHORT)
    return [
        row(f"paced: {name}, CPU per request, ms", (cost[SHORT] - SHORT * per_token) * 1e3),
        row(f"paced: {name}, CPU per token, us", per_token * 1e6),
        row(f"paced: {name}, chunks per token", min(chunks.values())),
    ]


def row(what: str, value: float) -> dict[str, object]:
    """Row of one figure."""
    return {"what": what, "value": round(value, 3)}


# --- clients, in processes of their own ---


class Load(msgspec.Struct):
    """Load for one client process, as a line of JSON."""

    port: int
    tokens: int
    count: int
    seconds: float


class Done(msgspec.Struct):
    """Result of a load.

    Attributes:
        seconds: Duration of each request.
        rate: Requests per second.
        cores: Share of a core that the busiest client process used.
        chunks: Number of chunks of all requests.
    """

    seconds: list[float] = []
    rate: float = 0.0
    cores: float = 0.0
    chunks: int = 0


class Clients:
    """Client processes, which share each load."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, count: int) -> AsyncIterator[Clients]:
        """Start `count` processes; they end with the context."""
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, "--serve", "clients"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 26,
            )
            for _ in range(count)
        ]
        try:
            yield cls(processes)
        finally:
            for process in processes:
                process.kill()
                await process.wait()

    async def load(self, server: Server, tokens: int, *, count: int, seconds: float) -> Done:
        """Run `count` clients, each with one request after the other, for `seconds`."""
        shares = [count // len(self._processes)] * len(self._processes)
        for index in range(count % len(shares)):
            shares[index] += 1
        asked = [
            self._ask(process, Load(server.port, tokens, share, seconds))
            for process, share in zip(self._processes, shares, strict=True)
            if share
        ]
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            done = await asyncio.gather(*asked)
        return Done(
            [seconds for one in done for seconds in one.seconds],
            sum(one.rate for one in done),
            max(one.cores for one in done),
            sum(one.chunks for one in done),
        )

    async def _ask(self, process: asyncio.subprocess.Process, load: Load) -> Done:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(load) + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("a process of clients ended; see above")
        return msgspec.json.decode(line, type=Done)


async def serve_clients(args: argparse.Namespace) -> None:
    """Run the loads that standard input gives, for ever."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        done = await carry_out(msgspec.json.decode(line, type=Load))
        print(msgspec.json.encode(done).decode(), flush=True)


async def carry_out(load: Load) -> Done:
    """Run one process' share of a load."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": load.tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{load.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    loop, done = asyncio.get_running_loop(), Done()
    began, used = loop.time(), time.process_time()
    until = began + load.seconds
    made = [
        await loop.create_connection(
            lambda: Client(head + body, until, done), "127.0.0.1", load.port
        )
        for _ in range(load.count)
    ]
    await asyncio.gather(*(client.finished for _, client in made))
    took = loop.time() - began
    for transport, _ in made:
        transport.close()
    done.rate = len(done.seconds) / took
    done.cores = (time.process_time() - used) / took
    return done


class Client(asyncio.Protocol):
    """Sends a request and reads its answer, again and again until the time is up.

    Args:
        request: HTTP head and body.
        until: End, on the loop's clock.
        done: Result to fill.
    """

    def __init__(self, request: bytes, until: float, done: Done) -> None:
        self._request = request
        self._until = until
        self._done = done
        self._tail = b""
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._sent_at = self._loop.time()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count chunks; send the next request after the last one."""
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self.finished.set_exception(RuntimeError(f"no answer: {data[:300]!r}"))
            self._transport.abort()
            return
        self._done.chunks += data.count(b'"text"')
        self._tail = (self._tail + data)[-7:]
        if not self._tail.endswith(b"\r\n0\r\n\r\n"):
            return
        self._tail = b""
        now = self._loop.time()
        self._done.seconds.append(now - self._sent_at)
        if now < self._until:
            self._ask()
        elif not self.finished.done():
            self.finished.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail if the server closed the connection."""
        if not self.finished.done():
            self.finished.set_exception(error or ConnectionResetError("the server hung up"))


# --- servers, in processes of their own ---


@dataclass
class Server:
    """A server under test and its processes."""

    port: int
    process: subprocess.Popen[str]

    def cpu_s(self) -> float:
        """CPU seconds used, including children."""
        return sum(_cpu_s(pid) for pid in _family(self.process.pid))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def mocks(kind: str, args: argparse.Namespace) -> Iterator[list[Server]]:
    """Start pairs of mock nodes, one process per pair."""
    with contextlib.ExitStack() as stack:
        numbers = range(args.mocks)
        yield [stack.enter_context(started(kind, args, number=number)) for number in numbers]


@contextlib.contextmanager
def started(
    kind: str, args: argparse.Namespace, behind: Sequence[Server] = (), number: int = 0
) -> Iterator[Server]:
    """Start one of this file's servers."""
    command = [sys.executable, __file__, "--serve", kind, "--pace", str(args.pace)]
    command += ["--folder", args.folder, "--number", str(number)]
    command += ["--ports", *(str(server.port) for server in behind)] if behind else []
    with _running(command, "port ") as server:
        yield server


@contextlib.contextmanager
def started_router(
    args: argparse.Namespace, behind: Sequence[Server], workers: int
) -> Iterator[Server]:
    """Start ``kvbaton router`` with all mock nodes."""
    command = [sys.executable, "-m", "kvbaton", "router", "--port", "0", "--model", args.folder]
    command += ["--served-model-name", MODEL]
    command += ["--workers", str(workers)] if workers > 1 else []
    for mock in behind:
        for role in ("prefill", "decode"):
            command += [f"--{role}", f"http://127.0.0.1:{mock.port}/{role}"]
    with _running(command, "listening on http://127.0.0.1:") as server:
        _wait_for_nodes(server, len(behind), workers)
        yield server


@contextlib.contextmanager
def _running(command: list[str], prefix: str) -> Iterator[Server]:
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if prefix in line:
                break
        else:
            raise RuntimeError(f"{command} ended: {''.join(lines)}")
        port = int(line.partition(prefix)[2].split()[0])
        os.set_blocking(process.stderr.fileno(), False)
        yield Server(port, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_nodes(server: Server, mocks: int, workers: int) -> None:
    """Wait until all workers have connected to all nodes, as far as visible from outside."""
    give_up, url = time.monotonic() + START_TIMEOUT_S, f"http://127.0.0.1:{server.port}"
    healthy = 0
    while time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(f"{url}/nodes", timeout=5) as got:
                paired = len(json.load(got)["pairs"]) == mocks**2
            with urllib.request.urlopen(f"{url}/health", timeout=5) as got:
                ready = json.load(got)["ready"] == 2 * mocks
            healthy = healthy + 1 if paired and ready else 0
        except urllib.error.HTTPError:  # a worker without nodes
            healthy = 0
        if healthy == 10 * workers:
            return
        time.sleep(0.0 if healthy else 0.1)
    raise TimeoutError("the router found no pairs of nodes")


# --- the bare proxy ---


async def serve_proxy(args: argparse.Namespace) -> None:
    """Forward requests, and stream answers back."""
    urls = itertools.cycle(f"http://127.0.0.1:{port}/v1/completions" for port in args.ports)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            async with session.post(next(urls), data=await request.read()) as upstream:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application()
        app.router.add_post("/v1/completions", pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"port {runner.addresses[0][1]}", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


# --- open pages ---


async def serve_watchers(args: argparse.Namespace) -> None:
    """Keep pages of a router open for ever; report once all have received an event."""
    (port,) = args.ports
    heard = [asyncio.Event() for _ in range(args.number)]
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def follow(first: asyncio.Event) -> None:
            async with session.get(f"http://127.0.0.1:{port}/events") as response:
                response.raise_for_status()
                async for _ in response.content.iter_any():
                    first.set()
            raise RuntimeError("the router ended a page")

        async with asyncio.TaskGroup() as group:
            for first in heard:
                group.create_task(follow(first))
            for first in heard:
                await first.wait()
            print(f"port {port}", file=sys.stderr, flush=True)


# --- the mock ---


async def serve_mock(args: argparse.Namespace, kind: str, pace_s: float = 0.0) -> None:
    """Serve both nodes, and the OpenAI endpoint for the proxy, on one port."""
    steps = Steps(pace_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: MockHttp(steps), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for role in ("prefill", "decode"):
        path = f"{args.folder}/{kind}-{role}-{args.number}"
        engine = MockEngine(pace_s, path, alone=role == "prefill")
        info = node_info(role, args.number, port, engine.address)
        MockHttp.pages[f"/{role}/node"] = msgspec.json.encode(info)
        MockHttp.pages[f"/{role}/health"] = b"{}"
    print(f"port {port}", file=sys.stderr, flush=True)
    await steps.run()


def node_info(role: str, number: int, port: int, engine_address: str) -> NodeInfo:
    """Information that a mock reports about itself."""
    return NodeInfo(
        node_id=f"{role}-{number}",
        generation="1",
        role=role,
        url=f"http://127.0.0.1:{port}/{role}",
        model=MODEL,
        control_address=f"tcp://127.0.0.1:{port}",
        max_model_len=8192,
        engine_address=engine_address,
        identity="00" * 32,
        load=LOAD,
    )


class Steps:
    """Makes a token for every running request, once per step.

    Args:
        pace_s: Seconds from one step to the next.
    """

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s
        self.running: dict[object, Callable[[], bool]] = {}
        self.arrived = asyncio.Event()

    def add(self, key: object, step: Callable[[], bool]) -> None:
        """Call `step` once per step until it returns that it is done."""
        self.running[key] = step
        self.arrived.set()

    async def run(self) -> None:
        """Make steps for ever."""
        while True:
            if not self.running:
                self.arrived.clear()
                await self.arrived.wait()
            for key, step in list(self.running.items()):
                if step():
                    self.running.pop(key, None)
            await asyncio.sleep(self.pace_s)


@dataclass
class CachedPrompts:
    """Cached blocks of a mock, for a router that connects later."""

    known: BlockChange
    groups: tuple[CachedGroup, ...] = (CachedGroup(BLOCK_SIZE),)

    def snapshot(self) -> Iterator[tuple[BlockChange, ...]]:
        """All cached blocks."""
        yield (self.known,)


class MockEngine:
    """An engine's socket: one message per step, with a token for each of its requests.

    Args:
        pace_s: Seconds from one step to the next.
        path: Path of a Unix socket.
        alone: Every request gets only one token, as from a prefill node.
    """

    def __init__(self, pace_s: float, path: str, *, alone: bool) -> None:
        self._pace_s = pace_s
        self._alone = alone
        self._frontends = FrontendServer(EngineEndpoints(local=f"ipc://{path}", host="127.0.0.1"))
        self.address = self._frontends.address
        self._frontends.send(
            Ready(
                node=NodeId("mock", bytes(16)),
                control_address=None,
                num_blocks=1,
                block_size=BLOCK_SIZE,
                max_model_len=8192,
                eos_token_ids=(),
            )
        )
        self._running: dict[str, tuple[int, int]] = {}
        self._prompts: dict[tuple[int, ...], bytes] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Loop of a core: receive requests and make a step, for ever."""
        due = 0.0
        while True:
            patience = max(0.0, due - time.monotonic()) if self._running else IDLE_S
            for message in self._frontends.receive(patience, self._wake):
                if isinstance(message, AddRequest):
                    count = 1 if self._alone else message.params.max_tokens
                    self._running[message.request_id] = 0, count
                    self._cache(tuple(message.token_ids))
                elif isinstance(message, AbortRequest):
                    self._running.pop(message.request_id, None)
            if self._running and time.monotonic() >= due:
                due = time.monotonic() + self._pace_s
                self._step()

    def _cache(self, prompt: tuple[int, ...]) -> None:
        """Report newly cached blocks to routers."""
        new = prompt not in self._prompts
        if new:
            keys = block_keys(root_key(bytes(32), ""), prompt, BLOCK_SIZE)
            self._prompts[prompt] = b"".join(key[-BLOCK_HASH_BYTES:] for key in keys)
        known = BlockChange(0, True, b"".join(self._prompts.values()))
        if new or any(peer.next_blocks == 0 for peer in self._frontends.block_watchers):
            self._frontends.tell_watchers((known,), CachedPrompts(known))

    def _step(self) -> None:
        outputs = []
        for name, (index, count) in list(self._running.items()):
            outputs.append(mock_output(name, index, index == count - 1))
            self._running[name] = index + 1, count
            if index == count - 1:
                del self._running[name]
        self._frontends.send(Outputs(outputs=tuple(outputs)))


class MockHttp(asyncio.Protocol):
    """One connection, with minimal HTTP, so that the mock is not what is measured."""

    pages: dict[str, bytes] = {}  # noqa: RUF012

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """Stop making tokens for the connection."""
        self._steps.running.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        match = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        length = int(match.group(1)) if match else 0
        if len(rest) >= length:
            self._buffer = rest[length:]
            self._answer(head.split(b" ", 2)[1].decode(), rest[:length])

    def _answer(self, path: str, body: bytes) -> None:
        page = self.pages.get(path)
        if page is not None:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page))
            self._transport.write(page)
            return
        self._transport.write(HEAD)
        events = _openai(body)

        def step() -> bool:
            event = next(events, None)
            if event is None:
                self._transport.write(_chunk(b"[DONE]") + b"0\r\n\r\n")
            else:
                self._transport.write(_chunk(event))
            return event is None

        self._steps.add(self, step)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def _openai(body: bytes) -> Iterator[bytes]:
    """Answer of an engine's OpenAI endpoint."""
    made = int(time.time())
    for index in range(json.loads(body)["max_tokens"]):
        yield (
            b'{"id":"cmpl-0123456789abcdef","object":"text_completion","created":%d,"model":"mock",'
            b'"choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":null}]}'
            % (made, _word(index % 1000).encode())
        )


def mock_output(request_id: str, index: int, last: bool) -> Output:
    """Output of one step for one request."""
    return Output(
        request_id=request_id,
        index=index,
        token_ids=(300 + index * 7 % 500,),
        finish_reason="length" if last else None,
    )


# --- words ---


def _word(number: int) -> str:
    chance = random.Random(number)
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=3 + number % 6))


PROMPT = " ".join(_word(number) for number in range(WORDS))


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 4,000 tokens over a thousand made-up words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chance = random.Random(0)
    numbers = range(1000)
    backend.train_from_iterator(
        [" ".join(_word(n) for n in chance.sample(numbers, 200)) for _ in range(50)], trainer
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')


SERVERS = {
    "mock": lambda args: serve_mock(args, "full"),
    "paced": lambda args: serve_mock(args, "paced", args.pace / 1e3),
    "proxy": serve_proxy,
    "watchers": serve_watchers,
    "clients": serve_clients,
}

if __name__ == "__main__":
    main()
