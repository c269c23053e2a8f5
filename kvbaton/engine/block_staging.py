"""Bytes of blocks where a store can read and write them.

Pools in host memory are read and written in place, and so are pools on GPUs by a store that can
access them. For other stores, blocks pass through pinned memory, on separate streams. Nothing here
waits for a device, or makes a step wait: blocks that are fetched are final, blocks that are filled
belong to nobody else, and the thread that uses this polls events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvbaton.connectors.base import Memory
from kvbaton.connectors.cuda_copies import CopyRun, CudaCopies
from kvbaton.connectors.objects import BlockBytes, ObjectForm
from kvbaton.connectors.store import AnyPieces, Pieces

HOST_BYTES = 256 << 20
"""Total bytes of pinned memory for all batches, unless single blocks are too large for it."""
FEWEST_SLOTS = 8
DEVICE_BATCH_BYTES = 256 << 20
"""Bytes per batch for a store that accesses a device's blocks: while one batch is summed, the next
is loaded."""
LOADS_TOGETHER = 3
"""Number of batches of a load in progress: one read by the store, one copied, one summed."""


class StagedBlocks(Protocol):
    """Some blocks of one group, borrowed until `release`."""

    @property
    def pieces(self) -> Sequence[AnyPieces]:
        """Per block, its bytes in canonical order (see `connectors.objects`)."""

    def ready(self) -> bool:
        """Whether the last transfer is over.

        After `fetch`, the bytes are in `pieces`; after `write_back`, they are in the blocks.
        """

    def write_back(self) -> None:
        """Start to move the pieces' bytes to the blocks."""

    def release(self) -> None:
        """Give the memory back."""


class BlockStaging(Protocol):
    """Lends memory for blocks. One thread makes all calls, beside the steps."""

    @property
    def max_blocks(self) -> int:
        """Maximum number of blocks in one batch."""

    @property
    def loads_together(self) -> int:
        """Number of batches of one load in progress."""

    @property
    def regions(self) -> AnyPieces:
        """The memory that contains all pieces."""

    def fetch(self, group: int, blocks: Sequence[int]) -> StagedBlocks | None:
        """Start to fetch blocks that no step in flight writes; None if no memory is free."""

    def lend(self, group: int, blocks: Sequence[int]) -> StagedBlocks | None:
        """Memory to be filled for blocks; None if no memory is free."""


OnePiece = TypeVar("OnePiece", memoryview, Memory)


