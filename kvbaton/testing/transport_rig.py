"""The rig of transport cases: two connected transports, and the expected memory of the target.

The expected memory is computed by plain Python loops over rows, so a transport is never compared
with its own arithmetic.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import (
    Device,
    Handle,
    Memory,
    Notice,
    Peer,
    PreparesWrites,
    Ranges,
    Region,
    Status,
    Transport,
)
from kvbaton.connectors.registry import load_transport
from kvbaton.errors import TransportError
from kvbaton.testing.kit import Answers, Kit, checked, kind, require, require_answer

Bytes = npt.NDArray[np.uint8]
Row = tuple[int, int, int, int, int, int, int, int]

MakePair = Callable[[], tuple[Transport, Transport]]
SOURCE_SIZES = (300_037, 65_536)
TARGET_SIZES = (262_144, 99_991, 4_096)

TRANSPORT_KIT = Kit["Pair"]()
case = TRANSPORT_KIT.case
HOT_POLLS = 200
PAUSE_S = 0.0002
"""Seconds between polls of a transport that was idle for `HOT_POLLS`, as in a transfer thread."""
_numbers = itertools.count()
ANSWERS: Answers = {
    "register": ("a Region", kind(Region)),
    "card": ("bytes", kind(bytes)),
    "connect": ("a Peer", kind(Peer)),
    "close": ("a bool", kind(bool)),
    "fence": ("a bool", kind(bool)),
    "write": ("a Handle", kind(Handle)),
    "post": ("a Handle", kind(Handle)),
    "notices": ("a sequence of Notice", lambda got, *_: _are(got, Notice)),
    "lost": ("a sequence of Peer", lambda got, *_: _are(got, Peer)),
}
"""Expected results of a transport's methods."""


def _are(answer: object, what: type[Any]) -> bool:
    return isinstance(answer, Sequence) and all(isinstance(one, what) for one in answer)


class Polled:
    """Base of rigs that have to be polled.

    Attributes:
        patience: Seconds to wait for each event.
    """

    patience: float

    def poll(self) -> None:
        """Let transports make progress, and collect their notices and lost peers."""
        raise NotImplementedError

    def wait(self, done: Callable[[], bool], what: str, within: float | None = None) -> None:
        """Poll until `done()` is True, for at most `within` or `patience` seconds."""
        patience = within or self.patience
        limit = time.monotonic() + patience
        for polls in itertools.count():
            if done():
                return
            self.poll()
            require(time.monotonic() < limit, f"{what}: not within {patience:.3g} s")
            pause_after(polls)

    def finish(
        self, handle: Handle, what: str = "a write must end", within: float | None = None
    ) -> Status:
        """Poll until a write is no longer pending; returns its status."""
        self.wait(lambda: handle.status() is not Status.PENDING, what, within)
        status = handle.status()
        return require_answer("status", status, "a Status", isinstance(status, Status))

    def complete(self, handle: Handle, within: float | None = None) -> None:
        """Poll until a write is done; any other status is a failure."""
        status = self.finish(handle, within=within)
        require(status is Status.DONE, f"a write ended {status.name}: {handle.error()}")
        handle.release()


