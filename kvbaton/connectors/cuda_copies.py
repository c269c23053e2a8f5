"""Copies between host memory and GPUs, given as runs of addresses.

Copies run on streams of their own, so that steps and copies do not wait for each other. All runs
are started by one ``cudaMemcpyBatchAsync`` where CUDA has this form of it (13.0 and later), else by
one ``cudaMemcpyAsync`` each. One call is better, since each releases the GIL, and taking it again
among other threads takes longer than the call itself. Starting a copy through torch takes five
times as long as ``cudaMemcpyAsync``. Copies of unpinned host memory block the calling thread.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvbaton.errors import StoreError

_ANY_WAY = 4
"""`cudaMemcpyDefault`: CUDA infers the direction from the addresses."""
_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for all devices."""
_BATCHES = 13
"""First major version of CUDA whose `cudaMemcpyBatchAsync` has the signature used here."""


class _CopyAttributes(ctypes.Structure):
    """`cudaMemcpyAttributes`: sources are read in stream order; locations follow from addresses."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


_IN_STREAM_ORDER = _CopyAttributes(source_access_order=1)


class CopyRun(NamedTuple):
    """One contiguous copy: target address, source address, length in bytes."""

    target: int
    source: int
    num_bytes: int


class CudaCopies:
    """Starts copies and reports when they are done. Thread-safe.

    Raises:
        StoreError: torch is missing, or was built without CUDA.
    """

    def __init__(self) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            major = str(self._torch.version.cuda).partition(".")[0]
            self._library = ctypes.CDLL(f"libcudart.so.{major}")  # the one that torch has loaded
        except (ImportError, OSError) as error:
            raise StoreError(f"memory of a GPU needs torch with CUDA: {error}") from error
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy = self._library.cudaMemcpyAsync
        self._copy.argtypes = (pointer, pointer, size, ctypes.c_int, pointer)
        self._copy_batch: Any = None
        if int(major) >= _BATCHES:
            self._copy_batch = self._library.cudaMemcpyBatchAsync
            self._copy_batch.argtypes = (
                *(pointer, pointer, pointer, size),
                *(pointer, pointer, size, pointer),
            )

    def stream(self, device_index: int) -> Any:
        """A stream that neither waits for the default stream nor is waited for by it."""
        return self._torch.cuda.Stream(self._torch.device("cuda", device_index))

    def begin(self, runs: Sequence[CopyRun], stream: Any) -> Any:
        """Start copies.

        Args:
            runs: The copies; of each, at least one side is on the device of the stream.
            stream: A stream from `stream`.

        Returns:
            A CUDA event that completes when all copies are done; its `synchronize` sleeps.

        Raises:
            StoreError: CUDA refuses; copies that were started before may still run.
        """
        if self._copy_batch is not None and len(runs) > 1:
            self._begin_batch(runs, stream.cuda_stream)
        else:
            for target, source, num_bytes in runs:
                status = self._copy(target, source, num_bytes, _ANY_WAY, stream.cuda_stream)
                if status:
                    raise StoreError(f"a copy of {num_bytes} bytes failed: {self._why(status)}")
        over = self._torch.cuda.Event(blocking=True)
        over.record(stream)
        return over

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin host memory until `unpin`; takes about a second for some gigabytes.

        Raises:
            StoreError: The memory can't be pinned.
        """
        size = ctypes.c_size_t(num_bytes)
        status = self._library.cudaHostRegister(ctypes.c_void_p(address), size, _PORTABLE)
        if status:
            raise StoreError(f"{num_bytes} bytes can't be pinned: {self._why(status)}")

    def unpin(self, address: int) -> None:
        """Unpin memory that no copy uses any more."""
        self._library.cudaHostUnregister(ctypes.c_void_p(address))

    def _begin_batch(self, runs: Sequence[CopyRun], stream: int) -> None:
        columns = np.array(runs, np.uint64).T.copy()
        targets, sources, sizes = (column.ctypes.data for column in columns)
        all_alike = ctypes.c_size_t(0)
        status = self._copy_batch(
            *(targets, sources, sizes, len(runs)),
            *(ctypes.byref(_IN_STREAM_ORDER), ctypes.byref(all_alike), 1, stream),
        )
        if status:
            raise StoreError(f"{len(runs)} copies failed: {self._why(status)}")

    def _why(self, status: int) -> str:
        self._library.cudaGetLastError()  # else torch would see it after its next call
        text: bytes = self._library.cudaGetErrorString(status)
        return text.decode()
