"""Memory of a GPU over the TCP transport, through pinned memory of the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvbaton.cluster.config import visible_gpus
from kvbaton.connectors.base import Memory, Status
from kvbaton.connectors.transports.tcp import TcpTransport
from kvbaton.connectors.transports.tcp_staging import LANE_BYTES
from kvbaton.errors import ConfigError, TransportError
from kvbaton.testing.pairs import Pair, fresh_name, memory_of, pack, random_rows
from kvbaton.testing.suite import TransportTests
from tests.connectors.staged_tcp import FakeCuda, OldFakeCuda, StagedTcp


class TestStagedConforms(TransportTests):
    """With a driver that copies as late as it may."""

    spec = f"{StagedTcp.__module__}:StagedTcp"


@pytest.mark.gpu
@pytest.mark.skipif(not visible_gpus(), reason="no CUDA device")
class TestVramConforms(TransportTests):
    """With CUDA's own."""

    spec = f"{StagedTcp.__module__}:VramTcp"


def staged(cuda: OldFakeCuda, pinned_mib: int = 16) -> StagedTcp:
    made = StagedTcp(fresh_name(), pinned_mib=pinned_mib)
    made.cuda = cuda
    return made


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(lambda: (staged(FakeCuda()), staged(FakeCuda())), patience=5.0)
    yield made
    made.close()


def cuda_of(transport: object) -> OldFakeCuda:
    assert isinstance(transport, StagedTcp)
    assert transport.cuda is not None
    return transport.cuda


def test_a_driver_without_batches() -> None:
    with Pair(lambda: (staged(OldFakeCuda()), staged(OldFakeCuda()))) as pair:
        pair.complete(pair.write(random_rows(pair.random, 50)))
        pair.compare("without batches")


@pytest.mark.parametrize("host_side", ["source", "target"])
def test_between_host_and_gpu(host_side: str) -> None:
    def make() -> tuple[TcpTransport, TcpTransport]:
        one, two = TcpTransport(fresh_name()), staged(FakeCuda())
        return (one, two) if host_side == "source" else (two, one)

    with Pair(make) as pair:
        pair.complete(pair.write(random_rows(pair.random, 50)))
        pair.compare("between host and GPU")


def test_one_transport_with_both_kinds_of_memory() -> None:
    """Pieces of one frame lie on both sides."""
    source, target = staged(FakeCuda()), staged(FakeCuda())
    arrays = [np.random.default_rng(i).integers(0, 256, 10 << 20, np.uint8) for i in range(4)]
    for transport, (gpu, host) in ((source, arrays[:2]), (target, arrays[2:])):
        transport.register(memory_of(gpu))
        TcpTransport.register(transport, memory_of(host))
    peer = source.connect(target.card())
    half = 4 << 20
    rows = [(i % 2, i * half // 2, i // 2, i % 2 * half, half, 1, 0, 0) for i in range(4)]
    handle = source.write(peer, pack(rows), b"mixed")
    wait(lambda: handle.status() is Status.DONE)
    for s, low, t, at, size, *_ in rows:
        assert np.array_equal(arrays[s][low : low + size], arrays[2 + t][at : at + size])
    source.shutdown()
    target.shutdown()


def test_pinned_memory_is_bounded_however_many_write_at_once() -> None:
    target = staged(FakeCuda())
    size = 3 * LANE_BYTES
    memory = np.zeros(4 * size, np.uint8)
    target.register(memory_of(memory))
    sources, handles = [], []
    for number in range(4):
        source = staged(FakeCuda())
        noise = np.random.default_rng(number).integers(0, 256, size, np.uint8)
        source.register(memory_of(noise))
        row = (0, 0, 0, number * size, size, 1, 0, 0)
        handles.append(source.write(source.connect(target.card()), pack([row]), b""))
        sources.append((source, noise))
    wait(lambda: all(handle.status() is Status.DONE for handle in handles))
    assert np.array_equal(memory, np.concatenate([noise for _, noise in sources]))
    assert cuda_of(target).most_pinned == LANE_BYTES
    for source, _ in sources:
        assert cuda_of(source).most_pinned == LANE_BYTES
        source.shutdown()
        assert not cuda_of(source).pinned
    target.shutdown()
    assert not cuda_of(target).pinned


def test_who_waits_for_pinned_memory_can_be_fenced(pair: Pair) -> None:
    """And a hung-up sender that waits ends without a byte sent."""
    staging = pair.target._staging  # type: ignore[attr-defined]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with staging.incoming.lend(lambda: True):
            held.set()
            done.wait(5.0)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(5.0)
    handle = pair.source.write(pair.peer, pack(random_rows(pair.random, 3)), b"late")
    time.sleep(0.05)
    assert handle.status() is Status.PENDING
    began = time.monotonic()
    assert pair.target.fence(pair.back)
    assert time.monotonic() - began < 0.5
    done.set()
    thread.join()
    assert pair.finish(handle) is not Status.DONE
    pair.compare("after the fence of who waited")
    assert not pair.notices


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_failure_of_cuda_ends_the_connection(pair: Pair, side: str) -> None:
    cuda_of(getattr(pair, side)).fail = 700
    handle = pair.source.write(pair.peer, pack(random_rows(pair.random, 3)), b"failed")
    assert pair.finish(handle) is not Status.DONE
    assert "CUDA error 700" in str(handle.error()) or side == "target"
    pair.poll()
    assert not pair.notices
    assert pair.source.lost() == (pair.peer,)


def test_what_it_can_not_reach_is_refused() -> None:
    """Another device than the first, one that is not, any without a driver, too few bytes."""
    transport = staged(FakeCuda())
    array = np.zeros(8, np.uint8)
    transport.register(memory_of(array))
    transport.device_index = 1
    with pytest.raises(TransportError, match="one GPU"):
        transport.register(memory_of(array))
    transport.shutdown()
    other = staged(FakeCuda())
    other.device_index = 1
    with pytest.raises(TransportError, match="CUDA device 1 can't be used"):
        other.register(memory_of(array))
    other.shutdown()
    with pytest.raises(ConfigError, match="at least 16"):
        staged(FakeCuda(), pinned_mib=15)


@pytest.mark.skipif(bool(visible_gpus()), reason="there is a CUDA driver")
def test_without_a_driver() -> None:
    transport = TcpTransport(fresh_name())
    with pytest.raises(TransportError, match="needs the CUDA driver"):
        transport.register(Memory(4096, 8, "cuda"))
    transport.shutdown()


def wait(done: object) -> None:
    assert callable(done)
    limit = time.monotonic() + 20.0
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.001)
