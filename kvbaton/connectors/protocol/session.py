"""What both sides share of sessions: numbering, filtering and negotiation."""

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
from kvbaton.connectors.protocol.machine import Context
from kvbaton.messages.control import Message, RankCard
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
        num_ranks: of the peer.
        pairings: of the groups of both sides.
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
    num_ranks: int = 0
    pairings: Sequence[GroupPairing] = ()
    receiver: NodeId | None = None
    attempts: dict[Attempt, Any] = field(default_factory=dict)

    def send(self, context: Context, kind: type[Message], **fields: Any) -> None:
        """Send to where the last message came from, else to the address."""
        fields |= {"session": self.id, "seq": next(self.numbers), "receiver": self.receiver}
        message: Any = kind(**fields)
        address = self.address if self.link is None else None
        context.do(SendMessage(message, link=self.link, address=address))

    def admit(self, context: Context, link: Link, seq: int) -> bool:
        """Whether a message is newer than all before it; replies then go to its link."""
        if seq <= self.last_in:
            context.count("stale_seq", dropped=True)
            return False
        self.last_in, self.link = seq, link
        return True


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


class Sessions(Generic[SessionT]):
    """A side's sessions.

    Args:
        context: shared with the machine.
        identity: what this side says of itself.
        timers: of the protocol.
        pair: pairs the groups of layouts, source first.

    Attributes:
        layouts: of this side.
        known: by id.
    """

    def __init__(
        self, context: Context, identity: Identity, timers: TransferTimers, pair: Pair
    ) -> None:
        self.context = context
        self.identity = identity
        self.timers = timers
        self.layouts = decode_layouts(identity.ranks)
        self.known: dict[bytes, SessionT] = {}
        self._pair = pair

    def of(self, node: NodeId | None) -> list[SessionT]:
        """The sessions with a generation."""
        return [session for session in self.known.values() if session.node == node]

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
