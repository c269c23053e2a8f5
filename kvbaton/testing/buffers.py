"""Memory for a trial, on the CPU or on a GPU, and its digest."""

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
        seed: of the noise that fills it; None fills it with zeros.
    """

    def __init__(self, device: Device, num_bytes: int, seed: int | None) -> None:
        noise = np.zeros(num_bytes, np.uint8)
        if seed is not None:
            noise[:] = np.frombuffer(np.random.default_rng(seed).bytes(num_bytes), np.uint8)
        self._held: Any = noise
        address = noise.ctypes.data
        if device == "cuda":
            import torch

            self._held = torch.from_numpy(noise).cuda()
            torch.cuda.synchronize()
            address = self._held.data_ptr()
        self.memory = Memory(address, num_bytes, device, owner=self._held)

    def digest(self) -> str:
        """Of all bytes: BLAKE2b, hex."""
        held = self._held if isinstance(self._held, np.ndarray) else self._held.cpu().numpy()
        return hashlib.blake2b(held.data, digest_size=16).hexdigest()
