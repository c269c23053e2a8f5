"""Transports with one defect each: every one must be caught by the check that it is listed with.

They prove that the kit can fail. All are the memory transport with one thing changed.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbaton.connectors.base import Memory, Notice, Peer, RangeColumn, Region, Status
from kvbaton.connectors.transports.memory import (
    MemoryHandle,
    MemoryHub,
    MemoryPeer,
    MemoryTransport,
)

if TYPE_CHECKING:
    from kvbaton.connectors.base import Ranges
    from kvbaton.connectors.transports.regions import Copies


class DropsLastRange(MemoryTransport):
    """Forgets the last row of a longer write."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Write all rows but one."""
        return super().write(peer, ranges[:-1] if len(ranges) > 1 else ranges, notice)


class IgnoresCount(MemoryTransport):
    """Copies only the first piece of a strided row."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Write rows as if they were not strided."""
        rows = ranges.copy()
        if rows.ndim == 2 and rows.shape[1] == len(RangeColumn):
            rows[:, RangeColumn.COUNT] = np.minimum(rows[:, RangeColumn.COUNT], 1)
        return super().write(peer, rows, notice)


class SpillsOver(MemoryTransport):
    """Writes one byte too many where there is room."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Write rows that are a byte longer."""
        longer = ranges.copy()
        if longer.ndim == 2 and longer.shape[1] == len(RangeColumn):
            longer[:, RangeColumn.LENGTH] += 1
        try:
            return super().write(peer, longer, notice)
        except ValueError:
            return super().write(peer, ranges, notice)


class PromisesTooManyRanges(MemoryTransport):
    """Declares more ranges for a write than it takes."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Refuse more than some thousands of rows."""
        if len(ranges) > 5_000:
            raise ValueError(f"{len(ranges)} ranges")
        return super().write(peer, ranges, notice)


class ClampsBadRows(MemoryTransport):
    """Leaves rows out that it can't write, and calls that done."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Write nothing rather than refuse."""
        try:
            return super().write(peer, ranges, notice)
        except ValueError:
            return super().write(peer, np.empty((0, 8), dtype=np.int64), notice)


class NotifiesEarly(MemoryTransport):
    """Sends the notice before the bytes."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Notify, and hold the bytes back until the handle is polled for a while."""
        self.hub.hold()
        try:
            inner = super().write(peer, ranges, notice)
        except ValueError:
            self.hub.release()
            raise
        target = self.hub.find(peer.name)
        if isinstance(target, NotifiesEarly):
            target.early.append(Notice(notice))
        return _Late(inner, polls=3)  # type: ignore[return-value]

    def __init__(self, name: str, *, host: str = "", hub: MemoryHub | None = None) -> None:
        super().__init__(name, host=host, hub=hub)
        self.early: list[Notice] = []

    def notices(self) -> Sequence[Notice]:
        """Those whose bytes are still on their way."""
        super().notices()
        early, self.early = self.early, []
        return early


class _Late:
    """A handle that lets its write land after some polls."""

    def __init__(self, inner: MemoryHandle, polls: int) -> None:
        self._inner, self._polls = inner, polls

    def status(self) -> Status:
        """State, after one more poll."""
        self._polls -= 1
        if self._polls == 0:
            self._inner.writer.hub.release()
        return self._inner.status()

    def error(self) -> str | None:
        """Why it failed."""
        return self._inner.error()

    def release(self) -> None:
        """Nothing to give back."""


class ClaimsDoneEarly(MemoryTransport):
    """Says DONE while the bytes are in flight."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Post the write into a held hub and look away."""
        self.hub.hold()
        handle = super().write(peer, ranges, notice)
        handle._status = Status.DONE
        return handle


class DoublesNotices(MemoryTransport):
    """Reports each landed write twice."""

    def notices(self) -> Sequence[Notice]:
        """Every notice, and again."""
        return tuple(super().notices()) * 2


