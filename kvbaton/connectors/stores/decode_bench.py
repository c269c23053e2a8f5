"""A store that has every object, to benchmark decode without prefill nodes.

The bytes that it loads are made up: numbers of one distribution, the same for every object, without
header and digest. It declares this (`StoreCapabilities.synthetic`), so an engine takes them
unverified, logs a warning, and generates noise. Speed depends on the number of bytes, not on their
values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.threaded import ClientBackend, ThreadedStore
from kvbaton.errors import ConfigError

TEMPLATE_BYTES = 1 << 20
DTYPES = ("bfloat16", "float16", "float32")


class DecodeBenchStore(ThreadedStore):
    """Has every object, and makes up its numbers.

    Args:
        name: See `Store.name`.
        mean: Mean of the numbers.
        std: Standard deviation of the numbers.
        dtype: Data type of the engine's KV cache: ``bfloat16``, ``float16`` or ``float32``.
        seed: Seed of the numbers.
        threads: See `ThreadedStore`.
    """

    def __init__(
        self,
        name: str,
        *,
        mean: float = 0.015,
        std: float = 0.0,
        dtype: str = "bfloat16",
        seed: int = 0,
        threads: int = 4,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError("dtype", f"must be one of {', '.join(DTYPES)}, not {dtype!r}")
        super().__init__(name, Numbers(mean, std, dtype, seed), threads=threads)


class Numbers(ClientBackend):
    """The backend of `DecodeBenchStore`."""

    capabilities = StoreCapabilities(
        persistent=False, shared=False, pins=False, deletes=False, synthetic=True
    )

    def __init__(self, mean: float, std: float, dtype: str, seed: int) -> None:
        self._options = (mean, std, dtype, seed)
        self._template: npt.NDArray[np.uint8]

    def open(self) -> None:
        """Generate the numbers."""
        mean, std, dtype, seed = self._options
        draw = np.random.default_rng(seed)
        numbers = draw.normal(mean, std, TEMPLATE_BYTES // 4).astype(np.float32)
        if dtype == "float16":
            self._template = numbers.astype(np.float16).view(np.uint8)
        elif dtype == "bfloat16":  # the upper half of a float32, in little-endian order
            self._template = numbers.view(np.uint16)[1::2].copy().view(np.uint8)
        else:
            self._template = numbers.view(np.uint8)
        self._trouble = None

    def usage(self) -> Usage:
        """Nothing is held."""
        return Usage(0, 0)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Every object is there."""
        return [True] * len(keys)

    def get(self, key: bytes, target: Pieces) -> bool:
        """Fill each piece with the numbers, from their start on."""
        for piece in target:
            whole = np.frombuffer(piece, np.uint8)
            for start in range(0, len(whole), len(self._template)):
                part = whole[start : start + len(self._template)]
                part[:] = self._template[: len(part)]
        return True

    def put(self, key: bytes, source: Pieces) -> bool:
        """Do nothing: every object is there."""
        return True