class Pair(Polled):
    """Two transports of one kind, both driven by one thread.

    Attributes:
        source: The transport that writes.
        target: The transport whose memory is written.
        peer: The source's peer: the target.
        back: The target's peer: the source.
        notices: Payloads that arrived at the target, in order.
        spec: Spec to build the transport in another process; None if that is impossible.
    """

    def __init__(
        self,
        make_pair: MakePair,
        seed: int = 0,
        *,
        patience: float = 20.0,
        depth: int = 1,
        spec: str | None = None,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.make_pair, self.patience, self.depth, self.spec = make_pair, patience, depth, spec
        self.source, self.target = (checked(side, ANSWERS) for side in make_pair())
        self.source_memory = [self._noise(size) for size in SOURCE_SIZES]
        self.target_memory = [self._noise(size) for size in TARGET_SIZES]
        self.expected = [memory.copy() for memory in self.target_memory]
        self.source_regions = [self.source.register(memory_of(m)) for m in self.source_memory]
        self.target_regions = [self.target.register(memory_of(m)) for m in self.target_memory]
        self.peer = self.source.connect(self.target.card())
        self.back = self.target.connect(self.source.card())
        self.notices: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def lacks(self, need: str) -> str | None:
        """See `Rig.lacks`. A need is ``processes`` or ``prepares``."""
        if need == "prepares":
            return None if isinstance(self.source, PreparesWrites) else "not declared: prepare"
        assert need == "processes", need
        if self.spec is None or not self.source.capabilities.processes:
            return "not declared: processes"
        return None

    def beside(self, near: Bytes, far: Bytes) -> tuple[int, int, Peer]:
        """Register further memory on both sides; returns both regions' indices and a new peer."""
        source = self.source.register(memory_of(near)).index
        target = self.target.register(memory_of(far)).index
        return source, target, self.source.connect(self.target.card())

    @property
    def max_ranges(self) -> int:
        """Maximum number of rows of one write."""
        return self.source.capabilities.max_ranges

    def rows(self, count: int, largest: int = 2_000) -> list[Row]:
        """Random rows of one write, at most `max_ranges`."""
        return random_rows(self.random, min(count, self.max_ranges), largest)

    def write(self, rows: Sequence[Row], notice: bytes = b"") -> Handle:
        """Post rows, and apply them to the expected memory."""
        ranges = pack(rows)
        handle = self.source.write(self.peer, ranges, notice)
        ranges[:] = -1  # the caller may change them after the call
        self.expect(rows)
        return handle

    def expect(self, rows: Sequence[Row]) -> None:
        """Apply rows to the expected memory, with the source's bytes of now."""
        for source, start, target, end, length, count, step, stride in rows:
            for piece in range(count):
                low, high = start + piece * step, end + piece * stride
                data = self.source_memory[source][low : low + length]
                self.expected[target][high : high + length] = data

    def poll(self) -> None:
        """Let both sides make progress and collect notices."""
        self.notices += [notice.payload for notice in self.target.notices()]
        self.source.notices()

    def write_all(self, rows: Sequence[Row], notice: bytes = b"") -> None:
        """Post rows in as many writes as necessary; all must complete."""
        for start in range(0, len(rows), self.max_ranges):
            self.complete(self.write(rows[start : start + self.max_ranges], notice))

    def write_each(self, rows: Sequence[Row]) -> list[bytes]:
        """Post each row in a write of its own, all in flight; all must complete and be notified.

        Returns the notices, of which each must have arrived exactly once.
        """
        self.notices.clear()
        sent = [number.to_bytes(4, "little") for number in range(len(rows))]
        handles = [self.write([row], notice) for row, notice in zip(rows, sent, strict=True)]
        for handle in reversed(handles):
            self.complete(handle)
        self.expect_notices(sent)
        return sent

    def expect_notices(self, sent: Sequence[bytes]) -> None:
        """Poll until as many notices have arrived; each must have arrived exactly once."""
        self.wait(lambda: len(self.notices) >= len(sent), f"{len(sent)} notices")
        same = sorted(self.notices) == sorted(sent)
        require(same, f"a notice is missing, doubled or changed: {self.notices[:9]}")

    def compare(self, what: str) -> None:
        """Compare all of the target's memory with the expected memory."""
        for index, (found, wanted) in enumerate(
            zip(self.target_memory, self.expected, strict=True)
        ):
            wrong = np.flatnonzero(found != wanted)
            require(
                not len(wrong),
                f"{what}: {len(wrong)} wrong bytes in region {index}, first at {wrong[:1]}",
            )

    def close(self) -> None:
        """Shut both sides down."""
        self.source.shutdown()
        self.target.shutdown()

    def _noise(self, size: int) -> Bytes:
        return self.random.integers(0, 256, size, dtype=np.uint8)


def pair_of(spec: str, *, seed: int = 0, depth: int = 1, patience: float = 20.0) -> Pair:
    """A pair of the transport that a spec names."""

    def make() -> tuple[Transport, Transport]:
        one, two = (load_transport(spec, name=fresh_name()) for _ in range(2))
        return one, two

    return Pair(make, seed, patience=patience, depth=depth, spec=spec)


def pause_after(polls: int) -> None:
    """Yield the core after `HOT_POLLS` polls without success."""
    if polls >= HOT_POLLS:
        time.sleep(PAUSE_S)


def fresh_name() -> str:
    """A new transport name."""
    return f"kit-{os.getpid()}-{next(_numbers)}"


def memory_of(array: Bytes) -> Memory:
    """A numpy array as `Memory`."""
    return Memory(array.ctypes.data, array.nbytes, owner=array)


def pack(rows: Sequence[Row]) -> Ranges:
    """Pack rows into `Ranges`."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), 8)


def random_rows(random: np.random.Generator, count: int, largest: int = 2_000) -> list[Row]:
    """Draw rows whose targets do not overlap: each has its own slot of target region 0."""
    slot = TARGET_SIZES[0] // count
    rows: list[Row] = []
    for number in range(count):
        pieces = int(random.integers(1, 5))
        stride = slot // pieces
        length = int(random.integers(1, min(stride, largest) + 1))
        source = int(random.integers(0, len(SOURCE_SIZES)))
        step = int(random.integers(0, 3 * length))
        span = length + (pieces - 1) * step
        offset = int(random.integers(0, SOURCE_SIZES[source] - span + 1))
        rows.append((source, offset, 0, number * slot, length, pieces, step, stride))
    return rows


class Buffer:
    """Memory to register with a transport.

    Args:
        device: Kind of memory; ``cuda`` uses GPU 0 and needs torch.
        num_bytes: Length in bytes.
        filled: Byte to fill it with; None fills it with random bytes from a fixed seed.
    """

    def __init__(self, device: Device, num_bytes: int, filled: int | None) -> None:
        if filled is None:
            noise = np.frombuffer(bytearray(np.random.default_rng(1).bytes(num_bytes)), np.uint8)
        else:
            noise = np.full(num_bytes, filled, np.uint8)
        self._held: Any = noise
        address = noise.ctypes.data
        if device == "cuda":
            import torch

            self._held = torch.from_numpy(noise).cuda()
            torch.cuda.synchronize()
            address = self._held.data_ptr()
        self.memory = Memory(address, num_bytes, device, owner=self._held)

    def digest(self) -> str:
        """Digest of all bytes."""
        held = self._held
        return digest_of(held if isinstance(held, np.ndarray) else held.cpu().numpy())


def digest_of(array: np.ndarray[Any, Any]) -> str:
    """BLAKE2b of an array's bytes, hex."""
    return hashlib.blake2b(array.data, digest_size=16).hexdigest()


def timed_write(
    transport: Transport,
    peer: Peer,
    ranges: Ranges,
    notice: bytes,
    *,
    poll: Callable[[], object] | None = None,
    patience: float = 60.0,
) -> float:
    """Write, and poll in a tight loop until the write is done; returns the seconds.

    Args:
        transport: The transport that writes.
        peer: The peer to write to.
        ranges: The ranges to write.
        notice: The notice of the write.
        poll: Lets the peer make progress, if it is in this process.
        patience: Seconds after which the write counts as failed.

    Raises:
        TransportError: The write failed or took too long.
    """
    start = time.perf_counter()
    handle = transport.write(peer, ranges, notice)
    while (status := handle.status()) is Status.PENDING:
        transport.notices()
        if poll is not None:
            poll()
        if time.perf_counter() - start > patience:
            raise TransportError(f"a write is not done within {patience:g} s")
    if status is not Status.DONE:
        raise TransportError(handle.error() or f"a write ended as {status}")
    seconds = time.perf_counter() - start
    handle.release()
    return seconds
