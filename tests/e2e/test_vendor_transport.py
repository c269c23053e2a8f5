"""Nodes over a vendor's transport, ``examples/vendor_transport``, named by its dotted path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import MakePair
from tests.support.cluster import DECODE, Cluster
from tests.support.oracle import Oracle
from tests.support.servers import Node

pytestmark = pytest.mark.e2e

PACKAGE = Path(__file__).parents[2] / "examples" / "vendor_transport"


@pytest.fixture(scope="module")
def vendor_nodes(cluster: Cluster) -> Iterator[tuple[Node, Node]]:
    """P and D."""
    flags = {"transport": "kvbaton_vm:VmTransport"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PACKAGE), prepend=":")
        p = cluster.start_node("prefill", "p-vendor", flags)
        d = cluster.start_node("decode", "d-vendor", {**DECODE, **flags})
    cluster.until_up(p, d)
    yield p, d
    cluster.stop([p, d])


@pytest.mark.parametrize("length", [1, 100])
def test_the_same_tokens_over_a_vendors_transport(
    vendor_nodes: tuple[Node, Node],
    make_pair: MakePair,
    oracle: Oracle,
    prompt: Callable[[int], list[int]],
    length: int,
) -> None:
    """The books prove that every byte went over the transport."""
    pair = make_pair(*vendor_nodes)
    ids = prompt(length)
    assert pair.tokens(ids, max_tokens=8) == oracle.greedy(ids, 8)
    assert pair.p.info()["transport"] == pair.d.info()["transport"] == "kvbaton_vm"
