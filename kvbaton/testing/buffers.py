"""Memory that transports are tried with, on the CPU or on a GPU, and its digest."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from kvbaton.connectors.base import Device, Memory


class Buffer:
    """Bytes that a transport may be given.

    Args:
        device: where; ``cuda`` takes GPU 0 and needs torch.
        num_bytes: how many.
        filled: with which byte; None fills it with noise, always the same.
    """

    def __init__(self, device: Device, num_bytes: int, filled: int | None) -> None:
        if filled is None:
            noise = np.frombuffer(bytearray(np.random.default_rng(1).bytes(num_bytes)), np.uint8)
        else:
            noise = np.full(num_bytes, filled, np.uint8)
        self._held: Any = noise
        address = noise.ctypes.data
        if device == "cuda":
            import torch

            self._held = torch.from_numpy(noise).cuda()
            torch.cuda.synchronize()
            address = self._held.data_ptr()
        self.memory = Memory(address, num_bytes, device, owner=self._held)

    def digest(self) -> str:
        """Of all bytes."""
        held = self._held
        return digest_of(held if isinstance(held, np.ndarray) else held.cpu().numpy())


def digest_of(array: np.ndarray[Any, Any]) -> str:
    """BLAKE2b of an array's bytes, hex."""
    return hashlib.blake2b(array.data, digest_size=16).hexdigest()
