"""The conformance checks of transports: what holds between any two connected ones.

A *pair* is two transports that can reach each other; here both are driven by one thread. Each check
is a function over a fresh `Pair`, needs no test framework and raises `PairFailure`. Run one by name
with `run_check`, or all with `check_pair`::

    check_pair(lambda: (MyTransport("left"), MyTransport("right")))

Expected memory is kept by copying byte by byte in plain Python loops over rows, so a transport is
never compared with its own arithmetic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvbaton.connectors.base import FenceScope, Handle, Memory, Peer, Status, Transport
from kvbaton.errors import TransportError

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvbaton.connectors.base import Ranges

    Bytes = npt.NDArray[np.uint8]
    Row = tuple[int, int, int, int, int, int, int, int]

MakePair = Callable[[], tuple[Transport, Transport]]
SOURCE_SIZES = (300_037, 65_536)
TARGET_SIZES = (262_144, 99_991, 4_096)
DEADLINE_S = 20.0


class PairFailure(AssertionError):
    """A transport broke the contract; the text says which part of it."""


class Pair:
    """Two transports of one kind, their memory, a connection, and what the target should hold.

    Attributes:
        source: the writer.
        target: whose memory is written.
        peer: the target, as the source sees it.
        back: the source, as the target sees it.
        notices: payloads that arrived at the target, in order.
    """

    def __init__(self, make_pair: MakePair, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.source, self.target = make_pair()
        self.source_memory = [self._noise(size) for size in SOURCE_SIZES]
        self.target_memory = [self._noise(size) for size in TARGET_SIZES]
        self.expected = [memory.copy() for memory in self.target_memory]
        self.source_regions = [self.source.register(memory_of(m)) for m in self.source_memory]
        self.target_regions = [self.target.register(memory_of(m)) for m in self.target_memory]
        self.peer = self.source.connect(self.target.card())
        self.back = self.target.connect(self.source.card())
        self.notices: list[bytes] = []

    def write(self, rows: Sequence[Row], notice: bytes = b"") -> Handle:
        """Post rows and note what they should do to the target."""
        handle = self.source.write(self.peer, pack(rows), notice)
        for row in rows:
            self._expect(row)
        return handle

    def poll(self) -> None:
        """Let both sides make progress and collect notices."""
        self.notices += [notice.payload for notice in self.target.notices()]
        self.source.notices()

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll until `done`, within a deadline."""
        limit = time.monotonic() + DEADLINE_S
        while not done():
            self.poll()
            if time.monotonic() > limit:
                raise PairFailure(f"{what}: not within {DEADLINE_S:.0f} s")

    def finish(self, handle: Handle) -> Status:
        """Poll until a write is no longer pending."""
        self.wait(lambda: handle.status() is not Status.PENDING, "a write must end")
        return handle.status()

    def complete(self, handle: Handle) -> None:
        """Poll until a write is done; any other end is a failure."""
        status = self.finish(handle)
        require(status is Status.DONE, f"a write ended {status.name}: {handle.error()}")
        handle.release()

    def compare(self, what: str) -> None:
        """Compare all of the target's memory with what should be there."""
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

    def _expect(self, row: Row) -> None:
        source, start, target, end, length, count, source_stride, target_stride = row
        for piece in range(count):
            low, high = start + piece * source_stride, end + piece * target_stride
            data = self.source_memory[source][low : low + length]
            self.expected[target][high : high + length] = data


def memory_of(array: Bytes) -> Memory:
    """Describe a numpy array as transport memory."""
    return Memory(array.ctypes.data, array.nbytes, owner=array)


