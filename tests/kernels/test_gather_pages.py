from typing import Any

import pytest
import torch

from kvbaton.kernels.gather_pages import gather_pages


@pytest.mark.parametrize("block_size", [4, 12, 16])
@pytest.mark.parametrize(("start", "tokens", "valid"), [(0, 32, 32), (5, 40, 31), (8, 7, 20)])
def test_gathers_one_layer_of_a_sequence(
    place: Any, make_paged: Any, block_size: int, start: int, tokens: int, valid: int
) -> None:
    """What no sequence owns is NaN, past the valid tokens, too: it does not travel."""
    paged = make_paged([50, start + valid], 3, 24, block_size)
    table = paged.block_tables[1]
    keys, values = paged.views
    both = gather_pages(keys, values, table, start, tokens, valid)
    assert both.shape == (2, 3, tokens, 24)
    for view, found in zip(paged.views, both, strict=True):
        whole = view[table.long()].transpose(0, 1).flatten(1, 2)
        there = min(valid, tokens)
        assert torch.equal(found[:, :there], whole[:, start : start + there])
        assert (found[:, there:] == 0).all()


@pytest.mark.gpu
def test_pool_past_31_bits(place: Any) -> None:
    if place.device.type != "cuda" or place.dtype != torch.bfloat16:
        pytest.skip("needs a GPU")
    cache = torch.zeros(2300, 8, 32, 2, 16, 128, device="cuda", dtype=torch.bfloat16)
    cache[2200].normal_()
    keys, values = cache[:, :, 31].unbind(2)
    found = gather_pages(keys, values, torch.tensor([2200], device="cuda"), 0, 16, 16)
    assert torch.equal(found[0], keys[2200])
    assert torch.equal(found[1], values[2200])
