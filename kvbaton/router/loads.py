"""What the router has in flight at each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvbaton.router.actions import Leg
from kvbaton.router.pairing import NodeLoad

IDLE = NodeLoad()


class LoadBook(Mapping[str, NodeLoad]):
    """In-flight work by node id; every leg is entered once and struck once."""

    def __init__(self) -> None:
        self._by_node: dict[str, NodeLoad] = {}
        self._by_leg: dict[int, tuple[str, NodeLoad]] = {}

    def enter(self, leg: Leg, num_tokens: int, *, prefills: bool, rows: int = 0) -> None:
        """A leg begins.

        Args:
            leg: with its node.
            num_tokens: of prompt and resumed tokens.
            prefills: the node computes the prompt: a source, or a target without one.
            rows: of items that the node is to encode.
        """
        prompt = num_tokens if prefills else 0
        if leg.side == "target":
            self._set(leg, NodeLoad(prompt, sequences=1, tokens=num_tokens, rows=rows))
        else:
            self._set(leg, NodeLoad(prompt, rows=rows))

    def prefilled(self, leg: Leg) -> None:
        """A leg's first token has come: its prompt is computed."""
        entry = self._by_leg.get(id(leg))
        if entry is not None and entry[1].prompt_tokens:
            self._set(leg, NodeLoad(0, entry[1].sequences, entry[1].tokens))

    def strike(self, leg: Leg) -> None:
        """A leg is over."""
        self._set(leg, IDLE)
        self._by_leg.pop(id(leg), None)

    def _set(self, leg: Leg, load: NodeLoad) -> None:
        node = leg.node.node_id
        _, old = self._by_leg.get(id(leg), (node, IDLE))
        now = self._by_node.get(node, IDLE)
        total = NodeLoad(
            now.prompt_tokens - old.prompt_tokens + load.prompt_tokens,
            now.sequences - old.sequences + load.sequences,
            now.tokens - old.tokens + load.tokens,
            now.rows - old.rows + load.rows,
        )
        self._by_leg[id(leg)] = (node, load)
        self._by_node[node] = total
        if total == IDLE:
            del self._by_node[node]

    def __getitem__(self, node_id: str) -> NodeLoad:
        return self._by_node[node_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_node)

    def __len__(self) -> int:
        return len(self._by_node)
