"""D's machine, row by row."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from kvbaton.connectors.protocol.events import (
    CancelTarget,
    Crossing,
    Deliver,
    Fail,
    Fence,
    Fenced,
    ForgetPeer,
    HangUp,
    Identity,
    Landed,
    OpenPeer,
    PeerGone,
    Received,
    SendMessage,
    SetMembers,
    Start,
    Tick,
    Unneeded,
    Unquarantine,
    Verified,
    Verify,
)
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.target import Target
from kvbaton.connectors.protocol.target_sessions import MAX_LINES
from kvbaton.errors import LocalProtocolError
from kvbaton.messages.control import (
    PROTOCOL_VERSION,
    Accepted,
    Ack,
    Cancel,
    Complete,
    Control,
    DigestRun,
    Drained,
    Failed,
    Hello,
    NotNeeded,
    Progress,
    Refused,
    Reserve,
    SessionDrained,
    Welcome,
)
from kvbaton.types import Attempt, BlockSpan, ChoiceStart, NodeId
from tests.connectors.machine_rig import (
    CHOICES,
    KEY,
    LINK,
    NAME,
    SHARED,
    TIMERS,
    MachineRig,
    cards,
    layout,
    of,
    sent,
)

ADDRESS = "tcp://p:1"
P = NodeId("p", b"1" * 16)
SPANS = ((BlockSpan(1, (10, 11, 12)),),)
"""Tokens 4 to 16 in blocks of 4."""
OF_P = cards(layout(6), ranks=2)


class Rig(MachineRig):
    """A target with one rank and block size 4; the source, with two, is a script."""

    machine: Target

    def __init__(
        self, pair: Callable[..., Any] = lambda source, target: (SHARED,), **options: Any
    ) -> None:
        super().__init__(pair)
        identity = Identity(NodeId("d", bytes(16)), bytes(32), {}, "tcp", cards(layout(4)))
        self.ids = 0
        self.machine = Target(identity, TIMERS, new_id=self.new_id, **options)
        self.session = b""

    def new_id(self) -> bytes:
        self.ids += 1
        return self.ids.to_bytes(16, "little")

    @override
    def do(self, event: Any) -> list[Any]:
        actions = super().do(event)
        for hello in sent(actions, Hello):
            self.session = hello.session
        return actions

    def hear(self, kind: type, /, session: bytes | None = None, **fields: Any) -> list[Any]:
        self.seq += 1
        named: dict[str, Any] = {"transfer_id": NAME.transfer_id, "attempt": NAME.number}
        fields = ({} if kind in (Welcome, SessionDrained) else named) | fields
        message = kind(session=session or self.session, seq=self.seq, **fields)
        return self.do(Received(LINK, message))

    def refuse_session(self, code: str, session: bytes | None = None) -> list[Any]:
        message = Refused(session=session or self.session, seq=0, code=code, message="why")
        return self.do(Received(LINK, message))

    def start(self, number: int = 0, deadline: float = 0.0) -> list[Any]:
        name = Attempt(NAME.transfer_id, number)
        return self.do(Start(name, ADDRESS, KEY, 16, SPANS, deadline))

    def welcome(self, node: NodeId = P, version: int = PROTOCOL_VERSION) -> list[Any]:
        return self.hear(Welcome, sender=node, version=version, ranks=OF_P)

    def landed(self, write: int, start: int, end: int, rank: int, **fields: Any) -> list[Any]:
        named: dict[str, Any] = {"session": self.session, "attempt": NAME, "target_rank": 0}
        fields = {"write": write, "start": start, "end": end, "source_rank": rank} | fields
        return self.do(Landed(**(named | fields)))

    def land(self, write: int, start: int, end: int, **fields: Any) -> list[Any]:
        """Notices of both source ranks."""
        both = (self.landed(write, start, end, rank, **fields) for rank in range(2))
        return [action for actions in both for action in actions]

    def complete(self, num_writes: int = 2, **fields: Any) -> list[Any]:
        defaults: dict[str, Any] = {"num_tokens": 16, "num_writes": num_writes, "choices": CHOICES}
        return self.hear(Complete, **(defaults | fields))

    def until(self, state: str) -> Rig:
        if state == "unknown":
            self.do(Unneeded(NAME, ADDRESS))
        else:
            self.start()
        if state != "waiting":
            self.welcome()
        if state in ("engaged", "completing", "draining", "ended"):
            self.hear(Accepted)
        if state == "completing":
            self.complete()
        if state in ("draining", "ended"):
            self.do(CancelTarget(NAME))
        if state == "ended":
            self.hear(Drained)
        assert self.machine.record(NAME).state.value == state
        return self


# --- sessions ---


def test_the_first_message_dials() -> None:
    (hello,) = Rig().start()
    assert (hello.address, hello.link) == (ADDRESS, None)
    assert isinstance(hello.message, Hello)
    assert hello.message.over == ()


def test_hello_is_repeated_while_somebody_waits() -> None:
    rig = Rig()
    rig.start()
    actions = rig.wait(TIMERS.progress_deadline - 0.1)
    assert len(sent(actions, Hello)) == 9
    actions = rig.wait(0.2)
    assert of(actions, Fail) == [Fail(NAME, 4, f"nothing was heard of {ADDRESS} in time")]
    assert of(actions, Unquarantine)
    assert of(rig.wait(2 * TIMERS.lease), HangUp) == [HangUp(ADDRESS)]
    assert rig.machine.next_alarm() is None, "nobody waits any more"


def test_welcome_admits_the_peer_before_anything_is_reserved() -> None:
    rig = Rig()
    rig.start()
    rig.start(1)
    admit, *reserves = rig.welcome()
    assert admit == OpenPeer(rig.session, P, OF_P, frozenset(SHARED.shares))
    assert [r.message.attempt for r in reserves] == [0, 1]
    assert all(r.link == LINK for r in reserves)
    assert sent(rig.start(2), Reserve), "the session is up"


def test_messages_name_the_generation_that_the_session_is_with() -> None:
    rig = Rig()
    (hello,) = sent(rig.start(), Hello)
    assert hello.receiver is None
    (reserve,) = sent(rig.welcome(), Reserve)
    (cancel,) = sent(rig.do(CancelTarget(NAME)), Cancel)
    (again, *_) = sent(rig.wait(TIMERS.lease), Hello)
    assert again.session == hello.session
    assert {m.receiver for m in (reserve, cancel, again)} == {P}


def test_a_refused_session_fails_what_waits_at_once() -> None:
    rig = Rig()
    rig.start()
    actions = rig.refuse_session("identity")
    assert of(actions, Fail) == [Fail(NAME, 4, "refused (identity): why")]
    assert of(actions, Unquarantine) == [Unquarantine(NAME)]


def test_a_peer_that_invents_codes_of_refusals_is_counted_under_one() -> None:
    rig = Rig().until("engaged")
    for number in range(5):
        rig.refuse_session(f"code {number}", session=rig.session)
    assert rig.machine.ledger()["totals"]["by_code"] == {"refused": 5}


def test_a_session_that_is_refused_when_it_is_up_fails_its_attempts_at_once() -> None:
    rig = Rig().until("engaged")
    actions = rig.refuse_session("identity")
    assert of(actions, Fail) == [Fail(NAME, 4, "refused (identity): why")]
    assert of(actions, Fence) == [Fence(P)]
    assert not of(actions, Unquarantine)
    assert not sent(actions, Hello), "it would be refused again"
    assert sent(rig.wait(TIMERS.progress_deadline), Hello)


def test_a_welcome_that_does_not_pair_fails_what_waits() -> None:
    rig = Rig()
    rig.start()
    actions = rig.welcome(version=9)
    assert "version 9" in of(actions, Fail)[0].reason
    assert of(actions, Unquarantine)


def test_not_needed_is_sent_once_there_is_a_session() -> None:
    rig = Rig()
    rig.do(Unneeded(NAME, ADDRESS))
    assert len(sent(rig.welcome(), NotNeeded)) == 1
    assert len(sent(rig.do(Unneeded(NAME, ADDRESS)), NotNeeded)) == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("opened", [3.6, 1e5 / 3, 2e6 / 7])
def test_a_session_opens_when_its_alarm_rings_however_times_are_rounded(opened: float) -> None:
    """4.1 - 3.6 is less than 0.5: an alarm that is set again and again would ring for ever."""
    rig = Rig()
    rig.now = opened
    rig.do(Unneeded(NAME, ADDRESS))
    rig.now = opened + 0.1
    assert not sent(rig.refuse_session("unknown_session"), Hello), "too soon for another"
    rig.now = opened + TIMERS.resend
    assert sent(rig.do(Tick()), Hello)


def test_not_needed_is_said_to_so_many_addresses_only() -> None:
    """Without a cluster key a client may name any port of this machine."""
    rig = Rig()
    for port in range(MAX_LINES + 9):
        rig.do(Unneeded(NAME, f"tcp://127.0.0.1:{port + 1}"))
    assert len(rig.machine.lines) == MAX_LINES


def test_a_dead_address_is_not_dialled_for_ever_to_say_not_needed() -> None:
    rig = Rig()
    rig.do(Unneeded(NAME, ADDRESS))
    rig.wait(TIMERS.total - 1)
    assert rig.machine.lines, "it may only be slow"
    actions = rig.wait(TIMERS.progress_deadline + 1)
    assert of(actions, HangUp) == [HangUp(ADDRESS)]
    assert not rig.machine.lines
    assert not rig.machine.known
    assert rig.machine.next_alarm() is None


def drained(rig: Rig, *over: bytes, session: bytes | None = None) -> list[Any]:
    return rig.hear(SessionDrained, session, over=over)


def test_a_session_that_the_peer_forgot_fails_its_attempts_and_the_next_one_asks() -> None:
    rig = Rig().until("engaged")
    old = rig.session
    rig.wait(1.0)
    actions = rig.refuse_session("unknown_session")
    assert of(actions, Fail)
    assert not of(actions, Unquarantine)
    (hello,) = sent(actions, Hello)
    assert hello.session != old
    assert hello.over == (old,)
    assert not of(rig.welcome(), Unquarantine), "a Welcome promises nothing"
    assert sent(rig.start(1), Reserve), "and the new session is in use at once"
    rig.hear(Accepted, attempt=1)
    assert sent(rig.wait(TIMERS.resend), Hello)[0].over == (old,), "it asks again"
    assert of(drained(rig, old), Unquarantine) == [Unquarantine(NAME)]
    assert all(not hello.over for hello in sent(rig.wait(10.0), Hello))


def test_a_session_that_ends_with_blocks_in_quarantine_is_fenced_before_the_next() -> None:
    """A D that was stopped for long: P lives, and can't say what of its writes has landed."""
    rig = Rig().until("engaged")
    rig.now += 3 * TIMERS.lease
    actions = rig.refuse_session("unknown_session")
    asked = [a for a in actions if isinstance(a, Fence) or sent([a], Hello)]
    assert [type(a) for a in asked] == [Fence, SendMessage], "it costs nobody anything yet"
    assert of(rig.do(Fenced(P)), Unquarantine) == [Unquarantine(NAME)]
    rig.start(1)
    assert [message.attempt for message in sent(rig.welcome(), Reserve)] == [1]
    rig.wait(1.0)
    assert of(rig.refuse_session("unknown_session"), Fence) == [Fence(P)]
    rig.welcome()
    assert sent(rig.start(2), Reserve), "a fence that did not hold delays nothing"
    assert not of(rig.wait(2.0), Fence)


