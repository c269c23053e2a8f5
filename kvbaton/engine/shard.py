"""Which part of a tensor-parallel model a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """This rank's share of a tensor-parallel model.

    Attributes:
        rank: of this process.
        size: ranks in all; 1 holds everything.
        all_reduce: sums a tensor over the ranks; never called with one rank.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def span(self, total: int) -> tuple[int, int]:
        """First index and number of this rank's part of `total`, which `size` must divide."""
        assert total % self.size == 0, f"{total} over {self.size} ranks"
        return self.rank * (total // self.size), total // self.size

    def kv_heads(self, total: int) -> tuple[int, int]:
        """First KV head and number of KV heads; with fewer heads than ranks, ranks share one."""
        if total >= self.size:
            return self.span(total)
        return self.rank * total // self.size, 1