def pack(rows: Sequence[Row]) -> Ranges:
    """Make packed ranges of rows."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), 8)


def require(holds: bool, otherwise: str) -> None:
    """Raise `PairFailure` unless it holds."""
    if not holds:
        raise PairFailure(otherwise)


def random_rows(random: np.random.Generator, count: int, largest: int = 2_000) -> list[Row]:
    """Draw rows whose targets do not overlap: target region 0 is dealt out in slots."""
    slot = TARGET_SIZES[0] // count
    return [_random_row(random, number * slot, slot, largest) for number in range(count)]


def _random_row(random: np.random.Generator, start: int, slot: int, largest: int) -> Row:
    pieces = int(random.integers(1, 5))
    stride = slot // pieces
    length = int(random.integers(1, min(stride, largest) + 1))
    source = int(random.integers(0, len(SOURCE_SIZES)))
    source_stride = int(random.integers(0, 3 * length))
    span = length + (pieces - 1) * source_stride
    offset = int(random.integers(0, SOURCE_SIZES[source] - span + 1))
    return (source, offset, 0, start, length, pieces, source_stride, stride)


# --- the checks, in the order in which to read a failing transport's report ---


def names_and_capabilities(pair: Pair) -> None:
    """Each side has its own name, the peers carry them, and the capabilities make sense."""
    require(isinstance(pair.source, Transport), "it lacks a method of Transport")
    require(pair.source.name != pair.target.name, "two transports have one name")
    require(pair.peer.name == pair.target.name, "a peer must carry the remote transport's name")
    capabilities = pair.source.capabilities
    require(capabilities.max_notice_bytes >= 64, "a notice needs at least 64 bytes")
    require(capabilities.max_ranges >= 1, "a write needs at least one range")
    require("cpu" in capabilities.devices, "this kit drives CPU memory")


def regions_are_numbered(pair: Pair) -> None:
    """Regions are numbered from 0 in order of registration."""
    found = [region.index for region in pair.source_regions]
    require(found == list(range(len(found))), f"regions are numbered {found}")


def exact_bytes(pair: Pair) -> None:
    """Random strided rows of odd sizes move exactly their bytes and touch nothing else."""
    for round_number in range(12):
        rows = random_rows(pair.random, int(pair.random.integers(1, 60)))
        pair.complete(pair.write(rows, b"exact"))
        pair.compare(f"round {round_number} of random rows")


def edges_of_regions(pair: Pair) -> None:
    """First and last bytes of every region can be written, and single bytes."""
    rows: list[Row] = [(0, 0, index, 0, 1, 1, 0, 0) for index in range(len(TARGET_SIZES))]
    rows += [(0, SOURCE_SIZES[0] - 1, i, n - 1, 1, 1, 0, 0) for i, n in enumerate(TARGET_SIZES)]
    rows += [(1, 0, 2, 1, TARGET_SIZES[2] - 2, 1, 0, 0)]
    pair.complete(pair.write(rows))
    pair.compare("edges of regions")


def notice_follows_bytes(pair: Pair) -> None:
    """When a notice is here, its bytes are."""
    for number in range(20):
        notice = f"write {number}".encode()
        handle = pair.write(random_rows(pair.random, 16, 16_384), notice)
        pair.wait(lambda h=handle, n=notice: h.status() and n in pair.notices, "a notice")  # type: ignore[misc]
        pair.compare(f"at the notice of write {number}")
        pair.complete(handle)


def empty_write(pair: Pair) -> None:
    """A write without ranges is a notice alone."""
    pair.complete(pair.write([], b"nothing"))
    pair.wait(lambda: bool(pair.notices), "the notice of an empty write")
    require(pair.notices == [b"nothing"], f"notices are {pair.notices}")
    pair.compare("after an empty write")


def notice_lengths(pair: Pair) -> None:
    """Notices of no byte and of the declared most bytes arrive whole; a longer one is refused."""
    most = pair.source.capabilities.max_notice_bytes
    row: Row = (0, 0, 0, 0, 8, 1, 0, 0)
    sent = [b"", b"\0\xff", bytes(most), b""]
    for number, notice in enumerate(sent):
        pair.complete(pair.write([row] if number % 2 else [], notice))
    pair.wait(lambda: len(pair.notices) >= len(sent), "all notices")
    require(sorted(pair.notices) == sorted(sent), "a notice was changed on its way")
    with _refused(pair, "a notice that is too long"):
        pair.complete(pair.source.write(pair.peer, pack([row]), bytes(most + 1)))


def many_writes(pair: Pair) -> None:
    """Many writes in flight all land, and each notice comes exactly once, in any order."""
    rows = random_rows(pair.random, 150)
    sent = [number.to_bytes(4, "little") for number in range(len(rows))]
    handles = [pair.write([row], notice) for row, notice in zip(rows, sent, strict=True)]
    for handle in reversed(handles):
        pair.complete(handle)
    pair.wait(lambda: len(pair.notices) >= len(sent), "all notices")
    for _ in range(50):
        pair.poll()
    require(sorted(pair.notices) == sorted(sent), "a notice is missing, doubled or changed")
    pair.compare("after many writes")


def many_ranges(pair: Pair) -> None:
    """One write of thousands of small ranges."""
    rows: list[Row] = [(0, 3 * i, 0, 64 * i, 32, 1, 0, 0) for i in range(4_096)]
    rows = rows[: pair.source.capabilities.max_ranges]
    pair.complete(pair.write(rows, b"many"))
    pair.compare("after thousands of ranges")


def large_write(pair: Pair) -> None:
    """One write of tens of megabytes, as one range and as many, notified once."""
    size = 40 << 20
    memory = [pair.random.integers(0, 256, size, dtype=np.uint8), np.zeros(size, np.uint8)]
    source = pair.source.register(memory_of(memory[0])).index
    target = pair.target.register(memory_of(memory[1])).index
    peer = pair.source.connect(pair.target.card())
    half = size // 2
    rows: list[Row] = [(source, half, target, 0, half, 1, 0, 0)]
    rows += [(source, 0, target, half, 1 << 20, 20, 1 << 20, 1 << 20)]
    pair.complete(pair.source.write(peer, pack(rows), b"large"))
    pair.wait(lambda: bool(pair.notices), "the notice of a large write")
    require(pair.notices == [b"large"], f"notices are {pair.notices}")
    moved = np.array_equal(memory[0], np.roll(memory[1], half))
    require(moved, "a large write has wrong bytes")


def both_directions(pair: Pair) -> None:
    """A target may write to its source as well, over the same pair."""
    before = [memory.copy() for memory in pair.source_memory]
    handle = pair.target.write(pair.back, pack([(2, 0, 1, 100, 4_000, 1, 0, 0)]), b"back")
    forth = pair.write(random_rows(pair.random, 8), b"forth")
    pair.complete(handle)
    pair.complete(forth)
    before[1][100:4_100] = pair.target_memory[2][:4_000]
    same = all(np.array_equal(a, b) for a, b in zip(before, pair.source_memory, strict=True))
    require(same, "a write in the other direction has wrong bytes")


BAD_ROWS: dict[str, Row] = {
    "past the end of the target": (0, 0, 0, TARGET_SIZES[0] - 4, 5, 1, 0, 0),
    "past the end of the source": (1, SOURCE_SIZES[1] - 4, 0, 0, 5, 1, 0, 0),
    "past the end by its stride": (0, 0, 2, 0, 8, 513, 8, 9),
    "before the target": (0, 0, 0, -1, 4, 1, 0, 0),
    "before the source": (0, -1, 0, 0, 4, 1, 0, 0),
    "backwards": (0, 64, 0, 64, 4, 4, -8, -8),
    "to a region that is not": (0, 0, len(TARGET_SIZES), 0, 4, 1, 0, 0),
    "from a region that is not": (len(SOURCE_SIZES), 0, 0, 0, 4, 1, 0, 0),
    "of negative length": (0, 8, 0, 8, -4, 1, 0, 0),
    "around 64 bits by its stride": (0, 0, 0, 0, 8, 5, 0, 1 << 62),
    "beyond 64 bits": (0, 0, 0, 1 << 20, 1 << 40, 1 << 40, 1 << 40, 1 << 40),
    "beyond 64 bits by its offset": (0, 0, 0, (1 << 63) - 8, 16, 1, 0, 0),
}


def bounds(pair: Pair) -> None:
    """A row that leaves a region is refused, or fails; nothing is touched."""
    good: Row = (0, 0, 1, 0, 64, 1, 0, 0)
    for what, row in BAD_ROWS.items():
        with _refused(pair, f"a row {what}"):
            pair.complete(pair.source.write(pair.peer, pack([row]), b"bad"))
        pair.compare(f"after a row {what}")
    pair.complete(pair.write([good], b"good"))
    pair.compare("after refused rows")


def malformed_ranges(pair: Pair) -> None:
    """Ranges of another type or shape are refused."""
    for ranges in (np.zeros((1, 7), np.int64), np.zeros(8, np.int64), np.zeros((1, 8), np.int32)):
        with _refused(pair, f"ranges of {ranges.dtype}{ranges.shape}"):
            pair.complete(pair.source.write(pair.peer, ranges, b""))  # type: ignore[arg-type]


def deregistered_region(pair: Pair) -> None:
    """A region that was given back can't be written from; the others keep their numbers."""
    pair.source.deregister(pair.source_regions[0])
    with _refused(pair, "a row from a deregistered region"):
        pair.complete(pair.source.write(pair.peer, pack([(0, 0, 0, 0, 4, 1, 0, 0)]), b""))
    pair.complete(pair.write([(1, 0, 0, 0, 64, 1, 0, 0)]))
    pair.compare("after a deregistered region")


