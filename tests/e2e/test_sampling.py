"""Every sampling feature gives through P and D what it gives on one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbaton.text.tokenizer import Tokenizer
from tests.support.oracle import Oracle
from tests.support.served_pair import POOL, Pair
from tests.support.servers import completion

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]
EOS = 1
NOISE: dict[str, Any] = {"temperature": 0.9, "seed": 11}
ENDS: dict[str, Any] = {"ignore_eos": False, "logit_bias": {str(EOS): 100.0}}

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7, "seed": 5},
    "top_p": NOISE | {"top_p": 0.8},
    "top_k": NOISE | {"top_k": 5},
    "min_p": NOISE | {"min_p": 0.1},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.9},
    "repetition": {"repetition_penalty": 1.7},
    "all penalties": NOISE
    | {"presence_penalty": -1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "logit bias": {"logit_bias": {"7": 100.0, "9": -100.0}},
    "allowed": NOISE | {"allowed_token_ids": list(range(20, 90, 3)), "logprobs": 2},
    "bad words": NOISE | {"bad_words": ["a", "e", "the", "in"], "logprobs": 2},
    "n": NOISE | {"n": 3},
    "n greedy": {"n": 2},
    "min tokens": ENDS | {"min_tokens": 3},
    "end as token 0": ENDS,
    "min tokens 1": ENDS | {"min_tokens": 1},
    "stop token ids": {"stop_token_ids": list(range(3, 200))},
    "stop token in the text": {
        "stop_token_ids": list(range(3, 200)),
        "include_stop_str_in_output": True,
    },
    "logprobs": NOISE | {"logprobs": 20},
    "logprobs 0": {"logprobs": 0},
    "logprobs of penalties": {
        "logprobs": 3,
        "presence_penalty": 1.0,
        "temperature": 0.5,
        "seed": 2,
    },
    "prompt logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True, "logprobs": 1},
    "echo alone": {"echo": True, "max_tokens": 0, "logprobs": 2},
    "n with logprobs": NOISE | {"n": 2, "logprobs": 2, "prompt_logprobs": 0},
    "special tokens": {"logit_bias": {"2": 100.0}, "skip_special_tokens": False},
    "priority": {"priority": -3},
    "max tokens 1": {"max_tokens": 1, "logprobs": 1},
}


def difference(left: Any, right: Any, where: str = "") -> str | None:
    """Where two answers differ first; the last digits of floats do not count."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        parts = [(left[key], right[key], f"{where}.{key}") for key in left]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        parts = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(left, right, strict=True))]
    elif isinstance(left, float) and left == pytest.approx(right, abs=1e-4):
        return None
    else:
        return None if left == right else f"{where}: {left!r} is not {right!r}"
    return next((found for part in parts if (found := difference(*part))), None)


def check(pair: Pair, ids: list[int], **fields: Any) -> Any:
    """Choices through the router, once they are those of P alone."""
    body = completion(ids, **{"max_tokens": 7, **fields})
    ours = pair.router.post("/v1/completions", body)["choices"]
    alone = pair.p.post("/v1/completions", body)["choices"]
    assert difference(ours, alone) is None
    return ours


@pytest.mark.parametrize("case", CASES)
def test_equals_one_node(pair: Pair, prompt: Prompt, case: str) -> None:
    check(pair, prompt(37), **CASES[case])


def test_penalties_and_noise_matter(pair: Pair, prompt: Prompt) -> None:
    """The cases above would mean little if they all said the same."""
    ids = prompt(37)
    plain = check(pair, ids, max_tokens=24)[0]["token_ids"]
    for name in ("temperature", "frequency", "repetition", "logit bias"):
        (choice,) = check(pair, ids, **CASES[name] | {"max_tokens": 24})
        assert choice["token_ids"] != plain, name


def test_stop_strings(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(37)
    text = check(pair, ids, max_tokens=12)[0]["text"]
    for stop in (text[0], text[3:5], [text[-2:], "never said"]):
        (choice,) = check(pair, ids, max_tokens=12, stop=stop)
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] in stop
        assert choice["text"] == text[: text.index(choice["stop_reason"])]
        check(pair, ids, max_tokens=12, stop=stop, include_stop_str_in_output=True)
        check(pair, ids, max_tokens=12, stop=stop, min_tokens=6)
    pair.moves = "some"  # a stop in token 0's text ends the request before all has moved


def test_allowed_tokens_and_bad_words(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    """Greedy tokens with both, from the first one on, are those of a plain loop."""
    ids, tokenizer = prompt(37), Tokenizer.load(pair.model)
    plain = pair.generate(ids, max_tokens=7).choices[0].token_ids
    words = [tokenizer.token_text(token) for token in plain]
    words = ["the", *(word for word in words if word.strip())]
    bad = [
        tokenizer.encode(s + w.lstrip(), add_special_tokens=False) for w in words for s in ("", " ")
    ]
    assert any(word == [plain[0]] for word in bad), "nothing is forbidden at token 0"
    allowed = list(range(3, 380, 2))
    for fields in ({"bad_words": words}, {"allowed_token_ids": allowed, "bad_words": words}):
        known = list(ids)
        for _ in range(7):
            logits, said = oracle.logits(known).clone(), known[len(ids) :]
            for word in bad:
                before = len(said) - len(word) + 1
                if before >= 0 and said[before:] == word[:-1]:
                    logits[word[-1]] = -1e9
            if "allowed_token_ids" in fields:
                logits[[t for t in range(len(logits)) if t not in allowed]] = -1e10
            known.append(int(logits.argmax()))
        (choice,) = check(pair, ids, **fields, return_token_ids=True)
        assert choice["token_ids"] == known[len(ids) :]


def test_the_last_token_of_a_bad_word_is_forbidden(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(37)
    plain = pair.generate(ids, max_tokens=7).choices[0].token_ids
    for first, end in ((0, 2), (2, 5)):  # across the hand-over, and behind it
        words = [plain[first:end], [*ids[-2:], plain[0]]]
        found = pair.generate(ids, max_tokens=7, bad_words_token_ids=words).choices[0].token_ids
        assert found[: end - 1] == plain[: end - 1]
        assert found[end - 1] != plain[end - 1]


def test_top_20_logprobs_equal_transformers(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(37)
    (choice,) = pair.generate(ids, max_tokens=7, logprobs=20).choices
    assert choice.logprobs is not None
    known = list(ids)
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        likeliest = oracle.logits(known).log_softmax(-1).topk(20)
        assert [rival.token for rival in entry.top] == likeliest.indices.tolist()
        told = [rival.logprob for rival in entry.top]
        assert told == pytest.approx(likeliest.values.tolist(), abs=1e-4)
        known.append(token)


def test_prompt_logprobs_equal_transformers(pair: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(37)
    (choice,) = check(pair, ids, prompt_logprobs=1)
    first, *told = choice["prompt_logprobs"]
    assert first is None
    ours = [entry[str(token)]["logprob"] for entry, token in zip(told, ids[1:], strict=True)]
    assert ours == pytest.approx(oracle.logprobs(ids[:1], ids[1:]), abs=1e-4)


def test_many_kinds_at_once(pair: Pair, prompt: Prompt) -> None:
    """One batch of unlike requests on D: no parameter may leak from one to another."""
    work = [(prompt(5 + 7 * i % 50), fields) for i, fields in enumerate(CASES.values())]
    sent = [POOL.submit(check, pair, ids, **fields) for ids, fields in work]
    for future in sent:
        future.result()
