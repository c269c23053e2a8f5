"""The control channel: whole messages, only between those who may talk, and never a hang."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvbaton.connectors.channel import HIGH_WATER_MARK, ControlChannel
from kvbaton.connectors.curve import derive_key_pair
from kvbaton.connectors.protocol.events import Link
from kvbaton.errors import ConfigError
from tests.support.waiting import PATIENCE_S

HOST = "127.0.0.1"


@contextmanager
def channels(*keys: str | None) -> Iterator[list[ControlChannel]]:
    opened = [ControlChannel(HOST, cluster_key=key) for key in keys]
    try:
        yield opened
    finally:
        for channel in opened:
            channel.close()


def receive(
    channel: ControlChannel,
    count: int = 1,
    *,
    helping: ControlChannel | None = None,
    within: float = PATIENCE_S,
) -> list[tuple[Link, bytes]]:
    """Messages of `channel`, waiting for `count`; `helping` answers its handshakes meanwhile."""
    got: list[tuple[Link, bytes]] = []
    limit = time.monotonic() + within
    while len(got) < count and time.monotonic() < limit:
        channel.poller.poll(20)
        got += channel.receive()
        if helping is not None:
            helping.poller.poll(0)
            helping.receive()
    return got


def spin(until: Callable[[], bool], *sides: ControlChannel, within: float = PATIENCE_S) -> bool:
    limit = time.monotonic() + within
    while not (met := until()) and time.monotonic() < limit:
        for side in sides:
            side.receive()
    return met


@pytest.mark.parametrize("key", [None, "k" * 40], ids=["open", "keyed"])
def test_question_and_answer_keep_their_links(key: str | None) -> None:
    with channels(key, key) as (left, right):
        link = left.dial(right.address)
        assert left.send(link, b"question")
        [(back, data)] = receive(right)
        assert data == b"question"
        assert back != link
        assert right.send(back, b"answer")
        assert receive(left) == [(link, b"answer")]


def test_dialling_an_address_again_gives_the_same_link_until_it_is_hung_up() -> None:
    with channels(None, None) as (left, right):
        link = left.dial(right.address)
        assert left.dial(right.address) == link
        left.hang_up(right.address)
        assert left.dial(right.address) != link
        assert not left.send(link, b"to a dropped link")


def test_messages_of_one_link_arrive_whole_and_in_order() -> None:
    sent = [os.urandom(size) for size in (0, 1, 255, 256, 70_000, 5_000_000, 3)]
    with channels(None, None) as (left, right):
        link = left.dial(right.address)
        for data in sent:
            assert left.send(link, data)
        assert [data for _, data in receive(right, len(sent))] == sent


def test_a_dialler_can_not_forge_a_link_that_we_dialled() -> None:
    with channels(None, None) as (left, right):
        link = left.dial(right.address)
        with zmq.Context() as context, context.socket(zmq.DEALER) as forger:
            forger.linger = 0
            forger.routing_id = link.id
            forger.connect(left.address)
            forger.send(b"forged")
            [(found, data)] = receive(left)
        assert data == b"forged"
        assert found != link


@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), ("a", None), (None, "a")])
def test_only_holders_of_the_cluster_key_get_anything_through(
    ours: str | None, theirs: str | None
) -> None:
    with channels(ours, theirs) as (listener, stranger):
        stranger.send(stranger.dial(listener.address), b"let me in")
        assert receive(listener, helping=stranger, within=0.6) == []


def test_knowing_the_public_key_alone_is_not_enough() -> None:
    with channels("cluster") as (listener,), zmq.Context() as context:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = derive_key_pair("cluster")[0]  # suppose it leaked
            stranger.connect(listener.address)
            stranger.send(b"let me in")
            gate = listener._gate
            assert gate is not None
            assert spin(lambda: gate.refused > 0, listener)
            assert receive(listener, within=0.3) == []


def test_without_a_key_only_loopback_is_bound() -> None:
    with pytest.raises(ConfigError, match="--cluster-key"):
        ControlChannel("192.0.2.7", cluster_key=None)
    with pytest.raises(ConfigError, match="--host"):
        ControlChannel("0.0.0.0", cluster_key="key")
    with channels(None) as (channel,):
        assert channel.address.startswith("tcp://127.0.0.1:")


def test_a_taken_port_is_a_clear_error() -> None:
    with channels(None) as (channel,):
        port = int(channel.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match="--control-port: can't listen"):
            ControlChannel(HOST, port, cluster_key=None)


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:1", "tcp://", "tcp://host", "tcp://h:99999", "ipc:///tmp/x"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with channels(None) as (channel,), pytest.raises(ValueError, match="tcp://"):
        channel.dial(address)


def test_sending_never_blocks_and_tells_what_it_drops() -> None:
    with channels(None) as (channel,):
        nobody = socket.socket()
        nobody.bind((HOST, 0))  # bound, not listening: nobody answers there
        link = channel.dial(f"tcp://{HOST}:{nobody.getsockname()[1]}")
        start = time.monotonic()
        results = [channel.send(link, b"x") for _ in range(HIGH_WATER_MARK + 50)]
        assert time.monotonic() - start < 2
        assert results.count(False) == 50
        assert not channel.send(Link(b"iunknown"), b"x")
        channel.hang_up(f"tcp://{HOST}:{nobody.getsockname()[1]}")
        nobody.close()


@pytest.mark.parametrize("key", [None, "key"])
def test_junk_on_the_port_harms_nobody(key: str | None) -> None:
    with channels(key, key) as (left, right):
        port = int(right.address.rpartition(":")[2])
        for junk in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(4096),
            b"\xff" + b"\0" * 8 + b"\x7f" * 99,
        ):
            with socket.create_connection((HOST, port)) as sock:
                sock.sendall(junk)
        left.send(left.dial(right.address), b"still there")
        assert spin(lambda: b"still there" in [data for _, data in right.receive()], left)


def test_multipart_messages_of_strangers_are_dropped() -> None:
    with channels(None) as (channel,), zmq.Context() as context:
        with context.socket(zmq.DEALER) as sender:
            sender.linger = 0
            sender.connect(channel.address)
            sender.send_multipart([b"two", b"parts"])
            sender.send(b"one")
            assert [data for _, data in receive(channel)] == [b"one"]


def test_close_is_quick_and_leaves_no_file_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with channels("k", "k") as (left, right):
        left.send(left.dial(right.address), b"x")
        receive(right)
        gone = left.dial(f"tcp://{HOST}:9")
        left.send(gone, b"never leaves")
        start = time.monotonic()
    assert time.monotonic() - start < 3
    assert descriptors() == before
    left.close()
