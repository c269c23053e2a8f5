"""The HTTP process's end of an engine core: starts it, talks to it, notices its death."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvbaton.engine.config import EngineConfig
from kvbaton.engine.process import RoleFactory, core_main
from kvbaton.errors import ConfigError, EngineDeadError, RequestError
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    Command,
    Dead,
    FromCore,
    Metrics,
    Output,
    Outputs,
    Ready,
    Rejected,
    Reply,
    Shutdown,
    ToCore,
)
from kvbaton.types import NodeId

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
COMMAND_TIMEOUT_S = 30.0

_encoder = msgspec.msgpack.Encoder()
_from_core = msgspec.msgpack.Decoder(FromCore)

Item = Output | Rejected | EngineDeadError


class EngineClient:
    """An engine core in a child process. Make one with `start`.

    Attributes:
        ready: what the core said of itself when it came up.
        metrics: the latest counters and gauges.
        dead: why the core is gone, or None while it lives.
        died: set when `dead` is.
    """

    ready: Ready

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.metrics: Metrics | None = None
        self.dead: str | None = None
        self.died = asyncio.Event()
        self._queues: dict[str, asyncio.Queue[Item]] = {}
        self._commands: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._folder = tempfile.mkdtemp(prefix="kvbaton-")  # mode 0700: only we may connect
        self._context = zmq.asyncio.Context()
        self._to = self._context.socket(zmq.PUSH)
        self._from = self._context.socket(zmq.PULL)
        self._to.set_hwm(0)
        self._from.set_hwm(0)
        self._to.bind(self._endpoint("to"))
        self._from.bind(self._endpoint("from"))

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    # --- life ---

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        role_factory: RoleFactory,
        *,
        node: NodeId,
        log_level: str = "warning",
    ) -> EngineClient:
        """Start a core and wait until it can serve.

        Raises:
            ConfigError: the core refused a setting.
            EngineDeadError: it died or took longer than `START_TIMEOUT_S`.
        """
        client = cls(node)
        context = multiprocessing.get_context("spawn")
        client._process = context.Process(
            target=core_main,
            args=(
                config,
                client.node,
                role_factory,
                client._endpoint("to"),
                client._endpoint("from"),
                log_level,
            ),
            name=f"kvbaton-core-{node.node}",
            daemon=True,
        )
        client._process.start()
        loop = asyncio.get_running_loop()
        loop.add_reader(client._process.sentinel, client._process_ended)
        client._reader = asyncio.create_task(client._read())
        try:
            client.ready = await asyncio.wait_for(client._ready, START_TIMEOUT_S)
        except BaseException:
            await client.shutdown(0.0)
            raise
        return client

    _process: multiprocessing.process.BaseProcess
    _reader: asyncio.Task[None]

    async def shutdown(self, grace_s: float = 5.0) -> None:
        """Let running requests finish for `grace_s` seconds, then end the core. Idempotent."""
        if self._closing:
            return
        self._closing = True
        loop = asyncio.get_running_loop()
        if self._process.is_alive():
            # A core that is about to exit by itself reads no more, and such a send never ends.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._send(Shutdown(grace_s=grace_s)), 1.0)
            await loop.run_in_executor(None, self._process.join, grace_s + 5.0)
        if self._process.is_alive():
            logger.warning("engine core did not stop in time; killing it")
            self._process.kill()
            await loop.run_in_executor(None, self._process.join, 5.0)
        loop.remove_reader(self._process.sentinel)
        self._reader.cancel()
        self._fail("the engine was shut down")
        self._to.close(0)
        self._from.close(0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _process_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        # Its last words (`Dead`) may still be in the socket: give them the next turn.
        asyncio.get_running_loop().call_later(0.2, self._report_exit)

    def _report_exit(self) -> None:
        self._fail(f"the engine core exited with code {self._process.exitcode}")

    def _fail(self, reason: str, field: str | None = None) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        self.died.set()
        error = EngineDeadError(reason)
        if not self._ready.done():
            self._ready.set_exception(ConfigError(field, reason) if field else error)
            self._ready.exception()  # shutdown may come before anybody awaits it
        for queue in self._queues.values():
            queue.put_nowait(error)
        for future in self._commands.values():
            if not future.done():
                future.set_exception(error)

    # --- talk ---

    async def generate(self, request: AddRequest) -> AsyncIterator[Output]:
        """Run a request; yields its outputs. Closing the iterator early aborts the request.

        Raises:
            RequestError: the core does not take it.
            EngineDeadError: the core is gone.
        """
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if request.request_id in self._queues:
            raise RequestError(
                f"request id {request.request_id!r} is in use", param="request_id", status=409
            )
        queue: asyncio.Queue[Item] = asyncio.Queue()
        self._queues[request.request_id] = queue
        open_choices = request.params.n
        try:
            await self._send(request)
            while open_choices:
                output = self._unwrap(await queue.get())
                open_choices -= output.finish_reason is not None
                yield output
        finally:
            del self._queues[request.request_id]
            if open_choices and self.dead is None:
                await self._send(AbortRequest(request_id=request.request_id))

    @staticmethod
    def _unwrap(item: Item) -> Output:
        if isinstance(item, Rejected):
            raise RequestError(item.message, param=item.param, status=item.status, code=item.code)
        if isinstance(item, EngineDeadError):
            raise item
        return item

    async def command(self, name: str, argument: Any = None) -> Any:
        """Ask the core something (`messages.engine.Command`).

        Raises:
            EngineDeadError: the core is gone.
            TimeoutError: no answer within `COMMAND_TIMEOUT_S`.
            ValueError: the core does not know the command.
        """
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        command_id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands[command_id] = future
        try:
            await self._send(Command(command_id=command_id, name=name, argument=argument))
            return await asyncio.wait_for(future, COMMAND_TIMEOUT_S)
        finally:
            del self._commands[command_id]

    async def _send(self, message: ToCore) -> None:
        await self._to.send(_encoder.encode(message))

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(_from_core.decode(await self._from.recv()))
        except Exception as error:  # no output would ever come again
            logger.exception("what the engine core says can't be read")
            self._fail(f"the engine's answers can't be read: {type(error).__name__}: {error}")

    def _dispatch(self, message: FromCore) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    self._deliver(output.request_id, output)
            case Rejected():
                self._deliver(message.request_id, message)
            case Metrics():
                self.metrics = message
            case Reply():
                self._answer(message)
            case Ready():
                self._ready.set_result(message)
            case Dead():
                self._fail(message.error, message.field)

    def _deliver(self, request_id: str, item: Item) -> None:
        queue = self._queues.get(request_id)
        if queue is not None:  # else the client has gone away and the abort is on its way
            queue.put_nowait(item)

    def _answer(self, reply: Reply) -> None:
        future = self._commands.get(reply.command_id)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.result)
        else:
            future.set_exception(ValueError(reply.error))
