"""Engines with a store, in threads of this process."""

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


def save(node: Node, prompt: tuple[int, ...]) -> None:
    """Let a node compute a prompt and save it; it is nowhere but in the store then."""
    node.generate(prompt).result()
    rest(node)
    node.ask("reset_prefix_cache")


def count(node: Node, name: str, **labels: str) -> float:
    """A counter's sum over the labels that are not given."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for key, value in node.counters().items()
        if key.partition("{")[0] == f"kvbaton_{name}_total" and all(w in key for w in wanted)
    )
