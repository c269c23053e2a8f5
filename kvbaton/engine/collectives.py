"""The parts of a tensor-parallel model that ranks hold, and how ranks sum and gather tensors.

On a CPU, ranks are threads of one process with shared memory. Each publishes its tensor, waits
until all have done so, and sums the tensors in the order of ranks: no sockets, no copies, and the
same bits on every rank. A rank that fails or is too late ends the wait of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from kvbaton.kernels.rms_norm import rms_norm

PATIENCE_S = 120.0
"""Seconds to wait for the slowest rank; since ranks compute the same amount, far less is normal."""


class Collectives:
    """Operations that all ranks call in the same order; they may overwrite their inputs.

    This class is for a single rank.
    """

    def connect(self) -> None:
        """Connect to the other ranks, before anything else."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, the same bits on each."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate [rows, n] of each rank in the order of ranks: [rows, size * n]."""
        return tensor

    def all_reduce_norm(
        self, tensor: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float
    ) -> Tensor:
        """Do as `rms_norm` with `residual` does, of the sum of [T, N] over the ranks."""
        total = self.all_reduce(tensor)
        return rms_norm(total, weight, eps, residual=residual, weight_offset=weight_offset)

    def all_reduce_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start `all_reduce`, which may overlap what follows.

        Returns:
            A function that waits for the sum and returns it.
        """
        total = self.all_reduce(tensor)
        return lambda: total


@dataclass(frozen=True)
class Shard:
    """This rank's share of a tensor-parallel model.

    Attributes:
        rank: This rank.
        size: Number of ranks; 1 for the whole model.
        collectives: Operations with the other ranks.
        expert_parallel: Whether a rank holds a range of experts, instead of a part of each.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=Collectives)
    expert_parallel: bool = False

    def span(self, total: int) -> tuple[int, int]:
        """First index and size of this rank's part of `total`, a multiple of `size`."""
        assert total % self.size == 0, f"{total} over {self.size} ranks"
        return self.rank * (total // self.size), total // self.size

    def padded_span(self, total: int) -> tuple[int, int]:
        """Do as `span` for any `total`: parts have equal size, and the last may reach past it."""
        number = -(-total // self.size)
        return self.rank * number, number

    def kv_heads(self, total: int) -> tuple[int, int]:
        """First KV head and number of KV heads; with fewer heads than ranks, ranks share one."""
        if total >= self.size:
            return self.span(total)
        return self.rank * total // self.size, 1


class AbortedError(RuntimeError):
    """Another rank failed, or was too late."""


class Barrier:
    """Lets ranks wait for each other and exchange tensors.

    A tensor must stay published until all ranks have seen it, which is certain two exchanges later;
    hence two tables. A rank waits at a lock of its own, its gate, which the last rank to arrive
    opens. That is much cheaper than `threading.Barrier`, and ranks meet twice per layer.
    """

    def __init__(self, size: int, *, patience_s: float = PATIENCE_S) -> None:
        self.size = size
        self._patience_s = patience_s
        self._counting = threading.Lock()
        self._num_here, self._aborted = 0, False
        self._gates = [threading.Lock() for _ in range(size)]
        for gate in self._gates:
            gate.acquire()
        self._tables = [[torch.empty(0)] * size for _ in range(2)]

    def exchange(self, rank: int, number: int, tensor: Tensor) -> list[Tensor]:
        """Publish a tensor in our `number`-th exchange; returns the tensors of all ranks.

        Raises:
            AbortedError: A rank failed, or was too late.
        """
        table = self._tables[number % 2]
        table[rank] = tensor
        self.wait(rank)
        return table

    def wait(self, rank: int) -> None:
        """Wait until all ranks have arrived.

        Raises:
            AbortedError: A rank failed, or was too late.
        """
        with self._counting:
            self._num_here += 1
            if self._aborted or self._num_here == self.size:
                self._num_here = 0
                self._open()
        if not self._gates[rank].acquire(timeout=self._patience_s):
            self.abort()
        if self._aborted:
            why = f"another rank failed, or did not come within {self._patience_s:g} s"
            raise AbortedError(why)

    def abort(self) -> None:
        """Make all ranks fail that wait, now or later."""
        with self._counting:
            self._aborted = True
            self._open()

    def _open(self) -> None:
        for gate in self._gates:
            if gate.locked():
                gate.release()


class HostCollectives(Collectives):
    """`Collectives` of one rank of several; see `Barrier`."""

    def __init__(self, barrier: Barrier, rank: int) -> None:
        self._barrier, self._rank = barrier, rank
        self._number = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        return reduce(torch.add, self._exchange(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See `Collectives.all_gather`."""
        return torch.cat(self._exchange(tensor), dim=-1)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._number += 1
        return self._barrier.exchange(self._rank, self._number, tensor)
