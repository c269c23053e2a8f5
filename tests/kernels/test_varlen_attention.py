from itertools import accumulate
from typing import Any

import pytest
import torch

from kvbaton.kernels.varlen_attention import varlen_attention


@pytest.mark.parametrize(
    "lengths", [[(5, 0)], [(20, 30), (1, 17), (33, 0)], [(700, 0), (300, 900)]], ids=str
)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (2, 192)])
def test_matches_fp64(
    place: Any, lengths: list[tuple[int, int]], heads: int, head_dim: int
) -> None:
    """`lengths`: (queries, keys before them) of each sequence."""
    counts = tuple(fresh for fresh, _ in lengths)
    totals = tuple(fresh + before for fresh, before in lengths)
    query = place.randn(sum(counts), heads, head_dim + 8)[..., 8:]
    key, value = place.randn(sum(totals), heads, 2, head_dim).unbind(2)
    cu = [
        torch.tensor([*accumulate(lens, initial=0)], dtype=torch.int32, device=place.device)
        for lens in (counts, totals)
    ]
    expected, first = torch.zeros(sum(counts), heads, head_dim, dtype=torch.float64), 0
    for row, end in zip(range(len(counts)), accumulate(totals), strict=True):
        keys, values = (x[end - totals[row] : end].cpu().double() for x in (key, value))
        for token in range(counts[row]):
            seen = totals[row] - counts[row] + token + 1
            logits = torch.einsum("hd,nhd->hn", query[first].cpu().double(), keys[:seen]) * 0.2
            expected[first] = torch.einsum("hn,nhd->hd", logits.softmax(-1), values[:seen])
            first += 1
    found = varlen_attention(query, key, value, cu[0], cu[1], counts, totals, scale=0.2)
    place.close(found, expected)
