"""How much of a GPU's memory an engine takes for its pool."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvbaton.engine.block_memory import BlockMemory
from kvbaton.engine.collectives import Collectives, Shard
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.worker import WorkerSettings, pool_blocks
from kvbaton.errors import ConfigError

GIB, BLOCK = 2**30, 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, dims, bytes


@pytest.mark.parametrize(
    ("free", "ours", "blocks"),
    [
        (100 * GIB, 0, 29 * GIB // BLOCK),  # 0.45 of 80 GiB, less 7 in reserve
        (43 * GIB, 0, 29 * GIB // BLOCK),  # a neighbour has taken its own share before us
        (63 * GIB, 16 * GIB, 13 * GIB // BLOCK),  # our weights count against our share
        (17 * GIB, 0, 10 * GIB // BLOCK),  # there is less than our share
        (6 * GIB, 0, None),
        (63 * GIB, 40 * GIB, None),
    ],
)
def test_nodes_of_one_gpu_have_a_share_each(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    ours: int,
    blocks: int | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (min(free, 80 * GIB), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: ours)
    config = EngineConfig(model=str(checkpoint()), gpu_memory_utilization=0.45)
    model = load_model_config(config.model, config.dtype)
    device = torch.device("cuda:0")
    settings = WorkerSettings(config, model, Shard(0, 1, Collectives(), False), device, 64, True)
    if blocks is None:
        with pytest.raises(ConfigError, match="--gpu-memory-utilization: the KV pool has 0 blocks"):
            pool_blocks(settings, reserve=7 * GIB)
    else:
        assert pool_blocks(settings, reserve=7 * GIB) == blocks


def test_a_pool_that_cannot_be_had_names_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"--num-blocks: .* blocks of 65536 bytes can't be had"):
        BlockMemory(2**40, 65536, 16, torch.device("cpu"))
