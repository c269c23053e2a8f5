"""Profiles of a real engine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.served_pair import Pair
from tests.support.servers import HttpFailure

pytestmark = pytest.mark.e2e


def test_a_profile_shows_what_the_engine_computed(
    pair: Pair, prompt: Callable[[int], list[int]]
) -> None:
    with pytest.raises(HttpFailure, match="start_profile") as early:
        pair.p.post("/stop_profile", {})
    assert early.value.status == 409
    assert pair.p.post("/start_profile", {}) == {"profile": None}
    with pytest.raises(HttpFailure, match="is being made"):
        pair.p.post("/start_profile", {})
    pair.tokens(prompt(100), max_tokens=3)
    path = Path(pair.p.post("/stop_profile", {})["profile"])
    assert path.name.startswith("p16-")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::addmm" in names or "aten::linear" in names, "of the thread that runs steps"
    pair.p.post("/start_profile", {})
    assert Path(pair.p.post("/stop_profile", {})["profile"]) != path
    assert pair.tokens(prompt(90), max_tokens=3)


def test_without_a_folder_it_is_refused(pair: Pair) -> None:
    pair.moves = "nothing"
    with pytest.raises(HttpFailure, match="--profile-dir") as refused:
        pair.d.post("/start_profile", {})
    assert refused.value.status == 409
