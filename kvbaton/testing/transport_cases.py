"""Cases of transports: laws for any two connected ones.

Each case is a function over a fresh `Pair`; cases about processes that die are in
`transport_processes.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from kvbaton.connectors.base import FenceScope, Peer, PreparesWrites, Status, Transport
from kvbaton.connectors.layout import GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.pairing import GroupPairing
from kvbaton.connectors.plan import plan
from kvbaton.connectors.protocol.notice import MIN_NOTICE_BYTES
from kvbaton.errors import TransportError
from kvbaton.testing.kit import SLOWER, CaseFailure, require, require_no_growth, require_quick
from kvbaton.testing.transport_rig import SOURCE_SIZES, TARGET_SIZES, Pair, case, pack, random_rows

if TYPE_CHECKING:
    from kvbaton.testing.transport_rig import Row

ROUNDS = 4
BUSY_BYTES = 16 << 20
ENDS = 16
WATCH_S = 0.1
"""Seconds for which memory is watched for late bytes, after a fence or a drained write."""
FEW = 16
"""Divisor of `max_ranges` for a smaller write that predicts the time of a full one."""


@case(0)
def names_and_capabilities(pair: Pair) -> None:
    """Each side has its own name, the peers carry them, and the capabilities make sense."""
    require(isinstance(pair.source, Transport), "it lacks a method of Transport")
    require(pair.source.name != pair.target.name, "two transports have one name")
    require(pair.peer.name == pair.target.name, "a peer must carry the remote transport's name")
    capabilities = pair.source.capabilities
    require(
        capabilities.max_notice_bytes >= MIN_NOTICE_BYTES,
        f"a notice needs at least {MIN_NOTICE_BYTES} bytes",
    )
    require(capabilities.max_ranges >= 1, "a write needs at least one range")
    require("cpu" in capabilities.devices, "this kit drives CPU memory")


@case(0)
def regions_are_numbered(pair: Pair) -> None:
    """Regions are numbered from 0 in order of registration."""
    found = [region.index for region in pair.source_regions]
    require(found == list(range(len(found))), f"regions are numbered {found}")


@case(0)
def bad_cards(pair: Pair) -> None:
    """An invalid card is refused with `TransportError`, and does no harm."""
    for card in (b"", b"\xff" * 40, pair.target.card()[:-9], bytes(300)):
        try:
            pair.source.connect(card)
        except TransportError:
            continue
        raise CaseFailure(f"connect must raise TransportError for the card {card[:20]!r}...")
    pair.complete(pair.write(pair.rows(4)))


@case(0)
def release_twice(pair: Pair) -> None:
    """A handle may be released again, and keeps its final status."""
    handle = pair.write([(0, 0, 0, 0, 4, 1, 0, 0)])
    pair.complete(handle)
    handle.release()
    require(handle.status() is Status.DONE, "a released handle must keep its state")


@case(1)
def exact_bytes(pair: Pair) -> None:
    """Random strided rows of odd sizes copy exactly their bytes, and change no others."""
    for round_number in range(12):
        rows = pair.rows(int(pair.random.integers(1, 60)))
        pair.complete(pair.write(rows, b"exact"))
        pair.compare(f"round {round_number} of random rows")
    odd = 1 << 62  # strides of a row of one piece have no effect
    special: list[Row] = [(0, 5, 0, 11, 100, 6, 0, 300), (0, 900, 0, 4000, 77, 1, odd, odd)]
    special += [(1, 70, 0, 5000, 50, 9, 13, 50), (1, 0, 1, 64, 4096, 3, 8192, 4096)]
    pair.write_all(special)
    pair.compare("rows that repeat, overlap or touch in their source")


@case(1)
def edges_of_regions(pair: Pair) -> None:
    """First and last bytes of every region can be written, and single bytes."""
    rows: list[Row] = [(0, 0, index, 0, 1, 1, 0, 0) for index in range(len(TARGET_SIZES))]
    rows += [(0, SOURCE_SIZES[0] - 1, i, n - 1, 1, 1, 0, 0) for i, n in enumerate(TARGET_SIZES)]
    rows += [(1, 0, 2, 1, TARGET_SIZES[2] - 2, 1, 0, 0)]
    pair.write_all(rows)
    pair.compare("edges of regions")


@case(1)
def empty_write(pair: Pair) -> None:
    """A write without ranges sends its notice alone."""
    pair.complete(pair.write([], b"nothing"))
    pair.expect_notices([b"nothing"])
    pair.compare("after an empty write")


@case(1)
def notice_lengths(pair: Pair) -> None:
    """Notices of 0 bytes and of the declared maximum arrive whole; a longer one is refused."""
    most = pair.source.capabilities.max_notice_bytes
    row: Row = (0, 0, 0, 0, 8, 1, 0, 0)
    sent = [b"", b"\0\xff", bytes(most), b""]
    for number, notice in enumerate(sent):
        pair.complete(pair.write([row] if number % 2 else [], notice))
    pair.expect_notices(sent)
    with _refused(pair, "a notice that is too long"):
        pair.complete(pair.source.write(pair.peer, pack([row]), bytes(most + 1)))


@case(1)
def many_ranges(pair: Pair) -> None:
    """One write of thousands of small ranges copies exactly their bytes."""
    rows: list[Row] = [(0, 3 * i, 0, 64 * i, 32, 1, 0, 0) for i in range(4_096)]
    pair.complete(pair.write(rows[: pair.max_ranges], b"many"))
    pair.compare("after thousands of ranges")


@case(1)
def the_most_ranges(pair: Pair) -> None:
    """A write of as many ranges as declared succeeds, with all its bytes."""
    count = min(pair.max_ranges, TARGET_SIZES[0] // 4)
    rows: list[Row] = [(0, 4 * i, 0, 4 * i, 3, 1, 0, 0) for i in range(count)]
    start = time.monotonic()
    pair.complete(pair.write(rows[: max(1, count // FEW)], b"few"))
    # Some transports are so slow per range that a busy machine needs minutes for all.
    within = SLOWER * FEW * (time.monotonic() - start)
    pair.complete(pair.write(rows, b"most"), max(pair.patience, within))
    pair.compare(f"after a write of {count} ranges")


@case(1)
def large_write(pair: Pair) -> None:
    """A write of tens of megabytes, as one range or many, is whole once done, with one notice."""
    size = 40 << 20
    memory = [pair.random.integers(0, 256, size, dtype=np.uint8), np.zeros(size, np.uint8)]
    source, target, peer = pair.beside(*memory)
    half = size // 2
    rows: list[Row] = [(source, half, target, 0, half, 1, 0, 0)]
    rows += [(source, 0, target, half, 1 << 20, 20, 1 << 20, 1 << 20)]
    writes = [rows] if pair.max_ranges > 1 else [rows[:1], rows[1:]]
    for again in range(3):
        memory[0] += again
        for part in writes:
            pair.complete(pair.source.write(peer, pack(part), b"large"))
        moved = np.array_equal(memory[0], np.roll(memory[1], half))
        require(moved, f"large write {again}, said to be done, has wrong bytes")
        pair.expect_notices([b"large"] * len(writes) * (again + 1))


@case(1)
def both_directions(pair: Pair) -> None:
    """A target may also write to its source, over the same pair."""
    before = [memory.copy() for memory in pair.source_memory]
    handle = pair.target.write(pair.back, pack([(2, 0, 1, 100, 4_000, 1, 0, 0)]), b"back")
    forth = pair.write(pair.rows(8), b"forth")
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
    "of no byte": (0, 0, 0, 0, 0, 1, 0, 0),
    "of no piece": (0, 0, 0, 0, 4, 0, 0, 0),
    "of negative length": (0, 8, 0, 8, -4, 1, 0, 0),
    "around 64 bits by its stride": (0, 0, 0, 0, 8, 5, 0, 1 << 62),
    "beyond 64 bits": (0, 0, 0, 1 << 20, 1 << 40, 1 << 40, 1 << 40, 1 << 40),
    "beyond 64 bits by its offset": (0, 0, 0, (1 << 63) - 8, 16, 1, 0, 0),
}


@case(1)
def bounds(pair: Pair) -> None:
    """A row that exceeds a region is refused, or fails; no byte is changed."""
    good: Row = (0, 0, 1, 0, 64, 1, 0, 0)
    for what, row in BAD_ROWS.items():
        with _refused(pair, f"a row {what}"):
            pair.complete(pair.source.write(pair.peer, pack([row]), b"bad"))
        pair.compare(f"after a row {what}")
    pair.complete(pair.write([good], b"good"))
    pair.compare("after refused rows")


@case(1)
def malformed_ranges(pair: Pair) -> None:
    """Ranges of another type or shape are refused."""
    for ranges in (np.zeros((1, 7), np.int64), np.zeros(8, np.int64), np.zeros((1, 8), np.int32)):
        with _refused(pair, f"ranges of {ranges.dtype}{ranges.shape}"):
            pair.complete(pair.source.write(pair.peer, ranges, b""))  # type: ignore[arg-type]


@case(1)
def deregistered_region(pair: Pair) -> None:
    """Writes from a deregistered region are refused; its number is not used again."""
    pair.source.deregister(pair.source_regions[0])
    with _refused(pair, "a row from a deregistered region"):
        pair.complete(pair.source.write(pair.peer, pack([(0, 0, 0, 0, 4, 1, 0, 0)]), b""))
    pair.complete(pair.write([(1, 0, 0, 0, 64, 1, 0, 0)]))
    pair.compare("after a deregistered region")
    again = pair.source.register(pair.source_regions[0].memory).index
    require(again == len(pair.source_regions), f"a new region is number {again}, which was given")


@case(1)
def encoder_outputs(pair: Pair) -> None:
    """An encoder's output with several levels is copied by a plan into scattered blocks."""
    source, target = _rows_layout(5), _rows_layout(9)
    tables = np.array([3, 4, 1]), np.array([7, 2, 5])
    pairing = GroupPairing([source], [target])
    (ranges,) = plan(pairing, *tables, 0, 3 * source.block_size).values()
    rows: list[Row] = [tuple(row) for row in ranges.tolist()]
    pair.write_all(rows, b"rows")
    pair.compare("an encoder's output")
    found = [
        np.ndarray(of.planes[0].shape, np.uint16, memory.data, strides=of.planes[0].strides)
        for of, memory in ((source, pair.source_memory[0]), (target, pair.target_memory[0]))
    ]
    require(np.array_equal(found[0][[3, 4, 1]], found[1][[7, 2, 5]]), "elements are wrong")


