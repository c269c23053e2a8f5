"""What D does to receive: collects notices, verifies digests, fences lost peers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvbaton.connectors.base import Peer, Transport
from kvbaton.connectors.courier.notice import unpack_notice
from kvbaton.connectors.courier.sender import PendingSums
from kvbaton.connectors.courier.timeline import Timelines, attempt_name
from kvbaton.connectors.digest import mismatches
from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.protocol.events import (
    AdmitPeer,
    Attempt,
    Fence,
    Fenced,
    PeerGone,
    Send,
    Start,
    TargetAction,
    TargetEvent,
    Tick,
    Unquarantine,
    Verified,
    Verify,
)
from kvbaton.connectors.protocol.target import Target
from kvbaton.errors import TransportError
from kvbaton.wire import NodeId, Reserve

logger = logging.getLogger(__name__)


class TargetMemory(Protocol):
    """What the receiver needs of the engine's memory."""

    def digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> PendingSums:
        """Digest sums recomputed from the bytes in memory now; called from the courier's thread."""
        ...


@dataclass
class _Check:
    """One `Verify` whose sums are on their way."""

    order: Verify
    groups: list[int]
    sums: list[PendingSums]
    first_blocks: list[int]
    began: float


@dataclass
class _Peers:
    """The transports' connections to one life of a node.

    Attributes:
        links: what has to be fenced.
        unreachable: sessions whose ranks could not all be connected.
    """

    links: list[tuple[Transport, Peer]] = field(default_factory=list)
    unreachable: set[bytes] = field(default_factory=set)


