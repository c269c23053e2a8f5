"""The sampler against transformers' processors, brute force and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvbaton.engine.grammars import mask_of
from kvbaton.engine.sampler import (
    GREEDY_BELOW,
    SampleRows,
    logprobs_of,
    process_logits,
    sample,
    sampling_of,
)
from kvbaton.engine.validate import RANGES
from kvbaton.kernels import sample_tokens as kernel
from kvbaton.messages.engine import SamplingParams

VOCAB = 120
PROMPT = [5, 6, 7, 5]
GENERATED = [6, 9, 9, 9, 11]


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def rows_of(
    params: Sequence[SamplingParams], *, choices: Sequence[int] | None = None
) -> SampleRows:
    """Every row has the same tokens, and rubbish behind them."""
    known = [*PROMPT, *GENERATED, 99, 99]
    return SampleRows(
        params,
        np.full(len(params), len(PROMPT)),
        np.full(len(params), len(PROMPT) + len(GENERATED)),
        np.array(choices or [0] * len(params)),
        torch.tensor([known] * len(params), dtype=torch.int32),
    )


def processed(logits: Tensor, *params: SamplingParams, eos: tuple[int, ...] = ()) -> Tensor:
    """What noise is added to, to choose the best."""
    rows, out, found = rows_of(params), logits.clone(), list[Tensor]()
    process_logits(out, rows, eos)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "gumbel_noise", lambda *_: torch.zeros(()))
        patch.setattr(kernel, "best_tokens", found.append)
        kernel.sample_tokens_reference(out, sampling_of(rows, out, np.arange(len(params))))
    (chosen_from,) = found
    return chosen_from


def warped(logits: Any, params: SamplingParams) -> Tensor:
    """What transformers makes of logits."""
    chain: Any = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    out: Tensor = chain(torch.zeros((len(logits), 1), dtype=torch.long), logits.clone())
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 17},
        {"top_k": VOCAB + 5},
        {"top_p": 0.9},
        {"top_p": 0.01},
        {"top_p": 1e-9},
        {"min_p": 0.05},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.5, "top_k": 3, "top_p": 0.5},
    ],
)
def test_truncation_equals_that_of_transformers(settings: dict[str, Any]) -> None:
    logits, params = random_logits(8), SamplingParams(**settings)
    found = processed(logits, *[params] * 8)
    torch.testing.assert_close(found, warped(logits, params), atol=1e-4, rtol=0)


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits = random_logits(2)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([PROMPT + GENERATED] * 2), logits.clone()
    )
    params = SamplingParams(repetition_penalty=1.3)
    torch.testing.assert_close(processed(logits, params, params), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, GREEDY_BELOW, 2.0])
@pytest.mark.parametrize("end", ["low", "high"])
def test_the_least_and_the_greatest_penalty_choose_what_they_should(
    end: str, temperature: float
) -> None:
    """However large the logits are, nothing overflows, and what is forbidden stays so."""
    params = SamplingParams(
        repetition_penalty=getattr(RANGES["repetition_penalty"], end),
        temperature=temperature,
        seed=1,
        min_tokens=len(GENERATED) + 1,
        bad_words_token_ids=((9,),),
    )
    logits = torch.full((1, VOCAB), -1e5)
    logits[0, [5, 6, 9]] = torch.tensor([1e5, 9e4, 1e5])
    if end == "high":
        logits[0, 20] = 5e4
    chosen = sample(logits, rows_of([params]), (5,))
    assert chosen.tolist() == [6 if end == "low" else 20]


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = random_logits(1)
    expected = logits.clone()
    for token, count in ((6, 1), (9, 3), (11, 1)):
        expected[0, token] -= 0.25 + 0.5 * count
    params = SamplingParams(presence_penalty=0.25, frequency_penalty=0.5)
    torch.testing.assert_close(processed(logits, params), expected)


def test_logit_bias_is_added_first() -> None:
    logits = torch.zeros((1, VOCAB))
    params = SamplingParams(logit_bias={6: 2.0, 3: -1.0, VOCAB + 7: 9.0}, repetition_penalty=2.0)
    found = processed(logits, params)
    assert found[0, 6] == 1.0
    assert found[0, 3] == -1.0


@pytest.mark.parametrize(
    ("settings", "forbidden"),
    [
        ({"min_tokens": len(GENERATED)}, set()),
        ({"min_tokens": len(GENERATED) + 1}, {1, 2, 40}),
        ({"min_tokens": len(GENERATED) + 1, "ignore_eos": True}, {40}),
    ],
)
def test_no_stop_before_min_tokens(settings: dict[str, Any], forbidden: set[int]) -> None:
    params = SamplingParams(stop_token_ids=(40,), **settings)
    found = processed(random_logits(1), params, eos=(1, 2))
    assert set(torch.where(found[0] < -1e20)[0].tolist()) == forbidden


def test_only_allowed_tokens_are_possible() -> None:
    logits = random_logits(3)
    found = processed(
        logits, SamplingParams(allowed_token_ids=(0, 7, 119, 7)), SamplingParams(),
        SamplingParams(allowed_token_ids=(9,)),
    )  # fmt: skip
    for row, allowed in enumerate(({0, 7, 119}, set(range(VOCAB)), {9})):
        assert set(torch.where(found[row].isfinite())[0].tolist()) == allowed
        kept = sorted(allowed)
        assert torch.equal(found[row, kept], logits[row, kept])


def test_allowed_tokens_are_looked_at_once() -> None:
    class Ids(tuple[int, ...]):
        looks = 0

        def __iter__(self) -> Iterator[int]:
            Ids.looks += 1
            return super().__iter__()

        def __hash__(self) -> int:
            raise AssertionError("of a whole vocabulary this takes long, at each step")

    params = SamplingParams(allowed_token_ids=Ids((3, 4)))
    assert mask_of(params, VOCAB) is mask_of(params, VOCAB)
    assert (Ids.looks, len(mask_of(params, 64))) == (1, 8)
    assert msgspec.msgpack.encode(params) == msgspec.msgpack.encode(
        SamplingParams(allowed_token_ids=(3, 4))
    )


BAD_WORDS = ((9, 11, 40), (11, 41), (9, 11), (42,), (9, 9, 9, 11, 42), (6, 9, 11, 43), (7, 5, 6, 9))
"""What 6, 9, 9, 9, 11 forbids: 40, 41, 42; not 43."""


def test_bad_words_are_those_of_transformers_among_generated_tokens() -> None:
    logits = random_logits(3)
    reference = NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS], eos_token_id=1)
    expected = reference(torch.tensor([GENERATED]), logits[:1].clone())
    other = SamplingParams(bad_words_token_ids=((5, 6, 9, 9, 9, 11, 50), (11, 60)))
    bad = SamplingParams(bad_words_token_ids=BAD_WORDS)
    found = processed(logits, bad, other, SamplingParams())
    found[found < -1e20] = -float("inf")
    assert torch.equal(found[:1], expected)
    assert torch.where(found[1].isinf())[0].tolist() == [60]  # the prompt was not generated
    assert torch.equal(found[2], logits[2])


def test_bad_words_and_stops_give_way_where_nothing_else_is_allowed() -> None:
    params = SamplingParams(
        allowed_token_ids=(3, 4), bad_words_token_ids=((3,), (11, 4)), temperature=0.1, seed=1
    )
    early = SamplingParams(allowed_token_ids=(2,), min_tokens=90, seed=1)
    tokens = sample(random_logits(2), rows_of([params, early]), (1, 2)).tolist()
    assert tokens[0] in (3, 4)
    assert tokens[1] == 2


def test_each_row_is_processed_as_if_it_were_alone() -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.6, "temperature": 0.3},
        {"min_p": 0.2, "presence_penalty": 1.0},
        {"repetition_penalty": 1.5, "logit_bias": {4: 5.0}},
        {"frequency_penalty": -0.5, "min_tokens": 90},
        {},
    ]
    params = [SamplingParams(seed=7 * n, **entry) for n, entry in enumerate(settings)]
    logits = random_logits(len(params))
    together = processed(logits, *params, eos=(1, 2))
    tokens = sample(logits.clone(), rows_of(params), (1, 2))
    for row, param in enumerate(params):
        alone = processed(logits[row : row + 1], param, eos=(1, 2))
        assert torch.equal(together[row], alone[0])
        assert sample(logits[row : row + 1].clone(), rows_of([param]), (1, 2)) == tokens[row]


def test_greedy_takes_the_best_of_the_processed_logits() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    assert sample(logits.clone(), rows_of([SamplingParams(temperature=0.0)]), ()) == best
    params = SamplingParams(temperature=0.0, logit_bias={best: -100.0})
    assert sample(logits.clone(), rows_of([params]), ()) == logits[0].topk(2).indices[1]


def test_noise_follows_seed_choice_and_position_only() -> None:
    logits = random_logits(1).expand(4, -1) * 0.1
    params = [SamplingParams(seed=seed) for seed in (3, 3, 4, 3 + (1 << 64))]
    tokens = sample(logits.clone(), rows_of(params, choices=[0, 1, 0, 0]), ()).tolist()
    assert tokens[0] == tokens[3]
    assert tokens[0] != tokens[1]
    assert tokens[0] != tokens[2]


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 1.5, "top_k": 8}, {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01}],
)
def test_draws_follow_the_distribution_of_transformers(settings: dict[str, Any]) -> None:
    draws, vocab = 20_000, 24
    logits = random_logits(1, seed=1, vocab=vocab) / 2
    params = SamplingParams(seed=11, **settings)
    rows = SampleRows(
        [params] * draws,
        np.ones(draws, np.int64),
        np.arange(1, draws + 1),
        np.zeros(draws, np.int64),
        None,
    )
    tokens = sample(logits.expand(draws, -1).clone(), rows, ())
    counts = torch.bincount(tokens, minlength=vocab).double()
    expected = warped(logits, params)[0].double().softmax(-1) * draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


def test_logprobs_rank_and_candidates() -> None:
    logprobs = random_logits(3).log_softmax(-1)
    tokens = torch.tensor([0, int(logprobs[1].argmax()), 50])
    messages = logprobs_of(logprobs, tokens, 4).messages([4, 0, 2])
    for row, (message, count) in enumerate(zip(messages, (4, 0, 2), strict=True)):
        order = logprobs[row].argsort(descending=True).tolist()
        assert message.logprob == pytest.approx(float(logprobs[row, tokens[row]]))
        assert message.rank == order.index(int(tokens[row])) + 1
        assert [top.token for top in message.top] == order[:count]
        assert [top.rank for top in message.top] == list(range(1, count + 1))
    assert messages[1].rank == 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(messages))
