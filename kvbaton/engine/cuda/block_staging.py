"""Blocks on their way between devices and pinned host memory, on streams of their own.

Nothing here waits for a device, or makes a step wait: blocks that are fetched are final, blocks
that are filled belong to nobody else, and the thread that uses this asks events.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbaton.connectors.objects import ObjectForm, Run
from kvbaton.connectors.store import Pieces

HOST_BYTES = 256 << 20
"""Pinned for all batches together, if blocks are not larger."""
FEWEST_SLOTS = 8


class CudaBatch:
    """`Batch` in slots of pinned memory."""

    def __init__(
        self, staging: CudaStaging, form: ObjectForm, blocks: Sequence[int], slots: list[int]
    ) -> None:
        self._staging, self._form, self._blocks, self._slots = staging, form, blocks, slots
        self._events: list[torch.cuda.Event] = []
        self.pieces: list[Pieces] = [
            [staging.host[slot, : form.num_bytes].numpy().data] for slot in slots
        ]

    def fetch(self) -> None:
        """Begin to copy from the devices."""
        self._copy([(run, at) for run, at in _places(self._form.runs)], to_device=False)

    def land(self) -> None:
        """See `Batch.land`."""
        places = _places(self._form.runs)
        at_of = dict(places)
        replicas = [(target, at_of[source]) for source, target in self._form.replicas]
        self._copy([*places, *replicas], to_device=True)

    def ready(self) -> bool:
        """See `Batch.ready`."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """See `Batch.release`."""
        self._staging.free += self._slots
        self._slots = []

    def _copy(self, places: Sequence[tuple[Run, int]], *, to_device: bool) -> None:
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


class CudaStaging:
    """`Staging` for pools on devices.

    Args:
        forms: of objects, one per group; their runs are in the only region of each rank.
        pools: per rank, its pool.
    """

    def __init__(self, forms: Sequence[ObjectForm], pools: Sequence[Tensor]) -> None:
        self._forms = forms
        self.pools = [pool.view(torch.uint8).flatten() for pool in pools]
        self.streams = [torch.cuda.Stream(pool.device) for pool in pools]  # type: ignore[no-untyped-call]
        size = max(form.num_bytes for form in forms)
        slots = max(FEWEST_SLOTS, HOST_BYTES // size)
        self.host = torch.empty((slots, size), dtype=torch.uint8, pin_memory=True)
        self.free = list(range(slots))
        self.max_blocks = slots // 4

    def fetch(self, group: int, blocks: Sequence[int]) -> CudaBatch | None:
        """See `Staging.fetch`."""
        batch = self.lend(group, blocks)
        if batch is not None:
            batch.fetch()
        return batch

    def lend(self, group: int, blocks: Sequence[int]) -> CudaBatch | None:
        """See `Staging.lend`."""
        if len(blocks) > len(self.free):
            return None
        slots, self.free = self.free[: len(blocks)], self.free[len(blocks) :]
        return CudaBatch(self, self._forms[group], blocks, slots)


def _places(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """Runs with their places in an object."""
    places, at = [], 0
    for run in runs:
        places.append((run, at))
        at += run.length
    return places
