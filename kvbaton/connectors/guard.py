"""Proof that another process has ended: from the process table, or over a guard connection.

`is_gone` reads the process table of this machine. For processes elsewhere there are *guard
connections*: every process that uses a transport listens for them, and a peer that has its card
dials one and sends nothing. The process sends the id of its life once, and after that neither side
sends anything. So the connection ends in one of two ways:

- By FIN: the kernel of that process has closed its files. Linux does so after the last thread has
  left user space, so no thread can write any more; with unread bytes it would send a reset, but
  there are none. After `GRACE_S`, the time for queue pairs and GPU channels that are torn down at
  the same time, this is proof of death.
- By anything else, such as a reset or a time-out. This proves nothing: the network may be down, or
  a middlebox may have forgotten the connection. It is dialled again as long as it is wanted.

A process keeps its ends open as long as it lives: `shutdown` of a transport does not close them. An
end that must be closed (a stranger's, or one that sends) is reset. A forked child inherits them, so
the process counts as alive until the child has ended as well.

A stranger who dials costs one descriptor; at most `MAX_ACCEPTED` are accepted, and
`MAX_PER_ADDRESS` from one address. One byte is read of what it sends.
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
"""Seconds from the FIN of a connection until the process counts as dead."""
REDIAL_S = 1.0
"""Seconds between attempts to dial."""
CUT_S = 3.0
"""Seconds without a connection after which the process counts as cut off."""
DIAL_S = 5.0
"""Seconds within which a connection must be up and the process must have sent its life."""
ACCEPT_PAUSE_S = 1.0
"""Seconds to wait after a listener could not accept a connection."""
MAX_ACCEPTED = 4096
"""Maximum number of accepted guard connections."""
MAX_PER_ADDRESS = 256
"""Maximum number of accepted guard connections from one address."""
_KEEP_IDLE_S, _KEEP_EVERY_S, _KEEP_COUNT = 3, 2, 3
"""TCP keep-alive: an unreachable machine is noticed within about 9 s.

The kernel answers, so a connection is not cut because a process on the other side hangs.
"""
_LIFE_BYTES = 16
_RESET = struct.pack("ii", 1, 0)

_PROC = Path("/proc")

log = logging.getLogger(__name__)


class ProcessCard(msgspec.Struct, frozen=True):
    """One life of one process.

    Attributes:
        host: Boot id, host name and pid namespace; equal only where a pid means the same process.
        pid: Process id.
        start: Clock ticks from boot to the start of the process, which tells reused pids apart.
    """

    host: str
    pid: int
    start: int


class GuardCard(msgspec.Struct, frozen=True):
    """Where one process accepts guard connections.

    Attributes:
        host: An IP address, never a name, so that dialling never waits for a resolver.
        port: The listening port.
        life: 16 random bytes that the process has drawn.
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
    """The state of one process, as its guard connection shows it. Made by `watch`."""

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
        """The connection is up: the process lives, or its death will be known soon."""
        return self._state is _State.HELD

    @property
    def cut(self) -> bool:
        """The connection has been down for `CUT_S` without proof of death: it can't be reached."""
        return self._state is _State.CUT and time.monotonic() - self._since >= CUT_S

    @property
    def dead(self) -> bool:
        """It is proven that no thread of the process runs any more. Final."""
        return self._state is _State.ENDED and time.monotonic() - self._since >= GRACE_S

    def wait(self, seconds: float) -> bool:
        """Wait until the connection is up or could not be made; returns whether it was up.

        If the connection is down, it is dialled at once, without waiting for `REDIAL_S`.
        """
        with self._guard.lock:
            if self._state is _State.CUT:
                self._known.clear()
                self._guard.loop.call_soon_threadsafe(self._dial_now.set)
        self._known.wait(seconds)
        return self._state in (_State.HELD, _State.ENDED)

    def close(self) -> None:
        """End this watch, once per call of `watch`; the properties keep their last values."""
        with self._guard.lock:
            self.users -= 1
            if not self.users:
                self._following.cancel()
                self._guard.watches.pop(self.card, None)

    def close_with(self, user: object) -> None:
        """Call `close` when `user` is garbage-collected."""
        weakref.finalize(user, self.close).atexit = False

    # --- in the guard's thread ---

    async def _follow(self) -> None:
        """Dial, pausing `REDIAL_S` between attempts, until a connection has ended by FIN."""
        while True:
            try:
                await self._connection()
                self._become(_State.ENDED)
                return
            except Exception as error:  # no error proves a death
                where = f"{self.card.host}:{self.card.port}"
                log.debug("guard connection to %s: %s", where, error or type(error).__name__)
            self._become(_State.CUT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REDIAL_S):
                    await self._dial_now.wait()
            self._dial_now.clear()

    async def _connection(self) -> None:
        """Dial; returns when a process that has sent the card's life closes by FIN."""
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
                self._since = time.monotonic()  # before the state, as readers take no lock
                self._state = state
            self._known.set()


class _Guard:
    """All guard connections of this process, dialled and accepted, and the thread that serves them.

    Args:
        parent: The guard of the process that forked this one; its connections stay open here.
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
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # peers send nothing
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
            except OSError as error:  # out of descriptors, for example: do not spin
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
            except Exception:  # one connection's failure must not stop the others
                log.exception("a guard connection failed")
                _reset(sock)

    async def _keep(self, sock: socket.socket) -> None:
        """Keep a connection until the peer that dialled it is gone, or sends, as no guard does."""
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
    """Listen on `host` for guard connections, once per process; returns the card to dial.

    Raises:
        ConfigError: It is impossible to listen on this host.
    """
    return _this_process().listen(host)


def watch(card: GuardCard) -> Watch:
    """Begin to watch the process of a card; watches of one process share a connection.

    Raises:
        TransportError: The card holds no address that can be dialled.
    """
    try:
        address = ipaddress.ip_address(card.host)
    except ValueError as error:
        raise TransportError(f"a guard at {card.host!r}, which is no address") from error
    if address.is_unspecified or address.is_multicast or "%" in card.host:
        raise TransportError(f"a guard at {card.host!r}, which nobody can dial")
    return _this_process().watch(card)


def _this_process() -> _Guard:
    """The guard of this process; a forked process makes its own."""
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
    """Close by a reset, as a FIN would look like the death of this process."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


# --- by the process table ---


def this_process() -> ProcessCard:
    """The card of the calling process."""
    pid = os.getpid()
    _, start = _stat(pid)
    return ProcessCard(_host_id(), pid, start)


def is_gone(process: ProcessCard) -> bool:
    """Whether it is proven that no thread of `process` runs any more.

    False if this can't be seen from here: on another machine, or in another pid namespace.
    """
    if process.host != _host_id():
        return False
    try:
        state, start = _stat(process.pid)
        if start != process.start or state not in "ZX":
            return start != process.start
        # A process whose main thread has ended is a zombie, even if other threads still run.
        return len(os.listdir(_PROC / str(process.pid) / "task")) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


@cache
def _host_id() -> str:
    """`ProcessCard.host` of this process; cached, since `is_gone` is called many times a second."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {socket.gethostname()} {os.readlink(_PROC / 'self/ns/pid')}"


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process (proc(5), fields 3 and 22)."""
    with open(f"{_PROC}/{pid}/stat") as file:
        text = file.read()
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])
