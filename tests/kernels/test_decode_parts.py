"""Who computes which keys of a decode step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.kernels.decode_parts import LEAST, MOST_LEAST, Parts, share_keys, spare_parts

TILE = 64


def parts_of(parts: Parts, batch: int) -> tuple[list[int], list[int]]:
    """How many parts each sequence has; the sequence of each item in use."""
    plan = parts.plan.cpu().tolist()
    assert len(plan) == batch + 1 + parts.items
    ends, owners = plan[: batch + 1], plan[batch + 1 :]
    assert all(owner == -1 for owner in owners[ends[-1] :])
    return np.diff(ends).tolist(), owners[: ends[-1]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("window", [0, 300])
def test_every_sequence_has_its_parts_side_by_side(place: Any, seed: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    batch, spare = int(rng.integers(1, 40)), int(rng.integers(1, 60))
    lens = rng.integers(0, 30_000 if seed % 2 else 600, batch)
    lens[rng.random(batch) < 0.2] = 0
    given = torch.tensor(lens, dtype=torch.int32, device=place.device)
    found = share_keys(given, 1, TILE, places=528, window=window, spare=spare)
    counts, owners = parts_of(found, batch)
    assert owners == [of for of, count in enumerate(counts) for _ in range(count)]
    first = np.maximum(lens - window, 0) // TILE if window else np.zeros_like(lens)
    tiles = -(-lens // TILE) - first
    least = max(min(max(1 << (2 * batch - 1).bit_length(), LEAST), MOST_LEAST) // TILE, 1)
    size = max(-(-int(tiles.sum()) // spare), least)
    assert counts == np.maximum(-(-tiles // size), 1).tolist()
    assert sum(counts) <= batch + spare, "no more than there are programs for"


def test_the_long_one_is_split_and_the_short_ones_are_not(place: Any) -> None:
    lens = torch.tensor([100_000] + [500] * 127, dtype=torch.int32, device=place.device)
    counts, _ = parts_of(share_keys(lens, 8, TILE, places=528), 128)
    assert counts[0] > 40
    assert set(counts[1:]) == {1}


def test_few_sequences_are_split_more() -> None:
    assert [spare_parts(batch, 8, 528) for batch in (1, 24, 40, 72, 128)] == [132, 132, 25, 198, 80]
    assert spare_parts(4, 1024, 528) > 0, "also where a sequence alone fills the GPU"
