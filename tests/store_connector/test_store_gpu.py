"""A store beside an engine on a GPU: blocks cross by pinned memory, and a CPU reads the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbaton.connectors.base import Memory
from kvbaton.connectors.layout import GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.objects import ObjectForm
from kvbaton.connectors.stores.memory import MemoryStore
from kvbaton.engine.block_staging import DeviceBlockStaging, PinnedBlockStaging
from kvbaton.engine.store_connector import StoreConnector
from tests.support.prompts import prompt_of
from tests.support.store_nodes import Nodes, count, rest
from tests.support.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTH = 200
SETTINGS: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 64}


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(
        head_dim=64, hidden_size=256, intermediate_size=512, max_position_embeddings=8192
    )


def test_blocks_come_back_as_they_were(nodes: Nodes, tmp_path: Path) -> None:
    store = f'filesystem:{{"path": "{tmp_path}"}}'
    prompts = [prompt_of(LENGTH, seed) for seed in range(8)]
    said = []
    for device in ("cuda", "cuda", "cpu"):
        node = nodes.start(store, device=device, num_blocks=257, **SETTINGS)
        calls = [node.generate(prompt, max_tokens=40) for prompt in prompts]
        said.append([call.result() for call in calls])
        rest(node)
        loaded = count(node, "prompt_tokens", source="store")
        assert loaded == (len(said) > 1) * len(prompts) * (LENGTH // 16 * 16)
        assert count(node, "store_load_blocks", outcome="corrupt") == 0
        nodes.end(node)
    assert said[0] == said[1] == said[2]


def test_a_host_tier_fills_blocks_by_itself(nodes: Nodes) -> None:
    """Objects of a `memory` store go straight between pinned memory and the device's blocks."""
    node = nodes.start('memory:{"max_bytes": 200000000}', device="cuda", num_blocks=513, **SETTINGS)
    prompts = [prompt_of(LENGTH, seed) for seed in range(8)]
    said = []
    for _ in range(2):
        calls = [node.generate(prompt, max_tokens=40) for prompt in prompts]
        said.append([call.result() for call in calls])
        rest(node)
        node.ask("reset_prefix_cache")
    loaded = count(node, "prompt_tokens", source="store")
    assert loaded == len(prompts) * (LENGTH // 16 * 16)
    assert count(node, "store_load_blocks", outcome="corrupt") == 0
    assert count(node, "store_errors") == 0
    assert isinstance(node.core.connectors.all[0], StoreConnector)
    assert isinstance(node.core.connectors.all[0].worker._staging, DeviceBlockStaging)
    assert said[0] == said[1]
    nodes.end(node)


def test_a_memory_store_moves_bytes_of_devices_and_of_the_host() -> None:
    store = MemoryStore("memory", max_bytes=8 << 20)
    store.open()
    device = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device="cuda")
    before = bytes(device.cpu().numpy())
    region = Memory(device.data_ptr(), len(device), "cuda", 0, device)
    store.register([region])
    keys = [bytes([number]) * 32 for number in range(20)]
    parts = [region.part(number * 1000, number * 20_000) for number in range(20)]
    sources: list[Any] = [[memoryview(b"head"), part] for part in parts]
    assert store.store(keys, sources).result() == [True] * 20
    device[:] = 0
    torch.cuda.synchronize()
    heads = [bytearray(4) for _ in keys]
    targets: list[Any] = [[memoryview(h), p] for h, p in zip(heads, parts, strict=True)]
    assert store.load(keys, targets).result() == [True] * 20
    assert heads == [b"head"] * 20
    after = bytes(device.cpu().numpy())
    assert after[1000 : 19 * 20_000] == before[1000 : 19 * 20_000]
    assert not any(after[19 * 20_000 :])
    assert not any(after[:1000])
    store.close()


def test_every_byte_crosses_both_ways_whatever_the_layout() -> None:
    for order in (("block", "head", "layer", "kv", "token", "feature"),
                  ("block", "layer", "kv", "token", "head", "feature")):  # fmt: skip
        plane = contiguous_plane(
            num_blocks=9, block_size=16, num_heads=4, head_dim=64, layers=(0, 1, 2),
            dtype="bfloat16", order=order,
        )  # fmt: skip
        form = ObjectForm([KVLayout(0, GroupKind.FULL, 16, 9, (plane,))])
        pool = torch.randint(0, 255, (9 * form.num_bytes,), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        before, staging = pool.cpu(), PinnedBlockStaging([form], [pool])
        fetched = staging.fetch(0, [3, 1])
        assert fetched is not None
        until(fetched.ready, "the bytes")
        copies = [b"".join(pieces) for pieces in fetched.pieces]
        filled = staging.lend(0, [5, 7])
        assert filled is not None
        for pieces, data in zip(filled.pieces, copies, strict=True):
            pieces[0][:] = data
        filled.write_back()
        until(filled.ready, "the landing")
        after, size = pool.cpu(), form.num_bytes
        expected = before.clone()
        expected[5 * size : 6 * size] = before[3 * size : 4 * size]
        expected[7 * size : 8 * size] = before[1 * size : 2 * size]
        assert torch.equal(after, expected)
        for batch in (fetched, filled):
            batch.release()
        assert len(staging.free) == len(staging.host)
