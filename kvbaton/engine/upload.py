"""Small arrays between host and device, without waiting for the device.

A GPU's copy engine handles transfers in order, so the few kilobytes of a step would wait behind the
megabytes that a store loads. Kernels therefore read them in place, in pinned memory (zero-copy,
CUDA programming guide, "mapped memory"). Larger arrays are copied from memory of torch's caching
allocator, which reuses a buffer only after its copies are over.
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
"""Words per segment: as many as a new sequence of 32,000 tokens or 5,000 decoding ones need."""
SEGMENTS = 4


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> Sequence[Tensor]:
    """Send arrays as int64, flat, in one transfer that is ordered on the current stream."""
    there, sizes = _filled(arrays, device)
    # By a sum, since a copy between two tensors of the device would use a copy engine.
    sent = there.to(device, non_blocking=True) if not there.is_cuda else torch.add(there, 0)
    return torch.split(sent, sizes)


def lend(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> Sequence[Tensor]:
    """Do as `upload`, for the next kernel, which reads each word once; saves one launch.

    If that kernel is a copy, it must change the dtype, else it would use a copy engine.
    """
    there, sizes = _filled(arrays, device)
    return torch.split(lent(there, device), sizes)


def upload_into(array: npt.NDArray[np.int64], target: Tensor) -> None:
    """Send an array to a tensor of the same shape, ordered on the current stream."""
    host, there = stage(array.size, target.device)
    host[:] = array.ravel()
    if there.is_cuda:
        torch.add(there.view(array.shape), 0, out=target)
    else:
        target.copy_(there.view(array.shape), non_blocking=True)


def upload_ids(ids: Sequence[int] | npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Send numbers: [ids] int64."""
    return upload([np.asarray(ids, np.int64)], device)[0]


def fetch(tensor: Tensor) -> Tensor:
    """Copy to pinned memory; valid once the current stream has reached this point."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def stage(
    count: int, device: torch.device, stream: torch.cuda.Stream | None = None
) -> tuple[npt.NDArray[np.int64], Tensor]:
    """Memory for words that a stream will read (the current one), as seen by host and device.

    The tensor is either on the device, or in host memory and still to be copied, see `lent`.
    """
    if device.type == "cuda" and count <= SEGMENT_WORDS:
        ring = _ring(stream or torch.cuda.current_stream(device))
        if ring is not None:
            return ring.take(count)
    host = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.numpy(), host


def lent(there: Tensor, device: torch.device, stream: torch.cuda.Stream | None = None) -> Tensor:
    """The filled memory of `stage`, as the next kernel of the stream may read it."""
    if there.device.type == device.type:
        return there
    with torch.cuda.stream(stream):
        return there.to(device, non_blocking=True)


def _filled(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Stage arrays for the device, see `stage`; returns the tensor and the arrays' sizes."""
    sizes = list(map(_size, arrays))
    host, there = stage(sum(sizes), device)
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        host[start : start + size] = array.ravel()
        start += size
    return there, sizes


class PinnedRing:
    """Pinned memory of one thread and stream, read by kernels in the order of that stream.

    Args:
        stream: The stream.

    Raises:
        RuntimeError: The memory can't be pinned, or the GPU can't read it in place.
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
        """The next words, as seen by host and device; earlier reads of them are over."""
        if self._at + count > SEGMENT_WORDS:
            self._over[self._segment] = self._stream.record_event()
            self._segment, self._at = (self._segment + 1) % SEGMENTS, 0
            if (over := self._over[self._segment]) is not None:
                over.synchronize()
        start = self._segment * SEGMENT_WORDS + self._at
        self._at += count
        return self._host[start : start + count], self._there[start : start + count]


_rings = threading.local()


def _ring(stream: torch.cuda.Stream) -> PinnedRing | None:
    """The ring of this thread and a stream; None if there can't be one."""
    rings: dict[Any, PinnedRing | None] = _rings.__dict__
    name = f"{stream.device_index} {stream.cuda_stream}"
    if name not in rings:
        try:
            rings[name] = PinnedRing(stream)
        except RuntimeError as error:
            logger.warning("inputs of steps are copied, and may wait for a store: %s", error)
            rings[name] = None
    return rings[name]
