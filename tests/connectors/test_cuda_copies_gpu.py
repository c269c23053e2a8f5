"""Many copies begun together, and one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbaton.connectors.cuda_copies import CopyRun, CudaCopies
from kvbaton.errors import StoreError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.fixture(params=["together", "one by one"])
def copies(request: pytest.FixtureRequest) -> CudaCopies:
    copies = CudaCopies()
    if request.param == "one by one":
        copies._copy_batch = None
    elif copies._copy_batch is None:
        pytest.skip("this CUDA has no batches of this form")
    return copies


@pytest.mark.parametrize("count", [1, 2, 300])
def test_there_and_back(copies: CudaCopies, count: int) -> None:
    rng = np.random.default_rng(count)
    sizes = rng.integers(1, 100_000, count)
    starts = np.concatenate(([0], np.cumsum(sizes + rng.integers(0, 64, count))))
    total = int(starts[-1])
    host = torch.randint(0, 256, (total,), dtype=torch.uint8).pin_memory()
    back = torch.zeros(total, dtype=torch.uint8).pin_memory()
    there = torch.zeros(total, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    stream = copies.stream(0)
    pairs = list(zip(starts[:-1].tolist(), sizes.tolist(), strict=True))

    def runs(target: torch.Tensor, source: torch.Tensor) -> list[CopyRun]:
        return [CopyRun(target.data_ptr() + at, source.data_ptr() + at, n) for at, n in pairs]

    copies.begin(runs(there, host), stream)
    copies.begin(runs(back, there), stream).synchronize()
    for at, size in pairs:
        assert torch.equal(back[at : at + size], host[at : at + size])


def test_a_refusal_is_told(copies: CudaCopies) -> None:
    host = torch.zeros(10, dtype=torch.uint8).pin_memory()
    nowhere = CopyRun(0, host.data_ptr(), 10)
    with pytest.raises(StoreError, match="fail"):
        copies.begin([nowhere, nowhere], copies.stream(0)).synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3, "torch is told of it"
