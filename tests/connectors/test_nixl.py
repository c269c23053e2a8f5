"""How the NIXL transport cuts writes, reads cards and shows UCX its devices."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connectors.base import Memory, Peer, Status
from kvbaton.connectors.transports import nixl, nixl_parts
from kvbaton.connectors.transports.nixl import NixlHandle, NixlTransport
from kvbaton.connectors.transports.nixl_parts import (
    GPU_PART_BYTES,
    GPU_PIECE_BYTES,
    PART_BYTES,
    PART_COPIES,
    Place,
    RemoteRegion,
    UcxLane,
    choose_lane,
    cut,
    this_place,
)
from kvbaton.connectors.transports.regions import Copies
from kvbaton.errors import TransportError
from kvbaton.testing.remote import RemoteProcess
from kvbaton.testing.transport_rig import Pair, memory_of, pack
from tests.support.processes import python
from tests.support.waiting import PATIENCE_S

OURS = [Memory(1 << 40, 1 << 34), Memory(1 << 41, 1 << 34, "cuda", 1), None]
THEIRS = [RemoteRegion(1 << 42, 1 << 34, "cpu", 0), RemoteRegion(1 << 43, 1 << 34, "cuda", 2), None]
_names = itertools.count()
Bytes = npt.NDArray[np.uint8]


def make_pair() -> tuple[NixlTransport, NixlTransport]:
    return NixlTransport(f"n{next(_names)}"), NixlTransport(f"n{next(_names)}")


def copies_of(rows: list[tuple[int, int, int, int, int]]) -> Copies:
    return Copies(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.integers(0, 1 << 30),
            st.integers(0, 1),
            st.integers(0, 1 << 30),
            st.integers(1, 3 * PART_BYTES),
        ),
        max_size=40,
    )
)
def test_parts_cover_every_byte_once_within_their_bounds(
    rows: list[tuple[int, int, int, int, int]],
) -> None:
    found = []
    for part in cut(copies_of(rows), OURS, THEIRS):
        assert part.source.shape == part.target.shape
        assert 0 < len(part.source) <= PART_COPIES
        assert np.array_equal(part.source[:, 1], part.target[:, 1])
        part_bytes, _ = bounds(part.source_device, part.target_device)
        assert part.source[:, 1].sum() <= part_bytes
        assert set(part.source[:, 2].tolist()) == {1 if part.source_device == "cuda" else 0}
        assert set(part.target[:, 2].tolist()) == {2 if part.target_device == "cuda" else 0}
        columns = (part.source[:, 0], part.target[:, 0], part.source[:, 1])
        found += list(zip(*(c.tolist() for c in columns), strict=True))
    assert sum(size for _, _, size in found) == sum(row[4] for row in rows)
    expected = {
        (source + step, target + step)
        for row, (source, target, size) in zip(rows, _addresses(rows), strict=True)
        for step in range(0, size, bounds(device_of(OURS[row[0]]), device_of(THEIRS[row[2]]))[1])
    }
    assert {(source, target) for source, target, _ in found} == expected


def bounds(source: str, target: str) -> tuple[int, int]:
    """Most bytes of a part, and of a copy."""
    if source == target == "cuda":
        return GPU_PART_BYTES, GPU_PIECE_BYTES
    return PART_BYTES, PART_BYTES


def device_of(memory: Memory | RemoteRegion | None) -> str:
    assert memory is not None
    return memory.device


def _addresses(rows: list[tuple[int, int, int, int, int]]) -> list[tuple[int, int, int]]:
    bases = [[1 << 40, 1 << 41], [1 << 42, 1 << 43]]
    return [(bases[0][s] + low, bases[1][t] + high, size) for s, low, t, high, size in rows]


def test_small_copies_are_cut_by_number() -> None:
    rows = [(0, 64 * i, 0, 64 * i, 32) for i in range(2 * PART_COPIES + 1)]
    assert [len(p.source) for p in cut(copies_of(rows), OURS, THEIRS)] == [1024, 1024, 1]


def test_a_notice_waits_for_the_last_of_many_parts() -> None:
    pair = Pair(make_pair)
    size = 5 * PART_BYTES + 17
    memory = [np.full(size, 3, np.uint8), np.zeros(size, np.uint8)]
    source = pair.source.register(memory_of(memory[0])).index
    target = pair.target.register(memory_of(memory[1])).index
    peer = pair.source.connect(pair.target.card())
    handle = pair.source.write(peer, pack([(source, 0, target, 0, size, 1, 0, 0)]), b"all")
    pair.wait(lambda: handle.status() is not Status.PENDING or bool(pair.notices), "an end")
    pair.wait(lambda: handle.status() is Status.DONE and bool(pair.notices), "the notice")
    assert pair.notices == [b"all"]
    assert (memory[1] == 3).all()
    pair.close()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_prepared_write_sends_what_is_there_when_it_is_posted(parts: int) -> None:
    pair = Pair(make_pair)
    size = parts * PART_BYTES
    memory = [np.full(size, 3, np.uint8), np.zeros(size, np.uint8)]
    source = pair.source.register(memory_of(memory[0])).index
    target = pair.target.register(memory_of(memory[1])).index
    assert isinstance(pair.source, NixlTransport)
    peer = pair.source.connect(pair.target.card())
    rows = pack([(source, 0, target, 0, size, 1, 0, 0)])
    unwanted, prepared = (pair.source.prepare(peer, rows) for _ in range(2))
    pair.source.discard(unwanted)
    pair.source.discard(unwanted)
    memory[0][:] = 4
    handle = pair.source.post(prepared, b"now")
    pair.wait(lambda: handle.status() is Status.DONE and bool(pair.notices), "the notice")
    assert pair.notices == [b"now"]
    assert (memory[1] == 4).all()
    pair.close()


@pytest.mark.parametrize("loses", ["its peer", "its agent"])
def test_what_was_prepared_before_the_end_is_not_posted(loses: str) -> None:
    pair = Pair(make_pair)
    assert isinstance(pair.source, NixlTransport)
    rows = pack([(0, 0, 0, 0, 64, 1, 0, 0)])
    before = pair.target_memory[0].copy()
    prepared = pair.source.prepare(pair.peer, rows)
    if loses == "its peer":
        assert pair.source.close(pair.peer)
    else:
        pair.source.shutdown()
    handle = pair.source.post(prepared, b"late")
    assert handle.status() is Status.DRAINED
    pair.target.notices()
    assert np.array_equal(pair.target_memory[0], before)
    pair.close()


def test_a_card_of_somebody_else_is_refused() -> None:
    left, right = make_pair()
    fields = msgspec.msgpack.decode(right.card())
    fields["name"] = "somebody else"
    with pytest.raises(TransportError, match="holds the metadata of"):
        left.connect(msgspec.msgpack.encode(fields))
    for transport in (left, right):
        transport.shutdown()


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    NixlTransport("environment").shutdown()
    assert os.environ["UCX_NET_DEVICES"] == "all"


def test_memory_that_is_none_is_refused() -> None:
    transport = NixlTransport("no memory")
    with pytest.raises(TransportError, match="can't register"):
        transport.register(Memory(0, 1 << 40, "cuda", 63))
    transport.shutdown()


STUCK_BYTES = 64 << 20

# A process that tells its card, polls until it is told to look, and says what its region holds.
TARGET = """
import sys
import numpy as np
from kvbaton.connectors.transports.nixl import NixlTransport
from kvbaton.testing.transport_rig import memory_of
transport, memory = NixlTransport("target"), np.zeros(int(sys.argv[1]), np.uint8)
transport.register(memory_of(memory))
print("card", transport.card().hex(), flush=True)
import selectors
selector = selectors.DefaultSelector()
selector.register(sys.stdin, selectors.EVENT_READ)
while True:
    while not selector.select(0.001):
        transport.notices()
    sys.stdin.readline()
    print("holds", *np.unique(memory), flush=True)
