"""Transports between processes: exact bytes, and a peer that is stopped or killed."""

import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvbaton.connectors.base import FenceScope, Handle, Peer, Status, Transport
from kvbaton.connectors.registry import load_transport
from kvbaton.testing.pairs import memory_of, pack

SPECS = ["tcp", "nixl"]
NUM_BYTES = 48 << 20
SCRIPT = Path(__file__).with_name("transport_peer.py")


class Other:
    """The peer's process."""

    def __init__(self, spec: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), spec, "other", str(NUM_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> list[str]:
        assert self.process.stdout is not None
        while True:
            words = self.process.stdout.readline().split()
            assert words, "the peer's process has ended"
            if words[0] in ("card", "notice"):
                return words

    def write_to(self, card: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"write {card.hex()}\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Sides:
    """One transport here, one in another process, connected from here."""

    def __init__(self, spec: str) -> None:
        self.other = Other(spec)
        self.transport: Transport = load_transport(spec, name="here")
        self.memory: npt.NDArray[np.uint8] = np.arange(NUM_BYTES, dtype=np.uint32).astype(np.uint8)
        self.transport.register(memory_of(self.memory))
        self.peer: Peer = self.transport.connect(bytes.fromhex(self.other.line()[1]))
        self.notices: list[bytes] = []
        self.lost: list[Peer] = []

    def write(self, notice: bytes) -> Handle:
        return self.transport.write(self.peer, pack([(0, 0, 0, 0, NUM_BYTES, 1, 0, 0)]), notice)

    def wait(self, done: Callable[[], bool], within: float = 20.0) -> None:
        limit = time.monotonic() + within
        while not done():
            self.notices += [notice.payload for notice in self.transport.notices()]
            self.lost += self.transport.lost()
            assert time.monotonic() < limit, "not in time"

    def close(self) -> None:
        self.other.end()
        self.transport.shutdown()


@pytest.fixture(params=SPECS)
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    pair = Sides(request.param)
    yield pair
    pair.close()


def finish(sides: Sides, handle: Handle) -> None:
    sides.wait(lambda: handle.status() is Status.DONE)


def test_bytes_are_there_when_their_notice_is(sides: Sides) -> None:
    for number in range(3):
        sides.memory += 1
        handle = sides.write(bytes([number]))
        finish(sides, handle)
        _, payload, checksum = sides.other.line()
        assert bytes.fromhex(payload) == bytes([number])
        assert int(checksum) == zlib.crc32(sides.memory.tobytes())


def test_a_target_killed_in_the_middle_of_a_write(sides: Sides) -> None:
    finish(sides, sides.write(b"first"))
    handles = [sides.write(b"more") for _ in range(4)]
    sides.other.signal(signal.SIGKILL)
    sides.wait(lambda: all(h.status() is not Status.PENDING for h in handles), within=2.0)
    assert handles[-1].status() in (Status.ERROR, Status.DRAINED)
    assert handles[-1].error()
    sides.wait(lambda: sides.lost == [sides.peer], within=2.0)
    sides.wait(lambda: sides.transport.fence(sides.peer), within=2.0)
    sides.wait(lambda: handles[-1].status() is Status.DRAINED, within=2.0)
    late = sides.write(b"late")
    sides.wait(lambda: late.status() is not Status.PENDING, within=2.0)
    assert late.status() is not Status.DONE


def test_a_writer_killed_in_the_middle_of_a_write_is_lost_and_can_be_fenced(sides: Sides) -> None:
    sides.other.write_to(sides.transport.card())
    sides.wait(lambda: len(sides.notices) >= 2)
    sides.other.signal(signal.SIGKILL)
    sides.wait(lambda: sides.lost == [sides.peer], within=2.0)
    sides.wait(lambda: sides.transport.fence(sides.peer), within=2.0)
    sides.memory[:] = 99
    sides.transport.notices()
    assert (sides.memory == 99).all()


def test_a_stopped_writer_is_fenced_truly_or_not_at_all(sides: Sides) -> None:
    sides.other.write_to(sides.transport.card())
    sides.wait(lambda: len(sides.notices) >= 2)
    sides.other.signal(signal.SIGSTOP)
    if sides.transport.capabilities.fence is FenceScope.PEER:
        assert sides.transport.fence(sides.peer)
    else:
        assert not sides.transport.fence(sides.peer)
        sides.other.signal(signal.SIGKILL)
        sides.wait(lambda: sides.transport.fence(sides.peer), within=2.0)
    sides.transport.notices()
    sides.memory[:] = 99
    sides.other.signal(signal.SIGCONT)
    limit = time.monotonic() + 0.3
    while time.monotonic() < limit:
        assert not sides.transport.notices()
    assert (sides.memory == 99).all()


def test_a_stopped_target_leaves_the_write_pending_and_close_is_quick(sides: Sides) -> None:
    finish(sides, sides.write(b"first"))
    sides.other.signal(signal.SIGSTOP)
    handle = sides.write(b"stuck")
    limit = time.monotonic() + 0.3
    while time.monotonic() < limit:
        sides.transport.notices()
        assert handle.status() is Status.PENDING
    start = time.monotonic()
    sides.transport.close(sides.peer)
    assert time.monotonic() - start < 1.5
    assert handle.status() is Status.ERROR
    sides.other.signal(signal.SIGKILL)
    sides.wait(lambda: handle.status() is Status.DRAINED, within=2.0)


@pytest.mark.parametrize("spec", SPECS)
def test_sockets_listen_on_loopback_only(spec: str) -> None:
    before = _listening()
    transport = load_transport(spec, name="listener", host="127.0.0.1")
    new = _listening() - before
    transport.shutdown()
    assert new
    assert {address for address, _ in new} == {"0100007F"}
    assert not _listening() & new


@pytest.mark.parametrize("spec", SPECS)
def test_shutdown_gives_file_descriptors_back(spec: str) -> None:
    load_transport(spec, name="warm up").shutdown()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        pair = [load_transport(spec, name=f"{side} {number}") for side in "ab"]
        for transport in pair:
            transport.register(memory_of(np.zeros(64, np.uint8)))
        pair[0].connect(pair[1].card())
        for transport in pair:
            transport.shutdown()
    assert len(os.listdir("/proc/self/fd")) <= before


def _listening() -> set[tuple[str, str]]:
    """(address, inode) of the TCP sockets of this process that listen; addresses in hex."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = []
    for table in ("tcp", "tcp6"):
        rows += [r.split() for r in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
    return {(r[1].split(":")[0], r[9]) for r in rows if r[3] == "0A" and r[9] in inodes}
