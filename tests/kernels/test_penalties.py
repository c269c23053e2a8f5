"""Penalties within `sample_tokens`, against plain torch and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbaton.kernels.penalties import Penalties, penalize
from kvbaton.kernels.sample_tokens import sample_tokens, sample_tokens_reference
from tests.kernels.test_sample_tokens import sampling

KINDS = [  # repetition, presence, frequency
    (1.3, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 0.75), (0.8, -0.5, 0.25),
    (1.05, 1.5, -0.3),
]  # fmt: skip


def penalties(
    device: torch.device, vocab: int, lengths: list[int], kinds: list[tuple[float, float, float]]
) -> Penalties:
    """Of rows that hold one of few tokens at each place, half of it prompt; rubbish behind that."""
    rows, longest = len(lengths), max(lengths) + 7
    tokens = torch.randint(vocab, (rows + 2, 40)).repeat(1, longest // 40 + 1)[:, :longest]
    tokens[:, ::3] = torch.randint(vocab, tokens[:, ::3].shape)
    of = torch.randperm(rows + 2)[:rows]
    for row, length in zip(of, lengths, strict=True):
        tokens[row, length:] = -5
    long = torch.tensor(lengths)
    told = torch.tensor(kinds, dtype=torch.float64).unbind(1)
    counts = torch.zeros(rows, vocab)
    columns = (*told, long // 2, long, of, tokens.int(), counts.int())
    return Penalties(*(x.contiguous().to(device) for x in columns))


def expected(logits: torch.Tensor, how: Penalties) -> torch.Tensor:
    """Token by token, in fp64."""
    found = logits.double().cpu()
    for row, (repetition, presence, frequency) in enumerate(zip(*how[:3], strict=True)):
        known = how.tokens[how.of[row], : how.lengths[row]].tolist()
        for token in set(known) if repetition else ():
            times = known[int(how.num_prompt[row]) :].count(token)
            value = float(found[row, token])
            value = value / float(repetition) if value > 0 else value * float(repetition)
            found[row, token] = value - times * float(frequency) - (times > 0) * float(presence)
    return found


def test_penalize_by_hand() -> None:
    torch.manual_seed(0)
    how = penalties(torch.device("cpu"), 64, [30, 17, 2, 1, 90], [KINDS[0], *KINDS[2:]])
    logits = torch.randn(5, 64) * 3
    found = logits.clone()
    penalize(found, how)
    torch.testing.assert_close(found.double(), expected(logits, how), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "cut",
    [
        {}, {"temperatures": 0.0}, {"top_ks": 7}, {"top_ps": 0.6}, {"min_ps": 0.2},
        {"top_ks": 20, "top_ps": 0.8},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("vocab", [300, 8500])
def test_matches_the_reference(place: Any, vocab: int, cut: dict[str, Any]) -> None:
    """Each row with its own penalties, or with none; also where a program counts twice."""
    on_gpu = place.device.type == "cuda"
    if not on_gpu and (cut.keys() in ({"top_ks"}, {"min_ps"}) or (vocab > 300 and len(cut) < 2)):
        pytest.skip("too slow to interpret")
    lengths = [290, 40, 9000 if on_gpu else 20, 33, 1, 120]
    kinds = KINDS * (10 if on_gpu else 1)
    rows = len(kinds)
    how = penalties(place.device, vocab, lengths * (rows // 6), kinds)
    logits = place.randn(rows, vocab) * 2
    told = {"temperatures": 2.0, "seeds": torch.arange(rows), "positions": how.lengths.cpu()}
    full = sampling(rows, place.device, how, **told | cut)
    before = logits.clone()
    found = sample_tokens(logits, full)
    assert found.tolist() == sample_tokens_reference(logits, full).tolist()
    assert torch.equal(logits, before)
    assert not how.counts.any(), "the next step counts from zero"
    assert sample_tokens(logits, full).tolist() == found.tolist()


def test_greedy_takes_the_best_that_penalties_leave(place: Any) -> None:
    vocab = 700
    how = penalties(place.device, vocab, [600, 44, 150, 90, 5, 380], KINDS)
    logits = place.randn(len(KINDS), vocab) / 3
    generated = how.tokens[how.of[2], how.lengths[2] - 1].long()
    logits[2, generated] = logits[2].max() + 0.1  # of presence 0.5
    found = sample_tokens(logits, sampling(len(KINDS), place.device, how))
    assert found.tolist() == expected(logits, how).argmax(1).tolist()
    assert int(found[2]) != int(logits[2].argmax()) == int(generated)


@pytest.mark.parametrize("cut", [{"top_ks": 3}, {"top_ps": 0.5}, {"top_ks": 9, "top_ps": 0.7}])
def test_penalties_that_differ_in_the_last_bits(place: Any, cut: dict[str, Any]) -> None:
    """Equal logits that a token's count alone tells apart, by less than 16 bits can say."""
    vocab, rows, times = 64, 32 if place.device.type == "cuda" else 5, 8
    logits = torch.zeros(rows, vocab, dtype=place.dtype, device=place.device)
    logits[:, :times] = 5.0
    tokens = torch.arange(times).repeat_interleave(torch.arange(times)).int()
    none = torch.zeros(rows, dtype=torch.int64)
    columns = (
        torch.ones(rows).double(), none.double(), torch.full((rows,), 2.0**-10).double(),
        none, none + len(tokens), none, tokens[None], torch.zeros(rows, vocab).int(),
    )  # fmt: skip
    how = Penalties(*(x.to(place.device) for x in columns))
    full = sampling(rows, place.device, how, temperatures=1.0, seeds=torch.arange(rows), **cut)
    found = sample_tokens(logits, full)
    assert found.tolist() == sample_tokens_reference(logits, full).tolist()
    kept = {"top_ks": 3, "top_ps": times // 2 + 1}[next(iter(cut))] if len(cut) == 1 else 7
    assert set(found.tolist()) <= set(range(kept))
    assert len(set(found.tolist())) > 1


def test_rows_without_penalties_leave_the_counts_alone(place: Any) -> None:
    how = penalties(place.device, 300, [50, 60], [(0.0, 0.0, 0.0)] * 2)
    how = how._replace(counts=torch.full_like(how.counts, 77))
    logits = place.randn(2, 300)
    found = sample_tokens(logits, sampling(2, place.device, how, temperatures=1.0, top_ks=9))
    bare = sampling(2, place.device, temperatures=1.0, top_ks=9)
    assert found.tolist() == sample_tokens(logits, bare).tolist()
    assert (how.counts == 77).all()
