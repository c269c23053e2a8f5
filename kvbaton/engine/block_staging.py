"""Bytes of blocks where a store can read and write them.

Pools in host memory are read and written as they lie, and so are those on GPUs by a store that
reaches them. For others blocks pass through pinned memory, on streams of their own. Nothing waits
for a device there, or makes a step wait: blocks that are fetched are final, blocks that are filled
belong to nobody else, and the thread that uses this asks events.
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
"""Pinned for all batches together, if blocks are not larger."""
FEWEST_SLOTS = 8
DEVICE_BATCH_BYTES = 256 << 20
"""Of a store that reaches a device's blocks: the sums of one batch are made beside the next."""
LOADS_TOGETHER = 3
"""Batches of one load: the store reads one, one is copied, and sums of another are made."""


class StagedBlocks(Protocol):
    """Some blocks of one group. Whoever has it gives it back with `release`."""

    @property
    def pieces(self) -> Sequence[AnyPieces]:
        """Per block its bytes in canonical order (see `connectors.objects`)."""

    def ready(self) -> bool:
        """Whether the bytes are where they were to go.

        That is here after `fetch`, and in the blocks after `write_back`.
        """

    def write_back(self) -> None:
        """Begin to bring what was filled in to the blocks."""

    def release(self) -> None:
        """Give the memory back."""


class BlockStaging(Protocol):
    """Lends memory for blocks. One thread makes all calls, beside the steps."""

    @property
    def max_blocks(self) -> int:
        """Most blocks of one batch."""

    @property
    def loads_together(self) -> int:
        """Batches of one load."""

    @property
    def regions(self) -> AnyPieces:
        """The memory in which all pieces lie."""

    def fetch(self, group: int, blocks: Sequence[int]) -> StagedBlocks | None:
        """Begin to bring blocks here, which no step in flight writes; None if all is lent out."""

    def lend(self, group: int, blocks: Sequence[int]) -> StagedBlocks | None:
        """Memory to be filled for blocks; None if all is lent out."""


OnePiece = TypeVar("OnePiece", memoryview, Memory)


class StagedInPlace(Generic[OnePiece]):
    """`StagedBlocks` as they lie: nothing is copied but for replicas."""

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
        forms: of objects, one per group.
        memories: per rank, the memory of its pools.
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
        """See `BlockStaging.fetch`; what lies in the cache can't be written by who stores it."""
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
    """`BlockStaging` for pools on devices, and a store that reaches them there.

    Args:
        forms: of objects, one per group; without replicas, which a store knows nothing of.
        memories: per rank, the memory of its pools.
    """

    loads_together = 2
    """The store copies one, and sums of the other are made; three took more of the interpreter."""

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
        """Begin to copy from the devices."""
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
    """`BlockStaging` for pools on devices.

    Args:
        forms: of objects, one per group; their runs are in the only region of each rank.
        pools: per rank, the blocks of its pool, [blocks, bytes] uint8.
    """

    loads_together = LOADS_TOGETHER

    def __init__(self, forms: Sequence[ObjectForm], pools: Sequence[Tensor]) -> None:
        self._forms = forms
        self.addresses = [pool.data_ptr() for pool in pools]
        self.copies = CudaCopies()
        # By direction, so that both ways of the bus are used at the same time.
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
    """Runs with their places in an object."""
    places, at = [], 0
    for run in runs:
        places.append((run, at))
        at += run.length
    return places
