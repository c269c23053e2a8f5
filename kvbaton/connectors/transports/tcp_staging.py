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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbaton.connectors.transports import tcp_wire

if TYPE_CHECKING:
    import socket

    import numpy.typing as npt

    from kvbaton.connectors.transports.cuda_driver import CudaDriver

    Int64s = npt.NDArray[np.int64]

BUFFER_BYTES = 4 << 20
LANE_BYTES = 2 * BUFFER_BYTES
LOOK_S = 0.02
"""Between two looks at whether the connection of a thread that waits for a lane still lives."""

Alive = Callable[[], bool]


class Span(NamedTuple):
    """A region in memory of a GPU."""

    address: int
    staging: PinnedBounceBuffer


class Pieces(NamedTuple):
    """A frame's payload where a GPU is concerned: three arrays of shape [n].

    Attributes:
        staging: what it has to pass through.
        address: first byte of each piece in this process.
        size: bytes, none of them 0.
        on_gpu: where each lies.
    """

    staging: PinnedBounceBuffer
    address: Int64s
    size: Int64s
    on_gpu: npt.NDArray[np.bool_]

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Cut into as much as a buffer holds: bytes in it, and the pieces."""
        ends = np.cumsum(self.size)
        starts, total = ends - self.size, int(ends[-1])
        for low in range(0, total, BUFFER_BYTES):
            high = min(low + BUFFER_BYTES, total)
            part = slice(np.searchsorted(ends, low, "right"), np.searchsorted(starts, high))
            begin = np.maximum(starts[part], low)
            address = self.address[part] + begin - starts[part]
            size = np.minimum(ends[part], high) - begin
            yield high - low, Batch(address, size, begin - low, self.on_gpu[part])


class Batch(NamedTuple):
    """Pieces that share a buffer; `at` is where in it."""

    address: Int64s
    size: Int64s
    at: Int64s
    on_gpu: npt.NDArray[np.bool_]


def pieces_of(
    views: Sequence[memoryview | Span], region: Int64s, offset: Int64s, length: Int64s
) -> list[memoryview] | Pieces:
    """Checked pieces of regions: views where all regions are host memory, else `Pieces`."""
    staging = next((view.staging for view in views if isinstance(view, Span)), None)
    if staging is None:
        columns = zip(region.tolist(), offset.tolist(), length.tolist(), strict=True)
        return [views[r][low : low + size] for r, low, size in columns]
    base = np.array([_address(view) for view in views], np.int64)
    on_gpu = np.array([isinstance(view, Span) for view in views])
    return Pieces(staging, base[region] + offset, length, on_gpu[region])


def _address(view: memoryview | Span) -> int:
    if isinstance(view, Span):
        return view.address
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if len(view) else 0


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

    def send(self, sock: socket.socket, head: bytes | memoryview, pieces: Pieces) -> None:
        """Send a frame: its head, then pieces. Raises `OSError`."""
        ready = head
        for buffer, (size, batch) in zip(cycle(self._buffers), pieces.batches(), strict=False):
            self._copy(buffer, batch, to_device=False)
            tcp_wire.send_all(sock, [ready])
            self._driver.wait(buffer.event)
            ready = buffer.view[:size]
        tcp_wire.send_all(sock, [ready])

    def receive(self, sock: socket.socket, pieces: Pieces) -> None:
        """Fill pieces, which are whole once the lane has settled. Raises `OSError`."""
        for buffer, (size, batch) in zip(cycle(self._buffers), pieces.batches(), strict=False):
            self._driver.wait(buffer.event)
            tcp_wire.receive_all(sock, [buffer.view[:size]])
            self._copy(buffer, batch, to_device=True)

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

    def _copy(self, buffer: _Buffer, batch: Batch, *, to_device: bool) -> None:
        """Begin to copy pieces from or to a buffer."""
        sides = [buffer.address + batch.at, batch.address]
        target, source = sides[::-1] if to_device else sides
        gpu, size = batch.on_gpu, batch.size
        for copy in np.stack([target, source, size], 1)[~gpu].tolist():
            ctypes.memmove(*copy)
        if gpu.any():
            self._driver.copy(target[gpu], source[gpu], size[gpu], self._stream)
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
        """A lane for the calling thread; its copies are over when it goes back.

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


class PinnedBounceBuffer:
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
