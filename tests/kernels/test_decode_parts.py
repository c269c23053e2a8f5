"""Who computes which keys of a decode step."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.kernels import decode_parts
from kvbaton.kernels.decode_parts import (
    LEAST,
    MOST_LEAST,
    Parts,
    share_keys,
    share_keys_reference,
    spare_parts,
)

TILE = 64


def parts_of(parts: Parts, batch: int) -> tuple[list[int], list[list[int]]]:
    """How many parts each sequence has; the fields of those in use."""
    begins, fields = parts.begins.tolist(), parts.fields.tolist()
    assert len(begins) == batch + 1
    assert all(unused[0] == -1 for unused in fields[begins[-1] :])
    return np.diff(begins).tolist(), fields[: begins[-1]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("pads", [True, False])
def test_every_sequence_has_its_parts_side_by_side(
    place: Any, seed: int, window: int, pads: bool
) -> None:
    rng = np.random.default_rng(seed)
    batch, spare = int(rng.integers(1, 40)), int(rng.integers(1, 60))
    lens = rng.integers(0, 30_000 if seed % 2 else 600, batch)
    lens[rng.random(batch) < 0.2] = 0
    given = torch.tensor(lens, dtype=torch.int32, device=place.device)
    found = share_keys(given, 1, TILE, places=528, window=window, spare=spare, pads=pads)
    counts, fields = parts_of(found, batch)
    numbers = [(of, part, n) for of, n in enumerate(counts) for part in range(n)]
    assert [(of, part, n) for of, _, _, _, part, n in fields] == numbers
    first = np.maximum(lens - window, 0) // TILE if window else np.zeros_like(lens)
    tiles = -(-lens // TILE) - first
    least = max(min(max(1 << (2 * batch - 1).bit_length(), LEAST), MOST_LEAST) // TILE, 1)
    size = max(-(-int(tiles.sum()) // spare), least)
    assert counts == np.maximum(-(-tiles // size), pads | (lens > 0)).tolist()
    assert sum(counts) <= batch + spare, "no more than there are programs for"
    for of in range(batch):
        ranges = [tuple(field[2:4]) for field in fields if field[0] == of]
        assert [field[1] for field in fields if field[0] == of] == [lens[of]] * counts[of]
        if not counts[of]:
            continue
        edges = [first[of], *(end for _, end in ranges)]
        assert ranges == list(pairwise(edges)), "one behind the other"
        assert edges[-1] == first[of] + tiles[of]


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("batch", "window"), [(1, 0), (9, 0), (40, 0), (40, 700), (200, 0)])
def test_as_in_plain_torch(place: Any, batch: int, window: int, chunked: bool, pads: bool) -> None:
    lens = torch.randint(0, 3000, (batch,), dtype=torch.int32)
    lens[0] = 40_000 if batch % 8 else 2000
    lens[1::5] = 0
    spare, whole = spare_parts(batch, 8, 528)
    least = max(min(max(1 << (16 * batch - 1).bit_length(), LEAST), MOST_LEAST) // TILE, 1)
    sight: dict[str, Any] = {"window": window, "chunked": chunked, "pads": pads}
    plain = share_keys_reference(lens, 8, TILE, spare, least, whole=whole, **sight)
    found = share_keys(lens.to(place.device), 8, TILE, places=528, **sight)
    assert found.begins.tolist() == plain.begins.tolist()
    assert parts_of(found, batch) == parts_of(plain, batch)


def test_the_long_one_is_split_and_the_short_ones_are_not(place: Any) -> None:
    lens = torch.tensor([100_000] + [500] * 127, dtype=torch.int32, device=place.device)
    counts, _ = parts_of(share_keys(lens, 8, TILE, places=528), 128)
    assert counts[0] > 40
    assert set(counts[1:]) == {1}


def test_sequences_of_like_lengths_are_left_whole_where_they_fill_the_gpu(place: Any) -> None:
    lens = torch.arange(2000, 3000, 25, dtype=torch.int32, device=place.device)
    counts, _ = parts_of(share_keys(lens, 8, TILE, places=528), 40)
    assert set(counts) == {1}
    counts, _ = parts_of(share_keys(lens, 16, TILE, places=528), 40)
    assert min(counts) > 1, "the last of 640 programs would run alone"


def test_few_sequences_are_split_more() -> None:
    found = [spare_parts(batch, 8, 528) for batch in (1, 24, 40, 72, 128)]
    assert found == [(66, False), (192, False), (198, True), (198, False), (198, True)]
    assert spare_parts(4, 1024, 528)[0] > 0, "also where a sequence alone fills the GPU"


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 20])
def test_nothing_is_compiled_for_another_batch_below_the_next_power_of_two(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with prompts have any number of sequences beside them, of which few were warmed up."""
    seen = defaultdict[int, set[tuple[tuple[str, Any], ...]]](set)

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *tensors, **given: seen[given["BATCH"]].add(tuple(given.items()))

    monkeypatch.setattr(decode_parts, "_kernel", Kernel())
    monkeypatch.setattr(decode_parts, "use_triton", lambda tensor: True)
    for batch in range(1, 257):
        share_keys(torch.zeros(batch, dtype=torch.int32), heads, TILE, places=528)
    assert sorted(seen) == [1 << power for power in range(9)]
    assert all(len(kinds) == 1 for kinds in seen.values())
