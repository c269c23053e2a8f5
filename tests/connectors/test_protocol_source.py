"""P's machine, row by row."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from kvbaton.connectors.layout import GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.pairing import pair_groups
from kvbaton.connectors.protocol import source, source_sessions
from kvbaton.connectors.protocol.events import (
    Abandon,
    Announce,
    BlocksReady,
    Closed,
    ClosePeer,
    Engage,
    EvictSource,
    FirstTokens,
    Identity,
    OpenPeer,
    PeerGone,
    Post,
    Received,
    RefuseAnnounce,
    Release,
    SourceFailed,
    Stop,
    StopSource,
    WriteEnded,
)
from kvbaton.connectors.protocol.machine import MAX_TOMBSTONES
from kvbaton.connectors.protocol.source import Source
from kvbaton.errors import LayoutMismatchError
from kvbaton.messages.control import (
    PROTOCOL_VERSION,
    Accepted,
    Ack,
    Cancel,
    Complete,
    Drained,
    Failed,
    Hello,
    NotNeeded,
    Progress,
    RankCard,
    Refused,
    Reserve,
    SessionDrained,
    Welcome,
)
from kvbaton.types import Attempt, BlockSpan, NodeId
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


class Rig(MachineRig):
    """A source with block size 4, and a target (block size 6) that is a script."""

    machine: Source

    def __init__(
        self,
        *,
        groups: tuple[KVLayout, ...] = (layout(4),),
        pair: Callable[..., Any] = lambda source, target: (SHARED,),
        **options: Any,
    ) -> None:
        super().__init__(pair)
        node = NodeId("p", bytes(16))
        identity = Identity(node, bytes(32), {"model": "a"}, "tcp", cards(*groups, ranks=2))
        self.machine = Source(identity, TIMERS, **options)

    def hear(self, kind: type, session: bytes = b"s" * 16, **fields: Any) -> list[Any]:
        """Receive a message about NAME."""
        self.seq += 1
        named = {"transfer_id": NAME.transfer_id, "attempt": NAME.number}
        fields = ({} if kind is Hello else named) | fields
        return self.do(Received(LINK, kind(session=session, seq=self.seq, **fields)))

    def hello(self, session: bytes = b"s" * 16, **fields: Any) -> list[Any]:
        defaults: dict[str, Any] = {
            "sender": NodeId("d", b"1" * 16),
            "min_version": 2,
            "max_version": 9,
            "identity": bytes(32),
            "identity_record": {"model": "a"},
            "transport": "tcp",
            "ranks": cards(layout(6)),
        }
        return self.hear(Hello, session, **(defaults | fields))

    def reserve(self, first: int = 0, num_tokens: int = 16, **fields: Any) -> list[Any]:
        count = min(-(-num_tokens // 6) - first, 100)
        spans = ((BlockSpan(first, tuple(range(10, 10 + count))),),)
        defaults: dict[str, Any] = {"prompt_key": KEY, "num_tokens": num_tokens, "spans": spans}
        return self.hear(Reserve, **(defaults | {"remaining_ms": 60_000} | fields))

    def announce(self, num_tokens: int = 16, key: bytes = KEY) -> list[Any]:
        return self.do(Announce(NAME, key, num_tokens))

    def ready(self, start: int, end: int) -> list[Any]:
        first = start // 4
        blocks = tuple(50 + n for n in range(first, -(-end // 4)))
        return self.do(BlocksReady(NAME, start, end, ((BlockSpan(first, blocks),),)))

    def ended(self, write: int, rank: int, *, ok: bool = True, drained: bool = True) -> list[Any]:
        return self.do(WriteEnded(NAME, write, rank, 0, ok=ok, drained=drained, error="broken"))

    def land(self, write: int) -> list[Any]:
        return [*self.ended(write, 0), *self.ended(write, 1)]

    def until(self, state: str) -> Rig:
        """Bring NAME into a state."""
        self.hello()
        if state in ("announced", "engaged", "completed", "stopping"):
            self.announce()
        if state in ("reserved", "engaged", "completed", "stopping", "ended"):
            self.reserve()
        if state in ("completed", "stopping"):
            self.ready(0, 16)
        if state == "completed":
            self.do(FirstTokens(NAME, CHOICES))
        if state in ("stopping", "ended"):
            self.hear(Cancel)
        record = self.machine.record(NAME)
        assert record.state.value == state
        return self


def lists(tables: Any) -> list[list[int]]:
    return [table.tolist() for table in tables]


def refusals(actions: list[Any]) -> list[str]:
    return [message.code for message in sent(actions, Refused)]


# --- sessions ---


def test_ranks_that_share_nothing_write_nothing() -> None:
    rig = Rig()
    opened, _ = rig.hello(ranks=cards(layout(6), ranks=2))
    assert opened.pairs == {(0, 0), (1, 0)}
    rig.announce()
    rig.reserve()
    (post,) = of(rig.ready(0, 16), Post)
    for rank, target in sorted(opened.pairs):
        assert rig.machine.ledger()["writes_in_flight"] > 0
        rig.do(WriteEnded(NAME, post.write, rank, target, ok=True))
    assert rig.machine.ledger()["writes_in_flight"] == 0


def test_hello_opens_the_transport_and_is_welcomed_where_it_came_from() -> None:
    opened, welcome = Rig().hello()
    assert isinstance(opened, OpenPeer)
    assert welcome.link == LINK
    assert welcome.message == Welcome(
        session=b"s" * 16,
        seq=0,
        sender=NodeId("p", bytes(16)),
        version=PROTOCOL_VERSION,
        ranks=cards(layout(4), ranks=2),
    )


def test_a_repeated_hello_is_welcomed_again_but_opens_nothing() -> None:
    rig = Rig()
    rig.hello()
    (again,) = rig.hello()
    assert isinstance(again.message, Welcome)


NO_TEXT = b"\x91\x81\xa4kind\xa1\xff"
"""Layouts whose kind is not UTF-8."""


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"min_version": 5}, "version", "target 5 to 9"),
        ({"identity": b"x" * 32, "identity_record": {"model": "b"}}, "identity", "'a', target 'b'"),
        ({"transport": "nixl"}, "transport", "'tcp', target 'nixl'"),
        ({"ranks": ()}, "malformed", "ranks"),
        ({"ranks": (RankCard(0, b"", b"\xc1"),)}, "malformed", "can't be read"),
        ({"ranks": (RankCard(0, b"", NO_TEXT),)}, "malformed", "can't be read"),
        ({"ranks": cards(layout(0))}, "malformed", "blocks of 0 tokens"),
        ({"ranks": cards(layout(6), layout(6, 1))}, "layout", "[1, 1] at the source, [2] at the"),
    ],
)
def test_what_cannot_pair_is_refused_with_both_values(
    fields: dict[str, Any], code: str, said: str
) -> None:
    actions = Rig(pair=pair_groups).hello(**fields)
    assert refusals(actions) == [code]
    assert said in actions[0].message.message


def test_layouts_that_do_not_pair_are_refused() -> None:
    def never(source: object, target: object) -> None:
        raise LayoutMismatchError("heads: 4 and 5")

    (refused,) = sent(Rig(pair=never).hello(), Refused)
    assert (refused.code, refused.message) == ("layout", "heads: 4 and 5")


def test_messages_of_an_unknown_session_are_refused() -> None:
    assert refusals(Rig().reserve()) == ["unknown_session"]


def test_a_number_not_above_the_last_is_dropped() -> None:
    rig = Rig().until("announced")
    rig.seq -= 1
    assert rig.reserve() == []
    assert rig.machine.counters.by_code["stale_seq"] == 1


OLD, NEW = b"s" * 16, b"n" * 16
D = NodeId("d", b"1" * 16)


def drained(actions: list[Any]) -> list[bytes]:
    return [name for message in sent(actions, SessionDrained) for name in message.over]


EARLIER = NodeId("p", b"e" * 16)


def test_a_session_with_an_earlier_generation_is_not_taken_up() -> None:
    rig = Rig()
    assert refusals(actions := rig.hello(receiver=EARLIER)) == ["unknown_session"]
    assert not sent(actions, Welcome)
    assert not of(actions, OpenPeer)


@pytest.mark.parametrize("kind", [Reserve, Cancel])
def test_what_is_meant_for_an_earlier_generation_is_refused(kind: type) -> None:
    """D may have been welcomed by it in a session that both have opened."""
    rig = Rig().until("announced")
    actions = rig.reserve(receiver=EARLIER) if kind is Reserve else rig.hear(kind, receiver=EARLIER)
    assert refusals(actions) == ["unknown_session"]
    assert not sent(actions, Drained)
    assert not of(actions, Engage)


def test_a_new_session_begins_at_once_and_tells_when_the_old_one_has_drained() -> None:
    rig = Rig().until("completed")
    actions = rig.hello(NEW, over=(OLD,))
    assert sent(actions, Welcome)
    assert not of(actions, ClosePeer), "writes that are under way may end in peace"
    assert drained(actions) == drained(rig.hello(NEW, over=(OLD,))) == []
    assert rig.ended(0, 0) == []
    actions = rig.ended(0, 1)
    assert of(actions, Release) == [Release(NAME, "lost")]
    assert of(actions, ClosePeer) == [ClosePeer(OLD)]
    assert drained(rig.do(Closed(OLD))) == [OLD]
    assert drained(rig.hello(NEW, over=(OLD,))) == [OLD], "asked again, it says so again"


def test_a_closed_peer_frees_our_blocks_but_drains_nothing() -> None:
    rig = Rig().until("completed")
    actions = rig.do(PeerGone(D))
    assert of(actions, ClosePeer)
    assert not of(actions, Release)
    assert of(rig.do(Closed(OLD)), Release) == [Release(NAME, "lost")]
    assert drained(rig.hello(NEW, over=(OLD,))) == []
    assert not sent(rig.hear(Cancel, NEW), Drained), "nor of the attempt"
    assert rig.ended(0, 0) == []
    assert rig.machine.ledger()["writes_undrained"] == 1
    assert drained(rig.ended(0, 1)) == [OLD], "the last write of the closed session is terminal"


def test_nothing_is_promised_of_sessions_that_are_unknown_up_or_of_others() -> None:
    rig = Rig()
    rig.hello(OLD, sender=NodeId("e", b"2" * 16))
    rig.do(PeerGone(NodeId("e", b"2" * 16)))
    rig.do(Closed(OLD))
    assert drained(rig.hello(NEW, over=(OLD, NEW, b"?" * 16))) == []


def test_writes_of_a_closed_session_are_abandoned_in_the_end() -> None:
    rig = Rig().until("completed")
    rig.do(PeerGone(D))
    rig.do(Closed(OLD))
    assert of(rig.wait(2 * TIMERS.tombstone + 1), Abandon) == [Abandon(OLD)]
    assert drained(rig.hello(NEW, over=(OLD,))) == []


def test_two_lives_under_one_name_do_not_end_each_other() -> None:
    rig = Rig().until("engaged")
    assert sent(rig.hello(NEW, sender=NodeId("d", b"2" * 16)), Welcome)
    assert sent(rig.reserve(), Accepted), "the session of the other one is up"


def test_a_session_of_which_nothing_is_heard_ends() -> None:
    rig = Rig()
    rig.hello()
    rig.wait(2 * TIMERS.lease - 1)
    rig.hello()
    assert not of(rig.wait(2 * TIMERS.lease - 1), ClosePeer)
    actions = rig.wait(2.0)
    assert of(actions, ClosePeer) == [ClosePeer(OLD)]
    assert refusals(actions) == ["unknown_session"]


def test_a_node_that_stops_fails_and_drains_what_is_left() -> None:
    rig = Rig().until("completed")
    actions = rig.do(Stop())
    assert sent(actions, Failed)[0].reason == "the node stops"
    assert not sent(actions, Drained)
    assert sent(rig.land(0), Drained)
    rig = Rig().until("reserved")
    assert [type(m) for m in sent(rig.do(Stop()), object)] == [Failed, Drained]
    rig = Rig().until("announced")
    rig.do(Stop())
    assert rig.machine.live == {}


def test_an_overtaken_hello_ends_nothing() -> None:
    rig = Rig().until("engaged")
    rig.seq = 0
    assert refusals(rig.hello(b"o" * 16)) == ["unknown_session"]
    rig.seq = 100
    assert sent(rig.reserve(), Accepted)


def test_a_session_that_is_over_is_never_taken_up_again() -> None:
    rig = Rig()
    rig.hello()
    rig.do(PeerGone(NodeId("d", b"1" * 16)))
    assert refusals(rig.hello()) == ["unknown_session"]
    rig.do(Closed(b"s" * 16))
    assert refusals(rig.hello()) == ["unknown_session"]


# --- both orders of Reserve and request ---


@pytest.mark.parametrize("reserve_first", [False, True])
def test_reserve_and_request_in_either_order(reserve_first: bool) -> None:
    rig = Rig()
    rig.hello()
    actions = rig.reserve() if reserve_first else rig.announce()
    actions += rig.announce() if reserve_first else rig.reserve()
    assert of(actions, Engage) == [Engage(NAME, 0, (0,))]
    assert len(sent(actions, Accepted)) == 1


def test_the_reservation_says_where_to_begin() -> None:
    rig = Rig()
    rig.hello()
    rig.announce()
    assert of(rig.reserve(first=1), Engage) == [Engage(NAME, 6, (6,))]


@pytest.mark.parametrize("reserve_first", [False, True])
def test_another_prompt_is_refused(reserve_first: bool) -> None:
    rig = Rig()
    rig.hello()
    if reserve_first:
        rig.reserve()
        actions = rig.announce(key=b"o" * 32)
    else:
        rig.announce(key=b"o" * 32)
        actions = rig.reserve()
    assert refusals(actions) == ["prompt"]
    assert not of(actions, Engage)


@pytest.mark.parametrize(
    ("state", "code"),
    [("announced", "conflict"), ("engaged", "conflict"), ("ended", "cancelled")],
)
def test_a_second_request_of_the_same_name_is_refused(state: str, code: str) -> None:
    assert Rig().until(state).announce() == [RefuseAnnounce(NAME, code)]


def test_an_unclaimed_reserve_is_given_up() -> None:
    rig = Rig().until("reserved")
    assert sent(rig.wait(TIMERS.lease), Failed)
    assert rig.announce() == [RefuseAnnounce(NAME, "expired")]
    assert refusals(rig.reserve()) == ["expired"]


def test_an_unclaimed_request_is_forgotten_some_time_after_it_was_computed() -> None:
    rig = Rig().until("announced")
    rig.wait(TIMERS.total - 1)
    rig.do(FirstTokens(NAME, CHOICES))
    rig.wait(TIMERS.total - 1)
    rig.hello(NEW)
    assert sent(rig.reserve(session=NEW), Accepted)
    rig = Rig().until("announced")
    rig.do(FirstTokens(NAME, CHOICES))
    assert of(rig.wait(TIMERS.total + 1), StopSource), "the engine forgets it, too"
    rig.hello(NEW)
    assert refusals(rig.reserve(session=NEW)) == ["expired"]


def test_a_target_may_reserve_long_after_the_prompt_was_computed() -> None:
    """Its request may have waited for a minute: the prompt is mostly in the cache still."""
    rig = Rig().until("announced")
    rig.do(FirstTokens(NAME, CHOICES))
    rig.wait(50.0)
    rig.hello(NEW)
    assert of(rig.reserve(session=NEW), Engage)


def test_of_too_many_unclaimed_prompts_the_oldest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "MIN_IDLE_TOKENS", 10)
    monkeypatch.setattr(source, "MAX_IDLE_TOKENS", 36)
    rig = Rig()
    names = [Attempt(bytes([n]) * 16, 0) for n in range(4)]
    for name, num_tokens in zip(names, (16, 16, 3, 16), strict=True):
        rig.do(Announce(name, KEY, num_tokens))
        told = rig.do(FirstTokens(name, CHOICES))
    assert told == [StopSource(names[1])], "the engine forgets it, too"
    assert list(rig.machine.live) == names[2:]


@pytest.mark.parametrize("state", ["unknown", "ended"])
def test_the_engine_forgets_a_prompt_that_was_over_before_it_was_computed(state: str) -> None:
    assert Rig().until(state).do(FirstTokens(NAME, CHOICES)) == [StopSource(NAME)]


def test_more_attempts_of_a_peer_than_allowed_are_refused_by_name() -> None:
    rig = Rig(max_attempts=4).until("engaged")
    other: dict[str, Any] = {"transfer_id": b"u" * 16}
    assert refusals(rig.reserve(**other)) == ["too_many"]
    assert sent(rig.reserve(), Accepted), "what is reserved stays so"
    rig.hello(NEW, sender=NodeId("e", b"2" * 16))
    assert sent(rig.reserve(session=NEW, **other), Accepted)


def test_tombstones_are_bounded() -> None:
    rig = Rig()
    rig.hello()
    for number in range(MAX_TOMBSTONES + 10):
        rig.hear(Cancel, transfer_id=number.to_bytes(16, "little"))
    assert len(rig.machine.ended) == MAX_TOMBSTONES
    rig.now += TIMERS.tombstone + 1
    rig.hear(Cancel, transfer_id=b"x" * 16)
    assert len(rig.machine.ended) == 1


def test_more_attempts_than_allowed_are_refused_by_name() -> None:
    rig = Rig(max_attempts=1)
    rig.hello()
    rig.announce()
    assert refusals(rig.reserve(transfer_id=b"u" * 16)) == ["too_many"]
    assert rig.do(Announce(Attempt(b"v" * 16, 0), KEY, 4)) == [
        RefuseAnnounce(Attempt(b"v" * 16, 0), "too_many")
    ]


# --- what a Reserve may say ---


@pytest.mark.parametrize(
    "fields",
    [
        {"spans": ()},
        {"spans": ((),)},
        {"spans": ((BlockSpan(0, ()),),)},
        {"spans": ((BlockSpan(0, (0, 11, 12)),),)},
        {"spans": ((BlockSpan(0, (10, 11, 100)),),)},
        {"spans": ((BlockSpan(0, (10, 10, 11)),),)},
        {"spans": ((BlockSpan(0, (10, 11)),),)},
        {"spans": ((BlockSpan(0, (10, 11, 12, 13)),),)},
        {"spans": ((BlockSpan(0, (10,)), BlockSpan(2, (11,))),)},
        {"spans": ((BlockSpan(1, (10, 11)), BlockSpan(0, (12,))),)},
        {"num_tokens": 0},
        {"num_tokens": 1 << 60},
        {"remaining_ms": 0},
    ],
)
@pytest.mark.parametrize("state", ["announced", "engaged"])
def test_nonsense_is_refused(state: str, fields: dict[str, Any]) -> None:
    rig = Rig().until(state)
    assert refusals(rig.reserve(**fields)) == ["malformed"]


def test_a_reservation_is_frozen() -> None:
    rig = Rig().until("engaged")
    assert sent(rig.reserve(remaining_ms=5), Accepted)
    other = ((BlockSpan(0, (20, 21, 22)),),)
    assert refusals(rig.reserve(spans=other)) == ["conflict"]
    assert refusals(rig.reserve(prompt_key=b"o" * 32)) == ["conflict"]


def test_an_attempt_belongs_to_one_session() -> None:
    rig = Rig().until("engaged")
    rig.hello(b"n" * 16, sender=NodeId("e", b"2" * 16))
    session = b"n" * 16
    assert refusals(rig.reserve(session=session)) == ["conflict"]
    assert sent(rig.hear(Cancel, session), Drained)
    assert rig.hear(NotNeeded, session) == []
    assert rig.machine.ledger()["leases"] == 1


# --- pushing ---


def test_posts_end_where_blocks_of_both_sides_begin() -> None:
    rig = Rig(groups=(layout(4),)).until("engaged")
    assert rig.ready(0, 8) == [], "12 is the first common border"
    (post,) = rig.ready(8, 12)
    assert (post.write, post.start, post.end) == (0, 0, 12)
    assert lists(post.source) == [[50, 51, 52, -1]]
    assert lists(post.target) == [[10, 11, 12]]
    (post,) = rig.ready(12, 16)
    assert (post.write, post.start, post.end) == (1, 12, 16)


def test_a_first_post_may_begin_inside_a_source_block() -> None:
    rig = Rig()
    rig.hello()
    rig.announce()
    rig.reserve(first=1)
    (post,) = rig.ready(6, 12)
    assert (post.start, post.end) == (6, 12)
    assert lists(post.source) == [[-1, 51, 52, -1]]


def test_window_and_state_groups_send_what_is_wanted_of_them() -> None:
    groups = (layout(4), layout(4, 1, GroupKind.WINDOW), layout(1, 2, GroupKind.STATE))
    rig = Rig(groups=groups)
    rig.hello(ranks=cards(*groups))
    rig.announce()
    full = (BlockSpan(0, (10, 11, 12, 13)),)
    window, state = (BlockSpan(2, (20, 21)),), (BlockSpan(15, (30,)),)
    assert sent(rig.reserve(spans=(full, window, state)), Accepted)
    spans = (BlockSpan(0, (50, 51)),)
    (first,) = rig.do(BlocksReady(NAME, 0, 8, (spans, (), ())))
    assert (first.start, first.end) == (0, 8)
    rest = ((BlockSpan(2, (52, 53)),), (BlockSpan(2, (60, 61)),), (BlockSpan(15, (70,)),))
    (last,) = rig.do(BlocksReady(NAME, 8, 16, rest))
    assert lists(last.target) == [[10, 11, 12, 13], [-1, -1, 20, 21], [-1] * 15 + [30]]
    assert lists(last.source) == [[50, 51, 52, 53], [-1, -1, 60, 61], [-1] * 15 + [70]]


def test_complete_waits_for_the_posts_and_is_repeated() -> None:
    rig = Rig().until("engaged")
    rig.ready(0, 12)
    assert rig.do(FirstTokens(NAME, CHOICES, 3)) == []
    (complete,) = sent(rig.ready(12, 16), Complete)
    assert (complete.num_tokens, complete.num_writes) == (16, 2)
    assert (complete.choices, complete.cached_tokens) == (CHOICES, 3)
    rig.land(0), rig.land(1)
    assert len(sent(rig.wait(TIMERS.resend), Complete)) == 1


def test_a_write_covers_no_more_tokens_than_its_notice_holds_digests_of() -> None:
    """64 bytes of header, 8 of a run, and 2 digests: units of 12 tokens."""
    rig = Rig(max_notice_bytes=64 + 8 + 2 * 8)
    rig.hello()
    rig.announce(num_tokens=60)
    rig.reserve(first=1, num_tokens=60)
    posts = of(rig.ready(6, 60), Post)
    assert [(post.start, post.end) for post in posts] == [(6, 24), (24, 48), (48, 60)]


def test_a_write_covers_no_more_bytes_than_what_follows_it_should_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two units of 12 tokens; where not even one fits, one."""
    plane = contiguous_plane(
        num_blocks=100, block_size=4, num_heads=1, head_dim=8, layers=(0, 1), dtype="bfloat16"
    )
    group = msgspec.structs.replace(layout(4), planes=(plane,))
    assert group.token_bytes == 2 * 2 * 8 * 2, "K and V of 8 elements in two layers"
    for units, borders in ((2.5, [6, 24, 48, 60]), (0.5, [6, 12, 24, 36, 48, 60])):
        monkeypatch.setattr(source_sessions, "WRITE_BYTES", int(units * 12 * 64))
        rig = Rig(groups=(group,))
        rig.hello()
        rig.announce(num_tokens=60)
        rig.reserve(first=1, num_tokens=60)
        posts = of(rig.ready(6, 60), Post)
        assert [(post.start, post.end) for post in posts] == list(pairwise(borders))


