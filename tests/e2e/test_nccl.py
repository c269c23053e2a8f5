"""``--transport nccl``: over gloo on CPUs, and between two GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvbaton.cluster.config import visible_gpus
from tests.e2e.conftest import MakePair
from tests.support.cluster import DECODE, Cluster
from tests.support.oracle import Oracle
from tests.support.servers import Node

pytestmark = pytest.mark.e2e

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.multigpu,
            pytest.mark.skipif(len(visible_gpus()) < 2, reason="fewer than two CUDA devices"),
        ],
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def nccl_nodes(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[tuple[Node, Node]]:
    """P and D; on GPUs, one each."""
    flags = {"transport": "nccl", "device": request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0" if request.param == "cuda" else "")
        p = cluster.start_node("prefill", f"p-nccl-{request.param}", flags)
        patch.setenv("CUDA_VISIBLE_DEVICES", "1" if request.param == "cuda" else "")
        d = cluster.start_node("decode", f"d-nccl-{request.param}", {**DECODE, **flags})
    cluster.until_up(p, d)
    yield p, d
    cluster.stop([p, d])


@pytest.mark.parametrize("length", [1, 16, 100, 300])
def test_the_same_tokens_over_nccl(
    nccl_nodes: tuple[Node, Node],
    make_pair: MakePair,
    oracle: Oracle,
    prompt: Callable[[int], list[int]],
    length: int,
) -> None:
    """The books prove that every byte went over the transport."""
    pair = make_pair(*nccl_nodes)
    ids = prompt(length)
    assert pair.tokens(ids, max_tokens=8) == oracle.greedy(ids, 8)
    assert pair.p.info()["transport"] == pair.d.info()["transport"] == "nccl"