def test_sessions_that_end_as_soon_as_they_are_up_are_not_opened_in_a_circle() -> None:
    rig = Rig()
    rig.do(SetMembers(frozenset({ADDRESS})))
    rig.welcome()
    assert not sent(rig.do(PeerGone(P)), Hello)
    rig.do(SetMembers(frozenset({ADDRESS})))
    assert len(sent(rig.wait(TIMERS.resend), Hello)) == 1


def test_only_the_generation_itself_says_that_its_sessions_have_drained() -> None:
    rig = Rig().until("engaged")
    old = rig.session
    rig.wait(1.0)
    rig.refuse_session("unknown_session")
    rig.welcome(NodeId("p", b"2" * 16))
    assert not of(drained(rig, old), Unquarantine)
    rig = Rig().until("engaged")
    assert not of(drained(rig, rig.session), Unquarantine), "and not of one that is up"


def test_another_generation_at_an_address_has_the_old_one_fenced() -> None:
    rig = Rig().until("engaged")
    rig.wait(1.0)
    rig.refuse_session("unknown_session")
    actions = rig.welcome(NodeId("p", b"2" * 16))
    assert not of(actions, Unquarantine)
    assert of(actions, Fence) == [Fence(P)]
    assert len(of(rig.wait(4 * TIMERS.resend), Fence)) == 4
    assert of(rig.do(Fenced(P)), Unquarantine) == [Unquarantine(NAME)]
    assert not of(rig.wait(1.0), Fence)


