"""A prefix that one node has cached is fetched by another, by block key."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.messages.engine import AddRequest, PrefixAt
from tests.support.engine_node import Call, greedy
from tests.support.engine_pair import Pair
from tests.support.making import making
from tests.support.prompts import prompt_of

MIXED = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "windows": {"family": "mistral", "config": {"sliding_window": 11}},
    "windows and full": {"family": "qwen2", "num_layers": 5, "config": MIXED},
    "states": {"family": "qwen3_next", "num_layers": 4, "head_dim": 32},
}
PROMPT = prompt_of(50)
SIZE = 4
"""Tokens of a block."""


@pytest.fixture
def make(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Pair]]:
    def start(model: str = "llama", **settings: Any) -> Pair:
        of_d = {"num_blocks": 300, "debug_poison": True} | settings.pop("d", {})
        of_p = {"num_blocks": 300} | settings.pop("p", {})
        return Pair(checkpoint(**MODELS[model]), p=of_p, d=of_d, **settings)

    with making(start, Pair.close) as make:
        yield make


def fetch(pair: Pair, prompt: Any, num_tokens: int, name: str = "f", **params: Any) -> Call:
    """D is asked for a prompt whose first tokens P is said to have."""
    prefix = PrefixAt(peer=pair.address, num_tokens=num_tokens)
    tokens, sampling = tuple(prompt), greedy({"max_tokens": 6} | params)
    return pair.d.add(
        AddRequest(request_id=name, token_ids=array("I", tokens), params=sampling, prefix=prefix)
    )


def counted(pair: Pair, source: str) -> float:
    """Prompt tokens of D."""
    return pair.d.counters().get(f'kvbaton_prompt_tokens_total{{source="{source}"}}', 0.0)


def ended(pair: Pair, outcome: str) -> float:
    """Fetches of D that ended so."""
    name = f'kvbaton_transfers_total{{role="prefix",outcome="{outcome}"}}'
    return pair.d.counters()[name]


def wire_failures(pair: Pair) -> list[str]:
    return [name for name in pair.d.gauges() if name.startswith("kvbaton_wire_failures")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)], ids=["one-one", "two-one"])
def test_what_was_fetched_is_not_computed(
    make: Callable[..., Pair], model: str, ranks: tuple[int, int]
) -> None:
    p, d = ({"tensor_parallel_size": count} for count in ranks)
    pair = make(model, p=p, d=d)
    expected = pair.p.generate(PROMPT, max_tokens=6).result()
    size = pair.p.scheduler.blocks.alignment
    whole = (len(PROMPT) - 1) // size * size
    assert fetch(pair, PROMPT, len(PROMPT)).result() == expected
    pair.settle()
    assert counted(pair, "peer") == whole
    assert counted(pair, "computed") == len(PROMPT) - whole
    assert ended(pair, "delivered") == 1
    assert pair.p.counters()["kvbaton_transfer_sent_bytes_total"] > 0


def test_only_what_is_not_here_is_fetched(make: Callable[..., Pair]) -> None:
    pair = make()
    expected = pair.p.generate(PROMPT, max_tokens=6).result()
    pair.d.generate(PROMPT[:20], max_tokens=1).result()
    assert fetch(pair, PROMPT, 40).result() == expected
    pair.settle()
    assert (counted(pair, "local_cache"), counted(pair, "peer")) == (20, 20)


def test_bytes_that_do_not_match_are_computed_and_evicted(make: Callable[..., Pair]) -> None:
    pair = make()
    expected = pair.p.generate(PROMPT, max_tokens=6).result()
    pair.settle()
    cache, blocks = pair.p.worker.cache, pair.p.scheduler.blocks
    key = next(iter(blocks.pool.by_key[0]))
    cache.data[blocks.pool.by_key[0][key]] += 1.0
    assert fetch(pair, PROMPT, 40).result() == expected
    pair.settle()
    assert ended(pair, "failed") == 1
    assert counted(pair, "peer") == 0
    assert pair.d.counters()["kvbaton_transfer_digests_failed_total"] == 1
    assert key not in blocks.pool.by_key[0]


def test_a_holder_that_is_gone_costs_time_only(make: Callable[..., Pair]) -> None:
    pair = make(d={"kv_load_failure_policy": "fail"})
    expected = pair.p.generate(PROMPT, max_tokens=6).result()
    pair.settle()
    for times in (1, 2):
        pair.p.ask("reset_prefix_cache")
        pair.d.ask("reset_prefix_cache")
        assert fetch(pair, PROMPT, 40).result() == expected, "it is computed under any policy"
        pair.settle()
        assert ended(pair, "failed") == times
    assert not wire_failures(pair), "it has answered: nothing is wrong with the way"
    pair.kill("p")
    pair.d.ask("reset_prefix_cache")
    assert fetch(pair, PROMPT, 44, "again").result() == expected
    assert wire_failures(pair)


def test_who_asks_for_more_than_a_share_is_refused(make: Callable[..., Pair]) -> None:
    pair = make(p={"num_blocks": 40, "max_model_len": 128})
    expected = pair.p.generate(PROMPT, max_tokens=6).result()
    assert fetch(pair, PROMPT, 48).result() == expected  # 12 of 40 blocks are more than a quarter
    pair.settle()
    assert (ended(pair, "failed"), counted(pair, "computed")) == (1, 50)
    assert fetch(pair, (*PROMPT[:16], *prompt_of(30, 7)), 16, "less").result()


def test_a_client_that_leaves_leaves_nothing(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.p.generate(PROMPT, max_tokens=6).result()
    pair.settle()
    with pair.p.frozen_transfers():
        call = fetch(pair, PROMPT, 40)
        call.abort()
    pair.settle()
    assert ended(pair, "cancelled") + ended(pair, "delivered") <= 1


def test_strangers_are_not_dialled(make: Callable[..., Pair]) -> None:
    pair = make()
    prefix = PrefixAt(peer="tcp://192.0.2.1:9", num_tokens=16)
    call = pair.d.add(
        AddRequest(request_id="x", token_ids=array("I", PROMPT), params=greedy({}), prefix=prefix)
    )
    with pytest.raises(AssertionError, match="not a member"):
        call.result()
    call = pair.p.add(
        AddRequest(request_id="y", token_ids=array("I", PROMPT), params=greedy({}), prefix=prefix)
    )
    with pytest.raises(AssertionError, match="no target of hand-overs; send remote_prefix"):
        call.result()
