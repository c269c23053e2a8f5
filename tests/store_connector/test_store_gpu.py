"""A store beside an engine on a GPU: blocks cross by pinned memory, and a CPU reads the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbaton.connectors.layout import GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.objects import ObjectForm
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


def test_every_byte_crosses_both_ways_whatever_the_layout() -> None:
    from kvbaton.engine.block_staging import PinnedBlockStaging

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
