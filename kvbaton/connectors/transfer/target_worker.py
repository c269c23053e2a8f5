"""D's I/O of a hand-over: collects notices, verifies digests, fences lost peers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvbaton.connectors.base import Transport
from kvbaton.connectors.digest import BlockRange, PendingDigests, mismatches
from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.notice import unpack_notice
from kvbaton.connectors.protocol.target import Target
from kvbaton.connectors.transfer.worker import Links, TransferWorker
from kvbaton.errors import error_text
from kvbaton.messages.control import Reserve
from kvbaton.types import NodeId

logger = logging.getLogger(__name__)


class TargetMemory(Protocol):
    """Interface to the engine's KV memory."""

    def digest(self, ranges: Sequence[BlockRange], *, keep: bool) -> PendingDigests:
        """Recompute digest sums from the bytes in memory now; called from the transfer thread.

        Args:
            ranges: Blocks and tokens to sum.
            keep: Also store the sums with the blocks, as a step that writes blocks does.
        """


@dataclass
class _Check:
    """One `Verify` in progress.

    Attributes:
        ranges: The blocks that have landed, one range per group with such blocks.
        sums: Their sums, being computed; None until they are requested.
    """

    order: events.Verify
    began: float
    ranges: list[BlockRange] = field(default_factory=list)
    sums: PendingDigests | None = None


class TargetWorker(TransferWorker):
    """Carries out a `Target`'s actions on transports; only the transfer thread calls it.

    Args:
        target: The machine.
        transports: One per rank, with memory registered.
        memory: Recomputes digests.
    """

    def __init__(
        self, target: Target, transports: Sequence[Transport], memory: TargetMemory
    ) -> None:
        totals = ("notices", "junk_notices", "digests_checked", "digests_failed", "verify_seconds")
        super().__init__(target, transports, (*totals, "unhealthy"))
        self.target = target
        self.memory = memory
        self._unreachable = b""
        self._checks: list[_Check] = []
        self._freed: list[events.Unquarantine] = []
        self._do |= {
            events.OpenPeer: self._open_peer,
            events.Verify: self._verify,
            events.Fence: self._fence,
            events.Unquarantine: self._unquarantine,
            events.ForgetPeer: lambda action, now: self._close_all(action.node),
            events.HangUp: lambda action, now: self.channel.hang_up(action.address),
        }

    def _poll_transfers(self, now: float) -> bool:
        for check in list(self._checks):
            self._check_digests(check, now)
        freed, self._freed = self._freed, []
        for action in freed:
            self._unquarantine(action, now)
        return bool(self.target.live or self._checks)

    def _look_around(self, now: float) -> None:
        super()._look_around(now)
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
        # A peer that could not be fenced must not learn of our blocks: drop the message.
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
        if self._connect(action, pairs, links, now):
            self._close_all(action.node)
            self.linked[action.node] = action.node, links
        else:
            # The peer must not learn of any block in this session, which ends once all actions of
            # this event are carried out. Connections of an earlier session stay, to be fenced.
            self._close_links(links)
            self._unreachable = action.session

    def _close_links(self, links: Links) -> None:
        for (own, _), link in links.items():
            self._close(own, link)

    def _close_all(self, node: NodeId) -> None:
        self._close_links(self.linked.pop(node, (node, {}))[1])

    def _fence(self, action: events.Fence, now: float) -> None:
        _, links = self.linked.get(action.node, (action.node, {}))
        if all(self.transports[own].fence(link) for (own, _), link in links.items()):
            self._close_all(action.node)
            self.handle(events.Fenced(action.node), now)

    # --- digests ---

    def _verify(self, action: events.Verify, now: float) -> None:
        self._checks.append(_Check(action, time.monotonic()))  # `poll` of this turn handles it

    def _unquarantine(self, action: events.Unquarantine, now: float) -> None:
        """Let blocks be freed, but not while they are summed: `keep` would store stale sums."""
        if any(check.order.attempt == action.attempt for check in self._checks):
            self._freed.append(action)
        else:
            self.to_engine(action)

    def _landed_ranges(self, order: events.Verify) -> list[BlockRange]:
        """The blocks of a landed write, one range per group."""
        found = []
        for group, table in enumerate(order.target):
            size = self.target.groups[group].block_size
            start = max(order.start, order.counted[group])
            wanted = table[start // size : -(-order.end // size)]
            there = np.flatnonzero(wanted >= 0)
            if len(there) and start < order.end:
                first = (start // size + int(there[0])) * size
                blocks = wanted[there].tolist()
                found.append(BlockRange(group, blocks, first, start, order.end))
        return found

    def _check_digests(self, check: _Check, now: float) -> None:
        """Compare a write's digests, once the sums of all groups are there."""
        order, bad = check.order, set[tuple[int, int]]()
        try:
            if check.sums is None:
                check.ranges = self._landed_ranges(order)
                check.sums = self.memory.digest(check.ranges, keep=True)
            of_ranges = check.sums.poll()
            if of_ranges is None:
                return
            for landed, sums in zip(check.ranges, of_ranges, strict=True):
                size = self.target.groups[landed.group].block_size
                bad.update(
                    mismatches(
                        order.pairings[landed.group],
                        sums,
                        order.digests,
                        first_block=landed.first_position // size,
                        start=order.start,
                        end=order.end,
                        attempt=order.attempt,
                    )
                )
        except Exception as error:
            self.error("what has landed can't be compared")
            self._checks.remove(check)
            why = error_text(error)
            self.handle(events.Verified(order.attempt, order.write, error=why), now)
            return
        self._checks.remove(check)
        self.counters["digests_checked"] += 1
        self.counters["digests_failed"] += bool(bad)
        self.counters["verify_seconds"] += time.monotonic() - check.began
        self.mark(order.attempt, "verified", write=order.write, start=order.start, end=order.end)
        verified = events.Verified(order.attempt, order.write, tuple(sorted(bad)))
        self.handle(verified, time.monotonic())  # the comparison may have taken a while
