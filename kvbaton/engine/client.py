"""A frontend of an engine core: requests tokens over ZMQ, and notices when the core dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec
import zmq
from msgspec.structs import replace
from typing_extensions import override
from zmq.utils.monitor import recv_monitor_message

from kvbaton.connectors.curve import secure_client
from kvbaton.engine.frontends import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from kvbaton.engine.outputs import OutputReceiver, TokenSource, merge_outputs
from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.messages import engine as messages
from kvbaton.types import MAX_MESSAGE_BYTES

DRIFT = 2e-4
"""Largest assumed drift of two clocks, in seconds per second: twice that of a bad quartz."""


class ClockOffset:
    """Offset of another machine's monotonic clock from ours, estimated from messages.

    A message sent at `sent` (our clock) that had arrived by `received` (their clock) shows that
    their clock is ahead by at most ``received - sent``. One sent at `told` (theirs) that had
    arrived by `heard` (ours) shows that it is ahead by at least ``told - heard`` (Cristian, 1989).
    The bounds of all messages hold at once, so the shortest delays each way limit the error; with
    time the bounds widen by the drift. Wall clocks are not used.
    """

    def __init__(self) -> None:
        self._low, self._high = -math.inf, math.inf
        self._at = 0.0

    def observe(self, sent: float, received: float, told: float, heard: float) -> None:
        """Take in a question and its answer; `sent` and `heard` are on our clock, in seconds.

        Args:
            sent: When the question was sent, or earlier.
            received: When the question had arrived, or later.
            told: When the answer was sent, or earlier.
            heard: When the answer had arrived, or later.
        """
        slack = DRIFT * (heard - self._at)
        self._at = heard
        low, high = max(self._low - slack, told - heard), min(self._high + slack, received - sent)
        if low > high:  # one of the clocks stood still, as when its machine is suspended
            low, high = told - heard, received - sent
        self._low, self._high = low, high

    @property
    def seconds(self) -> float:
        """Seconds that their clock is ahead; 0 if it may be the same clock, as on one machine."""
        if self._low <= 0 <= self._high:
            return 0.0
        return (self._low + self._high) / 2


logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 30.0
LONG_COMMANDS = {"stop_profile": 600.0, "reset_store": 60.0}
"""Timeouts in seconds of commands that may take longer, by command."""
HUNG_S = 120.0
"""Seconds without a sign of life of a core, which gives two a second, after which it hangs: no step
takes as long. A device that hangs ends no wait for it."""
_MAX_BATCH = 256
"""Maximum number of messages handled before receivers are flushed."""
_SEND_AT = 8
_HIGH_WATER_MARK = 10_000
_LINGER_MS = 500
_POLLIN = int(zmq.POLLIN)
"""The flag as an integer: converting `zmq`'s enumeration takes longer than the query itself."""

_from_core = msgspec.msgpack.Decoder(messages.FromCore)


@dataclass(slots=True)
class _Asked:
    """A running request: its receiver, its number of open choices, and when it was sent."""

    receiver: OutputReceiver
    open_choices: int
    at: float