class StagedInPlace(Generic[OnePiece]):
    """`StagedBlocks` in place: only replicas are copied."""

    def __init__(
        self,
        pieces: Sequence[Sequence[OnePiece]],
        copies: Sequence[tuple[memoryview, memoryview]] = (),
    ) -> None:
        self.pieces: Sequence[Sequence[OnePiece]] = pieces
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
        forms: Forms of objects, one per group.
        memories: Per rank, the memory of its pools.
    """

    max_blocks = 1 << 20
    loads_together = LOADS_TOGETHER

    def __init__(self, forms: Sequence[ObjectForm], memories: Sequence[Sequence[Memory]]) -> None:
        self._forms = forms
        self._views = [[memory.view() for memory in rank] for rank in memories]
        self._sources = [[view.toreadonly() for view in rank] for rank in self._views]

    @property
    def regions(self) -> Pieces:
        """See `BlockStaging.regions`."""
        return [view for rank in self._views for view in rank]

    def fetch(self, group: int, blocks: Sequence[int]) -> StagedInPlace[memoryview]:
        """See `BlockStaging.fetch`; the pieces are read-only, which protects the cache."""
        runs = self._forms[group].runs
        pieces = [[self._piece(self._sources, run, block) for run in runs] for block in blocks]
        return StagedInPlace(pieces)

    def lend(self, group: int, blocks: Sequence[int]) -> StagedInPlace[memoryview]:
        """See `BlockStaging.lend`."""
        form = self._forms[group]
        copies = [
            (self._piece(self._sources, source, block), self._piece(self._views, target, block))
            for block in blocks
            for source, target in form.replicas
        ]
        pieces = [[self._piece(self._views, run, block) for run in form.runs] for block in blocks]
        return StagedInPlace(pieces, copies)

    @staticmethod
    def _piece(views: Sequence[Sequence[memoryview]], run: BlockBytes, block: int) -> memoryview:
        start = run.offset + block * run.stride
        return views[run.rank][run.region][start : start + run.length]


class DeviceBlockStaging:
    """`BlockStaging` for pools on devices, and a store that accesses them there.

    Args:
        forms: Forms of objects, one per group; without replicas, which stores can't write.
        memories: Per rank, the memory of its pools.
    """

    loads_together = 2
    """The store copies one batch while the other is summed; three slowed the interpreter down."""

    def __init__(self, forms: Sequence[ObjectForm], memories: Sequence[Sequence[Memory]]) -> None:
        self._forms, self._memories = forms, memories
        size = max(form.num_bytes for form in forms)
        self.max_blocks = max(FEWEST_SLOTS, DEVICE_BATCH_BYTES // size)

    @property
    def regions(self) -> Sequence[Memory]:
        """See `BlockStaging.regions`."""
        return [memory for rank in self._memories for memory in rank]

    def fetch(self, group: int, blocks: Sequence[int]) -> StagedInPlace[Memory]:
        """See `BlockStaging.fetch`."""
        return self.lend(group, blocks)

    def lend(self, group: int, blocks: Sequence[int]) -> StagedInPlace[Memory]:
        """See `BlockStaging.lend`."""
        runs = [
            (self._memories[run.rank][run.region], run.offset, run.stride, run.length)
            for run in self._forms[group].runs
        ]
        pieces: list[list[Memory]] = [
            [memory.part(at := offset + block * stride, at + length)
             for memory, offset, stride, length in runs]
            for block in blocks
        ]  # fmt: skip
        return StagedInPlace(pieces)


class PinnedStagedBlocks:
    """`StagedBlocks` in slots of pinned memory."""

    def __init__(
        self, staging: PinnedBlockStaging, form: ObjectForm, blocks: Sequence[int], slots: list[int]
    ) -> None:
        self._staging, self._form, self._blocks, self._slots = staging, form, blocks, slots
        self._events: list[Any] = []
        self.pieces: list[Pieces] = [
            [staging.host[slot, : form.num_bytes].numpy().data] for slot in slots
        ]

    def fetch(self) -> None:
        """Start to copy from the devices."""
        self._copy(_places(self._form.runs), to_device=False)

    def write_back(self) -> None:
        """See `StagedBlocks.write_back`."""
        places = _places(self._form.runs)
        at_of = dict(places)
        replicas = [(target, at_of[source]) for source, target in self._form.replicas]
        self._copy([*places, *replicas], to_device=True)

    def ready(self) -> bool:
        """See `StagedBlocks.ready`."""
        return all(event.query() for event in self._events)

    def release(self) -> None:
        """See `StagedBlocks.release`."""
        self._staging.free += self._slots
        self._slots = []

    def _copy(self, places: Sequence[tuple[BlockBytes, int]], *, to_device: bool) -> None:
        """Enqueue the copies of each rank on its stream."""
        staging, size = self._staging, self._staging.host.shape[1]
        for rank, stream in enumerate(staging.streams[to_device]):
            runs = list[CopyRun]()
            for run, at in places:
                if run.rank == rank:
                    there = staging.addresses[rank] + run.offset
                    here = staging.host.data_ptr() + at
                    for block, slot in zip(self._blocks, self._slots, strict=True):
                        sides = there + block * run.stride, here + slot * size
                        runs.append(CopyRun(*(sides if to_device else sides[::-1]), run.length))
            self._events.append(staging.copies.begin(runs, stream))


class PinnedBlockStaging:
    """`BlockStaging` for pools on devices, through pinned memory.

    Args:
        forms: Forms of objects, one per group; all runs are in the only region of each rank.
        pools: Per rank, the blocks of its pool, [blocks, bytes] uint8.
    """

    loads_together = LOADS_TOGETHER

    def __init__(self, forms: Sequence[ObjectForm], pools: Sequence[Tensor]) -> None:
        self._forms = forms
        self.addresses = [pool.data_ptr() for pool in pools]
        self.copies = CudaCopies()
        # One stream per direction, so that both directions of the bus are used at once.
        self.streams = [[self.copies.stream(pool.device.index) for pool in pools] for _ in range(2)]
        size = max(form.num_bytes for form in forms)
        slots = max(FEWEST_SLOTS, HOST_BYTES // size)
        self.host = torch.empty((slots, size), dtype=torch.uint8, pin_memory=True)
        self.free = list(range(slots))
        self.max_blocks = slots // 4

    @property
    def regions(self) -> Pieces:
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
    """Runs with their offsets in an object."""
    places, at = [], 0
    for run in runs:
        places.append((run, at))
        at += run.length
    return places
