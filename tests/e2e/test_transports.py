"""Nodes over transports beside the default's: NCCL, and a vendor's by its dotted path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbaton.cluster.config import visible_gpus
from tests.e2e.conftest import MakePair
from tests.support.cluster import DECODE, Cluster
from tests.support.oracle import Oracle
from tests.support.servers import Node

pytestmark = pytest.mark.e2e

VENDOR = Path(__file__).parents[2] / "examples" / "vendor_transport"
TRANSPORTS = [
    pytest.param(("nccl", "cpu"), id="nccl"),
    pytest.param(
        ("nccl", "cuda"),
        id="nccl-cuda",
        marks=[
            pytest.mark.multigpu,
            pytest.mark.skipif(len(visible_gpus()) < 2, reason="fewer than two CUDA devices"),
        ],
    ),
    pytest.param(("kvbaton_vm:VmTransport", "cpu"), id="vendor"),
]


@pytest.fixture(scope="module", params=TRANSPORTS)
def nodes(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[tuple[Node, Node]]:
    """P and D; on GPUs, one each."""
    transport, device = request.param
    flags = {"transport": transport, "device": device}
    name, on_gpus = transport.partition(":")[0], device == "cuda"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(VENDOR), prepend=":")
        patch.setenv("CUDA_VISIBLE_DEVICES", "0" if on_gpus else "")
        p = cluster.start_node("prefill", f"p-{name}-{device}", flags)
        patch.setenv("CUDA_VISIBLE_DEVICES", "1" if on_gpus else "")
        d = cluster.start_node("decode", f"d-{name}-{device}", {**DECODE, **flags})
    cluster.until_up(p, d)
    yield p, d
    cluster.stop([p, d])


@pytest.mark.parametrize("length", [1, 16, 100, 300])
def test_the_same_tokens(
    nodes: tuple[Node, Node],
    make_pair: MakePair,
    oracle: Oracle,
    prompt: Callable[[int], list[int]],
    length: int,
) -> None:
    """The books prove that every byte went over the transport."""
    pair = make_pair(*nodes)
    ids = prompt(length)
    assert pair.tokens(ids, max_tokens=8) == oracle.greedy(ids, 8)
    transport = pair.p.info()["transport"]
    assert transport in ("nccl", "kvbaton_vm")
    assert pair.d.info()["transport"] == transport
