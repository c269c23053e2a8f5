"""The connector SDK: the contract of a transport, in terms of memory regions and handles.

A transport moves bytes between registered memory of two live processes. It knows nothing of models,
requests or KV blocks: it gets ranges (`Ranges`) that a plan has computed. No torch is needed here.

Threading: one thread, the *transfer thread* of a node, makes every call on a transport. A call may
block it for a few milliseconds at most; `fence` and `close` may take up to a second, and `connect`
half a second if the other side does not answer. A transport may run threads of its own. Buffers
belong to the engine: they do not move between `register` and `deregister`, and a transport accesses
them only while a write is in flight.
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

    One row means: for i in range(`COUNT`), copy `LENGTH` bytes from
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
    """A contiguous piece of memory that the engine owns and may pass to a transport.

    Attributes:
        address: Address of the first byte in this process.
        num_bytes: Length in bytes.
        device: ``"cpu"`` or ``"cuda"``.
        device_index: CUDA device ordinal; 0 on the CPU.
        owner: Object that keeps the memory alive (a tensor, for example); opaque to transports.
    """

    address: int
    num_bytes: int
    device: Device = "cpu"
    device_index: int = 0
    owner: object = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        """Length in bytes, as of a `memoryview` of bytes."""
        return self.num_bytes

    def part(self, start: int, end: int) -> Memory:
        """Bytes [start, end) of this memory."""
        return Memory(self.address + start, end - start, self.device, self.device_index, self.owner)

    def view(self) -> memoryview:
        """A writable view of the bytes, for CPU memory only; the view keeps the owner alive."""
        array = (ctypes.c_ubyte * self.num_bytes).from_address(self.address)
        array.owner = self.owner  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


@dataclass(frozen=True)
class Region:
    """Registered memory, as `Transport.register` returns it.

    Attributes:
        index: Number of the region in this transport, in order of registration. The columns
            `RangeColumn.SOURCE_REGION` and `RangeColumn.TARGET_REGION` hold this number.
        memory: The registered memory.
    """

    index: int
    memory: Memory


class Status(enum.Enum):
    """State of a `Handle`. Only `DONE` and `DRAINED` are terminal."""

    PENDING = enum.auto()
    """The write is in flight."""
    DONE = enum.auto()
    """The bytes are visible on the target to anything that starts from now on."""
    ERROR = enum.auto()
    """The write failed; some of its bytes may have landed, and others may still land."""
    DRAINED = enum.auto()
    """The write failed; none of its bytes can land any more, and its source is no longer read."""


@runtime_checkable
class Handle(Protocol):
    """One write in flight."""

    def status(self) -> Status:
        """The current state; never blocks. Drives progress if the transport needs polling."""

    def error(self) -> str | None:
        """Why the write failed, once `status` is `ERROR` or `DRAINED`."""

    def release(self) -> None:
        """Free the handle: only after a terminal status, or once its peer is closed. Idempotent."""


@runtime_checkable
class Peer(Protocol):
    """A connection to one generation of one remote rank. It never reconnects."""

    @property
    def name(self) -> str:
        """Name of the remote transport, as in its card."""


@dataclass(frozen=True)
class Notice:
    """Notification that a peer's write has landed, with the payload that the sender attached."""

    payload: bytes


class FenceScope(enum.Enum):
    """When `Transport.fence` can prove that no write of a peer can land here any more."""

    PEER = enum.auto()
    """`fence(peer)` can prove it for that one connection, whatever the peer does."""
    PROCESS = enum.auto()
    """`fence(peer)` can prove it only once the peer's process is gone."""
    NONE = enum.auto()
    """It can never prove it; memory is freed by the peer's message or a restart of this process."""


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do; the conformance kit skips the tests of what it can't.

    Attributes:
        devices: Kinds of memory that the transport can register.
        max_notice_bytes: Maximum length of a notice payload, at least 80. Notices carry digests, 8
            bytes per unit of lcm(both block sizes) tokens, so small notices make small writes.
        fence: When `fence` can succeed, see `FenceScope`.
        max_ranges: Maximum number of rows of a write, at least 1; the caller splits larger writes.
        processes: Whether the transport reaches other processes.
        host_staged: Those of `devices` whose bytes are staged through host memory, which is slow.
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
        """Name, unique per process and generation: a restarted process has another one."""

    @property
    def capabilities(self) -> Capabilities:
        """What this transport can do."""

    def register(self, memory: Memory) -> Region:
        """Make memory readable and writable for transfers. Raises `TransportError`."""

    def deregister(self, region: Region) -> None:
        """Undo `register`; called only when no write can access the region any more."""

    def card(self) -> bytes:
        """All that a peer needs to `connect`; taken after the last `register`. It is a secret."""

    def connect(self, card: bytes) -> Peer:
        """Connect to the owner of a card. Raises `TransportError`; never dials before this call."""

    def close(self, peer: Peer) -> bool:
        """Stop posting writes to a peer, and try to end those in flight.

        Returns True once they no longer read local memory, else False; the caller retries later.
        """

    def fence(self, peer: Peer) -> bool:
        """Try to make sure that no byte from this peer can land here any more.

        Returns True once that is proven, else False; the caller retries later.
        """

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> Handle:
        """Start copying ranges from local regions into the peer's; `notice` arrives after them.

        If the write can't be started, the handle's status says so. Raises only `ValueError`, for
        arguments that break this contract. An empty `ranges` sends the notice alone.
        """

    def notices(self) -> Sequence[Notice]:
        """Notices of writes that landed here since the last call. Never blocks; drives progress."""

    def lost(self) -> Sequence[Peer]:
        """Peers that were found to be gone since the last call."""

    def shutdown(self) -> None:
        """Close every peer and free all resources. Idempotent."""


@runtime_checkable
class PreparesWrites(Protocol):
    """A `Transport` that can prepare a write before its bytes are there: optional."""

    def prepare(self, peer: Peer, ranges: Ranges) -> object:
        """Prepare a write, for `post` or `discard`. Raises `ValueError` as `write` does.

        The caller may change `ranges` as soon as this returns.
        """

    def post(self, prepared: Any, notice: bytes) -> Handle:
        """Start a prepared write as `write` does, once; it copies the bytes as they are now."""

    def discard(self, prepared: Any) -> None:
        """Free a prepared write that will not be posted. Idempotent."""
