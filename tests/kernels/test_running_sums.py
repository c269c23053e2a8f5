"""Running sums against sums that are computed from whole blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbaton.kernels.digest import add_sums, start_sums
from tests.support.digests import block_sums_reference


@pytest.mark.parametrize(("heads", "size", "dim"), [(1, 4, 16), (3, 16, 24), (2, 5, 16)])
def test_tokens_add_up_to_their_blocks(place: Any, heads: int, size: int, dim: int) -> None:
    cache = place.randn(6, heads, 2, 2, size, dim)
    sums = torch.full((6, 2, 2, heads), 77, dtype=torch.int64, device=place.device)
    blocks, length = torch.tensor([4, 1, 5]), 2 * size + 3
    positions = torch.arange(length)
    slots = blocks[positions // size] * size + positions % size
    slots[(positions > size) & (positions % size % 2 == 1)] = -1  # padding
    counted = slots >= 0
    where, which = slots.to(place.device), positions.to(place.device)
    start_sums(sums, where, size)
    add_sums(sums, cache, where, which)
    reference = cache.cpu()
    expected = torch.zeros(3, 2, 2, heads, dtype=torch.int64)
    for position in positions[counted].tolist():
        expected += block_sums_reference(reference, blocks, 0, position, position + 1)
    assert torch.equal(sums[blocks.to(place.device)].cpu(), expected)
    assert (sums[[0, 2, 3]] == 77).all()
    add_sums(sums, cache, where, which, -1)
    assert (sums[blocks.to(place.device)] == 0).all()