def test_notices_that_hold_no_digest_are_refused_in_the_beginning() -> None:
    (refused,) = sent(Rig(max_notice_bytes=64 + 8 + 7).hello(), Refused)
    assert refused.code == "layout"
    assert "notices of 79 bytes" in refused.message


def test_progress_is_told_until_every_write_has_ended() -> None:
    rig = Rig().until("engaged")
    (progress,) = sent(rig.wait(TIMERS.resend), Progress)
    assert (progress.state, progress.tokens_pushed) == ("engaged", 0)
    rig.ready(0, 16)
    rig.do(FirstTokens(NAME, CHOICES))
    assert sent(rig.wait(1.0), Progress)[-1].state == "completed"
    rig.land(0)
    assert not sent(rig.wait(1.0), Progress)


# --- the end ---


def test_ack_waits_for_the_writes() -> None:
    rig = Rig().until("completed")
    assert rig.hear(Ack, verdict="ok") == []
    rig.ended(0, 0)
    assert rig.ended(0, 1) == [Release(NAME, "acked")]
    assert rig.machine.counters.completed == 1


def test_a_mismatch_evicts_once_and_ends_the_attempt() -> None:
    rig = Rig().until("engaged")
    rig.ready(0, 12)
    actions = rig.hear(Ack, verdict="mismatch", bad=((0, 6),))
    assert actions == [EvictSource(NAME, ((0, 6),)), StopSource(NAME)]
    assert rig.hear(Ack, verdict="mismatch", bad=((0, 6),)) == []
    assert of(rig.land(0), Release) == [Release(NAME, "failed")]


