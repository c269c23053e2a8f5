"""A transport that injects faults into another one on a schedule, for tests and for `doctor`.

Writes are numbered from 0 in the order in which they are posted. Each kind of fault has a schedule:
the numbers of the writes that it hits, or a probability. Draws come from one seed, so a run can be
repeated. Several faults may hit one write. Both ends of a pair should be wrapped: a lost notice is
sent as a marker, which the other wrapper removes.

===============  ==========================================================================
fault            what happens to the write
===============  ==========================================================================
``delay``        it is posted only after `delay_polls` polls (`status`, `notices`)
``error``        it is not posted; its status is ERROR, then DRAINED
``partial``      only the first half is posted, without its notice; then as ``error``
``corrupt``      up to 8 bytes of its first range arrive wrong; otherwise it succeeds
``lose_notice``  its bytes land and it is DONE, but the notice never arrives
``disconnect``   the peer is closed before the write is posted, and reported lost
===============  ==========================================================================
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from kvbaton.connectors.base import (
    Capabilities,
    Handle,
    Memory,
    Notice,
    Peer,
    RangeColumn,
    Ranges,
    Region,
    Status,
    Transport,
)
from kvbaton.connectors.faults import Schedule, Schedules
from kvbaton.connectors.registry import load_transport

FAULTS = ("delay", "error", "partial", "corrupt", "lose_notice", "disconnect")
_LOST = b"\0kvbaton lost notice\0"
_SPOILED_BYTES = 8
_SCRATCH_SLOTS = 4096


class FaultyHandle:
    """A delayed write."""

    def __init__(self, transport: FaultyTransport, polls: int, post: Callable[[], Handle]) -> None:
        self._transport = transport
        self._due = transport.polls + polls
        self._post = post
        self._inner: Handle | None = None

    def status(self) -> Status:
        """The current state; PENDING until the delay is over and the write is posted."""
        self._transport.polls += 1
        if self._inner is None and self._transport.polls >= self._due:
            self._inner = self._post()
        return self._inner.status() if self._inner is not None else Status.PENDING

    def error(self) -> str | None:
        """Why the write failed."""
        return self._inner.error() if self._inner is not None else None

    def release(self) -> None:
        """Release the inner handle."""
        if self._inner is not None:
            self._inner.release()


class BrokenHandle:
    """A write that fails on purpose, once its posted part has ended."""

    def __init__(self, reason: str, part: Handle | None = None) -> None:
        self._reason = reason
        self._part = part
        self._told = False

    def status(self) -> Status:
        """PENDING while the part is in flight, then ERROR once, then DRAINED if the part is."""
        state = self._part.status() if self._part is not None else Status.DRAINED
        if state is Status.PENDING:
            return state
        if not self._told or state is Status.ERROR:
            self._told = True
            return Status.ERROR
        return Status.DRAINED

    def error(self) -> str | None:
        """The injected error."""
        return self._reason

    def release(self) -> None:
        """Release the part's handle."""
        if self._part is not None:
            self._part.release()


