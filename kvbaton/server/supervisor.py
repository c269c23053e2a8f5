"""Worker processes that answer HTTP on one port, and their supervisor.

The supervisor owns the listening socket and everything that exists once: a router's membership, a
node's engine. Workers accept connections on that socket and serve clients. They pass on requests
that only the supervisor can answer (`WorkerLink.forward`), get its published state
(`Supervisor.publish`), and send it reports (`WorkerLink.report`). Counters of all workers are added
up, including those that ended. A worker that ends is replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import multiprocessing.process
import signal
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest

from kvbaton.engine.socket_folder import SocketFolder
from kvbaton.errors import ConfigError, RequestError
from kvbaton.log import begin_log
from kvbaton.server.app import freeze_startup, serve_on
from kvbaton.server.auth import PEER
from kvbaton.server.bodies import read_bytes
from kvbaton.server.config import EndpointConfig
from kvbaton.server.metrics import MergedMetrics
from kvbaton.server.sse import EVENTS, send_events
from kvbaton.signals import begin_child
from kvbaton.types import Count

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
METRICS_TIMEOUT_S = 1.0
RESTART_PAUSE_S = 0.5
STOP_MARGIN_S = 5.0
CONNECT_TIMEOUT_S = 60.0
FORWARD_TIMEOUT_S = 660.0
"""Seconds for the supervisor's answer: it waits 600 s itself for a profile to end."""
_PEER = "X-Kvbaton-Peer"
"""The address of the client of a worker; a client that sends this header is not believed."""
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "content-length", "te", _PEER.lower())
)
_LENGTH = struct.Struct("<I")

WorkerMain = Callable[["WorkerLink", Any], Awaitable[None]]
"""Main function of a worker, defined in a module: gets the link and the payload, and serves."""

# --- messages between a supervisor and its workers, as MessagePack ---


class PublishedState(msgspec.Struct, frozen=True, tag="state"):
    """State that the supervisor publishes to workers; each message replaces the one before.

    Attributes:
        data: The state, as the owner of the workers encodes it.
    """

    data: bytes


class AskMetrics(msgspec.Struct, frozen=True, tag="ask_metrics"):
    """Asks a worker for `WorkerMetrics` with the same number."""

    number: Count


class WorkerStarted(msgspec.Struct, frozen=True, tag="started"):
    """Says that the worker serves."""


class WorkerMetrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Metrics of a worker, in Prometheus' text format."""

    number: Count
    text: str


class WorkerReport(msgspec.Struct, frozen=True, tag="report"):
    """Report of a worker to its supervisor.

    Attributes:
        data: The report, as the owner of the workers encodes it.
    """

    data: bytes


ToWorker = PublishedState | AskMetrics
FromWorker = WorkerStarted | WorkerMetrics | WorkerReport

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


