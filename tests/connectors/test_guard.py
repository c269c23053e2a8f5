"""A process counts as dead only when its kernel has said so in order."""

import contextlib
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvbaton.connectors import guard
from kvbaton.connectors.guard import GuardCard, Watch, guard_card, watch
from kvbaton.errors import ConfigError, TransportError
from kvbaton.testing.remote import RemoteProcess
from tests.support.processes import python
from tests.support.waiting import PATIENCE_S, until

LISTENS = """
import sys, time
from kvbaton.connectors.guard import guard_card
import msgspec
print("card", msgspec.msgpack.encode(guard_card("127.0.0.1")).hex(), flush=True)
sys.stdin.readline()
"""

# The main thread ends here while another still runs: the process shows as a zombie and is none.
LEADER_EXITS = """
import ctypes, msgspec, threading, time
from kvbaton.connectors.guard import guard_card
print("card", msgspec.msgpack.encode(guard_card("127.0.0.1")).hex(), flush=True)
threading.Thread(target=time.sleep, args=(60,)).start()
time.sleep(0.5)
ctypes.CDLL(None).pthread_exit(None)
"""


@contextlib.contextmanager
def process(code: str = LISTENS) -> Iterator[tuple[RemoteProcess, Watch]]:
    with RemoteProcess(python("-c", code), PATIENCE_S) as far:
        card = msgspec.msgpack.decode(bytes.fromhex(far.started()[1]), type=GuardCard)
        watched = watch(card)
        try:
            assert watched.wait(PATIENCE_S)
            yield far, watched
        finally:
            watched.close()


@pytest.fixture
def server() -> Iterator[tuple[socket.socket, GuardCard]]:
    """A listener of the test's own, and a card for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        yield listener, GuardCard("127.0.0.1", listener.getsockname()[1], secrets.token_bytes(16))


OUT_OF_DESCRIPTORS = """
import logging, os, resource, sys
from kvbaton.connectors.guard import guard_card
import msgspec
logging.basicConfig(format="%(message)s", stream=sys.stdout)
card = guard_card("127.0.0.1")
held = [os.dup(0)]
resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, 4096))
sys.stdout.write(f"card {msgspec.msgpack.encode(card).hex()}\\n")  # whole: the guard logs meanwhile
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
sys.stdin.readline()
"""


def test_a_process_out_of_descriptors_goes_on_and_accepts_once_it_has_some() -> None:
    command = python("-uc", OUT_OF_DESCRIPTORS)
    with RemoteProcess(command, PATIENCE_S) as far:
        card = msgspec.msgpack.decode(bytes.fromhex(far.started()[1]), type=GuardCard)
        watched = watch(card)
        try:
            assert not watched.wait(3 * guard.ACCEPT_PAUSE_S)
            far.tell("have some")
            until(lambda: watched.wait(PATIENCE_S), "it is accepted")
        finally:
            watched.close()
        far.kill()
        told = [words for words in far.all_lines() if words[:1] == ["accepting"]]
    assert 1 <= len(told) <= 10, "it does not spin"


def test_a_killed_process_is_dead_after_the_grace() -> None:
    with process() as (far, watched):
        assert watched.held
        assert not watched.dead
        killed = time.monotonic()
        far.kill()
        until(lambda: watched.dead, "dead")
        assert time.monotonic() - killed >= guard.GRACE_S
        assert not watched.cut


def test_a_process_that_ends_by_itself_is_dead() -> None:
    with process() as (far, watched):
        far.tell("end")
        until(lambda: watched.dead, "dead")


def test_a_stopped_process_lives() -> None:
    with process() as (far, watched):
        far.signal(signal.SIGSTOP)
        time.sleep(2 * guard.GRACE_S)
        assert watched.held
        far.signal(signal.SIGCONT)
        assert watched.held
        far.kill()
        until(lambda: watched.dead, "dead")


def test_a_process_whose_main_thread_has_ended_lives() -> None:
    with process(LEADER_EXITS) as (far, watched):
        time.sleep(1.5)
        assert watched.held
        far.kill()
        until(lambda: watched.dead, "dead")


def accept(listener: socket.socket, card: GuardCard) -> socket.socket:
    sock, _ = listener.accept()
    sock.sendall(card.life)
    return sock


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_reset_proves_nothing_and_is_dialled_again(
    server: tuple[socket.socket, GuardCard],
) -> None:
    listener, card = server
    watched = watch(card)
    reset(accept(listener, card))
    until(lambda: not watched.held, "the reset is seen")
    assert not watched.dead
    again = accept(listener, card)
    until(lambda: watched.held, "held again")
    assert not watched.cut
    again.close()
    until(lambda: watched.dead, "an orderly end is proof")
    watched.close()


def test_who_waits_for_one_that_is_down_need_not_wait_for_its_turn(
    server: tuple[socket.socket, GuardCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, card = server
    watched = watch(card)
    sock = accept(listener, card)
    until(lambda: watched.held, "held")
    monkeypatch.setattr(guard, "REDIAL_S", 60.0)
    reset(sock)
    until(lambda: not watched.held, "the reset is seen")
    accepted: list[socket.socket] = []
    thread = threading.Thread(target=lambda: accepted.append(accept(listener, card)))
    thread.start()
    assert watched.wait(PATIENCE_S)
    thread.join()
    accepted[0].close()
    watched.close()


def test_who_can_t_be_dialled_again_is_cut_off_but_not_dead(
    server: tuple[socket.socket, GuardCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "CUT_S", 0.2)
    listener, card = server
    watched = watch(card)
    sock = accept(listener, card)
    until(lambda: watched.held, "held")
    listener.close()
    reset(sock)
    until(lambda: watched.cut, "cut off")
    time.sleep(2 * guard.GRACE_S)
    assert not watched.dead
    watched.close()


@pytest.mark.parametrize("says", [b"", b"no", bytes(16), "life and more"])
def test_an_end_of_who_did_not_say_that_life_proves_nothing(
    server: tuple[socket.socket, GuardCard], says: bytes | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has the port now, or a machine between answered."""
    monkeypatch.setattr(guard, "DIAL_S", 0.2)
    listener, card = server
    watched = watch(card)
    sock, _ = listener.accept()
    sock.sendall(card.life + b"!" if isinstance(says, str) else says)
    sock.close()
    assert not watched.wait(PATIENCE_S) or watched.held is False
    time.sleep(2 * guard.GRACE_S)
    assert not watched.dead
    watched.close()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    watched = watch(GuardCard("127.0.0.1", port, bytes(16)))
    assert not watched.wait(PATIENCE_S)
    assert not watched.dead
    watched.close()


