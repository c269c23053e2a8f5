"""Small arrays between host and device, without waiting for the device.

Pinned memory comes from torch's caching allocator, which gives a buffer out again only after the
copies that use it are over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> Sequence[Tensor]:
    """Send arrays as int64, flat, in one copy that is ordered on the current stream."""
    sizes = [array.size for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    flat, start = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[start : start + size] = array.ravel()
        start += size
    return torch.split(host.to(device, non_blocking=True), sizes)


def upload_ids(ids: Sequence[int], device: torch.device) -> Tensor:
    """Send a list of numbers."""
    return upload([np.fromiter(ids, np.int64, len(ids))], device)[0]


def fetch(tensor: Tensor) -> Tensor:
    """A copy in pinned memory; valid once the current stream has come this far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