def bad_cards(pair: Pair) -> None:
    """A card that is none is refused by name and harms nobody."""
    for card in (b"", b"\xff" * 40, pair.target.card()[:-9], bytes(300)):
        try:
            pair.source.connect(card)
        except TransportError:
            continue
        raise PairFailure(f"connect must raise TransportError for the card {card[:20]!r}...")
    pair.complete(pair.write(random_rows(pair.random, 4)))
    pair.compare("after bad cards")


def closed_peer(pair: Pair) -> None:
    """After `close`, writes to that peer fail; a new connection is a new peer and works."""
    pair.complete(pair.write(random_rows(pair.random, 4)))
    pair.source.close(pair.peer)
    handle = pair.source.write(pair.peer, pack([(0, 0, 0, 0, 4, 1, 0, 0)]), b"late")
    require(pair.finish(handle) is not Status.DONE, "a write to a closed peer must fail")
    require(bool(handle.error()), "a failed write must say why")
    handle.release()
    pair.source.close(pair.peer)
    pair.peer = pair.source.connect(pair.target.card())
    pair.complete(pair.write(random_rows(pair.random, 4), b"again"))
    pair.compare("after a new connection")
    require(b"late" not in pair.notices, "a failed write was notified")


def dead_peer(pair: Pair) -> None:
    """Once the far side is shut down, writes fail and the peer is reported lost, once."""
    pair.complete(pair.write(random_rows(pair.random, 4)))
    pair.target.shutdown()
    lost: list[Peer] = []
    limit = time.monotonic() + DEADLINE_S
    while not lost and time.monotonic() < limit:
        handle = pair.source.write(pair.peer, pack([(0, 0, 0, 0, 4, 1, 0, 0)]), b"late")
        while handle.status() is Status.PENDING and time.monotonic() < limit:
            pair.source.notices()
        require(handle.status() is not Status.PENDING, "a write to a dead peer must end")
        lost += pair.source.lost()
    require([peer.name for peer in lost] == [pair.peer.name], f"lost peers are {lost}")
    require(handle.status() is not Status.DONE, "a write to a dead peer must fail")
    require(not pair.source.lost(), "a lost peer is reported once")


