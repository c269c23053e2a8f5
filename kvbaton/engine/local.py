"""An executor with one rank in this process.

Steps run in one thread in the order of their launch, as on a CUDA stream, and so does everything
that must be ordered with them. Digests of arrived blocks run in a second thread, beside the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from kvbaton.connectors.base import Memory
from kvbaton.connectors.layout import KVLayout
from kvbaton.engine.cache import KVCache, block_bytes
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.loader import load_model
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.runner import Runner
from kvbaton.engine.shard import Shard
from kvbaton.engine.step import PendingStep, PendingSums, StepPlan, StepResult
from kvbaton.engine.warmup import warm_up
from kvbaton.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = 1 << 30
"""Most that the KV pool takes on a CPU unless told otherwise."""


class LocalStep:
    """`PendingStep` of a thread."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def ready(self) -> bool:
        """See `PendingStep.ready`."""
        return self._future.done()

    def result(self) -> StepResult:
        """See `PendingStep.result`; raises what the step raised."""
        return self._future.result()


class LocalSums:
    """`PendingSums` of a thread.

    Attributes:
        counted: [blocks], how many first slots of each block the sums cover.
    """

    def __init__(
        self, future: Future[npt.NDArray[np.uint64]], counted: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._future = future
        self.counted = counted

    def poll(self) -> list[npt.NDArray[np.uint64]] | None:
        """See `PendingSums.poll`; raises what the computation raised."""
        return [self._future.result()] if self._future.done() else None


class LocalExecutor:
    """`Executor` with one rank in this process.

    Args:
        config: the engine's settings.
        model_config: the model.
        track_sums: keep digest sums with the blocks; not needed by a node that sends none.

    Raises:
        ConfigError: a setting, the model folder or the size of the pool is wrong.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, *, track_sums: bool = True
    ) -> None:
        if config.tensor_parallel_size != 1:
            raise ConfigError("--tensor-parallel-size", "this executor has one rank")
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = choose_device(config)
        max_model_len = resolve_max_model_len(config.max_model_len, model_config)
        model = load_model(
            model_config, device=device, load_format=config.load_format, seed=config.seed
        )
        cache = KVCache(
            model_config,
            num_blocks=pool_blocks(config, model_config, max_model_len, device),
            block_size=config.block_size,
            device=device,
            shard=Shard(),
            track_sums=track_sums,
        )
        self._runner = Runner(
            model,
            cache,
            eos_token_ids=model_config.eos_token_ids,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
        self._cache = cache
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="digest")
        # In the thread of the steps, since torch's setting-up is per thread in part.
        self._steps.submit(warm_up, self._runner, max_model_len).result()

    @property
    def layouts(self) -> Sequence[Sequence[KVLayout]]:
        """See `Executor.layouts`."""
        return [[self._cache.layout]]

    @property
    def memories(self) -> Sequence[Sequence[Memory]]:
        """See `Executor.memories`."""
        return [[self._cache.memory]]

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `Executor.launch`."""
        return LocalStep(self._steps.submit(lambda: self._runner.run(plan).result()))

    def sums(self, group: int, blocks: Sequence[int]) -> PendingSums:
        """See `Executor.sums`."""
        return LocalSums(self._steps.submit(self._cache.kept_sums, blocks))

    def digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> PendingSums:
        """See `Executor.digest`."""
        size = self._cache.block_size
        firsts = first_position + size * np.arange(len(blocks))
        return LocalSums(
            self._digests.submit(self._cache.digest, blocks, first_position, start, end),
            np.clip(end - firsts, 0, size),
        )

    def adopt(self, group: int, blocks: Sequence[int], sums: PendingSums) -> None:
        """See `Executor.adopt`; `sums` are from `digest`, from the first block's start on.

        Done when it returns: no step in flight touches blocks that are only arriving.
        """
        assert isinstance(sums, LocalSums), "only sums of this executor's digest can be adopted"
        values = sums.poll()
        assert values is not None, "sums that are not there yet can't have been verified"
        assert sums.counted is not None, "kept sums belong to their blocks already"
        self._cache.adopt(blocks, values[0], sums.counted)

    def poison(self, group: int, blocks: Sequence[int]) -> None:
        """See `Executor.poison`."""
        self._cache.poison(blocks)

    def close(self) -> None:
        """See `Executor.close`; waits for the step that runs."""
        self._steps.shutdown(cancel_futures=True)
        self._digests.shutdown(cancel_futures=True)


def choose_device(config: EngineConfig) -> torch.device:
    """The device of the settings. Raises `ConfigError` if it is not there."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ConfigError("--device", "no CUDA device is available")
    return torch.device("cuda:0" if there and config.device != "cpu" else "cpu")


def pool_blocks(
    config: EngineConfig,
    model: ModelConfig,
    max_model_len: int,
    device: torch.device,
    *,
    reserve: int = 0,
) -> int:
    """Blocks of the pool, the null block included.

    Args:
        config: the engine's settings.
        model: the model.
        max_model_len: longest sequence.
        device: where the pool will be.
        reserve: bytes of a GPU's free memory to leave to everything but the pool.

    Raises:
        ConfigError: it can't hold one sequence of the longest length.
    """
    per_block = block_bytes(model, config.block_size, model.num_kv_heads)
    per_sequence = -(-max_model_len // config.block_size)
    blocks, field = _asked_blocks(config, per_block, per_sequence, device, reserve)
    if blocks < per_sequence + 1:
        need = per_sequence + 1
        raise ConfigError(
            field,
            f"the KV pool has {blocks} blocks; one sequence of {max_model_len} tokens needs {need} "
            f"({need * per_block} bytes): give --num-blocks {need} or a smaller --max-model-len",
        )
    log.info(
        "KV pool: %d blocks of %d tokens, %.1f MiB on %s, for %.1f sequences of %d tokens",
        blocks, config.block_size, blocks * per_block / 2**20, device,
        (blocks - 1) / per_sequence, max_model_len,
    )  # fmt: skip
    return blocks


def _asked_blocks(
    config: EngineConfig, per_block: int, per_sequence: int, device: torch.device, reserve: int
) -> tuple[int, str]:
    """Blocks by the first setting that says something, and that setting's flag."""
    if config.num_blocks is not None:
        return config.num_blocks, "--num-blocks"
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // per_block, "--kv-cache-memory-bytes"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = free - reserve - int((1 - config.gpu_memory_utilization) * total)
        return max(0, budget) // per_block, "--gpu-memory-utilization"
    wanted = per_sequence * config.max_num_seqs + 1
    return min(wanted, DEFAULT_CPU_BYTES // per_block), "--kv-cache-memory-bytes"
