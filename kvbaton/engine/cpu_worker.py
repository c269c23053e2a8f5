"""A worker on the CPU.

Steps run in a rank's own thread in the order of their launch, as on a CUDA stream, and so does
everything that must be ordered with them. Digests of arrived blocks run in a second thread, beside
the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor as Thread
from concurrent.futures import ThreadPoolExecutor

import torch

from kvbaton.engine.cache import KVCache
from kvbaton.engine.collectives import Barrier, HostCollectives
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.executor import Executor, WorkerGroup, rank_threads
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.pending import Pending
from kvbaton.engine.runner import Runner
from kvbaton.engine.shard import Shard
from kvbaton.engine.step import StepPlan, StepResult
from kvbaton.engine.warmup import warm_up
from kvbaton.engine.worker import Sums, Worker, WorkerSettings, choose_device, pool_blocks


class CpuWorker(Worker):
    """`Worker` on the CPU.

    Args:
        settings: what it is made of.
        steps: the thread in which it runs steps.
    """

    cache: KVCache

    def __init__(self, settings: WorkerSettings, steps: Thread) -> None:
        self._settings, self.steps = settings, steps
        self.model = settings.load()
        self.digests = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def fit(self) -> int:
        """See `Worker.fit`."""
        return pool_blocks(self._settings)

    def start(self, num_blocks: int) -> None:
        """See `Worker.start`; torch's own setting-up is per thread in part."""
        settings = self._settings
        self.cache = KVCache(
            settings.model,
            num_blocks=num_blocks,
            block_size=settings.config.block_size,
            device=settings.device,
            shard=settings.shard,
            track_sums=settings.track_sums,
        )
        self._runner = Runner(
            self.model,
            self.cache,
            eos_token_ids=settings.model.eos_token_ids,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.config.max_num_seqs,
        )
        warm_up(self._runner, settings.max_model_len)

    def attach_encoder(self, pool: EncoderPool) -> None:
        """See `Worker.attach_encoder`."""
        self._runner.encoder = pool

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """See `Worker.run`."""
        return Pending.of(self._runner.run(plan).result())

    def sums(self, blocks: Sequence[int]) -> Pending[Sums]:
        """See `Worker.sums`."""
        return Pending.of_future(self.steps.submit(self.cache.kept_sums, blocks))

    def digest(
        self, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> Pending[Sums]:
        """See `Worker.digest`."""
        digest = self.cache.digest
        return Pending.of_future(self.digests.submit(digest, blocks, first_position, start, end))

    def close(self) -> None:
        """See `Worker.close`."""
        self.digests.shutdown(cancel_futures=True)


def cpu_executor(
    config: EngineConfig, model_config: ModelConfig, *, track_sums: bool = True
) -> Executor:
    """Ranks on the CPU.

    Raises:
        ConfigError: a setting, the model folder or the size of the pool is wrong.
    """
    size, device = config.tensor_parallel_size, choose_device(config)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    if config.num_threads is not None or size > 1:
        torch.set_num_threads(config.num_threads or max(1, torch.get_num_threads() // size))
    barrier = Barrier(size)
    threads = rank_threads(size)

    def make(rank: int) -> CpuWorker:
        shard = Shard(rank, size, HostCollectives(barrier, rank)) if size > 1 else Shard()
        settings = WorkerSettings(config, model_config, shard, device, max_model_len, track_sums)
        return CpuWorker(settings, threads[rank])

    return Executor(WorkerGroup(threads, abort=barrier.abort), make)
