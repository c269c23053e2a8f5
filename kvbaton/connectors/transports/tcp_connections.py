"""The two ends of TCP connections, each with its thread.

`TcpPeer` is the sending end: its thread dials and sends, its caller reads the acks. `TcpListener`
is the receiving end: one thread accepts, and one thread per connection receives payloads.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np

from kvbaton.connectors.base import Notice, Status
from kvbaton.connectors.guard import GuardCard, watch
from kvbaton.connectors.transports import tcp_wire
from kvbaton.connectors.transports.regions import BaseHandle, Copies, RegionTable
from kvbaton.connectors.transports.tcp_staging import GpuRegion, Run, runs_of, staging_of
from kvbaton.errors import ConfigError, RemoteProtocolError

DIAL_S = 5.0
"""Seconds within which the dialling side must have connected and finished the handshake."""
GOODBYE_S = 0.2
"""Seconds that `close` lets a frame in progress finish, to send BYE; after that it just closes."""
HANDSHAKE_S = 5.0
"""Seconds within which the accepting side must have finished the handshake."""
MAX_STRANGERS = 64
"""Maximum number of connections in the handshake; further ones are closed."""
JOIN_S = 1.0
"""Seconds to wait for threads to end."""

log = logging.getLogger(__name__)


class TcpCard(msgspec.Struct, frozen=True):
    """Card: what a peer needs to dial."""

    name: Annotated[str, msgspec.Meta(max_length=tcp_wire.MAX_NAME_BYTES)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: bytes
    guard: GuardCard
    sizes: tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)], ...]


@dataclass(eq=False)
class TcpHandle(BaseHandle):
    """One write: queued, being sent, or waiting for its ack."""

    peer: TcpPeer
    write: int
    copies: Copies
    views: Sequence[memoryview | GpuRegion]
    notice: bytes
    started: bool = False

    def status(self) -> Status:
        """The current state; reads new acks. DRAINED once the bytes provably can't land."""
        if self._status in (Status.PENDING, Status.ERROR):
            self.peer.read_acks()
        if self._status in (Status.PENDING, Status.ERROR) and self.peer.broken is not None:
            self._status, self._error = Status.ERROR, self.peer.broken
            if self.peer.stopped and (not self.started or self.peer.watch.dead):
                self._status = Status.DRAINED
        return self._status

    def land(self) -> None:
        """Note that the ack has arrived."""
        self._status = Status.DONE

    def frames(self) -> Iterator[tuple[bytes, list[Run]]]:
        """Head and payload of each frame; copies are grouped by source and target region."""
        copies = self.copies.by_region()
        total = len(copies.length)
        for start in range(0, max(total, 1), tcp_wire.MAX_FRAME_COPIES):
            part = copies.take(start, start + tcp_wire.MAX_FRAME_COPIES)
            last = start + tcp_wire.MAX_FRAME_COPIES >= total
            kind = tcp_wire.FrameKind.LAST if last else tcp_wire.FrameKind.PART
            notice = self.notice if last else b""
            count, size = len(part.length), int(part.length.sum())
            header = tcp_wire.Header(kind, count, len(notice), self.write, size)
            targets = np.stack([part.target_region, part.target_offset, part.length], axis=1)
            head = header.pack() + targets.astype("<i8").tobytes() + notice
            sources = part.source_region, part.source_offset, part.length
            yield head, runs_of(self.views, *sources) if count else []


