from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.engine_pair import expected, make_pair
from tests.support.held_store import BOXES, Box
from tests.support.store_nodes import Nodes

__all__ = ["expected", "make_pair"]

_numbers = itertools.count()


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture
def nodes(folder: Path) -> Iterator[Nodes]:
    made = Nodes(folder)
    yield made
    made.end_all()


@pytest.fixture
def box() -> Box:
    """The box of this test's store."""
    name = f"box-{next(_numbers)}"
    return BOXES.setdefault(name, Box(name))