class SkipsEmptyWrites(MemoryTransport):
    """Finds nothing to do in a write without ranges."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Forget the notice of an empty write."""
        handle = super().write(peer, ranges, notice)
        target = self.hub.find(peer.name)
        if not len(ranges) and target is not None:
            target.notices()
        return handle


class TruncatesNotices(MemoryTransport):
    """Cuts notices short without a word."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Send at most 64 bytes of notice."""
        return super().write(peer, ranges, notice[:64])


class FencesInWordsOnly(MemoryTransport):
    """Says that it fenced, and goes on landing what comes."""

    def fence(self, peer: Peer) -> bool:
        """Claim success."""
        return True


class WritesAfterClose(MemoryTransport):
    """Does not care that a peer was closed."""

    def close(self, peer: Peer) -> bool:
        """Do nothing, and say that it is done."""
        return True


class OutlivesShutdown(MemoryTransport):
    """Stays reachable after shutdown."""

    def shutdown(self) -> None:
        """Do nothing."""


class LeavesThreads(MemoryTransport):
    """Starts a thread that nobody ends."""

    def register(self, memory: Memory) -> Region:
        """Register, and leave a thread behind."""
        threading.Thread(target=threading.Event().wait, args=(30.0,), daemon=True).start()
        return super().register(memory)


class LosesSilently(MemoryTransport):
    """Never reports a lost peer."""

    def lost(self) -> Sequence[MemoryPeer]:
        """Nobody is ever lost."""
        return ()


class ReadsRangesLate(MemoryTransport):
    """Looks at the ranges of a write only when it is asked how the write stands."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Remember what to write."""
        return _Lazy(lambda: super(ReadsRangesLate, self).write(peer, ranges, notice))  # type: ignore[return-value]


class _Lazy:
    """A handle that begins its write when it is asked for its status."""

    def __init__(self, begin: Callable[[], MemoryHandle]) -> None:
        self._begin = begin
        self._inner: MemoryHandle | None = None

    def status(self) -> Status:
        """State, of a write that has begun now."""
        self._inner = self._inner or self._begin()
        return self._inner.status()

    def error(self) -> str | None:
        """Why it failed."""
        return self._inner.error() if self._inner else None

    def release(self) -> None:
        """Nothing to give back."""


class TakesNoStrideForNext(MemoryTransport):
    """Takes a source stride of 0 for pieces that lie one behind the other."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Write with another stride."""
        rows = ranges.copy()
        if rows.ndim == 2 and rows.shape[1] == len(RangeColumn):
            none = (rows[:, RangeColumn.SOURCE_STRIDE] == 0) & (rows[:, RangeColumn.COUNT] < 9)
            rows[none, RangeColumn.SOURCE_STRIDE] = rows[none, RangeColumn.LENGTH]
        return super().write(peer, rows, notice)


class RefusesIdleStrides(MemoryTransport):
    """Looks at the strides of rows of one piece."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Refuse strides that lead out of all regions."""
        if ranges.ndim == 2 and ranges.shape[1] == len(RangeColumn) and len(ranges):
            strides = [RangeColumn.SOURCE_STRIDE, RangeColumn.TARGET_STRIDE]
            if ranges[:, strides].max() > 1 << 40:
                raise ValueError("a stride leads out of a region")
        return super().write(peer, ranges, notice)


class DoneEarlyWhenLarge(MemoryTransport):
    """Says DONE of a large write before its bytes are there; its notice is in time."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Hold what is large back until somebody asks for notices."""
        if num_bytes(ranges) < 1 << 24:
            return super().write(peer, ranges, notice)
        self.hub.hold()
        handle = super().write(peer, ranges, notice)
        handle._status = Status.DONE
        return handle

    def notices(self) -> Sequence[Notice]:
        """Let everything land."""
        self.hub.release()
        return super().notices()


