"""What D does to receive: collects notices, verifies digests, fences lost peers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvbaton.connectors.base import Peer, Transport
from kvbaton.connectors.digest import mismatches
from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.protocol.events import (
    AdmitPeer,
    Fence,
    Fenced,
    ForgetPeer,
    HangUp,
    PeerGone,
    Send,
    Start,
    TargetAction,
    TargetEvent,
    Unquarantine,
    Unreachable,
    Verified,
    Verify,
)
from kvbaton.connectors.protocol.notice import unpack_notice
from kvbaton.connectors.protocol.target import Target
from kvbaton.connectors.transfer.source_worker import PendingSums
from kvbaton.connectors.transfer.worker import TransferWorker
from kvbaton.messages.control import Reserve
from kvbaton.types import Attempt, NodeId

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S = 0.1


class TargetMemory(Protocol):
    """What the receiver needs of the engine's memory."""

    def digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> PendingSums:
        """Digest sums recomputed from the bytes in memory now; called from the transfer thread."""
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


class TargetWorker(TransferWorker[TargetEvent, TargetAction]):
    """Carries out a `Target`'s actions on transports; only the transfer thread calls it.

    Args:
        target: the machine.
        transports: one per rank, their memory registered.
        layouts: per rank, one layout per group.
        memory: recomputes digests.
    """

    def __init__(
        self,
        target: Target,
        transports: Sequence[Transport],
        layouts: Sequence[Sequence[KVLayout]],
        memory: TargetMemory,
    ) -> None:
        counters = (
            "notices",
            "junk_notices",
            "digests_checked",
            "digests_failed",
            "verify_seconds",
        )
        super().__init__(target, transports, layouts, counters)
        self.target = target
        self.memory = memory
        self._live: set[Attempt] = set()
        self._unhealthy = 0.0
        self._health_at = 0.0
        self._peers: dict[NodeId, _Peers] = {}
        self._rank_layouts: dict[bytes, list[list[KVLayout]]] = {}
        self._checks: list[_Check] = []
        self._do = {
            Send: self._send,
            AdmitPeer: self._admit_peer,
            Verify: self._verify,
            Fence: self._fence,
            Unquarantine: self._unquarantine,
            ForgetPeer: self._forget_peer,
            HangUp: self._hang_up,
        }

    def handle(self, event: TargetEvent, now: float) -> None:
        """See `TransferWorker.handle`."""
        if isinstance(event, Start):
            self._live.add(event.attempt)
        super().handle(event, now)

    def _look(self, now: float) -> None:
        for transport in self.transports:
            try:
                for notice in transport.notices():
                    self._landed(notice.payload, now)
                for peer in transport.lost():
                    self._lost(peer, now)
            except Exception:
                self.error("transport %s can't be looked at", transport.name)
        for check in list(self._checks):
            self._poll_check(check, now)

    def publish(self, now: float) -> None:
        """Totals, and whether blocks were in quarantine for too long."""
        if now >= self._health_at:  # it looks at all attempts, and loops may turn each 0.1 ms
            self._health_at = now + HEALTH_PERIOD_S
            unhealthy, self._unhealthy = self._unhealthy, float(bool(self.target.unhealthy))
            if self._unhealthy > unhealthy:
                logger.error("unhealthy: %s", self.target.unhealthy)
        self.published = {**self.counters, "unhealthy": self._unhealthy}

    def busy(self) -> bool:
        """Whether bytes may be on their way here."""
        return bool(self._live)

    def state(self) -> dict[str, Any]:
        """What the machine and this thread know, for diagnosis."""
        return {**super().state(), "live": len(self._live), "layouts": len(self._rank_layouts)}

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
        try:
            self.send(self.with_cards(action))
        except ValueError as error:
            assert action.address is not None, "only an address can be wrong"
            self.handle(Unreachable(action.address, str(error)), now)

    def _is_unreachable(self, session: bytes) -> bool:
        return any(session in peers.unreachable for peers in self._peers.values())

    def _admit_peer(self, action: AdmitPeer, now: float) -> None:
        self._forget_layouts()
        self._rank_layouts[action.session] = [
            msgspec.msgpack.decode(card.layouts, type=list[KVLayout]) for card in action.ranks
        ]
        peers = self._peers.setdefault(action.node, _Peers())
        links: list[tuple[Transport, Peer]] = []
        try:
            for transport in self.transports:
                for card in action.ranks:
                    links.append((transport, transport.connect(card.card)))
        except Exception:
            # It learns of no block in this session; who could write in an earlier one may still.
            self.error("can't reach %s", action.node.node)
            self._close(links)
            peers.unreachable.add(action.session)
            self.handle(PeerGone(action.node), now)
        else:
            earlier, peers.links = peers.links, links
            self._close(earlier)

    def _close(self, links: Sequence[tuple[Transport, Peer]]) -> None:
        for transport, peer in links:
            try:
                transport.close(peer)
            except Exception:
                self.error("transport %s can't close a peer", transport.name)

    def _forget_peer(self, action: ForgetPeer, now: float) -> None:
        self._forget_layouts()
        self._close(self._peers.pop(action.node, _Peers()).links)

    def _hang_up(self, action: HangUp, now: float) -> None:
        self.hang_up(action.address)

    def _forget_layouts(self) -> None:
        """Drop those of sessions that can have nothing to verify any more."""
        checked = {check.order.session for check in self._checks}
        self._rank_layouts = {
            session: layouts
            for session, layouts in self._rank_layouts.items()
            if session in checked or self.target.has_session(session)
        }

    def _fence(self, action: Fence, now: float) -> None:
        peers = self._peers.get(action.node, _Peers())
        if all(transport.fence(peer) for transport, peer in peers.links):
            self._close(peers.links)
            self._peers.pop(action.node, None)
            self.handle(Fenced(action.node), now)

    def _unquarantine(self, action: Unquarantine, now: float) -> None:
        self._live.discard(action.attempt)
        self._forget_layouts()
        self.to_engine(action)

    # --- digests ---

    def _verify(self, action: Verify, now: float) -> None:
        try:
            check = self._sum_up(action)
        except Exception as error:
            self.error("what has landed can't be summed")
            self._not_verified(action, error, now)
            return
        self._checks.append(check)
        self._poll_check(check, now)

    def _not_verified(self, order: Verify, error: Exception, now: float) -> None:
        why = f"{type(error).__name__}: {error}"
        self.handle(Verified(order.attempt, order.write, error=why), now)

    def _sum_up(self, action: Verify) -> _Check:
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
        return _Check(action, groups, sums, first_blocks, time.monotonic())

    def _poll_check(self, check: _Check, now: float) -> None:
        order = check.order
        try:
            bad = self._compare(check)
        except Exception as error:
            self.error("what has landed can't be compared")
            self._checks.remove(check)
            self._not_verified(order, error, now)
            return
        if bad is None:
            return
        self._checks.remove(check)
        self.counters["digests_checked"] += 1
        self.counters["digests_failed"] += bool(bad)
        self.counters["verify_seconds"] += time.monotonic() - check.began
        self.timelines.mark(
            order.attempt, "verified", write=order.write, start=order.start, end=order.end
        )
        self.handle(Verified(order.attempt, order.write, tuple(sorted(set(bad)))), now)

    def _compare(self, check: _Check) -> list[tuple[int, int]] | None:
        """Ranges that do not match; None while sums are on their way."""
        ready = [pending.poll() for pending in check.sums]
        if any(sums is None for sums in ready):
            return None
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
        return bad
