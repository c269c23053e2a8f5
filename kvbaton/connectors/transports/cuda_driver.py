"""The few calls of the CUDA driver that host staging needs, through ctypes: no torch, no build.

Memory is named by plain addresses: the driver knows of each which device it is on, or whether it is
pinned memory of the host. Contexts are the primary ones, which torch uses too.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbaton.errors import TransportError

if TYPE_CHECKING:
    import numpy.typing as npt

_PORTABLE = 0x1
_NON_BLOCKING = 0x1
_SLEEP, _NO_TIMING = 0x1, 0x2
_STREAM_ORDER = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: here, sources are read when the stream gets there."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """One device's primary context.

    Args:
        device_index: as CUDA numbers the devices that this process sees.
        library: ``libcuda.so.1``; see `load_library`.

    Raises:
        TransportError: there is no such device.
    """

    def __init__(self, device_index: int, library: Any) -> None:
        self._library = library
        self._batches = hasattr(library, "cuMemcpyBatchAsync")  # from CUDA 12.8 on
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        try:
            self._call("cuInit", ctypes.c_uint(0))
            self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(device_index))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        except OSError as error:
            raise TransportError(f"CUDA device {device_index} can't be used: {error}") from error

    def use(self) -> None:
        """Make the calling thread one of this context; needed before all that follows."""
        self._call("cuCtxSetCurrent", self._context)

    def pin(self, num_bytes: int) -> int:
        """Address of new pinned memory."""
        address = ctypes.c_void_p()
        self._call(
            "cuMemHostAlloc",
            ctypes.byref(address),
            ctypes.c_size_t(num_bytes),
            ctypes.c_uint(_PORTABLE),
        )
        assert address.value is not None
        return address.value

    def unpin(self, address: int) -> None:
        """Give pinned memory back; waits for all work on the device."""
        self._call("cuMemFreeHost", ctypes.c_void_p(address))

    def open_stream(self) -> ctypes.c_void_p:
        """A stream that neither waits for the default stream nor is waited for by it."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return stream

    def close_stream(self, stream: ctypes.c_void_p) -> None:
        """Give a stream back."""
        self._call("cuStreamDestroy_v2", stream)

    def open_event(self) -> ctypes.c_void_p:
        """An event whose waiters sleep."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_SLEEP | _NO_TIMING))
        return event

    def close_event(self, event: ctypes.c_void_p) -> None:
        """Give an event back."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        """Let an event happen once all that is on the stream now has been done."""
        self._call("cuEventRecord", event, stream)

    def wait(self, event: ctypes.c_void_p) -> None:
        """Sleep until an event has happened; at once if it was never recorded."""
        self._call("cuEventSynchronize", event)

    def copy(
        self,
        targets: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        stream: ctypes.c_void_p,
    ) -> None:
        """Put copies on a stream, in any order: addresses, and bytes each, none of them 0."""
        if not self._batches:
            for copy in np.stack([targets, sources, sizes], 1).tolist():
                self._call("cuMemcpyAsync", *map(ctypes.c_uint64, copy), stream)
            return
        columns = [np.ascontiguousarray(column) for column in (targets, sources, sizes)]
        where, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._call(
            "cuMemcpyBatchAsync",
            *(column.ctypes.data_as(ctypes.c_void_p) for column in columns),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(_Attributes(order=_STREAM_ORDER)),
            ctypes.byref(where),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            stream,
        )

    def close(self) -> None:
        """Give the context back."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function; `ConnectionAbortedError` if it fails, which ends what needed it."""
        if status := getattr(self._library, name)(*arguments):
            raise ConnectionAbortedError(f"{name} failed with CUDA error {status}")


def load_library() -> Any:
    """The driver's library.

    Raises:
        TransportError: there is none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"memory of a GPU needs the CUDA driver: {error}") from error
