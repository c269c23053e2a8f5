"""A rank on a GPU in a process of its own, whose pool is memory of the core's process.

The core's transfer thread moves the blocks of all ranks, and memory that a peer writes must belong
to the process that registers it. All else (weights, kept sums, graphs) belongs to the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from kvbaton.connectors.digest import BlockRange
from kvbaton.engine.cuda.nccl import NcclCollectives
from kvbaton.engine.cuda.shared_tensor import SharedTensor
from kvbaton.engine.cuda.worker import CudaWorker
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.worker import WorkerSettings
from kvbaton.engine.worker_process import START_S, WorkerProcess
from kvbaton.kernels.peer_memory import PeerMemory


class RankProcess(WorkerProcess):
    """See `WorkerProcess`; its `cache` has the pool's memory and layouts, but no sums.

    Args:
        settings: Settings of the rank, whose collectives are made in its process.
        unique_id: See `NcclCollectives`.
        peers: The rank's peer memory, see `PeerMemory`.
    """

    def __init__(
        self, settings: WorkerSettings, unique_id: bytes, peers: PeerMemory | None
    ) -> None:
        torch.zeros(1, device=settings.device)  # our context's memory, before the rank measures
        self._settings, self._peers = settings, peers  # keeps the peers' memory alive
        shared = [] if peers is None else [
            SharedTensor.of(each)
            for each in (*peers.inboxes, *peers.flags, peers.rounds, peers.waiting)
        ]  # fmt: skip
        make = partial(RankWorker, settings, unique_id, shared)
        super().__init__(make, f"rank {settings.shard.rank}")

    def start(self, num_blocks: int) -> None:
        """See `Worker.start`."""
        self.cache = self._settings.make_cache(num_blocks, track_sums=False)
        torch.cuda.synchronize(self._settings.device)  # until its zeros are written
        shared = SharedTensor.of(self.cache.blocks)
        self._ask("start_in", num_blocks, shared, patience_s=START_S).result()
        # Now, since each channel's thread sets up its own pinned memory.
        self.digest([BlockRange(0, [1], 0, 0, self._settings.config.block_size)]).result()
        if self._settings.track_sums:
            self.sums(0, [1]).result()

    def attach_encoder(self, pool: EncoderPool) -> None:
        """See `Worker.attach_encoder`."""
        _, _, levels, _, _, hidden = pool.data.shape
        dtype = str(pool.data.dtype).removeprefix("torch.")
        shape = pool.num_blocks, levels, hidden, dtype, pool.data.device
        self._ask("attach_shared", shape, SharedTensor.of(pool.blocks)).result()


class RankWorker(CudaWorker):
    """The worker in the rank's process."""

    def __init__(
        self, settings: WorkerSettings, unique_id: bytes, shared: Sequence[SharedTensor]
    ) -> None:
        shard, device = settings.shard, settings.device
        torch.cuda.set_device(device)
        peers = None
        if shared:
            *lists, rounds, waiting = (each.open(device) for each in shared)
            peers = PeerMemory(
                shard.rank, lists[: shard.size], lists[shard.size :], rounds, waiting
            )
        collectives = NcclCollectives(shard.rank, shard.size, unique_id, peers)
        super().__init__(replace(settings, shard=replace(shard, collectives=collectives)))

    def start_in(self, num_blocks: int, shared: SharedTensor) -> None:
        """See `Worker.start`; the pool consists of the shared blocks."""
        self.start(num_blocks, shared.open(self.settings.device))

    def attach_shared(
        self, shape: tuple[int, int, int, str, torch.device], shared: SharedTensor
    ) -> None:
        """See `Worker.attach_encoder`; the pool has this shape and the shared blocks."""
        self.attach_encoder(EncoderPool(*shape, blocks=shared.open(shape[-1])))
