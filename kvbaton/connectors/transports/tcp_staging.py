"""Host staging: how memory of a GPU crosses a socket, where GPUs can't reach each other.

A connection's thread copies pieces into a pinned buffer and sends that, or receives into it and
copies from there, many pieces with one call. Two buffers take turns, so that a copy and the socket
work at the same time. All pinned memory is in *lanes* of two buffers, and a thread has a lane for
one frame; where all are lent, it waits. A sender takes its lane before the first byte of a frame
leaves, so whoever has a lane to receive waits for nobody who still needs one.

A lane goes back only when its copies are over, so a thread that has ended touches nothing any more:
what a fence and `close` promise holds as for memory of the host.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING

from kvbaton.connectors.transports import tcp_wire
from kvbaton.connectors.transports.regions import chunks

if TYPE_CHECKING:
    import socket

    from kvbaton.connectors.transports.cuda_driver import CudaDriver

BUFFER_BYTES = 4 << 20
LANE_BYTES = 2 * BUFFER_BYTES
LOOK_S = 0.02
"""Between two looks at whether the connection of a thread that waits for a lane still lives."""

Alive = Callable[[], bool]


class Span:
    """Bytes of a GPU. Its slices are spans, as those of a memoryview are views."""

    __slots__ = ("address", "size", "staging")

    def __init__(self, address: int, size: int, staging: HostStaging) -> None:
        self.address, self.size, self.staging = address, size, staging

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Span:
        start, stop, _ = part.indices(self.size)
        return Span(self.address + start, stop - start, self.staging)


Piece = memoryview | Span


def staging_of(pieces: Sequence[Piece]) -> HostStaging | None:
    """What pieces have to pass through; None if all are host memory."""
    return next((piece.staging for piece in pieces if isinstance(piece, Span)), None)


class _Buffer:
    """Pinned memory, and the event after the latest copies from or to it."""

    def __init__(self, driver: CudaDriver) -> None:
        self.event = driver.open_event()
        self.address = driver.pin(BUFFER_BYTES)
        array = (ctypes.c_ubyte * BUFFER_BYTES).from_address(self.address)
        self.view = memoryview(array).cast("B")


class Lane:
    """Two pinned buffers and a stream; for one thread at a time."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._stream = driver.open_stream()
        self._buffers = [_Buffer(driver) for _ in range(2)]

    def send(self, sock: socket.socket, head: bytes | memoryview, pieces: Sequence[Piece]) -> None:
        """Send a frame: its head, then pieces. Raises `OSError`."""
        ready = head
        for buffer, batch in zip(cycle(self._buffers), chunks(pieces, BUFFER_BYTES), strict=False):
            self._copy(buffer, batch, to_device=False)
            tcp_wire.send_all(sock, [ready])
            self._driver.wait(buffer.event)
            ready = buffer.view[: sum(map(len, batch))]
        tcp_wire.send_all(sock, [ready])

    def receive(self, sock: socket.socket, pieces: Sequence[Piece], alive: Alive) -> None:
        """Fill pieces, which are whole on return. Raises `OSError`."""
        for buffer, batch in zip(cycle(self._buffers), chunks(pieces, BUFFER_BYTES), strict=False):
            self._driver.wait(buffer.event)
            tcp_wire.receive_all(sock, [buffer.view[: sum(map(len, batch))]])
            if not alive():
                raise ConnectionAbortedError("fenced")
            self._copy(buffer, batch, to_device=True)
        self.settle()

    def settle(self) -> None:
        """Wait until all copies are over."""
        for buffer in self._buffers:
            self._driver.wait(buffer.event)

    def close(self) -> None:
        """Give everything back."""
        for buffer in self._buffers:
            self._driver.close_event(buffer.event)
            self._driver.unpin(buffer.address)
        self._driver.close_stream(self._stream)

    def _copy(self, buffer: _Buffer, batch: Sequence[Piece], *, to_device: bool) -> None:
        """Begin to copy pieces from or to a buffer, where they lie one after the other."""
        here, there, sizes, at = list[int](), list[int](), list[int](), 0
        for piece in batch:
            size = len(piece)
            if isinstance(piece, Span):
                here.append(buffer.address + at)
                there.append(piece.address)
                sizes.append(size)
            elif to_device:
                piece[:] = buffer.view[at : at + size]
            else:
                buffer.view[at : at + size] = piece
            at += size
        if sizes:
            self._driver.copy(*((there, here) if to_device else (here, there)), sizes, self._stream)
        self._driver.record(buffer.event, self._stream)


class Lanes:
    """Lanes of one direction, made when they are first needed.

    Args:
        driver: of the GPU.
        limit: most of them.
    """

    def __init__(self, driver: CudaDriver, limit: int) -> None:
        self._driver, self._left = driver, limit
        self._idle: list[Lane] = []
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def lend(self, alive: Alive) -> Iterator[Lane]:
        """A lane for the calling thread.

        Raises:
            ConnectionAbortedError: not `alive` any more while waiting for one, or CUDA fails.
        """
        self._driver.use()
        lane = self._take(alive)
        try:
            yield lane
        finally:
            lane.settle()
            self._give(lane)

    def close(self) -> None:
        """Give back what is not lent, and later what is."""
        self._driver.use()
        with self._changed:
            self._closed = True
            for lane in self._idle:
                lane.close()
            self._idle.clear()

    def _take(self, alive: Alive) -> Lane:
        with self._changed:
            while not self._idle and not self._left:
                if not alive():
                    raise ConnectionAbortedError("ended while it waited for pinned memory")
                self._changed.wait(LOOK_S)
            if self._idle:
                return self._idle.pop()
            lane = Lane(self._driver)
            self._left -= 1
            return lane

    def _give(self, lane: Lane) -> None:
        with self._changed:
            if self._closed:
                lane.close()
                return
            self._idle.append(lane)
            self._changed.notify()


class HostStaging:
    """What one transport has to reach the memory of its GPU.

    Args:
        driver: of the GPU.
        num_bytes: most pinned memory, at least two lanes; each direction has half of it.
    """

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        self._driver = driver
        limit = num_bytes // 2 // LANE_BYTES
        self.outgoing, self.incoming = Lanes(driver, limit), Lanes(driver, limit)

    def close(self) -> None:
        """Give everything back."""
        self.outgoing.close()
        self.incoming.close()
        self._driver.close()
