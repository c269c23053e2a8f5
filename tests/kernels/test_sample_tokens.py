"""`sample_tokens` against its reference, and against the distribution that it claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbaton.kernels.sample_tokens import sample_tokens, sample_tokens_reference


@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (3, 384), (2, 2048), (5, 4099)])
def test_matches_the_reference(place: Any, rows: int, vocab: int) -> None:
    logits = place.randn(rows, vocab) * 3
    temperatures = torch.tensor([0.0, 0.7, 1.0, 2.5, 1.0])[:rows].double()
    seeds = torch.tensor([1, -5, 1 << 62, 0, 7])[:rows]
    positions = torch.tensor([0, 1, 9, (1 << 31) + 3, 17])[:rows]
    choices = torch.tensor([0, 0, 3, 1, 0])[:rows]
    arguments = [x.to(place.device) for x in (temperatures, seeds, positions, choices)]
    expected = sample_tokens_reference(logits, *arguments)
    assert sample_tokens(logits, *arguments).tolist() == expected.tolist()


def test_the_best_of_a_padded_row(place: Any) -> None:
    logits = torch.full((2, 2050), -torch.inf, device=place.device, dtype=place.dtype)
    logits[0, 2049] = -1e4
    logits[1, 3] = logits[1, 2048] = 1.0
    zero = torch.zeros(2, dtype=torch.int64, device=place.device)
    found = sample_tokens(logits, zero.double(), zero, zero, zero)
    assert found.tolist() == [2049, 3]
