"""What strangers and broken peers can send to the TCP transport, and that none of it matters."""

import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from typing_extensions import override

from kvbaton.connectors.base import Peer, Status
from kvbaton.connectors.transports import tcp_wire
from kvbaton.connectors.transports.tcp import TcpTransport
from kvbaton.connectors.transports.tcp_connections import (
    HANDSHAKE_S,
    MAX_STRANGERS,
    TcpCard,
    TcpPeer,
)
from kvbaton.connectors.transports.tcp_staging import Run
from kvbaton.connectors.transports.tcp_wire import FrameKind, Header
from kvbaton.errors import ConfigError, TransportError
from kvbaton.testing.transport_rig import TARGET_SIZES, Pair, memory_of, pack, random_rows
from tests.support.waiting import PATIENCE_S, promised, until

_names = itertools.count()
LAST = FrameKind.LAST


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(lambda: (TcpTransport(f"l{next(_names)}"), TcpTransport(f"r{next(_names)}")))
    yield made
    made.close()


def card_of(pair: Pair) -> TcpCard:
    return msgspec.msgpack.decode(pair.target.card(), type=TcpCard)


def dial(pair: Pair) -> socket.socket:
    card = card_of(pair)
    return socket.create_connection((card.host, card.port), timeout=PATIENCE_S)


