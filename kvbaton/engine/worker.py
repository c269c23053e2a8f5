"""A worker: what one rank does, on its own device, with its own share of model and KV pool.

What goes in and comes out is plain data (plans, block numbers, sums), and a worker knows nothing of
the others but by `Shard.collectives`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.engine.block_memory import BlockMemory
from kvbaton.engine.cache import KVCache
from kvbaton.engine.collectives import Shard
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_groups import block_bytes
from kvbaton.engine.loader import load_kv_scales, load_model
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.pending import Pending
from kvbaton.engine.runner import Runner
from kvbaton.engine.step import StepPlan, StepResult
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import AddRequest

log = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = 1 << 30
"""Most that the KV pools of all ranks take on a CPU unless told otherwise."""


class Worker(ABC):
    """One rank. It is made in its thread, where also all is called that enqueues or runs steps.

    Attributes:
        cache: its pool, once started.
        wake_fd: one of `Executor.wake_fds`; None if its steps are waited for.
    """

    cache: BlockMemory
    wake_fd: int | None = None

    @abstractmethod
    def fit(self) -> int:
        """Blocks that its pool could have."""

    @abstractmethod
    def start(self, num_blocks: int) -> None:
        """Allocate the pool and warm up."""

    def attach_encoder(self, pool: EncoderPool) -> None:  # noqa: B027
        """See `Executor.attach_encoder`; nothing for who computes the outputs itself."""

    def expect(self, request: AddRequest) -> None:  # noqa: B027
        """See `Executor.expect`; nothing where all that a prompt needs is its steps."""

    @abstractmethod
    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """Run a step, or enqueue it."""

    @abstractmethod
    def sums(self, group: int, blocks: Sequence[int], *, in_flight: bool = False) -> Pending[Sums]:
        """See `Executor.sums`; with `in_flight` in the rank's thread."""

    @abstractmethod
    def digest(self, ranges: Sequence[BlockRange]) -> Pending[list[Sums]]:
        """See `Executor.digest`."""

    def adopt(self, ranges: Sequence[BlockRange], sums: Sequence[Sums]) -> None:
        """See `Executor.adopt` and `BlockMemory.adopt`."""
        self.cache.adopt(ranges, sums)

    def counters(self) -> dict[str, float]:
        """See `Executor.counters`."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Give everything back; its thread has ended."""


@dataclass(frozen=True)
class WorkerSettings:
    """All that a worker of a language model is made of.

    Attributes:
        config: the engine's settings.
        model: the model.
        shard: this rank's share.
        device: where it lives.
        max_model_len: longest sequence.
        track_sums: keep digest sums with the blocks; not needed by a node that sends none.
    """

    config: EngineConfig
    model: ModelConfig
    shard: Shard
    device: torch.device
    max_model_len: int
    track_sums: bool

    def make_cache(self, num_blocks: int, *, track_sums: bool) -> KVCache:
        """A pool for the rank's heads.

        Raises:
            ConfigError: the device can't compute with its dtype, or a scale is no number.
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
        )


class ModelWorker(Worker):
    """`Worker` of a language model: the rank's share of the weights, its pool, and a runner.

    Attributes:
        model: the rank's share of the model.
        runner: runs its steps; made by `start`.
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

    def start(self, num_blocks: int) -> None:
        """See `Worker.start`."""
        self.cache = self.settings.make_cache(num_blocks, track_sums=self.settings.track_sums)
        self.runner = self.make_runner()
        self.warm_up()

    @abstractmethod
    def make_runner(self) -> Runner:
        """A runner over model and pool."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run what requests will need, so that the first one does not pay for it."""

    def attach_encoder(self, pool: EncoderPool) -> None:
        """See `Worker.attach_encoder`."""
        self.runner.attach_encoder(pool)


def choose_device(config: EngineConfig) -> torch.device:
    """The device of the settings. Raises `ConfigError` if it is not there."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ConfigError("--device", "no CUDA device is available")
    return torch.device("cuda:0" if there and config.device != "cpu" else "cpu")


def pool_blocks(settings: WorkerSettings, *, reserve: int = 0) -> int:
    """Blocks of a rank's pool, the null block included.

    Args:
        settings: of the rank.
        reserve: bytes of a GPU's free memory to leave to everything but the pool.

    Raises:
        ConfigError: it can't hold one sequence of the longest length.
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
    """Blocks by the first setting that says something, and that setting's flag."""
    config, device = settings.config, settings.device
    if config.num_blocks is not None:
        return config.num_blocks, _pool_flag(config)
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // per_block, _pool_flag(config)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What other processes hold is not ours to pay for: nodes of one GPU have a share each.
        share = int(config.gpu_memory_utilization * total) - torch.cuda.memory_reserved(device)
        return max(0, min(free, share) - reserve) // per_block, "--gpu-memory-utilization"
    wanted = per_sequence * config.max_num_seqs + 1
    most = DEFAULT_CPU_BYTES // settings.shard.size
    return min(wanted, most // per_block), _pool_flag(config)


def _pool_flag(config: EngineConfig) -> str:
    """What says how large the pool is to be, wherever no GPU's free memory does."""
    return "--kv-cache-memory-bytes" if config.num_blocks is None else "--num-blocks"