def test_another_generation_may_answer_in_a_session_that_is_up() -> None:
    rig = Rig().until("engaged")
    rig.wait(1.0)
    actions = rig.welcome(NodeId("p", b"2" * 16))
    assert of(actions, Fail)
    assert of(actions, Fence) == [Fence(P)]
    assert sent(actions, Hello)


def test_a_peer_that_is_gone_is_fenced() -> None:
    rig = Rig().until("engaged")
    actions = rig.do(PeerGone(P))
    assert of(actions, Fail)
    assert of(actions, Fence) == [Fence(P)]
    assert not of(actions, Unquarantine)
    assert rig.do(Fenced(NodeId("p", b"9" * 16))) == []
    actions = rig.do(Fenced(P))
    assert of(actions, Unquarantine)
    assert of(actions, ForgetPeer) == [ForgetPeer(P)]
    assert of(actions, HangUp) == [HangUp(ADDRESS)], "it is no member, and gone"
    assert sent(rig.start(1), Hello)[0].over == (), "what was fenced needs no promise"


def test_alarms_that_ring_together_ask_for_one_fence() -> None:
    """As those do that a stopped process has slept through."""
    rig = Rig().until("draining")
    while rig.now < TIMERS.quarantine_limit - 1:
        rig.wait(1.0)
        rig.hear(Progress, state="draining", tokens_pushed=8)
    rig.now += 0.9
    assert of(rig.do(PeerGone(P)), Fence) == [Fence(P)]
    rig.now += TIMERS.resend
    assert of(rig.do(Tick()), Fence) == [Fence(P)]


def test_a_session_greeted_before_a_fence_held_gives_way_to_another() -> None:
    rig = Rig().until("engaged")
    rig.do(PeerGone(P))
    rig.start(1)
    assert sent(rig.wait(TIMERS.resend), Hello)
    early = rig.session
    actions = rig.do(Fenced(P)) + rig.wait(2 * TIMERS.resend)
    assert of(actions, Unquarantine) == [Unquarantine(NAME)]
    assert rig.session != early, "the fence may have cut what P connected for it"
    late = rig.hear(Welcome, early, sender=P, version=PROTOCOL_VERSION, ranks=OF_P)
    assert not of(late, OpenPeer)
    assert [message.attempt for message in sent(rig.welcome(), Reserve)] == [1]


def test_a_peer_that_answers_while_it_is_fenced_is_asked_for_another_session() -> None:
    rig = Rig().until("engaged")
    rig.do(PeerGone(P))
    assert of(rig.wait(TIMERS.resend), Fence)
    early = rig.session
    rig.start(1)
    actions = rig.welcome() + rig.wait(2 * TIMERS.resend)
    assert not of(actions, OpenPeer), "the fence may have held for some of the session's ranks"
    assert not of(actions, Fence), "it lives, and answers for itself"
    assert rig.session != early
    assert [message.attempt for message in sent(rig.welcome(), Reserve)] == [1]
    rig.hear(Accepted, attempt=1)
    assert not of(rig.wait(2.0), Fence)
    assert rig.machine.ledger()["attempts"] == {"draining": 1, "engaged": 1}
    assert of(rig.hear(SessionDrained, over=(b"\1" + bytes(15),)), Unquarantine)


def test_a_drained_of_a_session_that_is_over_counts() -> None:
    rig = Rig().until("engaged")
    old = rig.session
    rig.do(PeerGone(P))
    assert of(rig.hear(Drained, old), Unquarantine)


