"""Proof that another process has ended: by the process table, or where that does not show it.

`is_gone` reads the process table of this machine. Of processes elsewhere a *guard* tells: every
process that uses a transport listens for *guard connections*. Whoever has its card dials one
and writes nothing into it; the process says once which life it is, and neither side sends anything
more. So the connection ends in one of two ways:

- by FIN: the kernel of that process has closed its files. Linux does so after the last thread has
  left user space, so no thread can write any more; with unread bytes it would send a reset, but
  there are none. After `GRACE_S`, for queue pairs and GPU channels that are torn down at the same
  time, this is proof of death.
- by anything else, a reset or a time-out, which proves nothing: the network may be down, or a
  machine between may have forgotten the connection. It is dialled again while it is wanted.

A process holds its ends until it ends: `shutdown` of a transport does not close them, and where
one has to be closed (a stranger's, or one that sends) it is reset. A child that was forked inherits
them, so the process counts as alive until the child has ended as well.

A stranger who dials costs a descriptor, of which there are at most `MAX_ACCEPTED`, and
`MAX_PER_ADDRESS` for one address; of what it sends one byte is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from kvbaton.errors import ConfigError, TransportError

GRACE_S = 0.25
"""From the end of a connection to the proof of death."""
REDIAL_S = 1.0
CUT_S = 3.0
"""From the loss of a connection that can't be made again until the process counts as cut off."""
DIAL_S = 5.0
"""Until a connection must be up and the other side have said who it is."""
ACCEPT_PAUSE_S = 1.0
"""A listener of which nothing can be accepted is left alone for so long."""
MAX_ACCEPTED = 4096
MAX_PER_ADDRESS = 256
_KEEP_IDLE_S, _KEEP_EVERY_S, _KEEP_COUNT = 3, 2, 3
"""A kernel that can't be reached any more is found within some 9 s; one that answers is never cut,
whatever its processes do."""
_LIFE_BYTES = 16
_RESET = struct.pack("ii", 1, 0)

_PROC = Path("/proc")

log = logging.getLogger(__name__)


class ProcessCard(msgspec.Struct, frozen=True):
    """One life of one process.

    Attributes:
        host: boot id, host name and process-id namespace: equal only where a process id means the
            same process.
        pid: process id.
        start: clock ticks from boot to the start of the process, so that a reused pid differs.
    """

    host: str
    pid: int
    start: int


class GuardCard(msgspec.Struct, frozen=True):
    """Where to dial for the guard of one life of one process.

    Attributes:
        host: an address, never a name, so that dialling never waits for a resolver.
        port: as given by the kernel.
        life: 16 random bytes that the process was given when it began to listen.
    """

    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    life: Annotated[bytes, msgspec.Meta(min_length=_LIFE_BYTES, max_length=_LIFE_BYTES)]


class _State(enum.Enum):
    DIALLING = enum.auto()
    HELD = enum.auto()
    CUT = enum.auto()
    ENDED = enum.auto()


class Watch:
    """One process as its guard connection shows it. Made by `watch`."""

    def __init__(self, guard: _Guard, card: GuardCard) -> None:
        self.card = card
        self.users = 0
        self._guard = guard
        self._state, self._since = _State.DIALLING, time.monotonic()
        self._known = threading.Event()
        self._dial_now = asyncio.Event()
        self._following = asyncio.run_coroutine_threadsafe(self._follow(), guard.loop)

    @property
    def held(self) -> bool:
        """The connection is up: the process lives, or it is known soon that it does not."""
        return self._state is _State.HELD

    @property
    def cut(self) -> bool:
        """The connection is down, for `CUT_S`, without proof of anything: it can't be reached."""
        return self._state is _State.CUT and time.monotonic() - self._since >= CUT_S

    @property
    def dead(self) -> bool:
        """It is proven that no thread of the process runs any more. Final."""
        return self._state is _State.ENDED and time.monotonic() - self._since >= GRACE_S

    def wait(self, seconds: float) -> bool:
        """Wait until the connection is up or could not be made; returns whether it was up.

        One that is down is dialled at once, not when its turn comes.
        """
        with self._guard.lock:
            if self._state is _State.CUT:
                self._known.clear()
                self._guard.loop.call_soon_threadsafe(self._dial_now.set)
        self._known.wait(seconds)
        return self._state in (_State.HELD, _State.ENDED)

    def close(self) -> None:
        """Give it back, once for each `watch`; what was known stays known."""
        with self._guard.lock:
            self.users -= 1
            if not self.users:
                self._following.cancel()
                self._guard.watches.pop(self.card, None)

    def close_with(self, user: object) -> None:
        """Give it back when nobody holds `user` any more."""
        weakref.finalize(user, self.close).atexit = False

    # --- in the guard's thread ---

    async def _follow(self) -> None:
        """Dial until an orderly end was seen; between two tries it rests."""
        while True:
            try:
                await self._connection()
                self._become(_State.ENDED)
                return
            except Exception as error:  # whatever it is, it proves nothing
                where = f"{self.card.host}:{self.card.port}"
                log.debug("guard connection to %s: %s", where, error or type(error).__name__)
            self._become(_State.CUT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REDIAL_S):
                    await self._dial_now.wait()
            self._dial_now.clear()

    async def _connection(self) -> None:
        """Dial, and return when whoever said that it has our card's life closes in order."""
        loop, life = self._guard.loop, self.card.life
        family = socket.AF_INET6 if ":" in self.card.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            _keep_alive(sock)
            said = b""
            async with asyncio.timeout(DIAL_S):
                await loop.sock_connect(sock, (self.card.host, self.card.port))
                while len(said) < len(life):
                    data = await loop.sock_recv(sock, len(life) + 1 - len(said))
                    if not data:
                        raise ConnectionError("closed before it said who it is")
                    said += data
            if said != life:
                raise ConnectionError("another process answers")
            self._become(_State.HELD)
            if await loop.sock_recv(sock, 1):
                raise ConnectionError("another process answers")

    def _become(self, state: _State) -> None:
        with self._guard.lock:
            if self._state is not state:
                self._since = time.monotonic()  # first: who reads takes no lock
                self._state = state
            self._known.set()


