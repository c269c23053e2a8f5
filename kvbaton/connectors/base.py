"""The connector SDK: what a transport is, in memory regions and handles.

A transport moves bytes between registered memory of two live processes. It knows no model, no
request, no block: it is given ranges (`Ranges`) that a plan computed. Importable without torch.

Threading: one thread, the *transfer thread* of a node, makes every call on a transport, and no
call may block it for more than a few milliseconds, except `fence` and `close`, which may take up
to a second, and `connect`, half a second if the other side does not answer. A transport may run
threads of its own. Buffers belong to the engine: between `register` and `deregister` they stay
where they are, and a transport touches them only while a write is in flight.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Ranges = npt.NDArray[np.int64]
"""Packed copy instructions, int64 of shape [n, 8]; the columns are `RangeColumn`."""

Device = Literal["cpu", "cuda"]


class RangeColumn(enum.IntEnum):
    """Columns of `Ranges`. All offsets, lengths and strides are in bytes.

    One row says: for i in range(count), copy `LENGTH` bytes from
    ``source region + SOURCE_OFFSET + i * SOURCE_STRIDE`` to
    ``target region + TARGET_OFFSET + i * TARGET_STRIDE``.
    """

    SOURCE_REGION = 0
    SOURCE_OFFSET = 1
    TARGET_REGION = 2
    TARGET_OFFSET = 3
    LENGTH = 4
    COUNT = 5
    SOURCE_STRIDE = 6
    TARGET_STRIDE = 7


@dataclass(frozen=True)
class Memory:
    """A piece of memory that the engine owns and a transport may be given.

    Attributes:
        address: first byte, as a pointer in this process.
        num_bytes: length.
        device: ``"cpu"`` or ``"cuda"``.
        device_index: CUDA ordinal, 0 on the CPU.
        owner: whatever keeps the memory alive (a tensor); never looked into.
    """

    address: int
    num_bytes: int
    device: Device = "cpu"
    device_index: int = 0
    owner: object = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        """As of a `memoryview` of bytes."""
        return self.num_bytes

    def part(self, start: int, end: int) -> Memory:
        """Bytes [start, end) of it."""
        return Memory(self.address + start, end - start, self.device, self.device_index, self.owner)

    def view(self) -> memoryview:
        """Its bytes, writable, if they are memory of the CPU; the view keeps the owner alive."""
        array = (ctypes.c_ubyte * self.num_bytes).from_address(self.address)
        array.owner = self.owner  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


@dataclass(frozen=True)
class Region:
    """Registered memory: what `Transport.register` returned for a `Memory`.

    Attributes:
        index: its number among the regions of this transport, in order of registration. It is the
            number that `RangeColumn.SOURCE_REGION` and `RangeColumn.TARGET_REGION` hold.
        memory: what was registered.
    """

    index: int
    memory: Memory


class Status(enum.Enum):
    """State of a `Handle`. Only `DONE` and `DRAINED` are terminal."""

    PENDING = enum.auto()
    DONE = enum.auto()
    """The bytes are visible at the far side, to anything that starts after now."""
    ERROR = enum.auto()
    """The write failed; some of its bytes may have landed and may still land."""
    DRAINED = enum.auto()
    """The write failed and no byte of it can land any more, nor is its source read any more."""


@runtime_checkable
class Handle(Protocol):
    """One write in flight."""

    def status(self) -> Status:
        """State now; never blocks. Drives progress where the transport needs driving."""

    def error(self) -> str | None:
        """Why it failed, once `status` is `ERROR` or `DRAINED`."""

    def release(self) -> None:
        """Give the handle back. Only after a terminal status or a closed peer. Idempotent."""


@runtime_checkable
class Peer(Protocol):
    """A connection to one generation of one remote rank. It never reconnects."""

    @property
    def name(self) -> str:
        """The remote transport's name, as in its card."""


@dataclass(frozen=True)
class Notice:
    """A write of a peer that has landed, told by the bytes that its sender attached."""

    payload: bytes


class FenceScope(enum.Enum):
    """What a transport can prove about writes that were in flight."""

    PEER = enum.auto()
    """`fence(peer)` proves it for that one connection, whatever the peer does."""
    PROCESS = enum.auto()
    """`fence(peer)` can prove it only once the peer's process is gone."""
    NONE = enum.auto()
    """Nothing can be proven; only the peer's own word or our restart frees memory."""


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do; the kit skips what it declares it can't.

    Attributes:
        devices: kinds of memory it can register.
        max_notice_bytes: longest notice payload, at least 80; digests travel in it, 8 bytes for
            each unit of lcm(both block sizes) tokens, so small notices make many small writes.
        fence: see `FenceScope`.
        max_ranges: most rows of one write, at least 1; the caller splits above it.
        processes: it reaches other processes.
        host_staged: those of `devices` whose bytes pass through memory of the host: slow.
    """

    devices: frozenset[Device]
    max_notice_bytes: int
    fence: FenceScope
    max_ranges: int = 65_536
    processes: bool = True
    host_staged: frozenset[Device] = frozenset()


@runtime_checkable
class Transport(Protocol):
    """Moves bytes between registered memory of two live processes."""

    @property
    def name(self) -> str:
        """Unique per process and generation: a restarted process has another name."""

    @property
    def capabilities(self) -> Capabilities:
        """What this transport can do."""

    def register(self, memory: Memory) -> Region:
        """Make memory reachable. Raises `TransportError`."""

    def deregister(self, region: Region) -> None:
        """Undo `register`. Only when no write can touch the region any more."""

    def card(self) -> bytes:
        """All that a peer needs to `connect`: taken after the last `register`. A secret."""

    def connect(self, card: bytes) -> Peer:
        """Reach the owner of a card. Raises `TransportError`; never dials before this call."""

    def close(self, peer: Peer) -> bool:
        """Stop posting to a peer, and try to end the writes to it that are in flight.

        Returns True once they no longer read our memory, else False; the caller asks again later.
        """

    def fence(self, peer: Peer) -> bool:
        """Try to make sure that no byte of this peer can land here any more.

        Returns True once that is proven, else False; the caller asks again later.
        """

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> Handle:
        """Start copying ranges from our regions into the peer's; `notice` follows the bytes.

        A failure to start gives a handle whose status says so; it raises only `ValueError` for
        arguments that break this contract. An empty `ranges` sends the notice alone.
        """

    def notices(self) -> Sequence[Notice]:
        """Writes that have landed here since the last call; never blocks; drives progress."""

    def lost(self) -> Sequence[Peer]:
        """Peers found to be gone since the last call."""

    def shutdown(self) -> None:
        """Close every peer and give everything back. Idempotent."""


@runtime_checkable
class PreparesWrites(Protocol):
    """A `Transport` that can make a write ready before the bytes are there; no other need."""

    def prepare(self, peer: Peer, ranges: Ranges) -> object:
        """Make a write ready: what `post` or `discard` takes. As `write` it raises `ValueError`.

        `ranges` may change as soon as it returns.
        """

    def post(self, prepared: Any, notice: bytes) -> Handle:
        """Start a write that was made ready, once, as `write` does: with the bytes of now."""

    def discard(self, prepared: Any) -> None:
        """Give back what was made ready and will not be posted. Idempotent."""
