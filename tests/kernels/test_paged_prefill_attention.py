from typing import Any

import pytest
import torch

from kvbaton.kernels import paged_prefill_attention as paged_module
from kvbaton.kernels.paged_attention import Softmax
from kvbaton.kernels.paged_prefill_attention import (
    paged_prefill_attention,
    paged_prefill_attention_reference,
)

SHAPES = [
    (8, 2, 64, 16),
    (7, 1, 80, 16),
    (4, 4, 128, 8),
    (6, 2, 96, 32),
    (2, 1, 256, 16),
    (8, 1, 512, 16),
]


def check(
    place: Any,
    paged: Any,
    query_lens: list[int],
    heads: int,
    head_dim: int,
    sinks: torch.Tensor | None = None,
    last_keys: torch.Tensor | None = None,
    parts: int | None = None,
    **options: Any,
) -> None:
    cu = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    query = place.randn(sum(query_lens), heads, head_dim)
    keys, values, tables = paged.wide()
    wide_sinks = sinks.cpu().double() if sinks is not None else None
    softmax = Softmax(head_dim**-0.5, **options, sinks=sinks)
    expected = paged_prefill_attention_reference(
        query.cpu().double(), keys, values, tables, cu, paged.context_lens.cpu(),
        softmax._replace(sinks=wide_sinks), last_keys,
    )  # fmt: skip
    moved = None if last_keys is None else last_keys.to(place.device)
    out = paged_prefill_attention(
        query, paged.views[0], paged.views[1], paged.block_tables, cu.to(place.device),
        paged.context_lens,
        query_lens, softmax, last_keys=moved, parts=parts,
    )  # fmt: skip
    place.close(out, expected)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_matches_fp64(
    place: Any, make_paged: Any, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    paged = make_paged([5, 37, 150, 1], kv_heads, head_dim, block_size)
    check(place, paged, [5, 20, 70, 1], heads, head_dim)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"window": 64},
        {"window": 24, "chunked": True},
        {"window": 64, "chunked": True},
        {"softcap": 3.0},
        {"window": 33, "softcap": 2.0},
    ],
    ids=str,
)
def test_options(place: Any, make_paged: Any, options: Any) -> None:
    check(place, make_paged([140, 61], 2, 64), [100, 3], 4, 64, **options)


def test_sinks(place: Any, make_paged: Any) -> None:
    sinks = torch.tensor([-2.0, 0.0, 3.0, 8.0], device=place.device)
    check(place, make_paged([90, 20], 2, 64), [70, 20], 4, 64, sinks=sinks)


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"window": 70}, {"softcap": 3.0}], ids=str)
def test_tokens_of_an_image_see_all_of_it(place: Any, make_paged: Any, options: Any) -> None:
    """Images within tiles and across several, the rest of one, and text between and after."""
    # Context and query lengths of each sequence, and from where to where its images are.
    batch = [(140, 100, [(30, 70), (75, 139)]), (61, 3, []), (90, 90, [(0, 90)]), (20, 5, [])]
    last_keys = []
    for context, count, images in batch:
        last = torch.arange(context, dtype=torch.int32)
        for start, end in images:
            last[start:end] = end - 1
        last_keys.append(last[context - count :])
    paged = make_paged([context for context, _, _ in batch], 2, 64)
    counts = [count for _, count, _ in batch]
    check(place, paged, counts, 4, 64, last_keys=torch.cat(last_keys), **options)


@pytest.mark.parametrize("options", [{}, {"window": 90}, {"softcap": 3.0}, {"sinks": 4}], ids=str)
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_keys_in_parts(
    monkeypatch: pytest.MonkeyPatch, place: Any, make_paged: Any, parts: int, options: Any
) -> None:
    """Of tiles with as many parts, with fewer, with one, and without any; some see no key."""
    monkeypatch.setattr(paged_module, "LEAST_TILES", 1)
    if "sinks" in options:
        options = {"sinks": torch.linspace(-2.0, 8.0, options["sinks"], device=place.device)}
    last_keys = torch.cat([torch.arange(300 - 40, 300), torch.zeros(3), torch.arange(9)]).int()
    last_keys[40:43] = torch.tensor([62, 62, 62])
    paged = make_paged([300, 63, 9], 2, 64)
    check(place, paged, [40, 3, 9], 4, 64, last_keys=last_keys, parts=parts, **options)
    check(place, make_paged([290, 61, 7, 1], 2, 64), [7, 0, 3, 1], 4, 64, parts=parts, **options)


def test_sequence_without_queries(place: Any, make_paged: Any) -> None:
    check(place, make_paged([40, 17, 33], 2, 64), [9, 0, 33], 4, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long(place: Any, make_paged: Any, head_dim: int) -> None:
    if place.device.type != "cuda":
        pytest.skip("too slow to interpret")
    check(place, make_paged([1500, 777, 300], 2, head_dim), [1000, 777, 1], 8, head_dim)


@pytest.mark.gpu
def test_pool_past_31_bits(place: Any) -> None:
    if place.device.type != "cuda" or place.dtype != torch.bfloat16:
        pytest.skip("needs a GPU")
    cache = torch.empty(2300, 8, 32, 2, 16, 128, device="cuda", dtype=torch.bfloat16)
    cache[2100:].normal_()
    tables = torch.randperm(200, device="cuda").view(1, 200).to(torch.int32) + 2100
    lens = torch.tensor([3000], dtype=torch.int32, device="cuda")
    views: Any = cache[:, :, 31, 0], cache[:, :, 31, 1]
    query = place.randn(130, 32, 128)
    cu, softmax = torch.tensor([0, 130], dtype=torch.int32, device="cuda"), Softmax(0.1)
    out = paged_prefill_attention(query, views[0], views[1], tables, cu, lens, [130], softmax)
    low: Any = [view[2100:].cpu().double() for view in views]
    expected = paged_prefill_attention_reference(
        query.cpu().double(), low[0], low[1], tables.cpu() - 2100, cu.cpu(), lens.cpu(), softmax
    )
    place.close(out, expected)


def test_keys_and_values_in_fp8(place: Any, make_paged: Any) -> None:
    paged = make_paged([5, 37, 150, 1], 2, 64)
    paged.cache = paged.cache.to(torch.float8_e4m3fn)
    check(place, paged, [5, 20, 70, 1], 8, 64)
