"""TCP transports for the kit that take memory of the host for a GPU's.

`StagedTcp` has copies that stand in for CUDA's; `VramTcp` has a real GPU's, and lets every byte
pass through its memory. The arrays that a case looks at are what counts for both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvbaton.connectors.base import Memory, Region
from kvbaton.connectors.transports.tcp import TcpTransport
from kvbaton.connectors.transports.tcp_staging import BUFFER_BYTES, GpuCopies, tensor_of

Int64s = npt.NDArray[np.int64]
LateCopies = list[Callable[[], None]]
"""A stream: what is to be done."""


class LateEvent:
    """Happens when somebody waits for it: then what was on the stream before it is done."""

    def __init__(self) -> None:
        self._stream: LateCopies = []
        self._end = 0

    def record(self, stream: LateCopies) -> None:
        self._stream, self._end = stream, len(stream)

    def synchronize(self) -> None:
        for place, copy in enumerate(self._stream[: self._end]):
            copy()
            self._stream[place] = lambda: None


class FakeGpu(GpuCopies):
    """Copies that happen as late as they may.

    Attributes:
        most_pinned: bytes, at most at the same time.
        fail: what copies raise.
    """

    def __init__(self) -> None:
        self._torch, self._device = torch, torch.device("cpu")
        self._buffers: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self._thread = threading.local()
        self.most_pinned = 0
        self.fail = ""

    @property
    def pinned_bytes(self) -> int:
        return len(self._buffers) * BUFFER_BYTES

    def region(self, memory: Memory) -> torch.Tensor:
        tensor: torch.Tensor = tensor_of(torch, replace(memory, device="cpu"))
        return tensor

    def pinned(self) -> torch.Tensor:
        buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        self._buffers.add(buffer)
        self.most_pinned = max(self.most_pinned, self.pinned_bytes)
        return buffer

    def stream(self) -> LateCopies:
        return []

    def event(self) -> LateEvent:
        return LateEvent()

    @contextmanager
    def on(self, stream: LateCopies) -> Iterator[None]:
        self._thread.stream = stream
        yield
        del self._thread.stream

    def gather(self, *words: Any) -> None:
        self._later(super().gather, words)

    def scatter(self, *words: Any) -> None:
        self._later(super().scatter, words)

    def _later(self, copy: Callable[..., None], words: tuple[Any, ...]) -> None:
        if self.fail:
            raise RuntimeError(self.fail)
        self._thread.stream.append(lambda: copy(*words))


class StagedTcp(TcpTransport):
    """Takes memory of the host for that of GPU 0, or of another one."""

    gpu: FakeGpu | None = None
    device_index = 0

    def register(self, memory: Memory) -> Region:
        return super().register(replace(memory, device="cuda", device_index=self.device_index))

    def gpu_copies(self, device_index: int) -> GpuCopies:
        self.gpu = self.gpu or FakeGpu()
        return self.gpu


class _ThroughVram(GpuCopies):
    """Brings what is read to the GPU first, and back what was written there."""

    def __init__(self) -> None:
        super().__init__(0)
        self._hosts: dict[int, torch.Tensor] = {}

    def region(self, memory: Memory) -> torch.Tensor:
        host: torch.Tensor = tensor_of(torch, replace(memory, device="cpu"))
        twin = host.to("cuda:0")
        self._hosts[twin.data_ptr()] = host
        return twin

    def gather(self, data: Any, offset: Int64s, size: Int64s, buffer: Any) -> None:
        data.copy_(self._hosts[data.data_ptr()])
        super().gather(data, offset, size, buffer)

    def scatter(self, data: Any, offset: Int64s, size: Int64s, buffer: Any) -> None:
        super().scatter(data, offset, size, buffer)
        host = self._hosts[data.data_ptr()]
        for low, high in np.stack([offset, offset + size], 1).tolist():
            host[low:high].copy_(data[low:high])


class VramTcp(TcpTransport):
    """Memory of the host with a twin on GPU 0, which all bytes pass through."""

    def register(self, memory: Memory) -> Region:
        return super().register(replace(memory, device="cuda"))

    def gpu_copies(self, device_index: int) -> GpuCopies:
        return _ThroughVram()
