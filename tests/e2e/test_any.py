"""Nodes that are source and target at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import MakePair
from tests.support.oracle import Oracle
from tests.support.served_pair import POOL, Pair, settle
from tests.support.servers import Node, Router, completion, poll

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]


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
        tells_what_crossing_takes(pair)


def tells_what_crossing_takes(pair: Pair) -> None:
    """D says in its heartbeats how long KV is on its way from P."""
    address = pair.p.info()["control_address"]

    def told() -> bool:
        return "handover_s" in pair.d.info()["wires"].get(address, {})

    poll("D tells what crossing takes", told, 20.0, pair.d.tail)


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


def remote_prefix(node: Node, num_tokens: int) -> dict[str, Any]:
    address = urlsplit(node.info()["control_address"])
    where = {"remote_host": address.hostname, "remote_port": address.port}
    return {"remote_prefix": {**where, "num_tokens": num_tokens}}


def fetched(pair: Pair, num_tokens: int, *, computed: int) -> None:
    """Show that D got so many tokens from P's cache, and computed so many."""
    settle(pair.p, pair.d)
    p, d = pair.at_p(), pair.at_d()
    assert p("kvbaton_transfer_sent_bytes_total") == num_tokens * pair.bytes_per_token
    assert d("kvbaton_prompt_tokens_total", source="peer") == num_tokens
    assert d("kvbaton_prompt_tokens_total", source="computed") == computed
    assert d("kvbaton_transfer_digests_checked_total") > 0
    assert d("kvbaton_transfers_total", role="prefix", outcome="delivered") == 1


def test_a_prefix_is_fetched_from_a_peer(
    any_nodes: tuple[Node, Node, Router], make_pair: MakePair, oracle: Oracle, prompt: Prompt
) -> None:
    a, b, _ = any_nodes
    pair = make_pair(a, b)
    pair.forget()
    pair.moves = "some"
    shared = prompt(100)
    pair.alone(shared, max_tokens=1)
    ids = [*shared, *prompt(30)]
    (choice,) = b.generate(ids, remote_prefix(a, 100), max_tokens=6).choices
    assert list(choice.token_ids) == oracle.greedy(ids, 6)
    fetched(pair, 96, computed=len(ids) - 96)


def test_the_next_turn_finds_what_the_other_node_generated(
    any_nodes: tuple[Node, Node, Router], make_pair: MakePair, oracle: Oracle, prompt: Prompt
) -> None:
    """P prefills, D generates; for the next turn P fetches that, and D gets what is new."""
    p, d, _ = any_nodes
    pair = make_pair(p, d)
    pair.forget()
    pair.moves = "some"
    history = prompt(50)
    history += pair.tokens(history, max_tokens=40)
    held = (len(history) - 1) // 16 * 16  # the last token was fed to no step
    history += prompt(20)
    settle(p, d)
    before_p, before_d = p.metrics(), d.metrics()
    params = pair.source_params(name := os.urandom(16)) | remote_prefix(d, held)
    second = POOL.submit(d.generate, history, pair.target_params(name), max_tokens=8)
    # P runs a prompt again whose reservation comes after its end, which is counted, too.
    poll("D reserves", lambda: d.metrics()("kvbaton_transfers_live") > 0, 20.0, d.tail)
    first = p.generate(history, params, max_tokens=8)
    (choice,) = second.result().choices
    assert list(choice.token_ids) == oracle.greedy(history, 8)
    assert first.choices[0].token_ids[0] == choice.token_ids[0]
    settle(p, d)
    at_p, at_d = p.metrics() - before_p, d.metrics() - before_d
    assert at_p("kvbaton_prompt_tokens_total", source="local_cache") == 48
    assert at_p("kvbaton_prompt_tokens_total", source="peer") == held - 48
    assert at_p("kvbaton_prompt_tokens_total", source="computed") == len(history) - held
    assert at_d("kvbaton_transfer_sent_bytes_total") == (held - 48) * pair.bytes_per_token
    assert at_d("kvbaton_prompt_tokens_total", source="transferred") == len(history) - held
    assert at_p("kvbaton_transfer_digests_checked_total") > 0


def test_what_a_peer_no_longer_has_is_computed(
    any_nodes: tuple[Node, Node, Router], make_pair: MakePair, oracle: Oracle, prompt: Prompt
) -> None:
    a, b, _ = any_nodes
    pair = make_pair(a, b)
    pair.forget()
    pair.moves = "some"
    shared = prompt(70)
    pair.alone(shared[:40], max_tokens=1)
    (choice,) = b.generate(shared, remote_prefix(a, 70), max_tokens=5).choices
    assert list(choice.token_ids) == oracle.greedy(shared, 5)
    fetched(pair, 32, computed=70 - 32)  # it has less than was said
    before = b.metrics()
    other = prompt(70)
    (choice,) = b.generate(other, remote_prefix(a, 70), max_tokens=5).choices  # and now nothing
    assert list(choice.token_ids) == oracle.greedy(other, 5)
    settle(a, b)
    at_b = b.metrics() - before
    assert at_b("kvbaton_transfers_total", role="prefix", outcome="failed") == 1
    assert at_b("kvbaton_prompt_tokens_total", source="computed") == 70


def test_it_serves_alone_and_beside_others(
    any_nodes: tuple[Node, Node, Router], make_pair: MakePair, oracle: Oracle, prompt: Prompt
) -> None:
    a, b, _ = any_nodes
    pair = make_pair(a, b)
    pair.moves = "nothing"
    ids = prompt(40)
    assert pair.alone(ids, max_tokens=6) == oracle.greedy(ids, 6)


def test_what_neither_takes_from_the_other_is_computed_once(
    any_nodes: tuple[Node, Node, Router], make_pair: MakePair, oracle: Oracle, prompt: Prompt
) -> None:
    """More choices than half of the seats are not loaded: one node serves them, and no other."""
    a, b, router = any_nodes
    pair = make_pair(a, b, router)
    pair.moves = "nothing"
    ids = prompt(90)
    answer = router.post("/v1/completions", completion(ids, max_tokens=5, n=13))
    assert [c["token_ids"] for c in answer["choices"]] == [oracle.greedy(ids, 5)] * 13
    settle(a, b)
    sides = pair.at_p(), pair.at_d()
    assert sorted(at("kvbaton_prompt_tokens_total", source="computed") for at in sides) == [0, 90]
    route = router.get("/debug/routes")["routes"][0]
    assert route["source"] is None
    assert route["too_large_as_target"] == ["any-a", "any-b"]
    limits = {node["node_id"]: node["max_received_len"] for node in router.get("/nodes")["nodes"]}
    assert limits == {"any-a": 511, "any-b": 511}
