"""Host staging: sends GPU memory over a socket, where GPUs can't reach each other.

A sending thread gathers pieces on the GPU, copies them into a pinned buffer and sends the buffer; a
receiving thread receives into a buffer and scatters from it. Each buffer takes one index operation
and one copy, however many pieces it holds. Two buffers alternate, so that copies and the socket
overlap. All pinned memory is in *lanes* of two buffers; a thread borrows a lane for one frame, and
waits if none is free. A sender takes its lane before it sends the first byte of a frame, so a
receiver that holds a lane never waits for a sender that still needs one.

A lane is returned only when its copies are done. So a thread that has ended accesses no memory any
more, and fence and `close` promise the same as for host memory.
"""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import Memory
from kvbaton.connectors.transports import tcp_wire
from kvbaton.errors import TransportError

Int64s = npt.NDArray[np.int64]

BUFFER_BYTES = 4 << 20
LANE_BYTES = 2 * BUFFER_BYTES
CHECK_S = 0.02
"""Seconds between checks whether the connection of a thread that waits for a lane still lives."""


class GpuRegion(NamedTuple):
    """A region in GPU memory.

    Attributes:
        staging: Pinned memory through which its bytes are staged.
        data: The region as a uint8 tensor [num_bytes].
    """

    staging: PinnedBounceBuffer
    data: Any


class GpuPieces(NamedTuple):
    """Pieces of one region, in the order in which they are sent; none is empty."""

    region: GpuRegion
    offset: Int64s
    size: Int64s

    def batches(self) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Batches that fit a buffer: number of bytes, and offsets and sizes of the pieces."""
        ends = np.cumsum(self.size)
        starts, total = ends - self.size, int(ends[-1])
        for low in range(0, total, BUFFER_BYTES):
            high = min(low + BUFFER_BYTES, total)
            part = slice(np.searchsorted(ends, low, "right"), np.searchsorted(starts, high))
            begin = np.maximum(starts[part], low)
            offset = self.offset[part] + begin - starts[part]
            yield high - low, offset, np.minimum(ends[part], high) - begin


Run = Sequence[memoryview] | GpuPieces
"""A part of a frame's payload that is either in host memory or in one GPU region."""


def runs_of(
    views: Sequence[memoryview | GpuRegion], region: Int64s, offset: Int64s, length: Int64s
) -> list[Run]:
    """Checked pieces as runs, in order: a single run without GPU regions, else one per region."""
    if not any(isinstance(view, GpuRegion) for view in views):
        columns = zip(region.tolist(), offset.tolist(), length.tolist(), strict=True)
        return [[views[r][low : low + size] for r, low, size in columns]]
    runs: list[Run] = []
    ends = [*(np.flatnonzero(np.diff(region)) + 1).tolist(), len(region)]
    for first, end in zip([0, *ends], ends, strict=False):
        view, low, size = views[int(region[first])], offset[first:end], length[first:end]
        if isinstance(view, GpuRegion):
            runs.append(GpuPieces(view, low, size))
        else:
            pairs = zip(low.tolist(), (low + size).tolist(), strict=True)
            runs.append([view[start:stop] for start, stop in pairs])
    return runs


def staging_of(runs: Sequence[Run]) -> PinnedBounceBuffer | None:
    """The pinned memory through which a frame is staged, if any."""
    return next((run.region.staging for run in runs if isinstance(run, GpuPieces)), None)


