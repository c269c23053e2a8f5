"""A router's event loop in the simulator's world, and its connections to simulated engines.

The engine's client is the real one, over a socket that is made up: messages are encoded, come late
but in order, and all of them until the connection breaks. Then each end finds out by itself.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol, cast

import msgspec
import zmq
from typing_extensions import TypeVarTuple, Unpack, override

from kvbaton.engine.client import EngineClient
from kvbaton.messages.engine import FromCore, ToCore, Undecodable, decode_to_core
from tests.simulator.world import SimulatedWorld

HEARTBEATS_S = 1.0
"""A connection that carries nothing for so long is broken, as ZMQ's heartbeats find out."""
Ts = TypeVarTuple("Ts")
_encoder = msgspec.msgpack.Encoder(enc_hook=array.tobytes)


class SimulatedLoop(asyncio.AbstractEventLoop):
    """What `asyncio` calls the running loop: timers and callbacks, at the world's times.

    Attributes:
        alive: its process has not been killed; else nothing of it happens any more.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        self._world, self.alive = world, True

    @override
    def time(self) -> float:
        return self._world.monotonic() - self._world.offset

    @override
    def get_debug(self) -> bool:
        return False

    @override
    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    @override
    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._run_after(0.0, handle)
        return handle

    @override
    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    @override
    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._run_after(when - self.time(), handle)
        return handle

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Of `TimerHandle.cancel`: it is passed over when its time comes."""

    def _run_after(self, seconds: float, handle: asyncio.Handle) -> None:
        def run() -> None:
            if self.alive and not handle.cancelled():
                self._world.offset = 0.0
                handle._run()

        self._world.after(seconds, run)


class LinkedEngine(Protocol):
    """The engine's end of a link, which a simulated node is.

    Attributes:
        name: the node's.
        host: where it runs.
        stopped: its process stands still.
        links: those to its routers, broken ones too.
    """

    name: str
    host: str
    stopped: bool
    links: list[EngineLink]

    def hear(self, link: EngineLink, message: ToCore) -> None:
        """A message has come."""

    def lose(self, link: EngineLink) -> None:
        """The link has broken."""


class EngineLink:
    """One connection of a router to an engine: the client's socket, and the engine's end of it.

    Args:
        world: its time and its luck.
        loop: of the router.
        host: of the router.
        node: whose engine it is.
        number: of the connection; no other one has it.
        on_lost: called when the router has found that it is broken.

    Attributes:
        client: the router's.
        up: nothing has broken it.
        asked: called with each message that the router sends.
        hears: called with each message that the router is about to read.
        heard: called when it has read it.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        loop: SimulatedLoop,
        host: str,
        node: LinkedEngine,
        number: int,
        on_lost: Callable[[str], None],
    ) -> None:
        self.world, self.node, self.number = world, node, number
        self.up = True
        self.asked: Callable[[EngineLink, ToCore], None] = lambda link, message: None
        self.hears: Callable[[EngineLink, FromCore], None] = lambda link, message: None
        self.heard: Callable[[], None] = lambda: None
        self.client = EngineClient()
        self.client._socket = cast("zmq.Socket[bytes]", self)
        self._loop, self._on_lost = loop, on_lost
        self._ends = frozenset((host, node.host))
        self._inbox: deque[bytes] = deque()
        self._arrivals = {True: 0.0, False: 0.0}
        node.links.append(self)

    # --- the client's socket ---

    def send(self, data: bytes, flags: int = 0) -> None:
        """As of a ZMQ socket."""
        message = decode_to_core(data)
        if isinstance(message, Undecodable):
            self.world.fail(f"the engine can't read {data!r}: {message.error}")
            return
        self.asked(self, message)
        self._carry(True, lambda: self.node.hear(self, message))

    def recv(self, flags: int = 0) -> bytes:
        """As of a ZMQ socket."""
        if not self._inbox:
            raise zmq.Again
        return self._inbox.popleft()

    def get(self, option: int) -> int:
        """As of a ZMQ socket: it has nothing to say about its events."""
        return 0

    # --- the engine's end ---

    def tell(self, message: FromCore) -> None:
        """Send to the router."""
        data = _encoder.encode(message)

        def arrive() -> None:
            if self._loop.alive:
                self.world.offset = 0.0
                self._inbox.append(data)
                self.hears(self, message)
                self.client._read()
                self.heard()

        self._carry(False, arrive)

    # --- what befalls it ---

    def _carry(self, to_engine: bool, arrive: Callable[[], None]) -> None:
        world = self.world
        at = world.now + world.rng.expovariate(1000.0)
        if world.chance(world.weather.stall / 4):
            at += world.rng.expovariate(1.5)
        self._arrivals[to_engine] = at = max(at, self._arrivals[to_engine])

        def pass_on() -> None:
            until = world.cut_until.get(self._ends, 0.0)
            if until > world.now:
                world.at(until, pass_on)  # sent again, in its order
            elif self.up:
                arrive()

        world.at(at, pass_on)

    def silent(self, seconds: float) -> None:
        """Nothing comes through for so long."""
        if seconds >= HEARTBEATS_S:
            self.world.after(HEARTBEATS_S, self.sever)

    def sever_if_stopped(self) -> None:
        """The engine's process has not answered heartbeats for too long, if it stands still."""
        if self.node.stopped:
            self.sever()

    def sever(self) -> None:
        """It breaks; what is on its way is lost."""
        if not self.up:
            return
        self.up = False
        self.world.note("link", f"{self.number} to {self.node.name} breaks")

        def find() -> None:
            if self._loop.alive:
                self.world.offset = 0.0
                reason = "the connection to the engine was lost"
                self.client._fail(reason)
                self._on_lost(reason)

        self.world.soon(find, 0.1)
        self.world.soon(lambda: self.node.lose(self), 0.1)