def _rows_layout(num_blocks: int) -> KVLayout:
    plane = contiguous_plane(
        num_blocks=num_blocks,
        block_size=32,
        num_heads=1,
        head_dim=64,
        layers=(0, 1, 2),
        dtype="bfloat16",
        kv=1,
    )
    return KVLayout(0, GroupKind.FULL, 32, num_blocks, (plane,))


@case(2)
def notice_follows_bytes(pair: Pair) -> None:
    """When a notice arrives, the bytes of its write have landed."""
    for number in range(20):
        notice = f"write {number}".encode()
        handle = pair.write(pair.rows(16, 16_384), notice)
        pair.wait(lambda h=handle, n=notice: h.status() and n in pair.notices, "a notice")  # type: ignore[misc]
        pair.compare(f"at the notice of write {number}")
        pair.complete(handle)


@case(2)
def notice_follows_the_last_bytes(pair: Pair) -> None:
    """At the moment when a notice arrives, the last bytes of all rows have landed."""
    length, count = 64 << 10, min(ENDS, pair.max_ranges)
    memory = [np.zeros(length * count, np.uint8) for _ in range(2)]
    source, target, peer = pair.beside(*memory)
    rows = [(source, n * length, target, n * length, length, 1, 0, 0) for n in range(count)]
    for number in range(1, 1 + 40 * pair.depth):
        memory[0][:] = number % 251
        handle = pair.source.write(peer, pack(rows), b"ends")
        limit = time.monotonic() + pair.patience
        # No code between notice and check: late bytes are late by microseconds.
        while not pair.target.notices():
            handle.status()
            pair.source.notices()
            require(time.monotonic() < limit, "the notice of many rows: not in time")
        ends = memory[1][length - 1 :: length].copy()
        late = np.flatnonzero(ends != number % 251)
        require(not len(late), f"at a notice the end of row {late[:1]} of {count} was not there")
        pair.complete(handle)


