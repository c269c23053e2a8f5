"""Drafts change no token: of one node, over ranks, windows and mixtures, whatever is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engine.config import SpeculativeConfig
from kvbaton.engine.runner import accepted
from kvbaton.engine.speculative import propose
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import Shutdown
from tests.support.engine_node import Node
from tests.support.engine_pair import Pair
from tests.support.prompts import prompt_of
from tests.support.toy_engine import Loop, ask, prompt
from tests.support.waiting import until

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
SPECULATIVE: dict[str, Any] = {"speculative_config": json.dumps(NGRAM)}
REPEATED = prompt_of(9) * 4
"""Its runs occur several times, so that drafts are made from the first step on."""

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "truncated": {"temperature": 1.1, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 6},
    "penalties": {"repetition_penalty": 1.02, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "sampled penalties": {"temperature": 0.7, "frequency_penalty": 0.8, "seed": 8},
    "bias": {"logit_bias": {7: 3.0, 9: -2.0}},
    "allowed": {"allowed_token_ids": tuple(range(5, 60)), "temperature": 0.8, "seed": 4},
    "bad words": {
        "bad_words_token_ids": tuple((a, b) for a in range(40) for b in range(40, 90, 7))
    },
    "choices": {"temperature": 0.9, "n": 3, "seed": 9},
    "end tokens": {"ignore_eos": False, "min_tokens": 6, "max_tokens": 40},
    "prompt logprobs": {"prompt_logprobs": 1, "logprobs": 3},
}


# --- drafts ---


def found_by_hand(tokens: list[int], count: int, least: int, most: int) -> tuple[int, ...]:
    """Every run that ends earlier, the longest first."""
    for n in range(most, least - 1, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[len(tokens) - n :]]
        if ends and n < len(tokens):
            whole = [e for e in ends if e + count <= len(tokens)]
            end = whole[-1] if whole else ends[0]
            return tuple(tokens[end : end + count])
    return ()


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    count=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
@settings(max_examples=300, deadline=None)
def test_a_draft_is_what_followed_the_longest_run(
    tokens: list[int], count: int, sizes: list[int]
) -> None:
    least, most = sizes
    found = propose(np.array(tokens, np.int32), count, least=least, most=most)
    assert found == found_by_hand(tokens, count, least, most)


@given(draft=st.lists(st.integers(0, 2)), sampled=st.lists(st.integers(0, 2), min_size=1))
def test_tokens_are_accepted_before_the_first_other(draft: list[int], sampled: list[int]) -> None:
    sampled = (sampled * (len(draft) + 1))[: len(draft) + 1]
    count = accepted(draft, sampled)
    assert draft[:count] == sampled[:count]
    assert count == len(draft) or draft[count] != sampled[count]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "keys: method"),
        ('{"method": "eagle", "num_speculative_tokens": 2}', r"'eagle'.*method \(ngram\), num"),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        (
            '{"method": "ngram", "num_speculative_tokens": 0}',
            r">= 1 - at `\$.num_speculative_tokens`",
        ),
        (json.dumps(NGRAM | {"prompt_lookup_min": 4}), "prompt_lookup_min: 4 is more than"),
        (json.dumps(NGRAM | {"model": "draft"}), "model"),
    ],
)
def test_a_wrong_setting_is_named(config: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        SpeculativeConfig.parse(config)
    assert "--speculative-config" in str(raised.value)


def test_a_model_with_states_is_refused(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(family="qwen3_next", num_layers=4, head_dim=32)
    with pytest.raises(ConfigError, match="--speculative-config: a state can't go back"):
        Node("alone", folder, **SPECULATIVE)


def test_sizes_that_are_left_out_are_those_of_vllm() -> None:
    def sizes(**given: int) -> tuple[int, int]:
        known = {"method": "ngram", "num_speculative_tokens": 2}
        config = SpeculativeConfig.parse(json.dumps(known | given))
        assert config is not None
        return config.lookup

    assert sizes() == (5, 5)
    assert sizes(prompt_lookup_max=4) == (4, 4)
    assert sizes(prompt_lookup_min=2) == (2, 2)


# --- the scheduler ---


def test_accepted_tokens_save_steps() -> None:
    loops = [Loop(drafts=drafts) for drafts in (0, 4)]
    for loop in loops:
        loop.add(ask("a", prompt(9), max_tokens=30, ignore_eos=True))
        loop.run()
        loop.check_stream("a")
    assert len(loops[1].plans) < len(loops[0].plans) // 2
    totals = loops[1].scheduler.totals
    assert 0 < totals.accepted.total() < totals.draft_tokens
    assert totals.accepted.total() + totals.drafts >= 25, "each draft gives a token more"


def test_only_accepted_tokens_are_cached() -> None:
    loop = Loop(drafts=4)
    loop.add(ask("a", prompt(9), max_tokens=24, ignore_eos=True))
    loop.run()
    known = prompt(9) + loop.streams["a", 0].tokens
    (sequence_keys,) = (len(keys) for keys in loop.scheduler.blocks.pool.by_key)
    assert sequence_keys == (len(known) - 1) // 4, "of the last token there is no KV"
    loop.add(ask("b", known, max_tokens=5, ignore_eos=True))
    loop.run()
    loop.check_stream("b")
    assert loop.outputs[-1].cached_tokens == (len(known) - 1) // 4 * 4


def test_nobody_is_preempted_for_a_draft() -> None:
    loop = Loop(drafts=4, max_num_batched_tokens=8)
    for name in "abc":
        loop.add(ask(name, prompt(9, start=ord(name)), max_tokens=11, ignore_eos=True))
    loop.run()
    for name in "abc":
        loop.check_stream(name)
    assert loop.scheduler.totals.drafts
    assert not loop.scheduler.totals.preemptions


# --- nodes ---


@pytest.fixture(scope="module")
def nodes(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Node]]:
    """Nodes of a family, each started once."""
    made: dict[str, Node] = {}

    def node(spec: dict[str, Any], **settings: Any) -> Node:
        key = repr((spec, settings))
        if key not in made:
            made[key] = Node("alone", checkpoint(**spec), **settings)
        return made[key]

    yield node
    for each in made.values():
        each.mailbox.post(Shutdown(grace_s=0.0))
        each.bury()


LLAMA: dict[str, Any] = {"family": "llama"}
WINDOWS: dict[str, Any] = {"family": "gpt_oss", "num_layers": 4}


def answers(node: Node, tokens: tuple[int, ...], **params: Any) -> list[Any]:
    """Tokens, reasons and logprobs of all choices."""
    call = node.generate(tokens, **params)
    until(call.over, "the end")
    found = []
    for choice in range(params.get("n", 1)):
        outputs = [output for output in call.outputs if output.choice == choice]
        ids = [token for output in outputs for token in output.token_ids]
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
        told = [(entry.rank, round(entry.logprob, 3)) for entry in logprobs]
        found.append((ids, outputs[-1].finish_reason, outputs[-1].stop_reason, told))
    return found


CASES = [("llama", asked) for asked in ASKED]
CASES += [("windows", asked) for asked in ("greedy", "sampled penalties", "choices")]


@pytest.mark.parametrize(("family", "asked"), CASES)
def test_answers_are_the_same(family: str, asked: str, nodes: Callable[..., Node]) -> None:
    spec = LLAMA if family == "llama" else WINDOWS
    plain, drafting = nodes(spec), nodes(spec, **SPECULATIVE)
    before = drafting.counters()
    params = {"max_tokens": 16, "logprobs": 2} | ASKED[asked]
    for tokens in (REPEATED, prompt_of(30)):
        assert answers(drafting, tokens, **params) == answers(plain, tokens, **params)
    after = drafting.counters()
    drafts = "kvbaton_spec_decode_num_drafts_total"
    assert after[drafts] > before[drafts]
    assert drafting.imbalance == 0


def test_stop_tokens_end_in_the_middle_of_a_draft(nodes: Callable[..., Node]) -> None:
    plain, drafting = nodes(LLAMA), nodes(LLAMA, **SPECULATIVE)
    ((tokens, *_),) = answers(plain, REPEATED, max_tokens=40)
    for stop in list(dict.fromkeys(tokens[5:]))[:6]:
        params = {"max_tokens": 40, "stop_token_ids": [stop], "min_tokens": 4}
        assert answers(drafting, REPEATED, **params) == answers(plain, REPEATED, **params)
    for length in range(1, 8):
        found = answers(drafting, REPEATED, max_tokens=length)
        assert found == answers(plain, REPEATED, max_tokens=length)


def test_many_at_a_time_in_a_small_pool(nodes: Callable[..., Node]) -> None:
    plain = nodes(LLAMA)
    drafting = nodes(LLAMA, **SPECULATIVE, num_blocks=40, max_model_len=128)
    asked = [(REPEATED[i:], {"max_tokens": 50, "seed": i, "temperature": 0.2}) for i in range(6)]
    calls = [drafting.generate(tokens, **params) for tokens, params in asked]
    for call, (tokens, params) in zip(calls, asked, strict=True):
        assert call.result() == plain.generate(tokens, **params).result()
    counters = drafting.counters()
    assert counters["kvbaton_preemptions_total"] > 0
    accepted_total = counters["kvbaton_spec_decode_num_accepted_tokens_total"]
    places = [
        counters[f'kvbaton_spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}}']
        for place in range(4)
    ]
    assert sum(places) == accepted_total > 0
    assert places == sorted(places, reverse=True)
    assert accepted_total <= counters["kvbaton_spec_decode_num_draft_tokens_total"]


def test_ranks_accept_the_same(nodes: Callable[..., Node]) -> None:
    plain, drafting = nodes(LLAMA), nodes(LLAMA, **SPECULATIVE, tensor_parallel_size=2)
    for params in ({}, {"temperature": 0.8, "seed": 3}):
        found = drafting.generate(REPEATED, max_tokens=30, **params).result()
        assert found == plain.generate(REPEATED, max_tokens=30, **params).result()


@pytest.mark.parametrize("spec", [LLAMA, WINDOWS], ids=["llama", "windows"])
def test_blocks_of_drafts_cross(
    spec: dict[str, Any], checkpoint: Callable[..., Path], nodes: Callable[..., Node]
) -> None:
    """Both sides speculate; what P computed so has the right digests, rejected tokens gone."""
    plain = nodes(spec)
    pair = Pair(checkpoint(**spec), p=SPECULATIVE, d=SPECULATIVE)
    try:
        told = list(REPEATED)
        for _ in range(3):
            told += pair.p.generate(told, max_tokens=20).result()
            _, at_d = pair.hand_over(tuple(told), max_tokens=20)
            assert at_d.result() == plain.generate(told, max_tokens=20).result()
        pair.settle()
        counters = pair.d.counters()
        assert counters["kvbaton_transfer_digests_failed_total"] == 0
        assert counters["kvbaton_load_failures_total"] == 0
        for side in (counters, pair.p.counters()):
            drafted = side["kvbaton_spec_decode_num_draft_tokens_total"]
            assert drafted > side["kvbaton_spec_decode_num_accepted_tokens_total"]
        cached = pair.p.counters()['kvbaton_prompt_tokens_total{source="local_cache"}']
        assert cached > len(REPEATED), "P did not hand over what it had generated"
    finally:
        pair.close()
