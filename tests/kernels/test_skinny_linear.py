from typing import Any

import pytest
import torch

from kvbaton.kernels.skinny_linear import Workspace, skinny_linear, wins


@pytest.mark.parametrize(("rows", "size", "depth"), [(1, 64, 256), (5, 128, 512), (32, 192, 128)])
def test_matches_fp64(place: Any, rows: int, size: int, depth: int) -> None:
    x, weight = place.randn(rows, depth), place.randn(size, depth)
    assert wins(rows, weight)
    place.close(skinny_linear(x, weight), x.cpu().double() @ weight.cpu().double().T)


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
