"""Workers of a language model: what CPU and CUDA workers share, and the worker on the CPU.

On the CPU, steps and all work that must be ordered with them run in the rank's own thread in the
order of launch, as on a CUDA stream. Digests of arrived blocks run in a second thread, beside the
steps.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.engine.cache import KVCache
from kvbaton.engine.collectives import Barrier, Collectives, HostCollectives, Shard
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.executor import Executor, Worker, WorkerGroup, rank_threads
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_groups import block_bytes
from kvbaton.engine.loader import load_kv_scales, load_model
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.pending import Pending
from kvbaton.engine.runner import Runner
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan, StepResult
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import SamplingParams

log = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = 1 << 30
"""Default total size in bytes of the KV pools of all ranks on the CPU."""

HANDLE = 0
"""Handle of the warm-up's sequence; the scheduler's handles begin at 1."""

BLOCK = 1
"""First of the blocks, one per group, that the warm-up writes; nothing owns them yet."""


@dataclass(frozen=True)
class WorkerSettings:
    """Everything that a language model's worker is made from.

    Attributes:
        config: Settings of the engine.
        model: Configuration of the model.
        shard: The rank's share.
        device: Device of weights and pool.
        max_model_len: Length of the longest sequence, in tokens.
        track_sums: Whether to keep digest sums with blocks; nodes that send none don't need them.
    """

    config: EngineConfig
    model: ModelConfig
    shard: Shard
    device: torch.device
    max_model_len: int
    track_sums: bool

    def make_cache(
        self, num_blocks: int, *, track_sums: bool, blocks: torch.Tensor | None = None
    ) -> KVCache:
        """A pool for the rank's heads, of newly allocated blocks or of the given ones.

        Raises:
            ConfigError: The device can't compute with the KV dtype, or a scale is not a number.
        """
        fp8 = self.model.kv_dtype != self.model.dtype
        if fp8 and self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            if capability < (8, 9):
                raise ConfigError(
                    "--kv-cache-dtype",
                    "'fp8' needs a GPU of compute capability 8.9 or more, not "
                    f"{capability[0]}.{capability[1]}; leave it out",
                )
        return KVCache(
            self.model.kv_groups(),
            dtype=self.model.kv_dtype,
            compute_dtype=self.model.dtype,
            scales=load_kv_scales(self.model, self.config.load_format),
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            device=self.device,
            shard=self.shard,
            track_sums=track_sums,
            flag=_pool_flag(self.config),
            blocks=blocks,
        )


class ModelWorker(Worker):
    """`Worker` of a language model: the rank's share of the weights, its pool, and a runner.

    Attributes:
        model: The rank's share of the model.
        runner: Runs its steps; made by `start`.
    """

    cache: KVCache
    runner: Runner

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.model = load_model(
            settings.model,
            device=settings.device,
            load_format=settings.config.load_format,
            seed=settings.config.seed,
            shard=settings.shard,
        )

    def start(self, num_blocks: int, blocks: torch.Tensor | None = None) -> None:
        """See `Worker.start`; the pool may consist of `blocks` that another process allocated."""
        track_sums = self.settings.track_sums
        self.cache = self.settings.make_cache(num_blocks, track_sums=track_sums, blocks=blocks)
        self.runner = self.make_runner()
        self.warm_up()

    @abstractmethod
    def make_runner(self) -> Runner:
        """Make a runner over model and pool."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run what requests will need, so that the first request does not pay for it."""

    def forget(self) -> None:
        """See `Worker.forget`."""
        self.cache.counted[:] = 0

    def attach_encoder(self, pool: EncoderPool) -> None:
        """See `Worker.attach_encoder`."""
        self.runner.attach_encoder(pool)


