"""The executor of a language model on GPUs: every rank but the first has its own process."""

from __future__ import annotations

from itertools import permutations

import torch

from kvbaton.engine.collectives import Collectives, Shard
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.cuda.nccl import NcclCollectives, make_unique_id
from kvbaton.engine.cuda.rank_process import RankProcess
from kvbaton.engine.cuda.worker import CudaWorker
from kvbaton.engine.executor import CallerThread, Executor, Worker, WorkerGroup, rank_threads
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.worker import WorkerSettings, choose_device
from kvbaton.engine.worker_process import PATIENCE_S
from kvbaton.errors import ConfigError
from kvbaton.kernels.peer_memory import peer_memories


def cuda_executor(
    config: EngineConfig, model_config: ModelConfig, *, track_sums: bool = True
) -> Executor:
    """An executor of ranks on the first GPUs that this process sees.

    Raises:
        ConfigError: A setting, the model folder or the size of the pool is wrong.
    """
    first, size = choose_device(config), config.tensor_parallel_size
    there = torch.cuda.device_count()
    if there < size:
        raise ConfigError(
            "--tensor-parallel-size",
            f"{size} ranks need {size} GPUs, and this process sees {there}: give at most {there}",
        )
    devices = [torch.device(first.type, rank) for rank in range(size)]
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)

    def settings(rank: int, collectives: Collectives) -> WorkerSettings:
        shard = Shard(rank, size, collectives, config.enable_expert_parallel)
        return WorkerSettings(config, model_config, shard, devices[rank], max_model_len, track_sums)

    if size == 1:
        return Executor(
            WorkerGroup([CallerThread()]), lambda _: CudaWorker(settings(0, Collectives()))
        )

    pairs = permutations(range(size), 2)
    reachable = all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    peers = peer_memories(devices) if reachable else [None] * size
    unique_id = make_unique_id()
    collectives = NcclCollectives(0, size, unique_id, peers[0])
    # Started by this thread: they end with the thread that starts them, as ranks' threads do.
    processes = [
        RankProcess(settings(rank, Collectives()), unique_id, peers[rank])
        for rank in range(1, size)
    ]

    def make(rank: int) -> Worker:
        if rank == 0:
            return CudaWorker(settings(0, collectives))
        processes[rank - 1].wait_made()  # else other ranks would wait for it in `connect`
        return processes[rank - 1]

    def abort() -> None:
        for process in processes:
            process.kill()
        collectives.abort()

    def release() -> None:
        for process in processes:  # also if the start failed
            process.close()
        collectives.close()

    threads = rank_threads(size)
    return Executor(WorkerGroup(threads, abort=abort, release=release, patience_s=PATIENCE_S), make)
