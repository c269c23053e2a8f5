"""What P does to hand over: waits for blocks to be ready, plans, posts, watches the writes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import Handle, Peer, Ranges, Status, Transport
from kvbaton.connectors.digest import claims
from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.plan import plan, total_bytes
from kvbaton.connectors.protocol.events import (
    Abandon,
    Announce,
    BlocksReady,
    Closed,
    ClosePeer,
    FirstTokens,
    Landed,
    OpenPeer,
    PeerGone,
    Post,
    Release,
    Send,
    SourceAction,
    SourceEvent,
    SourceFailed,
    WriteEnded,
)
from kvbaton.connectors.protocol.notice import pack_notice
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.transfer.worker import TransferWorker
from kvbaton.messages.control import DigestRun
from kvbaton.types import Attempt, NodeId, Spans

Sums = npt.NDArray[np.uint64]
BlockSums = dict[int, list[Sums]]
"""Digest sums of one group by logical block: per rank, [layers, kv, heads]."""


class PendingSums(Protocol):
    """Digest sums on their way from a device; there once the blocks are final."""

    def poll(self) -> list[Sums] | None:
        """Per rank, sums of the blocks asked for, [blocks, layers, kv, heads]; None: not yet."""
        ...


@dataclass(frozen=True)
class BlocksReport:
    """Tokens [start, end) of a transfer were computed; they are final once all `sums` are there.

    Attributes:
        spans: source blocks that hold the range, per group.
        sums: per group, the pending sums of those blocks, in the order of the spans.
    """

    attempt: Attempt
    start: int
    end: int
    spans: Spans
    sums: tuple[PendingSums, ...]


@dataclass
class _Peers:
    """The transport's connections of one session."""

    node: NodeId
    layouts: list[list[KVLayout]]
    links: dict[tuple[int, int], Peer] = field(default_factory=dict)


@dataclass
class _Write:
    """One rank pair's share of a write in flight.

    Attributes:
        handles: of its parts.
        broken: why a part could not be posted.
        failed: its failure was reported; it is watched until it is terminal.
    """

    session: bytes
    attempt: Attempt
    write: int
    pair: tuple[int, int]
    num_bytes: int
    posted_at: float
    handles: list[Handle] = field(default_factory=list)
    broken: str = ""
    failed: bool = False

    def status(self) -> Status:
        """Of all parts together."""
        states = {handle.status() for handle in self.handles}
        if states <= {Status.DONE} and not self.broken:
            return Status.DONE
        if states <= {Status.DONE, Status.DRAINED}:
            return Status.DRAINED
        return Status.PENDING if states <= {Status.DONE, Status.PENDING} else Status.ERROR

    def release(self) -> None:
        """Give its handles back: it is terminal, or its peer is closed for long."""
        for handle in self.handles:
            handle.release()

    def error(self) -> str:
        """Why it failed."""
        told = (handle.error() for handle in self.handles)
        return self.broken or next(filter(None, told), "unknown error")


