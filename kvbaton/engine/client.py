"""A frontend of an engine core: asks for tokens over ZMQ, notices the core's death."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, Self

import msgspec
import zmq
from msgspec.structs import replace
from zmq.utils.monitor import recv_monitor_message

from kvbaton.connectors.curve import secure_client
from kvbaton.engine.frontends import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    Command,
    Connect,
    Dead,
    Disconnected,
    FromCore,
    Metrics,
    Output,
    Outputs,
    Ping,
    Pong,
    Ready,
    Rejected,
    Reply,
    ToCore,
)
from kvbaton.types import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 30.0
MAX_BEHIND = 1 << 16
"""Tokens, and candidates of their log probabilities, that may wait for a request's reader."""
_MERGE_AT = 32
"""Outputs of one choice that wait before they are merged into one."""
_MAX_BATCH = 256
"""Messages taken in before readers get their turn."""
_HIGH_WATER_MARK = 10_000
_LINGER_MS = 500

_encoder = msgspec.msgpack.Encoder()
_from_core = msgspec.msgpack.Decoder(FromCore)


class OutputReceiver(Protocol):
    """Who is told what the core says to one request."""

    def put(self, output: Output) -> None:
        """The core says this."""
        ...

    def fail(self, error: Exception, *, over: bool = False) -> None:
        """Nothing more will come: the core refuses it (`over`), or is gone."""
        ...


