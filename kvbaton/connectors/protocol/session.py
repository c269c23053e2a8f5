"""What both sides have of sessions: numbering, filtering and negotiation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.pairing import GroupPairing
from kvbaton.connectors.protocol.events import Identity, Link, SendMessage
from kvbaton.connectors.protocol.machine import Machine, RecordT
from kvbaton.messages.control import (
    SHARING_PAIRS_VERSION,
    Message,
    RankCard,
    Refused,
    TransferMessage,
)
from kvbaton.types import Attempt, NodeId, TransferTimers

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
    groups: Sequence[KVLayout] = ()
    pairings: Sequence[GroupPairing] = ()
    pairs: frozenset[tuple[int, int]] = frozenset()
    receiver: NodeId | None = None
    attempts: dict[Attempt, Any] = field(default_factory=dict)


class NegotiationError(Exception):
    """Two sides can't pair; `code` is that of the `Refused` to send."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def decode_layouts(ranks: Sequence[RankCard]) -> list[list[KVLayout]]:
    """Layouts per rank, checked as far as the machines use them.

    Raises:
        NegotiationError: they are nonsense (code ``malformed``).
    """
    if not 1 <= len(ranks) <= MAX_RANKS or [card.rank for card in ranks] != list(range(len(ranks))):
        raise NegotiationError("malformed", f"ranks must be numbered 0 to at most {MAX_RANKS - 1}")
    try:
        layouts = [msgspec.msgpack.decode(card.layouts, type=list[KVLayout]) for card in ranks]
    except msgspec.DecodeError as error:
        raise NegotiationError("malformed", f"layouts can't be read: {error}") from error
    # What the machines look at; `pair_groups` looks at the rest.
    shapes = [[(g.group, g.kind, g.block_size, g.num_blocks) for g in of] for of in layouts]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise NegotiationError("malformed", f"rank {rank} has {shape}, rank 0 {shapes[0]}")
    if not 1 <= len(shapes[0]) <= MAX_GROUPS:
        raise NegotiationError("malformed", f"{len(shapes[0])} groups, at most {MAX_GROUPS} may be")
    for number, (group, _, size, count) in enumerate(shapes[0]):
        if group != number or not (0 < size <= MAX_BLOCK_SIZE and 1 < count <= MAX_BLOCKS):
            why = f"group {number} is called {group}, and has {count} blocks of {size} tokens"
            raise NegotiationError("malformed", why)
    return layouts


SessionT = TypeVar("SessionT", bound=Session)


class Sessions(Machine[RecordT], Generic[RecordT, SessionT]):
    """The part of a machine that knows sessions, as far as both sides have it.

    Args:
        identity: what this side says of itself.
        timers: of the protocol.
        pair: pairs the groups of layouts, source first.

    Attributes:
        groups: of this side.
        known: sessions by id.
    """

    def __init__(self, identity: Identity, timers: TransferTimers, pair: Pair) -> None:
        super().__init__(timers)
        self.identity = identity
        self.layouts = decode_layouts(identity.ranks)
        self.groups = self.layouts[0]
        self.known: dict[bytes, SessionT] = {}
        self._pair = pair

    def of(self, node: NodeId | None) -> list[SessionT]:
        """The sessions with a generation."""
        return [session for session in self.known.values() if session.node == node]

    def send(self, session: Session, kind: type[Message], **fields: Any) -> None:
        """Send to where the last message of a session came from, else to its address."""
        fields |= {"session": session.id, "seq": next(session.numbers)}
        message: Any = kind(receiver=session.receiver, **fields)
        address = session.address if session.link is None else None
        self.do(SendMessage(message, link=session.link, address=address))

    def admit(self, session: Session, link: Link, seq: int) -> bool:
        """Whether a message is newer than all before it; replies then go to its link."""
        if seq <= session.last_in:
            self.count("stale_seq")
            return False
        session.last_in, session.link = seq, link
        return True

    def pair(self, source: Layouts, target: Layouts) -> Sequence[GroupPairing]:
        """How blocks can cross.

        Raises:
            NegotiationError: they can't; the message names both values.
        """
        if len(source[0]) != len(target[0]):
            raise NegotiationError(
                "layout", f"source has {len(source[0])} groups, target {len(target[0])}"
            )
        try:
            return self._pair(source, target)
        except (ValueError, ArithmeticError, LookupError, TypeError) as error:
            # A peer's layouts may be wrong in ways that no check of ours foresaw.
            raise NegotiationError("layout", str(error) or type(error).__name__) from error

    def dump(self) -> list[dict[str, Any]]:
        """Sessions that are in use or whose writes may still land, for diagnosis."""
        return [
            {
                "session": session.id.hex(),
                "address": session.address,
                "node": session.node.node if session.node else None,
                "generation": session.node.generation.hex() if session.node else None,
                "state": session.state.value,
                "attempts": len(session.attempts),
            }
            for session in self.known.values()
        ]

    def _send(
        self, record: RecordT, kind: type[TransferMessage] | type[Refused], **fields: Any
    ) -> None:
        """Send a message about an attempt, in the session that it is bound to."""
        record.story.append((self.now, f"> {kind.__name__}"))
        name = {"transfer_id": record.name.transfer_id, "attempt": record.name.number}
        self.send(record.session, kind, **name, **fields)


def writing_pairs(
    version: int, pairings: Sequence[GroupPairing], num_sources: int, num_targets: int
) -> frozenset[tuple[int, int]]:
    """Which (source rank, target rank) write in a session of a protocol version."""
    if version < SHARING_PAIRS_VERSION:  # those that share no bytes as well
        return frozenset(itertools.product(range(num_sources), range(num_targets)))
    return frozenset(pair for pairing in pairings for pair in pairing.shares)
