"""Ranks on CUDA devices of this process, one each.

Steps run in order on a device's default stream. Sums are read and digests computed on streams of
their own, beside the steps: the blocks they are about are final when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvbaton.connectors.objects import ObjectForm
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.cuda.block_staging import CudaStaging
from kvbaton.engine.cuda.cache import CudaKVCache
from kvbaton.engine.cuda.memory import measure_reserve
from kvbaton.engine.cuda.nccl import Communicators, NcclCollectives
from kvbaton.engine.cuda.runner import CudaRunner, CudaStep
from kvbaton.engine.cuda.warm_up import warm_up
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.local import choose_device, pool_blocks
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.ranks import Inline, RankedExecutor, RankSettings, Sums, Team, lanes
from kvbaton.engine.shard import Shard
from kvbaton.engine.step import StepPlan
from kvbaton.errors import ConfigError

PATIENCE_S = 60.0
"""For one step of several ranks: far beyond any, but not for ever if a device does not come."""


class CudaSums:
    """`RankSums` on their way into pinned memory."""

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._there.record()

    def poll(self) -> Sums | None:
        """See `RankSums.poll`."""
        there = self._there.query()  # type: ignore[no-untyped-call]
        return self._sums.numpy().view(np.uint64) if there else None


class CudaRank:
    """`Rank` on a GPU."""

    cache: CudaKVCache

    def __init__(self, settings: RankSettings) -> None:
        self._settings, self._device = settings, settings.device
        torch.cuda.set_device(self._device)
        self._model = settings.load()
        self._runner: CudaRunner | None = None
        self._sums_stream = _urgent_stream(self._device)
        self._digest_stream = _urgent_stream(self._device)

    def fit(self) -> int:
        """See `Rank.fit`."""
        reserve = measure_reserve(self._settings, self._model)
        torch.cuda.empty_cache()
        return pool_blocks(self._settings, reserve=reserve)

    def start(self, num_blocks: int) -> None:
        """See `Rank.start`."""
        settings = self._settings
        self.cache = CudaKVCache(
            settings.model,
            num_blocks=num_blocks,
            block_size=settings.config.block_size,
            device=self._device,
            shard=settings.shard,
            track_sums=settings.track_sums,
        )
        self._runner = CudaRunner(
            self._model,
            self.cache,
            eos_token_ids=settings.model.eos_token_ids,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.config.max_num_seqs,
            use_graphs=not settings.config.enforce_eager,
        )
        warm_up(self._runner, settings.config)
        self.cache.fetch_digest([1], 0, 0, settings.config.block_size)
        torch.cuda.synchronize(self._device)

    def attach_encoder(self, pool: EncoderPool) -> None:
        """See `Rank.attach_encoder`."""
        assert self._runner is not None, "the runner comes with the start"
        self._runner.attach_encoder(pool)

    def run(self, plan: StepPlan) -> CudaStep:
        """See `Rank.run`; returns when the step is enqueued."""
        assert self._runner is not None, "steps come after the start"
        alone = self._settings.shard.size == 1
        return CudaStep(self._runner.run(plan), patience_s=None if alone else PATIENCE_S)

    def sums(self, blocks: Sequence[int]) -> CudaSums:
        """See `Rank.sums`."""
        with torch.cuda.stream(self._sums_stream), torch.inference_mode():
            return CudaSums(self.cache.fetch_kept_sums(blocks))

    def digest(self, blocks: Sequence[int], first_position: int, start: int, end: int) -> CudaSums:
        """See `Rank.digest`."""
        with torch.cuda.stream(self._digest_stream), torch.inference_mode():
            return CudaSums(self.cache.fetch_digest(blocks, first_position, start, end))

    def close(self) -> None:
        """See `Rank.close`; waits for the steps in flight."""
        torch.cuda.synchronize(self._device)
        if self._runner is not None:
            self._runner.graphs = None  # NCCL must not go before the graphs that call it


class CudaExecutor(RankedExecutor):
    """`Executor` with its ranks on the GPUs that this process sees, the first ones.

    Args:
        config: the engine's settings.
        model_config: the model.
        track_sums: keep digest sums with the blocks; not needed by a node that sends none.

    Raises:
        ConfigError: a setting, the model folder or the size of the pool is wrong.
    """

    ranks: Sequence[CudaRank]

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, *, track_sums: bool = True
    ) -> None:
        size = config.tensor_parallel_size
        devices = _devices(config)
        max_model_len = resolve_max_model_len(config.max_model_len, model_config)
        self._communicators = Communicators(size) if size > 1 else None
        team = Team([Inline()], lambda: None)
        if self._communicators is not None:
            team = Team(lanes(size), self._communicators.disband, patience_s=PATIENCE_S)

        def make(rank: int) -> CudaRank:
            shard = Shard()
            if self._communicators is not None:
                shard = Shard(rank, size, NcclCollectives(self._communicators, rank, size))
            lane = team.lanes[rank]
            return CudaRank(
                RankSettings(
                    config, model_config, shard, devices[rank], max_model_len, track_sums, lane
                )
            )

        super().__init__(team, make)

    def attach_encoder(self, pool: EncoderPool) -> None:
        """See `Executor.attach_encoder`; every rank takes the rows to its own device."""
        self._team.call(lambda rank: self.ranks[rank].attach_encoder(pool))

    def staging(self, forms: Sequence[ObjectForm]) -> CudaStaging:
        """See `Executor.staging`."""
        return CudaStaging(forms, [rank.cache.data for rank in self.ranks])

    def close(self) -> None:
        """See `Executor.close`; waits for the steps in flight."""
        super().close()
        if self._communicators is not None:
            self._communicators.close()


def _devices(config: EngineConfig) -> list[torch.device]:
    """A GPU per rank. Raises `ConfigError` if there are not enough."""
    first, size = choose_device(config), config.tensor_parallel_size
    there = torch.cuda.device_count()
    if there < size:
        raise ConfigError(
            "--tensor-parallel-size",
            f"{size} ranks need {size} GPUs, and this process sees {there}: give at most {there}",
        )
    return [torch.device(first.type, rank) for rank in range(size)]


def _urgent_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream whose kernels go before those of the steps."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
