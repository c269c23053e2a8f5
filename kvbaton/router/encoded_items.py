"""Remembers which nodes are likely to hold an image's encoder output, by their recent prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvbaton.messages.engine import Item
from kvbaton.messages.nodes import NodeInfo

MOST_NODES = 1024
"""Maximum number of nodes remembered, those with the latest prompts."""


class EncodedItems:
    """The last items of each node's prompts, up to as many rows as its longest prompt has tokens.

    Its encoder cache holds twice as many (`engine.encoder.worker.pool_blocks`), but other routers
    fill it, too. If it holds less than remembered here, the node encodes the item again.
    """

    def __init__(self) -> None:
        self._nodes = OrderedDict[tuple[str, str], OrderedDict[tuple[str, bytes], int]]()

    def computed(self, node: NodeInfo, cache_salt: str, items: Sequence[Item]) -> None:
        """Record that a node has computed a prompt with these items, so it had their outputs."""
        name = node.node_id, node.generation
        held = self._nodes.setdefault(name, OrderedDict())
        self._nodes.move_to_end(name)
        for item in items:
            held.pop((cache_salt, item.digest), None)
            held[cache_salt, item.digest] = item.padded_rows
        rows = sum(held.values())
        while rows > node.max_model_len:
            rows -= held.popitem(last=False)[1]
        if len(self._nodes) > MOST_NODES:
            self._nodes.popitem(last=False)

    def at(self, node: NodeInfo, cache_salt: str, items: Sequence[Item]) -> frozenset[bytes]:
        """Digests of these items whose outputs a node is likely to hold."""
        held = self._nodes.get((node.node_id, node.generation), ())
        return frozenset(item.digest for item in items if (cache_salt, item.digest) in held)
