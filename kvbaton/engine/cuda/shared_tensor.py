"""Memory of a GPU that another process of this machine has allocated.

By CUDA's interprocess handles (CUDA driver API, "Unified Addressing" and `cuIpcOpenMemHandle`). A
handle is of a whole allocation, of which torch's allocator gives parts to tensors. It stays open
until this process ends, and whoever allocated must not free it earlier.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

TYPES = {torch.uint8: "|u1", torch.int32: "<i4", torch.float32: "<f4"}
"""As `__cuda_array_interface__` has them."""

LAZY_PEER_ACCESS = 1
"""`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: of another GPU than the current one, too."""


class _Handle(ctypes.Structure):
    """`CUipcMemHandle` of cuda.h."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


def _call(name: str, *args: object) -> None:
    if code := getattr(ctypes.CDLL("libcuda.so.1"), name)(*args):
        raise RuntimeError(f"{name} failed with code {code}")


@dataclass(frozen=True)
class SharedTensor:
    """What another process needs to open a contiguous tensor.

    Attributes:
        handle: of the allocation.
        offset: of the tensor in it, bytes.
        shape: of the tensor.
        dtype: likewise, one of `TYPES`.
    """

    handle: bytes
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> SharedTensor:
        """A tensor of this process."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = ctypes.c_uint64(tensor.data_ptr())
        with torch.cuda.device(tensor.device):
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        offset = address.value - base.value
        return SharedTensor(bytes(handle), offset, tuple(tensor.shape), tensor.dtype)

    def open(self, device: torch.device) -> Tensor:
        """The tensor, for kernels on a device of this process, which may be another than its own.

        Raises:
            RuntimeError: the driver refuses, or torch can't see the memory in place.
        """
        base, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(self.handle)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the device's context is there, and current
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, LAZY_PEER_ACCESS)
            address = base.value + self.offset
            told = {"shape": self.shape, "typestr": TYPES[self.dtype], "version": 2}
            told["data"] = (address, False)
            tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=told))
        if tensor.data_ptr() != address:
            raise RuntimeError("memory of another process is not seen in place")
        return tensor
