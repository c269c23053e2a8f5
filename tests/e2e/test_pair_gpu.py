"""P and D on a GPU, every family, against transformers: blocks go from VRAM to VRAM by NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cluster.config import visible_gpus
from tests.support.cluster import DECODE, Cluster
from tests.support.oracle import Oracle
from tests.support.served_pair import Pair
from tests.support.servers import Node

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.skipif(not visible_gpus(), reason="no CUDA device"),
]

WINDOW = 40
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral", "config": {"sliding_window": WINDOW}},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
}
SIZES: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(**FAMILIES[request.param], **SIZES)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def nodes(
    model: Path, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Node, Node]]:
    cluster = Cluster(tmp_path_factory.mktemp("gpu"), model)
    flags = {"device": "cuda", "dtype": dtype}
    p = cluster.start_node("prefill", "gpu-p", flags)
    d = cluster.start_node("decode", "gpu-d", {**flags, **DECODE})
    cluster.until_up(p, d)
    yield p, d
    cluster.stop()


@pytest.fixture
def pair(nodes: tuple[Node, Node], model: Path, dtype: str) -> Pair:
    made = Pair(*nodes, model)
    if dtype == "bfloat16":
        made.bytes_per_token //= 2
    return made


@pytest.mark.parametrize("length", [1, 16, 100, 400])
def test_tokens_are_those_of_one_node_and_of_transformers(
    length: int,
    pair: Pair,
    model: Path,
    dtype: str,
    prompt: Callable[[int], list[int]],
    reference: Callable[..., Any],
) -> None:
    pair.forget()
    ids = prompt(length)
    got = pair.tokens(ids, max_tokens=12)
    assert pair.at_d()("kvbaton_prompt_tokens_total", source="transferred") == length
    behind = max(0, length + 1 - WINDOW) // 16 * 16 if "mistral" in str(model) else 0
    pair.close_books(length - behind)
    alone = pair.alone(ids, max_tokens=12)
    oracle = Oracle(reference(model, dtype))
    if dtype == "float32":
        assert got == alone == oracle.greedy(ids, 12)
    else:  # rounding depends on what else is in a step: tokens need only be as likely as any
        assert max(*gaps(oracle, ids, got), *gaps(oracle, ids, alone)) < 0.15


def gaps(oracle: Oracle, ids: list[int], tokens: list[int]) -> list[float]:
    """How far the logit of each token is from the likeliest one's."""
    logits = [oracle.logits(ids + tokens[:i]) for i in range(len(tokens))]
    return [float(row.max() - row[token]) for row, token in zip(logits, tokens, strict=True)]
