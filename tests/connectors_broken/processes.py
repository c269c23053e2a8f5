"""Transports between processes with one defect each, which only another process shows."""

from __future__ import annotations

import socket
import time
from collections.abc import Container

from typing_extensions import override

from kvbaton.connectors.base import Handle, Peer, Ranges, Status
from kvbaton.connectors.transports.tcp import TcpTransport
from kvbaton.connectors.transports.tcp_connections import TcpCard, TcpHandle, TcpListener, TcpPeer

TIMEOUT_S = 2.0
PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT


class DoneWhenSent(TcpTransport):
    """Takes what was given to the kernel for what has landed."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> _Mistaken:  # type: ignore[override]
        """Post the write, and look away."""
        return _Mistaken(super().write(peer, ranges, notice), {Status.PENDING}, Status.DONE)


class WaitsInWrite(TcpTransport):
    """Its client is synchronous: `write` returns once all has landed, or after a time-out."""

    @override
    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> TcpHandle:
        handle, limit = super().write(peer, ranges, notice), time.monotonic() + TIMEOUT_S
        while handle.status() is Status.PENDING and time.monotonic() < limit:
            time.sleep(0.001)
        return handle


class DoneWhenBroken(TcpTransport):
    """Takes the end of the connection for that of its writes."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> _Mistaken:  # type: ignore[override]
        """Post the write, and never call it a failure once it has begun."""
        ended = {Status.ERROR, Status.DRAINED}
        begun = peer.broken is None  # type: ignore[attr-defined]
        return _Mistaken(super().write(peer, ranges, notice), ended if begun else {}, Status.DONE)


class DrainedWhenHungUp(TcpTransport):
    """Takes the end of the connection for that of what is in the kernels' buffers."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> _Mistaken:  # type: ignore[override]
        """Post the write; a failure is said to have drained."""
        return _Mistaken(super().write(peer, ranges, notice), {Status.ERROR}, Status.DRAINED)


class _Mistaken:
    """A handle that says one thing where another is right."""

    def __init__(self, inner: Handle, right: Container[Status], said: Status) -> None:
        self._inner, self._right, self._said = inner, right, said

    def status(self) -> Status:
        """Perhaps the wrong one."""
        now = self._inner.status()
        return self._said if now in self._right else now

    def error(self) -> str | None:
        """Why it failed."""
        return self._inner.error()

    def release(self) -> None:
        """Give it back."""
        self._inner.release()


class TakesHalfCloses(TcpTransport):
    """A peer that has closed its sending side is not lost while no write waits for its answer."""

    @override
    def dial(self, card: TcpCard) -> TcpPeer:
        return _Patient(card, self.name)


class _Patient(TcpPeer):
    def read_acks(self) -> None:
        try:
            closed = self._greeted and not self._socket.recv(1, PEEK)
        except BlockingIOError:
            return
        except OSError as error:  # a reset is no half close
            self.hang_up(f"connection to {self.name}: {error}")
            return
        if self._pending or not closed:
            super().read_acks()


class AdmitsOldCards(TcpTransport):
    """A fence cuts connections; who dials later is let in, whatever it was given the card for."""

    @override
    def listen(self, host: str) -> TcpListener:
        return _Trusting(host, self._regions, self._views)


class _Trusting(TcpListener):
    def fence(self, name: str) -> bool:
        token = self.token
        ended = super().fence(name)
        self.token = token
        return ended