class Scratch:
    """Registered memory from which wrong bytes are written, so that the source is not changed."""

    def __init__(self, transport: Transport) -> None:
        self._array = np.zeros(_SCRATCH_SLOTS * _SPOILED_BYTES, dtype=np.uint8)
        memory = Memory(self._array.ctypes.data, self._array.nbytes, owner=self._array)
        self._index = transport.register(memory).index
        self._next = 0

    def put(self, data: bytearray) -> tuple[int, int]:
        """Store up to 8 bytes, valid for 4,095 further calls; returns region and offset."""
        offset = self._next % _SCRATCH_SLOTS * _SPOILED_BYTES
        self._next += 1
        self._array[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return self._index, offset


class FaultyTransport:
    """Injects faults into another transport.

    Attributes:
        injected: Number of injected faults of each kind.
        polls: Number of polls of handles and notices so far; the clock of `delay`.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        inner: str = "memory",
        seed: int = 0,
        delay_polls: int = 100,
        delay: Schedule = 0.0,
        error: Schedule = 0.0,
        partial: Schedule = 0.0,
        corrupt: Schedule = 0.0,
        lose_notice: Schedule = 0.0,
        disconnect: Schedule = 0.0,
        **context: object,
    ) -> None:
        """Wrap a transport.

        Args:
            name: Name of the inner transport.
            host: Host of the inner transport.
            inner: Spec of the inner transport.
            seed: Seed of the random draws.
            delay_polls: Polls after which a delayed write is posted.
            delay: Writes that are posted late.
            error: Writes that fail without being posted.
            partial: Writes that land in part and fail.
            corrupt: Writes that land with wrong bytes.
            lose_notice: Writes that land without a notice.
            disconnect: Writes before which the peer is closed.
            context: Further arguments of the inner transport.

        Raises:
            ConfigError: A schedule is neither a probability nor a list of writes' numbers.
        """
        values = (delay, error, partial, corrupt, lose_notice, disconnect)
        by_fault = dict(zip(FAULTS, values, strict=True))
        self._schedules = Schedules("--transport", seed, by_fault)
        self._inner: Transport = load_transport(inner, name=name, host=host, **context)
        self._delay_polls = delay_polls
        self._memories: dict[int, Memory] = {}
        self._scratch: Scratch | None = None
        self._lost: list[Peer] = []
        self.injected = self._schedules.injected
        self.polls = 0

    @property
    def name(self) -> str:
        """As the inner transport's."""
        return self._inner.name

    @property
    def capabilities(self) -> Capabilities:
        """As the inner transport's."""
        return self._inner.capabilities

    def register(self, memory: Memory) -> Region:
        """Pass on."""
        region = self._inner.register(memory)
        self._memories[region.index] = memory
        return region

    def deregister(self, region: Region) -> None:
        """Pass on."""
        self._inner.deregister(region)
        self._memories.pop(region.index, None)

    def card(self) -> bytes:
        """Pass on."""
        return self._inner.card()

    def connect(self, card: bytes) -> Peer:
        """Pass on."""
        return self._inner.connect(card)

    def close(self, peer: Peer) -> bool:
        """Pass on; delayed writes to this peer fail when they are posted."""
        return self._inner.close(peer)

    def fence(self, peer: Peer) -> bool:
        """Pass on."""
        return self._inner.fence(peer)

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> Handle:
        """Post a write, with the faults that the schedule has for it."""
        faults = self._schedules.draw()
        if not self._schedules.hit("delay", faults):
            return self._post(peer, ranges, notice, faults)
        copied = ranges.copy()

        def later() -> Handle:
            try:
                return self._post(peer, copied, notice, faults)
            except ValueError as error:
                return BrokenHandle(str(error))

        return FaultyHandle(self, self._delay_polls, later)

    def notices(self) -> Sequence[Notice]:
        """Pass on all notices but those marked as lost."""
        self.polls += 1
        return tuple(n for n in self._inner.notices() if n.payload != _LOST)

    def lost(self) -> Sequence[Peer]:
        """Pass on, with the peers that were disconnected by a fault."""
        broken, self._lost = self._lost, []
        return (*broken, *(peer for peer in self._inner.lost() if peer not in broken))

    def shutdown(self) -> None:
        """Pass on."""
        self._inner.shutdown()

    def _post(self, peer: Peer, ranges: Ranges, notice: bytes, faults: set[str]) -> Handle:
        hit = self._schedules.hit
        if hit("disconnect", faults):
            self._inner.close(peer)
            self._lost.append(peer)
        if hit("error", faults):
            return BrokenHandle("injected error")
        if len(ranges) and hit("partial", faults):
            half = ranges[: max(1, len(ranges) // 2)]
            if len(ranges) == 1:  # the first half of its runs or bytes
                column = RangeColumn.LENGTH
                if ranges[0, RangeColumn.COUNT] > 1:
                    column = RangeColumn.COUNT
                half = ranges.copy()
                half[0, column] = max(int(ranges[0, column]) // 2, 1)
            part = self._inner.write(peer, half, _LOST)
            return BrokenHandle("injected error after a part", part)
        if "corrupt" in faults:
            ranges = self._spoil(ranges)
        if hit("lose_notice", faults):
            notice = _LOST
        return self._inner.write(peer, ranges, notice)

    def _spoil(self, ranges: Ranges) -> Ranges:
        """Redirect the first bytes of the first range to scratch memory with wrong bytes.

        For CPU memory one bit of the last of these bytes is flipped: in little-endian floats the
        highest bit of an exponent, which is a large error. For GPU memory the bytes are random. A
        range outside of registered memory is left alone: the inner transport refuses it.
        """
        if ranges.ndim != 2 or ranges.shape[0] == 0 or ranges.shape[1] != len(RangeColumn):
            return ranges
        source, start, target, end, length, count, step, target_step = ranges[0].tolist()
        memory = self._memories.get(source)
        if memory is None or start < 0 or not 0 < length <= memory.num_bytes - start:
            return ranges
        self.injected["corrupt"] += 1
        head = min(length, _SPOILED_BYTES)
        if memory.device == "cpu":
            wrong = bytearray(ctypes.string_at(memory.address + start, head))
            wrong[-1] ^= 0x40
        else:
            wrong = bytearray(self._schedules.random.randbytes(head))
        if self._scratch is None:
            self._scratch = Scratch(self._inner)
        region, offset = self._scratch.put(wrong)
        rows = [(region, offset, target, end, head, 1, 0, 0)]
        if length > head:
            rows.append((source, start + head, target, end + head, length - head, 1, 0, 0))
        if count > 1:
            rest = (source, start + step, target, end + target_step, length, count - 1)
            rows.append((*rest, step, target_step))
        return np.concatenate([np.array(rows, dtype=np.int64), ranges[1:]])
