import itertools
import random
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import kvbaton.kernels.prefill_attention as prefill
from kvbaton.kernels.paged_attention import Softmax
from kvbaton.kernels.paged_prefill_attention import paged_prefill_attention_reference
from kvbaton.kernels.prefill_attention import (
    FEW_QUERIES,
    MIN_QUERIES,
    PlanKind,
    PrefillBatch,
    _chunk_shapes,
    _cut,
    _prompt_shape,
    all_shapes,
    is_far,
    plan_ahead,
    planning,
    prefill_attention,
)


def check(
    place: Any,
    make_paged: Any,
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    last_keys: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """`lengths`: (queries, prefix) of each sequence."""
    paged = make_paged([fresh + prefix for fresh, prefix in lengths], kv_heads, head_dim)
    starts = [0, *itertools.accumulate(fresh for fresh, _ in lengths)]
    cu = torch.tensor(starts, dtype=torch.int32)
    query = place.randn(starts[-1], heads, head_dim)
    key, value = (place.randn(starts[-1], kv_heads, head_dim) for _ in range(2))
    keys, values = paged.views
    for row, (fresh, prefix) in enumerate(lengths):
        for position in range(prefix, prefix + fresh):
            block = paged.block_tables[row, position // 16]
            keys[block, :, position % 16] = key[starts[row] + position - prefix]
            values[block, :, position % 16] = value[starts[row] + position - prefix]
    wide_keys, wide_values, tables = paged.wide()
    softmax = Softmax(head_dim**-0.5, **options)
    expected = paged_prefill_attention_reference(
        query.cpu().double(), wide_keys, wide_values, tables, cu, paged.context_lens.cpu(),
        softmax, last_keys,
    )  # fmt: skip
    batch = PrefillBatch(
        block_tables=paged.block_tables,
        cu_seqlens=cu.to(place.device),
        context_lens=paged.context_lens,
        query_lens=tuple(fresh for fresh, _ in lengths),
        prefix_lens=tuple(prefix for _, prefix in lengths),
        last_keys=None if last_keys is None else last_keys.to(place.device),
    )
    with planning():
        found = prefill_attention(query, key, value, keys, values, batch, softmax)
    place.close(found, expected)


@given(most=st.integers(FEW_QUERIES + 1, 20_000), prefix=st.integers(1, 300_000), data=st.data())
def test_what_is_planned_before_ready_is_all_that_chunks_launch(
    most: int, prefix: int, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(FEW_QUERIES + 1, most))
    assume(tokens >= MIN_QUERIES or is_far(tokens, prefix))
    longest = data.draw(st.integers(prefix + tokens, 400_000))
    shapes, planned = _chunk_shapes(tokens, prefix), all_shapes(most, longest)
    assert planned.issuperset(shapes)
    assert tokens < MIN_QUERIES or _prompt_shape(tokens) in planned
    assert sum(keys for form, _, keys in shapes if form == "prefix") == prefix // 1024 * 1024
    assert shapes[0][2] >= prefix % 1024 + tokens


@pytest.mark.parametrize("longest", [1500, 9000])
def test_plans_are_for_the_strides_that_are_launched(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN plans anew for any other."""
    launched: list[Any] = []
    pointers = set[int]()

    def launch(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Any:
        launched.append([(x.shape, x.stride()) for x in (query, key, value)] + [causal])
        pointers.add(query.data_ptr())
        return query, torch.zeros(*query.shape[:3], 1)

    monkeypatch.setattr(prefill, "_cudnn_batch", launch)
    monkeypatch.setattr(prefill, "cudnn_fits", lambda query, block_size: True)
    monkeypatch.setattr(prefill, "_planned", {})
    # Interpreted, what has nothing to do with strides takes minutes.
    monkeypatch.setattr("kvbaton.kernels.gather_pages._kernel", MagicMock())
    monkeypatch.setattr(prefill, "merge_attention_states", lambda *states: (states[4], states[1]))
    keys, values = torch.zeros(2, 1, 2, 16, 8)
    together = torch.zeros(2048, 8 * 8)  # as one product gives queries, keys and values

    def attend(tokens: int, prefix: int) -> list[Any]:
        launched.clear()
        heads = together[:tokens].view(tokens, 8, 8)
        query, key, value = heads[:, :4], heads[:, 4:6], heads[:, 6:]
        total = prefix + tokens
        batch = PrefillBatch(
            block_tables=torch.zeros(1, total // 16 + 1, dtype=torch.int32),
            cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
            context_lens=torch.tensor([total], dtype=torch.int32),
            query_lens=(tokens,),
            prefix_lens=(prefix,),
        )
        prefill_attention(query, key, value, keys, values, batch, Softmax(1.0))
        return list(launched)

    with planning():
        planned = attend(1024, 0)
    launched.clear()
    plan_ahead(2048, longest, torch.device("cpu"))
    planned += launched
    rng = random.Random(5)
    for _ in range(20):
        tokens = rng.randint(MIN_QUERIES, min(2048, longest))
        for prefix in (0, rng.randint(0, longest - tokens)):
            found = attend(tokens, prefix)
            assert found, "the paged kernel took it"
            assert all(each in planned for each in found)
    pointers.clear()
    attend(1024, longest // 1024 * 1024 - 1024)
    assert pointers == {together.data_ptr()}, "queries that need no padding were copied"


@pytest.mark.parametrize(
    ("least", "forms"),
    [
        (0, ["prompt", "prompt", "chunk", "paged", "prompt", "chunk", "paged"]),
        (4096, ["paged", "chunk", "paged", "prompt", "chunk", "paged"]),
    ],
)
def test_short_prompts_share_a_launch_if_wanted(least: int, forms: list[str]) -> None:
    lengths = [(1024, 0), (2000, 0), (1024, 3072), (9, 8000), (4096, 0)]
    lengths += [(257, 94_000), (256, 190_000), (1000, 23_999)]  # the first one is far
    ends = [0, *itertools.accumulate(fresh for fresh, _ in lengths)]
    batch = PrefillBatch(
        block_tables=torch.zeros(8, 1, dtype=torch.int32),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        context_lens=torch.tensor([sum(both) for both in lengths], dtype=torch.int32),
        query_lens=tuple(fresh for fresh, _ in lengths),
        prefix_lens=tuple(prefix for _, prefix in lengths),
        min_context=least,
    )
    with planning():
        parts = _cut(batch, 0, PlanKind(0, torch.bfloat16, 4, 2, 128, (512, 256, 256)))
    assert [part.form for part in parts] == forms
    assert [part.tokens.start for part in parts] + [ends[-1]] == [0] + [
        p.tokens.stop for p in parts
    ]


def test_short_pieces(place: Any, make_paged: Any) -> None:
    check(place, make_paged, [(5, 0), (20, 30), (1, 17)], 4, 2, 64)


def test_images_in_short_pieces(place: Any, make_paged: Any) -> None:
    last_keys = torch.tensor([0, 3, 3, 3, 4, *range(30, 40), *[49] * 10], dtype=torch.int32)
    check(place, make_paged, [(5, 0), (20, 30)], 4, 2, 64, last_keys)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1024, 0)],
        [(1100, 0), (7, 3), (1024, 5)],
        [(3, 0), (1030, 700), (9, 9), (1, 40)],
        [(1300, 2100)],
        [(2048, 1024), (1024, 1500)],
        [(1024, 7 * 1024 + 3), (1500, 0), (1500, 0)],
        [(300, 3100), (700, 1400)],
    ],
    ids=str,
)
def test_long_pieces(
    place: Any,
    make_paged: Any,
    lengths: list[tuple[int, int]],
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if place.device.type != "cuda":
        pytest.skip("too slow to interpret")
    monkeypatch.setattr(prefill, "FAR_LOGITS", 900_000)  # which less memory holds
    check(place, make_paged, lengths, 4, 2, head_dim)


@pytest.mark.gpu
def test_options_take_the_paged_kernel(place: Any, make_paged: Any) -> None:
    if place.device.type != "cuda":
        pytest.skip("too slow to interpret")
    check(place, make_paged, [(1030, 50)], 4, 2, 64, window=100)
    check(place, make_paged, [(1030, 50)], 4, 2, 64, window=2000)
    check(place, make_paged, [(1030, 50)], 4, 2, 64, window=256, chunked=True)
    check(place, make_paged, [(1030, 50)], 4, 2, 64, window=2048, chunked=True)
    check(place, make_paged, [(1030, 50)], 4, 2, 64, softcap=2.0)
    last_keys = torch.arange(50, 1080, dtype=torch.int32)
    last_keys[200:1000] = 50 + 999
    check(place, make_paged, [(1030, 50)], 4, 2, 64, last_keys)