@case(2)
def many_writes(pair: Pair) -> None:
    """Many writes in flight all land in their places, each with exactly one notice."""
    with Pair(pair.make_pair, patience=pair.patience) as others:
        third = pair.source.connect(others.target.card())
        pair.complete(pair.write(pair.rows(4), b"ours"))
        handle = pair.source.write(third, pack([(0, 0, 1, 8, 64, 1, 0, 0)]), b"theirs")

        def landed() -> bool:
            others.poll()
            return handle.status() is Status.DONE and bool(others.notices and pair.notices)

        pair.wait(landed, "a write and its notice, to each of two peers")
        others.expected[1][8:72] = pair.source_memory[0][:64]
        require((pair.notices, others.notices) == ([b"ours"], [b"theirs"]), "notices went astray")
        others.compare("the memory of a second peer")
        pair.compare("beside a second peer")
        pair.wait(lambda: pair.source.close(third), "the second peer is closed")
        _two_writers(pair, others)
    sent = pair.write_each(random_rows(pair.random, 150))

    def look() -> None:
        pair.poll()
        pair.source.lost()

    require_quick("notices and lost", look, calls=50)
    pair.expect_notices(sent)  # no further notice has arrived meanwhile
    pair.compare("after many writes")


def _two_writers(pair: Pair, others: Pair) -> None:
    """Let two sources write alternately to one target."""
    pair.notices.clear()
    second = others.source.connect(pair.target.card())
    handles = []
    for number in range(8):
        handles.append(pair.write([(0, 0, 0, 128 * number, 64, 1, 0, 0)], b"first"))
        start = 128 * number + 64
        row: Row = (0, 0, 0, start, 64, 1, 0, 0)
        handles.append(others.source.write(second, pack([row]), b"second"))
        pair.expected[0][start : start + 64] = others.source_memory[0][:64]

    def landed() -> bool:
        others.poll()
        done = all(handle.status() is Status.DONE for handle in handles)
        return done and len(pair.notices) >= len(handles)

    pair.wait(landed, "writes of two sources to one target, and their notices")
    require(sorted(pair.notices) == [b"first"] * 8 + [b"second"] * 8, "notices went astray")
    pair.compare("written by two sources")
    for handle in handles:
        handle.release()
    pair.wait(lambda: others.source.close(second), "the second source's peer is closed")


