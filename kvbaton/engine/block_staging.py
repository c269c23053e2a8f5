"""Bytes of blocks in host memory, where a store can read and write them.

Pools in host memory are read and written as they lie. Blocks of devices pass through pinned memory
on streams of their own; nothing waits for a device there, or makes a step wait: blocks that are
fetched are final, blocks that are filled belong to nobody else, and the thread that uses this asks
events.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvbaton.connectors.base import Memory
from kvbaton.connectors.objects import BlockBytes, ObjectForm
from kvbaton.connectors.store import Pieces

HOST_BYTES = 256 << 20
"""Pinned for all batches together, if blocks are not larger."""
FEWEST_SLOTS = 8


class StagedBlocks(Protocol):
    """Some blocks of one group. Whoever has it gives it back with `release`."""

    @property
    def pieces(self) -> Sequence[Pieces]:
        """Per block its bytes in canonical order (see `connectors.objects`)."""
        ...

    def ready(self) -> bool:
        """Whether the bytes are where they were to go.

        That is here after `fetch`, and in the blocks after `write_back`.
        """
        ...

    def write_back(self) -> None:
        """Begin to bring what was filled in to the blocks."""
        ...

    def release(self) -> None:
        """Give the memory back."""
        ...


class BlockStaging(Protocol):
    """Lends host memory for blocks. One thread makes all calls, beside the steps."""

    @property
    def max_blocks(self) -> int:
        """Most blocks of one batch."""
        ...

    @property
    def regions(self) -> Sequence[memoryview]:
        """The memory in which all pieces lie."""
        ...

    def fetch(self, group: int, blocks: Sequence[int]) -> StagedBlocks | None:
        """Begin to bring blocks here, which no step in flight writes; None if all is lent out."""
        ...

    def lend(self, group: int, blocks: Sequence[int]) -> StagedBlocks | None:
        """Memory to be filled for blocks; None if all is lent out."""
        ...


class CpuStagedBlocks:
    """`StagedBlocks` of blocks that lie in host memory: nothing is copied but for replicas."""

    def __init__(
        self, pieces: Sequence[Pieces], copies: Sequence[tuple[memoryview, memoryview]]
    ) -> None:
        self.pieces = pieces
        self._copies = copies

    def ready(self) -> bool:
        """See `StagedBlocks.ready`."""
        return True

    def write_back(self) -> None:
        """See `StagedBlocks.write_back`."""
        for source, target in self._copies:
            target[:] = source

    def release(self) -> None:
        """See `StagedBlocks.release`."""


class CpuBlockStaging:
    """`BlockStaging` for pools in host memory.

    Args:
        forms: of objects, one per group.
        memories: per rank, the memory of its pools.
    """

    max_blocks = 1 << 20

    def __init__(self, forms: Sequence[ObjectForm], memories: Sequence[Sequence[Memory]]) -> None:
        self._forms = forms
        self._views: list[list[memoryview]] = []
        for rank in memories:
            arrays = [(ctypes.c_ubyte * m.num_bytes).from_address(m.address) for m in rank]
            for array, memory in zip(arrays, rank, strict=True):
                array.owner = memory.owner  # type: ignore[attr-defined]  # lives as long as a view
            self._views.append([memoryview(array).cast("B") for array in arrays])

    @property
    def regions(self) -> Sequence[memoryview]:
        """See `BlockStaging.regions`."""
        return [view for rank in self._views for view in rank]

    def fetch(self, group: int, blocks: Sequence[int]) -> CpuStagedBlocks:
        """See `BlockStaging.fetch`."""
        return CpuStagedBlocks(
            [self._pieces(self._forms[group].runs, block) for block in blocks], ()
        )

    def lend(self, group: int, blocks: Sequence[int]) -> CpuStagedBlocks:
        """See `BlockStaging.lend`."""
        form = self._forms[group]
        copies = [
            (self._piece(source, block), self._piece(target, block))
            for block in blocks
            for source, target in form.replicas
        ]
        return CpuStagedBlocks([self._pieces(form.runs, block) for block in blocks], copies)

    def _pieces(self, runs: Sequence[BlockBytes], block: int) -> list[memoryview]:
        return [self._piece(run, block) for run in runs]

    def _piece(self, run: BlockBytes, block: int) -> memoryview:
        start = run.offset + block * run.stride
        return self._views[run.rank][run.region][start : start + run.length]


class PinnedStagedBlocks:
    """`StagedBlocks` in slots of pinned memory."""

    def __init__(
        self, staging: PinnedBlockStaging, form: ObjectForm, blocks: Sequence[int], slots: list[int]
    ) -> None:
        self._staging, self._form, self._blocks, self._slots = staging, form, blocks, slots
        self._events: list[torch.cuda.Event] = []
        self.pieces: list[Pieces] = [
            [staging.host[slot, : form.num_bytes].numpy().data] for slot in slots
        ]

    def fetch(self) -> None:
        """Begin to copy from the devices."""
        self._copy([(run, at) for run, at in _places(self._form.runs)], to_device=False)

    def write_back(self) -> None:
        """See `StagedBlocks.write_back`."""
        places = _places(self._form.runs)
        at_of = dict(places)
        replicas = [(target, at_of[source]) for source, target in self._form.replicas]
        self._copy([*places, *replicas], to_device=True)

    def ready(self) -> bool:
        """See `StagedBlocks.ready`."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """See `StagedBlocks.release`."""
        self._staging.free += self._slots
        self._slots = []

    def _copy(self, places: Sequence[tuple[BlockBytes, int]], *, to_device: bool) -> None:
        """Enqueue the copies of each rank on its stream."""
        for rank, stream in enumerate(self._staging.streams):
            mine = [(run, at) for run, at in places if run.rank == rank]
            with torch.cuda.stream(stream):
                for block, slot in zip(self._blocks, self._slots, strict=True):
                    for run, at in mine:
                        start = run.offset + block * run.stride
                        there = self._staging.pools[rank][start : start + run.length]
                        here = self._staging.host[slot, at : at + run.length]
                        target, source = (there, here) if to_device else (here, there)
                        target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
                self._events.append(event)


class PinnedBlockStaging:
    """`BlockStaging` for pools on devices.

    Args:
        forms: of objects, one per group; their runs are in the only region of each rank.
        pools: per rank, the blocks of its pool, [blocks, bytes] uint8.
    """

    def __init__(self, forms: Sequence[ObjectForm], pools: Sequence[Tensor]) -> None:
        self._forms = forms
        self.pools = [pool.flatten() for pool in pools]
        self.streams = [torch.cuda.Stream(pool.device) for pool in pools]  # type: ignore[no-untyped-call]
        size = max(form.num_bytes for form in forms)
        slots = max(FEWEST_SLOTS, HOST_BYTES // size)
        self.host = torch.empty((slots, size), dtype=torch.uint8, pin_memory=True)
        self.free = list(range(slots))
        self.max_blocks = slots // 4

    @property
    def regions(self) -> Sequence[memoryview]:
        """See `BlockStaging.regions`."""
        return [self.host.flatten().numpy().data]

    def fetch(self, group: int, blocks: Sequence[int]) -> PinnedStagedBlocks | None:
        """See `BlockStaging.fetch`."""
        batch = self.lend(group, blocks)
        if batch is not None:
            batch.fetch()
        return batch

    def lend(self, group: int, blocks: Sequence[int]) -> PinnedStagedBlocks | None:
        """See `BlockStaging.lend`."""
        if len(blocks) > len(self.free):
            return None
        slots, self.free = self.free[: len(blocks)], self.free[len(blocks) :]
        return PinnedStagedBlocks(self, self._forms[group], blocks, slots)


def _places(runs: Sequence[BlockBytes]) -> list[tuple[BlockBytes, int]]:
    """Runs with their places in an object."""
    places, at = [], 0
    for run in runs:
        places.append((run, at))
        at += run.length
    return places
