"""P and D of different tensor-parallel sizes, over NIXL: same tokens, every byte once, verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton import LLM, SamplingParams
from tests.e2e.conftest import MakePair
from tests.support.cluster import DECODE, Cluster
from tests.support.oracle import Oracle
from tests.support.served_pair import Pair
from tests.support.servers import Node, Router

pytestmark = pytest.mark.e2e

Nodes = dict[tuple[str, int], Node]
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 77}
SIZES = [(2, 1), (1, 2), (2, 2), (4, 1), (4, 2), (1, 4), (2, 4)]
"""Ranks of P and of D. The model has two KV heads: of four ranks, two share one."""


@pytest.fixture(scope="module")
def nodes(main_nodes: tuple[Node, Node, Router], cluster: Cluster) -> Iterator[Nodes]:
    """P and D of each size; those of size 1 are everybody's."""
    found: Nodes = {("prefill", 1): main_nodes[0], ("decode", 1): main_nodes[1]}
    own = []
    for size in (2, 4):
        ranks = {"tensor-parallel-size": str(size)}
        for role, flags in (("prefill", ranks), ("decode", {**DECODE, **ranks})):
            node = cluster.start_node(role, f"{role}-tp{size}", flags)  # type: ignore[arg-type]
            found[role, size] = node
            own.append(node)
    cluster.until_up(*own)
    yield found
    cluster.stop(own)


@pytest.fixture(params=SIZES, ids=lambda sizes: f"{sizes[0]}to{sizes[1]}")
def ranks(request: pytest.FixtureRequest, nodes: Nodes, make_pair: MakePair) -> Pair:
    """P and D of some sizes, caches empty. With replicas at D, its heads' bytes come twice."""
    p, d = request.param
    pair = make_pair(nodes["prefill", p], nodes["decode", d])
    pair.bytes_per_token *= max(1, d // 2)
    pair.forget()
    return pair


@pytest.mark.parametrize("length", [1, 16, 100])
def test_tokens_are_those_of_one_rank(
    ranks: Pair, oracle: Oracle, prompt: Callable[[int], list[int]], length: int
) -> None:
    ids = prompt(length)
    said = ranks.tokens(ids, max_tokens=12)
    assert said == oracle.greedy(ids, 12, said)
    assert ranks.at_d()("kvbaton_prompt_tokens_total", source="transferred") == length


def test_many_at_a_time_with_choices_and_seeds(
    ranks: Pair, nodes: Nodes, prompt: Callable[[int], list[int]]
) -> None:
    asked = [(prompt(20 + 13 * i)[i:], {**SEEDED, "n": 1 + i % 2}) for i in range(6)]
    answers = [ranks.submit(ids, max_tokens=8, **params) for ids, params in asked]
    one = nodes["prefill", 1]
    for answer, (ids, params) in zip(answers, asked, strict=True):
        expected = one.generate(ids, max_tokens=8, **params)
        got = [choice.token_ids for choice in answer.result().choices]
        assert got == [choice.token_ids for choice in expected.choices]


def test_a_size_that_does_not_divide(cluster: Cluster) -> None:
    node = cluster.start_node("decode", "decode-tp3", {"tensor-parallel-size": "3"})
    node._process.wait(60)
    assert node._process.poll() == 2
    last = node.log.read_text().splitlines()[-1]
    assert "--tensor-parallel-size" in last
    assert "give one of 1, 2, 4" in last
    cluster.servers.remove(node)


def test_in_the_python_api(model: Path, oracle: Oracle, prompt: Callable[[int], list[int]]) -> None:
    ids = prompt(30)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(model, num_blocks=64, num_threads=1, tensor_parallel_size=2) as llm:
        (answer,) = llm.generate([ids], params, use_tqdm=False)
    assert answer.outputs[0].token_ids == oracle.greedy(ids, 8)