def test_a_silent_peer_is_fenced_and_one_that_answers_is_not() -> None:
    rig = Rig().until("draining")
    actions = rig.wait(TIMERS.lease - 1)
    assert len(sent(actions, Cancel)) == 38
    rig.hear(Progress, state="draining", tokens_pushed=0)
    assert not of(rig.wait(TIMERS.lease - 1), Fence)
    assert of(rig.wait(TIMERS.lease), Fence)
    assert of(rig.do(Fenced(P)), Unquarantine)


def test_nothing_is_reserved_at_an_address_that_has_not_drained_a_share_of_the_pool() -> None:
    rig = Rig().until("draining")
    for number in range(1, 9):
        rig.start(number)
        rig.do(CancelTarget(Attempt(NAME.transfer_id, number)))
    assert not of(rig.start(9), Fail)  # what it was asked just now it can't have answered
    rig.wait(TIMERS.resend)
    (fail,) = of(rig.start(10), Fail)
    assert "leaves 27 blocks in quarantine" in fail.reason


def test_a_few_quarantined_blocks_make_no_node_unhealthy_a_share_of_the_pool_does() -> None:
    rig = Rig().until("draining")
    rig.wait(3 * TIMERS.quarantine_limit)
    assert rig.machine.unhealthy == ""
    rig.do(PeerGone(P))
    for number in range(1, 9):
        rig.start(number)
    rig.welcome()
    rig.wait(TIMERS.resend)
    rig.welcome()
    for number in range(1, 9):
        rig.do(CancelTarget(Attempt(NAME.transfer_id, number)))
    rig.wait(TIMERS.quarantine_limit - 1)
    assert rig.machine.unhealthy == ""
    rig.wait(2.0)
    assert rig.machine.unhealthy.startswith("27 of 100 blocks")
    assert rig.machine.unhealthy.endswith("because of p")
    (fail,) = of(rig.start(9), Fail)
    assert "leaves 27 blocks in quarantine" in fail.reason
    rig.do(PeerGone(P))
    rig.do(Fenced(P))
    assert rig.machine.unhealthy == ""


def test_a_session_is_kept_alive_and_ends_when_nothing_is_heard() -> None:
    rig = Rig()
    rig.do(SetMembers(frozenset({ADDRESS})))
    rig.welcome()
    hellos = []
    for _ in range(20):
        hellos += sent(rig.wait(10.0), Hello)
        assert {hello.session for hello in hellos} == {rig.session}
        rig.welcome()
    assert len(hellos) == 40
    actions = rig.wait(TIMERS.lease + 5)
    assert of(actions, ForgetPeer) == [ForgetPeer(P)]
    assert sent(actions, Hello)[-1].session != hellos[0].session


def test_a_member_that_parts_is_forgotten_when_nothing_needs_it() -> None:
    rig = Rig()
    rig.do(SetMembers(frozenset({ADDRESS})))
    rig.welcome()
    assert not of(rig.wait(0.1), HangUp)
    actions = rig.do(SetMembers(frozenset()))
    assert actions == [ForgetPeer(P), HangUp(ADDRESS)]
    assert rig.machine.next_alarm() is None
    rig.do(SetMembers(frozenset({ADDRESS})))
    rig.welcome()
    rig.start()
    assert rig.do(SetMembers(frozenset())) == []
    rig.do(CancelTarget(NAME))
    assert rig.hear(Drained) == [Unquarantine(NAME), ForgetPeer(P), HangUp(ADDRESS)]


def test_a_member_that_parts_and_then_refuses_is_forgotten_with_its_alarm() -> None:
    rig = Rig()
    rig.do(SetMembers(frozenset({ADDRESS})))
    rig.start()
    assert rig.do(SetMembers(frozenset())) == [], "somebody waits for it"
    actions = rig.refuse_session("identity")
    assert of(actions, Fail) == [Fail(NAME, 4, "refused (identity): why")]
    assert of(actions, HangUp) == [HangUp(ADDRESS)]
    assert rig.machine.next_alarm() is None
    assert rig.wait(2 * TIMERS.lease) == []


def test_lives_of_a_node_leave_nothing_behind() -> None:
    rig = Rig()
    for life in range(50):
        rig.do(SetMembers(frozenset({f"tcp://p:{life}"})))
        node = NodeId("p", life.to_bytes(16, "little"))
        rig.welcome(node)
        rig.do(PeerGone(node))
        rig.do(SetMembers(frozenset()))
    machine = rig.machine
    assert (machine.lines, machine.known, machine.fencing()) == ({}, {}, [])
    assert rig.machine.next_alarm() is None


def test_addresses_that_nobody_vouches_for_are_bounded() -> None:
    rig = Rig()
    for number in range(MAX_LINES):
        rig.do(Start(Attempt(NAME.transfer_id, number), f"tcp://x:{number}", KEY, 16, SPANS))
    fail, free = rig.start(MAX_LINES)
    assert "too many addresses" in fail.reason
    assert isinstance(free, Unquarantine)


OTHER = "tcp://p.example:1"


def ask_by(rig: Rig, address: str, number: int) -> list[Any]:
    return rig.do(Start(Attempt(NAME.transfer_id, number), address, KEY, 16, SPANS))


def known_by_two() -> Rig:
    """P answers at a second address, after it has taken a `Reserve` that came by the first."""
    rig = Rig().until("engaged")
    rig.wait(1.0)
    first = rig.session
    (hello,) = sent(ask_by(rig, OTHER, 1), Hello)
    rig.refuse_session("unknown_session", first)  # by P, which has one session with us
    rig.session = hello.session
    rig.welcome()
    return rig