class Supervisor:
    """Starts workers, publishes state to them, replaces those that end, and stops them.

    Args:
        main: Main function of each worker.
        payload: Argument of `main`; it is pickled for the workers.
        listener: Listening socket, on which each worker accepts; `stop` closes it.
        control: Application that answers requests passed on by workers. Its socket is in a folder
            of mode 0700.
        count: Number of workers.
        log_level: Level of the workers' log on standard error.

    Attributes:
        on_report: Called with (worker, data) for each `WorkerLink.report`.
        state: Latest published state, encoded for workers; empty before the first.
    """

    def __init__(
        self,
        main: WorkerMain,
        payload: Any,
        listener: socket.socket,
        control: web.Application,
        *,
        count: int,
        log_level: str = "info",
    ) -> None:
        self.on_report: Callable[[int, bytes], None] = lambda worker, data: None
        self._main, self._payload, self._listener = main, payload, listener
        self._log_level = log_level
        self._count = count
        self._folder = SocketFolder()
        self._control_path = f"{self._folder.path}/control"
        control.middlewares.insert(0, _restore_peer)
        self._runner = web.AppRunner(control, access_log=None, auto_decompress=False)
        self.state = b""
        self._workers: dict[int, _Worker] = {}
        self._metrics = MergedMetrics()
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Start all workers and wait until they serve.

        Raises:
            ConfigError: A worker can't serve (its log says why), or does not do so in time.
        """
        await self._runner.setup()
        await web.UnixSite(self._runner, self._control_path).start()
        started = [asyncio.get_running_loop().create_future() for _ in range(self._count)]
        self._keepers = [
            asyncio.create_task(self._keep(index, future), name=f"worker {index}")
            for index, future in enumerate(started)
        ]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*started)
        except TimeoutError as error:
            problem = f"not all of {self._count} serve within {START_TIMEOUT_S:g} s"
            raise ConfigError("--workers", problem) from error

    async def _keep(self, index: int, first: asyncio.Future[None]) -> None:
        """Keep a worker running: start it, and another one whenever it ends."""
        while not self._stopping:
            try:
                worker = await _Worker.start(self, index)
            except OSError as error:  # no room for a process or a file
                if not first.done():
                    first.set_exception(ConfigError("--workers", f"can't start one: {error}"))
                    return
                logger.error("can't start worker %d, trying on: %s", index, error)
                await asyncio.sleep(RESTART_PAUSE_S)
                continue
            self._workers[index] = worker
            if self.state:
                worker.published.set()
            feeding = asyncio.create_task(worker.feed(), name=f"states of worker {index}")
            try:
                await worker.listen(first)
            finally:
                feeding.cancel()
                del self._workers[index]
                self._metrics.retire(index)
            if self._stopping:
                return
            how = f"worker {index} ended with status {await worker.join()}"
            if not first.done():
                first.set_exception(ConfigError("--workers", f"{how} before it could serve"))
                return
            logger.error("%s; starting another", how)
            await asyncio.sleep(RESTART_PAUSE_S)

    def publish(self, data: bytes) -> None:
        """Publish a new state to all workers, including those that start later."""
        self.state = _encoder.encode(PublishedState(data))
        for worker in self._workers.values():
            worker.published.set()

    async def metrics(self, own: bytes = b"") -> bytes:
        """Metrics of all workers, added up with `own`; all in Prometheus' text format."""
        workers = tuple(self._workers.items())
        texts = await asyncio.gather(*(worker.metrics() for _, worker in workers))
        for (index, worker), text in zip(workers, texts, strict=True):
            if text is not None and self._workers.get(index) is worker:
                self._metrics.update(index, text)
        return self._metrics.text(own.decode()).encode()

    def stop_replacing(self) -> None:
        """Replace no more workers that end, because what they need is about to go away."""
        self._stopping = True

    async def stop(self, grace_s: float) -> None:
        """Tell workers to end; their open requests get `grace_s` seconds."""
        self.stop_replacing()
        # Clients that connect from now on are refused, and not left waiting for a worker.
        self._listener.close()
        workers = tuple(self._workers.values())
        for worker in workers:
            if worker.process.is_alive():
                worker.process.terminate()
        await asyncio.gather(*(worker.join(grace_s + STOP_MARGIN_S) for worker in workers))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._runner.cleanup()
        self._folder.close()

    def spawn(self, index: int, link: socket.socket) -> multiprocessing.process.BaseProcess:
        """Start the process of a worker."""
        process = multiprocessing.get_context("spawn").Process(
            target=worker_main,
            args=(
                self._main,
                self._payload,
                self._listener,
                link,
                self._control_path,
                self._log_level,
            ),
            name=f"kvbaton-worker-{index}",
            daemon=True,
        )
        process.start()
        return process


@web.middleware
async def _restore_peer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Take the client's address from the worker that passed the request on.

    Only workers can reach this socket.
    """
    request[PEER] = request.headers.get(_PEER, "")
    return await handler(request)


class _Worker:
    """The supervisor's side of a worker.

    Attributes:
        process: Process of the worker.
        published: Set when there is a state that the worker has not been sent.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        index: int,
        process: multiprocessing.process.BaseProcess,
        channel: _Channel,
    ) -> None:
        self.process = process
        self._supervisor, self._index, self._channel = supervisor, index, channel
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[str]] = {}
        self.published = asyncio.Event()

    @classmethod
    async def start(cls, supervisor: Supervisor, index: int) -> _Worker:
        """Start the worker's process."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = supervisor.spawn(index, theirs)
            channel = await _Channel.open(ours)
        except BaseException:
            ours.close()
            raise
        return cls(supervisor, index, process, channel)

    async def listen(self, started: asyncio.Future[None]) -> None:
        """Handle the worker's messages until it ends."""
        try:
            while (data := await self._channel.receive()) is not None:
                try:
                    self._take(_from_worker.decode(data), started)
                except Exception:  # one bad message must not end the worker
                    logger.exception("what a worker said can't be taken in")
        finally:
            self._channel.close()

    def _take(self, message: FromWorker, started: asyncio.Future[None]) -> None:
        match message:
            case WorkerStarted():
                if not started.done():
                    started.set_result(None)
            case WorkerMetrics(number, text):
                asked = self._asked.get(number)
                if asked is not None and not asked.done():
                    asked.set_result(text)
            case WorkerReport(report):
                self._supervisor.on_report(self._index, report)

    async def feed(self) -> None:
        """Send the latest state, as fast as the worker reads; return when the worker is gone."""
        with suppress(ConnectionError):
            while await self.published.wait():
                await self._channel.drain()
                self.published.clear()
                self._channel.send(self._supervisor.state)

    async def metrics(self) -> str | None:
        """Metrics of the worker; None if it does not answer in time."""
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                await self._channel.drain()
                self._channel.send(_encoder.encode(AskMetrics(number)))
                return await answer
        except (ConnectionError, TimeoutError):
            return None
        finally:
            del self._asked[number]

    async def join(self, timeout_s: float = STOP_MARGIN_S) -> int | None:
        """Wait for the process to end, kill it after `timeout_s`, and return its exit status."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.process.join, timeout_s)
        if self.process.is_alive():
            logger.warning("%s did not stop in time; killing it", self.process.name)
            self.process.kill()
            await loop.run_in_executor(None, self.process.join, STOP_MARGIN_S)
        return self.process.exitcode


class _Channel:
    """Whole messages over a stream socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, sock: socket.socket) -> _Channel:
        """Open a channel over a connected socket, which the channel then owns."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, data: bytes) -> None:
        """Queue a message; it is dropped if the other end is gone."""
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def drain(self) -> None:
        """Wait until the other end has read enough of what was sent.

        Raises:
            ConnectionError: The other end is gone.
        """
        await self._writer.drain()

    async def receive(self) -> bytes | None:
        """The next message; None if the other end is gone."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Close the socket."""
        self._writer.close()


