from functools import partial
from typing import Any

import pytest
import torch

from kvbaton.kernels.decode_attention import (
    decode_attention,
    decode_attention_reference,
    decode_parts,
)
from kvbaton.kernels.paged_attention import Softmax

SHAPES = [  # heads, kv_heads, head_dim, block_size
    (8, 2, 64, 16),
    (7, 1, 80, 16),
    (4, 4, 128, 8),
    (6, 2, 96, 32),
    (2, 1, 256, 16),
    (8, 1, 512, 16),
]


def check(
    place: Any, paged: Any, query: torch.Tensor, spare: int | None = None, **options: Any
) -> torch.Tensor:
    """`spare` parts more than sequences."""
    keys, values, tables = paged.wide()
    softmax = reference = Softmax(**options)
    if softmax.sinks is not None:
        reference = softmax._replace(sinks=softmax.sinks.cpu().double())
    expected = decode_attention_reference(
        query.cpu().double(), keys, values, tables, paged.context_lens.cpu(), reference
    )
    parts = decode_parts(query, paged.views[0], paged.context_lens, softmax, spare=spare)
    args = query, *paged.views, paged.block_tables, paged.context_lens, softmax
    out = decode_attention(*args, parts=parts)
    place.close(out, expected)
    return out


@pytest.mark.parametrize("spare", [1, 2, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_matches_fp64(
    place: Any,
    make_paged: Any,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    spare: int,
) -> None:
    paged = make_paged([1, 37, 0, 150], kv_heads, head_dim, block_size)
    query = place.randn(4, heads, head_dim)
    out = check(place, paged, query, scale=head_dim**-0.5, spare=spare)
    assert (out[2] == 0).all()


@pytest.mark.parametrize("spare", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"window": 64},
        {"window": 48, "chunked": True},
        {"window": 128, "chunked": True},
        {"softcap": 3.0},
        {"window": 40, "softcap": 2.0},
    ],
    ids=str,
)
def test_options(place: Any, make_paged: Any, options: Any, spare: int) -> None:
    paged = make_paged([1, 40, 129], 2, 64)
    query = place.randn(3, 4, 64) * 3
    check(place, paged, query, scale=0.125, spare=spare, **options)


@pytest.mark.parametrize("spare", [1, 4, 20])
def test_sinks(place: Any, make_paged: Any, spare: int) -> None:
    paged = make_paged([1, 40, 129], 2, 64)
    sinks = torch.tensor([-2.0, 0.0, 3.0, 8.0], device=place.device)
    check(place, paged, place.randn(3, 4, 64), scale=0.125, spare=spare, sinks=sinks)


def test_blocks_before_the_window_may_be_gone(place: Any, make_paged: Any) -> None:
    paged = make_paged([100], 1, 64)
    query = place.randn(1, 2, 64)
    before = check(place, paged, query, scale=0.125, window=20)
    paged.block_tables[0, :5] = 0
    after = decode_attention(
        query,
        paged.views[0],
        paged.views[1],
        paged.block_tables,
        paged.context_lens,
        Softmax(0.125, window=20),
    )
    assert torch.equal(before, after)


def test_query_may_be_a_slice_of_a_fused_projection(place: Any, make_paged: Any) -> None:
    paged = make_paged([20, 33], 2, 64)
    fused = place.randn(2, 8 * 64)
    check(place, paged, fused[:, : 4 * 64].unflatten(1, (4, 64)), scale=0.125)


def test_lengths_may_differ_much(place: Any, make_paged: Any) -> None:
    paged = make_paged([1, 0, 900, 250], 2, 64)
    check(place, paged, place.randn(4, 4, 64), scale=0.125, spare=16)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "spare"),
    [(8, 2, 64, 1), (8, 2, 64, 40), (8, 2, 64, 70), (7, 1, 80, 70)],
)
def test_many_sequences(
    place: Any, make_paged: Any, heads: int, kv_heads: int, head_dim: int, spare: int
) -> None:
    """Whoever comes last merges a sequence's parts; the counters are as they were for the next."""
    lens = [1, 700, 0, 37, 129, 64, 65, 300, 9, 0, 64, 1, 65, 20, 2, 130]
    paged, query = make_paged(lens, kv_heads, head_dim, 16), place.randn(16, heads, head_dim)
    first = check(place, paged, query, scale=0.125, spare=spare)
    keys, values = paged.views
    args = query, keys, values, paged.block_tables, paged.context_lens, Softmax(0.125)
    parts = decode_parts(query, keys, paged.context_lens, Softmax(0.125), spare=spare)
    for _ in range(2):
        assert torch.equal(first, decode_attention(*args, parts=parts))
    assert int(parts.counters.count_nonzero()) == 0


@pytest.mark.parametrize("lens", [[0, 37, 0, 900], [0, 0, 0, 0], [150, 1, 0, 0]])
def test_padding_without_parts_is_not_written(place: Any, make_paged: Any, lens: list[int]) -> None:
    """Prompts' rows may be there, which are written at the same time."""
    paged, query = make_paged(lens, 2, 64, 16), place.randn(4, 8, 64)
    args = query, *paged.views, paged.block_tables, paged.context_lens, Softmax(0.1)
    parts = decode_parts(query, paged.views[0], args[-2], args[-1], spare=5, pads=False)
    out = torch.full_like(query, 7.0)
    decode_attention(*args, parts=parts, out=out)
    whole = decode_attention(*args)
    for row, length in enumerate(lens):
        if length:
            place.close(out[row], whole[row].cpu().double())
        else:
            assert (out[row] == 7.0).all()


@pytest.mark.gpu
def test_graph_replays_with_other_lengths(place: Any, make_paged: Any) -> None:
    if place.device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    paged = make_paged([300, 40], 2, 128)
    query = place.randn(2, 8, 128)
    keys, values = paged.views
    lens = paged.context_lens
    attend = partial(decode_attention, query, keys, values, paged.block_tables, lens, Softmax(0.1))
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    paged.context_lens.copy_(torch.tensor([17, 33], dtype=torch.int32))
    query.copy_(place.randn(2, 8, 128))
    graph.replay()
    expected = check(place, paged, query, scale=0.1)
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_pool_past_31_bits(place: Any) -> None:
    if place.device.type != "cuda" or place.dtype != torch.bfloat16:
        pytest.skip("needs a GPU")
    cache = torch.empty(2300, 8, 32, 2, 16, 128, device="cuda", dtype=torch.bfloat16)
    cache[2100:].normal_()
    tables = torch.randperm(200, device="cuda").view(2, 100).to(torch.int32) + 2100
    lens = torch.tensor([1600, 77], dtype=torch.int32, device="cuda")
    views: Any = cache[:, :, 31, 0], cache[:, :, 31, 1]
    query = place.randn(2, 32, 128)
    out = decode_attention(query, views[0], views[1], tables, lens, Softmax(0.1))
    low: Any = [view[2100:].cpu().double() for view in views]
    expected = decode_attention_reference(
        query.cpu().double(), low[0], low[1], tables.cpu() - 2100, lens.cpu(), Softmax(0.1)
    )
    place.close(out, expected)


@pytest.mark.parametrize("spare", [1, 4])
def test_keys_and_values_in_fp8(place: Any, make_paged: Any, spare: int) -> None:
    paged = make_paged([1, 37, 0, 150], 2, 64)
    paged.cache = paged.cache.to(torch.float8_e4m3fn)
    check(place, paged, place.randn(4, 8, 64), scale=0.125, spare=spare)
