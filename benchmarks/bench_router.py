"""The router beside a bare streaming proxy, over the same mock nodes, in one run.

A mock node is a small server that makes tokens without a model: one for each running request per
step, as an engine does. The bare proxy (aiohttp, no parsing) passes a client's request on to the
mock's OpenAI endpoint and the answer back; the router tokenizes, asks a prefill and a decode mock,
relays and detokenizes. Three loads:

- *full*: 32 clients at once, mocks as fast as they can: requests/s as a share of the proxy's.
- *light*: one client, one request after the other: what the router adds to the proxy's latency.
- *paced*: 32 clients that keep up, mocks with a step every `--pace` ms: CPU time of the router per
  request and per token (from requests of two lengths), and chunks per token, which must be 1.

Everything shares this machine's cores, so only ratios and CPU times mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvbaton.bench.report import publish
from kvbaton.engine.frontends import EngineEndpoints, FrontendServer
from kvbaton.messages.engine import AbortRequest, AddRequest, Output, Outputs, Ready
from kvbaton.messages.nodes import GenerateRequest, NodeInfo
from kvbaton.types import NodeId

MODEL = "mock"
WORDS = 200
CLIENTS = 32
SHORT, LONG = 8, 200
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
START_TIMEOUT_S = 60.0
IDLE_S = 0.2
"""An idle mock looks after its frontends so often."""
LOAD_TIMEOUT_S = 300.0


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3, help="full loads, in turns; median")
    parser.add_argument("--pace", type=float, default=20.0, help="ms per step of a paced mock")
    parser.add_argument("--workers", type=int, default=1, help="of the router")
    parser.add_argument("--http", action="store_true", help="ask nodes over HTTP only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(SERVERS[args.serve](args))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        args.folder = folder
        rows = asyncio.run(measure(args))
    publish("router", {k: str(v) for k, v in vars(args).items() if k != "folder"}, rows, args.out)


# --- measuring ---


async def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """All loads; one row per figure."""
    with started("mock", args) as mock, started("proxy", args, mock) as proxy:
        with started_router(args, mock) as router:
            rows = await full_and_light(args, proxy, router)
    with started("paced", args) as mock, started("proxy", args, mock) as proxy:
        rows += await paced(args, "proxy", proxy)
        with started_router(args, mock) as router:
            return rows + await paced(args, "router", router)


async def full_and_light(
    args: argparse.Namespace, proxy: Server, router: Server
) -> list[dict[str, object]]:
    """Requests/s of both at full load, and latency of single requests."""
    rows: list[dict[str, object]] = []
    for tokens in (SHORT, LONG):
        rates: dict[str, list[float]] = {"proxy": [], "router": []}
        for server in (proxy, router):
            await load(server, tokens, clients=CLIENTS, seconds=1.0)
        for _ in range(args.rounds):
            for name, server in (("proxy", proxy), ("router", router)):
                done = await load(server, tokens, clients=CLIENTS, seconds=args.seconds)
                rates[name].append(done.rate)
        bare, ours = (statistics.median(rates[name]) for name in ("proxy", "router"))
        rows.append(row(f"full, {tokens} tokens: bare proxy, requests/s", bare))
        rows.append(row(f"full, {tokens} tokens: router, requests/s", ours))
        rows.append(row(f"full, {tokens} tokens: share", ours / bare))
    latency = {}
    for name, server in (("proxy", proxy), ("router", router)):
        done = await load(server, SHORT, clients=1, seconds=args.seconds)
        latency[name] = statistics.median(done.seconds) * 1e3
        rows.append(row(f"light, {SHORT} tokens: {name}, ms", latency[name]))
    return [*rows, row("light: added by the router, ms", latency["router"] - latency["proxy"])]


async def paced(args: argparse.Namespace, name: str, server: Server) -> list[dict[str, object]]:
    """CPU time per request and per token, and chunks per token, of clients that keep up."""
    cost: dict[int, float] = {}
    chunks: dict[int, float] = {}
    for tokens in (SHORT, LONG):
        await load(server, tokens, clients=CLIENTS, seconds=1.0)
        before = server.cpu_s()
        done = await load(server, tokens, clients=CLIENTS, seconds=2 * args.seconds)
        cost[tokens] = (server.cpu_s() - before) / len(done.seconds)
        chunks[tokens] = done.chunks / (tokens * len(done.seconds))
    per_token = (cost[LONG] - cost[SHORT]) / (LONG - SHORT)
    return [
        row(f"paced: {name}, CPU per request, ms", (cost[SHORT] - SHORT * per_token) * 1e3),
        row(f"paced: {name}, CPU per token, us", per_token * 1e6),
        row(f"paced: {name}, chunks per token", min(chunks.values())),
    ]


def row(what: str, value: float) -> dict[str, object]:
    """One figure."""
    return {"what": what, "value": round(value, 3)}


@dataclass
class Done:
    """What a load led to: seconds of each request, and chunks in all."""

    started: float
    seconds: list[float] = field(default_factory=list)
    chunks: int = 0
    ended: float = 0.0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.seconds) / (self.ended - self.started)


async def load(server: Server, tokens: int, *, clients: int, seconds: float) -> Done:
    """Clients that ask one request after the other, for so long."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    done = Done(loop.time())
    until = done.started + seconds
    async with asyncio.timeout(LOAD_TIMEOUT_S):
        made = [
            await loop.create_connection(
                lambda: Client(head + body, until, done), "127.0.0.1", server.port
            )
            for _ in range(clients)
        ]
        await asyncio.gather(*(client.finished for _, client in made))
    done.ended = loop.time()
    for transport, _ in made:
        transport.close()
    return done


