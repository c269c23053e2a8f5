"""Nodes that are source and target at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import MakePair
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.servers import Node, Router

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]


@pytest.fixture(scope="session")
def any_nodes(cluster: Cluster) -> tuple[Node, Node, Router]:
    """Two nodes that prefill and generate, behind a router that knows nobody else."""
    router = cluster.start_router("any-router", "--policy=prefix-aware")
    a = cluster.start_node("any", "any-a", router=router)
    b = cluster.start_node("any", "any-b", router=router)
    cluster.until_up(a, b, router=router, pairs=2)
    return a, b, router


def test_each_hands_over_to_the_other_at_once(
    any_nodes: tuple[Node, Node, Router], make_pair: MakePair, oracle: Oracle, prompt: Prompt
) -> None:
    a, b, _ = any_nodes
    there, back = make_pair(a, b), make_pair(b, a)
    there.moves = back.moves = "some"  # a node's own prompts are on the same books
    prompts = [prompt(60 + 7 * i) for i in range(6)]
    answers = [(there, back)[i % 2].submit(ids, max_tokens=8) for i, ids in enumerate(prompts)]
    for ids, answer in zip(prompts, answers, strict=True):
        (choice,) = answer.result().choices
        assert list(choice.token_ids) == oracle.greedy(ids, 8)
    for pair, handed in ((there, prompts[::2]), (back, prompts[1::2])):
        tokens = sum(map(len, handed))
        sent = pair.at_p()("kvbaton_transfer_sent_bytes_total")
        assert sent == tokens * pair.bytes_per_token
        assert pair.at_d()("kvbaton_prompt_tokens_total", source="transferred") == tokens
        assert pair.at_p()("kvbaton_transfers_total", role="source", outcome="acked") == 3
        assert pair.at_d()("kvbaton_transfers_total", role="target", outcome="delivered") == 3


def test_a_router_uses_both_ways(
    any_nodes: tuple[Node, Node, Router], make_pair: MakePair, oracle: Oracle, prompt: Prompt
) -> None:
    a, b, router = any_nodes
    pair, back = make_pair(a, b, router), make_pair(b, a)
    pair.moves = back.moves = "some"
    assert {tuple(names) for names in router.get("/nodes")["pairs"]} == {
        ("any-a", "any-b"),
        ("any-b", "any-a"),
    }
    history = prompt(80)
    for _ in range(2):  # of a second turn the first one's target has most
        answer = router.complete(history, max_tokens=20)["choices"][0]["token_ids"]
        assert answer == oracle.greedy(history, 20)
        pair.close_books()  # all that it has cached is told to the router by then
        history = [*history, *answer, *prompt(9)]
    for way in (pair, back):
        assert way.at_p()("kvbaton_transfers_total", role="source", outcome="acked") == 1


def test_it_serves_alone_and_beside_others(
    any_nodes: tuple[Node, Node, Router], make_pair: MakePair, oracle: Oracle, prompt: Prompt
) -> None:
    a, b, _ = any_nodes
    pair = make_pair(a, b)
    pair.moves = "nothing"
    ids = prompt(40)
    assert pair.alone(ids, max_tokens=6) == oracle.greedy(ids, 6)
