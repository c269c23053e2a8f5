"""What D does to receive: collects notices, verifies digests, fences lost peers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvbaton.connectors.base import Transport
from kvbaton.connectors.digest import PendingSums, Sums, mismatches
from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.notice import unpack_notice
from kvbaton.connectors.protocol.target import Target
from kvbaton.connectors.transfer.worker import Links, TransferWorker
from kvbaton.messages.control import Reserve
from kvbaton.types import NodeId

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S = 0.1


class TargetMemory(Protocol):
    """What the receiver needs of the engine's memory."""

    def digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> PendingSums:
        """Digest sums recomputed from the bytes in memory now; called from the transfer thread."""
        ...

    def adopt(
        self, group: int, blocks: Sequence[int], sums: Sequence[Sums], num_tokens: int
    ) -> None:
        """Keep verified sums with blocks, as if a step had written them; likewise."""
        ...


@dataclass
class _Check:
    """One `Verify` whose sums are on their way.

    Attributes:
        sums: by group: logical number of the first block, physical numbers, and their sums.
    """

    order: events.Verify
    began: float
    sums: dict[int, tuple[int, list[int], PendingSums]] = field(default_factory=dict)


class TargetWorker(TransferWorker):
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
        totals = ("notices", "junk_notices", "digests_checked", "digests_failed", "verify_seconds")
        super().__init__(target, transports, layouts, (*totals, "unhealthy"))
        self.target = target
        self.memory = memory
        self._health_at = 0.0
        self._unreachable = b""
        self._checks: list[_Check] = []
        self._do |= {
            events.OpenPeer: self._open_peer,
            events.Verify: self._verify,
            events.Fence: self._fence,
            events.ForgetPeer: lambda action, now: self._close_all(action.node),
            events.HangUp: lambda action, now: self.channel.hang_up(action.address),
        }

    def _look(self, now: float) -> bool:
        for check in list(self._checks):
            self._look_at_check(check, now)
        return bool(self.target.live)

    def _look_around(self, now: float) -> None:
        super()._look_around(now)
        if now >= self._health_at:  # it looks at all attempts
            self._health_at = now + HEALTH_PERIOD_S
            reason = self.target.unhealthy
            if reason and not self.counters["unhealthy"]:
                logger.error("unhealthy: %s", reason)
            self.counters["unhealthy"] = float(bool(reason))

    def _landed(self, payload: bytes, now: float) -> None:
        event = unpack_notice(payload)
        if event is None:
            self.counters["junk_notices"] += 1
            return
        self.counters["notices"] += 1
        self.mark(event.attempt, "landed", write=event.write)
        self.handle(event, now)

    # --- sessions ---

    def _send(self, action: events.SendMessage, now: float) -> None:
        message = action.message
        # Whom we can't fence must not learn where our blocks are: to it this message gets lost.
        if isinstance(message, Reserve) and message.session == self._unreachable:
            return
        try:
            super()._send(action, now)
        except ValueError as error:
            assert action.address is not None, "only an address can be wrong"
            self.handle(events.Unreachable(action.address, str(error)), now)

    def _open_peer(self, action: events.OpenPeer, now: float) -> None:
        links: Links = {}
        pairs = {(target, source) for source, target in action.pairs}
        try:
            self._connect(action.ranks, pairs, links)
        except Exception:
            # It learns of no block in this session, which ends once all actions of this event are
            # carried out; who could write in an earlier one may still.
            self.error("can't reach %s", action.node.node)
            self._close(links)
            self._unreachable = action.session
            self.handle(events.PeerGone(action.node), now)
        else:
            self._close_all(action.node)
            self.linked[action.node] = action.node, links

    def _close(self, links: Links) -> None:
        for (own, _), link in links.items():
            try:
                self.transports[own].close(link)
            except Exception:
                self.error("transport %s can't close a peer", self.transports[own].name)

    def _close_all(self, node: NodeId) -> None:
        self._close(self.linked.pop(node, (node, {}))[1])

    def _fence(self, action: events.Fence, now: float) -> None:
        _, links = self.linked.get(action.node, (action.node, {}))
        if all(self.transports[own].fence(link) for (own, _), link in links.items()):
            self._close_all(action.node)
            self.handle(events.Fenced(action.node), now)

    # --- digests ---

    def _verify(self, action: events.Verify, now: float) -> None:
        check = _Check(action, time.monotonic())
        try:
            for group, table in enumerate(action.target):
                size = self.layouts[0][group].block_size
                start = max(action.start, action.counted[group])
                wanted = table[start // size : -(-action.end // size)]
                there = np.flatnonzero(wanted >= 0)
                if len(there) and start < action.end:
                    first, blocks = start // size + int(there[0]), wanted[there].tolist()
                    sums = self.memory.digest(group, blocks, first * size, start, action.end)
                    check.sums[group] = first, blocks, sums
        except Exception as error:
            self.error("what has landed can't be summed")
            self._not_verified(action, error, now)
            return
        self._checks.append(check)  # this turn's `poll` looks at it

    def _not_verified(self, order: events.Verify, error: Exception, now: float) -> None:
        why = f"{type(error).__name__}: {error}"
        self.handle(events.Verified(order.attempt, order.write, error=why), now)

    def _look_at_check(self, check: _Check, now: float) -> None:
        """Compare a write's digests, once the sums of all groups are there."""
        order, bad = check.order, set[tuple[int, int]]()
        try:
            found = []
            for group, (first_block, _, pending) in check.sums.items():
                if (sums := pending.poll()) is None:
                    return
                found.append((group, first_block, sums))
            for group, first_block, sums in found:
                bad.update(
                    mismatches(
                        order.pairings[group],
                        sums,
                        order.digests,
                        first_block=first_block,
                        start=order.start,
                        end=order.end,
                        transfer_id=order.attempt.transfer_id,
                        attempt=order.attempt.number,
                    )
                )
            if not bad:
                self._keep(check, found)
        except Exception as error:
            self.error("what has landed can't be compared")
            self._checks.remove(check)
            self._not_verified(order, error, now)
            return
        self._checks.remove(check)
        self.counters["digests_checked"] += 1
        self.counters["digests_failed"] += bool(bad)
        self.counters["verify_seconds"] += time.monotonic() - check.began
        self.mark(order.attempt, "verified", write=order.write, start=order.start, end=order.end)
        verified = events.Verified(order.attempt, order.write, tuple(sorted(bad)))
        self.handle(verified, time.monotonic())  # to compare may have taken a while

    def _keep(self, check: _Check, found: Sequence[tuple[int, int, list[Sums]]]) -> None:
        """Keep what was verified, so that the blocks can be handed on without a look at them.

        A first block that counted in part only is never cached, nor sent.
        """
        for group, first_block, sums in found:
            _, blocks, _ = check.sums[group]
            first = first_block * self.layouts[0][group].block_size
            start = max(check.order.start, check.order.counted[group])
            if start <= first:
                self.memory.adopt(group, blocks, sums, check.order.end - first)
