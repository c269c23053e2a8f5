from typing import Any

import pytest
import torch

from kvbaton.kernels.rms_norm import rms_norm, rms_norm_reference


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 4096), (3, 1000), (0, 64)])
def test_matches_fp64(place: Any, tokens: int, size: int, offset: float) -> None:
    x, weight = place.randn(tokens, size), place.randn(size)
    expected = rms_norm_reference(
        x.cpu().double(), weight.cpu().double(), 1e-5, weight_offset=offset
    )
    place.close(rms_norm(x, weight, 1e-5, weight_offset=offset), expected)


@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (7, 1000)])
def test_adds_to_the_residual_in_place(place: Any, tokens: int, size: int) -> None:
    x, residual, weight = place.randn(tokens, size), place.randn(tokens, size), place.randn(size)
    kept, wide = x.clone(), residual.cpu().double()
    expected = rms_norm_reference(x.cpu().double(), weight.cpu().double(), 1e-5, residual=wide)
    place.close(rms_norm(x, weight, 1e-5, residual=residual), expected)
    place.close(residual, wide)
    assert torch.equal(x, kept)


def test_heads_of_a_fused_projection(place: Any) -> None:
    fused, weight = place.randn(5, 8 * 64), place.randn(64)
    heads = fused[:, 64 : 4 * 64].unflatten(1, (3, 64))
    expected = rms_norm_reference(heads.cpu().double(), weight.cpu().double(), 1e-6)
    place.close(rms_norm(heads, weight, 1e-6), expected)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_heads_with_gates_of_another_order(place: Any, offset: float) -> None:
    x, weight, fused = place.randn(5, 6, 40), place.randn(40), place.randn(5, 2, 20 + 3 * 40)
    gate = fused[..., 20:].unflatten(2, (3, 40))
    wide = {"weight_offset": offset, "gate": gate.cpu().double()}
    expected = rms_norm_reference(x.cpu().double(), weight.cpu().double(), 1e-6, **wide)
    place.close(rms_norm(x, weight, 1e-6, weight_offset=offset, gate=gate), expected)
