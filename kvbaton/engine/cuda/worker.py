"""A worker on a CUDA device of this process.

Steps run in order on a device's default stream. Sums are read and digests computed on streams of
their own, beside the steps: the blocks they are about are final when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvbaton.engine.config import EngineConfig
from kvbaton.engine.cuda.cache import CudaKVCache
from kvbaton.engine.cuda.memory import measure_reserve
from kvbaton.engine.cuda.nccl import Communicators, NcclCollectives
from kvbaton.engine.cuda.runner import CudaRunner, enqueued, fetched
from kvbaton.engine.cuda.warm_up import warm_up
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.executor import CallerThread, Executor, WorkerGroup, rank_threads
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.pending import Pending
from kvbaton.engine.shard import Shard
from kvbaton.engine.step import StepPlan, StepResult
from kvbaton.engine.worker import Sums, Worker, WorkerSettings, choose_device, pool_blocks
from kvbaton.errors import ConfigError

PATIENCE_S = 60.0
"""For one step of several ranks: far beyond any, but not for ever if a device does not come."""


class CudaWorker(Worker):
    """`Worker` on a GPU."""

    cache: CudaKVCache

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings, self._device = settings, settings.device
        torch.cuda.set_device(self._device)
        self._model = settings.load()
        self._runner: CudaRunner | None = None
        self._sums_stream = _urgent_stream(self._device)
        self._digest_stream = _urgent_stream(self._device)

    def fit(self) -> int:
        """See `Worker.fit`."""
        reserve = measure_reserve(self._settings, self._model)
        torch.cuda.empty_cache()
        return pool_blocks(self._settings, reserve=reserve)

    def start(self, num_blocks: int) -> None:
        """See `Worker.start`."""
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
        """See `Worker.attach_encoder`."""
        assert self._runner is not None, "the runner comes with the start"
        self._runner.attach_encoder(pool)

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """See `Worker.run`; returns when the step is enqueued."""
        assert self._runner is not None, "steps come after the start"
        output = fetched(self._runner.run(plan))
        alone = self._settings.shard.size == 1
        return enqueued(output.result, patience_s=None if alone else PATIENCE_S)

    def sums(self, blocks: Sequence[int]) -> Pending[Sums]:
        """See `Worker.sums`."""
        with torch.cuda.stream(self._sums_stream), torch.inference_mode():
            sums = self.cache.fetch_kept_sums(blocks)
            return enqueued(lambda: sums.numpy().view(np.uint64))

    def digest(
        self, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> Pending[Sums]:
        """See `Worker.digest`."""
        with torch.cuda.stream(self._digest_stream), torch.inference_mode():
            sums = self.cache.fetch_digest(blocks, first_position, start, end)
            return enqueued(lambda: sums.numpy().view(np.uint64))

    def close(self) -> None:
        """See `Worker.close`; waits for the steps in flight."""
        torch.cuda.synchronize(self._device)
        if self._runner is not None:
            self._runner.graphs = None  # NCCL must not go before the graphs that call it


def cuda_executor(
    config: EngineConfig, model_config: ModelConfig, *, track_sums: bool = True
) -> Executor:
    """Ranks on the GPUs that this process sees, the first ones.

    Raises:
        ConfigError: a setting, the model folder or the size of the pool is wrong.
    """
    size = config.tensor_parallel_size
    devices = _devices(config)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    shards, group = [Shard()], WorkerGroup([CallerThread()])
    if size > 1:
        communicators = Communicators(size)
        shards = [
            Shard(rank, size, NcclCollectives(communicators, rank, size)) for rank in range(size)
        ]
        group = WorkerGroup(
            rank_threads(size),
            abort=communicators.abort,
            release=communicators.close,
            patience_s=PATIENCE_S,
        )

    def make(rank: int) -> CudaWorker:
        return CudaWorker(
            WorkerSettings(
                config, model_config, shards[rank], devices[rank], max_model_len, track_sums
            )
        )

    return Executor(group, make)


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
