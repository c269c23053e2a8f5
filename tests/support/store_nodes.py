"""Engines with a store, in threads of the test's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbaton.engine.build import ConnectorFactory
from tests.support.engine_node import Node
from tests.support.waiting import until


class Nodes:
    """Starts nodes and ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._live: list[Node] = []

    def start(self, store: str | None, *factories: ConnectorFactory, **settings: Any) -> Node:
        """Start a node, by default without other nodes."""
        patient = {"store": store, "store_lookup_timeout": 60.0, "store_load_timeout": 60.0}
        node = Node("node", self._folder, *factories, **(patient | settings))
        self._live.append(node)
        return node

    def end(self, node: Node) -> None:
        """Wait until a node is at rest, and end it; check that its ledger always balanced."""
        rest(node)
        self.stop(node)

    def stop(self, node: Node) -> None:
        """End a node, even with unfinished work of its store."""
        self._live.remove(node)
        self._bury(node)
        assert node.failure is None
        assert node.imbalance == 0

    def end_all(self) -> None:
        """End all nodes, whatever they are doing."""
        for node in self._live:
            self._bury(node)
            assert node.imbalance == 0

    @staticmethod
    def _bury(node: Node) -> None:
        node.mailbox.kill()
        node.bury()


def rest(node: Node) -> None:
    """Wait until a node and its store are at rest."""
    until(lambda: not node.leftovers() and node.ask("drain"), f"{node.id.node} at rest")
    node.core.draining = False
    assert node.imbalance == 0


def save(node: Node, prompt: tuple[int, ...]) -> None:
    """Let a node compute and save a prompt; afterwards only the store has it."""
    node.generate(prompt).result()
    rest(node)
    node.ask("reset_prefix_cache")


def count(node: Node, name: str, **labels: str) -> float:
    """Value of a counter, summed over labels that are not given."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for key, value in node.counters().items()
        if key.partition("{")[0] == f"kvbaton_{name}_total" and all(w in key for w in wanted)
    )
