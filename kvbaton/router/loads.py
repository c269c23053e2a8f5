"""What the router has in flight at each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvbaton.router.node_request import NodeRequest
from kvbaton.router.pairing import NodeLoad

IDLE = NodeLoad()


class NodeLoads(Mapping[str, NodeLoad]):
    """In-flight work by node id; every node request is entered once and removed once.

    Attributes:
        others: what other workers of this router have in flight; added to ours.
    """

    def __init__(self) -> None:
        self.others: Mapping[str, NodeLoad] = {}
        self._by_node: dict[str, NodeLoad] = {}
        self._mine: dict[NodeRequest, NodeLoad] = {}

    def enter(self, asked: NodeRequest) -> None:
        """A node is asked."""
        request = asked.request
        tokens = len(request.token_ids) + len(request.resume_ids)
        prompt, rows = tokens if asked.prefills else 0, sum(asked.rows)
        if asked.side == "target":
            self._set(asked, NodeLoad(prompt, sequences=1, tokens=tokens, rows=rows))
        else:
            self._set(asked, NodeLoad(prompt, rows=rows))

    def prefilled(self, asked: NodeRequest) -> None:
        """A node's first token has come: its prompt is computed."""
        load = self._mine.get(asked, IDLE)
        if load.prompt_tokens:
            self._set(asked, NodeLoad(0, load.sequences, load.tokens))

    def remove(self, asked: NodeRequest) -> None:
        """A node's request is over."""
        self._set(asked, IDLE)
        del self._mine[asked]

    def _set(self, asked: NodeRequest, load: NodeLoad) -> None:
        node = asked.node.node_id
        old, now = self._mine.get(asked, IDLE), self._by_node.get(node, IDLE)
        self._mine[asked] = load
        total = now + load - old
        if total == IDLE:
            self._by_node.pop(node, None)
        else:
            self._by_node[node] = total

    @property
    def own(self) -> dict[str, NodeLoad]:
        """Without that of other workers."""
        return dict(self._by_node)

    def __getitem__(self, node_id: str) -> NodeLoad:
        if node_id not in self.others:
            return self._by_node[node_id]
        return self._by_node.get(node_id, IDLE) + self.others[node_id]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._by_node, **self.others})

    def __len__(self) -> int:
        return len({**self._by_node, **self.others})
