"""``--transport tcp`` between GPUs that can't reach each other, and to one from a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cluster.config import visible_gpus
from tests.e2e.conftest import MakePair
from tests.support.cluster import DECODE, Cluster
from tests.support.oracle import Oracle
from tests.support.servers import Node

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.skipif(not visible_gpus(), reason="no CUDA device"),
]

SIDES = {
    "equal blocks": ({"device": "cuda"}, {"device": "cuda"}),
    "other blocks": (
        {"device": "cuda", "block-size": "48"},
        {"device": "cuda", "block-size": "32"},
    ),
    "from a CPU": ({"device": "cpu"}, {"device": "cuda"}),
}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(head_dim=64, hidden_size=256, intermediate_size=512)


@pytest.fixture(scope="module")
def oracle(reference: Callable[..., Any], model: Path) -> Oracle:
    return Oracle(reference(model))


@pytest.fixture(scope="module", params=SIDES)
def nodes(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Node, Node]]:
    """P and D; each has a GPU of its own where there are two."""
    cluster = Cluster(tmp_path_factory.mktemp("tcp"), model)
    flags: dict[str, str | None] = {"transport": "tcp", "dtype": "float32"}
    gpus = visible_gpus()
    of_p, of_d = SIDES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", gpus[0])
        p = cluster.start_node("prefill", "tcp-p", {**flags, **of_p})
        patch.setenv("CUDA_VISIBLE_DEVICES", gpus[-1])
        d = cluster.start_node("decode", "tcp-d", {**flags, **DECODE, **of_d})
    cluster.until_up(p, d)
    yield p, d
    cluster.stop()


@pytest.mark.parametrize("length", [1, 16, 100, 400])
def test_the_same_tokens_through_the_host(
    length: int,
    nodes: tuple[Node, Node],
    make_pair: MakePair,
    oracle: Oracle,
    prompt: Callable[[int], list[int]],
) -> None:
    """The books prove that every byte was moved, its digest checked, and nothing is left."""
    pair = make_pair(*nodes)
    ids = prompt(length)
    assert pair.tokens(ids, max_tokens=8) == oracle.greedy(ids, 8)
    assert pair.p.info()["transport"] == pair.d.info()["transport"] == "tcp"
