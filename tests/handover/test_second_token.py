"""A source that has nothing else to do samples a second token while the prompt's KV crosses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.engine_pair import Expected, Pair
from tests.support.prompts import prompt_of
from tests.support.waiting import until

BLOCK = 4
"""Tokens of a block."""


@pytest.mark.parametrize("length", [1, 3, 4, 5, 50])
def test_an_idle_source_samples_two_tokens(pair: Pair, expected: Expected, length: int) -> None:
    prompt = prompt_of(length)
    at_p, at_d = pair.hand_over(prompt, goes_on=True)
    assert at_d.result() == expected(prompt)
    assert at_p.result() == expected(prompt)[:2]
    assert pair.d.counters()["kvbaton_step_tokens_total"] == len(expected(prompt)) - 1
    assert pair.d.counters()["kvbaton_steps_total"] == len(expected(prompt)) - 2
    assert pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}'] == length
    pair.settle()


def test_blocks_of_the_source_are_right_when_it_went_on(pair: Pair, expected: Expected) -> None:
    """Blocks that hold its second token's KV, too, are prefixes of later prompts."""
    prompt = list(prompt_of(50))
    answer = expected(prompt)
    for known in (prompt, prompt + answer[:1], [*prompt, *answer[:2], *prompt_of(9, 1)]):
        at_p, at_d = pair.hand_over(known, goes_on=True)
        assert at_d.result() == expected(known)
        assert len(at_p.result()) == 2
    pair.settle()


@pytest.mark.parametrize(
    "params",
    [{"max_tokens": 1}, {"n": 2, "temperature": 1.0, "seed": 3}],
    ids=["one token is wanted", "two choices"],
)
def test_a_source_stops_after_one_token(pair: Pair, params: dict[str, Any]) -> None:
    at_p, at_d = pair.hand_over(prompt_of(50), goes_on=True, **params)
    at_d.result()
    at_p.result()
    assert [len(output.token_ids) for output in at_p.outputs] == [1] * params.get("n", 1)
    pair.settle()


def test_a_source_stops_after_one_token_if_others_wait(pair: Pair, expected: Expected) -> None:
    with pair.p.held_step():
        calls = [pair.hand_over(prompt_of(50, seed), goes_on=True) for seed in range(3)]
    assert [at_d.result() for _, at_d in calls] == [expected(prompt_of(50, s)) for s in range(3)]
    assert [len(at_p.result()) for at_p, _ in calls[:-1]] == [1, 1]
    pair.settle()


def test_a_source_without_room_stops_after_one_token(
    make_pair: Callable[..., Pair], expected: Expected
) -> None:
    pair = make_pair(p={"num_blocks": 14, "max_model_len": 13 * BLOCK})
    with pair.d.held_digests():
        _, first = pair.hand_over(prompt_of(5 * BLOCK, 1))
        until(lambda: pair.p.leases() == 1, "P holds 5 of 13 blocks")
        at_p, at_d = pair.hand_over(prompt_of(8 * BLOCK), goes_on=True)
        assert len(at_p.result()) == 1
    assert first.result() == expected(prompt_of(5 * BLOCK, 1))
    assert at_d.result() == expected(prompt_of(8 * BLOCK))
    pair.settle()


def test_a_source_of_which_a_part_of_a_block_is_wanted_stops_after_one_token(
    make_pair: Callable[..., Pair], expected: Expected
) -> None:
    """Sums of that part are made when the step is over; the next one might write to the block."""
    pair = make_pair(p={"block_size": 4 * BLOCK})
    prompt = prompt_of(50)
    for tokens in (2, 1):
        at_p, at_d = pair.hand_over(prompt, goes_on=True)
        assert at_d.result() == expected(prompt)
        assert len(at_p.result()) == tokens
        prompt = prompt[:45]
        pair.p.ask("reset_prefix_cache")
    pair.settle()


def test_a_prompt_that_is_run_again_for_a_late_target_has_one_token(
    pair: Pair, expected: Expected
) -> None:
    prompt = prompt_of(50)
    of_p, of_d = pair.requests(prompt)
    assert of_p.transfer is not None
    goes_on = replace(of_p, transfer=replace(of_p.transfer, goes_on=True))
    assert len(pair.p.add(goes_on).result()) == 1
    assert pair.d.add(of_d).result() == expected(prompt)
    assert pair.p.counters()["kvbaton_generation_tokens_total"] == 2
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
    at_p, at_d = pair.hand_over(prompt, goes_on=True, stop_token_ids=(answer[place],))
    assert at_p.result() == at_d.result() == answer[: place + 1]
    assert at_d.finish_reason == "stop"
    pair.settle()


def test_two_tokens_may_be_the_whole_answer(pair: Pair, expected: Expected) -> None:
    prompt = prompt_of(50)
    _, at_d = pair.hand_over(prompt, goes_on=True, max_tokens=2)
    assert at_d.result() == expected(prompt)[:2]
    assert at_d.finish_reason == "length"
    pair.settle()


def test_log_probabilities_of_both_tokens_arrive(pair: Pair, expected: Expected) -> None:
    prompt = prompt_of(50)
    at_p, at_d = pair.hand_over(prompt, goes_on=True, logprobs=2)
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
        at_p, at_d = pair.hand_over(prompt, goes_on=True)
        until(hold.waited_for, "a step is held")
        at_p.abort()
    assert at_d.result() == expected(prompt)
    until(at_p.over, "the abort")
    assert (at_p.tokens, at_p.finish_reason) == (expected(prompt)[:1], "abort")
    pair.settle()
