from typing import Any

import pytest
import torch

from kvbaton.kernels.block_scaled_linear import block_scaled_linear
from kvbaton.kernels.quantize_fp8 import quantize_fp8_reference


@pytest.mark.parametrize(
    ("rows", "size", "depth", "group"),
    [
        (1, 48, 128, 64),
        (17, 64, 160, 64),
        (33, 130, 256, 128),
        (130, 32, 96, 32),
        (0, 32, 64, 64),
    ],
)
def test_matches_fp64(place: Any, rows: int, size: int, depth: int, group: int) -> None:
    """Float32 sums of exact products: what differs is the order.

    But on Hopper: within a run its tensor cores add FP8 products with about 14 bits ("DeepSeek-V3
    Technical Report", arXiv 2412.19437, section 3.3.2).
    """
    x, x_scales = quantize_fp8_reference(torch.randn(rows, depth), group)
    weight, scales = quantize_fp8_reference(torch.randn(size, depth), group)
    scales = scales * torch.rand(size, 1)  # apart by row
    at = place.device
    found = block_scaled_linear(
        x.to(at), x_scales.to(at), weight.to(at), scales.to(at), group, place.dtype
    )
    assert found.shape == (rows, size)
    wide, heavy = (
        part.double() * of.double().repeat_interleave(group, 1)[:, :depth]
        for part, of in ((x, x_scales), (weight, scales))
    )
    expected = wide @ heavy.t()
    if place.device.type == "cuda" and place.dtype == torch.float32:
        assert (found.double().cpu() - expected).norm() <= 5e-4 * expected.norm()
    else:
        place.close(found, expected)