@pytest.mark.parametrize("fields", [{"verdict": "?"}, {"verdict": "mismatch", "bad": ((3, 99),)}])
def test_a_nonsensical_ack_is_refused(fields: dict[str, Any]) -> None:
    assert refusals(Rig().until("completed").hear(Ack, **fields)) == ["malformed"]


@pytest.mark.parametrize("state", ["unknown", "announced", "reserved", "engaged", "ended"])
def test_cancel_is_answered_drained_at_once_where_nothing_was_posted(state: str) -> None:
    rig = Rig().until(state)
    assert len(sent(rig.hear(Cancel), Drained)) == 1
    assert rig.announce() == [RefuseAnnounce(NAME, "cancelled")]
    assert len(sent(rig.hear(Cancel), Drained)) == 1, "and again"


def test_cancel_is_answered_drained_only_when_every_write_is_terminal() -> None:
    rig = Rig().until("completed")
    alive = [(Progress, "stopping")]
    assert [(type(m), m.state) for m in sent(rig.hear(Cancel), object)] == alive
    rig.ended(0, 0)
    assert rig.ended(0, 1, ok=False, drained=False) == []
    assert [(type(m), m.state) for m in sent(rig.hear(Cancel), object)] == alive
    drained, release = rig.ended(0, 1, ok=False)
    assert isinstance(drained.message, Drained)
    assert release == Release(NAME, "cancelled")