"""


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteProcess]:
    """Another process, reached through sockets only."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with RemoteProcess(python("-c", TARGET, str(STUCK_BYTES)), PATIENCE_S) as far:
        yield far


def drive(transport: NixlTransport, done: Callable[[], bool], what: str, within: float) -> None:
    limit = time.monotonic() + within
    while not done():
        transport.notices()
        assert time.monotonic() < limit, what


def stuck_write(far: RemoteProcess) -> tuple[NixlTransport, Peer, Bytes, NixlHandle]:
    """A write to a process that is stopped before it has taken in all of it."""
    source = NixlTransport(f"n{next(_names)}")
    memory = np.full(STUCK_BYTES, 7, np.uint8)
    source.register(memory_of(memory))
    peer = source.connect(bytes.fromhex(far.started()[1]))
    first = source.write(peer, pack([(0, 0, 0, 0, 64, 1, 0, 0)]), b"connects")
    drive(source, lambda: first.status() is Status.DONE, "a first write", 20)
    far.signal(signal.SIGSTOP)
    handle = source.write(peer, pack([(0, 0, 0, 0, STUCK_BYTES, 1, 0, 0)]), b"stuck")
    for _ in range(50):
        source.notices()
        assert handle.status() is Status.PENDING
    return source, peer, memory, handle