def member(pair: Pair, name: str = "mallory") -> socket.socket:
    """A connection of somebody who holds the card."""
    sock = dial(pair)
    tcp_wire.introduce(sock, card_of(pair).token, name, time.monotonic() + 5)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """The other side hangs up, within the socket's timeout."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def still_works(pair: Pair) -> None:
    pair.complete(pair.write(random_rows(pair.random, 5), b"fine"))
    pair.compare("after a stranger's visit")
    pair.wait(lambda: pair.notices == [b"fine"], "the one notice that is due")


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(5000), tcp_wire.MAGIC + bytes(500)]
)
def test_junk_closes_only_its_own_connection(pair: Pair, junk: bytes) -> None:
    with dial(pair) as sock:
        sock.sendall(junk)
        assert is_closed(sock)
    still_works(pair)


def test_a_connection_that_gets_no_thread_is_closed_and_later_ones_are_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, list[str]()

    def start_later(thread: threading.Thread) -> None:
        if thread.name == "tcp from" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    def accepted() -> int:
        return sum(thread.name == "tcp from" for thread in threading.enumerate())

    pair.wait(lambda: accepted() >= 2, "the pair's own connections, which may come late")
    monkeypatch.setattr(threading.Thread, "start", start_later)
    with dial(pair) as sock:
        assert is_closed(sock)
    assert refused
    member(pair).close()
    still_works(pair)


def test_a_dialler_without_the_token_is_turned_away(pair: Pair) -> None:
    hello = tcp_wire.MAGIC + bytes(64) + struct.pack("<H", 7) + b"mallory"
    with dial(pair) as sock:
        sock.sendall(hello + Header(LAST, 0, 6, 0, 0).pack() + b"forged")
        assert is_closed(sock)
    still_works(pair)


def test_a_listener_without_the_token_gets_no_byte(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        card = card_of(pair)
        stolen = msgspec.structs.replace(card, port=impostor.getsockname()[1])
        peer = pair.source.connect(msgspec.msgpack.encode(stolen))
        handle = pair.source.write(peer, pack([(0, 0, 0, 0, 64, 1, 0, 0)]), b"")
        sock, _ = impostor.accept()
        with sock:
            sock.settimeout(PATIENCE_S)
            sock.sendall(tcp_wire.MAGIC + bytes(32))
            assert b"" != sock.recv(500)
            sock.sendall(bytes(32))
            assert is_closed(sock)
        pair.wait(lambda: handle.status() is Status.DRAINED, "drained: nothing was sent")
        assert "does not hold the card" in (handle.error() or "")


def test_a_shutdown_that_does_not_wait_for_a_sender_leaves_no_socket(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.connectors.transports.tcp.JOIN_S", 0.01)
    inside, leave = threading.Event(), threading.Event()
    used: list[socket.socket] = []

    class SlowPeer(TcpPeer):
        @override
        def send_frame(self, sock: socket.socket, head: bytes, runs: Sequence[Run]) -> None:
            used.append(sock)
            inside.set()
            leave.wait(PATIENCE_S)

    class SlowTransport(TcpTransport):
        @override
        def dial(self, card: TcpCard) -> TcpPeer:
            return SlowPeer(card, self.name)

    others = set(threading.enumerate())
    slow = SlowTransport(f"s{next(_names)}")
    slow.write(slow.connect(pair.target.card()), pack([]), b"notice alone")
    assert inside.wait(PATIENCE_S)
    slow.shutdown()
    senders = [t for t in threading.enumerate() if t.name.startswith("tcp to ") and t not in others]
    assert senders
    leave.set()
    for sender in senders:
        sender.join(PATIENCE_S)
        assert not sender.is_alive()
    assert used[0].fileno() == -1


def test_a_slow_handshake_has_a_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton.connectors.transports.tcp_connections.HANDSHAKE_S", 0.2)
    with dial(pair) as sock:
        sock.sendall(tcp_wire.MAGIC[:3])
        start = time.monotonic()
        assert is_closed(sock)
        assert time.monotonic() - start < HANDSHAKE_S


def test_strangers_are_bounded(pair: Pair) -> None:
    strangers = [dial(pair) for _ in range(MAX_STRANGERS + 3)]
    assert is_closed(strangers[-1])
    for sock in strangers:
        sock.close()
    still_works(pair)


def bad_frames() -> dict[str, bytes]:
    def frame(rows: list[tuple[int, int, int]], payload: int) -> bytes:
        copies = np.array(rows, "<i8").tobytes()
        return Header(LAST, len(rows), 1, 0, payload).pack() + copies + b"n" + bytes(64)

    end = TARGET_SIZES[0]
    return {
        "past the end": frame([(0, end - 4, 5)], 5),
        "negative offset": frame([(0, -1, 5)], 5),
        "negative region": frame([(-1, 0, 5)], 5),
        "unknown region": frame([(9, 0, 5)], 5),
        "negative length": frame([(0, 0, -5)], 5),
        "no length": frame([(0, 0, 0)], 0),
        "overflow": frame([(0, (1 << 63) - 1, (1 << 63) - 1)], 64),
        "wrong sum": frame([(0, 0, 5)], 6),
        "one good, one bad": frame([(0, 0, 5), (1, 1 << 40, 5)], 10),
        "too many copies": Header(LAST, 1 << 30, 0, 0, 0).pack(),
        "too long a notice": Header(LAST, 0, 1 << 30, 0, 0).pack(),
        "unknown kind": struct.pack("<8sB3xIIQQ", tcp_wire.MAGIC, 77, 0, 0, 0, 0),
        "no frame": bytes(64),
    }


@pytest.mark.parametrize("what", bad_frames())
def test_a_bad_frame_of_a_member_writes_nothing_and_closes(pair: Pair, what: str) -> None:
    with member(pair) as sock:
        sock.sendall(bad_frames()[what])
        assert is_closed(sock)
    pair.compare(what)
    still_works(pair)


def test_a_member_who_hangs_up_in_a_frame_leaves_no_notice(pair: Pair) -> None:
    with member(pair) as sock:
        copies = np.array([(0, 0, 100)], "<i8").tobytes()
        sock.sendall(Header(LAST, 1, 1, 0, 100).pack() + copies + b"n" + bytes(40))
    pair.complete(pair.write([(0, 0, 0, 0, 1_000, 1, 0, 0)], b"fine"))
    pair.wait(lambda: pair.notices == [b"fine"], "the one notice that is due")


def test_a_fence_cuts_that_peer_and_nobody_else(pair: Pair) -> None:
    before = pair.target.card()
    with member(pair) as sock:
        assert pair.target.fence(pair.back)
        sock.sendall(Header(LAST, 0, 5, 0, 0).pack() + b"other")
        pair.wait(lambda: pair.notices == [b"other"], "a notice of another peer")
    handle = pair.source.write(pair.peer, pack([(0, 0, 0, 0, 64, 1, 0, 0)]), b"fenced")
    assert pair.finish(handle) is not Status.DONE
    pair.target.connect(pair.source.card())  # a session to come: what was fenced stays so
    late = pair.source.connect(before)
    refused = pair.source.write(late, pack([(0, 0, 0, 0, 64, 1, 0, 0)]), b"fenced")
    pair.wait(lambda: refused.status() is Status.DRAINED, "drained: nothing was sent")
    pair.compare("after a fence")
    pair.peer = pair.source.connect(pair.target.card())
    pair.complete(pair.write(random_rows(pair.random, 3), b"again"))
    pair.compare("with the card of after the fence")


def test_a_goodbye_is_not_a_loss_and_a_broken_connection_is(pair: Pair) -> None:
    pair.complete(pair.write([(0, 0, 0, 0, 64, 1, 0, 0)], b"x"))
    pair.source.close(pair.peer)
    with member(pair, pair.source.name):
        assert not pair.target.lost()
    lost: list[Peer] = []

    def report() -> bool:
        lost.extend(pair.target.lost())
        return bool(lost)

    pair.wait(report, "the loss of a peer that hung up without a goodbye")
    assert lost == [pair.back]


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_a_wildcard_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        TcpTransport("x", host=host)


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="can't listen"):
        TcpTransport("x", host="192.0.2.7")


def test_nobody_listens_any_more() -> None:
    gone, here = TcpTransport("gone"), TcpTransport("here")
    card = gone.card()
    gone.shutdown()
    peer = here.connect(card)
    handle = here.write(peer, pack([]), b"x")
    until(lambda: handle.status() is Status.DRAINED, "drained: nothing was sent")
    assert list(here.lost()) == [peer]
    here.shutdown()


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0},
        {"port": 65536},
        {"port": -1},
        {"port": 1 << 63},
        {"host": ""},
        {"host": "h" * 256},
        {"name": "n" * 513},
        {"sizes": [-1]},
        {"guard": {"host": "127.0.0.1", "port": 70000, "life": bytes(16)}},
        {"guard": {"host": "a name", "port": 7, "life": bytes(16)}},
    ],
)
def test_a_card_that_can_t_be_dialled_is_refused(pair: Pair, change: dict[str, object]) -> None:
    fields = msgspec.msgpack.decode(pair.target.card()) | change
    with pytest.raises(TransportError):
        pair.source.connect(msgspec.msgpack.encode(fields))
    pair.complete(pair.write(random_rows(pair.random, 3), b"x"))


@pytest.mark.parametrize("host", ["\0", "::1%?", "\ud7ff" * 80, "no such host.invalid"])
def test_a_host_that_is_none_loses_its_peer_only(pair: Pair, host: str) -> None:
    """Only dialling tells: in the connection's thread, which reports it."""
    fields = msgspec.msgpack.decode(pair.target.card()) | {"host": host}
    peer = pair.source.connect(msgspec.msgpack.encode(fields))
    handle = pair.source.write(peer, pack([(0, 0, 0, 0, 64, 1, 0, 0)]), b"nobody")
    pair.wait(lambda: handle.status() is Status.DRAINED, "drained: nothing was sent")
    lost: list[Peer] = []

    def report() -> bool:
        lost.extend(pair.source.lost())
        return bool(lost)

    pair.wait(report, "lost")
    assert lost == [peer]
    pair.complete(pair.write(random_rows(pair.random, 3), b"x"))


