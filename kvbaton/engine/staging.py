"""Bytes of blocks in host memory, where a store can read and write them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

from kvbaton.connectors.base import Memory
from kvbaton.connectors.objects import ObjectForm, Run
from kvbaton.connectors.store import Pieces


class Batch(Protocol):
    """Some blocks of one group. Whoever has it gives it back with `release`."""

    @property
    def pieces(self) -> Sequence[Pieces]:
        """Per block its bytes in canonical order (see `connectors.objects`)."""
        ...

    def ready(self) -> bool:
        """Whether the bytes are where they were to go: here after `fetch`, there after `land`."""
        ...

    def land(self) -> None:
        """Begin to bring what was filled in to the blocks."""
        ...

    def release(self) -> None:
        """Give the memory back."""
        ...


class Staging(Protocol):
    """Lends host memory for blocks. One thread makes all calls, beside the steps."""

    @property
    def max_blocks(self) -> int:
        """Most blocks of one batch."""
        ...

    def fetch(self, group: int, blocks: Sequence[int]) -> Batch | None:
        """Begin to bring blocks here, which no step in flight writes; None if all is lent out."""
        ...

    def lend(self, group: int, blocks: Sequence[int]) -> Batch | None:
        """Memory to be filled for blocks; None if all is lent out."""
        ...


class HostBatch:
    """`Batch` of blocks that lie in host memory: nothing is copied but for replicas."""

    def __init__(
        self, pieces: Sequence[Pieces], copies: Sequence[tuple[memoryview, memoryview]]
    ) -> None:
        self.pieces = pieces
        self._copies = copies

    def ready(self) -> bool:
        """See `Batch.ready`."""
        return True

    def land(self) -> None:
        """See `Batch.land`."""
        for source, target in self._copies:
            target[:] = source

    def release(self) -> None:
        """See `Batch.release`."""


class CpuBlockStaging:
    """`Staging` for pools in host memory.

    Args:
        forms: of objects, one per group.
        memories: per rank, the memory of its pools.
    """

    max_blocks = 1 << 20

    def __init__(self, forms: Sequence[ObjectForm], memories: Sequence[Sequence[Memory]]) -> None:
        self._forms = forms
        self._views = [[_view(memory) for memory in rank] for rank in memories]

    def fetch(self, group: int, blocks: Sequence[int]) -> HostBatch:
        """See `Staging.fetch`."""
        return HostBatch([self._pieces(self._forms[group].runs, block) for block in blocks], ())

    def lend(self, group: int, blocks: Sequence[int]) -> HostBatch:
        """See `Staging.lend`."""
        form = self._forms[group]
        copies = [
            (self._piece(source, block), self._piece(target, block))
            for block in blocks
            for source, target in form.replicas
        ]
        return HostBatch([self._pieces(form.runs, block) for block in blocks], copies)

    def _pieces(self, runs: Sequence[Run], block: int) -> list[memoryview]:
        return [self._piece(run, block) for run in runs]

    def _piece(self, run: Run, block: int) -> memoryview:
        start = run.offset + block * run.stride
        return self._views[run.rank][run.region][start : start + run.length]


def _view(memory: Memory) -> memoryview:
    array = (ctypes.c_ubyte * memory.num_bytes).from_address(memory.address)
    array.owner = memory.owner  # type: ignore[attr-defined]  # lives as long as any view of it
    return memoryview(array).cast("B")