class TcpPeer:
    """A connection to a peer's listener.

    Its thread dials and sends; everything else runs in the thread that calls the transport.
    `broken` changes once, from None to a reason; the thread ends soon after.
    """

    def __init__(self, card: TcpCard, own_name: str) -> None:
        self.card, self.name = card, card.name
        self.watch = watch(card.guard)
        self.watch.close_with(self)
        self.broken: str | None = None
        self.closing = False
        self._goodbye_until = 0.0
        self.reported = False
        self._own_name = own_name
        family = socket.AF_INET6 if ":" in card.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._greeted = False
        self._pending: dict[int, TcpHandle] = {}
        self._next_write = 0
        self._acks = b""
        self._queue: queue.SimpleQueue[TcpHandle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tcp to {card.name}", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether the thread has ended, so that no local memory is read or sent any more."""
        return not self._thread.is_alive()

    def post(
        self, copies: Copies, views: Sequence[memoryview | GpuRegion], notice: bytes
    ) -> TcpHandle:
        """Queue a write."""
        handle = TcpHandle(self, self._next_write, copies, views, notice)
        self._next_write += 1
        if self.broken is None:
            self._pending[handle.write] = handle
            self._queue.put(handle)
        return handle

    def read_acks(self) -> None:
        """Read the peer's acks; never blocks."""
        while self._greeted and self.broken is None:
            try:
                data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                self.hang_up(f"connection to {self.name}: {error}")
                break
            if not data:
                self.hang_up(f"peer {self.name} closed the connection")
            self._acks += data
            whole = len(self._acks) // tcp_wire.ACK.size * tcp_wire.ACK.size
            for (write,) in tcp_wire.ACK.iter_unpack(self._acks[:whole]):
                handle = self._pending.pop(write, None)
                if handle is None:
                    reason = f"acknowledged write {write}, which is not in flight"
                    self.hang_up(f"peer {self.name} {reason}")
                    break
                handle.land()
            self._acks = self._acks[whole:]

    def close(self) -> bool:
        """Close, after a BYE if the frame in progress ends within `GOODBYE_S`; never blocks.

        Returns whether the thread has ended; to be called again until then.
        """
        now = time.monotonic()
        if not self.closing:
            self.closing, self._goodbye_until = True, now + GOODBYE_S
            self._queue.put(None)
        if self.stopped or now >= self._goodbye_until:
            self.hang_up(f"the connection to {self.name} is closed")
        if self.stopped:
            self._socket.close()
        return self.stopped

    def join(self, until: float) -> None:
        """Close, and wait for the thread until time `until` of the monotonic clock."""
        while not self.close() and (left := until - time.monotonic()) > 0:
            self._thread.join(min(left, GOODBYE_S))

    def hang_up(self, reason: str) -> None:
        """End the connection at once; the thread ends soon after."""
        if self.broken is None:
            self.broken = reason
        with contextlib.suppress(OSError):  # the socket may not be connected
            self._socket.shutdown(socket.SHUT_RDWR)
        self._queue.put(None)

    # --- the thread ---

    def _run(self) -> None:
        try:
            deadline = time.monotonic() + DIAL_S
            tcp_wire.enlarge_buffers(self._socket)
            self._socket.settimeout(DIAL_S)
            self._socket.connect((self.card.host, self.card.port))
            tcp_wire.tune(self._socket)
            tcp_wire.introduce(self._socket, self.card.token, self._own_name, deadline)
            self.introduced(self._socket)
            self._socket.settimeout(None)
            self._greeted = True
            while (handle := self._queue.get()) is not None and not self.closing:
                for head, runs in handle.frames():
                    if self.broken is not None or self.closing:
                        break
                    handle.started = True
                    self.send_frame(self._socket, head, runs)
            if self.broken is None:
                bye = tcp_wire.Header(tcp_wire.FrameKind.BYE, 0, 0, 0, 0)
                tcp_wire.send_all(self._socket, [bye.pack()])
        except Exception as error:  # an invalid host makes `connect` raise other errors, too
            self.hang_up(f"connection to {self.name}: {error}")
        finally:
            if self.closing:  # the caller of `close` may have stopped waiting
                self._socket.close()

    # --- overridden by other kinds of connections ---

    def introduced(self, sock: socket.socket) -> None:
        """Called once the handshake is done."""

    def send_frame(self, sock: socket.socket, head: bytes, runs: Sequence[Run]) -> None:
        """Send a frame's head and its payload."""
        staging = staging_of(runs)
        if staging is None:
            tcp_wire.send_all(sock, [head, *(piece for run in runs for piece in run)])
            return
        with staging.outgoing.lend(lambda: self.broken is None) as lane:
            lane.send(sock, head, runs)


class AcceptedConnection:
    """One accepted connection; `name` is None until the handshake is done."""

    def __init__(self, sock: socket.socket, run: Callable[[AcceptedConnection], None]) -> None:
        self.socket = sock
        self.name: str | None = None
        self.cut = False
        self.on_cut: Callable[[], None] | None = None
        self.thread = threading.Thread(target=run, args=(self,), name="tcp from", daemon=True)

    def hang_up(self) -> None:
        """Make the thread end; bytes still in the socket's buffer do not land."""
        self.cut = True
        with contextlib.suppress(OSError):  # the peer may have closed already
            self.socket.shutdown(socket.SHUT_RDWR)
        if (on_cut := self.on_cut) is not None:
            on_cut()


class TcpListener:
    """Accepts connections of peers that hold this transport's card, and receives their frames.

    Attributes:
        port: Port on which it listens.
        token: Token of the card, which a dialler must know. Each fence makes a new one.
        inbox: Notices of writes that have landed, in order.
        vanished: Names of peers whose connection ended without a BYE.
    """

    def __init__(
        self, host: str, table: RegionTable, views: Sequence[memoryview | GpuRegion]
    ) -> None:
        """Listen on a free port of `host`.

        Args:
            host: Address to listen on.
            table: The registered regions; their number may change.
            views: Memory of each region.

        Raises:
            ConfigError: It is impossible to listen on this host.
        """
        self.inbox: deque[Notice] = deque()
        self.vanished: deque[str] = deque()
        self.token = secrets.token_bytes(32)
        self._table, self._views = table, views
        self._lock = threading.Lock()
        self._connections: list[AcceptedConnection] = []
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            tcp_wire.enlarge_buffers(self._socket)
            self._socket.bind((host, 0))
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise ConfigError("--host", f"can't listen on {host!r}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="tcp accept", daemon=True)
        self._thread.start()

    def fence(self, name: str) -> bool:
        """Cut all connections of `name`, and those still in the handshake.

        Diallers with an older card are refused from now on: it might be `name`, dialling since.
        """
        with self._lock:
            self.token = secrets.token_bytes(32)
            doomed = [c for c in self._connections if c.name in (name, None)]
        return _end(doomed)

    def close(self) -> None:
        """Stop listening and cut every connection."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):  # not every platform can shut a listener down
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(JOIN_S)
        with self._lock:
            doomed = list(self._connections)
        _end(doomed)

    # --- the accepting thread ---

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("accepting a connection failed: %s", error)
                time.sleep(0.05)  # out of file descriptors, for example: do not spin
                continue
            connection = AcceptedConnection(sock, self._run)
            with self._lock:
                strangers = sum(c.name is None for c in self._connections)
                if self._closed or strangers >= MAX_STRANGERS:
                    sock.close()
                    continue
                try:
                    connection.thread.start()
                except RuntimeError as error:  # the thread could not be started
                    log.warning("closing a connection: %s", error)
                    sock.close()
                    continue
                self._connections.append(connection)

    # --- the thread of a connection ---

    def _run(self, connection: AcceptedConnection) -> None:
        try:
            self.greet(connection)
            polite = False
            try:
                while not polite:
                    polite = self._land_frame(connection)
            finally:
                if not polite and not connection.cut:
                    self.vanished.append(connection.name or "")
        except RemoteProtocolError as error:
            log.warning("closing the connection of %s: %s", connection.name, error)
        except OSError as error:
            log.info("connection of %s ended: %s", connection.name, error)
        finally:
            connection.socket.close()
            with self._lock:
                self._connections.remove(connection)

    def greet(self, connection: AcceptedConnection) -> None:
        """Do the handshake; raises to refuse the dialler."""

        def admit(name: str) -> None:
            with self._lock:
                if connection.cut:
                    raise RemoteProtocolError(f"{name} is fenced")
                connection.name = name

        sock = connection.socket
        tcp_wire.tune(sock)
        tcp_wire.greet(sock, self.token, time.monotonic() + HANDSHAKE_S, admit)
        sock.settimeout(None)

    def _land_frame(self, connection: AcceptedConnection) -> bool:
        """Receive one frame; True if it was a BYE."""
        sock = connection.socket
        header = tcp_wire.receive_header(sock)
        if header.kind is tcp_wire.FrameKind.BYE:
            return True
        copies = tcp_wire.receive_copies(sock, header, self._table.sizes)
        notice = tcp_wire.receive(sock, header.notice_bytes)
        if len(copies):
            self.receive_payload(connection, runs_of(self._views, *copies.T))
        if header.kind is tcp_wire.FrameKind.LAST:
            if connection.cut:
                raise ConnectionAbortedError("fenced")
            self.inbox.append(Notice(notice))
            with contextlib.suppress(OSError):  # the next read raises the cause, or reads a BYE
                sock.sendall(tcp_wire.ACK.pack(header.write))
        return False

    def receive_payload(self, connection: AcceptedConnection, runs: list[Any]) -> None:
        """Receive a frame's payload into its runs."""
        staging = staging_of(runs)
        if staging is None:
            tcp_wire.receive_all(connection.socket, chain(*runs))
            return
        with staging.incoming.lend(lambda: not connection.cut) as lane:
            lane.receive(connection.socket, runs)


def _end(connections: Sequence[AcceptedConnection]) -> bool:
    """Hang up and wait for all threads, at most `JOIN_S`; True if all have ended."""
    for connection in connections:
        connection.hang_up()
    limit = time.monotonic() + JOIN_S
    for connection in connections:
        connection.thread.join(max(limit - time.monotonic(), 0))
    return not any(connection.thread.is_alive() for connection in connections)
