"""The transfer thread: no event ends it, whatever a peer, a client, a router or a plug-in does."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbaton.connectors.base import Notice, Peer, Ranges, Status
from kvbaton.connectors.channel import ControlChannel
from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.connectors.protocol.events import (
    BlocksReady,
    CancelTarget,
    Deliver,
    Engage,
    Fail,
    Landed,
    OpenPeer,
    PeerGone,
    Release,
    SetMembers,
    Unneeded,
)
from kvbaton.connectors.protocol.notice import MIN_NOTICE_BYTES, pack_notice
from kvbaton.connectors.transfer import thread as thread_module
from kvbaton.connectors.transfer import worker as worker_module
from kvbaton.connectors.transfer.worker import MAX_MARKS, MAX_TIMELINES, Timelines, attempt_name
from kvbaton.connectors.transports.memory import (
    MemoryHandle,
    MemoryHub,
    MemoryPeer,
    MemoryTransport,
)
from kvbaton.connectors.transports.tcp import TcpTransport
from kvbaton.errors import TransportError
from kvbaton.messages.control import Control, DigestRun, Refused, decode_control
from kvbaton.types import MAX_TEXT, Attempt, BlockSpan, TransferTimers
from tests.connectors.transfer_rig import (
    HEADS,
    LAYOUT,
    Decode,
    Node,
    Prefill,
    begin,
    hand_over,
    wait,
)
from tests.support.making import making
from tests.support.waiting import PATIENCE_S

SHORT = TransferTimers(resend=0.1)
Make = Callable[..., Any]


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
def make(hub: MemoryHub) -> Iterator[Make]:
    def start(kind: type[Node], transport: Any = None, **options: Any) -> Node:
        return kind(kind.__name__[0].lower(), transport, hub, **options)

    with making(start, Node.close) as make:
        yield make


def test_a_prompt_crosses(make: Make) -> None:
    p, d = make(Prefill), make(Decode)
    assert isinstance(hand_over(p, d), Deliver)
    assert (d.pool.data[20:24] == p.pool.data[1:5]).all()
    assert p.thread.errors == d.thread.errors == 0


BAD_ADDRESSES = [
    "tcp://[::1%a b]:5000",
    "tcp://[::1%?]:5000",
    "tcp://[::1",
    "tcp://host name:1",
    "tcp://127.0.0.1:99999",
    "tcp://" + "h" * 300 + ":1",
    "ftp://127.0.0.1:1",
    "\0",
]


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_an_address_that_cannot_be_dialled_fails_its_attempt_only(make: Make, address: str) -> None:
    p, d = make(Prefill), make(Decode)
    attempt = Attempt(os.urandom(16), 0)
    d.thread.submit(SetMembers(frozenset({address})), Unneeded(attempt, address))
    d.begin(attempt, address, 18)
    wait(lambda: d.outcome(attempt) is not None and d.freed(attempt), d)
    assert isinstance(d.outcome(attempt), Fail)
    assert isinstance(hand_over(p, d), Deliver)


def test_a_source_may_be_asked_by_two_of_its_addresses(make: Make) -> None:
    """They are two members to a target; the source has one session with it."""
    p, d = make(Prefill), make(Decode)
    addresses = p.channel.address, p.channel.address.replace("127.0.0.1", "localhost")
    d.thread.submit(SetMembers(frozenset(addresses)))
    arrived = list[bool]()

    def arrive() -> bool:
        attempt = Attempt(os.urandom(16), 0)
        p.announce(attempt, 18)
        d.begin(attempt, addresses[len(arrived) % 2], 18)
        wait(lambda: d.outcome(attempt) is not None and d.freed(attempt), p, d)
        arrived.append(isinstance(d.outcome(attempt), Deliver))
        return len(arrived) > 12 and all(arrived[-12:])

    wait(arrive, p, d)
    assert arrived.count(False) < 4


def test_a_peer_whose_layout_and_card_disagree_fails_its_attempt_only(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P plans beyond the region that D's card tells of: `Transport.write` raises `ValueError`."""
    p, d, liar = make(Prefill), make(Decode), make(Decode)
    card = short_card(liar)
    monkeypatch.setattr(liar.transport, "card", lambda: card)
    ended = hand_over(p, liar)
    assert isinstance(ended, Fail)
    assert "write 0 failed" in ended.reason
    assert f"write 0 of {attempt_name(ended.attempt)} can't be posted" in caplog.text
    assert isinstance(hand_over(p, d), Deliver)
    assert p.thread.errors > 0


