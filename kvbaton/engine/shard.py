"""Which part of a tensor-parallel model a rank holds, and how ranks add and join what they have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """What all ranks call at the same time, in the same order; a tensor given in is given away."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[rows, n] of each rank, side by side in the order of ranks: [rows, size * n]."""
        ...


class Alone:
    """`Collectives` of a single rank."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """As it is."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """As it is."""
        return tensor


@dataclass(frozen=True)
class Shard:
    """This rank's share of a tensor-parallel model.

    Attributes:
        rank: ours.
        size: ranks in all; 1 holds everything.
        collectives: joins this rank with the others.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=Alone)

    def span(self, total: int) -> tuple[int, int]:
        """First index and number of this rank's part of `total`, which `size` must divide."""
        assert total % self.size == 0, f"{total} over {self.size} ranks"
        return self.rank * (total // self.size), total // self.size

    def padded_span(self, total: int) -> tuple[int, int]:
        """As `span` for any `total`: parts are equal, and the last ones may reach past it."""
        number = -(-total // self.size)
        return self.rank * number, number

    def kv_heads(self, total: int) -> tuple[int, int]:
        """First KV head and number of KV heads; with fewer heads than ranks, ranks share one."""
        if total >= self.size:
            return self.span(total)
        return self.rank * total // self.size, 1
