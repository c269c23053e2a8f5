"""A worker on the CPU.

Steps run in a rank's own thread in the order of their launch, as on a CUDA stream, and so does
everything that must be ordered with them. Digests of arrived blocks run in a second thread, beside
the steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor as Thread
from concurrent.futures import ThreadPoolExecutor

import torch
from msgspec.structs import replace

from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.engine.collectives import Alone, Barrier, HostCollectives, Shard
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.executor import Executor, WorkerGroup, rank_threads
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.pending import Pending
from kvbaton.engine.runner import Runner
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan, StepResult
from kvbaton.engine.worker import ModelWorker, WorkerSettings, choose_device, pool_blocks
from kvbaton.messages.engine import SamplingParams

HANDLE = 0
"""Of the warm-up's sequence; a scheduler's handles begin at 1."""

BLOCK = 1
"""It and the next belong to nobody yet; what the warm-up leaves there is overwritten as ever."""


class CpuWorker(ModelWorker):
    """`Worker` on the CPU.

    Args:
        settings: what it is made of.
        steps: the thread in which it runs steps.
    """

    def __init__(self, settings: WorkerSettings, steps: Thread) -> None:
        super().__init__(settings)
        self.steps = steps
        self.digests = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def fit(self) -> int:
        """See `Worker.fit`."""
        return pool_blocks(self.settings)

    def make_runner(self) -> Runner:
        """See `ModelWorker.make_runner`."""
        return Runner(
            self.model,
            self.cache,
            max_model_len=self.settings.max_model_len,
            max_num_seqs=self.settings.config.max_num_seqs,
        )

    def warm_up(self) -> None:
        """Run all that a prompt, its hand-over and a token run, within one block of each group.

        Torch sets up a lot at first use (thread pools, kernels, code pages), in part per thread.
        """
        cache, max_model_len = self.cache, self.settings.max_model_len
        tokens = min(cache.block_size, max_model_len)
        prompt = max(1, tokens - 1)
        new = NewSequence(HANDLE, (0,) * prompt, prompt, 0, SamplingParams(seed=0))
        blocks = tuple((BLOCK + g,) for g in range(len(cache.groups)))
        first = SequenceStep(HANDLE, 0, prompt, blocks, 1)
        self.runner.run(StepPlan(0, new=(new,), steps=(first,))).result()
        if tokens > prompt:
            second = SequenceStep(HANDLE, prompt, 1, ((),) * len(blocks), 1)
            self.runner.run(StepPlan(0, steps=(second,))).result()
        self.runner.run(StepPlan(0, ended=(HANDLE,)))
        cache.digest([BlockRange(0, [BLOCK], 0, 0, tokens)])
        if cache.sums is not None:
            cache.kept_sums(0, [BLOCK])

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """See `Worker.run`."""
        began = time.perf_counter()
        result = self.runner.run(plan).result()
        return Pending.of(replace(result, device_s=time.perf_counter() - began))

    def sums(self, group: int, blocks: Sequence[int], *, in_flight: bool = False) -> Pending[Sums]:
        """See `Worker.sums`; the rank's thread comes to it after its steps."""
        if not in_flight:
            return Pending.of(self.cache.kept_sums(group, blocks))
        summed = self.steps.submit(self.cache.kept_sums, group, blocks)
        return Pending(summed.done, summed.result)

    def digest(self, ranges: Sequence[BlockRange]) -> Pending[list[Sums]]:
        """See `Worker.digest`."""
        summed = self.digests.submit(self.cache.digest, ranges)
        return Pending(summed.done, summed.result)

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
        collectives = HostCollectives(barrier, rank) if size > 1 else Alone()
        shard = Shard(rank, size, collectives, config.enable_expert_parallel)
        settings = WorkerSettings(config, model_config, shard, device, max_model_len, track_sums)
        return CpuWorker(settings, threads[rank])

    return Executor(WorkerGroup(threads, abort=barrier.abort), make)