class DropsAfterALot(MemoryTransport):
    """Writes nothing more once 64 MiB have gone, and calls that done."""

    sent = 0

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Count bytes."""
        self.sent += num_bytes(ranges)
        return super().write(peer, ranges if self.sent < 64 << 20 else ranges[:0], notice)


class GivesNumbersAgain(MemoryTransport):
    """Gives a new region the number of one that was deregistered."""

    free = -1

    def deregister(self, region: Region) -> None:
        """Keep its number."""
        super().deregister(region)
        self.free = region.index

    def register(self, memory: Memory) -> Region:
        """Use it."""
        region = super().register(memory)
        return region if self.free < 0 else Region(self.free, memory)


class WritesToTheLastPeer(MemoryTransport):
    """Has one connection, to whom it was told of last."""

    def connect(self, card: bytes) -> MemoryPeer:
        """Forget who was there before."""
        self.last = super().connect(card)
        return self.last

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Write to whom it knows."""
        return super().write(self.last if peer in self._peers else peer, ranges, notice)


class SlowNotices(MemoryTransport):
    """Waits a while for notices when it has none."""

    def notices(self) -> Sequence[Notice]:
        """Block."""
        time.sleep(0.03)
        return super().notices()


class ReadsAfterClose(MemoryTransport):
    """Says that a peer is closed while a write to it still reads."""

    def __init__(self, name: str, *, host: str = "", hub: MemoryHub | None = None) -> None:
        super().__init__(name, host=host, hub=hub)
        self._reading: list[Peer] = []

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Take long for some megabytes."""
        if 1 << 23 < num_bytes(ranges) < 1 << 25:
            self.hub.hold()
        return super().write(peer, ranges, notice)

    def close(self, peer: Peer) -> bool:
        """Say so at once."""
        if not self.hub._in_flight:
            return super().close(peer)
        self._reading.append(peer)
        return True

    def notices(self) -> Sequence[Notice]:
        """Finish what runs."""
        self.hub.release()
        while self._reading:
            super().close(self._reading.pop())
        return super().notices()


class NotifiesBeforeTheEnd(MemoryTransport):
    """Of a large write of many rows it moves the last one after the notice."""

    def __init__(self, name: str, *, host: str = "", hub: MemoryHub | None = None) -> None:
        super().__init__(name, host=host, hub=hub)
        self._late: list[tuple[Peer, Ranges]] = []

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Write all rows but the last one."""
        if len(ranges) < 8 or num_bytes(ranges) < 1 << 20:
            return super().write(peer, ranges, notice)
        self._late.append((peer, ranges[-1:].copy()))
        return super().write(peer, ranges[:-1], notice)

    def notices(self) -> Sequence[Notice]:
        """Write what is late."""
        late, self._late = self._late, []
        for peer, row in late:
            super().write(peer, row, b"late")
        return super().notices()


class FencesForEver(MemoryTransport):
    """Lets nobody in again who was once fenced, also not in a new session."""

    def connect(self, card: bytes) -> MemoryPeer:
        """Connect, and keep all fences."""
        fenced = frozenset(self._fenced)
        peer = super().connect(card)
        self._fenced |= fenced
        return peer


class MixesWritersUp(MemoryTransport):
    """Tells writes apart by their number only, so that of two writers one is not heard."""

    _written = 0
    _heard: frozenset[int] = frozenset()

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Write under the next number."""
        self._written += 1
        return super().write(peer, ranges, notice)

    def receive(self, writer: MemoryTransport, copies: Copies, notice: bytes) -> bool:
        """Take a write, unless its number has been there."""
        assert isinstance(writer, MixesWritersUp)
        if writer._written in self._heard:
            return True
        self._heard |= {writer._written}
        return super().receive(writer, copies, notice)


class FencesWhatBegins(NotifiesBeforeTheEnd):
    """A fence keeps off what is written from then on, and not what is under way."""

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Write the first half of one large row."""
        if len(ranges) != 1 or num_bytes(ranges) != 16 << 20:
            return MemoryTransport.write(self, peer, ranges, notice)
        halves = ranges.repeat(2, axis=0)
        halves[:, RangeColumn.LENGTH] //= 2
        offsets = [RangeColumn.SOURCE_OFFSET, RangeColumn.TARGET_OFFSET]
        halves[1, offsets] += halves[0, RangeColumn.LENGTH]
        self._late.append((peer, halves[1:]))
        return MemoryTransport.write(self, peer, halves[:1], notice)

    def notices(self) -> Sequence[Notice]:
        """Write what is late, whatever the target says."""
        for peer, _ in self._late:
            target = self.hub.find(peer.name)
            assert target is not None
            target._fenced.discard(self.name)
        return super().notices()

    def close(self, peer: Peer) -> bool:
        """Forget what is late."""
        self._late = [late for late in self._late if late[0] is not peer]
        return super().close(peer)


