from typing import Any

import pytest
import torch

from kvbaton.kernels.quantize_fp8 import quantize_fp8, quantize_fp8_reference
from kvbaton.kernels.silu_and_mul import silu_and_mul_reference


@pytest.mark.parametrize(
    ("tokens", "size", "group"), [(1, 128, 128), (5, 96, 96), (3, 200, 64), (0, 64, 64)]
)
def test_matches_the_reference(place: Any, tokens: int, size: int, group: int) -> None:
    x = place.randn(tokens, size) * 3
    numbers, scales = quantize_fp8(x, group)
    wanted, wanted_scales = quantize_fp8_reference(x.cpu(), group)
    assert numbers.dtype == torch.float8_e4m3fn
    assert numbers.shape == x.shape
    torch.testing.assert_close(scales.cpu(), wanted_scales, atol=0, rtol=1e-6)
    # A scale's last bit may decide between two neighbours of e4m3.
    torch.testing.assert_close(numbers.cpu().float(), wanted.float(), atol=2**-9, rtol=0.125)


@pytest.mark.parametrize("group", [64, 128])
def test_every_number_is_within_a_step(place: Any, group: int) -> None:
    x = place.randn(4, 128)
    numbers, scales = quantize_fp8(x, group)
    wide = numbers.float() * scales.repeat_interleave(group, 1)
    assert (wide - x.float()).abs().max() <= x.abs().max() / 448 * 32


@pytest.mark.parametrize(
    ("tokens", "size", "group"), [(1, 128, 128), (5, 1408, 128), (3, 200, 200), (2, 17000, 17000)]
)
def test_of_a_gated_activation(place: Any, tokens: int, size: int, group: int) -> None:
    x = place.randn(tokens, 2 * size)
    numbers, scales = quantize_fp8(x, group, gated=True)
    wanted, wanted_scales = quantize_fp8_reference(silu_and_mul_reference(x.cpu()), group)
    torch.testing.assert_close(scales.cpu(), wanted_scales, atol=0, rtol=1e-2)
    torch.testing.assert_close(numbers.cpu().float(), wanted.float(), atol=2**-9, rtol=0.125)


@pytest.mark.parametrize("tokens", [1, 4, 6])
def test_for_blocks(place: Any, tokens: int) -> None:
    x = place.randn(tokens, 256)
    wanted, wanted_scales = quantize_fp8(x, 128)
    numbers, scales = quantize_fp8(x, 128, for_blocks=True)
    assert numbers.shape == (-(-tokens // 4) * 4, 256)
    assert scales.shape == (len(numbers), 2)
    assert scales.stride() == (1, len(numbers))
    assert torch.equal(numbers[:tokens].float(), wanted.float())
    assert torch.equal(scales[:tokens], wanted_scales)


def test_zeros_and_the_largest(place: Any) -> None:
    x = torch.zeros(2, 64)
    x[1, 7] = -3e4
    numbers, scales = quantize_fp8(x.to(place.device, place.dtype), 64)
    assert (numbers[0].float() == 0).all()
    assert float(numbers[1, 7]) == -448
    assert float(numbers[1, 7]) * float(scales[1, 0]) == pytest.approx(-3e4, rel=1e-2)
    assert (scales > 0).all()
