"""Through P and D comes, token for token, what one node says, and what transformers says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.oracle import Oracle
from tests.support.served_pair import POOL, Pair
from tests.support.servers import completion

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 77}
EOS = 1


def tokens_of(answer: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 100, 160])
def test_greedy_equals_transformers(
    pair: Pair, oracle: Oracle, prompt: Prompt, length: int
) -> None:
    ids = prompt(length)
    answer = pair.router.complete(ids, max_tokens=12)
    (said,) = tokens_of(answer)
    assert said == oracle.greedy(ids, 12, said)
    assert tokens_of(answer) == [pair.alone(ids, max_tokens=12)]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert pair.at_d()("kvbaton_prompt_tokens_total", source="transferred") == length


@pytest.mark.parametrize("length", [1, 16, 17, 100])
def test_seeded_equals_one_node(pair: Pair, prompt: Prompt, length: int) -> None:
    ids = prompt(length)
    answer = pair.router.complete(ids, max_tokens=16, **SEEDED)
    assert tokens_of(answer) == [pair.alone(ids, max_tokens=16, **SEEDED)]
    other = pair.alone(ids, max_tokens=16, **(SEEDED | {"seed": 78}))
    assert tokens_of(answer) != [other], "the seed decides nothing"


def test_streaming(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(50)
    body = completion(ids, max_tokens=60, stream=True, stream_options={"include_usage": True})
    *events, usage = pair.router.stream("/v1/completions", body)
    choices = [event["choices"][0] for event in events]
    streamed = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert streamed == oracle.greedy(ids, 60, streamed)
    assert len(choices) > 1, "it came in one piece"  # how many pieces depends on the load
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 50)
    whole = pair.router.complete(ids, max_tokens=60)
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]


def test_chat(pair: Pair, oracle: Oracle) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = pair.router.post("/v1/chat/completions", body)
    ids = answer["prompt_token_ids"]
    assert answer["choices"][0]["token_ids"] == oracle.greedy(ids, 8)
    assert pair.at_d()("kvbaton_prompt_tokens_total", source="transferred") == len(ids)


def test_32_at_once(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    prompts = [prompt(1 + 7 * i % 90) for i in range(32)]
    sent = [POOL.submit(pair.router.complete, ids, max_tokens=10) for ids in prompts]
    answers = [tokens_of(future.result())[0] for future in sent]
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer == oracle.greedy(ids, 10, answer)
    delivered = pair.at_d()("kvbaton_transfers_total", outcome="delivered")
    assert delivered == 32


def test_an_idle_prefill_node_samples_the_second_token_too(
    pair: Pair, oracle: Oracle, prompt: Prompt
) -> None:
    """If the reservation came before its step ended, as it does most of the time."""
    tries = 8
    for i in range(tries):
        ids = prompt(40 + i)
        asked = completion(ids, max_tokens=6)
        (choice,) = pair.router.post("/v1/completions", asked)["choices"]
        assert choice["token_ids"] == oracle.greedy(ids, 6)
    assert tries < pair.at_p()("kvbaton_generation_tokens_total") <= 2 * tries


def test_max_tokens_1(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(40)
    answer = pair.router.complete(ids, max_tokens=1)
    assert tokens_of(answer) == [oracle.greedy(ids, 1)]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert pair.at_d()("kvbaton_transfers_total", outcome="delivered") == 1


@pytest.mark.parametrize("length", [16, 40])
def test_stop_token_as_the_first(pair: Pair, oracle: Oracle, prompt: Prompt, length: int) -> None:
    ids = prompt(length)
    (first,) = oracle.greedy(ids, 1)
    answer = pair.router.complete(ids, max_tokens=8, stop_token_ids=[first])
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([first], "stop")
    assert choice["stop_reason"] == first
    assert pair.at_d()("kvbaton_transfers_total", outcome="delivered") == 1


def test_end_of_text_as_the_first(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(20)
    answer = pair.router.complete(ids, max_tokens=8, ignore_eos=False, logit_bias={EOS: 100.0})
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([EOS], "stop")
    assert choice["text"] == ""


def test_stop_token_later(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(20)
    expected = oracle.greedy(ids, 9)
    stop = next(token for i, token in enumerate(expected) if i and token not in expected[:i])
    (choice,) = pair.router.complete(ids, max_tokens=9, stop_token_ids=[stop])["choices"]
    assert choice["token_ids"] == expected[: expected.index(stop) + 1]
    assert choice["finish_reason"] == "stop"


def test_several_choices(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(37)
    answer = tokens_of(pair.router.complete(ids, max_tokens=10, n=3, **SEEDED))
    alone = pair.p.generate(ids, max_tokens=10, n=3, **SEEDED)
    assert answer == [list(choice.token_ids) for choice in alone.choices]
    assert len({tuple(tokens) for tokens in answer}) == 3
    assert pair.at_d()("kvbaton_prompt_tokens_total", source="transferred") == 37


def test_logprobs(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(45)
    (choice,) = pair.generate(ids, max_tokens=6, logprobs=3).choices
    (alone,) = pair.p.generate(ids, max_tokens=6, logprobs=3).choices
    assert choice.logprobs is not None
    assert alone.logprobs is not None
    ours = [entry.logprob for entry in choice.logprobs]
    assert ours == pytest.approx(oracle.logprobs(ids, choice.token_ids), abs=1e-4)
    assert ours == pytest.approx([entry.logprob for entry in alone.logprobs], abs=1e-5)
    tops = [[candidate.token for candidate in entry.top] for entry in choice.logprobs]
    assert tops == [[candidate.token for candidate in entry.top] for entry in alone.logprobs]
    assert [top[0] for top in tops] == list(choice.token_ids)


def test_logprobs_through_the_router(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(45)
    (choice,) = pair.router.complete(ids, max_tokens=6, logprobs=2)["choices"]
    told = choice["logprobs"]["token_logprobs"]
    assert told == pytest.approx(oracle.logprobs(ids, choice["token_ids"]), abs=1e-4)


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's chi-square test; cells with fewer than 5 expected samples are merged."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    observed = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)]).double()
    some = expected > 0
    statistic = ((observed - expected)[some] ** 2 / expected[some]).sum()
    half_freedom = (some.sum().double() - 1) / 2
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


def test_samples_are_distributed_as_transformers_says(
    pair: Pair, oracle: Oracle, prompt: Prompt
) -> None:
    """Token 0 is sampled on P, token 1 on D; both must follow the warped probabilities."""
    warp: dict[str, Any] = {"temperature": 1.5, "top_k": 8, "top_p": 0.75}
    ids = prompt(20)
    futures = [pair.submit(ids, max_tokens=2, n=8, seed=seed, **warp) for seed in range(160)]
    counts = torch.zeros(384, 384)
    for future in futures:
        for choice in future.result().choices:
            counts[choice.token_ids] += 1
    first = oracle.warped(ids, **warp)
    joint = torch.zeros(384, 384)
    for token in first.nonzero().flatten().tolist():
        joint[token] = first[token] * oracle.warped([*ids, token], **warp)
    assert counts[joint == 0].sum() == 0, "sampled what can't be"
    assert p_value(counts.flatten(), joint.flatten()) > 1e-3
    assert p_value(counts.sum(1), first) > 1e-3
    for without in ({"temperature": 1.0}, {"top_k": 3}, {"top_p": 1.0}):
        wrong = oracle.warped(ids, **(warp | without))
        assert p_value(counts.sum(1), wrong) < 1e-4, f"the test can't tell {without}"