def test_one_generation_is_asked_in_one_session_whatever_its_addresses() -> None:
    rig = known_by_two()
    assert len({hello.session for hello in sent(rig.wait(TIMERS.lease / 2), Hello)}) == 1
    for number, address in ((2, ADDRESS), (3, OTHER)):
        assert sent(ask_by(rig, address, number), Reserve), f"{address} has its session"
    assert list(rig.machine.lines) == [OTHER]


def test_what_was_reserved_by_the_other_address_drains_in_the_one_session() -> None:
    rig = known_by_two()
    assert [r.name for r in rig.machine.live.values() if r.state.value == "draining"] == [NAME]
    (first,) = [s.id for s in rig.machine.known.values() if s.over]
    assert first in sent(rig.wait(TIMERS.resend), Hello)[-1].over
    freed = rig.hear(SessionDrained, over=(first,))
    assert of(freed, Unquarantine) == [Unquarantine(NAME)]


def test_what_waits_at_the_other_address_is_asked_for_in_the_one_session() -> None:
    rig = Rig().until("engaged")
    rig.wait(1.0)
    rig.refuse_session("unknown_session")
    waiting = rig.start(1)
    assert not sent(waiting, Reserve)
    ask_by(rig, OTHER, 2)
    up = rig.welcome()
    assert {reserve.attempt for reserve in sent(up, Reserve)} == {1, 2}
    assert of(up, HangUp) == [HangUp(ADDRESS)]


@pytest.mark.parametrize("ends", ["it is silent", "another life answers", "it is refused"])
def test_an_address_that_leads_elsewhere_is_dialled_again(ends: str) -> None:
    rig = known_by_two()
    rig.refuse_session("unknown_session")
    if ends == "it is silent":
        rig.wait(2 * TIMERS.resend)
    elif ends == "it is refused":
        rig.wait(TIMERS.resend)
        rig.refuse_session("identity")
    else:
        rig.wait(TIMERS.resend)
        rig.welcome(NodeId("p", b"2" * 16))
    (dialled,) = [m.address for m in of(ask_by(rig, ADDRESS, 4), SendMessage) if m.address]
    assert dialled == ADDRESS


# --- delivery ---


def test_delivery_needs_complete_and_all_notices_and_all_digests() -> None:
    rig = Rig().until("engaged")
    accepted = rig.now
    runs = tuple(DigestRun(rank, 0, 0, 0, bytes(8)) for rank in range(2))
    rig.now = accepted + 0.1
    assert rig.landed(0, 4, 12, 0, digests=runs[:1]) == []
    (verify,) = rig.landed(0, 4, 12, 1, digests=runs[1:])
    assert [table.tolist() for table in verify.target] == [[-1, 10, 11, 12]]
    assert verify == Verify(NAME, 0, 4, 12, (SHARED,), verify.target, (4,), runs)
    assert rig.do(Verified(NAME, 0)) == []
    rig.now = accepted + 0.15
    assert rig.complete(cached_tokens=5) == []
    rig.now = accepted + 0.2
    assert of(rig.land(1, 12, 16), Verify)
    rig.now = accepted + 0.3
    deliver, ack, free = rig.do(Verified(NAME, 1))
    after = {"accepted": 0, "first_landed": 0.1, "landed": 0.2, "verified": 0.3}
    times = tuple((name, accepted + seconds) for name, seconds in after.items())
    rest = Crossing(ADDRESS, False, 4, accepted + 0.15, accepted + 0.3)
    assert deliver == Deliver(NAME, CHOICES, 5, 16, times, rest)
    assert ack.message.verdict == "ok"
    assert free == Unquarantine(NAME)
    assert rig.machine.counters.completed == 1
    assert sent(rig.complete(), Ack)[0].verdict == "ok", "P may not have heard it"


def test_a_source_that_lives_and_never_drains_is_fenced_in_the_end() -> None:
    rig = Rig().until("engaged")
    rig.hear(Failed, reason="a write failed")
    also = Attempt(NAME.transfer_id, 2)
    rig.start(2)
    rig.do(CancelTarget(also))
    asked: list[Any] = []
    while rig.now < TIMERS.quarantine_limit:
        assert not of(asked, Fence), rig.now
        asked = [*rig.wait(1.0), *rig.hear(Progress, state="draining", tokens_pushed=8)]
    asked += rig.wait(TIMERS.lease / 4)
    assert of(asked, Fence) == [Fence(P)]
    assert rig.machine.record(NAME).state.value == "draining", "the fence did not hold"
    before = rig.session
    other = Attempt(NAME.transfer_id, 1)
    rig.start(1)
    asked = rig.do(Fenced(P))
    assert {free.attempt for free in of(asked, Unquarantine)} == {NAME, also, other}
    assert [fail.attempt for fail in of(asked, Fail)] == [other]
    assert rig.machine.ledger()["quarantined"] == []
    rig.wait(TIMERS.resend)
    assert rig.session != before, "what P had connected for that one is cut"


def test_a_notice_of_ranks_that_share_nothing_is_not_waited_for() -> None:
    """No source of ours sends it: who does has a defect, and the prompt is right all the same."""
    rig = Rig(pair=lambda a, b: (SimpleNamespace(shares=((0, 0),)),)).until("engaged")
    assert rig.landed(0, 4, 12, 1) == []
    assert of(rig.landed(0, 4, 12, 0), Verify)


def test_writes_that_do_not_make_up_the_prompt_are_not_delivered() -> None:
    rig = Rig().until("completing")
    for write, start, end in ((0, 4, 8), (1, 12, 16)):
        rig.land(write, start, end)
    rig.do(Verified(NAME, 0))
    actions = rig.do(Verified(NAME, 1))
    assert not of(actions, Deliver)
    assert of(actions, Fail)[0].valid_through == 8