class LetsTheFencedDialAgain(MemoryTransport):
    """A fence ends connections: who was fenced is let in by a late one, with its old card."""

    def connect(self, card: bytes) -> MemoryPeer:
        """Connect, and be no longer fenced over there."""
        peer = super().connect(card)
        target = self.hub.find(peer.name)
        assert target is not None
        target._fenced.discard(self.name)
        return peer


class DrainedBeforeItLands(MemoryTransport):
    """Says DRAINED of writes to a closed peer of which all has left, and nothing has landed."""

    def __init__(self, name: str, *, host: str = "", hub: MemoryHub | None = None) -> None:
        super().__init__(name, host=host, hub=hub)
        self._wire: list[tuple[int, bytes]] = []
        self._late: list[tuple[int, bytes]] = []

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Send some megabytes slowly."""
        if len(ranges) == 1 and 1 << 23 < num_bytes(ranges) < 1 << 25:
            self.hub.hold()
            target = self.hub.find(peer.name)
            assert target is not None
            source, start, region, end, length, *_ = ranges[0].tolist()
            sent = ctypes.string_at(self._regions.addresses()[source] + start, length)
            self._wire.append((target._regions.addresses()[region] + end, sent))
        return super().write(peer, ranges, notice)

    def close(self, peer: Peer) -> bool:
        """End the writes, and not what is on the wire."""
        self._late, self._wire = self._wire, []
        return super().close(peer)

    def notices(self) -> Sequence[Notice]:
        """Everything lands."""
        self._wire.clear()
        self.hub.release()
        for address, data in self._late:
            ctypes.memmove(address, data, len(data))
        self._late.clear()
        return super().notices()


def num_bytes(ranges: Ranges) -> int:
    """How much a write moves; 0 for what is no write."""
    if ranges.ndim != 2 or ranges.shape[1] != len(RangeColumn) or not len(ranges):
        return 0
    return int((ranges[:, RangeColumn.LENGTH] * ranges[:, RangeColumn.COUNT]).sum())


class Prepares(MemoryTransport):
    """No defect: it keeps the rows of a write that is prepared."""

    def prepare(self, peer: Peer, ranges: Ranges) -> list[Any]:
        """Keep them."""
        return [peer, ranges.copy()]

    def post(self, prepared: list[Any], notice: bytes) -> MemoryHandle:
        """Write them."""
        peer, ranges = prepared[:2]
        return self.write(peer, ranges, notice)

    def discard(self, prepared: list[Any]) -> None:
        """Nothing to give back."""


class CopiesWhenPrepared(Prepares):
    """Writes the bytes that were there when the write was prepared."""

    def __init__(self, name: str, *, host: str = "", hub: MemoryHub | None = None) -> None:
        super().__init__(name, host=host, hub=hub)
        self.arrays: list[Any] = []

    def register(self, memory: Memory) -> Region:
        """Remember it."""
        self.arrays.append(memory.owner)
        return super().register(memory)

    def prepare(self, peer: Peer, ranges: Ranges) -> list[Any]:
        """Keep a copy of all memory, too."""
        return [*super().prepare(peer, ranges), [array.copy() for array in self.arrays]]

    def post(self, prepared: list[Any], notice: bytes) -> MemoryHandle:
        """Write from the copy."""
        peer, ranges, held = prepared
        now = [array.copy() for array in self.arrays]
        for array, before in zip(self.arrays, held, strict=True):
            array[:] = before
        try:
            return self.write(peer, ranges, notice)
        finally:
            for array, after in zip(self.arrays, now, strict=True):
                array[:] = after


class WritesWhenPrepared(Prepares):
    """Lets the bytes go at once, and the notice when it is posted."""

    def prepare(self, peer: Peer, ranges: Ranges) -> list[Any]:
        """Write without a word."""
        if ranges.min() >= 0:
            target = self.hub.find(peer.name)
            super().write(peer, ranges, b"")
            assert target is not None
            target.notices()
        return super().prepare(peer, ranges)


class KeepsRowsOfOthers(Prepares):
    """Keeps the caller's array instead of a copy."""

    def prepare(self, peer: Peer, ranges: Ranges) -> list[Any]:
        """Keep it."""
        return [peer, ranges]