@case(2)
def closed_peer(pair: Pair) -> None:
    """After `close` no memory is read and writes fail; a new connection works, as a new peer."""
    memory = [np.full(BUSY_BYTES, value, np.uint8) for value in (1, 0)]
    source, target, busy = pair.beside(*memory)
    writes = [(source, 0, target, 0, BUSY_BYTES, 1, 0, 0)] * 4
    handles = [pair.source.write(busy, pack([row]), b"busy") for row in writes]
    pair.wait(lambda: pair.source.close(busy), "a peer with writes in flight is closed")
    memory[0][:] = 2
    # Bytes on the wire may still land, so not every handle can be DRAINED.
    for handle in handles:
        pair.finish(handle, "a write to a closed peer must end")
    require(not (memory[1] == 2).any(), "after `close` said True our memory was read")
    if all(handle.status() in (Status.DONE, Status.DRAINED) for handle in handles):
        found = memory[1].copy()
        _watch(pair)
        require(np.array_equal(memory[1], found), "bytes of a write landed after it had DRAINED")
    pair.complete(pair.write(pair.rows(4)))
    pair.source.close(pair.peer)
    handle = pair.source.write(pair.peer, pack([(0, 0, 0, 0, 4, 1, 0, 0)]), b"late")
    require(pair.finish(handle) is not Status.DONE, "a write to a closed peer must fail")
    require(bool(handle.error()), "a failed write must say why")
    handle.release()
    pair.source.close(pair.peer)
    pair.peer = pair.source.connect(pair.target.card())
    pair.complete(pair.write(pair.rows(4), b"again"))
    pair.compare("after a new connection")
    require(b"late" not in pair.notices, "a failed write was notified")


