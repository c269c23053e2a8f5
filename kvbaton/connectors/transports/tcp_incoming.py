"""The reading end of TCP connections: one thread accepts, one thread per connection lands bytes."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvbaton.connectors.transports import tcp_wire
from kvbaton.connectors.transports.tcp_staging import Pieces, pieces_of
from kvbaton.errors import ConfigError, RemoteProtocolError

if TYPE_CHECKING:
    from kvbaton.connectors.transports.tcp_staging import Span

HANDSHAKE_S = 5.0
MAX_STRANGERS = 64
"""Connections that may be in the handshake at once; further ones are closed."""
JOIN_S = 1.0

log = logging.getLogger(__name__)


class Landing(Protocol):
    """Where bytes and notices go: the transport, called from connection threads."""

    def sizes(self) -> Sequence[int]:
        """Bytes of each region that may be written; 0 for none."""
        ...

    def views(self) -> Sequence[memoryview | Span]:
        """Each region as bytes that can be written, or copied to."""
        ...

    def deliver(self, notice: bytes) -> None:
        """A write has landed."""
        ...

    def vanished(self, name: str) -> None:
        """A connection of `name` ended without a goodbye."""
        ...


class Incoming:
    """One accepted connection; `name` is None until the handshake is done."""

    def __init__(self, sock: socket.socket, run: Callable[[Incoming], None]) -> None:
        self.socket = sock
        self.name: str | None = None
        self.cut = False
        self.on_cut: Callable[[], None] | None = None
        self.thread = threading.Thread(target=run, args=(self,), name="tcp from", daemon=True)

    def hang_up(self) -> None:
        """Make the thread end; nothing that is still in the socket's buffer lands."""
        self.cut = True
        with contextlib.suppress(OSError):  # the peer may have closed already
            self.socket.shutdown(socket.SHUT_RDWR)
        if (on_cut := self.on_cut) is not None:
            on_cut()


class Listener:
    """Accepts connections of those who hold our card, and lands their frames."""

    def __init__(self, host: str, token: bytes, landing: Landing) -> None:
        """Listen on a free port of `host`.

        Raises:
            ConfigError: the host can't be listened on.
        """
        self._token = token
        self._landing = landing
        self._lock = threading.Lock()
        self._connections: list[Incoming] = []
        self._fenced: set[str] = set()
        self._closed = False
        try:
            self._socket = self._listen(host)
        except OSError as error:
            raise ConfigError("--host", f"can't listen on {host!r}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="tcp accept", daemon=True)
        self._thread.start()

    def admit(self, name: str) -> None:
        """Lift an earlier fence."""
        with self._lock:
            self._fenced.discard(name)

    def fence(self, name: str) -> bool:
        """Cut every connection of `name`, and those of strangers; refuse new ones of `name`."""
        with self._lock:
            self._fenced.add(name)
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

    @staticmethod
    def _listen(host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tcp_wire.enlarge_buffers(sock)
            sock.bind((host, 0))
            sock.listen(128)
        except BaseException:
            sock.close()
            raise
        return sock

    # --- the accepting thread ---

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("accepting a connection failed: %s", error)
                time.sleep(0.05)  # out of file descriptors, say: do not spin
                continue
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        connection = Incoming(sock, self._run)
        with self._lock:
            strangers = sum(c.name is None for c in self._connections)
            if self._closed or strangers >= MAX_STRANGERS:
                sock.close()
                return
            self._connections.append(connection)
            connection.thread.start()

    # --- the thread of a connection ---

    def _run(self, connection: Incoming) -> None:
        try:
            self._greet(connection)
            self._read(connection)
        except RemoteProtocolError as error:
            log.warning("closing the connection of %s: %s", connection.name, error)
        except OSError as error:
            log.info("connection of %s ended: %s", connection.name, error)
        finally:
            connection.socket.close()
            with self._lock:
                self._connections.remove(connection)

    def _greet(self, connection: Incoming) -> None:
        def admit(name: str) -> None:
            with self._lock:
                if name in self._fenced or connection.cut:
                    raise RemoteProtocolError(f"{name} is fenced")
                connection.name = name

        sock = connection.socket
        tcp_wire.tune(sock)
        tcp_wire.greet(sock, self._token, time.monotonic() + HANDSHAKE_S, admit)
        sock.settimeout(None)

    def _read(self, connection: Incoming) -> None:
        polite = False
        try:
            while not polite:
                polite = self._read_frame(connection)
        finally:
            if not polite and not connection.cut:
                self._landing.vanished(connection.name or "")

    def _read_frame(self, connection: Incoming) -> bool:
        """Land one frame; True if it was a goodbye."""
        sock = connection.socket
        header = tcp_wire.receive_header(sock)
        if header.kind is tcp_wire.FrameKind.BYE:
            return True
        copies = tcp_wire.receive_copies(sock, header, self._landing.sizes())
        notice = tcp_wire.receive(sock, header.notice_bytes)
        if len(copies):
            self._fill(connection, pieces_of(self._landing.views(), *copies.T))
        if header.kind is tcp_wire.FrameKind.LAST:
            self._acknowledge(connection, header.write, notice)
        return False

    def _fill(self, connection: Incoming, pieces: list[Any] | Pieces) -> None:
        if not isinstance(pieces, Pieces):
            tcp_wire.receive_all(connection.socket, pieces)
            return
        with pieces.staging.incoming.lend(lambda: not connection.cut) as lane:
            lane.receive(connection.socket, pieces)

    def _acknowledge(self, connection: Incoming, write: int, notice: bytes) -> None:
        if connection.cut:
            raise ConnectionAbortedError("fenced")
        self._landing.deliver(notice)
        with contextlib.suppress(OSError):  # the next read tells why it is gone, or reads a goodbye
            connection.socket.sendall(tcp_wire.ACK.pack(write))


def _end(connections: Sequence[Incoming]) -> bool:
    """Hang up and wait for the threads, all within `JOIN_S`; True if all have ended."""
    for connection in connections:
        connection.hang_up()
    limit = time.monotonic() + JOIN_S
    for connection in connections:
        connection.thread.join(max(limit - time.monotonic(), 0))
    return not any(connection.thread.is_alive() for connection in connections)
