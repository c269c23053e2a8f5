"""What both sides share of a session: numbering, filtering and negotiation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.connectors.protocol.events import Identity, Link, Send
from kvbaton.messages.control import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Hello,
    Message,
    RankCard,
    Refused,
    Welcome,
)
from kvbaton.types import NodeId, TransferTimers

if TYPE_CHECKING:
    from kvbaton.connectors.protocol.machine import Context

Layouts = Sequence[Sequence[KVLayout]]
"""Per rank, one layout per group."""

Pairable = Callable[[Layouts, Layouts], None]
"""Raises `ValueError` (`LayoutMismatchError`), naming both values, if two sides can't pair."""

MAX_RANKS = 1024
MAX_GROUPS = 64
MAX_BLOCK_SIZE = 1 << 16
MAX_BLOCKS = 1 << 40


class NegotiationError(Exception):
    """Two sides can't pair; `code` is that of the `Refused` to send."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Group:
    """What the machines need to know of one KV group of one side."""

    kind: GroupKind
    block_size: int
    num_blocks: int


@dataclass
class Session:
    """One control session, as one side sees it.

    Attributes:
        id: random, minted by D.
        link: where the last message of it came from; replies go there.
        node: the peer; None until D knows.
        last_in: highest number received.
        numbers: counts the messages sent; D has one counter for all of its sessions, so that P can
            tell a `Hello` that was overtaken by those of later sessions.
        groups: of the peer.
        num_ranks: of the peer.
        address: of P, to dial while there is no link.
        version: that both speak.
    """

    id: bytes
    link: Link | None = None
    node: NodeId | None = None
    last_in: int = -1
    numbers: Iterator[int] = field(default_factory=itertools.count)
    groups: tuple[Group, ...] = ()
    num_ranks: int = 0
    address: str | None = None
    version: int = 0

    def send(self, context: Context, kind: type[Message], **fields: Any) -> None:
        """Send to where the last message came from, else to the address."""
        message: Any = kind(session=self.id, seq=next(self.numbers), **fields)
        address = self.address if self.link is None else None
        context.do(Send(message, link=self.link, address=address))

    def admit(self, link: Link, seq: int) -> bool:
        """Whether a message is newer than all before it; replies then go to its link."""
        if seq <= self.last_in:
            return False
        self.last_in, self.link = seq, link
        return True


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
    for rank, groups in enumerate(layouts):
        _check_groups(rank, groups, layouts[0])
    return layouts


def _check_groups(rank: int, groups: list[KVLayout], first: list[KVLayout]) -> None:
    if not 1 <= len(groups) <= MAX_GROUPS or len(groups) != len(first):
        raise NegotiationError(
            "malformed", f"rank {rank} has {len(groups)} groups, rank 0 has {len(first)}"
        )
    for number, (layout, other) in enumerate(zip(groups, first, strict=True)):
        if layout.group != number or group_of(layout) != group_of(other):
            raise NegotiationError("malformed", f"rank {rank}, group {number} differs from rank 0")
        if not (0 < layout.block_size <= MAX_BLOCK_SIZE and 1 < layout.num_blocks <= MAX_BLOCKS):
            raise NegotiationError(
                "malformed",
                f"group {number} has {layout.num_blocks} blocks of {layout.block_size} tokens",
            )


def group_of(layout: KVLayout) -> Group:
    """The part of a layout that the machines look at."""
    return Group(layout.kind, layout.block_size, layout.num_blocks)


def groups_of(layouts: Layouts) -> tuple[Group, ...]:
    """Groups of one side; equal on all of its ranks."""
    return tuple(group_of(layout) for layout in layouts[0])


def common_unit(ours: Sequence[Group], theirs: Sequence[Group]) -> int:
    """Tokens between two borders at which blocks of both sides begin, in all groups."""
    sizes = [g.block_size for g in (*ours, *theirs) if g.kind is not GroupKind.STATE]
    return math.lcm(*sizes) if sizes else 1


class Negotiator:
    """Decides whether two sides pair.

    Args:
        identity: what this side says of itself.
        pairable: checks layouts, source first.
    """

    def __init__(self, identity: Identity, pairable: Pairable) -> None:
        self.identity = identity
        self.layouts = decode_layouts(identity.ranks)
        self.groups = groups_of(self.layouts)
        self._pairable = pairable

    def check_hello(self, hello: Hello) -> list[list[KVLayout]]:
        """Layouts of D's ranks.

        Raises:
            NegotiationError: it can't pair with us; the message names both values.
        """
        ours = self.identity
        low, high = hello.min_version, hello.max_version
        if not (low <= PROTOCOL_VERSION and MIN_PROTOCOL_VERSION <= high):
            spoken = f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            raise NegotiationError("version", f"source speaks {spoken}, target {low} to {high}")
        if hello.identity != ours.digest:
            raise NegotiationError("identity", _differences(ours, hello.identity_record))
        if hello.transport != ours.transport:
            raise NegotiationError(
                "transport", f"source uses {ours.transport!r}, target {hello.transport!r}"
            )
        theirs = decode_layouts(hello.ranks)
        self._check_layouts(self.layouts, theirs)
        return theirs

    def check_welcome(self, welcome: Welcome) -> list[list[KVLayout]]:
        """Layouts of P's ranks.

        Raises:
            NegotiationError: it can't pair with us; the message names both values.
        """
        if not MIN_PROTOCOL_VERSION <= welcome.version <= PROTOCOL_VERSION:
            raise NegotiationError("version", f"source chose version {welcome.version}")
        theirs = decode_layouts(welcome.ranks)
        self._check_layouts(theirs, self.layouts)
        return theirs

    def version(self, hello: Hello) -> int:
        """The version to speak with a D that `check_hello` let pass."""
        return min(PROTOCOL_VERSION, hello.max_version)

    def _check_layouts(self, source: Layouts, target: Layouts) -> None:
        if len(source[0]) != len(target[0]):
            raise NegotiationError(
                "layout", f"source has {len(source[0])} groups, target {len(target[0])}"
            )
        try:
            self._pairable(source, target)
        except (ValueError, ArithmeticError, LookupError, TypeError) as error:
            # A peer's layouts may be wrong in ways that no check of ours foresaw.
            raise NegotiationError("layout", str(error) or type(error).__name__) from error


def _differences(ours: Identity, theirs: dict[str, str]) -> str:
    fields = sorted(set(ours.record) | set(theirs))
    differing = [
        f"{name}: source {ours.record.get(name)!r}, target {theirs.get(name)!r}"
        for name in fields
        if ours.record.get(name) != theirs.get(name)
    ]
    return ("; ".join(differing) or "identity digests differ, records do not")[:4000]


def refuse_session(session: bytes, code: str, why: str, *, retryable: bool = False) -> Refused:
    """Refuse a whole session. Not numbered: it is true whenever it arrives."""
    return Refused(session=session, seq=0, code=code, message=why[:4000], retryable=retryable)


def check_timers(timers: TransferTimers) -> None:
    """Raise `ValueError` if a timer is not positive."""
    for name in timers.__dataclass_fields__:
        if not getattr(timers, name) > 0:
            raise ValueError(f"timer {name} must be positive, not {getattr(timers, name)}")
