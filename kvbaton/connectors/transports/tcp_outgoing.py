"""The writing end of a TCP connection: one thread dials and sends; the caller reads the acks."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from kvbaton.connectors.base import Status
from kvbaton.connectors.guard import GuardCard, watch
from kvbaton.connectors.transports import tcp_wire
from kvbaton.connectors.transports.regions import Copies
from kvbaton.connectors.transports.tcp_staging import Pieces, pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvbaton.connectors.transports.tcp_staging import Span

DIAL_S = 5.0
"""Deadline of connecting and the handshake."""
GOODBYE_S = 0.2
"""After `close`, so long for a frame in progress to end, so that the peer can be told; then not."""


class TcpCard(msgspec.Struct, frozen=True):
    """What a peer needs to dial."""

    name: Annotated[str, msgspec.Meta(max_length=tcp_wire.MAX_NAME_BYTES)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: bytes
    guard: GuardCard
    sizes: tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)], ...]


class TcpHandle:
    """One write: queued, being sent, or waiting for its ack."""

    def __init__(
        self,
        peer: TcpPeer,
        write: int,
        copies: Copies,
        views: Sequence[memoryview | Span],
        notice: bytes,
    ) -> None:
        self.write = write
        self.started = False
        self._peer = peer
        self._copies = copies
        self._views = views
        self._notice = notice
        self._status = Status.PENDING
        self._error: str | None = None

    def status(self) -> Status:
        """State now; reads acks that have come in."""
        if self._status in (Status.PENDING, Status.ERROR):
            self._peer.read_acks()
            self._follow_peer()
        return self._status

    def error(self) -> str | None:
        """Why it failed."""
        return self._error

    def release(self) -> None:
        """Nothing to give back."""

    def land(self) -> None:
        """The ack has come."""
        self._status = Status.DONE

    def frames(self) -> Iterator[tuple[bytes, list[memoryview] | Pieces]]:
        """Head and payload of each frame."""
        total = len(self._copies.length)
        for start in range(0, max(total, 1), tcp_wire.MAX_FRAME_COPIES):
            stop = min(start + tcp_wire.MAX_FRAME_COPIES, total)
            yield self._frame(start, stop, stop == total)

    def _frame(self, start: int, stop: int, last: bool) -> tuple[bytes, list[memoryview] | Pieces]:
        part = self._copies.take(start, stop)
        kind = tcp_wire.FrameKind.LAST if last else tcp_wire.FrameKind.PART
        notice = self._notice if last else b""
        size = int(part.length.sum())
        header = tcp_wire.Header(kind, stop - start, len(notice), self.write, size)
        targets = np.stack([part.target_region, part.target_offset, part.length], axis=1)
        head = header.pack() + targets.astype("<i8").tobytes() + notice
        if not size:
            return head, []
        return head, pieces_of(self._views, part.source_region, part.source_offset, part.length)

    def _follow_peer(self) -> None:
        """A broken connection fails the write; DRAINED if its bytes provably can't land."""
        if self._status is Status.DONE or self._peer.broken is None:
            return
        self._status, self._error = Status.ERROR, self._peer.broken
        if self._peer.stopped and (not self.started or self._peer.watch.dead):
            self._status = Status.DRAINED


class TcpPeer:
    """A connection to a peer's listener.

    The thread owns dialling and sending; everything else runs in the transport's calling thread.
    `broken` goes from None to a reason once; the thread ends soon after.
    """

    def __init__(self, card: TcpCard, own_name: str) -> None:
        self.card = card
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
    def name(self) -> str:
        """The remote transport's name."""
        return self.card.name

    @property
    def stopped(self) -> bool:
        """The thread has ended: nothing of ours is read or sent any more."""
        return not self._thread.is_alive()

    def post(self, copies: Copies, views: Sequence[memoryview | Span], notice: bytes) -> TcpHandle:
        """Queue a write."""
        handle = TcpHandle(self, self._next_write, copies, views, notice)
        self._next_write += 1
        if self.broken is None:
            self._pending[handle.write] = handle
            self._queue.put(handle)
        return handle

    def read_acks(self) -> None:
        """Take in what the peer has acknowledged; never blocks."""
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
            self._take(data)

    def close(self) -> bool:
        """Say goodbye between two frames if that is soon possible, else just hang up; never blocks.

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
        """Wait for the thread of a connection that is being closed, until a monotonic time."""
        while not self.close() and (left := until - time.monotonic()) > 0:
            self._thread.join(min(left, GOODBYE_S))

    def hang_up(self, reason: str) -> None:
        """End the connection at once; the thread ends soon after."""
        if self.broken is None:
            self.broken = reason
        with contextlib.suppress(OSError):  # it may not be connected yet, or not any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._queue.put(None)

    def _take(self, data: bytes) -> None:
        self._acks += data
        whole = len(self._acks) // tcp_wire.ACK.size * tcp_wire.ACK.size
        for (write,) in tcp_wire.ACK.iter_unpack(self._acks[:whole]):
            handle = self._pending.pop(write, None)
            if handle is None:
                self.hang_up(f"peer {self.name} acknowledged write {write}, which is not in flight")
                break
            handle.land()
        self._acks = self._acks[whole:]

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._dial()
            while (handle := self._queue.get()) is not None and not self.closing:
                self._send(handle)
            if self.broken is None:
                bye = tcp_wire.Header(tcp_wire.FrameKind.BYE, 0, 0, 0, 0)
                tcp_wire.send_all(self._socket, [bye.pack()])
        except Exception as error:  # also what a host that is none makes `connect` raise
            self.hang_up(f"connection to {self.name}: {error}")

    def _dial(self) -> None:
        deadline = time.monotonic() + DIAL_S
        tcp_wire.enlarge_buffers(self._socket)
        self._socket.settimeout(DIAL_S)
        self._socket.connect((self.card.host, self.card.port))
        tcp_wire.tune(self._socket)
        tcp_wire.introduce(self._socket, self.card.token, self._own_name, deadline)
        self._prepare()
        self._socket.settimeout(None)
        self._greeted = True

    def _send(self, handle: TcpHandle) -> None:
        for head, pieces in handle.frames():
            if self.broken is not None or self.closing:
                return
            handle.started = True
            self._send_frame(head, pieces)

    def _prepare(self) -> None:
        """What a kind of connection does once each side knows the other."""

    def _send_frame(self, head: bytes, pieces: list[Any] | Pieces) -> None:
        if not isinstance(pieces, Pieces):
            tcp_wire.send_all(self._socket, [head, *pieces])
            return
        with pieces.staging.outgoing.lend(lambda: self.broken is None) as lane:
            lane.send(self._socket, head, pieces)
