"""A store that has every object: decode is measured without anyone to compute the prompts.

What it loads is made up: numbers of one distribution, the same for every object, with no header and
no digest. It says so (`StoreCapabilities.synthetic`), so an engine takes them unverified, warns,
and answers with noise. Speed does not depend on what the numbers are, only on how many there are.
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
        name: see `Store.name`.
        mean: of the numbers.
        std: their standard deviation.
        dtype: ``bfloat16``, ``float16`` or ``float32``: that of the engine's KV cache.
        seed: of the numbers.
        threads: see `ThreadedStore`.
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
        """Make the numbers up."""
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
        """It holds nothing."""
        return Usage(0, 0)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Everything is there."""
        return [True] * len(keys)

    def get(self, key: bytes, target: Pieces) -> bool:
        """Fill every piece from the start of the numbers."""
        for piece in target:
            whole = np.frombuffer(piece, np.uint8)
            for start in range(0, len(whole), len(self._template)):
                part = whole[start : start + len(self._template)]
                part[:] = self._template[: len(part)]
        return True

    def put(self, key: bytes, source: Pieces) -> bool:
        """It is there anyway."""
        return True