def test_a_mismatch_fails_with_what_is_good_and_is_told_until_drained() -> None:
    rig = Rig().until("engaged")
    for write, start, end in ((0, 4, 8), (1, 8, 12)):
        rig.land(write, start, end)
    rig.do(Verified(NAME, 0))
    actions = rig.do(Verified(NAME, 1, ((8, 12),)))
    assert of(actions, Fail)[0].valid_through == 8
    assert not of(actions, Unquarantine)
    for told in (actions, rig.wait(TIMERS.resend)):
        (ack,) = sent(told, Ack)
        assert (ack.verdict, ack.bad) == ("mismatch", ((8, 12),))
        assert sent(told, Cancel)
    assert of(rig.hear(Drained), Unquarantine)


def test_a_peer_with_several_mismatches_is_put_out_for_a_while() -> None:
    rig = Rig()
    for number in range(3):
        rig.start(number)
        if number == 0:
            rig.welcome()
        rig.land(0, 4, 16, attempt=Attempt(NAME.transfer_id, number))
        rig.do(Verified(Attempt(NAME.transfer_id, number), 0, ((4, 16),)))
    actions = rig.start(3)
    assert "put out" in of(actions, Fail)[0].reason
    assert of(actions, Unquarantine)
    rig.now += TIMERS.quarantine_limit + 1
    assert sent(rig.start(4), Reserve)


def test_a_cap_on_blocks_per_peer() -> None:
    rig = Rig(max_blocks_per_peer=6)
    rig.start(0)
    rig.start(1)
    fail, _ = rig.start(2)
    assert "9 blocks" in fail.reason
    rig.do(CancelTarget(NAME))
    assert not of(rig.start(3), Fail)


def test_a_source_whose_hand_over_has_no_room_is_told_not_to_compute() -> None:
    rig = Rig(max_blocks_per_peer=6)
    for number in range(2):
        rig.start(number)
    rig.welcome()
    actions = rig.start(2)
    assert of(actions, Fail)
    assert of(actions, Unquarantine)
    (spared,) = sent(actions, NotNeeded)
    assert spared.attempt == 2


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("start"), st.integers(0, 1)),
            st.tuples(st.just("welcome"), st.integers(0, 1)),
            st.tuples(st.just("cancel"), st.integers(0, 30)),
            st.tuples(st.just("drained"), st.integers(0, 30)),
            st.tuples(st.just("wait"), st.integers(1, 3)),
        ),
        max_size=30,
    )
)
def test_no_order_of_events_reserves_more_than_the_cap(events: list[tuple[str, int]]) -> None:
    """One source under two addresses, which are known to be its own once it has answered."""
    rig, addresses, cap = Rig(max_blocks_per_peer=6), (ADDRESS, "tcp://p.example:1"), 6
    held: dict[Attempt, bool] = {}  # attempts that have blocks, and whether P was told of them
    hellos: dict[str, bytes] = {}
    where: dict[Attempt, bytes] = {}

    def take(actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, SendMessage) and isinstance(action.message, Hello):
                if action.address is not None:
                    hellos[action.address] = action.message.session
        for reserve in sent(actions, Reserve):
            name = Attempt(reserve.transfer_id, reserve.attempt)
            held[name], where[name] = True, reserve.session
        for free in of(actions, Unquarantine):
            held.pop(free.attempt, None)
        assert 3 * sum(held.values()) <= cap, "every attempt has 3 blocks"

    for number, (kind, which) in enumerate(events):
        names = list(held)
        if kind == "start":
            name = Attempt(NAME.transfer_id, number)
            held[name] = False
            take(rig.do(Start(name, addresses[which], KEY, 16, SPANS, 0.0)))
        elif kind == "wait":
            take(rig.wait(which * TIMERS.resend))
        elif kind == "welcome" and addresses[which] in hellos:
            rig.session = hellos[addresses[which]]
            take(rig.welcome())
        elif kind == "cancel" and names:
            take(rig.do(CancelTarget(names[which % len(names)])))
        elif kind == "drained" and (told := [name for name in names if held[name]]):
            name = told[which % len(told)]
            take(rig.hear(Drained, session=where[name], attempt=name.number))


# --- junk ---


@pytest.mark.parametrize(
    "fields",
    [
        {"write": 12, "start": 4, "end": 8},
        {"write": 0, "start": 0, "end": 8},
        {"write": 0, "start": 8, "end": 8},
        {"write": 0, "start": 4, "end": 17},
        {"write": 0, "start": 8, "end": 12},
        {"write": 1, "start": 4, "end": 8},
        {"write": 0, "start": 4, "end": 8, "digests": (DigestRun(0, 0, 1, 0, bytes(8)),)},
        {"write": 0, "start": 4, "end": 8, "digests": (DigestRun(0, 0, 0, 17, bytes(8)),)},
        {"write": 0, "start": 4, "end": 8, "digests": (DigestRun(0, 0, 0, 1, bytes(8 * 25)),)},
        {"write": 0, "start": 4, "end": 8, "digests": (DigestRun(0, 0, 0, 1, b""),) * 25},
    ],
)
def test_a_nonsensical_notice_fails_the_attempt(fields: dict[str, Any]) -> None:
    actions = Rig().until("engaged").landed(rank=0, **fields)
    assert "nonsense" in of(actions, Fail)[0].reason
    assert sent(actions, Cancel)


@pytest.mark.parametrize(
    "fields", [{"num_tokens": 15}, {"num_writes": 0}, {"num_writes": 13}, {"choices": ()}]
)
def test_a_nonsensical_complete_fails_the_attempt(fields: dict[str, Any]) -> None:
    actions = Rig().until("engaged").complete(**fields)
    assert "nonsense" in of(actions, Fail)[0].reason


