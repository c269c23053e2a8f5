"""Memory of a GPU that another process of this machine has allocated.

It is opened through CUDA's interprocess handles (CUDA driver API, "Unified Addressing" and
`cuIpcOpenMemHandle`). A handle names a whole allocation, of which a tensor is a part. It stays open
until this process ends, and the allocating process must not free it earlier.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

TYPES = {torch.uint8: "|u1", torch.int32: "<i4", torch.float32: "<f4"}
"""Type strings of `__cuda_array_interface__`."""

LAZY_PEER_ACCESS = 1
"""`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: allows memory of another GPU than the current one."""


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
        handle: Handle of the allocation.
        offset: Offset of the tensor in it, in bytes.
        shape: Shape of the tensor.
        dtype: dtype of the tensor, one of `TYPES`.
    """

    handle: bytes
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> SharedTensor:
        """Describe a tensor of this process."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = ctypes.c_uint64(tensor.data_ptr())
        with torch.cuda.device(tensor.device):
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        offset = address.value - base.value
        return SharedTensor(bytes(handle), offset, tuple(tensor.shape), tensor.dtype)

    def open(self, device: torch.device) -> Tensor:
        """Open the tensor for kernels on a device of this process, perhaps another than its own.

        Raises:
            RuntimeError: The driver refuses, or torch does not see the memory in place.
        """
        base, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(self.handle)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, LAZY_PEER_ACCESS)
            address = base.value + self.offset
            told = {"shape": self.shape, "typestr": TYPES[self.dtype], "version": 2}
            told["data"] = (address, False)
            tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=told))
        if tensor.data_ptr() != address:
            raise RuntimeError("memory of another process is not seen in place")
        return tensor
