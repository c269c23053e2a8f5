"""Without a router: first P, then D with what P answered, as proxies for other servers do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.oracle import Oracle
from tests.support.served_pair import Pair
from tests.support.servers import HttpFailure, Node, Router

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]


def paste(pair: Pair, ids: list[int], **params: Any) -> dict[str, Any]:
    """P's answer to a prompt: what goes into D's request."""
    answer = pair.p.generate(ids, {"do_remote_decode": True}, **params)
    assert answer.kv_transfer_params is not None
    return answer.kv_transfer_params


def test_a_late_reservation(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(70)
    pasted = paste(pair, ids, max_tokens=1)
    (choice,) = pair.d.generate(ids, pasted, max_tokens=8).choices
    assert list(choice.token_ids) == oracle.greedy(ids, 8)
    p = pair.at_p()
    assert p("kvbaton_transfers_revived_total") == 1
    assert p("kvbaton_prompt_tokens_total", source="local_cache") == 64
    assert pair.at_d()("kvbaton_prompt_tokens_total", source="transferred") == 70


def test_a_late_reservation_of_what_was_evicted(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(70)
    pasted = paste(pair, ids, max_tokens=1)
    pair.p.forget()
    (choice,) = pair.d.generate(ids, pasted, max_tokens=8).choices
    assert list(choice.token_ids) == oracle.greedy(ids, 8)
    assert pair.at_p()("kvbaton_prompt_tokens_total", source="computed") == 140


def test_openai_endpoints(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    """The same as such a proxy really does it, max_tokens of P's leg included."""
    ids = prompt(33)
    body = {"prompt": ids, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    source = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    first = pair.p.post("/v1/completions", body | source)
    target = {"max_tokens": 6, "kv_transfer_params": first["kv_transfer_params"]}
    answer = pair.d.post("/v1/completions", body | target)
    assert answer["choices"][0]["token_ids"] == oracle.greedy(ids, 6)


def test_a_grammar_that_the_proxy_keeps_from_p(any_nodes: tuple[Node, Node, Router]) -> None:
    """P's first token may be any: another is sampled after the KV that P has computed."""
    p, d, _ = any_nodes
    for colours in (["red", "blue"], ["green", "yellow"]):
        body = {"prompt": f"Is it {' or '.join(colours)}? " * 5, "temperature": 0}
        source = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        first = p.post("/v1/completions", body | source)
        target = {
            "structured_outputs": {"choice": colours},
            "kv_transfer_params": first["kv_transfer_params"],
        }
        before = d.metrics()
        (choice,) = d.post("/v1/completions", body | target)["choices"]
        assert choice["text"] in colours
        assert choice["finish_reason"] == "stop"
        tokens = d.metrics() - before
        assert tokens("kvbaton_prompt_tokens_total", source="transferred") > 50
        assert tokens("kvbaton_prompt_tokens_total", source="computed") < 16


def test_seeded(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(50)
    how = {"temperature": 1.0, "seed": 3}
    pasted = paste(pair, ids, max_tokens=1, **how)
    (choice,) = pair.d.generate(ids, pasted, max_tokens=8, **how).choices
    assert list(choice.token_ids) == pair.alone(ids, max_tokens=8, **how)


def test_a_consumed_transfer_gives_no_blocks(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(20)
    pasted = paste(pair, ids, max_tokens=1)
    pair.d.generate(ids, pasted, max_tokens=2)
    pair.forget()
    moved = pair.at_p()("kvbaton_transfer_posted_bytes_total")
    with pytest.raises(HttpFailure) as failure:
        pair.d.generate(ids, pasted, max_tokens=2)
    assert failure.value.status >= 400
    pair.moves = "some"
    assert pair.at_p()("kvbaton_transfer_posted_bytes_total") == moved
