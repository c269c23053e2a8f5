"""What both sides of the hand-over share: sessions, negotiation, timers by name, stories."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec

from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.protocol.events import Attempt, Identity, Link
from kvbaton.wire import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION, Hello, NodeId, RankCard

Pairable = Callable[[Sequence[KVLayout], Sequence[KVLayout]], None]
"""Raises `LayoutMismatchError` if P's and D's layouts of one group, per rank, can't meet."""

MAX_STORIES = 512
MAX_LINES = 200

_layouts = msgspec.msgpack.Decoder(list[KVLayout])


@dataclass
class Session:
    """A session as the source sees it.

    Attributes:
        id: random, minted by D.
        node: D's life.
        link: where D was heard last.
        ranks: D's cards.
        closing: ended; waits for its writes.
        version: protocol version that both speak.
    """

    id: bytes
    node: NodeId
    link: Link
    ranks: tuple[RankCard, ...]
    closing: bool = False
    version: int = PROTOCOL_VERSION
    _seq_in: int = -1
    _seq_out: int = -1

    def accept(self, seq: int) -> bool:
        """Whether a message is newer than all before it."""
        if seq <= self._seq_in:
            return False
        self._seq_in = seq
        return True

    def next_seq(self) -> int:
        """Number of the next message out."""
        self._seq_out += 1
        return self._seq_out


@lru_cache(maxsize=256)
def _decode(layouts: bytes) -> tuple[KVLayout, ...]:
    decoded = tuple(_layouts.decode(layouts))
    if not decoded or any(not layout.planes or layout.block_size < 1 for layout in decoded):
        raise ValueError("layouts without groups, planes or tokens")
    return decoded


def decode_layouts(ranks: Sequence[RankCard]) -> list[tuple[KVLayout, ...]]:
    """Per rank, the layouts of its groups.

    Raises:
        msgspec.DecodeError: they are no layouts.
        ValueError: there are none, or ranks differ in their number of groups or block sizes.
    """
    decoded = [_decode(card.layouts) for card in ranks]
    if not decoded:
        raise ValueError("no ranks")
    shapes = {tuple((g.group, g.block_size, g.num_blocks) for g in rank) for rank in decoded}
    if len(shapes) != 1:
        raise ValueError("ranks differ in groups, block sizes or pool sizes")
    return decoded


def refusal(identity: Identity, hello: Hello) -> tuple[str, str] | None:
    """Why a `Hello` can't be taken by this identity, as (code, both values), before any layout."""
    if not (hello.min_version <= PROTOCOL_VERSION and MIN_PROTOCOL_VERSION <= hello.max_version):
        here = f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
        return "version", f"protocol {here} here, {hello.min_version} to {hello.max_version} there"
    if hello.identity != identity.digest:
        names = sorted(identity.record.keys() | hello.identity_record.keys())
        differ = [
            f"{name}: {identity.record.get(name)!r} here, {hello.identity_record.get(name)!r} there"
            for name in names
            if identity.record.get(name) != hello.identity_record.get(name)
        ]
        return "identity", "; ".join(differ) or "the identity digests differ"
    if hello.transport != identity.transport:
        return "transport", f"{identity.transport!r} here, {hello.transport!r} there"
    return None


Name = TypeVar("Name", bound=tuple[Any, ...])


class Timers(Generic[Name]):
    """Deadlines by name; a name is a tuple whose second element says whose it is."""

    def __init__(self) -> None:
        self._at: dict[Name, float] = {}
        self._heap: list[tuple[float, int, Name]] = []
        self._by_owner: dict[Hashable, set[Name]] = {}
        self._count = 0

    def arm(self, name: Name, at: float) -> None:
        """Set, or set anew."""
        self._at[name] = at
        self._by_owner.setdefault(name[1], set()).add(name)
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, name))

    def cancel(self, name: Name) -> None:
        """Forget a timer; unknown ones are ignored."""
        self._at.pop(name, None)
        owned = self._by_owner.get(name[1])
        if owned is not None:
            owned.discard(name)
            if not owned:
                del self._by_owner[name[1]]

    def cancel_all(self, owner: Hashable) -> None:
        """Forget all timers of one owner."""
        for name in list(self._by_owner.get(owner, ())):
            self.cancel(name)

    def at(self, name: Name) -> float | None:
        """When a timer is due; None if it is not set."""
        return self._at.get(name)

    def names(self) -> set[Name]:
        """All that are set."""
        return set(self._at)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Name]:
        """Take those whose time has come, in order."""
        names = []
        while (at := self.next()) is not None and at <= now:
            name = heapq.heappop(self._heap)[2]
            self.cancel(name)
            names.append(name)
        return names


class Stories:
    """What happened to the latest attempts."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Attempt, deque[str]] = OrderedDict()

    def add(self, attempt: Attempt, now: float, what: str) -> None:
        """Add a line."""
        if attempt not in self._lines:
            self._lines[attempt] = deque(maxlen=MAX_LINES)
            while len(self._lines) > MAX_STORIES:
                self._lines.popitem(last=False)
        self._lines[attempt].append(f"{now:.6f} {what}")

    def of(self, attempt: Attempt) -> str:
        """One attempt's story, for the message of a failed assertion."""
        return "\n".join(self._lines.get(attempt, ()))

    def all(self) -> dict[Attempt, list[str]]:
        """All stories."""
        return {attempt: list(lines) for attempt, lines in self._lines.items()}
