"""Copies between memory of this host and of GPUs, as runs of addresses.

One ``cudaMemcpyAsync`` per run, on a stream of ours, so that a step neither waits for it nor is
waited for; each call lets the interpreter go. torch's own copies take five times as long to begin.
Only memory of the host that is pinned is copied without its thread.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvbaton.errors import StoreError

_ANY_WAY = 4
"""`cudaMemcpyDefault`: addresses tell where they are."""
_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for all devices."""


class CopyRun(NamedTuple):
    """Bytes of one run each, by address."""

    target: int
    source: int
    num_bytes: int


class CudaCopies:
    """Begins copies, and tells when they are over. Any thread may call it.

    Raises:
        StoreError: torch is missing, or it has no CUDA.
    """

    def __init__(self) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            major = str(self._torch.version.cuda).partition(".")[0]
            self._library = ctypes.CDLL(f"libcudart.so.{major}")  # the one that torch has loaded
        except (ImportError, OSError) as error:
            raise StoreError(f"memory of a GPU needs torch with CUDA: {error}") from error
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._copy = self._library.cudaMemcpyAsync
        pointer = ctypes.c_void_p
        self._copy.argtypes = (pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer)

    def stream(self, device_index: int) -> Any:
        """A stream that neither waits for the default stream nor is waited for by it."""
        return self._torch.cuda.Stream(self._torch.device("cuda", device_index))

    def begin(self, runs: Iterable[CopyRun], stream: Any) -> Any:
        """Begin to copy.

        Args:
            runs: what; at least one side lies on the device of the stream.
            stream: of `stream`.

        Returns:
            An event that happens when all is copied; its `synchronize` sleeps.

        Raises:
            StoreError: CUDA refuses; what was begun may still go on.
        """
        handle = stream.cuda_stream
        for target, source, num_bytes in runs:
            if status := self._copy(target, source, num_bytes, _ANY_WAY, handle):
                raise StoreError(f"a copy of {num_bytes} bytes failed: {self._why(status)}")
        over = self._torch.cuda.Event(blocking=True)
        over.record(stream)
        return over

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin memory of this host, until `unpin`; takes about a second for some gigabytes.

        Raises:
            StoreError: it can't be pinned.
        """
        size = ctypes.c_size_t(num_bytes)
        status = self._library.cudaHostRegister(ctypes.c_void_p(address), size, _PORTABLE)
        if status:
            raise StoreError(f"{num_bytes} bytes can't be pinned: {self._why(status)}")

    def unpin(self, address: int) -> None:
        """Give back what was pinned; no copy uses it any more."""
        self._library.cudaHostUnregister(ctypes.c_void_p(address))

    def _why(self, status: int) -> str:
        text: bytes = self._library.cudaGetErrorString(status)
        return text.decode()
