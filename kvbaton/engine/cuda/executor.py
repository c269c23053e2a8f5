"""An executor with one rank on a CUDA device of this process.

Steps run in order on the default stream. Sums are read and digests computed on streams of their
own, beside the steps: the blocks they are about are final when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.connectors.base import Memory
from kvbaton.connectors.layout import KVLayout
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.cuda.cache import CudaKVCache
from kvbaton.engine.cuda.memory import measure_reserve
from kvbaton.engine.cuda.runner import CudaRunner, CudaStep
from kvbaton.engine.cuda.warm_up import warm_up
from kvbaton.engine.loader import load_model
from kvbaton.engine.local import choose_device, pool_blocks
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.shard import Shard
from kvbaton.engine.step import PendingStep, PendingSums, StepPlan
from kvbaton.errors import ConfigError


class CudaSums:
    """`PendingSums` on their way into pinned memory.

    Attributes:
        counted: [blocks], how many first slots of each block the sums cover.
    """

    def __init__(self, sums: Tensor, counted: npt.NDArray[np.int64] | None = None) -> None:
        self._sums, self.counted = sums, counted
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._there.record()

    def poll(self) -> list[npt.NDArray[np.uint64]] | None:
        """See `PendingSums.poll`."""
        there = self._there.query()  # type: ignore[no-untyped-call]
        return [self._sums.numpy().view(np.uint64)] if there else None


class CudaExecutor:
    """`Executor` with one rank on a GPU.

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
        device = choose_device(config)
        torch.cuda.set_device(device)
        max_model_len = resolve_max_model_len(config.max_model_len, model_config)
        model = load_model(
            model_config, device=device, load_format=config.load_format, seed=config.seed
        )
        reserve = measure_reserve(config, model_config, model, max_model_len)
        torch.cuda.empty_cache()
        self._cache = CudaKVCache(
            model_config,
            num_blocks=pool_blocks(config, model_config, max_model_len, device, reserve=reserve),
            block_size=config.block_size,
            device=device,
            shard=Shard(),
            track_sums=track_sums,
        )
        self._runner = CudaRunner(
            model,
            self._cache,
            eos_token_ids=model_config.eos_token_ids,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            use_graphs=not config.enforce_eager,
        )
        warm_up(self._runner, config)
        self._cache.fetch_digest([1], 0, 0, config.block_size)
        self._device = device
        self._sums_stream, self._digest_stream = _urgent_stream(device), _urgent_stream(device)
        torch.cuda.synchronize(device)

    @property
    def layouts(self) -> Sequence[Sequence[KVLayout]]:
        """See `Executor.layouts`."""
        return [[self._cache.layout]]

    @property
    def memories(self) -> Sequence[Sequence[Memory]]:
        """See `Executor.memories`."""
        return [[self._cache.memory]]

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `Executor.launch`; returns when the step is enqueued."""
        return CudaStep(self._runner.run(plan))

    def sums(self, group: int, blocks: Sequence[int]) -> PendingSums:
        """See `Executor.sums`."""
        with torch.cuda.stream(self._sums_stream), torch.inference_mode():
            return CudaSums(self._cache.fetch_kept_sums(blocks))

    def digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> PendingSums:
        """See `Executor.digest`."""
        size = self._cache.block_size
        firsts = first_position + size * np.arange(len(blocks))
        with torch.cuda.stream(self._digest_stream), torch.inference_mode():
            sums = self._cache.fetch_digest(blocks, first_position, start, end)
            return CudaSums(sums, np.clip(end - firsts, 0, size))

    def adopt(self, group: int, blocks: Sequence[int], sums: PendingSums) -> None:
        """See `Executor.adopt`; `sums` are from `digest`, from the first block's start on."""
        assert isinstance(sums, CudaSums), "only sums of this executor's digest can be adopted"
        values = sums.poll()
        assert values is not None, "sums that are not there yet can't have been verified"
        assert sums.counted is not None, "kept sums belong to their blocks already"
        self._cache.adopt(blocks, values[0], sums.counted)

    def poison(self, group: int, blocks: Sequence[int]) -> None:
        """See `Executor.poison`."""
        self._cache.poison(blocks)

    def close(self) -> None:
        """See `Executor.close`; waits for the steps in flight."""
        torch.cuda.synchronize(self._device)


def _urgent_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream whose kernels go before those of the steps."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
