"""Blocks cross while the prefill still runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import SLOW_CHUNK as CHUNK
from tests.support.served_pair import Pair, settle
from tests.support.servers import Node

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]


def marks(node: Node, what: str) -> list[dict[str, Any]]:
    """What happened to the latest transfer of a node, in order."""
    *_, timeline = node.state()["timelines"].values()
    return [mark for mark in timeline if mark["what"] == what]


def test_all_but_the_last_chunk_land_before_the_last_is_computed(
    slow_nodes: tuple[Node, Node], slow_model: Path, prompt: Prompt
) -> None:
    pair = Pair(*slow_nodes, slow_model)
    chunks = 6
    ids = prompt(chunks * CHUNK - 3)
    tokens = pair.tokens(ids, max_tokens=3)
    settle(pair.p, pair.d)
    computed, landed = marks(pair.p, "computed"), marks(pair.d, "landed")
    ends = [*range(CHUNK, len(ids), CHUNK), len(ids)]
    found = [mark["end"] for mark in computed]
    assert found == ends[-len(found) :], "every chunk is reported as soon as it is computed"
    assert len(found) >= chunks - 2, "but for what was, when D's request came"
    last = computed[-1]["time"]
    early = [mark for mark in landed if mark["time"] < last]
    assert len(early) >= len(found) - 1
    assert len(landed) == len(found)
    assert tokens == pair.alone(ids, max_tokens=3)
    pair.close_books()
