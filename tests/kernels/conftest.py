"""Kernels run on a GPU, or on the CPU through Triton's interpreter; both meet the same tests."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kvbaton.kernels.jit import INTERPRETED

if INTERPRETED:
    # Triton patches its language anew for each call of a device function, which took these tests
    # a third of their time: once is enough where nothing is compiled.
    from triton import language
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda kernel: interpreter._LangPatchScope()

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Place:
    """Where a kernel runs, and in which dtype."""

    device: torch.device
    dtype: torch.dtype

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.device, self.dtype)

    def close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Fail unless ||actual - expected|| / ||expected|| is within the dtype's tolerance."""
        error = (actual.double().cpu() - expected.double().cpu()).norm()
        bound = TOLERANCE[self.dtype] * expected.double().norm().cpu()
        assert torch.isfinite(actual).all()
        assert error <= bound, f"relative error {error / expected.double().norm().cpu():.2e}"


def _places() -> list[Any]:
    # The interpreter computes with numpy, which warns of 1 / 0 and exp(1000).
    quiet = pytest.mark.filterwarnings("ignore")
    places = [pytest.param(("cpu", torch.float32), id="interpreted", marks=quiet)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        places.append(pytest.param(("cuda", dtype), id=name, marks=pytest.mark.gpu))
    return places


@pytest.fixture(params=_places())
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    device, dtype = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if device == "cpu" and not INTERPRETED:
        pytest.skip("triton is not installed, or runs on a GPU here")
    torch.manual_seed(len(request.node.name))
    torch.use_deterministic_algorithms(True)  # fills memory from torch.empty with NaN
    yield Place(torch.device(device), dtype)
    torch.use_deterministic_algorithms(False)


@dataclass
class Paged:
    """A paged cache in which every slot that no sequence owns holds NaN."""

    cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    layer: int

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache[:, :, self.layer, 0], self.cache[:, :, self.layer, 1]

    def wide(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Key cache, value cache and block tables on the CPU, in fp64."""
        keys, values = (view.cpu().double() for view in self.views)
        return keys, values, self.block_tables.cpu()


@pytest.fixture
def make_paged(place: Place) -> Callable[..., Paged]:
    def make(
        lengths: list[int], kv_heads: int, head_dim: int, block_size: int = 16, layers: int = 2
    ) -> Paged:
        counts = [-(-length // block_size) for length in lengths]
        total = 1 + sum(counts)
        shape = (total, kv_heads, layers, 2, block_size, head_dim)
        cache = torch.full(shape, torch.nan)
        order = torch.randperm(total - 1) + 1
        tables = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
        for row, (length, blocks) in enumerate(
            zip(lengths, torch.split(order, counts), strict=True)
        ):
            tables[row, : len(blocks)] = blocks
            for index, block in enumerate(blocks):
                tokens = min(block_size, length - index * block_size)
                cache[block, :, :, :, :tokens] = torch.randn(kv_heads, layers, 2, tokens, head_dim)
        return Paged(
            cache.to(place.device, place.dtype),
            tables.to(place.device),
            torch.tensor(lengths, dtype=torch.int32, device=place.device),
            layers - 1,
        )

    return make
