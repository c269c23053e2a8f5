"""Ranks on the CPU.

Steps run in a rank's own thread in the order of their launch, as on a CUDA stream, and so does
everything that must be ordered with them. Digests of arrived blocks run in a second thread, beside
the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvbaton.connectors.objects import ObjectForm
from kvbaton.engine.cache import KVCache, block_bytes
from kvbaton.engine.collectives import HostCollectives, Meeting
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.ranks import RankedExecutor, RankSettings, Sums, Team, lanes
from kvbaton.engine.runner import Runner
from kvbaton.engine.shard import Shard
from kvbaton.engine.staging import HostStaging
from kvbaton.engine.step import StepPlan, StepResult
from kvbaton.engine.warmup import warm_up
from kvbaton.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = 1 << 30
"""Most that the KV pools of all ranks take on a CPU unless told otherwise."""


class LocalStep:
    """`RankStep` that is over."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def ready(self) -> bool:
        """See `PendingStep.ready`."""
        return True

    def wait(self) -> None:
        """See `RankStep.wait`."""

    def result(self) -> StepResult:
        """See `PendingStep.result`."""
        return self._result


class LocalSums:
    """`RankSums` of a thread."""

    def __init__(self, future: Future[Sums]) -> None:
        self._future = future

    def poll(self) -> Sums | None:
        """See `RankSums.poll`; raises what the computation raised."""
        return self._future.result() if self._future.done() else None


class LocalRank:
    """`Rank` on the CPU."""

    cache: KVCache

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self.model = settings.load()
        self.steps = settings.lane
        self.digests = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def fit(self) -> int:
        """See `Rank.fit`."""
        return pool_blocks(self._settings)

    def start(self, num_blocks: int) -> None:
        """See `Rank.start`; torch's own setting-up is per thread in part."""
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
        """See `Rank.attach_encoder`."""
        self._runner.encoder = pool

    def run(self, plan: StepPlan) -> LocalStep:
        """See `Rank.run`."""
        return LocalStep(self._runner.run(plan).result())

    def sums(self, blocks: Sequence[int]) -> LocalSums:
        """See `Rank.sums`."""
        return LocalSums(self.steps.submit(self.cache.kept_sums, blocks))

    def digest(self, blocks: Sequence[int], first_position: int, start: int, end: int) -> LocalSums:
        """See `Rank.digest`."""
        digest = self.cache.digest
        return LocalSums(self.digests.submit(digest, blocks, first_position, start, end))

    def close(self) -> None:
        """See `Rank.close`."""
        self.digests.shutdown(cancel_futures=True)


class LocalExecutor(RankedExecutor):
    """`Executor` with its ranks on the CPU.

    Args:
        config: the engine's settings.
        model_config: the model.
        track_sums: keep digest sums with the blocks; not needed by a node that sends none.

    Raises:
        ConfigError: a setting, the model folder or the size of the pool is wrong.
    """

    ranks: Sequence[LocalRank]

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, *, track_sums: bool = True
    ) -> None:
        size, device = config.tensor_parallel_size, choose_device(config)
        max_model_len = resolve_max_model_len(config.max_model_len, model_config)
        if config.num_threads is not None or size > 1:
            torch.set_num_threads(config.num_threads or max(1, torch.get_num_threads() // size))
        meeting = Meeting(size)
        team = Team(lanes(size), meeting.disband)

        def make(rank: int) -> LocalRank:
            shard = Shard(rank, size, HostCollectives(meeting, rank)) if size > 1 else Shard()
            lane = team.lanes[rank]
            return LocalRank(
                RankSettings(config, model_config, shard, device, max_model_len, track_sums, lane)
            )

        super().__init__(team, make)

    def attach_encoder(self, pool: EncoderPool) -> None:
        """See `Executor.attach_encoder`."""
        self._team.call(lambda rank: self.ranks[rank].attach_encoder(pool))

    def staging(self, forms: Sequence[ObjectForm]) -> HostStaging:
        """See `Executor.staging`."""
        return HostStaging(forms, self.memories)


def choose_device(config: EngineConfig) -> torch.device:
    """The device of the settings. Raises `ConfigError` if it is not there."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ConfigError("--device", "no CUDA device is available")
    return torch.device("cuda:0" if there and config.device != "cpu" else "cpu")


def pool_blocks(settings: RankSettings, *, reserve: int = 0) -> int:
    """Blocks of a rank's pool, the null block included.

    Args:
        settings: of the rank.
        reserve: bytes of a GPU's free memory to leave to everything but the pool.

    Raises:
        ConfigError: it can't hold one sequence of the longest length.
    """
    config, max_model_len = settings.config, settings.max_model_len
    heads = settings.shard.kv_heads(settings.model.num_kv_heads)[1]
    per_block = block_bytes(settings.model, config.block_size, heads)
    per_sequence = -(-max_model_len // config.block_size)
    blocks, field = _asked_blocks(settings, per_block, per_sequence, reserve)
    if blocks < per_sequence + 1:
        need = per_sequence + 1
        raise ConfigError(
            field,
            f"the KV pool has {blocks} blocks; one sequence of {max_model_len} tokens needs {need} "
            f"({need * per_block} bytes): give --num-blocks {need} or a smaller --max-model-len",
        )
    log.info(
        "KV pool: %d blocks of %d tokens, %.1f MiB on %s, for %.1f sequences of %d tokens",
        blocks, config.block_size, blocks * per_block / 2**20, settings.device,
        (blocks - 1) / per_sequence, max_model_len,
    )  # fmt: skip
    return blocks


def _asked_blocks(
    settings: RankSettings, per_block: int, per_sequence: int, reserve: int
) -> tuple[int, str]:
    """Blocks by the first setting that says something, and that setting's flag."""
    config, device = settings.config, settings.device
    if config.num_blocks is not None:
        return config.num_blocks, "--num-blocks"
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // per_block, "--kv-cache-memory-bytes"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = free - reserve - int((1 - config.gpu_memory_utilization) * total)
        return max(0, budget) // per_block, "--gpu-memory-utilization"
    wanted = per_sequence * config.max_num_seqs + 1
    most = DEFAULT_CPU_BYTES // settings.shard.size
    return min(wanted, most // per_block), "--kv-cache-memory-bytes"