def choose_device(config: EngineConfig) -> torch.device:
    """The device that the settings choose. Raises `ConfigError` if it does not exist."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ConfigError("--device", "no CUDA device is available")
    return torch.device("cuda:0" if there and config.device != "cpu" else "cpu")


def pool_blocks(settings: WorkerSettings, *, reserve: int = 0) -> int:
    """Number of blocks of a rank's pool, null block included.

    Args:
        settings: Settings of the rank.
        reserve: Bytes of a GPU's free memory that the pool must not take.

    Raises:
        ConfigError: The pool can't hold one sequence of `max_model_len`.
    """
    config, max_model_len = settings.config, settings.max_model_len
    groups = settings.model.kv_groups()
    per_block = block_bytes(groups, config.block_size, settings.shard.size, settings.model.kv_dtype)
    specs = [GroupSpec(config.block_size, 2, group.kind, group.window) for group in groups]
    step_tokens = config.max_num_batched_tokens
    per_sequence = sum(spec.most_blocks(max_model_len, step_tokens) for spec in specs)
    blocks, field = _asked_blocks(settings, per_block, per_sequence, reserve)
    if blocks < per_sequence + 1:
        need = per_sequence + 1
        raise ConfigError(
            field,
            f"the KV pool has {blocks} blocks; one sequence of {max_model_len} tokens needs {need} "
            f"({need * per_block} bytes): give --num-blocks {need} or a smaller --max-model-len",
        )
    log.info(
        "KV pool: %d blocks of %d tokens for %d groups, %.1f MiB on %s, for %.1f sequences of %d",
        blocks, config.block_size, len(groups), blocks * per_block / 2**20, settings.device,
        (blocks - 1) / per_sequence, max_model_len,
    )  # fmt: skip
    return blocks


def _asked_blocks(
    settings: WorkerSettings, per_block: int, per_sequence: int, reserve: int
) -> tuple[int, str]:
    """Number of blocks by the first setting that determines it, and that setting's flag."""
    config, device = settings.config, settings.device
    if config.num_blocks is not None:
        return config.num_blocks, _pool_flag(config)
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // per_block, _pool_flag(config)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Only our own memory counts against the share: nodes on one GPU have a share each.
        share = int(config.gpu_memory_utilization * total) - torch.cuda.memory_reserved(device)
        return max(0, min(free, share) - reserve) // per_block, "--gpu-memory-utilization"
    wanted = per_sequence * config.max_num_seqs + 1
    most = DEFAULT_CPU_BYTES // settings.shard.size
    return min(wanted, most // per_block), _pool_flag(config)


def _pool_flag(config: EngineConfig) -> str:
    """Flag that sets the size of the pool, where it does not follow from a GPU's free memory."""
    return "--kv-cache-memory-bytes" if config.num_blocks is None else "--num-blocks"


# --- on the CPU ---


class CpuWorker(ModelWorker):
    """`Worker` on the CPU.

    Args:
        settings: What the worker is made from.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
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
        """Run a prompt, its hand-over sums and a decode step, within one block of each group.

        Torch sets up much at first use (thread pools, kernels, code pages), partly per thread.
        """
        cache, max_model_len = self.cache, self.settings.max_model_len
        tokens = min(cache.block_size, max_model_len)
        prompt = max(1, tokens - 1)
        new = NewSequence(HANDLE, array("I", [0]) * prompt, prompt, 0, SamplingParams(seed=0))
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
        """See `Worker.sums`."""
        return Pending.of(self.cache.kept_sums(group, blocks))

    def digest(self, ranges: Sequence[BlockRange], *, keep: bool = False) -> Pending[list[Sums]]:
        """See `Worker.digest`."""
        summed = self.digests.submit(self.cache.digest, ranges, keep=keep)
        return Pending(summed.done, summed.result)

    def close(self) -> None:
        """See `Worker.close`."""
        self.digests.shutdown(cancel_futures=True)


def cpu_executor(
    config: EngineConfig, model_config: ModelConfig, *, track_sums: bool = True
) -> Executor:
    """An executor of ranks on the CPU.

    Raises:
        ConfigError: A setting, the model folder or the size of the pool is wrong.
    """
    size, device = config.tensor_parallel_size, choose_device(config)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    if config.num_threads is not None or size > 1:
        torch.set_num_threads(config.num_threads or max(1, torch.get_num_threads() // size))
    barrier = Barrier(size)
    threads = rank_threads(size)

    def make(rank: int) -> CpuWorker:
        collectives = HostCollectives(barrier, rank) if size > 1 else Collectives()
        shard = Shard(rank, size, collectives, config.enable_expert_parallel)
        settings = WorkerSettings(config, model_config, shard, device, max_model_len, track_sums)
        return CpuWorker(settings)

    return Executor(WorkerGroup(threads, abort=barrier.abort), make)
