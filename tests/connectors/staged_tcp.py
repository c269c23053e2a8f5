"""TCP transports for the kit that take memory of the host for a GPU's.

`StagedTcp` has a driver that stands in for CUDA's; `VramTcp` has a real GPU's, and lets every byte
pass through its memory. The arrays that a case looks at are what counts for both.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import Memory, Region
from kvbaton.connectors.transports.cuda_driver import CudaDriver, load_library
from kvbaton.connectors.transports.tcp import TcpTransport

INVALID_DEVICE, INVALID_CONTEXT = 101, 201
Copy = tuple[int, int, int]
Int64s = npt.NDArray[np.int64]


class OldFakeCuda:
    """A driver without batches, whose copies happen as late as it may do them.

    Attributes:
        pinned: pinned buffers by address.
        most_pinned: bytes, at most at the same time.
        fail: what copies answer.
    """

    def __init__(self) -> None:
        self.pinned: dict[int, Any] = {}
        self.most_pinned = self.fail = 0
        self._thread = threading.local()
        self._numbers = itertools.count(1)
        self._streams: dict[int, list[Copy]] = {}
        self._events: dict[int, tuple[int, int]] = {}

    def cuInit(self, flags: Any) -> int:
        return int(flags.value)

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device._obj.value = ordinal.value
        return INVALID_DEVICE if ordinal.value else 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self._thread.context = context.value
        return 0

    def cuMemHostAlloc(self, address: Any, size: Any, flags: Any) -> int:
        buffer = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(buffer)
        self.pinned[address._obj.value] = buffer
        self.most_pinned = max(self.most_pinned, sum(map(len, self.pinned.values())))
        return self._missing_context()

    def cuMemFreeHost(self, address: Any) -> int:
        del self.pinned[address.value]
        return self._missing_context()

    def cuStreamCreate(self, stream: Any, flags: Any) -> int:
        stream._obj.value = next(self._numbers)
        self._streams[stream._obj.value] = []
        return self._missing_context()

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        del self._streams[stream.value]
        return 0

    def cuEventCreate(self, event: Any, flags: Any) -> int:
        event._obj.value = next(self._numbers)
        return self._missing_context()

    def cuEventDestroy_v2(self, event: Any) -> int:
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self._events[event.value] = stream.value, len(self._streams[stream.value])
        return 0

    def cuEventSynchronize(self, event: Any) -> int:
        stream, end = self._events.get(event.value, (0, 0))
        copies = self._streams.get(stream, [])
        for place, copy in enumerate(copies[:end]):
            ctypes.memmove(*copy)
            copies[place] = (0, 0, 0)
        return 0

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        self._streams[stream.value].append((target.value, source.value, size.value))
        return self.fail or self._missing_context()

    def _missing_context(self) -> int:
        return 0 if getattr(self._thread, "context", None) else INVALID_CONTEXT


class FakeCuda(OldFakeCuda):
    """A driver with batches, which are done in any order."""

    def cuMemcpyBatchAsync(
        self,
        targets: Any,
        sources: Any,
        sizes: Any,
        count: Any,
        attributes: Any,
        places: Any,
        num_attributes: Any,
        failed: Any,
        stream: Any,
    ) -> int:
        assert (attributes._obj.order, places._obj.value, num_attributes.value) == (1, 0, 1)
        columns = (
            (ctypes.c_uint64 * count.value).from_address(column.value)[:]
            for column in (targets, sources, sizes)
        )
        self._streams[stream.value] += reversed(list(zip(*columns, strict=True)))
        return self.fail or self._missing_context()


class StagedTcp(TcpTransport):
    """Takes memory of the host for that of GPU 0, or of another one."""

    cuda: OldFakeCuda | None = None
    device_index = 0

    def register(self, memory: Memory) -> Region:
        return super().register(replace(memory, device="cuda", device_index=self.device_index))

    def _driver(self, device_index: int) -> CudaDriver:
        self.cuda = self.cuda or FakeCuda()
        return CudaDriver(device_index, self.cuda)


class _ThroughVram(CudaDriver):
    """Brings what is read to the GPU first, and back what was written there."""

    def __init__(self) -> None:
        super().__init__(0, load_library())
        self._twins: list[tuple[int, Memory]] = []

    def twin(self, memory: Memory) -> int:
        """Address of as much memory on the GPU."""
        self.use()
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(memory.num_bytes))
        self._twins.append((address.value, memory))
        return address.value

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: Any) -> None:
        for source, size in np.stack([sources, sizes], 1).tolist():
            self._between(source, self._host(source), size, stream)
        super().copy(targets, sources, sizes, stream)
        for target, size in np.stack([targets, sizes], 1).tolist():
            self._between(self._host(target), target, size, stream)

    def close(self) -> None:
        self.use()
        for address, _ in self._twins:
            self._call("cuMemFree_v2", ctypes.c_uint64(address))
        super().close()

    def _host(self, address: int) -> int | None:
        for start, memory in self._twins:
            if start <= address < start + memory.num_bytes:
                return memory.address + address - start
        return None

    def _between(self, target: int | None, source: int | None, size: int, stream: Any) -> None:
        if target is not None and source is not None:
            numbers = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size)
            self._call("cuMemcpyAsync", *numbers, stream)


class VramTcp(TcpTransport):
    """Memory of the host with a twin on GPU 0, which all bytes pass through."""

    through: _ThroughVram | None = None

    def register(self, memory: Memory) -> Region:
        self.through = self.through or _ThroughVram()
        twin = self.through.twin(memory)
        return super().register(replace(memory, address=twin, device="cuda"))

    def _driver(self, device_index: int) -> CudaDriver:
        assert self.through is not None
        return self.through