def test_nothing_is_read_any_more_once_close_says_so(target: RemoteProcess) -> None:
    """A transfer can't be called off: what `close` promises, it must wait for."""
    source, peer, memory, handle = stuck_write(target)
    if not source.close(peer):
        target.signal(signal.SIGCONT)
    drive(source, lambda: source.close(peer), "closed", 20)
    memory[:] = 9  # another request's blocks by now
    target.signal(signal.SIGCONT)
    drive(source, lambda: handle.status() is Status.DRAINED, "drained", 20)
    target.tell("look")
    assert "9" not in target.line("holds")
    source.shutdown()


def test_the_death_of_a_stuck_target_ends_reading_and_drains(target: RemoteProcess) -> None:
    source, peer, _, handle = stuck_write(target)
    assert not source.close(peer)
    target.kill()
    drive(source, lambda: source.close(peer), "closed", 10)
    drive(source, lambda: handle.status() is Status.DRAINED, "drained", 5)
    source.shutdown()


def test_a_write_of_which_all_parts_landed_is_drained_by_close() -> None:
    """Also if its notice was still to be sent: nothing of it is in flight."""
    pair = Pair(make_pair)
    size = 3 * PART_BYTES
    memory = [np.full(size, 3, np.uint8), np.zeros(size, np.uint8)]
    source = pair.source.register(memory_of(memory[0])).index
    target = pair.target.register(memory_of(memory[1])).index
    peer = pair.source.connect(pair.target.card())
    handle = pair.source.write(peer, pack([(source, 0, target, 0, size, 1, 0, 0)]), b"x")
    pair.wait(lambda: bool((memory[1] == 3).any()), "the first part")
    pair.source.close(peer)
    pair.wait(lambda: handle.status() is Status.DRAINED, "drained while the peer lives")
    pair.close()


# A process that writes its region over and over, to one card after another.
WRITER = """
import sys
import numpy as np
from kvbaton.connectors.base import Status
from kvbaton.connectors.transports.nixl import NixlTransport
from kvbaton.testing.transport_rig import memory_of, pack
size = int(sys.argv[1])
transport, memory = NixlTransport("writer"), np.full(size, 7, np.uint8)
transport.register(memory_of(memory))
print("card", transport.card().hex(), flush=True)
import selectors
selector = selectors.DefaultSelector()
selector.register(sys.stdin, selectors.EVENT_READ)
row = pack([(0, 0, 0, 0, size, 1, 0, 0)])
peer, handle = None, None
while True:
    transport.notices()
    if selector.select(0):
        last, ended = (peer, handle), None
        peer = transport.connect(bytes.fromhex(sys.stdin.readline()))
        handle = transport.write(peer, row, b"w")
        if last[0] is not None:
            while not transport.close(last[0]) or last[1].status() is Status.ERROR:
                transport.notices()
            print("first", last[1].status().name, flush=True)
    elif handle is not None and handle.status() is Status.DONE:
        print("done", flush=True)
        handle = None
"""
LARGE = 384 << 20


