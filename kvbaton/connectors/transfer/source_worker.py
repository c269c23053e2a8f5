"""P's I/O of a hand-over: plans writes, waits until blocks are final, posts and watches the writes.

Writes are planned, and prepared if the transport can, while the step that computes their blocks
still runs. Once it is done, only the digests remain to be folded.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from kvbaton.connectors.base import Handle, Peer, PreparesWrites, Ranges, Status, Transport
from kvbaton.connectors.digest import Sums, claims
from kvbaton.connectors.pairing import GroupPairing
from kvbaton.connectors.plan import needed_bytes, plan, total_bytes
from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.notice import pack_notice
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.transfer.worker import FAILURES, Links, TransferWorker, attempt_name
from kvbaton.errors import error_text
from kvbaton.messages.control import DigestRun
from kvbaton.types import Attempt

logger = logging.getLogger(__name__)


class GroupSums(NamedTuple):
    """Digest sums of consecutive logical blocks of one group: first block, and sums per rank."""

    first_block: int
    of_ranks: list[Sums]


@dataclass(eq=False)
class _Write:
    """One rank pair's share of a write in flight.

    Attributes:
        handles: Handles of its parts.
        broken: Why the share, or a part of it, could not be posted; empty if it was.
        failed: Its failure was reported; it is still watched until it is terminal.
    """

    order: events.Post
    pair: tuple[int, int]
    num_bytes: int = 0
    posted_at: float = 0.0
    handles: list[Handle] = field(default_factory=list)
    broken: str = ""
    failed: bool = False


@dataclass
class _PlannedWrite:
    """A write that is planned and not posted yet.

    Attributes:
        rows: Ranges to copy, per rank pair.
        prepared: Prepared writes of the rank pairs whose transports can prepare.
        needed_bytes: Minimum bytes to transfer, see `plan.needed_bytes`.
    """

    order: events.Post
    rows: dict[tuple[int, int], Ranges]
    prepared: dict[tuple[int, int], object]
    needed_bytes: int


class SourceWorker(TransferWorker):
    """Carries out a `Source`'s actions on transports; only the transfer thread calls it.

    Args:
        source: The machine.
        transports: One per rank, with memory registered.
    """

    def __init__(self, source: Source, transports: Sequence[Transport]) -> None:
        sizes = ("posted_bytes", "sent_bytes", "needed_bytes")
        times = ("writes", "write_seconds", "plan_seconds")
        super().__init__(source, transports, (*sizes, *times))
        self.source = source
        self._max_ranges = tuple(t.capabilities.max_ranges for t in transports)
        self._closing: dict[bytes, Links] = {}
        self._writes: dict[_Write, None] = {}
        self._reports: dict[Attempt, deque[events.BlocksReady | events.FirstTokens]] = {}
        self._sums: dict[Attempt, list[GroupSums]] = {}
        self._planned: dict[Attempt, dict[int, _PlannedWrite]] = {}
        self._do |= {
            events.OpenPeer: self._open_peer,
            events.ClosePeer: self._close_peer,
            events.Post: self._post,
            events.Release: self._release,
            events.Abandon: self._abandon,
        }

    def submit(self, event: events.SourceEvent, now: float) -> None:
        """Take in an event from the engine; reports of one attempt are handled in order."""
        if isinstance(event, events.FirstTokens) and event.result_at is not None:
            self.mark(event.attempt, "result", at=event.result_at)
        if isinstance(event, events.BlocksReady | events.FirstTokens):
            self._reports.setdefault(event.attempt, deque()).append(event)
        else:
            self.handle(event, now)

    def _poll_transfers(self, now: float) -> bool:
        for attempt, queue in list(self._reports.items()):
            try:
                while queue and self._is_due(queue[0]):
                    self.handle(queue.popleft(), now)
                    self._drop_plans(attempt)
            except Exception as error:
                self.error("sums of blocks of %s can't be fetched", attempt_name(attempt))
                queue.clear()
                self.handle(events.SourceFailed(attempt, error_text(error)), now)
            if not queue:
                self._reports.pop(attempt, None)
            elif attempt not in self._planned and isinstance(queue[0], events.BlocksReady):
                self._plan_ahead(queue[0])
        for write in list(self._writes):
            self._check_write(write, now)
        for session in list(self._closing):
            self._check_closing(session, now)
        writing = any(not write.failed for write in self._writes)
        return bool(self._reports or self._closing or writing)

    def state(self) -> dict[str, Any]:
        """State of the machine and of this worker, for diagnosis."""
        waiting = sum(isinstance(r, events.BlocksReady) for q in self._reports.values() for r in q)
        return {
            **super().state(),
            "writes_in_flight": len(self._writes),
            "reports_waiting": waiting,
        }

    def _is_due(self, event: events.BlocksReady | events.FirstTokens) -> bool:
        """Whether an event can be handled: the blocks that a report is of must be final.

        If they are, their sums are kept until the writes.
        """
        if isinstance(event, events.FirstTokens):
            return True
        found = list[list[Sums]]()
        for _, pending in event.sums:
            if (of_ranks := pending.poll()) is None:
                return False
            found.append(of_ranks)
        if event.attempt not in self.source.live:
            return True
        kept = self._sums.setdefault(event.attempt, [GroupSums(0, [])] * len(found))
        for group, ((first_block, _), sums) in enumerate(zip(event.sums, found, strict=True)):
            first, before = kept[group]
            if any(map(len, before)):
                sums = [np.concatenate(both) for both in zip(before, sums, strict=True)]
            else:
                first = first_block
            kept[group] = GroupSums(first, sums)
        self.mark(event.attempt, "computed", start=event.start, end=event.end)
        return True

    # --- sessions ---

    def _open_peer(self, action: events.OpenPeer, now: float) -> None:
        links: Links = {}
        self.linked[action.session] = action.node, links
        self._connect(action, action.pairs, links, now)

    def _close_peer(self, action: events.ClosePeer, now: float) -> None:
        self._closing[action.session] = self.linked.pop(action.session)[1]
        self._check_closing(action.session, now)

    def _check_closing(self, session: bytes, now: float) -> None:
        """Report that a session is closed once all of its connections provably are.

        Bytes read before may still be on the wire, so each write is watched until it has ended.
        """
        links = self._closing[session]
        for (own, other), link in list(links.items()):
            closed = self._close(own, link)
            if closed is None:
                # The transport can't tell: without writes nothing can read our memory.
                closed = not any(write.order.session == session for write in self._writes)
            if closed:
                del links[own, other]
        if not links:
            del self._closing[session]
            self.handle(events.Closed(session), now)

    def _abandon(self, action: events.Abandon, now: float) -> None:
        """Stop watching the writes of a session: D will not ask for them any more."""
        for write in [write for write in self._writes if write.order.session == action.session]:
            self._forget(write)

    def _forget(self, write: _Write) -> None:
        del self._writes[write]
        for handle in write.handles:
            try:
                handle.release()
            except FAILURES:
                self.error("a write can't be given back")

    def _release(self, action: events.Release, now: float) -> None:
        self._reports.pop(action.attempt, None)
        self._sums.pop(action.attempt, None)
        self._drop_plans(action.attempt)
        self.to_engine(action)

    # --- writes ---

    def _plan_ahead(self, report: events.BlocksReady) -> None:
        """Plan and prepare the writes of blocks that a step still computes."""
        record = self.source.live.get(report.attempt)
        if record is None:
            return
        planned = self._planned[report.attempt] = dict[int, _PlannedWrite]()
        try:
            for order in record.coming(report):
                links = self.linked[order.session][1]
                found = planned[order.write] = self._plan(order, links)
                for pair, rows in found.rows.items():
                    transport = self.transports[pair[0]]
                    if (
                        isinstance(transport, PreparesWrites)
                        and len(rows) <= self._max_ranges[pair[0]]
                    ):
                        found.prepared[pair] = transport.prepare(links[pair], rows)
        except FAILURES:  # `_post` meets the same error, and can report it
            name = attempt_name(report.attempt)
            logger.debug("writes of %s can't be planned ahead", name, exc_info=True)
        self.mark(report.attempt, "prepared", start=report.start, end=report.end)

    def _plan(self, order: events.Post, links: Links) -> _PlannedWrite:
        began = time.monotonic()
        ranges: dict[tuple[int, int], list[Ranges]] = {pair: [] for pair in links}
        needed, length = 0, self.source.live[order.attempt].num_tokens
        for group, pairing in enumerate(order.pairings):
            tables = order.source[group], order.target[group]
            for pair, rows in plan(pairing, *tables, order.start, order.end).items():
                ranges[pair].append(rows)
            needed += needed_bytes(pairing, tables[1], order.start, order.end, length)
        empty = [np.empty((0, 8), np.int64)]
        rows_of = {pair: np.concatenate(parts or empty) for pair, parts in ranges.items()}
        self.counters["plan_seconds"] += time.monotonic() - began
        return _PlannedWrite(order, rows_of, {}, needed)

    def _drop_plans(self, attempt: Attempt) -> None:
        """Discard the writes of an attempt that were prepared and not posted."""
        for planned in self._planned.pop(attempt, {}).values():
            for (own, _), prepared in planned.prepared.items():
                try:
                    cast(PreparesWrites, self.transports[own]).discard(prepared)
                except FAILURES:
                    self.error("a prepared write can't be discarded")

    def _post(self, action: events.Post, now: float) -> None:
        _, links = self.linked[action.session]
        writes = {pair: _Write(action, pair) for pair in links}
        self._writes |= dict.fromkeys(writes.values())
        digests: dict[tuple[int, int], list[DigestRun]] = {pair: [] for pair in links}
        ahead = self._planned.get(action.attempt, {})
        try:
            planned = ahead.get(action.write) or self._plan(action, links)
            foreseen = planned.order.start, planned.order.end
            assert foreseen == (action.start, action.end), "it was planned as another write"
            for group, pairing in enumerate(action.pairings):
                for run in self._claims(action, group, pairing):
                    digests[run.source_rank, run.target_rank].append(run)
        except Exception as error:
            # The peer's layouts or reservation may be wrong; nothing was posted, and what was
            # prepared is discarded with the attempt's other plans.
            name = attempt_name(action.attempt)
            self.error("write %d of %s can't be planned", action.write, name)
            for write in writes.values():
                write.broken = error_text(error)
            return
        ahead.pop(action.write, None)
        self.counters["needed_bytes"] += planned.needed_bytes
        began = time.monotonic()
        for pair, link in links.items():
            self._post_pair(writes[pair], link, planned, tuple(digests[pair]))
        what = {"write": action.write, "start": action.start, "end": action.end}
        num_bytes = sum(write.num_bytes for write in writes.values())
        self.mark(action.attempt, "posted", **what, num_bytes=num_bytes, began=began)

    def _claims(self, action: events.Post, group: int, pairing: GroupPairing) -> list[DigestRun]:
        """Digests of a write in one group, from the sums that were reported with the blocks."""
        kept, size = self._sums[action.attempt], pairing.sources[0].block_size
        first, sums = kept[group]
        low = max(0, action.start // size - first)
        high = max(low, -(-action.end // size) - first)
        cut, rest = list[Sums](), list[Sums]()
        for of_rank in sums:
            cut.append(of_rank[low:high])
            rest.append(of_rank[high:])
        kept[group] = GroupSums(first + high, rest)
        if not cut or not len(cut[0]):
            return []
        return claims(pairing, cut, first_block=first + low, attempt=action.attempt)

    def _post_pair(
        self, write: _Write, link: Peer, planned: _PlannedWrite, digests: tuple[DigestRun, ...]
    ) -> None:
        """Post a rank pair's share, in parts if it has more ranges than `max_ranges`."""
        action, pair = write.order, write.pair
        rows, prepared = planned.rows[pair], planned.prepared.get(pair)
        write.num_bytes, write.posted_at = total_bytes(rows), time.monotonic()
        transport, size = self.transports[pair[0]], self._max_ranges[pair[0]]
        parts = max(1, -(-len(rows) // size))
        name = (action.attempt, action.session, action.write, action.start, action.end)
        try:
            for part in range(parts):
                landed = events.Landed(*name, *pair, part, parts, () if part else digests)
                if prepared is not None:
                    ahead = cast(PreparesWrites, transport)
                    handle = ahead.post(prepared, pack_notice(landed))
                else:
                    cut = rows[part * size : (part + 1) * size]
                    handle = transport.write(link, cut, pack_notice(landed))
                if not isinstance(handle, Handle):
                    raise TypeError(f"{transport.name} returned {type(handle).__name__}, no Handle")
                write.handles.append(handle)
        except FAILURES as error:
            self.error("write %d of %s can't be posted", action.write, attempt_name(action.attempt))
            write.broken = error_text(error)
        else:
            self.counters["posted_bytes"] += write.num_bytes

    def _check_write(self, write: _Write, now: float) -> None:
        """Report when all parts of a share have ended, or one has failed and may still land."""
        states = set[Status]()
        try:
            for handle in write.handles:
                states.add(handle.status())
        except FAILURES as raised:
            self.error("a write's status can't be told")
            states.add(Status.ERROR)
            write.broken = write.broken or error_text(raised)
        drained = states <= {Status.DONE, Status.DRAINED}
        broken = bool(write.broken) or not states <= {Status.DONE, Status.PENDING}
        if not drained and (write.failed or not broken):
            return
        ok = drained and not write.broken and Status.DRAINED not in states
        write.failed, error = not ok, ""
        if not ok:
            error = write.broken or self._error_of(write)
        else:
            self.counters["sent_bytes"] += write.num_bytes
            self.counters["writes"] += 1
            self.counters["write_seconds"] += time.monotonic() - write.posted_at
        if drained and write in self._writes:
            self._forget(write)
        name = write.order.attempt, write.order.write
        self.handle(events.WriteEnded(*name, *write.pair, ok, drained, error), now)

    def _error_of(self, write: _Write) -> str:
        try:
            told = (handle.error() for handle in write.handles)
            return str(next(filter(None, told), "unknown error"))
        except FAILURES:
            self.error("why a write failed can't be told")
            return "unknown error"
