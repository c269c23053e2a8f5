from functools import partial
from typing import Any

import pytest
import torch

from kvbaton.kernels.latent_decode_attention import (
    latent_decode_attention,
    latent_decode_attention_reference,
    latent_decode_parts,
)

SHAPES = [  # heads, rank, rope, block_size
    (16, 512, 64, 16),
    (4, 48, 16, 8),
    (20, 64, 8, 32),
]


def check(
    place: Any, paged: Any, heads: int, rank: int, rope: int, spare: int | None
) -> torch.Tensor:
    """Queries as the engine has them: one a transposed product, one a part of a projection."""
    batch, scale = len(paged.context_lens), (rank // 4 + rope) ** -0.5
    query = place.randn(heads, batch, rank).transpose(0, 1)
    query_rope = place.randn(batch, heads, rope + 24)[..., 24:]
    cache = paged.views[0][:, 0]
    wide = paged.wide()
    expected = latent_decode_attention_reference(
        query.cpu().double(), query_rope.cpu().double(), wide[0][:, 0], wide[2],
        paged.context_lens.cpu(), scale=scale,
    )  # fmt: skip
    parts = latent_decode_parts(query, paged.context_lens, spare=spare)
    out = latent_decode_attention(
        query, query_rope, cache, paged.block_tables, paged.context_lens,
        scale=scale, parts=parts,
    )  # fmt: skip
    place.close(out, expected)
    return out


@pytest.mark.parametrize("spare", [1, 16])
@pytest.mark.parametrize(("heads", "rank", "rope", "block_size"), SHAPES)
def test_matches_fp64(
    place: Any, make_paged: Any, heads: int, rank: int, rope: int, block_size: int, spare: int
) -> None:
    paged = make_paged([1, 37, 0, 150], 1, rank + rope, block_size)
    out = check(place, paged, heads, rank, rope, spare)
    assert (out[2] == 0).all()


def test_splits_of_its_own_choice(place: Any, make_paged: Any) -> None:
    check(place, make_paged([1, 0, 700, 250], 1, 64), 6, 48, 16, None)


@pytest.mark.parametrize("spare", [1, 6])
def test_rows_in_fp8(place: Any, make_paged: Any, spare: int) -> None:
    paged = make_paged([1, 37, 0, 150], 1, 64)
    paged.cache = paged.cache.to(torch.float8_e4m3fn)
    check(place, paged, 4, 48, 16, spare)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_long(place: Any, make_paged: Any, heads: int) -> None:
    if place.device.type != "cuda":
        pytest.skip("too slow to interpret")
    check(place, make_paged([5000, 777, 1, 64, 65], 1, 576), heads, 512, 64, None)


@pytest.mark.gpu
def test_graph_replays_with_other_lengths(place: Any, make_paged: Any) -> None:
    if place.device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    paged = make_paged([300, 40], 1, 576)
    query, rope = place.randn(2, 16, 512), place.randn(2, 16, 64)
    cache = paged.views[0][:, 0]
    attend = partial(
        latent_decode_attention, query, rope, cache, paged.block_tables, paged.context_lens,
        scale=0.1,
    )  # fmt: skip
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    paged.context_lens.copy_(torch.tensor([17, 33], dtype=torch.int32))
    query.copy_(place.randn(2, 16, 512))
    graph.replay()
    assert torch.equal(out, attend())