def short_card(node: Node) -> bytes:
    fields = msgspec.msgpack.decode(node.transport.card())
    fields["sizes"] = [LAYOUT.block_size]
    return msgspec.msgpack.encode(fields)


class Hostile(MemoryTransport):
    """A plug-in that raises what no contract names, in one method at a time."""

    def __init__(self, name: str, hub: MemoryHub) -> None:
        super().__init__(name, hub=hub)
        self.broken = ""
        self.raised: type[BaseException] = RuntimeError

    def _may(self, method: str) -> None:
        if self.broken == method:
            raise self.raised(f"{method} is broken")

    def connect(self, card: bytes) -> Any:
        self._may("connect")
        return super().connect(card)

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        self._may("write")
        return super().write(peer, ranges, notice)

    def notices(self) -> Sequence[Notice]:
        self._may("notices")
        return super().notices()

    def lost(self) -> Any:
        self._may("lost")
        return super().lost()

    def fence(self, peer: Peer) -> bool:
        self._may("fence")
        return super().fence(peer)

    def close(self, peer: Peer) -> bool:
        self._may("close")
        return super().close(peer)

    def shutdown(self) -> None:
        super().shutdown()
        self._may("shutdown")


@pytest.mark.parametrize("raised", [RuntimeError, SystemExit])
@pytest.mark.parametrize("method", ["connect", "write", "notices", "lost"])
@pytest.mark.parametrize("side", [Prefill, Decode])
def test_a_plug_in_that_raises_ends_no_thread(
    make: Make, hub: MemoryHub, side: type[Node], method: str, raised: type[BaseException]
) -> None:
    hostile = Hostile("hostile", hub)
    hostile.raised = raised
    p = make(Prefill, hostile if side is Prefill else None)
    d = make(Decode, hostile if side is Decode else None)
    hostile.broken = method
    attempt = begin(p, d)
    wait(lambda: d.outcome(attempt) is not None, p, d)
    hostile.broken = ""
    wait(lambda: d.freed(attempt), p, d)
    wait(lambda: isinstance(hand_over(p, d), Deliver), p, d)


class OddHandle:
    """Of a write that has failed; what a method of it does instead is given."""

    def __init__(self, **broken: Callable[[], Any]) -> None:
        self._broken = broken

    def status(self) -> Status:
        return self._broken.get("status", lambda: Status.DRAINED)()  # type: ignore[no-any-return]

    def error(self) -> str | None:
        return self._broken.get("error", lambda: "broken")()  # type: ignore[no-any-return]

    def release(self) -> None:
        self._broken.get("release", lambda: None)()


def stumble() -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "handle",
    [None, OddHandle(error=stumble), OddHandle(release=stumble), OddHandle(error=lambda: 5)],
    ids=["no handle", "error raises", "release raises", "an error that is no text"],
)
def test_a_handle_that_breaks_its_contract_fails_its_attempt_only(
    make: Make, hub: MemoryHub, handle: Any
) -> None:
    odd = [True]

    class Odd(MemoryTransport):
        def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> Any:
            return handle if odd[0] else super().write(peer, ranges, notice)

    p, d = make(Prefill, Odd("odd", hub=hub)), make(Decode)
    attempt = begin(p, d)
    wait(lambda: isinstance(d.outcome(attempt), Fail), p, d)
    wait(lambda: d.freed(attempt), p, d)
    odd[0] = False
    wait(lambda: isinstance(hand_over(p, d), Deliver), p, d)
    wait(lambda: not p.thread.sender.state()["writes_in_flight"], p, d)