def fence(pair: Pair) -> None:
    """A fence tells the truth: where it says True, nothing of that peer lands any more."""
    pair.complete(pair.write(random_rows(pair.random, 4)))
    proven = pair.target.fence(pair.back)
    if pair.source.capabilities.fence is FenceScope.PEER:
        require(proven, "a transport of fence scope PEER must be able to fence a live peer")
    else:
        require(not proven, "this fence claims what it can't know: the peer's process is alive")
        return
    handle = pair.source.write(pair.peer, pack(random_rows(pair.random, 4)), b"fenced")
    require(pair.finish(handle) is not Status.DONE, "a write of a fenced peer can't be done")
    pair.compare("after a fence")
    require(b"fenced" not in pair.notices, "a fenced write was notified")
    require(pair.target.fence(pair.back), "a fence holds")


def release_twice(pair: Pair) -> None:
    """A handle may be released again, and its end stays known."""
    handle = pair.write([(0, 0, 0, 0, 4, 1, 0, 0)])
    pair.complete(handle)
    handle.release()
    require(handle.status() is Status.DONE, "a released handle must keep its state")


def shutdown_leaves_nothing(pair: Pair) -> None:
    """`shutdown` may be repeated, ends every thread of the transport and voids nothing done."""
    pair.complete(pair.write(random_rows(pair.random, 4)))
    pair.close()
    pair.close()
    pair.compare("after shutdown")


CHECKS: dict[str, Callable[[Pair], None]] = {
    check.__name__: check
    for check in (
        names_and_capabilities,
        regions_are_numbered,
        exact_bytes,
        edges_of_regions,
        notice_follows_bytes,
        empty_write,
        notice_lengths,
        many_writes,
        many_ranges,
        large_write,
        both_directions,
        bounds,
        malformed_ranges,
        deregistered_region,
        bad_cards,
        closed_peer,
        dead_peer,
        fence,
        release_twice,
        shutdown_leaves_nothing,
    )
}
"""Every check by name."""


def run_check(name: str, make_pair: MakePair, seed: int = 0) -> None:
    """Run one check of `CHECKS` over a fresh pair, and see that no thread is left behind.

    Raises:
        PairFailure: the transport broke the contract.
    """
    before = set(threading.enumerate())
    pair = Pair(make_pair, seed)
    try:
        CHECKS[name](pair)
    finally:
        pair.close()
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    require(not left, f"threads are left behind after shutdown: {left}")


def check_pair(make_pair: MakePair, seed: int = 0) -> tuple[str, ...]:
    """Run every check, each over a fresh pair; returns their names.

    Raises:
        PairFailure: the first failure, with the name of the check before it.
    """
    for name in CHECKS:
        try:
            run_check(name, make_pair, seed)
        except PairFailure as failure:
            raise PairFailure(f"{name}: {failure}") from failure
    return tuple(CHECKS)


@contextmanager
def _refused(pair: Pair, what: str) -> Iterator[None]:
    """The block must fail with `ValueError`, or by a write that ends without being done."""
    failed = False
    try:
        yield
    except (ValueError, PairFailure):
        failed = True
    require(failed, f"{what} must be refused")
    pair.poll()
