"""Structured errors with a single cause: a sum must not miss any, at any bit, in any dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.structured_errors import KINDS, Elements, structured_errors
from tests.support.digests import block_sums_reference

TOKENS, FEATURES = 16, 64
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def sums(x: Elements, first: int) -> Elements:
    """Sums of blocks [n, tokens, features], each by itself, of positions from `first` on."""
    rows = x.view(np.uint8).reshape(len(x), 1, 1, 1, TOKENS, -1)
    cache, blocks = torch.from_numpy(rows), torch.arange(len(x))
    end = first + len(x) * TOKENS
    return block_sums_reference(cache, blocks, first, first, end).numpy().ravel()


def missed(dtype: torch.dtype, count: int, seed: int) -> tuple[int, list[str]]:
    """Try every error on `count` fresh blocks.

    Returns:
        Trials, blocks that an error left as they were not counted; and the errors that passed.
    """
    generator = torch.Generator().manual_seed(seed)
    tried, passed = 0, []
    for number, error in enumerate(structured_errors(dtype, FEATURES)):
        values = torch.randn(count, TOKENS, FEATURES, generator=generator).to(dtype)
        x = values.view(torch.uint8).numpy().view(KINDS[dtype])
        first = number * count * TOKENS
        damaged = error.damage(x)
        changed = (damaged != x).any((1, 2))
        unseen = changed & (sums(x, first) == sums(damaged, first))
        tried += int(changed.sum())
        if unseen.any():
            passed.append(f"{error.name}: {unseen.sum()} of {changed.sum()}")
    return tried, passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_structured_error_passes(dtype: torch.dtype) -> None:
    tried, passed = missed(dtype, 8, seed=0)
    assert passed == []
    assert tried > 2000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_structured_error_passes_in_a_million_trials(dtype: torch.dtype) -> None:
    """More than 10^6 over the dtypes together."""
    count = 350 if dtype is torch.float32 else 600
    tried, passed = missed(dtype, count, seed=1)
    assert passed == []
    assert tried > 350_000