class PostsTheOldest(Prepares):
    """Posts in the order in which writes were prepared, whichever it is told."""

    def __init__(self, name: str, *, host: str = "", hub: MemoryHub | None = None) -> None:
        super().__init__(name, host=host, hub=hub)
        self.queue: list[list[Any]] = []

    def prepare(self, peer: Peer, ranges: Ranges) -> list[Any]:
        """Queue it."""
        self.queue.append(super().prepare(peer, ranges))
        return self.queue[-1]

    def post(self, prepared: list[Any], notice: bytes) -> MemoryHandle:
        """Take the first one."""
        return super().post(self.queue.pop(0), notice)


class PostsWhatIsDiscarded(Prepares):
    """Takes what is given back for what is to be posted."""

    def discard(self, prepared: list[Any]) -> None:
        """Write it."""
        self.post(prepared, b"")


class DiscardsOnce(Prepares):
    """Falls over what was given back already."""

    def discard(self, prepared: list[Any]) -> None:
        """Empty it."""
        if not prepared:
            raise RuntimeError("it was given back before")
        prepared.clear()


BROKEN: dict[type[MemoryTransport], str] = {
    ReadsRangesLate: "L0.bad-cards",
    TakesNoStrideForNext: "L1.exact-bytes",
    RefusesIdleStrides: "L1.exact-bytes",
    DoneEarlyWhenLarge: "L1.large-write",
    DropsAfterALot: "L1.large-write",
    GivesNumbersAgain: "L1.deregistered-region",
    WritesToTheLastPeer: "L2.many-writes",
    SlowNotices: "L2.many-writes",
    ReadsAfterClose: "L2.closed-peer",
    DropsLastRange: "L1.exact-bytes",
    IgnoresCount: "L1.exact-bytes",
    SpillsOver: "L1.exact-bytes",
    ClaimsDoneEarly: "L1.exact-bytes",
    DoublesNotices: "L1.empty-write",
    SkipsEmptyWrites: "L1.empty-write",
    TruncatesNotices: "L1.notice-lengths",
    PromisesTooManyRanges: "L1.the-most-ranges",
    ClampsBadRows: "L1.bounds",
    NotifiesEarly: "L2.notice-follows-bytes",
    WritesAfterClose: "L2.closed-peer",
    NotifiesBeforeTheEnd: "L2.notice-follows-the-last-bytes",
    FencesInWordsOnly: "L2.fence",
    FencesForEver: "L2.fence",
    LetsTheFencedDialAgain: "L2.fence",
    DrainedBeforeItLands: "L2.closed-peer",
    FencesWhatBegins: "L2.fence-amid-writes",
    CopiesWhenPrepared: "L2.prepared-writes",
    WritesWhenPrepared: "L2.prepared-writes",
    KeepsRowsOfOthers: "L2.prepared-writes",
    PostsTheOldest: "L2.prepared-writes",
    PostsWhatIsDiscarded: "L2.prepared-writes",
    DiscardsOnce: "L2.prepared-writes",
    MixesWritersUp: "L2.many-writes",
    OutlivesShutdown: "L3.dead-peer",
    LosesSilently: "L3.dead-peer",
    LeavesThreads: "L5.gives-everything-back",
}
"""Each broken transport and the case that must catch it, before any other does."""
