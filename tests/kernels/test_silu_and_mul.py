from typing import Any

import pytest
import torch

from kvbaton.kernels.silu_and_mul import (
    gelu_and_mul,
    gelu_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
)

OPS = [(silu_and_mul, silu_and_mul_reference), (gelu_and_mul, gelu_and_mul_reference)]


@pytest.mark.parametrize(("op", "reference"), OPS, ids=["silu", "gelu"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 1500), (3, 1001), (0, 64)])
def test_matches_fp64(place: Any, tokens: int, size: int, op: Any, reference: Any) -> None:
    x = place.randn(tokens, 2 * size) * 4
    place.close(op(x), reference(x.cpu().double()))


@pytest.mark.parametrize(("op", "reference"), OPS, ids=["silu", "gelu"])
def test_large_values(place: Any, op: Any, reference: Any) -> None:
    x = torch.tensor([[-1e4, 1e4, 2.0, 3.0]]).to(place.device, place.dtype)
    place.close(op(x), reference(x.cpu().double()))