class GpuCopies:
    """Copies between one GPU's memory and pinned buffers, with torch.

    If CUDA fails, torch raises `RuntimeError`.

    Args:
        device_index: CUDA ordinal among the devices that are visible to this process.

    Raises:
        TransportError: torch sees no such device.
    """

    def __init__(self, device_index: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        if device_index >= self._torch.cuda.device_count():
            raise TransportError(f"torch sees no CUDA device {device_index}")
        self._device = self._torch.device("cuda", device_index)

    def region(self, memory: Memory) -> Any:
        """GPU memory as a uint8 tensor [num_bytes] that shares it.

        Raises:
            TransportError: torch can't access this memory.
        """
        try:
            return tensor_of(self._torch, memory)
        except RuntimeError as error:
            raise TransportError(f"torch can't reach {memory}: {error}") from error

    def pinned(self) -> Any:
        """A new pinned buffer: a uint8 tensor [`BUFFER_BYTES`]."""
        with self._torch.cuda.device(self._device):
            return self._torch.empty(BUFFER_BYTES, dtype=self._torch.uint8, pin_memory=True)

    def stream(self) -> Any:
        """A stream that neither waits for the default stream nor is waited for by it."""
        return self._torch.cuda.Stream(self._device)

    def event(self) -> Any:
        """An event whose `synchronize` sleeps; it counts as completed until it is recorded."""
        return self._torch.cuda.Event(blocking=True)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which copies of the calling thread use this stream."""
        context: AbstractContextManager[Any] = self._torch.cuda.stream(stream)
        return context

    def gather(self, data: Any, offset: Int64s, size: Int64s, buffer: Any) -> None:
        """Start to fill a pinned buffer, uint8 [sum of sizes], from pieces of a region."""
        rows, index = self._rows(data, offset, size)
        found = rows.index_select(0, index)
        buffer.copy_(found.view(-1), non_blocking=True)

    def scatter(self, data: Any, offset: Int64s, size: Int64s, buffer: Any) -> None:
        """Start to fill pieces of a region from a pinned buffer, uint8 [sum of sizes]."""
        rows, index = self._rows(data, offset, size)
        rows.index_copy_(0, index, buffer.to(data.device, non_blocking=True).view(len(index), -1))

    def _rows(self, data: Any, offset: Int64s, size: Int64s) -> tuple[Any, Any]:
        """The region as rows of the largest unit that divides all pieces, and the pieces' rows."""
        unit = int(np.gcd.reduce(np.concatenate([offset, size])))
        count = size // unit
        ends = np.cumsum(count)
        index = np.repeat(offset // unit - ends + count, count) + np.arange(ends[-1])
        rows = data[: len(data) // unit * unit].view(-1, unit)
        return rows, self._torch.from_numpy(index).to(data.device)


class _PinnedBuffer:
    """Pinned memory, and the event after the latest copy from or to it."""

    def __init__(self, gpu: GpuCopies) -> None:
        self.data = gpu.pinned()
        self.view = memoryview(self.data.numpy())
        self.copied = gpu.event()


class StagingLane:
    """Two pinned buffers and a stream; for one thread at a time."""

    def __init__(self, gpu: GpuCopies) -> None:
        self._gpu = gpu
        self._stream = gpu.stream()
        self._buffers = [_PinnedBuffer(gpu) for _ in range(2)]

    def send(self, sock: socket.socket, head: bytes, runs: Sequence[Run]) -> None:
        """Send the head and the payload of a frame. Raises `OSError`."""
        ready: list[bytes | memoryview] = [head]
        turns = cycle(self._buffers)
        for run in runs:
            if not isinstance(run, GpuPieces):
                ready += run
                continue
            for num_bytes, offset, size in run.batches():
                buffer = next(turns)
                with self._gpu.on(self._stream):
                    self._gpu.gather(run.region.data, offset, size, buffer.data[:num_bytes])
                    buffer.copied.record(self._stream)
                tcp_wire.send_all(sock, ready)
                buffer.copied.synchronize()
                ready = [buffer.view[:num_bytes]]
        tcp_wire.send_all(sock, ready)

    def receive(self, sock: socket.socket, runs: Sequence[Run]) -> None:
        """Receive a frame's pieces; they are complete after `settle`. Raises `OSError`."""
        turns = cycle(self._buffers)
        for run in runs:
            if not isinstance(run, GpuPieces):
                tcp_wire.receive_all(sock, run)
                continue
            for num_bytes, offset, size in run.batches():
                buffer = next(turns)
                buffer.copied.synchronize()
                tcp_wire.receive_all(sock, [buffer.view[:num_bytes]])
                with self._gpu.on(self._stream):
                    self._gpu.scatter(run.region.data, offset, size, buffer.data[:num_bytes])
                    buffer.copied.record(self._stream)

    def settle(self) -> None:
        """Wait until all copies are done."""
        for buffer in self._buffers:
            buffer.copied.synchronize()


class LanePool:
    """Lanes of one direction, created on demand.

    Args:
        gpu: Copier of the GPU.
        limit: Maximum number of lanes.
    """

    def __init__(self, gpu: GpuCopies, limit: int) -> None:
        self._gpu, self._left = gpu, limit
        self._idle: list[StagingLane] = []
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def lend(self, alive: Callable[[], bool]) -> Iterator[StagingLane]:
        """Borrow a lane for the calling thread; its copies are done when it is returned.

        Raises:
            ConnectionAbortedError: `alive` became False while waiting for a lane, or CUDA failed.
        """
        try:
            with self._changed:
                while not self._idle and not self._left:
                    if not alive():
                        raise ConnectionAbortedError("ended while it waited for pinned memory")
                    self._changed.wait(CHECK_S)
                if self._idle:
                    lane = self._idle.pop()
                else:
                    lane = StagingLane(self._gpu)
                    self._left -= 1
            try:
                yield lane
            finally:
                lane.settle()
                with self._changed:
                    if not self._closed:
                        self._idle.append(lane)
                    self._changed.notify()
        except RuntimeError as error:
            raise ConnectionAbortedError(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """Free the idle lanes; borrowed ones are freed when they are returned."""
        with self._changed:
            self._closed = True
            self._idle.clear()


class PinnedBounceBuffer:
    """The pinned memory of one transport, through which it stages its GPU's memory.

    Args:
        gpu: Copier of the GPU.
        num_bytes: Maximum pinned bytes, at least two lanes; half for each direction.
    """

    def __init__(self, gpu: GpuCopies, num_bytes: int) -> None:
        self.gpu = gpu
        limit = num_bytes // 2 // LANE_BYTES
        self.outgoing, self.incoming = LanePool(gpu, limit), LanePool(gpu, limit)

    def close(self) -> None:
        """Return the pinned memory to torch."""
        self.outgoing.close()
        self.incoming.close()


class _CudaBytes:
    """GPU memory behind the CUDA array interface, which torch imports without a copy."""

    def __init__(self, memory: Memory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def tensor_of(torch: Any, memory: Memory) -> Any:
    """CPU or GPU memory as a uint8 tensor [num_bytes] that shares it."""
    if memory.device == "cuda":
        return torch.as_tensor(_CudaBytes(memory), device=f"cuda:{memory.device_index}")
    return torch.frombuffer(memory.view(), dtype=torch.uint8)
