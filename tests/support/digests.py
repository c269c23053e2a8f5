"""Digest sums of one range of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.engine.executor import Executor
from kvbaton.engine.pending import Pending
from kvbaton.kernels.digest import range_table, table_sums_reference


def digest_of(
    executor: Executor,
    group: int,
    blocks: Sequence[int],
    first_position: int,
    start: int,
    end: int,
    *,
    keep: bool = False,
) -> Pending[list[Sums]]:
    """Digest sums per rank; see `Executor.digest` and `BlockRange`."""
    held = BlockRange(group, blocks, first_position, start, end)
    return executor.digest([held], keep=keep).then(lambda found: found[0])


def block_sums_reference(
    cache: Tensor, blocks: Tensor, first_position: int, start: int, end: int
) -> Tensor:
    """NumPy reference for `kernels.digest.block_sums`."""
    size = cache.shape[-2]
    return table_sums_reference(cache, range_table(blocks, first_position, start, end, size))
