"""Rotary positions of prompts with images are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.models.layers import RotaryEmbedding
from kvbaton.engine.rope_config import RopeConfig
from kvbaton.engine.sequences import rotary_positions
from kvbaton.messages.engine import Item
from tests.support.pictures import FAMILIES, Pictures

SIDES = st.integers(1, 9).map(lambda rows: 2 * rows)
TEXT = st.integers(1, 12)


@pytest.fixture(scope="module", params=FAMILIES)
def pictures(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Pictures:
    return Pictures(checkpoint(family=request.param))


def at(items: tuple[Item, ...], length: int) -> np.ndarray[Any, Any]:
    return rotary_positions(items, 2).at(np.arange(length))


@settings(deadline=None, max_examples=60)
@given(
    images=st.lists(st.tuples(TEXT, st.just(1), SIDES, SIDES), min_size=1, max_size=5),
    after=st.integers(0, 9),
)
def test_they_equal_those_of_transformers(
    pictures: Pictures, images: list[tuple[int, int, int, int]], after: int
) -> None:
    parts = [part for text, *grid in images for part in (text, tuple(grid))]
    prompt = pictures.prompt(np.random.default_rng(0), *parts, after)  # type: ignore[arg-type]
    inputs = prompt.inputs()
    expected, delta = pictures.model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    length = len(prompt.ids)
    assert at(prompt.items, length).tolist() == expected[:, 0].tolist()
    later = rotary_positions(prompt.items, 2).at(np.array([length, length + 7]))
    assert later.tolist() == [[length + int(delta), length + 7 + int(delta)]] * 3


def test_any_part_of_a_prompt_is_a_part_of_the_whole(pictures: Pictures) -> None:
    prompt = pictures.prompt(np.random.default_rng(0), 3, (1, 6, 4), 2, (1, 2, 8), 4)
    whole, table = at(prompt.items, len(prompt.ids)), rotary_positions(prompt.items, 2)
    for start in range(len(prompt.ids)):
        for end in range(start, len(prompt.ids) + 1):
            assert np.array_equal(table.at(np.arange(start, end)), whole[:, start:end])


def test_images_may_touch_each_other() -> None:
    items = tuple(Item(start=start, length=4, digest=bytes(32), grid=(1, 4, 4)) for start in (0, 4))
    assert at(items, 9).tolist() == [
        [0, 0, 0, 0, 2, 2, 2, 2, 4],
        [0, 0, 1, 1, 2, 2, 3, 3, 4],
        [0, 1, 0, 1, 2, 3, 2, 3, 4],
    ]


@pytest.mark.parametrize(
    ("section", "interleaved", "axes"),
    [
        ((2, 3, 3), False, [0, 0, 1, 1, 1, 2, 2, 2]),
        ((4, 2, 2), True, [0, 1, 2, 0, 1, 2, 0, 0]),
        ((), False, [0] * 8),
    ],
)
def test_frequencies_turn_with_their_axis(
    section: tuple[int, ...], interleaved: bool, axes: list[int]
) -> None:
    rope = RopeConfig(mrope_section=section, mrope_interleaved=interleaved)
    assert RotaryEmbedding(rope, 16).axes.tolist() == axes


def test_cosines_and_sines_equal_those_of_transformers(pictures: Pictures) -> None:
    text = pictures.model.model.language_model
    config = load_model_config(Path(pictures.model.name_or_path))
    positions = torch.randint(0, 300, (3, 50), generator=torch.Generator().manual_seed(1))
    expected = text.rotary_emb(torch.zeros(1), positions[:, None])
    got = RotaryEmbedding(config.rope, config.head_dim)(positions, torch.float32)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours[:, 0], theirs[0])