class SourceWorker(TransferWorker[SourceEvent, SourceAction]):
    """Carries out a `Source`'s actions on transports; only the transfer thread calls it.

    Args:
        source: the machine.
        transports: one per rank, their memory registered.
        layouts: per rank, one layout per group.
    """

    def __init__(
        self,
        source: Source,
        transports: Sequence[Transport],
        layouts: Sequence[Sequence[KVLayout]],
    ) -> None:
        counters = ("posted_bytes", "sent_bytes", "writes", "write_seconds", "plan_seconds")
        super().__init__(source, transports, layouts, counters)
        self.source = source
        self._peers: dict[bytes, _Peers] = {}
        self._closing: dict[bytes, list[tuple[Transport, Peer]]] = {}
        self._writes: list[_Write] = []
        self._reports: dict[Attempt, deque[BlocksReport | FirstTokens]] = {}
        self._do = {
            Send: self._send,
            OpenPeer: self._open_peer,
            ClosePeer: self._close_peer,
            Post: self._post,
            Release: self._release,
            Abandon: self._abandon,
        }

    # --- what goes in ---

    def submit(
        self, item: Announce | BlocksReport | FirstTokens | SourceFailed, now: float
    ) -> None:
        """Take in what the engine reports; reports of one attempt keep their order."""
        if isinstance(item, BlocksReport | FirstTokens):
            self._reports.setdefault(item.attempt, deque()).append(item)
            self._poll_reports(item.attempt, now)
        else:
            self.handle(item, now)

    def _look(self, now: float) -> None:
        for attempt in list(self._reports):
            self._poll_reports(attempt, now)
        self._poll_writes(now)
        self._poll_closing(now)
        for transport in self.transports:
            try:
                transport.notices()  # nobody writes to a source; this drives transport's progress
                for peer in transport.lost():
                    self._lost(peer, now)
            except Exception:
                self.error("transport %s can't be looked at", transport.name)

    def busy(self) -> bool:
        """Whether blocks are about to be sent, or on their way."""
        return bool(self._reports or self._closing) or any(
            not write.failed for write in self._writes
        )

    def state(self) -> dict[str, Any]:
        """What the machine and this thread know, for diagnosis."""
        return {**super().state(), "writes_in_flight": len(self._writes)}

    # --- reports ---

    def _poll_reports(self, attempt: Attempt, now: float) -> None:
        queue = self._reports.get(attempt)
        while queue:
            event = self._ready_event(queue[0])
            if event is None:
                return
            queue.popleft()
            self.handle(event, now)
        self._reports.pop(attempt, None)

    def _ready_event(self, item: BlocksReport | FirstTokens) -> BlocksReady | FirstTokens | None:
        if isinstance(item, FirstTokens):
            return item
        ready = [pending.poll() for pending in item.sums]
        if any(sums is None for sums in ready):
            return None
        by_group: list[BlockSums] = []
        for spans, sums in zip(item.spans, ready, strict=True):
            assert sums is not None
            numbers = [span.first + i for span in spans for i in range(len(span.blocks))]
            by_group.append(
                {number: [of_rank[row] for of_rank in sums] for row, number in enumerate(numbers)}
            )
        self.timelines.mark(item.attempt, "computed", start=item.start, end=item.end)
        return BlocksReady(item.attempt, item.start, item.end, item.spans, by_group)

    # --- actions ---

    def _send(self, action: Send, now: float) -> None:
        self.send(self.with_cards(action))

    def _open_peer(self, action: OpenPeer, now: float) -> None:
        decoded = [msgspec.msgpack.decode(c.layouts, type=list[KVLayout]) for c in action.ranks]
        peers = self._peers[action.session] = _Peers(action.node, decoded)
        try:
            for s, transport in enumerate(self.transports):
                for t, card in enumerate(action.ranks):
                    peers.links[s, t] = transport.connect(card.card)
        except Exception:
            self.error("can't reach %s", action.node.node)
            self.handle(PeerGone(action.node), now)

    def _close_peer(self, action: ClosePeer, now: float) -> None:
        peers = self._peers.pop(action.session, None)
        links = peers.links.items() if peers is not None else ()
        self._closing[action.session] = [(self.transports[s], peer) for (s, _), peer in links]
        self._poll_closing(now)

    def _poll_closing(self, now: float) -> None:
        """Bytes read before may still be on the wire: writes are watched until each has ended."""
        for session, links in list(self._closing.items()):
            links[:] = [
                (transport, peer) for transport, peer in links if self._reads(transport, peer)
            ]
            if not links:
                del self._closing[session]
                self.handle(Closed(session), now)

    def _reads(self, transport: Transport, peer: Peer) -> bool:
        """Whether writes to a peer that is being closed may still read our memory."""
        try:
            return not transport.close(peer)
        except Exception:
            self.error("transport %s can't close a peer", transport.name)
            return False

    def _abandon(self, action: Abandon, now: float) -> None:
        """Nobody asks after the writes of a session any more."""
        kept = []
        for write in self._writes:
            if write.session == action.session:
                write.release()
            else:
                kept.append(write)
        self._writes = kept

    def _post(self, action: Post, now: float) -> None:
        began = time.monotonic()
        links = self._peers[action.session].links
        try:
            ranges, digests = self._plan(action), self._claims(action)
        except Exception as error:
            # The layouts and the reservation are the peer's word: nothing was posted.
            self.error("write %d of %s can't be planned", action.write, action.attempt)
            why = f"{type(error).__name__}: {error}"
            for pair in links:
                self.handle(
                    WriteEnded(action.attempt, action.write, *pair, ok=False, error=why), now
                )
            return
        self.counters["plan_seconds"] += time.monotonic() - began
        for pair in links:
            rows = ranges.get(pair, np.empty((0, 8), np.int64))
            write = _Write(
                action.session, action.attempt, action.write, pair, total_bytes(rows), began
            )
            self._writes.append(write)
            self._post_pair(action, write, rows, digests.get(pair, ()))
        self.timelines.mark(
            action.attempt, "posted", write=action.write, start=action.start, end=action.end
        )

    def _post_pair(
        self, action: Post, write: _Write, rows: Ranges, digests: tuple[DigestRun, ...]
    ) -> None:
        """Post a rank pair's share, in parts if the transport takes fewer ranges at once."""
        transport = self.transports[write.pair[0]]
        size = transport.capabilities.max_ranges
        parts = max(1, -(-len(rows) // size))
        name = (action.session, action.attempt, action.write, action.start, action.end)
        for part in range(parts):
            landed = Landed(*name, *write.pair, part, parts, () if part else digests)
            cut = rows[part * size : (part + 1) * size]
            try:
                peer = self._peers[action.session].links[write.pair]
                write.handles.append(transport.write(peer, cut, pack_notice(landed)))
            except Exception as error:
                self.error("write %d of %s can't be posted", action.write, action.attempt)
                write.broken = f"{type(error).__name__}: {error}"
                return
        self.counters["posted_bytes"] += write.num_bytes

    def _claims(self, action: Post) -> dict[tuple[int, int], tuple[DigestRun, ...]]:
        """Digests of a write by rank pair, made of the sums that came with the blocks."""
        reports = cast("tuple[list[BlockSums], ...]", action.sums)
        targets = self._peers[action.session].layouts
        runs: dict[tuple[int, int], tuple[DigestRun, ...]] = {}
        for group in range(len(self.layouts[0])):
            sources = [rank[group] for rank in self.layouts]
            block_size = sources[0].block_size
            first, last = action.start // block_size, -(-action.end // block_size)
            known = {n: sums for report in reports for n, sums in report[group].items()}
            numbers = [n for n in range(first, last) if n in known]
            if not numbers:
                continue
            for run in claims(
                [np.stack([known[n][rank] for n in numbers]) for rank in range(len(sources))],
                sources,
                [rank[group] for rank in targets],
                first_block=numbers[0],
                transfer_id=action.attempt.transfer_id,
                attempt=action.attempt.number,
            ):
                pair = run.source_rank, run.target_rank
                runs[pair] = (*runs.get(pair, ()), run)
        return runs

    def _plan(self, action: Post) -> dict[tuple[int, int], Ranges]:
        target_layouts = self._peers[action.session].layouts
        pieces: dict[tuple[int, int], list[Ranges]] = {}
        for group in range(len(self.layouts[0])):
            ranges_by_pair = plan(
                [rank[group] for rank in self.layouts],
                action.source[group],
                [rank[group] for rank in target_layouts],
                action.target[group],
                action.start,
                action.end,
            )
            for pair, ranges in ranges_by_pair.items():
                pieces.setdefault(pair, []).append(ranges)
        return {pair: np.concatenate(parts) for pair, parts in pieces.items()}

    def _release(self, action: Release, now: float) -> None:
        self._reports.pop(action.attempt, None)
        self.to_engine(action)

    # --- writes ---

    def _poll_writes(self, now: float) -> None:
        for write in list(self._writes):
            try:
                status = write.status()
            except Exception:
                self.error("a write's status can't be told")
                status = Status.ERROR
            if status is Status.PENDING or (status is Status.ERROR and write.failed):
                continue
            self._ended(write, status, now)

    def _ended(self, write: _Write, status: Status, now: float) -> None:
        ok, drained = status is Status.DONE, status is not Status.ERROR
        error = "" if ok else write.error()
        if ok:
            self.counters["sent_bytes"] += write.num_bytes
            self.counters["writes"] += 1
            self.counters["write_seconds"] += time.monotonic() - write.posted_at
        if drained and write in self._writes:
            self._writes.remove(write)
            write.release()
        write.failed = not ok
        self.handle(
            WriteEnded(
                write.attempt, write.write, *write.pair, ok=ok, drained=drained, error=error
            ),
            now,
        )

    def _lost(self, peer: Peer, now: float) -> None:
        for peers in list(self._peers.values()):
            if any(link is peer for link in peers.links.values()):
                self.handle(PeerGone(peers.node), now)
