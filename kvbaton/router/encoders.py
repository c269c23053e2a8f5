"""Where the items of a prompt are encoded: pure functions over what is known now.

An item goes to an encoder node, or is left to the node that prefills its prompt,
wherever it is estimated to be done first. Of several encoder nodes, equal items go to the same one,
which finds them in its cache, as long as that one is not overloaded: rendezvous hashing (Thaler and
Ravishankar, 1998) with a bounded load (Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from kvbaton.messages.engine import Item
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.membership import Member
from kvbaton.router.pairing import NodeLoad, Route, can_encode_for

BOUND = 1.25
"""An encoder node may have this much more queued than the average one, and one item."""
HANDOVER_S = 0.005
"""What an encoder node's answer needs to get there, beyond being encoded."""
PREFILL_TIME = 2.0
"""A node that encodes computes no prompt meanwhile: its time counts so many times."""
UNMEASURED_ROWS = 64
"""While nobody has measured anything, encoder nodes get items of at least so many rows."""
ROW_S, TOKEN_S = "encoder_row_s", "prompt_token_s"
"""Entries of `NodeInfo.load`."""


@dataclass
class _Board:
    """What is queued, with what this request has been given already."""

    loads: Mapping[str, NodeLoad]
    given: dict[str, int] = field(default_factory=dict)

    def rows(self, node: NodeInfo) -> int:
        """Rows that are to be encoded there for us."""
        return self.loads.get(node.node_id, NodeLoad()).rows + self.given.get(node.node_id, 0)

    def give(self, node: NodeInfo, rows: int) -> None:
        self.given[node.node_id] = self.given.get(node.node_id, 0) + rows


def with_encoders(
    route: Route,
    items: Sequence[Item],
    ready: Sequence[Member],
    loads: Mapping[str, NodeLoad],
    *,
    exclude: Set[str] = frozenset(),
    min_rows: int | None = None,
) -> Route:
    """A route that also says who encodes each item.

    Args:
        route: of the prompt.
        items: of the prompt; the second of two equal ones needs no encoder.
        ready: members that may get requests.
        loads: by node id.
        exclude: node ids that already failed this request.
        min_rows: items of fewer rows are encoded where their prompt is prefilled, all others by
            encoder nodes; None estimates for each where it is done first.
    """
    prefills = next(m for m in ready if m.info.node_id == route.prefills.node_id)
    encoders = [
        member.info
        for member in ready
        if member.info.role == "encode"
        and member.info.node_id not in exclude
        and can_encode_for(member, prefills)
    ]
    board, seen = _Board(loads), set[bytes]()
    chosen: list[NodeInfo | None] = []
    for item in items:
        again = item.digest in seen
        seen.add(item.digest)
        chosen.append(None if again else _choose(item, prefills.info, encoders, board, min_rows))
    return Route(route.target, route.source, tuple(chosen))


def _choose(
    item: Item,
    prefills: NodeInfo,
    encoders: Sequence[NodeInfo],
    board: _Board,
    min_rows: int | None,
) -> NodeInfo | None:
    large_enough = [
        e for e in encoders if not e.max_model_len or e.max_model_len > item.padded_rows
    ]
    encoder = _by_digest(item, large_enough, board) if large_enough else None
    if (
        encoder is not None
        and prefills.encodes
        and _stays(item, prefills, encoder, board, min_rows)
    ):
        encoder = None
    board.give(encoder or prefills, item.length)
    return encoder


def _by_digest(item: Item, encoders: Sequence[NodeInfo], board: _Board) -> NodeInfo:
    """The node that equal items go to, or the least loaded one if that has too much to do."""
    favourite = max(encoders, key=lambda node: _score(item.digest, node.node_id))
    average = sum(board.rows(node) for node in encoders) / len(encoders)
    if board.rows(favourite) <= BOUND * average + item.length:
        return favourite
    return min(encoders, key=lambda node: (board.rows(node), node.node_id))


def _score(digest: bytes, node_id: str) -> bytes:
    return hashlib.blake2b(node_id.encode(), key=digest[:64], digest_size=8).digest()


def _stays(
    item: Item, prefills: NodeInfo, encoder: NodeInfo, board: _Board, min_rows: int | None
) -> bool:
    """Whether an item is encoded where its prompt is prefilled."""
    if min_rows is not None:
        return item.length < min_rows
    there = encoder.load.get(ROW_S)
    here = prefills.load.get(ROW_S, there)  # as good a guess as any, until it has encoded something
    if here is None:
        return item.length < UNMEASURED_ROWS
    if there is None:
        there = here
    queued = board.loads.get(prefills.node_id, NodeLoad()).prompt_tokens
    waits = queued * prefills.load.get(TOKEN_S, 0.0)
    local = waits + (board.rows(prefills) + item.length) * here
    return PREFILL_TIME * local < (board.rows(encoder) + item.length) * there + HANDOVER_S
