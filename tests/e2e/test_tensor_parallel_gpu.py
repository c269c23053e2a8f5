"""P and D of different tensor-parallel sizes on two GPUs: blocks go from VRAM to VRAM by NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cluster.config import visible_gpus
from tests.support.cluster import DECODE, Cluster
from tests.support.served_pair import Pair
from tests.support.servers import Node

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.multigpu,
    pytest.mark.skipif(len(visible_gpus()) < 2, reason="fewer than two CUDA devices"),
]

SIZES = {"2to1": (2, 1), "1to2": (1, 2), "2to2": (2, 2)}
MODEL: dict[str, Any] = {
    "head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def nodes(
    checkpoint: Callable[..., Path], cluster: Cluster
) -> Iterator[dict[tuple[str, int], Node]]:
    """P and D of each size. Those of one rank are on a GPU each."""
    found = {}
    for role, gpu, extra in (("prefill", "0", {}), ("decode", "1", DECODE)):
        for size in (1, 2):
            flags = {**extra, "device": "cuda", "tensor-parallel-size": str(size)}
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CUDA_VISIBLE_DEVICES", gpu if size == 1 else "0,1")
                found[role, size] = cluster.start_node(
                    role,  # type: ignore[arg-type]
                    f"{role}-gpu{size}",
                    flags,
                    model=checkpoint(**MODEL),
                )
    cluster.until_up(*found.values())
    yield found
    cluster.stop(list(found.values()))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("length", [1, 16, 100, 400])
def test_tokens_are_those_of_one_node(
    sizes: str,
    length: int,
    nodes: dict[tuple[str, int], Node],
    checkpoint: Callable[..., Path],
    prompt: Callable[[int], list[int]],
) -> None:
    p, d = SIZES[sizes]
    pair = Pair(nodes["prefill", p], nodes["decode", d], checkpoint(**MODEL))
    pair.forget()
    ids = prompt(length)
    got = pair.tokens(ids, max_tokens=12)
    assert pair.at_d()("kvbaton_prompt_tokens_total", source="transferred") == length
    pair.close_books()
    assert got == pair.alone(ids, max_tokens=12)
    assert got == Pair(nodes["prefill", 1], pair.d, pair.model).alone(ids, max_tokens=12)
