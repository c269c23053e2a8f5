from typing import Any

import pytest
import torch

from kvbaton.kernels.quantize_fp8 import quantize_fp8_reference
from kvbaton.kernels.silu_and_mul import silu_and_mul_reference
from kvbaton.kernels.skinny_linear import Workspace, gates, skinny_linear, wins


@pytest.mark.parametrize(
    ("rows", "size", "depth"), [(1, 64, 256), (5, 128, 512), (32, 192, 128), (9, 16384, 128)]
)
def test_matches_fp64(place: Any, rows: int, size: int, depth: int) -> None:
    x, weight = place.randn(rows, depth), place.randn(size, depth)
    assert wins(rows, weight)
    place.close(skinny_linear(x, weight), x.cpu().double() @ weight.cpu().double().T)


@pytest.mark.parametrize("by_run", [False, True], ids=["rows", "runs"])
@pytest.mark.parametrize(
    ("rows", "size", "depth"),
    [(1, 64, 128), (5, 128, 384), (9, 64, 2048), (16, 128, 8192), (2, 192, 3200)],
)
def test_weights_in_fp8(place: Any, rows: int, size: int, depth: int, by_run: bool) -> None:
    weight, scales = quantize_fp8_reference(torch.randn(size, depth), 128 if by_run else depth)
    scales = scales * torch.rand(size, 1)
    x, at = place.randn(rows, depth) * 50, place.device
    assert wins(rows, weight, scales)
    workspace = Workspace(at)
    for _ in range(2):  # the first one leaves the counters as it found them
        found = skinny_linear(x, weight.to(at), workspace, scales.to(at))
    wide = weight.double() * scales.double().repeat_interleave(128 if by_run else depth, 1)
    place.close(found, x.cpu().double() @ wide.t())


@pytest.mark.parametrize(
    ("rows", "size", "depth"), [(1, 64, 512), (33, 128, 1024), (100, 192, 3584), (128, 64, 8192)]
)
def test_both_in_fp8(place: Any, rows: int, size: int, depth: int) -> None:
    numbers, x_scales = quantize_fp8_reference(torch.randn(rows, depth), depth)
    weight, scales = quantize_fp8_reference(torch.randn(size, depth), depth)
    at = place.device
    assert wins(rows, weight, scales, quantised=True)
    workspace = Workspace(at)
    for _ in range(2):
        found = skinny_linear(
            numbers.to(at), weight.to(at), workspace, scales.to(at),
            x_scales=x_scales.to(at), dtype=place.dtype,
        )  # fmt: skip
    exact = (numbers.double() * x_scales.double()) @ (weight.double() * scales.double()).t()
    assert found.dtype == place.dtype
    # Tensor cores keep 14 bits of sums of FP8 products (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
    assert (found.double().cpu() - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.parametrize("rows", [1, 7, 32])
def test_gated(place: Any, rows: int) -> None:
    x, weight = place.randn(rows, 256), place.randn(16384, 256) / 16
    assert gates(rows, weight)
    found = skinny_linear(x, weight, gated=True)
    place.close(found, silu_and_mul_reference(x.cpu().double() @ weight.cpu().double().T))
    small = weight[:4096]  # which takes a launch more
    place.close(
        skinny_linear(x, small, gated=True),
        silu_and_mul_reference(x.cpu().double() @ small.cpu().double().T),
    )
    assert not gates(33, weight)
    assert not gates(rows, weight[:4096])


def test_rows_that_lie_apart(place: Any) -> None:
    x, weight = place.randn(3, 384), place.randn(64, 128)
    found = skinny_linear(x[:, 128:256], weight)
    assert torch.equal(found, skinny_linear(x[:, 128:256].contiguous(), weight))


def test_leaves_a_workspace_as_it_was(place: Any) -> None:
    x, weight = place.randn(3, 1024), place.randn(64, 1024)
    workspace = Workspace(place.device)
    first = skinny_linear(x, weight, workspace)
    assert int(workspace.counters.count_nonzero()) == 0
    assert torch.equal(skinny_linear(x, weight, workspace), first)


@pytest.mark.parametrize(("rows", "size", "depth"), [(40, 64, 128), (3, 70, 128), (3, 64, 100)])
def test_other_shapes_take_the_library(place: Any, rows: int, size: int, depth: int) -> None:
    x, weight = place.randn(rows, depth), place.randn(size, depth)
    assert not wins(rows, weight)
    place.close(skinny_linear(x, weight), x.cpu().double() @ weight.cpu().double().T)


def test_more_rows_with_large_weights() -> None:
    assert wins(64, torch.empty(28672, 4096, device="meta"))
    assert not wins(65, torch.empty(28672, 4096, device="meta"))
    assert not wins(33, torch.empty(16384, 2048, device="meta"))


def test_what_it_is_for_in_fp8() -> None:
    weight = torch.empty(64, 256)
    assert wins(16, weight, torch.empty(64, 2))
    assert not wins(17, weight, torch.empty(64, 2))
    assert not wins(0, weight, torch.empty(64, 2))
    assert not wins(1, weight, torch.empty(64, 4))
    assert not wins(1, torch.empty(32, 256), torch.empty(32, 1))
    assert not wins(1, torch.empty(64, 160), torch.empty(64, 1))
    assert wins(128, weight, torch.empty(64, 1), quantised=True)
    assert not wins(129, weight, torch.empty(64, 1), quantised=True)
    assert not wins(64, weight, torch.empty(64, 2), quantised=True)
    assert not wins(64, torch.empty(4160, 256), torch.empty(4160, 1), quantised=True)
