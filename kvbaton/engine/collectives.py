"""Which part of a tensor-parallel model a rank holds, and how ranks add and join what they have.

On a CPU ranks are threads of one process, whose tensors lie in its memory: each shows its tensor,
waits until all have, and adds up what it sees in the order of ranks: no sockets, no copies, and the
same bits everywhere. A rank that does not come, or that failed, ends the wait of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

PATIENCE_S = 120.0
"""For the slowest rank to come; they compute the same amount, so it is late by far less."""


class Collectives(Protocol):
    """What all ranks call at the same time, in the same order; a tensor given in is given away."""

    def connect(self) -> None:
        """Meet the others; before all else."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[rows, n] of each rank, side by side in the order of ranks: [rows, size * n]."""

    def later(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Start what ends with `all_reduce`, whose sum may run beside what is computed next.

        Returns:
            What waits for the result.
        """
        result = compute()
        return lambda: result


class Alone(Collectives):
    """`Collectives` of a single rank."""

    def connect(self) -> None:
        """Nobody is there."""

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
        expert_parallel: of experts a rank holds a range, instead of a part of each.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=Alone)
    expert_parallel: bool = False

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


class AbortedError(RuntimeError):
    """Another rank failed, or did not come in time."""


class Barrier:
    """Where ranks wait for each other, and show each other a tensor.

    A tensor is shown until the next but one exchange, to which nobody comes before all have seen
    it: hence two tables. A rank waits at a lock of its own, its gate, which whoever comes last
    opens; that costs a fraction of what `threading.Barrier` does, and ranks meet twice per layer.
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
        """Show a tensor at our `number`-th exchange; the tensors of all ranks.

        Raises:
            AbortedError: a rank failed, or did not come in time.
        """
        table = self._tables[number % 2]
        table[rank] = tensor
        self.wait(rank)
        return table

    def wait(self, rank: int) -> None:
        """Wait until all ranks have come.

        Raises:
            AbortedError: a rank failed, or did not come in time.
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
        """Nobody will come any more."""
        with self._counting:
            self._aborted = True
            self._open()

    def _open(self) -> None:
        for gate in self._gates:
            if gate.locked():
                gate.release()


class HostCollectives(Collectives):
    """`Collectives` of one rank; see `Barrier`."""

    def __init__(self, barrier: Barrier, rank: int) -> None:
        self._barrier, self._rank = barrier, rank
        self._number = 0

    def connect(self) -> None:
        """See `Collectives.connect`; they are."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        return reduce(torch.add, self._exchange(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See `Collectives.all_gather`."""
        return torch.cat(self._exchange(tensor), dim=-1)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._number += 1
        return self._barrier.exchange(self._rank, self._number, tensor)
