"""Weights in FP8 on a real GPU: their products, and a model of them beside the one of floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.models.linear import FP8Method
from kvbaton.kernels.quantize_fp8 import quantize_fp8_reference
from kvbaton.kernels.silu_and_mul import silu_and_mul_reference
from tests.engine.test_gpu import GPU, MODELS, expected_logits
from tests.support.prompts import random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(
    ("block", "square"), [(None, False), (128, False), (128, True)], ids=["rows", "runs", "squares"]
)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 127, 600])
@pytest.mark.parametrize(("size", "depth"), [(384, 256), (4096, 4096), (1280, 14336)])
def test_products_are_those_of_the_numbers_that_are_stored(
    rows: int, size: int, depth: int, block: int | None, square: bool
) -> None:
    torch.manual_seed(rows)
    weight, scales = quantize_fp8_reference(torch.randn(size, depth) / 50, block or depth)
    if block:  # one for each block of rows too, as in checkpoints
        scales = scales[::block].repeat_interleave(block, 0)[:size].contiguous()
    wide = weight.float() * scales.repeat_interleave(block or depth, 1)
    x = torch.randn(rows, depth).bfloat16() * torch.logspace(-2, 2, rows)[:, None]
    expected = x.float() @ wide.t()
    if square and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the library has this product for Hopper")
    method = FP8Method(block, square=square)
    found = method.product(x.bfloat16().cuda(), weight.cuda(), scales.cuda(), None)
    error = (found.float().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.04, f"relative error {error.max():.3f}"  # e4m3 has 3 bits


@pytest.mark.parametrize("rows", [5, 100])
@pytest.mark.parametrize(("block", "square"), [(None, False), (128, False), (128, True)])
def test_gated_products(rows: int, block: int | None, square: bool) -> None:
    torch.manual_seed(rows)
    weight, scales = quantize_fp8_reference(torch.randn(256, 1408) / 50, block or 1408)
    scales = torch.ones_like(scales)
    gate_up = torch.randn(rows, 2 * 1408).bfloat16()
    expected = silu_and_mul_reference(gate_up).float() @ weight.float().t()
    method = FP8Method(block, square=square)
    found = method.gated_product(gate_up.cuda(), weight.cuda(), scales.cuda(), None)
    error = (found.float().cpu() - expected).norm() / expected.norm()
    assert error < 0.04, f"relative error {error:.3f}"


@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_quantised_model_is_near_the_one_of_floats(
    chunk: int, checkpoint: Callable[..., Path], reference: Any, drive: Any
) -> None:
    folder = checkpoint(**MODELS["llama"])
    driver = drive(folder, dtype="bfloat16", quantization="fp8", **GPU)
    prompt = random_tokens(np.random.default_rng(1), 100)
    got = driver.generate(driver.add(prompt), 12, chunk=chunk)
    logits = expected_logits(reference(folder, "bfloat16"), [*prompt, *got][:-1])[99:]
    chosen = logits.gather(1, torch.tensor(got, device="cuda")[:, None])[:, 0]
    gap = (logits.amax(-1) - chosen).mean() / logits.std()
    assert gap < 0.3, f"tokens are {gap:.2f} deviations below the best"
