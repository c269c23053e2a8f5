"""What `benchmarks.bench_gpu_handover` expects to cross for a prompt of 16 k of each shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_gpu_handover import in_groups
from benchmarks.bench_gpu_shapes import SHAPES
from benchmarks.workload import dummy_folder

LENGTH = 16384


@pytest.mark.parametrize(
    ("shape", "least", "whole"),
    [
        # 27 layers, one latent row of 512 + 64 a token.
        ("deepseek-v2-lite", 27 * 576 * LENGTH, 27 * 576 * LENGTH),
        # 5 of 34 layers keep all; of the others the next token sees 1023 more.
        ("gemma3-4b", (5 * LENGTH + 29 * 1023) * 2 * 4 * 256, 34 * LENGTH * 2 * 4 * 256),
        ("gpt-oss-20b", 12 * (LENGTH + 127) * 2 * 8 * 64, 24 * LENGTH * 2 * 8 * 64),
    ],
)
def test_what_crosses_of_a_shape(shape: str, least: int, whole: int, tmp_path: Path) -> None:
    groups = in_groups(dummy_folder(tmp_path / "model", SHAPES[shape]), LENGTH, 1).values()
    assert sum(sizes.least for sizes in groups) == 2 * least
    assert sum(sizes.whole for sizes in groups) == 2 * whole
    assert all(sizes.least <= sizes.most <= sizes.whole for sizes in groups)