@case(2)
def fence(pair: Pair) -> None:
    """After a fence has returned True, no byte of that peer lands any more."""
    pair.complete(pair.write(pair.rows(4)))
    if pair.source.capabilities.fence is not FenceScope.PEER:
        proven = pair.target.fence(pair.back)
        require(not proven, "this fence claims what it can't know: the peer's process is alive")
        return
    card = pair.target.card()
    dialling = pair.source.connect(card)
    pair.wait(lambda: pair.target.fence(pair.back), "a fence of scope PEER of a live peer")
    peers = [pair.peer, dialling]
    with suppress(TransportError):  # the transport may refuse the old card
        peers.append(pair.source.connect(card))
    for number, peer in enumerate(peers):
        handle = pair.source.write(peer, pack(pair.rows(4)), b"fenced")
        told = "a write of a fenced peer can't be done" + ", also if it dials once more" * (
            number > 0
        )
        require(pair.finish(handle) is not Status.DONE, told)
        pair.compare("after a fence")
    require(b"fenced" not in pair.notices, "a fenced write was notified")
    require(pair.target.fence(pair.back), "a fence holds")
    for peer in (*peers[1:], pair.peer):
        pair.wait(partial(pair.source.close, peer), "a peer is closed")
    pair.wait(lambda: pair.target.close(pair.back), "a peer is closed")
    # Both are alive and can connect again.
    pair.back = pair.target.connect(pair.source.card())
    pair.peer = pair.source.connect(pair.target.card())
    pair.complete(pair.write(pair.rows(4), b"next"))
    pair.compare("in a session after a fence")


@case(2)
def fence_amid_writes(pair: Pair) -> None:
    """After a fence amid writes has returned True, no byte of them lands any more."""
    if pair.source.capabilities.fence is not FenceScope.PEER:
        return
    memory = [np.full(BUSY_BYTES, value, np.uint8) for value in (1, 0)]
    source, target, peer = pair.beside(*memory)
    rows = pack([(source, 0, target, 0, BUSY_BYTES, 1, 0, 0)])
    handles = [pair.source.write(peer, rows, b"busy") for _ in range(4)]
    pair.wait(lambda: bool(memory[1].any()), "the first bytes of a write")
    pair.wait(lambda: pair.target.fence(pair.back), "a fence of scope PEER of a live peer")
    memory[1][:] = 3
    _watch(pair)
    landed = np.count_nonzero(memory[1] != 3)
    require(not landed, f"{landed} bytes landed after the fence had said True")
    for handle in handles:
        pair.finish(handle, "a write of a fenced peer must end")


def _watch(pair: Pair) -> None:
    limit = time.monotonic() + WATCH_S
    while time.monotonic() < limit:
        pair.poll()