class EngineClient(TokenSource):
    """A connection to an engine core; made by `connect`.

    A lost connection stays lost, and its requests have failed: connect again.

    Attributes:
        ready: The core's description of itself.
        metrics: The latest metrics; remote frontends get none.
        heard_at: When the core last gave a sign of life (`time.monotonic`).
        dead: Why the connection can't be used any more, or None.
        died: Set when `dead` is.
        draining: Whether the core was asked to take no new requests, or to end.
    """

    ready: messages.Ready
    last_words_s: ClassVar[float] = 0.0
    """Seconds between the loss of the connection and the failure of all requests."""

    def __init__(self) -> None:
        self.metrics = messages.NO_METRICS
        self.heard_at = time.monotonic()
        self.dead: str | None = None
        self.died = asyncio.Event()
        self.draining = False
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, _Asked] = {}
        self._unread: dict[tuple[str, int], list[messages.Output]] = {}
        self._unflushed: dict[OutputReceiver, None] = {}
        self._clock = ClockOffset()
        self._unsent: list[bytes] = []
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._on_blocks: Callable[[messages.CachedBlocks], None] | None = None
        self._next_blocks = 0
        self._connected: asyncio.Future[messages.Ready] = self._loop.create_future()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    # --- connection ---

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
            address: ``tcp://host:port`` or ``ipc:///...``, as in `Ready.engine_address`.
            cluster_key: Key of the cluster; encrypts the connection.
            local: Whether the core belongs to this node. Its socket closes when the core dies, so
                no heartbeats are needed, and a core that only stalls is not given up.
            timeout_s: Seconds within which the core must answer.

        Raises:
            EngineDeadError: The core did not answer, or speaks no version of our messages; or this
                process can't open a connection.
            ValueError: The address is invalid.
        """
        client = cls()
        try:
            await client._open(address, cluster_key, local, timeout_s)
        except zmq.ZMQError as error:  # too many files are open, say
            await client.close()
            raise EngineDeadError(f"can't connect to {address}: {error}") from error
        except BaseException:
            await client.close()
            raise
        return client

    async def _open(
        self, address: str, cluster_key: str | None, local: bool, timeout_s: float
    ) -> None:
        """Connect this client; see `connect`."""
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
        self._send(messages.Connect())
        self._read_monitor()  # its descriptor only signals events after this look at the socket
        try:
            # `asyncio.wait_for` of Python 3.11 loses a cancellation that comes with the answer.
            async with asyncio.timeout(timeout_s):
                self.ready = await self._connected
        except TimeoutError:
            raise EngineDeadError(
                f"no engine answered at {address} within {timeout_s:g} s; are the cluster "
                "keys the same?"
            ) from None

    async def close(self) -> None:
        """End all requests and the connection. Idempotent."""
        self._send_all()
        self._fail("the connection to the engine was closed")
        socket, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        if socket is not None and monitor is not None:
            self._loop.remove_reader(monitor.fileno())
            self._loop.remove_reader(socket.fileno())
            socket.disable_monitor()
            monitor.close()
        if socket is not None:
            socket.close()

    def _fail(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        self.died.set()
        error = EngineDeadError(reason)
        if not self._connected.done():
            self._connected.set_exception(error)
            self._connected.exception()  # mark it as seen: perhaps nobody awaits it
        for asked in tuple(self._requests.values()):
            asked.receiver.end(error)
            asked.receiver.flush()
        self._requests.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    # --- requests and commands ---

    @override
    def submit(self, request: messages.AddRequest, receiver: OutputReceiver) -> None:
        name = request.request_id
        if name in self._requests:
            raise RequestError(f"request id {name!r} is in use", param="request_id", status=409)
        asked = _Asked(receiver, request.params.n, time.monotonic())
        self._send(request)
        self._requests[name] = asked

    @override
    def cancel(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None and self.dead is None:
            self._send(messages.AbortRequest(request_id=request_id))

    @property
    def hangs(self) -> bool:
        """Whether the core has been silent for `HUNG_S`."""
        return time.monotonic() - self.heard_at > HUNG_S

    @property
    def idle(self) -> bool:
        """Whether no request is running."""
        return not self._requests

    async def ping(self, timeout_s: float) -> None:
        """Wait until the core has answered between two steps.

        Raises:
            EngineDeadError: The core is gone.
            TimeoutError: The core did not answer within `timeout_s`.
        """
        number = next(self._numbers)
        await self._ask(number, messages.Ping(number=number), timeout_s)

    async def command(self, name: str, argument: Any = None) -> Any:
        """Send a command (`messages.engine.Command`); remote frontends get no answer.

        Raises:
            EngineDeadError: The core is gone.
            TimeoutError: No answer within `COMMAND_TIMEOUT_S`, or the time in `LONG_COMMANDS`.
            ValueError: The core does not know the command, or refuses it.
        """
        number = next(self._numbers)
        command = messages.Command(command_id=number, name=name, argument=argument)
        return await self._ask(number, command, LONG_COMMANDS.get(name, COMMAND_TIMEOUT_S))

    async def drain(self) -> bool:
        """Make the core refuse new requests; returns whether it has nothing left to do.

        Raises:
            EngineDeadError: The core is gone.
            TimeoutError: No answer within `COMMAND_TIMEOUT_S`.
        """
        self.draining = True
        idle: bool = await self.command("drain")
        return idle

    def watch_blocks(self, on_blocks: Callable[[messages.CachedBlocks], None]) -> None:
        """Subscribe to changes of the core's prefix caches.

        Args:
            on_blocks: Called with messages in the order of their numbers. After a gap the core
                starts again, with number 0.

        Raises:
            EngineDeadError: The core is gone.
        """
        self._on_blocks, self._next_blocks = on_blocks, 0
        self._send(messages.WatchBlocks())

    async def _ask(self, number: int, message: messages.ToCore, timeout_s: float) -> Any:
        answer = self._answers[number] = self._loop.create_future()
        try:
            self._send(message)
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            del self._answers[number]

    def _send(self, message: messages.ToCore) -> None:
        """Send at the end of this turn of the event loop, so that its messages wake ZMQ once.

        Raises:
            EngineDeadError: The core is gone.
        """
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if not self._unsent:
            self._loop.call_soon(self._send_all)
        self._unsent.append(messages.encode_to_core(message))
        if len(self._unsent) >= _SEND_AT:  # requests of a burst must not wait for each other
            self._send_all()

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._socket is None:
            return
        try:
            for data in unsent:
                self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:  # the queue is full, so nobody reads it
            # Later: the caller of `submit` has not registered its receiver yet.
            self._loop.call_soon(self._fail, "the engine does not read what it is sent")
            return
        # Sending may clear the descriptor's signal of an arrived message; see zmq_getsockopt(3).
        if int(self._socket.get(zmq.EVENTS)) & _POLLIN:
            self._loop.call_soon(self._read)

    # --- answers ---

    def _read(self) -> None:
        """Handle arrived messages; ZMQ's descriptor signals again only after all were read."""
        try:
            for _ in range(_MAX_BATCH):
                if self._socket is None:
                    break
                try:
                    data = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(_from_core.decode(data))
            else:
                self._loop.call_soon(self._read)
            self._put_outputs()
        except Exception as error:  # else some outputs would never come
            logger.exception("what the engine core says can't be read")
            self._fail(f"the engine's answers can't be read: {type(error).__name__}: {error}")
        unflushed, self._unflushed = self._unflushed, {}
        for receiver in unflushed:
            receiver.flush()

    def _take(self, message: messages.FromCore) -> None:
        if isinstance(message, messages.Outputs):
            for output in message.outputs:
                self._unread.setdefault((output.request_id, output.choice), []).append(output)
            return
        self._put_outputs()  # these came before
        match message:
            case messages.Rejected():
                refusal = RequestError(
                    message.message, param=message.param, status=message.status, code=message.code
                )
                self._end(message.request_id, refusal)
            case messages.Metrics():
                self.metrics = message
            case messages.Reply():
                self._answer(message.command_id, message.result, message.error)
            case messages.CachedBlocks():
                if self._on_blocks is not None:
                    if message.number in (0, self._next_blocks):
                        self._next_blocks = message.number + 1
                        self._on_blocks(message)
                    elif self._next_blocks:  # else it was asked already, and has yet to start again
                        self.watch_blocks(self._on_blocks)
            case messages.Pong():
                self.heard_at = time.monotonic()
                self._answer(message.number, None, None)
            case messages.Ready():
                self.heard_at = time.monotonic()
                if not self._connected.done():
                    self._connected.set_result(message)
            case messages.Disconnected():
                self._fail(message.reason)
            case messages.Dead():
                self._fail(message.error)

    def _put_outputs(self) -> None:
        """Pass outputs to receivers; outputs of one choice from several steps are merged."""
        unread, self._unread = self._unread, {}
        for (name, _), outputs in unread.items():
            if len(outputs) > 1:  # a failure must not swallow the tokens before it
                count = len(outputs) - (outputs[-1].finish_reason in ("abort", "error"))
                outputs = [merge_outputs(outputs[:count]), *outputs[count:]]
            for output in outputs:
                asked = self._requests.get(name)
                if asked is None:  # the request was cancelled
                    break
                self._unflushed[asked.receiver] = None
                asked.receiver.put(self._on_our_clock(output, asked.at) if output.marks else output)
                if output.finish_reason is not None:
                    asked.open_choices -= 1
                    if not asked.open_choices:
                        self._end(name, None)

    def _on_our_clock(self, output: messages.Output, sent: float) -> messages.Output:
        """An output whose marks are converted to this machine's clock."""
        first, last = output.marks[0], output.marks[-1]
        if first.name == "received":
            self._clock.observe(sent, first.at, last.at, time.monotonic())
        ahead = self._clock.seconds
        if not ahead:
            return output
        marks = (messages.Mark(mark.name, mark.at - ahead) for mark in output.marks)
        return replace(output, marks=tuple(marks))

    def _end(self, request_id: str, error: RequestError | None) -> None:
        asked = self._requests.pop(request_id, None)
        if asked is not None:
            self._unflushed[asked.receiver] = None
            asked.receiver.end(error)

    def _answer(self, number: int, result: Any, error: str | None) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(ValueError(error))

    def _read_monitor(self) -> None:
        while self._monitor is not None and self._socket is not None and self._monitor.poll(0):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._read()  # the socket may contain the core's last messages
            if self._connected.done():
                # Wait a little: the core's process may report better why it died.
                words = "the connection to the engine was lost"
                self._loop.call_later(self.last_words_s, self._fail, words)
            elif self.dead is None:
                # The core has not answered: ZMQ connects again, but our message may be lost.
                try:
                    self._socket.send(messages.encode_to_core(messages.Connect()), zmq.NOBLOCK)
                except zmq.Again:  # ZMQ has given up: the handshake itself failed
                    self._fail("the engine refused the connection; are the cluster keys the same?")
