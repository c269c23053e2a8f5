"""Digests of the bytes that ``bench transfer`` moves, by the same kernel as an engine's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TOKENS, FEATURES = 16, 64
LAYER_BYTES = 2 * TOKENS * FEATURES * 4
"""K and V of one layer and head in float32: a block is a multiple of it."""


def total_sum(memory: npt.NDArray[np.uint8], block_bytes: int, order: npt.NDArray[np.int64]) -> int:
    """Wrapping sum of the digest sums of all blocks, in this order one sequence."""
    import torch

    from kvbaton.kernels.digest import block_sums

    shape = (-1, 1, block_bytes // LAYER_BYTES, 2, TOKENS, FEATURES)
    cache = torch.from_numpy(memory).view(torch.float32).view(shape)
    sums = block_sums(cache, torch.from_numpy(order), 0, 0, len(order) * TOKENS)
    return int(sums.sum()) % (1 << 64)


def target_blocks(count: int) -> npt.NDArray[np.int64]:
    """Where each block goes: scattered, as block tables are after a while."""
    return np.random.default_rng(0).permutation(count).astype(np.int64)
