from typing import Any

import pytest
import torch

from kvbaton.kernels.fp8_skinny_linear import _splits, fits, fp8_skinny_linear
from kvbaton.kernels.quantize_fp8 import quantize_fp8_reference
from kvbaton.kernels.skinny_linear import Workspace


@pytest.mark.parametrize("by_run", [False, True], ids=["rows", "runs"])
@pytest.mark.parametrize(
    ("rows", "size", "depth", "splits"),
    [(1, 64, 128, 1), (5, 128, 384, 1), (17, 64, 2048, 2), (32, 128, 8192, 8), (2, 192, 3200, 1)],
)
def test_is_near_the_product_of_floats(
    place: Any, rows: int, size: int, depth: int, splits: int, by_run: bool
) -> None:
    """Within what rounding activations to e4m3 (3 bits) costs; the interpreter does not round."""
    weight, scales = quantize_fp8_reference(torch.randn(size, depth), 128 if by_run else depth)
    scales = scales * torch.rand(size, 1)
    assert fits(rows, weight, scales)
    assert _splits(size, depth) == splits
    x = torch.randn(rows, depth) * torch.logspace(-2, 2, rows)[:, None]
    x = x.to(torch.bfloat16 if place.dtype == torch.bfloat16 else torch.float16)
    at = place.device
    workspace = Workspace(at)
    for _ in range(2):  # the first one leaves the counters as it found them
        found = fp8_skinny_linear(x.to(at), weight.to(at), scales.to(at), workspace)
    assert found.dtype == x.dtype
    wide = weight.double() * scales.double().repeat_interleave(128 if by_run else depth, 1)
    expected = x.double() @ wide.t()
    error = (found.double().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < (0.04 if at.type == "cuda" else 2e-3)


def test_rows_that_lie_apart(place: Any) -> None:
    weight, scales = quantize_fp8_reference(torch.randn(64, 128), 128)
    x = torch.randn(3, 384).half().to(place.device)
    factors = weight.to(place.device), scales.to(place.device)
    found = fp8_skinny_linear(x[:, 128:256], *factors)
    assert torch.equal(found, fp8_skinny_linear(x[:, 128:256].contiguous(), *factors))


def test_what_it_is_for() -> None:
    weight = torch.empty(64, 256)
    assert fits(32, weight, torch.empty(64, 2))
    assert not fits(33, weight, torch.empty(64, 2))
    assert not fits(0, weight, torch.empty(64, 2))
    assert not fits(1, weight, torch.empty(64, 4))
    assert not fits(1, torch.empty(32, 256), torch.empty(32, 1))
    assert not fits(1, torch.empty(64, 160), torch.empty(64, 1))