class Client(asyncio.Protocol):
    """Sends a request, reads its answer to the end, and again until the time is up.

    Args:
        request: head and body.
        until: on the loop's clock.
        done: where results go.
    """

    def __init__(self, request: bytes, until: float, done: Done) -> None:
        self._request = request
        self._until = until
        self._done = done
        self._tail = b""
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask the first time."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._sent_at = self._loop.time()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count chunks; ask again after the last."""
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
        """Nobody else hangs up."""
        if not self.finished.done():
            self.finished.set_exception(error or ConnectionResetError("the server hung up"))


# --- servers, in processes of their own ---


@dataclass
class Server:
    """A server under test, with the processes that it consists of."""

    port: int
    process: subprocess.Popen[str]

    def cpu_s(self) -> float:
        """CPU seconds that it has used, its children included."""
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
def started(kind: str, args: argparse.Namespace, behind: Server | None = None) -> Iterator[Server]:
    """One of this file's own servers."""
    command = [sys.executable, __file__, "--serve", kind, "--pace", str(args.pace)]
    command += ["--folder", str(behind.port if behind else args.folder)]
    with _running([*command, *(["--http"] if args.http else [])], "port ") as server:
        yield server


@contextlib.contextmanager
def started_router(args: argparse.Namespace, mock: Server) -> Iterator[Server]:
    """``kvbaton router`` with both mock nodes behind one port."""
    command = [sys.executable, "-m", "kvbaton", "router", "--port", "0", "--model", args.folder]
    command += ["--served-model-name", MODEL]
    command += ["--workers", str(args.workers)] if args.workers > 1 else []
    for role in ("prefill", "decode"):
        command += [f"--{role}", f"http://127.0.0.1:{mock.port}/{role}"]
    with _running(command, "listening on http://127.0.0.1:") as server:
        _wait_for_pair(server)
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


def _wait_for_pair(server: Server) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/nodes", timeout=5) as got:
            if len(json.load(got)["pairs"]) == 1:
                return
        time.sleep(0.1)
    raise TimeoutError("the router found no pair of nodes")


# --- the bare proxy ---


async def serve_proxy(args: argparse.Namespace) -> None:
    """Pass requests on and answers back, as they come."""
    url = f"http://127.0.0.1:{args.folder}/v1/completions"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            async with session.post(url, data=await request.read()) as upstream:
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


# --- the mock ---


