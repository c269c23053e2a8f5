"""`sample_tokens` against its reference, and against the distribution that it claims."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine import sampler
from kvbaton.engine.sampler import SampleRows
from kvbaton.kernels.penalties import Penalties
from kvbaton.kernels.sample_tokens import Sampling, sample_tokens, sample_tokens_reference
from kvbaton.messages.engine import SamplingParams

KINDS = [
    SamplingParams(temperature=0.7, seed=3, top_p=0.8, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.4),
    SamplingParams(temperature=1.3, seed=(1 << 64) - 5, top_k=9, logit_bias={3: 5.0}),
    SamplingParams(temperature=2.0, seed=4, allowed_token_ids=tuple(range(40, 52))),
    SamplingParams(temperature=2.0, seed=4, min_p=0.1, frequency_penalty=0.3, min_tokens=99),
]


def sampling(
    rows: int, device: torch.device, penalties: Penalties | None = None, **told: Any
) -> Sampling:
    """Greedy and without penalties unless told otherwise."""
    plain: dict[str, Any] = {
        "temperatures": 0.0, "seeds": 0, "positions": 0, "choices": 0,
        "top_ks": 0, "top_ps": 1.0, "min_ps": 0.0,
    }  # fmt: skip
    kinds = {"temperatures": torch.float64, "top_ps": torch.float64, "min_ps": torch.float64}
    columns = {
        name: torch.as_tensor(told.get(name, value), dtype=kinds.get(name, torch.int64))
        for name, value in plain.items()
    }
    given = {name: x.expand(rows).contiguous().to(device) for name, x in columns.items()}
    if penalties is None:
        none, nothing = torch.zeros(rows, device=device).double(), given["positions"]
        counts = torch.zeros(0, 1, dtype=torch.int32, device=device)
        penalties = Penalties(none, none, none, nothing, nothing, nothing, counts, counts)
    return Sampling(**given, penalties=penalties)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (3, 384), (2, 2048), (5, 4099)])
def test_matches_the_reference(place: Any, rows: int, vocab: int) -> None:
    logits = place.randn(rows, vocab) * 3
    how = sampling(
        rows,
        place.device,
        temperatures=torch.tensor([0.0, 0.7, 1.0, 2.5, 1.0])[:rows],
        seeds=torch.tensor([1, -5, 1 << 62, 0, 7])[:rows],
        positions=torch.tensor([0, 1, 9, (1 << 31) + 3, 17])[:rows],
        choices=torch.tensor([0, 0, 3, 1, 0])[:rows],
    )
    assert sample_tokens(logits, how).tolist() == sample_tokens_reference(logits, how).tolist()


@pytest.mark.parametrize(
    "cut",
    [
        {"top_ks": 1}, {"top_ks": 7}, {"top_ks": 10_000}, {"top_ps": 0.9}, {"top_ps": 0.0},
        {"top_ps": 0.37}, {"min_ps": 0.05}, {"min_ps": 1.0}, {"top_ks": 20, "top_ps": 0.8},
        {"top_ks": 50, "top_ps": 0.95, "min_ps": 0.1}, {"top_ks": 3, "min_ps": 0.5},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("vocab", [300, 9001])
def test_of_the_likely_ones(place: Any, vocab: int, cut: dict[str, Any]) -> None:
    """Draws so even that each token which one of the two keeps alone would come soon."""
    on_gpu = place.device.type == "cuda"
    if vocab > 300 and not on_gpu and len(cut) < 3:
        pytest.skip("too slow to interpret")
    rows = 64 if on_gpu else 3
    logits = place.randn(1, vocab).expand(rows, vocab) * 2
    how = sampling(rows, place.device, temperatures=3.0, seeds=torch.arange(rows), **cut)
    found = sample_tokens(logits, how)
    assert found.tolist() == sample_tokens_reference(logits, how).tolist()
    if "top_ks" in cut:
        kept = (
            logits[0].float() >= logits[0].float().topk(min(cut["top_ks"], vocab)).values[-1]
        ).sum()
        assert len(set(found.tolist())) <= kept


@pytest.mark.parametrize("top_p", [0.01, 0.1, 0.4, 0.5, 0.55, 0.9, 0.999])
def test_of_equals_the_highest_ids_stay(place: Any, top_p: float) -> None:
    """So many that the set reaches its mass, as when they are sorted."""
    rows, vocab = 40 if place.device.type == "cuda" else 5, 400
    ladder = torch.tensor([2.0, 1.0, 0.5, -1.0], dtype=place.dtype).repeat(100)
    logits = ladder[torch.randperm(vocab, generator=torch.Generator().manual_seed(3))]
    logits = logits.to(place.device).expand(rows, vocab)
    how = sampling(rows, place.device, temperatures=2.0, seeds=torch.arange(rows), top_ps=top_p)
    assert sample_tokens(logits, how).tolist() == sample_tokens_reference(logits, how).tolist()


@pytest.mark.parametrize(
    "cut", [{"top_ks": 3}, {"top_ks": 6}, {"top_ps": 0.15}, {"top_ks": 5, "top_ps": 0.6}], ids=str
)
def test_likely_ones_of_which_a_program_holds_one(
    place: Any, cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best lie so that the best of every n-th id are fewer; and so that they are all."""
    monkeypatch.setattr("kvbaton.kernels.sample_tokens.SEARCHED", 128)
    rows, vocab = 24 if place.device.type == "cuda" else 6, 300
    logits = place.randn(1, vocab).repeat(rows, 1) / 4
    likely = torch.tensor([9.0, 8.5, 8.0, 7.5, 7.0], dtype=place.dtype, device=place.device)
    logits[::2, [5, 133, 261, 40, 168]] = likely
    logits[1::2, [5, 41, 200, 290, 77]] = likely
    how = sampling(rows, place.device, temperatures=3.0, seeds=torch.arange(rows), **cut)
    found = sample_tokens(logits, how).tolist()
    assert found == sample_tokens_reference(logits, how).tolist()
    if cut == {"top_ks": 3}:
        assert set(found[::2]) <= {5, 133, 261}
        assert set(found[1::2]) <= {5, 41, 200}