def test_what_a_status_raises_is_why_the_write_failed(make: Make, hub: MemoryHub) -> None:
    class Odd(MemoryTransport):
        def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> Any:
            return OddHandle(status=stumble, error=lambda: None)

    p, d = make(Prefill, Odd("odd", hub=hub)), make(Decode)
    attempt = begin(p, d)
    wait(lambda: d.outcome(attempt) is not None, p, d)  # its blocks stay for a lease
    ended = d.outcome(attempt)
    assert isinstance(ended, Fail)
    assert "write 0 failed: RuntimeError: a bug" in ended.reason


def test_an_error_without_a_text_is_told_all_the_same(make: Make, hub: MemoryHub) -> None:
    class NoText(Exception):
        def __str__(self) -> str:
            raise AttributeError("code")

    class Odd(MemoryTransport):
        def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> Any:
            raise NoText

    ended = hand_over(make(Prefill, Odd("odd", hub=hub)), make(Decode))
    assert isinstance(ended, Fail)
    assert "write 0 failed: NoText, whose text raises AttributeError" in ended.reason


def test_timelines_are_bounded() -> None:
    """A peer may repeat a notice for ever, of an attempt that nobody knows."""
    timelines = Timelines()
    for number in range(MAX_TIMELINES + 1):
        timelines.mark(Attempt(bytes(16), number), "landed")
    for _ in range(MAX_MARKS + 1):
        timelines.mark(Attempt(bytes(16), 7), "landed")
    marks = timelines.by_name()
    assert (len(marks), max(map(len, marks.values()))) == (MAX_TIMELINES, MAX_MARKS)


def test_what_raises_in_every_look_does_not_flood_the_log(
    make: Make, hub: MemoryHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "MAX_LOGGED_ERRORS", 3)
    hostile = Hostile("hostile", hub)
    p, d = make(Prefill), make(Decode, hostile)
    hostile.broken = "notices"
    begin(p, d)
    wait(lambda: d.thread.errors > 40, p, d)
    assert caplog.text.count("can't be looked at") <= 4


class Narrow(MemoryTransport):
    """Takes few ranges at once, and short notices."""

    capabilities = dataclasses.replace(
        MemoryTransport.capabilities, max_ranges=3, max_notice_bytes=MIN_NOTICE_BYTES
    )

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        if len(ranges) > self.capabilities.max_ranges or len(notice) > MIN_NOTICE_BYTES:
            raise ValueError(f"{len(ranges)} ranges, notice of {len(notice)} bytes")
        return super().write(peer, ranges, notice)


def test_writes_are_split_by_what_the_transport_takes(make: Make, hub: MemoryHub) -> None:
    p, d = make(Prefill, Narrow("narrow", hub=hub)), make(Decode)
    p.spread = True
    for num_tokens in (2, 18, 40):
        assert isinstance(hand_over(p, d, num_tokens=num_tokens), Deliver)
    writes = p.thread.inspect(lambda: p.worker.counters["writes"])
    assert writes == 1 + 5 + 10, "a digest each"
    assert p.thread.errors == d.thread.errors == 0


def test_a_part_that_cannot_be_posted_fails_its_attempt_while_others_are_in_flight(
    make: Make, hub: MemoryHub
) -> None:
    class Second(MemoryTransport):
        capabilities = dataclasses.replace(MemoryTransport.capabilities, max_ranges=1)
        posted = 0

        def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
            self.posted += 1
            return super().write(peer, ranges, notice) if self.posted != 2 else stumble()

    p, d = make(Prefill, Second("second", hub=hub)), make(Decode)
    p.spread = True
    hub.hold()
    attempt = begin(p, d)
    wait(lambda: d.outcome(attempt) is not None, p, d)
    ended = d.outcome(attempt)
    assert isinstance(ended, Fail)
    assert "write 0 failed: RuntimeError: a bug" in ended.reason
    assert not d.freed(attempt), "the first part may still land"
    hub.release()
    wait(lambda: d.freed(attempt), p, d)
    assert isinstance(hand_over(p, d), Deliver)