@pytest.mark.parametrize("state", ["unknown", "announced", "reserved", "engaged"])
def test_not_needed_stops_the_prompt(state: str) -> None:
    rig = Rig().until(state)
    actions = rig.hear(NotNeeded)
    assert bool(of(actions, StopSource)) == (state in ("announced", "engaged"))
    assert bool(of(actions, Release)) == (state == "engaged")
    assert rig.announce() == [RefuseAnnounce(NAME, "not_needed")]


def test_a_failed_write_ends_the_attempt_and_is_never_posted_again() -> None:
    rig = Rig().until("engaged")
    rig.ready(0, 12)
    actions = rig.ended(0, 0, ok=False, drained=False)
    (failed,) = sent(actions, Failed)
    assert (failed.reason, failed.engine) == ("write 0 failed: broken", False)
    assert of(actions, StopSource)
    assert rig.ready(12, 16) == []
    assert rig.ended(0, 1) == []
    drained, release = rig.ended(0, 0, ok=False)
    assert isinstance(drained.message, Drained), "D need not ask"
    assert release == Release(NAME, "failed")


def test_an_aborted_prompt_fails_the_attempt() -> None:
    rig = Rig().until("engaged")
    actions = rig.do(SourceFailed(NAME, "aborted"))
    (failed,) = sent(actions, Failed)
    assert (failed.reason, failed.engine) == ("aborted", True)
    assert of(actions, Release) == [Release(NAME, "failed")]
    assert not of(actions, StopSource), "the engine knows"