def test_rows_are_cut_each_for_itself(place: Any) -> None:
    rows, vocab = 6, 500
    logits = place.randn(rows, vocab)
    how = sampling(
        rows,
        place.device,
        temperatures=torch.tensor([0.0, 1.0, 5.0, 1.0, 5.0, 0.0]),
        seeds=torch.arange(rows),
        top_ks=torch.tensor([5, 0, 2, 0, 0, 0]),
        top_ps=torch.tensor([0.5, 1.0, 1.0, 0.2, 1.0, 1.0], dtype=torch.float64),
        min_ps=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.9, 0.3], dtype=torch.float64),
    )
    found = sample_tokens(logits, how)
    assert found.tolist() == sample_tokens_reference(logits, how).tolist()
    assert found[0] == logits[0].float().argmax()


@pytest.mark.parametrize(
    "cut", [{"temperatures": 0.0}, {"top_ks": 3}, {"top_ps": 0.5, "min_ps": 0.1}, {}], ids=str
)
def test_rows_without_a_finite_best_one_have_no_token(place: Any, cut: dict[str, Any]) -> None:
    logits = place.randn(5, 2500)
    logits[0], logits[2], logits[3, 2200] = math.nan, -math.inf, math.inf
    how = sampling(5, place.device, seeds=torch.arange(5), **{"temperatures": 0.8} | cut)
    found = sample_tokens(logits, how)
    assert found.tolist() == sample_tokens_reference(logits, how).tolist()
    assert (found < 0).tolist() == [True, False, True, True, False]


def test_the_lowest_of_equals() -> None:
    assert sample_tokens(torch.zeros(2, 50), sampling(2, torch.device("cpu"))).tolist() == [0, 0]


def test_the_best_of_a_padded_row(place: Any) -> None:
    logits = torch.full((2, 2050), -torch.inf, device=place.device, dtype=place.dtype)
    logits[0, 2049] = -1e4
    logits[1, 3] = logits[1, 2048] = 1.0
    assert sample_tokens(logits, sampling(2, place.device)).tolist() == [2049, 3]
    drawn = sampling(2, place.device, temperatures=1.0, top_ks=4, top_ps=0.9, min_ps=0.1)
    assert sample_tokens(logits, drawn).tolist() == sample_tokens_reference(logits, drawn).tolist()


def test_the_sampler_chooses_what_it_chooses_in_plain_torch(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kernel cuts and draws what penalties, masks and biases have left."""
    for trial in range(4):
        rng = torch.Generator().manual_seed(trial)
        logits = torch.randn(len(KINDS), 384, generator=rng) * 3
        tokens = torch.randint(384, (len(KINDS), 20), generator=rng, dtype=torch.int32)
        full = np.full(len(KINDS), 9 + trial)

        def chosen(device: torch.device) -> list[int]:
            rows = SampleRows(KINDS, full - 5, full, full * 0, tokens.to(device))  # noqa: B023
            found = sampler.sample(logits.to(device, copy=True), rows, (1, 2))  # noqa: B023
            return [int(token) for token in found]

        found = chosen(place.device)
        with monkeypatch.context() as plain:
            plain.setattr(sampler, "use_triton", lambda x: False)
            assert found == chosen(torch.device("cpu"))
