"""A control session, as either side keeps it, and what is believed of a peer's layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.pairing import GroupPairing
from kvbaton.connectors.protocol.events import Link
from kvbaton.messages.control import RankCard
from kvbaton.types import Attempt, NodeId

Layouts = Sequence[Sequence[KVLayout]]
"""Per rank, one layout per group."""

Pair = Callable[[Layouts, Layouts], Sequence[GroupPairing]]
"""Pairs groups; raises `ValueError` (`LayoutMismatchError`), naming both values, if it can't."""

MAX_RANKS = 1024
MAX_GROUPS = 64
MAX_BLOCK_SIZE = 1 << 16
MAX_BLOCKS = 1 << 40


class SessionState(Enum):
    """State of a session. D's goes from hello to up to over, P's from up to over."""

    HELLO = "hello"
    UP = "up"
    ENDING = "ending"
    """Nothing is posted any more; writes may be under way."""
    CLOSING = "closing"
    """Its connection is being closed."""
    OVER = "over"


@dataclass
class Session:
    """One control session, as one side sees it.

    Attributes:
        id: random, minted by D.
        link: where the last message of it came from; replies go there.
        node: the peer; None until D knows.
        address: of P, to dial while there is no link.
        last_in: highest number received.
        numbers: counts the messages sent; D has one counter for all of its sessions, so that P can
            tell a `Hello` that was overtaken by those of later sessions.
        version: of the protocol that it speaks.
        groups: of the peer: the layouts of its rank 0, which say of the others as much as the
            machines use.
        pairings: of the groups of both sides.
        pairs: (source rank, target rank): who writes to whom.
        receiver: whom its messages name as such.
        attempts: alive and bound to the session; on D those in quarantine included.
    """

    id: bytes
    state: SessionState
    link: Link | None = None
    node: NodeId | None = None
    address: str | None = None
    last_in: int = -1
    numbers: Iterator[int] = field(default_factory=itertools.count)
    version: int = 0
    groups: Sequence[KVLayout] = ()
    pairings: Sequence[GroupPairing] = ()
    pairs: frozenset[tuple[int, int]] = frozenset()
    receiver: NodeId | None = None
    attempts: dict[Attempt, Any] = field(default_factory=dict)


class RefusalError(Exception):
    """What a peer asks for can't be honoured.

    Attributes:
        code: that of the `Refused` to send.
        retry: it may be asked for again later.
    """

    def __init__(self, code: str, why: str, *, retry: bool = False) -> None:
        super().__init__(why)
        self.code, self.retry = code, retry


def decode_layouts(ranks: Sequence[RankCard]) -> list[list[KVLayout]]:
    """Layouts per rank, checked as far as the machines use them.

    Raises:
        RefusalError: they are nonsense (code ``malformed``).
    """
    if not 1 <= len(ranks) <= MAX_RANKS or [card.rank for card in ranks] != list(range(len(ranks))):
        raise RefusalError("malformed", f"ranks must be numbered 0 to at most {MAX_RANKS - 1}")
    try:
        layouts = [msgspec.msgpack.decode(card.layouts, type=list[KVLayout]) for card in ranks]
    except msgspec.DecodeError as error:
        raise RefusalError("malformed", f"layouts can't be read: {error}") from error
    # What the machines look at; `pair_groups` looks at the rest.
    shapes = [[(g.group, g.kind, g.block_size, g.num_blocks) for g in of] for of in layouts]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise RefusalError("malformed", f"rank {rank} has {shape}, rank 0 {shapes[0]}")
    if not 1 <= len(shapes[0]) <= MAX_GROUPS:
        raise RefusalError("malformed", f"{len(shapes[0])} groups, at most {MAX_GROUPS} may be")
    for number, (group, _, size, count) in enumerate(shapes[0]):
        if group != number or not (0 < size <= MAX_BLOCK_SIZE and 1 < count <= MAX_BLOCKS):
            why = f"group {number} is called {group}, and has {count} blocks of {size} tokens"
            raise RefusalError("malformed", why)
    return layouts