def test_a_fence_over_sockets_stops_a_living_writer_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent that it writes to goes; others are lost by that, and reach the next by its card."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    target, other = make_pair()
    memory = np.zeros(LARGE, np.uint8)
    target.register(memory_of(memory))
    bystander = np.full(4096, 5, np.uint8)
    other.register(memory_of(bystander))
    target_at_other = other.connect(target.card())
    other_at_target = target.connect(other.card())
    with RemoteProcess(python("-c", WRITER, str(LARGE)), PATIENCE_S) as far:
        writer = target.connect(bytes.fromhex(far.started()[1]))
        far.tell(target.card().hex())
        drive(target, lambda: bool((memory[::4096] == 7).any()), "some of a write", 30)
        far.signal(signal.SIGSTOP)
        before = target.card()
        assert not target.fence(writer), "its kernel answers: it may only be stopped"
        monkeypatch.setattr(nixl, "PATIENCE_S", 0.0)
        assert target.fence(writer)
        assert list(target.lost()) == [other_at_target]
        assert target.fence(other_at_target), "what it could write to is gone as well"
        memory[:] = 9
        far.signal(signal.SIGCONT)
        limit = time.monotonic() + 1.0
        while time.monotonic() < limit:
            assert not target.notices()
        assert (memory == 9).all(), "bytes landed after the fence"

        assert target.card() != before
        again = other.connect(target.card())
        done = other.write(again, pack([(0, 0, 0, 0, 4096, 1, 0, 0)]), b"others")

        def landed() -> bool:
            other.notices()
            return done.status() is Status.DONE

        drive(target, landed, "a write of another to the new agent", 20)
        assert (memory[:4096] == 5).all()
        far.tell(target.card().hex())
        drive(target, lambda: bool((memory[-64:] == 7).all()), "all of a write to it", 30)
        assert far.line("first", "done")[1:] == ["DRAINED"], "its agent is no more, so it drained"
    for handle_of in (target_at_other, again):
        other.close(handle_of)
    for transport in (target, other):
        transport.shutdown()


HERE = this_place()
ELSEWHERE = Place("another kernel", "net:[1]")


@pytest.mark.parametrize(
    ("theirs", "tls", "gpus", "lane"),
    [
        (HERE, "", False, UcxLane.SHARED),
        (HERE, "all", False, UcxLane.SHARED),
        (HERE, "^sm", False, UcxLane.SHARED),
        (HERE, "tcp,cuda_ipc", True, UcxLane.SHARED),
        (HERE, "tcp", False, UcxLane.SOCKETS),
        (HERE, "self, tcp,cuda_copy", True, UcxLane.SOCKETS),
        (Place(HERE.kernel, "net:[1]"), "", False, UcxLane.SHARED),
        (ELSEWHERE, "", True, UcxLane.HARDWARE),
        (ELSEWHERE, "tcp,cuda_copy", True, UcxLane.SOCKETS),
    ],
)
def test_what_is_not_excluded_is_taken_for_possible(
    theirs: Place, tls: str, gpus: bool, lane: UcxLane
) -> None:
    assert choose_lane(HERE, theirs, tls, reaches_gpus=gpus) is lane


def test_another_machine_without_rdma_or_gpus_is_reached_by_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices = tmp_path / "infiniband"
    monkeypatch.setattr(nixl_parts, "_RDMA", (devices,))
    assert choose_lane(HERE, ELSEWHERE, "", reaches_gpus=False) is UcxLane.SOCKETS
    devices.mkdir()
    assert choose_lane(HERE, ELSEWHERE, "", reaches_gpus=False) is UcxLane.SOCKETS
    (devices / "mlx5_0").touch()
    assert choose_lane(HERE, ELSEWHERE, "", reaches_gpus=False) is UcxLane.HARDWARE