# --- in a worker ---


def worker_main(
    main: WorkerMain,
    payload: Any,
    listener: socket.socket,
    link: socket.socket,
    control_path: str,
    log_level: str,
) -> None:
    """Entry point of a worker's process; see `Supervisor`."""
    begin_child()
    begin_log(log_level)

    async def work() -> None:
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(control_path),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=FORWARD_TIMEOUT_S
            ),
        ) as session:
            await main(WorkerLink(listener, await _Channel.open(link), session), payload)

    asyncio.run(work())


class WorkerLink:
    """A worker's side: the listening socket and the connection to its supervisor.

    Attributes:
        on_state: Called with each state that the supervisor publishes. Set it before `serve`.
    """

    def __init__(
        self, listener: socket.socket, channel: _Channel, session: aiohttp.ClientSession
    ) -> None:
        self.on_state: Callable[[bytes], None] = lambda data: None
        self._listener, self._channel, self._session = listener, channel, session
        self._stop = asyncio.Event()
        self._streams: set[asyncio.Task[Any]] = set()

    async def serve(
        self, app: web.Application, registry: CollectorRegistry, config: EndpointConfig
    ) -> None:
        """Serve clients until told to stop, or until the supervisor is gone.

        Args:
            app: Application that answers clients.
            registry: Metrics of the worker.
            config: Settings of the endpoint.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        app.on_shutdown.append(self._end_streams)
        runner = await serve_on(self._listener, app, config)
        listening = asyncio.create_task(self._listen(registry))
        try:
            freeze_startup()
            self._send(WorkerStarted())
            await self._stop.wait()
            # Ignore a second SIGTERM, which may come when the loop is closed.
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finally:
            await runner.cleanup()
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            self._channel.close()

    def stop(self) -> None:
        """End `serve`; the supervisor starts another worker unless it is stopping."""
        self._stop.set()

    async def _listen(self, registry: CollectorRegistry) -> None:
        while (data := await self._channel.receive()) is not None:
            try:
                match _to_worker.decode(data):
                    case PublishedState(state):
                        self.on_state(state)
                    case AskMetrics(number):
                        self._send(WorkerMetrics(number, generate_latest(registry).decode()))
            except Exception:  # one bad message must not end the worker
                logger.exception("what the supervisor said can't be taken in")
        self._stop.set()

    def report(self, data: bytes) -> None:
        """Send a report to the supervisor; see `Supervisor.on_report`."""
        self._send(WorkerReport(data))

    def _send(self, message: FromWorker) -> None:
        self._channel.send(_encoder.encode(message))

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Handle a request by passing it on to the supervisor; events are relayed as they come.

        Raises:
            RequestError: 503 if the supervisor does not answer; or as `read_bytes`.
        """
        body = await read_bytes(request)
        headers = {**_end_to_end(request.headers), _PEER: request.remote or ""}
        try:
            async with self._session.request(
                request.method,
                f"http://supervisor{request.raw_path}",
                headers=headers,
                data=body,
                allow_redirects=False,
            ) as response:
                if response.content_type == EVENTS:
                    task = asyncio.current_task()
                    assert task is not None, "handlers run in tasks"
                    self._streams.add(task)
                    try:
                        events = response.content.iter_any()
                        return await send_events(request, events, _end_to_end(response.headers))
                    finally:
                        self._streams.discard(task)
                return web.Response(
                    status=response.status,
                    headers=_end_to_end(response.headers),
                    body=await response.read(),
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RequestError(
                f"the supervisor does not answer: {error!r}", status=503, code="no_supervisor"
            ) from error

    async def _end_streams(self, app: web.Application) -> None:
        """End event streams, which would otherwise use up the time for open requests."""
        for task in self._streams:
            task.cancel()


def _end_to_end(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}
