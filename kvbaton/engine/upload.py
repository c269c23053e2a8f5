"""Small arrays between host and device, without waiting for the device.

A GPU's copy engine takes transfers in their order, so that the few kilobytes of a step would wait
behind the megabytes that a store loads. Kernels therefore read them where they are, in pinned
memory (zero-copy, CUDA programming guide, "mapped memory"). What is larger is copied, from memory
of torch's caching allocator, which gives a buffer out again only after its copies are over.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_size = attrgetter("size")

SEGMENT_WORDS = 64 << 10
"""As much as a new sequence of 32,000 tokens needs; one of 5,000 that decode takes as much."""
SEGMENTS = 4


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> Sequence[Tensor]:
    """Send arrays as int64, flat, in one transfer that is ordered on the current stream."""
    there, sizes = _filled(arrays, device)
    # A sum, since a copy between two of its tensors would be one by a copy engine.
    sent = there.to(device, non_blocking=True) if not there.is_cuda else torch.add(there, 0)
    return torch.split(sent, sizes)


def lend(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> Sequence[Tensor]:
    """As `upload`, for what is launched next and reads each word once: one launch less.

    A copy of it must change the dtype, or it would be one by a copy engine.
    """
    there, sizes = _filled(arrays, device)
    return torch.split(there.to(device, non_blocking=True), sizes)


def upload_into(array: npt.NDArray[np.int64], target: Tensor) -> None:
    """Send an array to where a tensor of the same shape is, ordered on the current stream."""
    host, there = _staged(array.size, target.device)
    host[:] = array.ravel()
    if there.is_cuda:
        torch.add(there.view(array.shape), 0, out=target)
    else:
        target.copy_(there.view(array.shape), non_blocking=True)


def upload_ids(ids: Sequence[int] | npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Send some numbers: [ids] int64."""
    return upload([np.asarray(ids, np.int64)], device)[0]


def fetch(tensor: Tensor) -> Tensor:
    """A copy in pinned memory; valid once the current stream has come this far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def _filled(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Arrays as the device sees them, see `_staged`, and their sizes."""
    sizes = list(map(_size, arrays))
    host, there = _staged(sum(sizes), device)
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        host[start : start + size] = array.ravel()
        start += size
    return there, sizes


def _staged(count: int, device: torch.device) -> tuple[npt.NDArray[np.int64], Tensor]:
    """Memory for so many words that the current stream is to read, as host and device see it.

    The device sees it as a tensor of its own, or as one in host memory that is to be copied.
    """
    if device.type == "cuda" and count <= SEGMENT_WORDS:
        ring = _ring(device)
        if ring is not None:
            return ring.take(count)
    host = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.numpy(), host


class PinnedRing:
    """Pinned memory of one thread and stream, which kernels of that stream read in its order.

    Args:
        stream: which.

    Raises:
        RuntimeError: the memory can't be pinned, or the GPU can't read it in place.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        words = SEGMENTS * SEGMENT_WORDS
        area = mmap.mmap(-1, 8 * words)
        self._host = np.frombuffer(area, np.int64)
        address, cudart = self._host.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(stream.device):
            if status := int(cudart.cudaHostRegister(address, 8 * words, 0)):
                raise RuntimeError(f"cudaHostRegister failed with status {status}")
            weakref.finalize(self, cudart.cudaHostUnregister, address).atexit = False
            told = {"shape": (words,), "typestr": "<i8", "data": (address, False), "version": 2}
            self._there = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=told))
        if self._there.device != stream.device or self._there.data_ptr() != address:
            raise RuntimeError(f"{stream.device} does not read memory of the host in place")
        self._stream = stream
        self._over: list[torch.cuda.Event | None] = [None] * SEGMENTS
        self._segment = self._at = 0

    def take(self, count: int) -> tuple[npt.NDArray[np.int64], Tensor]:
        """The next words, as host and device see them; nothing reads them any more."""
        if self._at + count > SEGMENT_WORDS:
            self._over[self._segment] = self._stream.record_event()
            self._segment, self._at = (self._segment + 1) % SEGMENTS, 0
            if (over := self._over[self._segment]) is not None:
                over.synchronize()
        start = self._segment * SEGMENT_WORDS + self._at
        self._at += count
        return self._host[start : start + count], self._there[start : start + count]


_rings = threading.local()


def _ring(device: torch.device) -> PinnedRing | None:
    """That of this thread and of the device's current stream; None where there can't be one."""
    rings: dict[Any, PinnedRing | None] = _rings.__dict__
    stream = torch.cuda.current_stream(device)
    name = f"{stream.device_index} {stream.cuda_stream}"
    if name not in rings:
        try:
            rings[name] = PinnedRing(stream)
        except RuntimeError as error:
            logger.warning("what steps need is copied, and may wait for stores: %s", error)
            rings[name] = None
    return rings[name]