def test_the_lease_ends_without_a_sign_of_life() -> None:
    rig = Rig().until("completed")
    rig.wait(TIMERS.lease - 1)
    rig.reserve()
    assert not sent(rig.wait(TIMERS.lease - 1), Failed)
    assert sent(rig.wait(1.0), Failed)
    assert of(rig.land(0), Release) == [Release(NAME, "expired")]


def test_what_the_target_would_wait_bounds_the_lease() -> None:
    rig = Rig().until("announced")
    rig.reserve(remaining_ms=3000)
    assert not of(rig.wait(2.9), Release)
    assert of(rig.wait(0.2), Release) == [Release(NAME, "expired")]


def test_a_write_that_does_not_end_closes_the_peer() -> None:
    rig = Rig().until("stopping")
    actions = rig.wait(TIMERS.lease + 1)
    assert of(actions, ClosePeer) == [ClosePeer(b"s" * 16)]
    assert refusals(actions) == ["unknown_session"], "D is told"
    assert of(rig.do(Closed(b"s" * 16)), Release) == [Release(NAME, "cancelled")]


def test_an_ended_attempt_is_forgotten_in_the_end() -> None:
    rig = Rig().until("ended")
    rig.wait(TIMERS.tombstone + 1)
    assert rig.announce() == []


MESSAGES: list[tuple[type, dict[str, Any]]] = [
    (Cancel, {}),
    (NotNeeded, {}),
    (Ack, {"verdict": "ok"}),
    (Ack, {"verdict": "mismatch", "bad": ((0, 4),)}),
    (Accepted, {}),
    (Complete, {"num_tokens": 1, "num_writes": 1, "choices": CHOICES}),
]
STATES = ["unknown", "announced", "reserved", "engaged", "completed", "stopping", "ended"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("kind", "fields"), MESSAGES)
def test_every_message_in_every_state_leads_to_an_orderly_end(
    state: str, kind: type, fields: dict[str, Any]
) -> None:
    rig = Rig().until(state)
    rig.hear(kind, **fields)
    rig.hear(Cancel)
    for rank in range(2):
        rig.ended(0, rank)
    assert sent(rig.hear(Cancel), Drained)
    assert rig.machine.ledger()["leases"] == 0
    assert rig.machine.stories[NAME]