def test_closing_peers_that_hang_stops_nobody(pair: Pair) -> None:
    """The transfer thread closes each of them: they take as long as one, and no call waits."""
    size, names = 32 << 20, [f"hung-{number}" for number in range(8)]
    pair.source.register(memory_of(np.zeros(size, np.uint8)))
    region = len(pair.source_memory)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, socks, peers = server.getsockname()[1], [], []
        for name in names:
            fields = card_of(pair)
            card = msgspec.structs.replace(fields, name=name, port=port, sizes=(size,))
            peers.append(pair.source.connect(msgspec.msgpack.encode(card)))
            socks.append(server.accept()[0])
            tcp_wire.greet(socks[-1], fields.token, time.monotonic() + 5, lambda _: None)
        handles = [
            pair.source.write(p, pack([(region, 0, 0, 0, size, 1, 0, 0)]), b"") for p in peers
        ]
        for sock in socks:  # it reads a header, and hangs: the frame fills both kernels' buffers
            assert tcp_wire.receive_header(sock).payload_bytes == size
        began = time.monotonic()
        ended = [pair.source.close(peer) for peer in peers]
        assert time.monotonic() - began < promised(0.1)
        assert not any(ended), "they are in a frame: a goodbye may still be possible"
        pair.wait(lambda: all(pair.source.close(peer) for peer in peers), "closed")
        assert time.monotonic() - began < promised(2.0)
        assert all(handle.status() is Status.ERROR for handle in handles), "it may still land there"
        for sock in socks:
            sock.close()