async def serve_mock(args: argparse.Namespace, kind: str, pace_s: float = 0.0) -> None:
    """Both nodes, and the OpenAI endpoint that the proxy passes on to, behind one port."""
    steps = Steps(pace_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: MockHttp(steps), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for role in ("prefill", "decode"):
        info = node_info(role, port)
        if not args.http:
            engine = MockEngine(pace_s, f"{args.folder}/{kind}-{role}", alone=role == "prefill")
            info = msgspec.structs.replace(info, engine_address=engine.address)
        MockHttp.pages[f"/{role}/node"] = msgspec.json.encode(info)
        MockHttp.pages[f"/{role}/health"] = b"{}"
    print(f"port {port}", file=sys.stderr, flush=True)
    await steps.run()


def node_info(role: str, port: int) -> NodeInfo:
    """What a mock says of itself."""
    return NodeInfo(
        node_id=role,
        generation="1",
        role=role,
        url=f"http://127.0.0.1:{port}/{role}",
        model=MODEL,
        control_address=f"tcp://127.0.0.1:{port}",
        max_model_len=8192,
    )


class Steps:
    """Makes a token for every running request, once per step.

    Args:
        pace_s: from one step to the next.
    """

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s
        self.running: dict[object, Callable[[], bool]] = {}
        self.arrived = asyncio.Event()

    def add(self, key: object, step: Callable[[], bool]) -> None:
        """Call `step` once per step until it says that it is done."""
        self.running[key] = step
        self.arrived.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            if not self.running:
                self.arrived.clear()
                await self.arrived.wait()
            for key, step in list(self.running.items()):
                if step():
                    self.running.pop(key, None)
            await asyncio.sleep(self.pace_s)


class MockEngine:
    """An engine's socket: one message per step, with a token for each of its requests.

    Args:
        pace_s: from one step to the next.
        path: of a Unix socket.
        alone: every request gets one token only, as from a node that prefills.
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
                block_size=16,
                max_model_len=8192,
                eos_token_ids=(),
            )
        )
        self._running: dict[str, tuple[int, int]] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Turns of a core: take requests in, make a step, for ever."""
        due = 0.0
        while True:
            patience = max(0.0, due - time.monotonic()) if self._running else IDLE_S
            for message in self._frontends.receive(patience, self._wake):
                if isinstance(message, AddRequest):
                    count = 1 if self._alone else message.params.max_tokens
                    self._running[message.request_id] = 0, count
                elif isinstance(message, AbortRequest):
                    self._running.pop(message.request_id, None)
            if self._running and time.monotonic() >= due:
                due = time.monotonic() + self._pace_s
                self._step()

    def _step(self) -> None:
        outputs = []
        for name, (index, count) in list(self._running.items()):
            outputs.append(mock_output(name, index, index == count - 1))
            self._running[name] = index + 1, count
            if index == count - 1:
                del self._running[name]
        self._frontends.send(Outputs(outputs=tuple(outputs)))


class MockHttp(asyncio.Protocol):
    """One connection: just enough of HTTP to keep the benchmark from measuring its mock."""

    pages: dict[str, bytes] = {}  # noqa: RUF012

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """Stop making tokens for it."""
        self._steps.running.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
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
        events = _openai(body) if path == "/v1/completions" else _outputs(body, path)

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
    """What an engine's own endpoint would answer."""
    made = int(time.time())
    for index in range(json.loads(body)["max_tokens"]):
        yield (
            b'{"id":"cmpl-0123456789abcdef","object":"text_completion","created":%d,"model":"mock",'
            b'"choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":null}]}'
            % (made, _word(index % 1000).encode())
        )


def _outputs(body: bytes, path: str) -> Iterator[bytes]:
    """What a node's token endpoint answers; a source stops after one token."""
    asked = msgspec.json.decode(body, type=GenerateRequest)
    count = 1 if path.startswith("/prefill") else asked.sampling_params.max_tokens
    for index in range(count):
        yield msgspec.json.encode(mock_output(asked.request_id or "", index, index == count - 1))


def mock_output(request_id: str, index: int, last: bool) -> Output:
    """A step's token for one request."""
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
}

if __name__ == "__main__":
    main()
