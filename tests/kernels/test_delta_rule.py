"""The gated delta rule by its kernel, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbaton.kernels.delta_rule import (
    delta_rule_decode,
    delta_rule_decode_reference,
    delta_rule_scan,
    delta_rule_scan_reference,
)


@pytest.mark.parametrize(
    ("key_heads", "per_key", "keys", "values"), [(1, 1, 4, 4), (2, 2, 5, 12), (3, 1, 64, 40)]
)
def test_states_move_on_where_they_lie(
    place: Any, key_heads: int, per_key: int, keys: int, values: int
) -> None:
    if place.dtype != torch.float32:
        pytest.skip("states are float32")
    heads = key_heads * per_key
    # Part of a larger tensor, as a layer's states are of a block.
    pool = place.randn(7, key_heads, 3, per_key * keys, values)
    pool[0] = 0
    before, expected = pool.clone(), pool.cpu().clone()
    query, key = place.randn(4, heads, keys), place.randn(4, heads, keys)
    value = place.randn(4, heads, values)
    decay, beta = -place.randn(4, heads).exp(), place.randn(4, heads).sigmoid()
    reads = torch.tensor([3, 0, 5, 5])  # two go on from one snapshot, one from nothing
    writes = torch.tensor([3, 2, 4, 0])  # one in place, one is padding
    numbers: list[Any] = [query, key, value, decay, beta]
    on_cpu = [*(x.cpu() for x in numbers), expected[:, :, 1], reads, writes]
    wanted = delta_rule_decode_reference(*on_cpu)
    here = [*numbers, pool[:, :, 1], reads.to(place.device), writes.to(place.device)]
    found = delta_rule_decode(*here)
    place.close(found, wanted)
    place.close(pool, expected)
    pool[[2, 3, 4], :, 1] = before[[2, 3, 4], :, 1]
    assert torch.equal(pool, before), "only what is told is written"
    assert not torch.equal(expected[[2, 3, 4], :, 1], before[[2, 3, 4], :, 1].cpu())


@pytest.mark.parametrize(
    ("heads", "chunks", "tokens", "keys", "values"),
    [(2, 3, 5, 5, 4), (1, 2, 64, 20, 40), (3, 1, 1, 16, 33)],
)
def test_a_state_is_carried_over_chunks(
    place: Any, heads: int, chunks: int, tokens: int, keys: int, values: int
) -> None:
    if place.dtype != torch.float32:
        pytest.skip("states are float32")
    shape = (heads, chunks, tokens)
    query, key, erased = (place.randn(*shape, keys) * keys**-0.5 for _ in range(3))
    within = (place.randn(*shape, tokens) * tokens**-0.5).tril()
    left, state = place.randn(heads, chunks).sigmoid(), place.randn(heads, keys, values)
    arguments = (query, key, place.randn(*shape, values), erased, within, left, state)
    found = delta_rule_scan(*arguments)
    wanted = delta_rule_scan_reference(*(x.double() for x in arguments))
    for ours, exact in zip(found, wanted, strict=True):
        place.close(ours, exact)
