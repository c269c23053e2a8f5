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
from kvbaton.testing.suite import TransportTests
from kvbaton.testing.transport_rig import Pair, fresh_name, memory_of, pack, random_rows
from tests.connectors.staged_tcp import FakeGpu, StagedTcp
from tests.support.waiting import PATIENCE_S


@pytest.mark.usefixtures("forked_workers")
class TestStagedConforms(TransportTests):
    """With copies that happen as late as they may."""

    spec = f"{StagedTcp.__module__}:StagedTcp"


@pytest.mark.gpu
@pytest.mark.skipif(not visible_gpus(), reason="no CUDA device")
class TestVramConforms(TransportTests):
    """With CUDA's own."""

    spec = f"{StagedTcp.__module__}:VramTcp"


def staged(pinned_mib: int = 16) -> StagedTcp:
    made = StagedTcp(fresh_name(), pinned_mib=pinned_mib)
    made.gpu = FakeGpu()
    return made


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(lambda: (staged(), staged()), patience=5.0)
    yield made
    made.close()


def gpu_of(transport: object) -> FakeGpu:
    assert isinstance(transport, StagedTcp)
    assert transport.gpu is not None
    return transport.gpu


@pytest.mark.parametrize("host_side", ["source", "target"])
def test_between_host_and_gpu(host_side: str) -> None:
    def make() -> tuple[TcpTransport, TcpTransport]:
        one, two = TcpTransport(fresh_name()), staged()
        return (one, two) if host_side == "source" else (two, one)

    with Pair(make) as pair:
        pair.complete(pair.write(random_rows(pair.random, 50)))
        pair.compare("between host and GPU")


def test_one_transport_with_both_kinds_of_memory() -> None:
    """Pieces of one frame lie on both sides."""
    source, target = staged(), staged()
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
    target = staged()
    size = 3 * LANE_BYTES
    memory = np.zeros(4 * size, np.uint8)
    target.register(memory_of(memory))
    sources, handles = [], []
    for number in range(4):
        source = staged()
        noise = np.random.default_rng(number).integers(0, 256, size, np.uint8)
        source.register(memory_of(noise))
        row = (0, 0, 0, number * size, size, 1, 0, 0)
        handles.append(source.write(source.connect(target.card()), pack([row]), b""))
        sources.append((source, noise))
    wait(lambda: all(handle.status() is Status.DONE for handle in handles))
    assert np.array_equal(memory, np.concatenate([noise for _, noise in sources]))
    assert gpu_of(target).most_pinned == LANE_BYTES
    for source, _ in sources:
        assert gpu_of(source).most_pinned == LANE_BYTES
        source.shutdown()
        assert not gpu_of(source).pinned_bytes
    target.shutdown()
    assert not gpu_of(target).pinned_bytes


def test_who_waits_for_pinned_memory_can_be_fenced(pair: Pair) -> None:
    """And a hung-up sender that waits ends without a byte sent."""
    staging = pair.target._staging  # type: ignore[attr-defined]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with staging.incoming.lend(lambda: True):
            held.set()
            done.wait(PATIENCE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE_S)
    handle = pair.source.write(pair.peer, pack(random_rows(pair.random, 3)), b"late")
    time.sleep(0.05)
    assert handle.status() is Status.PENDING
    assert pair.target.fence(pair.back)
    assert thread.is_alive(), "the fence waited for the memory"
    done.set()
    thread.join()
    assert pair.finish(handle) is not Status.DONE
    pair.compare("after the fence of who waited")
    assert not pair.notices


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_failure_of_cuda_ends_the_connection(pair: Pair, side: str) -> None:
    gpu_of(getattr(pair, side)).fail = "CUDA error: an illegal address"
    handle = pair.source.write(pair.peer, pack(random_rows(pair.random, 3)), b"failed")
    assert pair.finish(handle) is not Status.DONE
    assert "CUDA error: an illegal address" in str(handle.error()) or side == "target"
    pair.poll()
    assert not pair.notices
    assert pair.source.lost() == (pair.peer,)


def test_what_it_can_not_reach_is_refused() -> None:
    """Another device than the first, too few bytes."""
    transport = staged()
    array = np.zeros(8, np.uint8)
    transport.register(memory_of(array))
    transport.device_index = 1
    with pytest.raises(TransportError, match="one GPU"):
        transport.register(memory_of(array))
    transport.shutdown()
    with pytest.raises(ConfigError, match="at least 16"):
        staged(pinned_mib=15)


def test_a_device_that_is_none() -> None:
    transport = TcpTransport(fresh_name())
    with pytest.raises(TransportError, match="no CUDA device 99"):
        transport.register(Memory(4096, 8, "cuda", 99))
    transport.shutdown()


def wait(done: object) -> None:
    assert callable(done)
    limit = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.001)