def test_a_write_may_not_change() -> None:
    rig = Rig().until("engaged")
    rig.landed(0, 4, 8, 0)
    assert rig.landed(0, 4, 8, 0) == [], "and the same notice counts once"
    assert of(rig.landed(0, 4, 12, 1), Fail)


def test_a_share_has_landed_when_all_its_parts_have() -> None:
    rig = Rig().until("engaged")
    run = DigestRun(0, 0, 0, 0, bytes(8))
    rig.landed(0, 4, 16, 1)
    assert rig.landed(0, 4, 16, 0, part=1, parts=3) == []
    assert rig.landed(0, 4, 16, 0, part=1, parts=3) == []
    assert rig.landed(0, 4, 16, 0, part=0, parts=3, digests=(run,)) == []
    (verify,) = rig.landed(0, 4, 16, 0, part=2, parts=3)
    assert verify.digests == (run,)


def test_notices_claim_no_more_than_was_reserved() -> None:
    """Of 12 tokens two ranks may claim a value each, however they say it."""
    rig = Rig().until("engaged")
    run = (DigestRun(0, 0, 0, 1, bytes(16)),)
    for part in range(12):
        assert rig.landed(0, 4, 16, 0, part=part, parts=99, digests=run) == []
    assert of(rig.landed(0, 4, 16, 0, part=12, parts=99, digests=run), Fail)


def test_complete_may_not_change() -> None:
    rig = Rig().until("completing")
    assert rig.complete() == []
    assert of(rig.complete(choices=(ChoiceStart(8),)), Fail)


def test_strange_notices_count_for_nothing() -> None:
    rig = Rig().until("engaged")
    rig.landed(0, 4, 16, 0)
    junk: list[dict[str, Any]] = [
        {"session": b"x" * 16},
        {"rank": 2},
        {"target_rank": 1},
        {"attempt": Attempt(b"z" * 16, 0)},
    ]
    for fields in junk:
        assert rig.landed(0, 4, 16, **({"rank": 1} | fields)) == []
    assert of(rig.landed(0, 4, 16, 1), Verify)


# --- the end ---


@pytest.mark.parametrize("state", ["reserved", "engaged", "completing"])
def test_the_progress_deadline_fails_but_frees_nothing(state: str) -> None:
    rig = Rig().until(state)
    actions = rig.wait(TIMERS.progress_deadline)
    assert of(actions, Fail)
    assert sent(actions, Cancel)
    assert not of(actions, Unquarantine)


def test_progress_moves_the_deadline_and_repetitions_do_not() -> None:
    rig = Rig().until("completing")
    rig.wait(4.0)
    rig.hear(Progress, state="writing", tokens_pushed=4)
    rig.wait(4.0)
    rig.complete()
    rig.hear(Accepted)
    assert of(rig.wait(1.0), Fail)


def test_the_hard_limit_holds_whatever_progress_says() -> None:
    rig = Rig()
    rig.start(deadline=10.0)
    rig.welcome()
    actions = []
    for _ in range(11):
        actions += rig.wait(1.0)
        rig.hear(Progress, state="computing", tokens_pushed=0)
    assert of(actions, Fail)


def test_an_unanswered_reserve_is_repeated_and_an_accepted_one_renews_the_lease() -> None:
    rig = Rig().until("reserved")
    (again,) = sent(rig.wait(TIMERS.resend), Reserve)
    assert again.remaining_ms == 299_500
    rig.hear(Accepted)
    reserves = []
    for _ in range(int(TIMERS.lease)):
        rig.hear(Progress, state="computing", tokens_pushed=0)
        reserves += sent(rig.wait(1.0), Reserve)
    assert len(reserves) == 4


@pytest.mark.parametrize(
    ("kind", "fields", "said", "answered"),
    [
        (Failed, {"reason": "no"}, "no", False),
        (Failed, {"reason": "gone", "engine": True}, "gone", True),
        (Refused, {"code": "prompt", "message": "other"}, "prompt", True),
    ],
)
@pytest.mark.parametrize("state", ["reserved", "engaged", "completing"])
def test_a_peer_that_gives_up_is_still_asked_to_drain(
    state: str, kind: type, fields: dict[str, Any], said: str, answered: bool
) -> None:
    rig = Rig().until(state)
    actions = rig.hear(kind, **fields)
    (fail,) = of(actions, Fail)
    assert said in fail.reason
    assert fail.answered == answered
    assert sent(actions, Cancel)
    assert not of(actions, Unquarantine)
    assert of(rig.hear(Drained), Unquarantine)


@pytest.mark.parametrize("state", ["reserved", "engaged", "completing"])
def test_a_peer_that_gives_up_and_has_drained_needs_no_asking(state: str) -> None:
    actions = Rig().until(state).hear(Drained)
    assert "unasked" in of(actions, Fail)[0].reason
    assert of(actions, Unquarantine) == [Unquarantine(NAME)]


def test_cancel_before_the_session_frees_at_once() -> None:
    rig = Rig().until("waiting")
    assert rig.do(CancelTarget(NAME)) == [Unquarantine(NAME)]
    assert not sent(rig.welcome(), Reserve)


@pytest.mark.parametrize("state", ["reserved", "engaged", "completing"])
def test_cancel_is_repeated_until_drained(state: str) -> None:
    rig = Rig().until(state)
    assert sent(rig.do(CancelTarget(NAME)), Cancel)
    actions = rig.wait(5 * TIMERS.resend)
    assert len(sent(actions, Cancel)) == 5
    assert not of(actions, Unquarantine)
    assert not of(actions, Fail)
    assert rig.hear(Drained) == [Unquarantine(NAME)]
    assert rig.machine.counters.cancelled == 1


