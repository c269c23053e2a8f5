"""Engines with a store, in threads of this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engine.build import ConnectorFactory
from tests.handover.conftest import Expected, expected, make_pair
from tests.handover.pair import Node, until
from tests.store_connector.held import BOXES, Box

__all__ = ["Expected", "Nodes", "expected", "make_pair"]

_numbers = itertools.count()


class Nodes:
    """Starts nodes and ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._live: list[Node] = []

    def start(self, store: str | None, *factories: ConnectorFactory, **settings: Any) -> Node:
        """A node; it stands alone unless told otherwise."""
        patient = {"store": store, "store_lookup_timeout": 60.0, "store_load_timeout": 60.0}
        node = Node("node", self._folder, *factories, **(patient | settings))
        self._live.append(node)
        return node

    def end(self, node: Node) -> None:
        """End a node that has nothing left to do; its ledger has always balanced."""
        rest(node)
        self.stop(node)

    def stop(self, node: Node) -> None:
        """End a node, whatever its store still owes."""
        self._live.remove(node)
        self._bury(node)
        assert node.failure is None
        assert node.imbalance == 0

    def end_all(self) -> None:
        """Whatever they are doing."""
        for node in self._live:
            self._bury(node)
            assert node.imbalance == 0

    @staticmethod
    def _bury(node: Node) -> None:
        node.mailbox.kill()
        node.bury()


def rest(node: Node) -> None:
    """Wait until a node holds nothing and owes nothing, to its store neither."""
    until(lambda: not node.leftovers() and node.ask("drain"), f"{node.id.node} at rest")
    node.core.draining = False
    assert node.imbalance == 0


def count(node: Node, name: str, **labels: str) -> float:
    """A counter's sum over the labels that are not given."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for key, value in node.counters().items()
        if key.partition("{")[0] == f"kvbaton_{name}_total" and all(w in key for w in wanted)
    )


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture
def nodes(folder: Path) -> Iterator[Nodes]:
    made = Nodes(folder)
    yield made
    made.end_all()


@pytest.fixture
def box_name() -> str:
    return f"box-{next(_numbers)}"


@pytest.fixture
def box(box_name: str) -> Box:
    """The box of this test's store."""
    return BOXES[box_name]


@pytest.fixture
def spec(box: Box, box_name: str) -> str:
    """Names this test's store."""
    return f'tests.store_connector.held:HeldStore:{{"box": "{box_name}"}}'