def test_watches_of_one_process_share_a_connection(
    server: tuple[socket.socket, GuardCard],
) -> None:
    listener, card = server
    first, second = watch(card), watch(card)
    sock = accept(listener, card)
    until(lambda: first.held and second.held, "both held")
    first.close()
    sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    second.close()
    sock.settimeout(PATIENCE_S)
    assert sock.recv(1) == b"", "closed with its last user"
    sock.close()


def test_one_connections_failure_is_logged_and_others_are_accepted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = guard_card("127.0.0.5")

    def fails(addresses: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(guard, "Counter", fails)
    address, said = (card.host, card.port), list[bytes]()
    for _ in range(2):
        with contextlib.suppress(ConnectionResetError):
            with socket.create_connection(address, PATIENCE_S) as sock:
                said.append(sock.recv(64))
    assert said == [card.life], "the first is reset, the second is not"
    assert "unforeseen" in caplog.text


def test_strangers_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends is reset and nothing of it is read; too many of one address are refused."""
    monkeypatch.setattr(guard, "MAX_PER_ADDRESS", 8)
    card = guard_card("127.0.0.3")

    def dial() -> socket.socket:
        sock = socket.create_connection((card.host, card.port), PATIENCE_S, ("127.0.0.4", 0))
        sock.settimeout(PATIENCE_S)
        return sock

    talker = dial()
    assert talker.recv(64) == card.life
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        talker.sendall(bytes(1 << 24))
    talker.close()
    held = [dial() for _ in range(8)]
    assert all(sock.recv(64) == card.life for sock in held)

    def room() -> bool:
        try:
            with dial() as sock:
                return sock.recv(64) == card.life
        except ConnectionResetError:
            return False

    assert not room()
    friend = watch(card)  # of another address
    assert friend.wait(PATIENCE_S)
    for sock in held:
        sock.close()
    until(room, "room again")
    assert friend.held
    friend.close()


@pytest.mark.parametrize("host", ["", "node-7", "0.0.0.0", "::", "224.0.0.1", "::1%?", "::1%a b"])
def test_hosts_that_are_no_address_are_refused(host: str) -> None:
    with pytest.raises(TransportError, match="guard"):
        watch(GuardCard(host, 1, bytes(16)))


@pytest.mark.parametrize(
    "change", [{"port": 0}, {"port": 65536}, {"port": -1}, {"life": b""}, {"host": "x" * 65}]
)
def test_impossible_cards_are_no_cards(change: dict[str, object]) -> None:
    fields = {"host": "127.0.0.1", "port": 1, "life": bytes(16)} | change
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, GuardCard)


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match="can't listen"):
        guard_card("203.0.113.7")
