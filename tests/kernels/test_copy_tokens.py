from typing import Any

import pytest
import torch

from kvbaton.kernels.copy_tokens import copy_tokens


def pool(
    place: Any, blocks: int, heads: int, block_size: int, head_dim: int = 24, layers: int = 2
) -> torch.Tensor:
    cache: torch.Tensor = place.randn(blocks, heads, layers, 2, block_size, head_dim)
    return cache


def tokens_of(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[blocks * block_size, heads, layers, 2, D]"""
    return cache[blocks.long()].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)


@pytest.mark.parametrize("sizes", [(16, 16), (4, 16), (16, 4), (8, 12)])
@pytest.mark.parametrize(("start", "other", "count", "valid"), [(0, 0, 32, 32), (5, 3, 40, 31)])
def test_token_range(
    place: Any, sizes: tuple[int, int], start: int, other: int, count: int, valid: int
) -> None:
    source, target = pool(place, 20, 3, sizes[0]), pool(place, 20, 3, sizes[1])
    source_blocks, target_blocks = (torch.randperm(20).to(place.device) for _ in range(2))
    expected = tokens_of(target, target_blocks)
    expected[other : other + count] = 0
    copied = tokens_of(source, source_blocks)[start : start + valid]
    expected[other : other + valid] = copied
    copy_tokens(
        source, target, source_blocks.int(), target_blocks, count,
        source_start=start, target_start=other, num_valid=valid,
    )  # fmt: skip
    assert torch.equal(tokens_of(target, target_blocks), expected)


def test_head_range(place: Any) -> None:
    source, target = pool(place, 6, 4, 8), pool(place, 6, 2, 8)
    kept = target.clone()
    source_blocks, target_blocks = (torch.randperm(6)[:2].to(place.device) for _ in range(2))
    copy_tokens(
        source, target, source_blocks, target_blocks, 16, source_head=2, target_head=1, num_heads=1
    )
    assert torch.equal(target[target_blocks, 1], source[source_blocks, 2])
    kept[target_blocks, 1] = source[source_blocks, 2]
    assert torch.equal(target, kept)


def test_layer_into_a_contiguous_buffer(place: Any) -> None:
    source = pool(place, 6, 2, 8, layers=3)
    buffer = torch.empty(1, 2, 1, 2, 21, 24, device=place.device, dtype=place.dtype)
    blocks = torch.tensor([4, 1, 5], device=place.device)
    copy_tokens(source[:, :, 1:2], buffer, blocks, torch.zeros_like(blocks), 21)
    expected = tokens_of(source[:, :, 1:2], blocks)[:21]
    assert torch.equal(tokens_of(buffer, torch.zeros(1)), expected)


def test_nan_past_the_valid_tokens_does_not_travel(place: Any) -> None:
    source, target = pool(place, 2, 1, 8), pool(place, 2, 1, 8)
    source[1, :, :, :, 3:] = torch.nan
    one = torch.ones(1, dtype=torch.int32, device=place.device)
    copy_tokens(source, target, one, one, 8, num_valid=3)
    assert torch.equal(target[1, :, :, :, :3], source[1, :, :, :, :3])
    assert (target[1, :, :, :, 3:] == 0).all()


@pytest.mark.gpu
def test_pool_past_31_bits(place: Any) -> None:
    if place.device.type != "cuda" or place.dtype != torch.bfloat16:
        pytest.skip("needs a GPU")
    cache = torch.zeros(2300, 8, 32, 2, 16, 128, device="cuda", dtype=torch.bfloat16)
    cache[2200].normal_()
    ids = torch.tensor([[2200], [2299]], device="cuda")
    copy_tokens(cache[:2250], cache[50:], ids[0], ids[1] - 50, 16)
    assert torch.equal(cache[2299], cache[2200])