@pytest.mark.parametrize(
    ("versions", "code", "said"),
    [((8, 9), "version", "source speaks 4 to 4, target 8 to 9"), ((2, 9), "malformed", "ranks")],
)
def test_a_hello_that_cannot_be_read_is_refused_by_name(
    make: Make, versions: tuple[int, int], code: str, said: str
) -> None:
    """A later release may give it another shape, and must not wait for an answer in vain."""
    p = make(Prefill)
    got: list[Control] = []
    channel = ControlChannel("127.0.0.1", cluster_key=None)
    low, high = versions
    hello = {"type": "hello", "session": b"s" * 16, "min_version": low, "max_version": high}
    for message in ({"type": "cancel"}, {"type": "hello"}, hello | {"seq": 0, "ranks": {}}):
        channel.send(channel.dial(p.channel.address), msgspec.msgpack.encode(message))

    def answered() -> bool:
        got.extend(decode_control(data) for _, data in channel.receive())
        return bool(got)

    wait(answered, p)
    channel.close()
    (refused,) = got
    assert isinstance(refused, Refused)
    assert (refused.session, refused.transfer_id, refused.code) == (b"s" * 16, None, code)
    assert said in refused.message


def test_what_is_no_control_message_fills_no_log(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread_module, "MAX_LOGGED_ERRORS", 3)
    p = make(Prefill)
    channel = ControlChannel("127.0.0.1", cluster_key=None)
    for _ in range(9):
        quoted = msgspec.msgpack.encode({"type": "A" * 1_000_000})
        channel.send(channel.dial(p.channel.address), quoted)
    wait(lambda: p.thread.inspect(lambda: p.thread.junk) == 9, p)
    channel.close()
    told = [line for line in caplog.messages if "can't be read" in line]
    assert len(told) == 3
    assert max(map(len, told)) < 2 * MAX_TEXT


def test_what_is_no_control_message_is_counted_and_dropped(make: Make) -> None:
    p = make(Prefill)
    channel = ControlChannel("127.0.0.1", cluster_key=None)
    failed = msgspec.msgpack.encode({"type": "failed", "session": b"s" * 16, "reason": "why"})
    deep = msgspec.msgpack.encode({"later": 1})[:-1] + b"\x91" * 100_000
    junk = (b"", b"\xc1", b"\x90", failed, failed.replace(b"why", b"\xff" * 3), deep)
    for data in junk:
        channel.send(channel.dial(p.channel.address), data)
    wait(lambda: p.thread.inspect(lambda: p.thread.junk) == len(junk), p)
    channel.close()
    assert p.thread.errors == 0


@pytest.mark.parametrize("cut", [0, 1, 63, 65, 71, 72, 79, 81])
def test_what_is_no_notice_is_counted_and_dropped(make: Make, hub: MemoryHub, cut: int) -> None:
    d, sender = make(Decode), MemoryTransport("sender", hub=hub)
    run = DigestRun(0, 0, 0, 0, bytes(8))
    whole = pack_notice(Landed(Attempt(b"t" * 16, 0), b"s" * 16, 0, 0, 4, 0, 0, digests=(run,)))
    junk = (whole + b"?")[:cut]
    sender.write(sender.connect(d.transport.card()), np.empty((0, 8), np.int64), junk)
    wait(lambda: d.thread.inspect(lambda: d.worker.counters["junk_notices"]) == 1, d)
    assert d.thread.errors == 0


def test_a_fence_that_raises_is_tried_again(make: Make, hub: MemoryHub) -> None:
    hostile = Hostile("hostile", hub)
    p, d = make(Prefill), make(Decode, hostile)
    assert isinstance(hand_over(p, d), Deliver)
    hub.hold()
    attempt = begin(p, d)
    wait(lambda: bool(p.worker._writes) and p.machine.counters.started == 2, p, d)
    hostile.broken = "fence"
    p.close()
    wait(lambda: d.thread.errors > 2, d)
    assert not d.freed(attempt)
    hostile.broken = ""
    wait(lambda: d.freed(attempt), d)


