"""A transport around another one that does damage on a schedule: for tests and for `doctor`.

Writes are numbered from 0 in the order in which they are posted. Each kind of fault is given either
the numbers of the writes that it hits or a probability; draws come from one seed, so a run can be
repeated. A write may suffer several faults. Both ends of a pair should be wrapped: a notice that is
lost still crosses, as a marker that the other wrapper takes out.

===============  ==========================================================================
fault            what happens to the write
===============  ==========================================================================
``delay``        it is posted only after `delay_polls` polls (`status`, `notices`)
``error``        it is not posted; ERROR, then DRAINED
``partial``      only the first half is posted, without its notice; then as ``error``
``corrupt``      up to 8 bytes of its first range arrive wrong; otherwise it ends well
``lose_notice``  its bytes land and it is DONE, but the notice never shows
``disconnect``   the peer is closed before it is posted, and reported lost
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
    """A write that waits, fails or is passed on."""

    def __init__(self, transport: FaultyTransport, polls: int, post: Callable[[], Handle]) -> None:
        self._transport = transport
        self._due = transport.polls + polls
        self._post = post
        self._inner: Handle | None = None

    def status(self) -> Status:
        """State now, after the faults."""
        self._transport.polls += 1
        if self._inner is None and self._transport.polls >= self._due:
            self._inner = self._post()
        return self._inner.status() if self._inner is not None else Status.PENDING

    def error(self) -> str | None:
        """Why it failed."""
        return self._inner.error() if self._inner is not None else None

    def release(self) -> None:
        """Pass it on."""
        if self._inner is not None:
            self._inner.release()


class BrokenHandle:
    """A write that fails on purpose, once what was posted of it has ended."""

    def __init__(self, reason: str, part: Handle | None = None) -> None:
        self._reason = reason
        self._part = part
        self._told = False

    def status(self) -> Status:
        """PENDING while a part lands, ERROR once, then DRAINED if the part lets it be."""
        state = self._part.status() if self._part is not None else Status.DRAINED
        if state is Status.PENDING:
            return state
        if not self._told or state is Status.ERROR:
            self._told = True
            return Status.ERROR
        return Status.DRAINED

    def error(self) -> str | None:
        """What was injected."""
        return self._reason

    def release(self) -> None:
        """Pass it on."""
        if self._part is not None:
            self._part.release()


class Scratch:
    """Registered memory that wrong bytes are written from, so that the source stays as it is."""

    def __init__(self, transport: Transport) -> None:
        self._array = np.zeros(_SCRATCH_SLOTS * _SPOILED_BYTES, dtype=np.uint8)
        memory = Memory(self._array.ctypes.data, self._array.nbytes, owner=self._array)
        self._index = transport.register(memory).index
        self._next = 0

    def put(self, data: bytearray) -> tuple[int, int]:
        """Store up to 8 bytes, until 4,096 further calls; returns region and offset."""
        offset = self._next % _SCRATCH_SLOTS * _SPOILED_BYTES
        self._next += 1
        self._array[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return self._index, offset


class FaultyTransport:
    """Injects faults into another transport.

    Attributes:
        injected: how often each kind of fault was injected.
        polls: polls of handles and notices so far; the clock of `delay`.
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
            name: given to the inner transport.
            host: given to the inner transport.
            inner: spec of the inner transport.
            seed: of the draws.
            delay_polls: how long a delayed write waits.
            delay: which writes are posted late.
            error: which fail without being posted.
            partial: which land in part and fail.
            corrupt: which land with wrong bytes.
            lose_notice: which land without a notice.
            disconnect: before which the peer is closed.
            context: further arguments of the inner transport.

        Raises:
            ConfigError: a schedule is neither a probability nor numbers of writes.
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
        """Pass on; delayed writes to it fail when they are posted."""
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
        """Pass on what was not marked as lost."""
        self.polls += 1
        return tuple(n for n in self._inner.notices() if n.payload != _LOST)

    def lost(self) -> Sequence[Peer]:
        """Pass on, with those that were disconnected here."""
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
            if len(ranges) == 1:  # the first half of its pieces or bytes
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
        """Take the first bytes of the first range from scratch memory, where they are wrong.

        One bit of the last of them is flipped; off the CPU they are random. In memory of
        little-endian floats it is the highest bit of an exponent, so that whoever uses the number
        notices. A range that is not in our memory stays: the inner transport refuses it.
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