@case(2, "prepares")
def prepared_writes(pair: Pair) -> None:
    """A prepared write copies, once, the bytes that are there when it is posted, and not before."""
    source = cast(PreparesWrites, pair.source)
    rows = random_rows(pair.random, min(9, 3 * pair.max_ranges))
    parts = [rows[start::3] for start in range(3)]
    ready = []
    for part in [*parts, parts[0]]:
        ranges = pack(part)
        ready.append(source.prepare(pair.peer, ranges))
        ranges[:] = -1  # the caller may change them after the call
    _watch(pair)
    require(not pair.notices, "what was only prepared was notified")
    pair.compare("what was only prepared")
    for memory in pair.source_memory:
        memory += 1
    unwanted = ready.pop()
    handles = []
    for number in (2, 0, 1):
        handles.append(source.post(ready[number], bytes([number])))
        pair.expect(parts[number])
    source.discard(unwanted)
    source.discard(unwanted)
    for handle in handles:
        pair.complete(handle)
    sent = [b"\0", b"\1", b"\2"]
    pair.expect_notices(sent)
    _watch(pair)
    pair.expect_notices(sent)
    pair.compare("after prepared writes")
    for what, row in BAD_ROWS.items():
        with _refused(pair, f"a prepared row {what}"):
            pair.complete(source.post(source.prepare(pair.peer, pack([row])), b"bad"))
        pair.compare(f"after a prepared row {what}")
    late, unposted = (source.prepare(pair.peer, pack(parts[0])) for _ in range(2))
    pair.wait(lambda: pair.source.close(pair.peer), "a peer with prepared writes is closed")
    handle = source.post(late, b"late")
    require(pair.finish(handle) is not Status.DONE, "a prepared write to a closed peer must fail")
    require(bool(handle.error()), "a failed write must say why")
    handle.release()
    source.discard(unposted)
    pair.compare("after a closed peer")


@case(3)
def dead_peer(pair: Pair) -> None:
    """Once the peer is shut down, writes to it fail, and it is reported lost, once."""
    pair.complete(pair.write(pair.rows(4)))
    pair.target.shutdown()
    lost: list[Peer] = []
    limit = time.monotonic() + pair.patience
    while not lost and time.monotonic() < limit:
        handle = pair.source.write(pair.peer, pack([(0, 0, 0, 0, 4, 1, 0, 0)]), b"late")
        while handle.status() is Status.PENDING and time.monotonic() < limit:
            pair.source.notices()
        require(handle.status() is not Status.PENDING, "a write to a dead peer must end")
        lost += pair.source.lost()
    require([peer.name for peer in lost] == [pair.peer.name], f"lost peers are {lost}")
    require(handle.status() is not Status.DONE, "a write to a dead peer must fail")
    require(not pair.source.lost(), "a lost peer is reported once")


@case(5)
def random_writes(pair: Pair) -> None:
    """Batches of random writes, many in flight, land whole, each with one notice."""
    end = time.monotonic() + 0.5 * pair.depth
    while time.monotonic() < end:
        pair.write_each(random_rows(pair.random, int(pair.random.integers(2, 90))))
        pair.compare("in a random schedule")


@case(5)
def gives_everything_back(pair: Pair) -> None:
    """`shutdown` may be repeated; a pair that was used and shut down leaks no resources."""
    pair.complete(pair.write(pair.rows(4)))
    pair.close()
    pair.close()
    pair.compare("after shutdown")

    def live() -> None:
        with Pair(pair.make_pair, patience=pair.patience) as short_lived:
            short_lived.complete(short_lived.write(short_lived.rows(4), b"alive"))
            short_lived.compare("in a short life")

    require_no_growth("lives of a pair", live, rounds=ROUNDS, before=1, patience=pair.patience)


@contextmanager
def _refused(pair: Pair, what: str) -> Iterator[None]:
    """The block must raise `ValueError`, or contain a write that fails."""
    failed = False
    try:
        yield
    except (ValueError, CaseFailure):
        failed = True
    require(failed, f"{what} must be refused")
    pair.poll()