def test_a_source_holds_its_blocks_while_a_transport_cannot_close(
    make: Make, hub: MemoryHub
) -> None:
    """What `close` raises proves nothing: writes may read the blocks still."""
    hostile = Hostile("hostile", hub)
    unfenced = Hostile("unfenced", hub)  # D would end the write
    unfenced.broken = "fence"
    p, d = make(Prefill, hostile), make(Decode, unfenced)
    hub.hold()
    begin(p, d)
    wait(lambda: p.thread.inspect(lambda: len(p.worker._writes)) == 1, p, d)
    hostile.broken = "close"
    p.thread.inspect(lambda: p.worker.handle(PeerGone(d.id), time.monotonic()))
    wait(lambda: p.thread.errors > 2, p, d)
    assert not p.of(Release)
    hostile.broken = ""
    wait(lambda: bool(p.of(Release)), p, d)


def test_a_transport_that_never_closes_keeps_no_session_that_writes_nothing(
    make: Make, hub: MemoryHub
) -> None:
    hostile = Hostile("hostile", hub)
    p, d = make(Prefill, hostile), make(Decode)
    assert isinstance(hand_over(p, d), Deliver)
    hostile.broken = "close"
    p.thread.inspect(lambda: p.worker.handle(PeerGone(d.id), time.monotonic()))
    assert not p.thread.inspect(lambda: p.worker._closing)
    assert not p.machine.sessions_with(d.id)


class Fickle(MemoryTransport):
    """Connects only while it is told to; counts whom it was to fence."""

    connects = True
    fenced = 0

    def connect(self, card: bytes) -> MemoryPeer:
        if not self.connects:
            raise TransportError("can't be reached")
        return super().connect(card)

    def fence(self, peer: Peer) -> bool:
        self.fenced += 1
        return super().fence(peer)


def test_a_peer_that_could_write_is_fenced_though_it_cannot_be_reached_again(
    make: Make, hub: MemoryHub
) -> None:
    transport = Fickle("fickle", hub=hub)
    p, d = make(Prefill), make(Decode, transport)
    p.push = lambda *_: None  # the prompt is never computed
    attempt = begin(p, d)
    wait(lambda: bool(p.of(Engage)), p, d)

    def admit_again() -> None:
        transport.connects = False
        again = OpenPeer(os.urandom(16), p.id, p.identity.ranks, frozenset({(0, 0)}))
        d.worker._do[OpenPeer](again, time.monotonic())

    d.thread.inspect(admit_again)
    wait(lambda: d.freed(attempt), p, d)
    assert transport.fenced, "the link of the session before lets it write still"


