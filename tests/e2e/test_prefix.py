"""Prefix hits on either side, of every kind, between equal and unequal block sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import MakePair
from tests.support.oracle import Oracle
from tests.support.served_pair import Pair, settle
from tests.support.servers import Metrics, Node, Router, generation

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]
Sources = tuple[float, float, float]
"""Prompt tokens (from the node's own cache, transferred, computed)."""


def sources(metrics: Metrics) -> Sources:
    local, moved, computed = (
        metrics("kvbaton_prompt_tokens_total", source=source)
        for source in ("local_cache", "transferred", "computed")
    )
    return local, moved, computed


def ask(pair: Pair, oracle: Oracle, ids: list[int]) -> tuple[Sources, Sources]:
    """Run a prompt, check its tokens, and tell where P's and D's prompt tokens came from.

    A P that is done before D's reservation arrives runs the prompt again, mostly from its cache;
    that second run is left out here.
    """
    settle(pair.p, pair.d)
    before_p, before_d = pair.p.metrics(), pair.d.metrics()
    said = pair.tokens(ids, max_tokens=6)
    assert said == oracle.greedy(ids, 6, said)
    settle(pair.p, pair.d)
    p, d = pair.p.metrics() - before_p, pair.d.metrics() - before_d
    local, moved, computed = sources(p)
    if p("kvbaton_transfers_revived_total"):
        size = pair.p.info()["block_size"]
        again = min(len(ids) - len(ids) % size, len(ids) - 1)
        local, computed = local - again, computed - (len(ids) - again)
    return (local, moved, computed), sources(d)


# --- equal block sizes: 16 ---


def test_hit_on_both(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    shared = prompt(48)
    ask(pair, oracle, shared + prompt(5))
    p, d = ask(pair, oracle, shared + prompt(30))
    assert p == (48, 0, 30)
    assert d == (48, 30, 0)


def test_hit_on_the_source_only(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    shared = prompt(48)
    ask(pair, oracle, shared + prompt(5))
    pair.d.forget()
    before = pair.at_d()
    p, d = ask(pair, oracle, shared + prompt(30))
    assert p == (48, 0, 30)
    assert d == (0, 78, 0)
    cached = (pair.at_d() - before)("kvbaton_prompt_tokens_cached_at_source_total")
    assert cached == 48


def test_hit_on_the_target_only(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    shared = prompt(48)
    ask(pair, oracle, shared + prompt(5))
    pair.p.forget()
    p, d = ask(pair, oracle, shared + prompt(30))
    assert p == (0, 0, 78)
    assert d == (48, 30, 0)


def test_full_hit_on_the_source(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(64)
    ask(pair, oracle, ids)
    pair.d.forget()
    p, d = ask(pair, oracle, ids)
    assert p == (63, 0, 1)
    assert d == (0, 64, 0)


def test_full_hit_on_the_target(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    """Nothing is handed over; D computes the last token into a copy of its block."""
    ids = prompt(64)
    ask(pair, oracle, ids)
    pair.p.forget()
    sent = pair.at_p()("kvbaton_transfer_posted_bytes_total")
    _, d = ask(pair, oracle, ids)
    assert d == (63, 0, 1)
    assert pair.at_d()("kvbaton_transfers_total", outcome="unneeded") == 1
    assert pair.at_p()("kvbaton_transfer_posted_bytes_total") == sent


def test_full_hit_on_both(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(64)
    ask(pair, oracle, ids)
    p, d = ask(pair, oracle, ids)
    faster = ((63, 0, 0), (0, 0, 0))  # `NotNeeded` came before the step, or before admission
    assert p in ((63, 0, 1), *faster), "P computes at most one token"
    assert d == (63, 0, 1)


def test_a_target_with_a_full_hit_may_be_faster_than_the_source(
    pair: Pair, oracle: Oracle, prompt: Prompt
) -> None:
    """What P hears of a request that nobody needs any more is no failure."""
    ids = prompt(64)
    ask(pair, oracle, ids)
    for number in range(5):
        transfer = number.to_bytes(16)
        (choice,) = pair.d.generate(ids, pair.target_params(transfer), max_tokens=3).choices
        assert list(choice.token_ids) == oracle.greedy(ids, 3)
        body = generation(ids, pair.source_params(transfer), stream=True, max_tokens=3)
        *_, last = pair.p.stream("/inference/v1/generate", body)
        assert last["finish_reason"] in ("abort", "length"), last


def test_what_a_target_generated_is_a_prefix_too(
    pair: Pair, oracle: Oracle, prompt: Prompt
) -> None:
    ids = prompt(30)
    said = pair.tokens(ids, max_tokens=20)
    p, d = ask(pair, oracle, [*ids, *said, *prompt(4)])
    assert p == (16, 0, 38)
    assert d == (48, 6, 0)


def test_hits_under_seeded_sampling(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(70)
    first = pair.tokens(ids, max_tokens=8, temperature=1.0, seed=5)
    assert pair.tokens(ids, max_tokens=8, temperature=1.0, seed=5) == first
    assert pair.alone(ids, max_tokens=8, temperature=1.0, seed=5) == first
    assert sources(pair.at_d())[0] == 64


# --- unequal block sizes ---

SIZES = {"16 to 32": (16, 32), "48 to 16": (48, 16), "48 to 32": (48, 32)}


@pytest.fixture(params=list(SIZES.values()), ids=list(SIZES))
def unequal(
    request: pytest.FixtureRequest,
    main_nodes: tuple[Node, Node, Router],
    odd_nodes: tuple[Node, Node],
    make_pair: MakePair,
) -> tuple[Pair, int, int]:
    """A pair and its block sizes on P and D."""
    (p16, d16, _), (p48, d32) = main_nodes, odd_nodes
    p_size, d_size = request.param
    pair = make_pair({16: p16, 48: p48}[p_size], {16: d16, 32: d32}[d_size])
    pair.forget()
    return pair, p_size, d_size


Unequal = tuple[Pair, int, int]


@pytest.mark.parametrize("length", [1, 15, 16, 31, 32, 33, 48, 49, 96, 150])
def test_block_sizes_differ(unequal: Unequal, oracle: Oracle, prompt: Prompt, length: int) -> None:
    _, d = ask(unequal[0], oracle, prompt(length))
    assert d == (0, length, 0)


@pytest.mark.parametrize("shared_length", [16, 32, 48, 64, 80, 112])
def test_hits_end_inside_the_other_sides_block(
    unequal: Unequal, oracle: Oracle, prompt: Prompt, shared_length: int
) -> None:
    pair, p_size, d_size = unequal
    shared = prompt(shared_length)
    ask(pair, oracle, shared)
    longer = shared + prompt(45)
    p_hit, d_hit = (shared_length - shared_length % size for size in (p_size, d_size))
    p, d = ask(pair, oracle, longer)
    assert p == (p_hit, 0, len(longer) - p_hit)
    assert d == (d_hit, len(longer) - d_hit, 0)


@pytest.mark.parametrize("shared_length", [16, 32, 64, 80])
def test_hits_end_inside_the_other_sides_last_block(
    unequal: Unequal, oracle: Oracle, prompt: Prompt, shared_length: int
) -> None:
    """That block is not full: its sums are of fewer tokens than it has room for.

    How many follow is such that any two of sizes, prefix and rest meet.
    """
    pair, p_size, d_size = unequal
    more = (1, 7, 15)[(shared_length // 16 + [*SIZES.values()].index((p_size, d_size))) % 3]
    shared = prompt(shared_length)
    ask(pair, oracle, shared)
    longer = shared + prompt(more)
    _, d = ask(pair, oracle, longer)
    d_hit = shared_length - shared_length % d_size
    assert d == (d_hit, len(longer) - d_hit, 0)


@pytest.mark.parametrize("forgetful", ["p", "d"])
def test_hits_on_one_side(unequal: Unequal, oracle: Oracle, prompt: Prompt, forgetful: str) -> None:
    pair, p_size, d_size = unequal
    shared = prompt(80)
    ask(pair, oracle, shared)
    {"p": pair.p, "d": pair.d}[forgetful].forget()
    p_hit = 0 if forgetful == "p" else 80 - 80 % p_size
    d_hit = 0 if forgetful == "d" else 80 - 80 % d_size
    longer = shared + prompt(23)
    p, d = ask(pair, oracle, longer)
    assert p == (p_hit, 0, 103 - p_hit)
    assert d == (d_hit, 103 - d_hit, 0)


def test_many_at_once_between_unequal_sizes(
    unequal: Unequal, oracle: Oracle, prompt: Prompt
) -> None:
    pair = unequal[0]
    shared = prompt(70)
    prompts = [shared[: 1 + 9 * i % 70] + prompt(1 + 5 * i % 40) for i in range(16)]
    futures = [pair.submit(ids, max_tokens=5) for ids in prompts]
    answers = [list(future.result().choices[0].token_ids) for future in futures]
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer == oracle.greedy(ids, 5, answer)
