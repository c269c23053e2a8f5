"""Pairs of engines over one tiny model, and what a node alone answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbaton.connectors.transfer.endpoint import HandoverConfig
from kvbaton.decode import DecodeFactory
from tests.handover.pair import Node, Pair

Expected = Callable[..., list[int]]


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture
def make_pair(folder: Path) -> Iterator[Callable[..., Pair]]:
    """Makes pairs, and ends them."""
    made: list[Pair] = []

    def make(**settings: Any) -> Pair:
        made.append(Pair(folder, **settings))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


@pytest.fixture(scope="session")
def expected(folder: Path) -> Iterator[Expected]:
    """What one node answers, that never heard of hand-overs."""
    node = Node("alone", folder, DecodeFactory(HandoverConfig(transport="memory")))
    known: dict[tuple[Any, ...], list[int]] = {}

    def answer(prompt: Sequence[int], **params: Any) -> list[int]:
        key = (tuple(prompt), *sorted(params.items()))
        if key not in known:
            known[key] = node.generate(prompt, **params).result()
        return known[key]

    yield answer
    node.strike()
    node.bury()
