from typing import Any

import pytest
import torch

from kvbaton.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference


@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 1500), (3, 1001), (0, 64)])
def test_matches_fp64(place: Any, tokens: int, size: int) -> None:
    x = place.randn(tokens, 2 * size) * 4
    place.close(silu_and_mul(x), silu_and_mul_reference(x.cpu().double()))


def test_large_values(place: Any) -> None:
    x = torch.tensor([[-1e4, 1e4, 2.0, 3.0]]).to(place.device, place.dtype)
    place.close(silu_and_mul(x), silu_and_mul_reference(x.cpu().double()))