class _Guard:
    """All guard connections of this process, both ends, and the one thread that serves them.

    Args:
        parent: that of the process that this one was forked off: its connections stay open here.
    """

    def __init__(self, parent: _Guard | None) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.loop = asyncio.SelectorEventLoop()
        self.watches: dict[GuardCard, Watch] = {}
        self._parent = parent
        self._life = secrets.token_bytes(_LIFE_BYTES)
        self._listeners: dict[str, GuardCard] = {}
        self._accepted: dict[asyncio.Task[None], str] = {}
        run = self.loop.run_forever
        threading.Thread(target=run, name="kvbaton-guard", daemon=True).start()

    def listen(self, host: str) -> GuardCard:
        with self.lock:
            if host in self._listeners:
                return self._listeners[host]
            sock = None
            try:
                found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
                sock = socket.socket(found[0], socket.SOCK_STREAM)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # for what none sends
                sock.bind(found[4])
                sock.listen(128)
                sock.setblocking(False)
            except OSError as error:
                if sock is not None:
                    sock.close()
                raise ConfigError("--host", f"can't listen on {host!r}: {error}") from error
            asyncio.run_coroutine_threadsafe(self._accept(sock), self.loop)
            address, port = sock.getsockname()[:2]
            card = self._listeners[host] = GuardCard(address, port, self._life)
            return card

    def watch(self, card: GuardCard) -> Watch:
        with self.lock:
            watch = self.watches.get(card)
            if watch is None:
                watch = self.watches[card] = Watch(self, card)
            watch.users += 1
            return watch

    # --- in its thread ---

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = await self.loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, say: do not spin
                log.warning("accepting a guard connection failed: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                host = address[0]
                full = len(self._accepted) >= MAX_ACCEPTED
                if full or Counter(self._accepted.values())[host] >= MAX_PER_ADDRESS:
                    _reset(sock)
                else:
                    kept = self.loop.create_task(self._keep(sock))
                    self._accepted[kept] = host
                    kept.add_done_callback(self._accepted.pop)
            except Exception:  # one connection's trouble is nobody else's
                log.exception("a guard connection failed")
                _reset(sock)

    async def _keep(self, sock: socket.socket) -> None:
        """Keep a connection until its dialler has gone, or sends, as none does who knows better."""
        try:
            _keep_alive(sock)
            await self.loop.sock_sendall(sock, self._life)
            await self.loop.sock_recv(sock, 1)
        except OSError as error:
            log.debug("a guard connection has ended: %s", error)
        finally:
            _reset(sock)


_guard: _Guard | None = None
_guard_lock = threading.Lock()


def guard_card(host: str) -> GuardCard:
    """Listen on `host` for guard connections, once per process; returns where.

    Raises:
        ConfigError: the host can't be listened on.
    """
    return _this_process().listen(host)


def watch(card: GuardCard) -> Watch:
    """Begin to watch the process of a card; watches of one process share a connection.

    Raises:
        TransportError: the card holds no address.
    """
    try:
        address = ipaddress.ip_address(card.host)
    except ValueError as error:
        raise TransportError(f"a guard at {card.host!r}, which is no address") from error
    if address.is_unspecified or address.is_multicast or "%" in card.host:
        raise TransportError(f"a guard at {card.host!r}, which nobody can dial")
    return _this_process().watch(card)


def _this_process() -> _Guard:
    """One for each process, a forked one included."""
    global _guard
    with _guard_lock:
        if _guard is None or _guard.pid != os.getpid():
            _guard = _Guard(_guard)
        return _guard


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_COUNT)


def _reset(sock: socket.socket) -> None:
    """Close without FIN: only the kernel's own close may look like an end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


# --- by the process table ---


def this_process() -> ProcessCard:
    """Describe the process that calls."""
    pid = os.getpid()
    _, start = _stat(pid)
    return ProcessCard(_host_id(), pid, start)


def is_gone(process: ProcessCard) -> bool:
    """Whether it is proven that no thread of `process` runs any more.

    False where that can't be seen from here: on another machine, or in another pid namespace.
    """
    if process.host != _host_id():
        return False
    try:
        state, start = _stat(process.pid)
        if start != process.start or state not in "ZX":
            return start != process.start
        # A zombie whose other threads still run is only a process whose main thread has ended.
        return len(os.listdir(_PROC / str(process.pid) / "task")) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


@cache
def _host_id() -> str:
    """Read once: it can't change while we live, and peers are asked after many times a second."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {socket.gethostname()} {os.readlink(_PROC / 'self/ns/pid')}"


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process (proc(5), fields 3 and 22)."""
    with open(f"{_PROC}/{pid}/stat") as file:
        text = file.read()
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])