class Receiver:
    """Carries out a `Target`'s actions on transports; only the courier's thread calls it.

    Args:
        target: the machine.
        transports: one per rank, their memory registered.
        layouts: per rank, one layout per group.
        memory: recomputes digests.
    """

    to_engine: Callable[[Any], None]
    send: Callable[[Send], None]

    def __init__(
        self,
        target: Target,
        transports: Sequence[Transport],
        layouts: Sequence[Sequence[KVLayout]],
        memory: TargetMemory,
    ) -> None:
        self.target = target
        self.transports = transports
        self.layouts = layouts
        self.memory = memory
        self.counters = dict.fromkeys(
            ("notices", "junk_notices", "digests_checked", "digests_failed", "verify_seconds"), 0.0
        )
        self.timelines = Timelines()
        self._events: deque[TargetEvent] = deque()
        self._live: set[Attempt] = set()
        self._peers: dict[NodeId, _Peers] = {}
        self._rank_layouts: dict[bytes, list[list[KVLayout]]] = {}
        self._checks: list[_Check] = []
        self._do: dict[type, Callable[[Any, float], None]] = {
            Send: self._send,
            AdmitPeer: self._admit_peer,
            Verify: self._verify,
            Fence: self._fence,
            Unquarantine: self._unquarantine,
        }

    def handle(self, event: TargetEvent, now: float) -> None:
        """Give the machine an event and carry out what it answers.

        What an action causes waits until all actions of the event are carried out.
        """
        if isinstance(event, Start):
            self._live.add(event.attempt)
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            for action in self.target.handle(self._events[0], now):
                self._carry_out(action, now)
            self._events.popleft()

    def _carry_out(self, action: TargetAction, now: float) -> None:
        do = self._do.get(type(action))
        if do is None:
            self.to_engine(action)
        else:
            do(action, now)

    def poll(self, now: float) -> None:
        """Look at notices, checks, peers and timers."""
        for transport in self.transports:
            for notice in transport.notices():
                self._landed(notice.payload, now)
            for peer in transport.lost():
                self._lost(peer, now)
        for check in list(self._checks):
            self._poll_check(check, now)
        deadline = self.target.next_deadline()
        if deadline is not None and deadline <= now:
            self.handle(Tick(), now)

    def busy(self) -> bool:
        """Whether bytes may be on their way here."""
        return bool(self._live)

    def next_deadline(self) -> float | None:
        """When the machine wants to be called again."""
        return self.target.next_deadline()

    def close(self) -> None:
        """Shut the transports down."""
        for transport in self.transports:
            transport.shutdown()

    def state(self) -> dict[str, Any]:
        """What the machine and this thread know, for diagnosis."""
        stories = self.target.stories()
        return {
            "ledger": self.target.ledger(),
            "stories": {attempt_name(attempt): list(lines) for attempt, lines in stories.items()},
            "timelines": self.timelines.dump(),
            "live": len(self._live),
        }

    # --- notices and peers ---

    def _landed(self, payload: bytes, now: float) -> None:
        event = unpack_notice(payload)
        if event is None:
            self.counters["junk_notices"] += 1
            return
        self.counters["notices"] += 1
        self.timelines.mark(event.attempt, "landed", write=event.write)
        self.handle(event, now)

    def _lost(self, peer: Peer, now: float) -> None:
        for node, peers in list(self._peers.items()):
            if any(link is peer for _, link in peers.links):
                self.handle(PeerGone(node), now)

    # --- actions ---

    def _send(self, action: Send, now: float) -> None:
        # Whom we can't fence must not learn where our blocks are: to it this message gets lost.
        if isinstance(action.message, Reserve) and self._is_unreachable(action.message.session):
            return
        self.send(action)

    def _is_unreachable(self, session: bytes) -> bool:
        return any(session in peers.unreachable for peers in self._peers.values())

    def _admit_peer(self, action: AdmitPeer, now: float) -> None:
        self._rank_layouts[action.session] = [
            msgspec.msgpack.decode(card.layouts, type=list[KVLayout]) for card in action.ranks
        ]
        peers = self._peers.setdefault(action.node, _Peers())
        try:
            for transport in self.transports:
                for card in action.ranks:
                    peers.links.append((transport, transport.connect(card.card)))
        except TransportError as error:
            logger.warning("can't reach %s: %s", action.node.node, error)
            peers.unreachable.add(action.session)
            self.handle(PeerGone(action.node), now)

    def _fence(self, action: Fence, now: float) -> None:
        peers = self._peers.get(action.node, _Peers())
        if all(transport.fence(peer) for transport, peer in peers.links):
            for transport, peer in peers.links:
                transport.close(peer)
            self._peers.pop(action.node, None)
            self.handle(Fenced(action.node), now)

    def _unquarantine(self, action: Unquarantine, now: float) -> None:
        self._live.discard(action.attempt)
        self.to_engine(action)

    # --- digests ---

    def _verify(self, action: Verify, now: float) -> None:
        groups, sums, first_blocks = [], [], []
        for group, spans in enumerate(action.target):
            block_size = self.layouts[0][group].block_size
            first, last = action.start // block_size, -(-action.end // block_size)
            by_number = {
                span.first + i: block for span in spans for i, block in enumerate(span.blocks)
            }
            numbers = [n for n in range(first, last) if n in by_number]
            if not numbers:
                continue
            groups.append(group)
            first_blocks.append(numbers[0])
            sums.append(
                self.memory.digest(
                    group,
                    [by_number[n] for n in numbers],
                    numbers[0] * block_size,
                    action.start,
                    action.end,
                )
            )
        check = _Check(action, groups, sums, first_blocks, time.monotonic())
        self._checks.append(check)
        self._poll_check(check, now)

    def _poll_check(self, check: _Check, now: float) -> None:
        ready = [pending.poll() for pending in check.sums]
        if any(sums is None for sums in ready):
            return
        self._checks.remove(check)
        order = check.order
        sources = self._rank_layouts[order.session]
        bad: list[tuple[int, int]] = []
        for group, first_block, sums in zip(check.groups, check.first_blocks, ready, strict=True):
            assert sums is not None
            bad += mismatches(
                sums,
                [rank[group] for rank in sources],
                [rank[group] for rank in self.layouts],
                [run for run in order.digests if run.group == group],
                first_block=first_block,
                start=order.start,
                end=order.end,
                transfer_id=order.attempt.transfer_id,
                attempt=order.attempt.number,
            )
        self.counters["digests_checked"] += 1
        self.counters["digests_failed"] += bool(bad)
        self.counters["verify_seconds"] += time.monotonic() - check.began
        self.timelines.mark(
            order.attempt, "verified", write=order.write, start=order.start, end=order.end
        )
        self.handle(Verified(order.attempt, order.write, tuple(sorted(set(bad)))), now)