def test_an_answer_in_the_session_of_another_peer_moves_nothing() -> None:
    rig = Rig()
    rig.start()
    rig.welcome()
    session = rig.session
    rig.do(SetMembers(frozenset({"tcp://q:1"})))
    rig.welcome(NodeId("q", b"1" * 16))
    assert rig.hear(Failed, reason="it is not mine") == []
    assert of(rig.hear(Failed, session=session, reason="it is mine"), Fail)


def test_late_messages_are_answered() -> None:
    rig = Rig().until("draining")
    assert sent(rig.complete(), Cancel)
    rig.hear(Drained)
    assert sent(rig.complete(), Cancel)
    stranger: dict[str, Any] = {"transfer_id": b"z" * 16}
    assert sent(rig.complete(**stranger), Cancel)
    assert sent(rig.hear(Progress, state="", tokens_pushed=0, **stranger), Cancel)


def test_a_used_name_is_refused_and_a_live_one_is_a_bug() -> None:
    rig = Rig().until("ended")
    fail, free = rig.start()
    assert "ended already" in fail.reason
    assert free == Unquarantine(NAME)
    with pytest.raises(LocalProtocolError, match="twice"):
        Rig().until("engaged").start()


MESSAGES: list[tuple[type, dict[str, Any]]] = [
    (Accepted, {}),
    (Refused, {"code": "conflict", "message": ""}),
    (Progress, {"state": "", "tokens_pushed": 0}),
    (Complete, {"num_tokens": 16, "num_writes": 2, "choices": CHOICES}),
    (Failed, {"reason": ""}),
    (Drained, {}),
    (Cancel, {}),
]
STATES = ["unknown", "waiting", "reserved", "engaged", "completing", "draining", "ended"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("kind", "fields"), MESSAGES)
def test_every_message_in_every_state_leads_to_one_orderly_end(
    state: str, kind: type, fields: dict[str, Any]
) -> None:
    rig = Rig().until(state)
    actions = rig.hear(kind, **fields)
    actions += rig.do(CancelTarget(NAME))
    actions += rig.hear(Drained)
    expected = 0 if state in ("unknown", "ended") else 1
    assert len(of(actions, Unquarantine)) == expected
    assert rig.machine.ledger()["quarantined_blocks"] == 0
    counters = rig.machine.counters
    assert counters.started == counters.completed + counters.failed + counters.cancelled


small = st.integers(0, 20)
names = {"session": st.just((1).to_bytes(16, "little")), "seq": st.integers(0, 1000)}
named = names | {"transfer_id": st.sampled_from([NAME.transfer_id, b"z" * 16]), "attempt": small}
spans = st.lists(
    st.lists(st.builds(BlockSpan, small, st.lists(small, max_size=4).map(tuple)), max_size=3).map(
        tuple
    ),
    max_size=2,
).map(tuple)
junk: st.SearchStrategy[Control] = st.one_of(
    st.builds(Accepted, **named),
    st.builds(Refused, **(named | {"code": st.text(max_size=3), "message": st.just("")})),
    st.builds(Progress, **named, state=st.text(max_size=3), tokens_pushed=small),
    st.builds(
        Complete,
        **named,
        num_tokens=small,
        num_writes=small,
        choices=st.sampled_from([(), CHOICES]),
        cached_tokens=small,
    ),
    st.builds(Failed, **named, reason=st.just("")),
    st.builds(Drained, **named),
    st.builds(Cancel, **named),
    st.builds(NotNeeded, **named),
    st.builds(
        Ack,
        **named,
        verdict=st.sampled_from(["ok", "mismatch", ""]),
        bad=st.lists(st.tuples(small, small), max_size=2).map(tuple),
    ),
    st.builds(
        Reserve,
        **named,
        prompt_key=st.just(KEY),
        num_tokens=small,
        spans=spans,
        remaining_ms=small,
        keys=st.sampled_from([b"", KEY, 2 * KEY, 3 * KEY, bytes(7)]),
    ),
    st.builds(
        Hello,
        **names,
        sender=st.just(P),
        min_version=st.just(2),
        max_version=small,
        identity=st.just(bytes(32)),
        identity_record=st.just({}),
        transport=st.just("tcp"),
        ranks=st.sampled_from([cards(layout(4)), cards(layout(0)), ()]),
    ),
    st.builds(
        SessionDrained, **names, over=st.lists(st.binary(min_size=16, max_size=16)).map(tuple)
    ),
    st.builds(
        Welcome,
        **names,
        sender=st.just(P),
        version=small,
        ranks=st.sampled_from([cards(layout(4)), cards(layout(0)), ()]),
    ),
)


@given(st.lists(junk, max_size=30))
@settings(max_examples=150, deadline=None)
def test_no_message_of_a_peer_breaks_a_machine(messages: list[Control]) -> None:
    target = Rig()
    target.start()
    source = MachineRig(pair=lambda source, target: ())
    source.machine = Source(target.machine.identity, TIMERS)
    for message in messages:
        target.do(Received(LINK, message))
        source.do(Received(LINK, message))


def test_a_session_may_be_opened_before_it_is_needed() -> None:
    rig = Rig()
    [hello] = sent(rig.do(SetMembers(frozenset({ADDRESS}))), Hello)
    assert rig.do(SetMembers(frozenset({ADDRESS}))) == []
    assert sent(rig.start(), Hello) == []
    assert hello.sender == rig.machine.identity.node