class EngineClient:
    """A connection to an engine core. Make one with `connect`.

    A connection that is lost stays lost, and its requests are over: connect anew.

    Attributes:
        ready: what the core said of itself.
        metrics: the latest counters and gauges; a remote frontend is not told any.
        dead: why nothing can be asked any more, or None.
        died: set when `dead` is.
    """

    ready: Ready

    def __init__(self) -> None:
        self.metrics: Metrics | None = None
        self.dead: str | None = None
        self.died = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, OutputReceiver] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._connected: asyncio.Future[Ready] = self._loop.create_future()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    # --- life ---

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        cluster_key: str | None = None,
        local: bool = False,
        timeout_s: float = 10.0,
    ) -> Self:
        """Connect to a core that serves or is about to.

        Args:
            address: ``tcp://host:port`` or ``ipc:///...``, as `Ready.engine_address` has it.
            cluster_key: of the cluster; the connection is then encrypted.
            local: it is a node's own process, whose socket closes when the core dies, so that a
                core that merely stands still need not be given up.
            timeout_s: until the core must have answered.

        Raises:
            EngineDeadError: it did not, or speaks no version of our messages.
            ValueError: the address is none.
        """
        client = cls()
        try:
            await client._open(address, cluster_key, local, timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def _open(
        self, address: str, cluster_key: str | None, local: bool, timeout_s: float
    ) -> None:
        """As `connect`."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket = socket
        socket.set_hwm(_HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        if cluster_key:
            secure_client(socket, cluster_key)
        if not local:
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._loop.add_reader(socket.fileno(), self._read)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ValueError(f"can't connect to {address!r}: {error}") from error
        self._send(Connect())
        self._read_monitor()  # the descriptor speaks of what comes after a look at the socket
        try:
            self.ready = await asyncio.wait_for(self._connected, timeout_s)
        except TimeoutError:
            raise EngineDeadError(
                f"no engine answered at {address} within {timeout_s:g} s; are the cluster "
                "keys the same?"
            ) from None

    async def close(self) -> None:
        """End all requests and the connection. Idempotent."""
        self._fail("the connection to the engine was closed")
        socket, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        if socket is None or monitor is None:
            return
        self._loop.remove_reader(monitor.fileno())
        self._loop.remove_reader(socket.fileno())
        socket.disable_monitor()
        monitor.close()
        socket.close()

    def _fail(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        self.died.set()
        error = EngineDeadError(reason)
        if not self._connected.done():
            self._connected.set_exception(error)
            self._connected.exception()  # perhaps nobody awaits it any more
        for stream in tuple(self._streams.values()):
            stream.fail(error)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    # --- ask ---

    async def generate(self, request: AddRequest) -> AsyncGenerator[Output]:
        """Run a request; yields its outputs. Closing the generator early aborts the request.

        While the reader is behind, the outputs of one choice are merged into one.

        Raises:
            RequestError: the core does not take it, or its reader is too far behind.
            EngineDeadError: the core is gone.
        """
        stream = _OutputStream(self._loop, request.params.n)
        self.submit(request, stream)
        try:
            while stream.open_choices:
                yield await stream.get()
        finally:
            self.forget(request.request_id, over=stream.is_over)

    def submit(self, request: AddRequest, receiver: OutputReceiver) -> None:
        """Run a request; `receiver` is told all about it, in this loop's thread, until `forget`.

        Raises:
            RequestError: its id is in use.
            EngineDeadError: the core is gone.
        """
        self._check_alive()
        if request.request_id in self._streams:
            raise RequestError(
                f"request id {request.request_id!r} is in use", param="request_id", status=409
            )
        self._streams[request.request_id] = receiver
        try:
            self._send(request)
        except BaseException:
            self._streams.pop(request.request_id, None)
            raise

    def forget(self, request_id: str, *, over: bool) -> None:
        """Forget a request; if it is not over, the core is told to end it. Never fails."""
        if self._streams.pop(request_id, None) is None or over or self.dead is not None:
            return
        with contextlib.suppress(EngineDeadError):
            self._send(AbortRequest(request_id=request_id))

    @property
    def idle(self) -> bool:
        """Whether no request runs."""
        return not self._streams

    async def ping(self, timeout_s: float) -> None:
        """Wait until the core has answered between two steps.

        Raises:
            EngineDeadError: the core is gone.
            TimeoutError: no answer within `timeout_s`.
        """
        number = next(self._numbers)
        await self._ask(number, Ping(number=number), timeout_s)

    async def command(self, name: str, argument: Any = None) -> Any:
        """Ask the core something (`messages.engine.Command`); a remote frontend gets no answer.

        Raises:
            EngineDeadError: the core is gone.
            TimeoutError: no answer within `COMMAND_TIMEOUT_S`.
            ValueError: the core does not know the command.
        """
        number = next(self._numbers)
        command = Command(command_id=number, name=name, argument=argument)
        return await self._ask(number, command, COMMAND_TIMEOUT_S)

    async def _ask(self, number: int, message: ToCore, timeout_s: float) -> Any:
        self._check_alive()
        answer = self._answers[number] = self._loop.create_future()
        try:
            self._send(message)
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            del self._answers[number]

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    def _send(self, message: ToCore) -> None:
        assert self._socket is not None, "checked by callers: not closed"
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # so many messages wait that nobody reads them
            self._fail("the engine does not read what it is sent")
            raise EngineDeadError(self.dead) from None
        # Sending may have taken the descriptor's signal that something came; see zmq_getsockopt(3).
        if self._socket.poll(0):
            self._loop.call_soon(self._read)

    # --- listen ---

    def _read(self) -> None:
        """Take in what has come; ZMQ's descriptor speaks up again only after all was read."""
        for _ in range(_MAX_BATCH):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(_from_core.decode(data))
            except Exception as error:  # some outputs would never come
                logger.exception("what the engine core says can't be read")
                self._fail(f"the engine's answers can't be read: {type(error).__name__}: {error}")
        self._loop.call_soon(self._read)

    def _take(self, message: FromCore) -> None:
        match message:
            case Outputs():
                streams = self._streams
                for output in message.outputs:
                    stream = streams.get(output.request_id)
                    if stream is not None:  # else it was closed, and the abort is on its way
                        stream.put(output)
            case Rejected():
                stream = self._streams.get(message.request_id)
                if stream is not None:
                    error = RequestError(
                        message.message,
                        param=message.param,
                        status=message.status,
                        code=message.code,
                    )
                    stream.fail(error, over=True)
            case Metrics():
                self.metrics = message
            case Reply():
                self._answer(message.command_id, message.result, message.error)
            case Pong():
                self._answer(message.number, None, None)
            case Ready():
                if not self._connected.done():
                    self._connected.set_result(message)
            case Disconnected():
                self._fail(message.reason)
            case Dead():
                self._fail(message.error)

    def _answer(self, number: int, result: Any, error: str | None) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(ValueError(error))

    def _read_monitor(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._read()  # its last words may be in the socket
            if self._connected.done():
                self._lost()
            elif self.dead is None:
                self._connect_again()

    def _connect_again(self) -> None:
        """Before the core has answered: ZMQ tries again, and what we said may have been lost."""
        assert self._socket is not None
        try:
            self._socket.send(_encoder.encode(Connect()), zmq.NOBLOCK)
        except zmq.Again:  # ZMQ tries no more: the handshake itself failed
            self._fail("the engine refused the connection; are the cluster keys the same?")

    def _lost(self) -> None:
        """The connection is gone."""
        self._fail("the connection to the engine was lost")


class _OutputStream:
    """Outputs of one request that have come and are yet to be read.

    Args:
        loop: the reader's.
        num_choices: of the request.

    Attributes:
        open_choices: whose last output was not read yet.
        is_over: the core has nothing more to say.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_choices: int) -> None:
        self.open_choices = num_choices
        self.is_over = False
        self._unfinished = num_choices
        self._loop = loop
        self._waiting: dict[int, list[Output]] = {}
        self._behind = 0
        self._reader: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def put(self, output: Output) -> None:
        """The core says this."""
        if self._error is not None:
            return
        if output.finish_reason is not None:
            self._unfinished -= 1
            self.is_over = not self._unfinished
        waiting = self._waiting.setdefault(output.choice, [])
        waiting.append(output)
        if len(waiting) > 1:
            self._behind += len(output.token_ids)
            if output.logprobs is not None:
                self._behind += sum(len(entry.top) for entry in output.logprobs)
            if len(waiting) >= _MERGE_AT:
                waiting[:] = [merge_outputs(waiting)]
            if self._behind > MAX_BEHIND:
                self._waiting.clear()
                reason = (
                    f"the answer was not read: {self._behind} tokens and log probabilities wait"
                )
                self.fail(RequestError(reason, status=503, code="slow_reader"))
        self._wake()

    def fail(self, error: Exception, *, over: bool = False) -> None:
        """Nothing more will come; what has come is read first."""
        if self._error is None:
            self._error, self.is_over = error, self.is_over or over
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Output:
        """The next output.

        Raises:
            RequestError, EngineDeadError: what `fail` was called with.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._reader = self._loop.create_future()
            await self._reader
        choice = next(iter(self._waiting))
        waiting = self._waiting.pop(choice)
        if not self._waiting:
            self._behind = 0
        output = merge_outputs(waiting)
        self.open_choices -= output.finish_reason is not None
        return output


def merge_outputs(outputs: Sequence[Output]) -> Output:
    """Consecutive outputs of one choice as one; that of a single one is itself."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    scored = any(output.logprobs is not None for output in outputs)
    prompts = (output.prompt_logprobs for output in outputs)
    transfers = (output.kv_transfer_params for output in reversed(outputs))
    return replace(
        last,
        index=first.index,
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(p for output in outputs for p in output.logprobs or ()) if scored else None,
        prompt_logprobs=next((scores for scores in prompts if scores is not None), None),
        cached_tokens=max(output.cached_tokens for output in outputs),
        transferred_tokens=max(output.transferred_tokens for output in outputs),
        kv_transfer_params=next((params for params in transfers if params is not None), None),
    )