@pytest.mark.parametrize("expected", [True, False])
@pytest.mark.parametrize("side", [Prefill, Decode])
def test_a_peer_that_is_gone_already_is_told_in_one_line(
    make: Make, hub: MemoryHub, side: type[Node], expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer's failure is expected and needs no traceback; an error of ours keeps its own."""
    fickle, hostile = Fickle("fickle", hub=hub), Hostile("hostile", hub)
    fickle.connects, hostile.broken = False, "connect"
    transport = fickle if expected else hostile
    p = make(Prefill, transport if side is Prefill else None)
    d = make(Decode, transport if side is Decode else None)
    d.thread.submit(SetMembers(frozenset({p.channel.address})))
    wait(lambda: bool(caplog.records), p, d)
    told, name = caplog.records[0], "d" if side is Prefill else "p"
    assert told.getMessage() == f"can't reach {name}" + ": can't be reached" * expected
    assert bool(told.exc_info) is not expected


def test_blocks_are_not_free_while_they_are_summed(make: Make) -> None:
    """Their sums are kept with them: those of who has them next would be overwritten."""
    p, d = make(Prefill), make(Decode)
    digest, over = d.pool.digest, threading.Event()

    class Slow:
        def __init__(self, ranges: Sequence[BlockRange]) -> None:
            self._found = digest(ranges, keep=True)

        def poll(self) -> list[list[Sums]] | None:
            return self._found.poll() if over.is_set() else None

    d.pool.digest = lambda ranges, keep: Slow(ranges)
    attempt = begin(p, d)
    wait(lambda: d.thread.inspect(lambda: bool(d.worker._checks)), p, d)
    d.thread.submit(CancelTarget(attempt))
    wait(lambda: attempt not in d.thread.inspect(lambda: set(d.machine.live)), p, d)
    assert not d.freed(attempt)
    over.set()
    wait(lambda: d.freed(attempt), d)


def test_a_memory_that_cannot_be_summed_fails_its_attempt_only(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make(Prefill), make(Decode)
    with monkeypatch.context() as patch:
        patch.setattr(d.pool, "digest", lambda *_, **options: 1 / 0)
        ended = hand_over(p, d)
    assert isinstance(ended, Fail)
    assert "ZeroDivisionError" in ended.reason
    assert d.machine.counters.mismatches == 0, "that is no fault of the peer"
    assert isinstance(hand_over(p, d), Deliver)


class Unready:
    """Sums that are not there until they are made to be, or to fail."""

    failed = False
    ready: list[Sums] | None = None

    def poll(self) -> list[Sums] | None:
        if self.failed:
            raise RuntimeError("the sums can't be fetched")
        return self.ready


def stuck(p: Prefill, d: Decode, sums: Unready) -> Attempt:
    """Begin a hand-over whose only report waits for its sums, with its writes planned ahead."""
    attempt = begin(p, d)
    wait(lambda: bool(p.of(Engage)), d)
    blocks = (BlockSpan(0, (1, 2, 3, 4, 5)),)
    p.thread.submit(BlocksReady(attempt, 0, 18, (blocks,), ((0, sums),)))
    assert p.thread.sender is not None
    planned = p.thread.sender._planned
    wait(lambda: p.thread.inspect(lambda: attempt in planned), p, d)
    return attempt


def test_sums_that_fail_end_their_attempt_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d, sums = make(Prefill), make(Decode), Unready()
    with monkeypatch.context() as patch:
        patch.setattr(p, "push", lambda *_: None)
        attempt = stuck(p, d, sums)
    sums.failed = True
    wait(lambda: d.freed(attempt), p, d)
    ended = d.outcome(attempt)
    assert isinstance(ended, Fail)
    assert "the sums can't be fetched" in ended.reason
    wait(lambda: [release.attempt for release in p.of(Release)] == [attempt], p, d)
    assert isinstance(hand_over(p, d), Deliver)
    assert p.thread.errors == 1


class Prepares(MemoryTransport):
    """Prepares writes; `left` are those neither posted nor discarded."""

    def __init__(self, name: str, hub: MemoryHub) -> None:
        super().__init__(name, hub=hub)
        self.left: list[object] = []
        self.discards = True

    def prepare(self, peer: Peer, ranges: Ranges) -> object:
        self.left.append(prepared := (peer, ranges.copy()))
        return prepared

    def post(self, prepared: Any, notice: bytes) -> MemoryHandle:
        self.left = [one for one in self.left if one is not prepared]
        peer, ranges = prepared
        return self.write(peer, ranges, notice)

    def discard(self, prepared: Any) -> None:
        if not self.discards:
            stumble()
        self.left = [one for one in self.left if one is not prepared]


def test_a_prepared_write_that_cannot_be_discarded_keeps_no_blocks(
    make: Make, hub: MemoryHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make(Prefill, prepares := Prepares("prepares", hub)), make(Decode)
    prepares.discards = False
    with monkeypatch.context() as patch:
        patch.setattr(p, "push", lambda *_: None)
        attempt = stuck(p, d, Unready())
    d.thread.submit(CancelTarget(attempt))
    wait(lambda: d.freed(attempt), p, d)
    wait(lambda: [release.attempt for release in p.of(Release)] == [attempt], p, d)
    assert isinstance(hand_over(p, d), Deliver)


def test_what_was_prepared_for_a_write_that_cannot_be_signed_is_discarded(
    make: Make, hub: MemoryHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make(Prefill, prepares := Prepares("prepares", hub)), make(Decode)
    monkeypatch.setattr(p.worker, "_claims", lambda *_: stumble())
    with monkeypatch.context() as patch:
        patch.setattr(p, "push", lambda *_: None)
        attempt = stuck(p, d, sums := Unready())
    assert prepares.left
    sums.ready = [np.zeros((5, 2, 2, HEADS), np.uint64)]
    wait(lambda: d.freed(attempt), p, d)
    assert isinstance(d.outcome(attempt), Fail)
    assert not prepares.left


def test_a_machine_in_disorder_loses_one_event(make: Make) -> None:
    """Starting an attempt twice is a bug of the engine; the other attempts do not pay for it."""
    p, d = make(Prefill), make(Decode)
    attempt = Attempt(os.urandom(16), 0)
    d.begin(attempt, p.channel.address, 18)
    d.begin(attempt, p.channel.address, 18)
    p.announce(attempt, 18)
    wait(lambda: d.outcome(attempt) is not None, p, d)
    assert isinstance(d.outcome(attempt), Deliver)
    assert d.thread.errors == 1


def test_what_is_asked_of_the_thread_raises_at_the_asker(make: Make) -> None:
    d = make(Decode)
    with pytest.raises(ZeroDivisionError):
        d.thread.inspect(lambda: 1 / 0)
    assert d.thread.inspect(lambda: 5) == 5


def test_a_thread_that_hangs_is_unhealthy_and_says_where(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread_module, "ASK_S", 0.0)
    d, gate = make(Decode), threading.Event()
    asker = threading.Thread(target=d.thread.inspect, args=(gate.wait, PATIENCE_S))
    asker.start()
    wait(d.thread.is_unhealthy)
    assert caplog.text.count("the transfer thread hangs in") == 1
    assert "self._cond.wait(" in caplog.text
    gate.set()
    asker.join(PATIENCE_S)
    wait(lambda: not d.thread.is_unhealthy())
    assert isinstance(hand_over(make(Prefill), d), Deliver)


def test_a_thread_that_hangs_when_it_is_closed_keeps_what_it_uses(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its descriptors would be somebody else's by the time that it goes on."""
    monkeypatch.setattr(thread_module, "JOIN_S", 0.05)
    d, gate, shut = make(Decode), threading.Event(), list[str]()
    monkeypatch.setattr(d.transport, "shutdown", lambda: shut.append("shutdown"))
    asker = threading.Thread(target=d.thread.inspect, args=(gate.wait, PATIENCE_S))
    asker.start()
    wait(lambda: not d.thread._inbox)
    d.thread.close()
    assert "left behind" in caplog.text
    assert not shut
    os.eventfd_write(d.thread._inbox_fd, 1)
    gate.set()
    asker.join(PATIENCE_S)
    wait(lambda: not d.thread._thread.is_alive())
    d.thread._stopping.clear()
    d.thread.close()
    assert shut == ["shutdown"]


def test_who_asks_a_thread_that_is_ending_need_not_wait(make: Make) -> None:
    d = make(Decode)
    began, asked, answers = threading.Event(), threading.Event(), list[int]()

    def end() -> None:
        began.set()
        asked.wait(PATIENCE_S)
        raise SystemExit

    def ask_for_the_end() -> None:
        with pytest.raises(SystemExit):
            d.thread.inspect(end, 20.0)

    last = threading.Thread(target=ask_for_the_end)
    second = threading.Thread(target=lambda: answers.append(d.thread.inspect(lambda: 5, 20.0)))
    last.start()
    assert began.wait(PATIENCE_S)
    second.start()
    wait(lambda: bool(d.thread._inbox))
    asked.set()
    second.join(PATIENCE_S)
    last.join(PATIENCE_S)
    assert answers == [5]


def test_lives_of_a_prefill_node_cost_a_decode_node_nothing(make: Make) -> None:
    d = make(Decode, TcpTransport("d"), timers=SHORT)

    def held() -> tuple[int, int]:
        gc.collect()  # what an exception's frames still refer to closes when it is collected
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    first = (0, 0)
    for life in range(8):
        p = make(Prefill, TcpTransport(f"p-{life}"), timers=SHORT)
        d.thread.submit(SetMembers(frozenset({p.channel.address})))
        assert isinstance(hand_over(p, d), Deliver)
        p.close()
        d.thread.submit(SetMembers(frozenset()))
        wait(lambda: not d.thread.inspect(lambda: d.machine.lines), d)
        wait(lambda: not d.thread.inspect(lambda: d.worker.linked), d)
        assert len(d.channel.poller.sockets) == 2, "the channel's own, and what wakes the thread"
        first = held() if life == 1 else first
    # ZeroMQ and TCP close in threads of their own.
    wait(lambda: held()[0] <= first[0] + 3 and held()[1] <= first[1] + 2, d)


def test_sessions_with_one_life_cost_one_connection(make: Make) -> None:
    p = make(Prefill, TcpTransport("p"), timers=SHORT)
    d = make(Decode, TcpTransport("d"), timers=SHORT)
    threads = []
    ended: set[str] = set()

    def is_up_again() -> bool:
        sessions = d.thread.inspect(d.machine.ledger)["sessions"]
        return any(s["state"] == "up" and s["session"] not in ended for s in sessions)

    d.thread.submit(SetMembers(frozenset({p.channel.address})))
    for _ in range(6):
        wait(is_up_again, p, d)
        assert isinstance(hand_over(p, d), Deliver)
        threads.append(threading.active_count())
        ended |= {s["session"] for s in d.thread.inspect(d.machine.ledger)["sessions"]}
        p.thread.inspect(lambda: p.worker.handle(PeerGone(d.id), time.monotonic()))
    assert threads[-1] <= threads[0] + 1, threads


@pytest.mark.slow
def test_two_thousand_sessions_cost_no_more_than_a_few(make: Make) -> None:
    """Ended by either side in turn, each after a hand-over."""
    timers = TransferTimers(resend=0.005, lease=1.0, quarantine_limit=0.5, tombstone=5.0)
    p = make(Prefill, TcpTransport("p"), timers=timers)
    d = make(Decode, TcpTransport("d"), timers=timers)

    def costs() -> tuple[int, int, int]:
        """Files, threads, and MiB."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), threading.active_count(), pages >> 8

    def delivers() -> bool:
        return isinstance(hand_over(p, d), Deliver)

    few = (0, 0, 0)
    d.thread.submit(SetMembers(frozenset({p.channel.address})))
    for number in range(2_000):
        while not delivers():  # until the next session is up
            pass
        for node in (p, d):
            node.actions.clear()
        ending, gone = ((p, d), (d, p))[number % 2]
        ending.thread.inspect(
            lambda e=ending, g=gone: e.worker.handle(PeerGone(g.id), time.monotonic())
        )
        few = costs() if number == 200 else few
    assert delivers()
    assert len(p.thread.inspect(lambda: p.machine.known)) == 1
    most = few[0] + 8, few[1] + 4, few[2] + 32  # TCP closes in threads of its own
    wait(lambda: all(now <= limit for now, limit in zip(costs(), most, strict=True)), p, d)


def test_a_source_that_stops_fails_what_is_left_and_says_that_it_has_drained(make: Make) -> None:
    p, d = make(Prefill), make(Decode)
    p.push = lambda *_: None  # the prompt is never computed
    attempt = begin(p, d)
    wait(lambda: bool(p.of(Engage)), p, d)
    p.close()
    wait(lambda: d.outcome(attempt) is not None and d.freed(attempt), d)
    ended = d.outcome(attempt)
    assert isinstance(ended, Fail)
    assert ended.reason == "the source failed: the node stops"


def test_a_transport_that_cannot_be_shut_down_keeps_nothing_else_open(
    make: Make, hub: MemoryHub
) -> None:
    hostile, other = Hostile("hostile", hub), MemoryTransport("other", hub=hub)
    p = make(Prefill, hostile)
    p.worker.transports = [hostile, other]
    hostile.broken = "shutdown"
    p.close()
    assert other.closed
    assert p.thread.errors == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(p.worker.outbox_fd)
    assert p.thread.channel._context.closed
