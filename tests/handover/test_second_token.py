"""A source that has nothing else to do samples a second token while the prompt's KV crosses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.engine_node import Call
from tests.support.engine_pair import Expected, Pair
from tests.support.prompts import prompt_of
from tests.support.waiting import until


def hand_over(pair: Pair, prompt: Sequence[int], **params: Any) -> tuple[Call, Call]:
    """Send a prompt as a router does, once P has D's reservation."""
    of_p, of_d = pair.requests(prompt, **params)
    at_d = pair.d.add(of_d)
    transfer, sender = of_p.transfer, pair.p.transfers.sender
    assert transfer is not None
    assert sender is not None
    live = sender.source.live
    until(lambda: pair.p.transfers.inspect(lambda: transfer.name in live), "P has the reservation")
    return pair.p.add(replace(of_p, transfer=replace(transfer, goes_on=True))), at_d


@pytest.mark.parametrize("length", [1, 3, 4, 5, 50])
def test_an_idle_source_samples_two_tokens(pair: Pair, expected: Expected, length: int) -> None:
    prompt = prompt_of(length)
    at_p, at_d = hand_over(pair, prompt)
    assert at_d.result() == expected(prompt)
    assert at_p.result() == expected(prompt)[:2]
    assert pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}'] == length
    pair.settle()


def test_blocks_of_the_source_are_right_when_it_went_on(pair: Pair, expected: Expected) -> None:
    """Blocks that hold its second token's KV, too, are prefixes of later prompts."""
    prompt = list(prompt_of(50))
    answer = expected(prompt)
    for known in (prompt, prompt + answer[:1], [*prompt, *answer[:2], *prompt_of(9, 1)]):
        at_p, at_d = hand_over(pair, known)
        assert at_d.result() == expected(known)
        assert len(at_p.result()) == 2
    pair.settle()


@pytest.mark.parametrize(
    "params",
    [{"max_tokens": 1}, {"n": 2, "temperature": 1.0, "seed": 3}],
    ids=["one token is wanted", "two choices"],
)
def test_a_source_stops_after_one_token(pair: Pair, params: dict[str, Any]) -> None:
    at_p, at_d = hand_over(pair, prompt_of(50), **params)
    at_d.result()
    at_p.result()
    assert [len(output.token_ids) for output in at_p.outputs] == [1] * params.get("n", 1)
    pair.settle()


def test_a_source_stops_after_one_token_if_others_wait(pair: Pair, expected: Expected) -> None:
    with pair.p.held_step():
        calls = [hand_over(pair, prompt_of(50, seed)) for seed in range(3)]
    assert [at_d.result() for _, at_d in calls] == [expected(prompt_of(50, s)) for s in range(3)]
    assert [len(at_p.result()) for at_p, _ in calls[:-1]] == [1, 1]
    pair.settle()


def test_a_source_that_is_not_asked_for_more_stops_after_one_token(pair: Pair) -> None:
    """Other proxies expect one token."""
    at_p, at_d = pair.hand_over(prompt_of(50))
    at_d.result()
    assert len(at_p.result()) == 1
    pair.settle()


@pytest.mark.parametrize("place", [0, 1])
def test_a_stop_token_of_the_source_ends_the_answer(
    pair: Pair, expected: Expected, place: int
) -> None:
    prompt = prompt_of(50)
    answer = expected(prompt)
    at_p, at_d = hand_over(pair, prompt, stop_token_ids=(answer[place],))
    assert at_p.result() == at_d.result() == answer[: place + 1]
    assert at_d.finish_reason == "stop"
    pair.settle()


def test_two_tokens_may_be_the_whole_answer(pair: Pair, expected: Expected) -> None:
    prompt = prompt_of(50)
    _, at_d = hand_over(pair, prompt, max_tokens=2)
    assert at_d.result() == expected(prompt)[:2]
    assert at_d.finish_reason == "length"
    pair.settle()


def test_log_probabilities_of_both_tokens_arrive(pair: Pair, expected: Expected) -> None:
    prompt = prompt_of(50)
    at_p, at_d = hand_over(pair, prompt, logprobs=2)
    assert at_d.result() == expected(prompt)
    assert [len(o.logprobs or ()) for o in at_d.outputs] == [len(o.token_ids) for o in at_d.outputs]
    of_p = [o.logprobs for o in at_p.outputs if o.token_ids]
    assert [o.logprobs for o in at_d.outputs if o.token_ids][:2] == of_p
    pair.settle()


def test_a_source_whose_client_leaves_before_the_second_token_ends_the_hand_over(
    pair: Pair, expected: Expected
) -> None:
    prompt = prompt_of(5)
    with pair.p.held_step() as hold:
        at_p, at_d = hand_over(pair, prompt)
        until(hold.waited_for, "a step is held")
        at_p.abort()
    assert at_d.result() == expected(prompt)
    until(at_p.over, "the abort")
    assert (at_p.tokens, at_p.finish_reason) == (expected(prompt)[:1], "abort")
    pair.settle()
