"""Control messages and notices as they were once written: they must stay readable.

A field added at the end with a default keeps this true; whatever breaks it raises
`PROTOCOL_VERSION`, so that nodes refuse each other by name. Never change what is recorded here; add
the messages of a new version below.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.connectors.protocol.events import Landed
from kvbaton.connectors.protocol.notice import unpack_notice
from kvbaton.messages.control import (
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
    RankCard,
    Refused,
    Reserve,
    SessionDrained,
    Welcome,
    decode_control,
    refuse_unreadable,
)
from kvbaton.types import Attempt, BlockSpan, ChoiceStart, NodeId, TokenLogprobs, TopLogprob

SESSION, TRANSFER = bytes(range(16)), bytes(range(16, 32))


def record() -> dict[str, Control]:
    """One of each kind, with something in most fields."""
    in_session: dict[str, Any] = {"session": SESSION, "seq": 7}
    named = in_session | {"transfer_id": TRANSFER, "attempt": 3}
    layouts = msgspec.msgpack.encode([KVLayout(0, GroupKind.FULL, 16, 100, ())])
    ranks = (RankCard(0, b"card", layouts),)
    scores = TokenLogprobs(-0.5, 1, (TopLogprob(9, -0.5, 1),))
    starts = (ChoiceStart(70000, scores, "stop", "end"), ChoiceStart(1))
    spans = ((BlockSpan(1, (10, 70000)), BlockSpan(4, (12,))), ())
    return {
        "hello": Hello(
            **in_session,
            sender=NodeId("d", bytes(16)),
            min_version=2,
            max_version=2,
            identity=bytes(32),
            identity_record={"model": "a"},
            transport="tcp",
            ranks=ranks,
            over=(TRANSFER,),
        ),
        "welcome": Welcome(**in_session, sender=NodeId("p", bytes(16)), version=2, ranks=ranks),
        "reserve": Reserve(
            **named,
            prompt_key=bytes(32),
            num_tokens=90,
            spans=spans,
            remaining_ms=300_000,
        ),
        "accepted": Accepted(**named),
        "refused": Refused(**named, code="prompt", message="why", retryable=True),
        "progress": Progress(**named, state="computing", tokens_pushed=48),
        "complete": Complete(
            **named, num_tokens=90, num_writes=2, choices=starts, cached_tokens=16
        ),
        "ack": Ack(**named, verdict="mismatch", bad=((16, 32), (64, 90))),
        "not_needed": NotNeeded(**named),
        "failed": Failed(**named, reason="why"),
        "cancel": Cancel(**named),
        "drained": Drained(**named),
        "session_drained": SessionDrained(**in_session, over=(TRANSFER,)),
    }


SAID = record()
NOTICE = Landed(
    session=SESSION,
    attempt=Attempt(TRANSFER, 3),
    write=1,
    start=48,
    end=90,
    source_rank=1,
    target_rank=2,
    part=0,
    parts=3,
    digests=(DigestRun(1, 2, 0, 3, bytes(range(16))), DigestRun(1, 2, 1, 0, bytes(8))),
)
RECORDED = {
    "hello": (
        "8ba474797065a568656c6c6fa773657373696f6ec410000102030405060708090a0b0c0d0e0fa373657107a6"
        "73656e64657282a46e6f6465a164aa67656e65726174696f6ec41000000000000000000000000000000000ab"
        "6d696e5f76657273696f6e02ab6d61785f76657273696f6e02a86964656e74697479c4200000000000000000"
        "000000000000000000000000000000000000000000000000af6964656e746974795f7265636f726481a56d6f"
        "64656ca161a97472616e73706f7274a3746370a572616e6b739183a472616e6b00a463617264c40463617264"
        "a76c61796f757473c43b9186a567726f757000a46b696e64a466756c6caa626c6f636b5f73697a6510aa6e75"
        "6d5f626c6f636b7364a6706c616e657390a677696e646f7700a46f76657291c410101112131415161718191a"
        "1b1c1d1e1f"
    ),
    "welcome": (
        "86a474797065a777656c636f6d65a773657373696f6ec410000102030405060708090a0b0c0d0e0fa3736571"
        "07a673656e64657282a46e6f6465a170aa67656e65726174696f6ec410000000000000000000000000000000"
        "00a776657273696f6e02a572616e6b739183a472616e6b00a463617264c40463617264a76c61796f757473c4"
        "3b9186a567726f757000a46b696e64a466756c6caa626c6f636b5f73697a6510aa6e756d5f626c6f636b7364"
        "a6706c616e657390a677696e646f7700"
    ),
    "reserve": (
        "8aa474797065a772657365727665a773657373696f6ec410000102030405060708090a0b0c0d0e0fa3736571"
        "07ab7472616e736665725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403aa70726f"
        "6d70745f6b6579c4200000000000000000000000000000000000000000000000000000000000000000aa6e75"
        "6d5f746f6b656e735aa57370616e73929282a5666972737401a6626c6f636b73920ace0001117082a5666972"
        "737404a6626c6f636b73910c90ac72656d61696e696e675f6d73ce000493e0a46d6f7265c3"
    ),
    "accepted": (
        "85a474797065a86163636570746564a773657373696f6ec410000102030405060708090a0b0c0d0e0fa37365"
        "7107ab7472616e736665725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403"
    ),
    "refused": (
        "88a474797065a772656675736564a773657373696f6ec410000102030405060708090a0b0c0d0e0fa3736571"
        "07a4636f6465a670726f6d7074a76d657373616765a3776879a9726574727961626c65c3ab7472616e736665"
        "725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403"
    ),
    "progress": (
        "87a474797065a870726f6772657373a773657373696f6ec410000102030405060708090a0b0c0d0e0fa37365"
        "7107ab7472616e736665725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403a57374"
        "617465a9636f6d707574696e67ad746f6b656e735f70757368656430"
    ),
    "complete": (
        "89a474797065a8636f6d706c657465a773657373696f6ec410000102030405060708090a0b0c0d0e0fa37365"
        "7107ab7472616e736665725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403aa6e75"
        "6d5f746f6b656e735aaa6e756d5f77726974657302a763686f696365739284a5746f6b656ece00011170a86c"
        "6f6770726f627393cbbfe000000000000001919309cbbfe000000000000001ad66696e6973685f726561736f"
        "6ea473746f70ab73746f705f726561736f6ea3656e6484a5746f6b656e01a86c6f6770726f6273c0ad66696e"
        "6973685f726561736f6ec0ab73746f705f726561736f6ec0ad6361636865645f746f6b656e7310"
    ),
    "ack": (
        "87a474797065a361636ba773657373696f6ec410000102030405060708090a0b0c0d0e0fa373657107ab7472"
        "616e736665725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403a776657264696374"
        "a86d69736d61746368a36261649292102092405a"
    ),
    "not_needed": (
        "85a474797065aa6e6f745f6e6565646564a773657373696f6ec410000102030405060708090a0b0c0d0e0fa3"
        "73657107ab7472616e736665725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403"
    ),
    "failed": (
        "86a474797065a66661696c6564a773657373696f6ec410000102030405060708090a0b0c0d0e0fa373657107"
        "ab7472616e736665725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403a672656173"
        "6f6ea3776879"
    ),
    "cancel": (
        "85a474797065a663616e63656ca773657373696f6ec410000102030405060708090a0b0c0d0e0fa373657107"
        "ab7472616e736665725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403"
    ),
    "drained": (
        "85a474797065a7647261696e6564a773657373696f6ec410000102030405060708090a0b0c0d0e0fa3736571"
        "07ab7472616e736665725f6964c410101112131415161718191a1b1c1d1e1fa7617474656d707403"
    ),
    "session_drained": (
        "84a474797065af73657373696f6e5f647261696e6564a773657373696f6ec410000102030405060708090a0b"
        "0c0d0e0fa373657107a46f76657291c410101112131415161718191a1b1c1d1e1f"
    ),
}
"""By tag; `reserve` has a field that is not read any more."""

RECORDED_NOTICE = (
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0300000001000000300000000000"
    "00005a0000000000000001000200000003000000020003000000000102030405060708090a0b0c0d0e0f01000100"
    "000000000000000000000000"
)


@pytest.mark.parametrize("name", RECORDED)
def test_what_was_written_is_read_as_it_was_meant(name: str) -> None:
    assert decode_control(bytes.fromhex(RECORDED[name])) == SAID[name]


def test_a_notice_is_read_as_it_was_meant() -> None:
    assert unpack_notice(bytes.fromhex(RECORDED_NOTICE)) == NOTICE


def test_every_message_is_recorded() -> None:
    assert {type(message) for message in SAID.values()} == set(Control.__args__)
    assert set(RECORDED) == set(SAID)


@pytest.mark.parametrize("name", RECORDED)
def test_a_newer_peer_may_say_more(name: str) -> None:
    """Fields at the end that this release does not know are left unread."""
    fields = msgspec.msgpack.decode(bytes.fromhex(RECORDED[name]))
    fields["a_later_field"] = [1, {"x": None}]
    assert decode_control(msgspec.msgpack.encode(fields)) == SAID[name]


def test_a_refusal_says_what_both_speak_whatever_a_later_hello_looks_like() -> None:
    """Of it only the session and the range of versions must stay what they are."""
    fields = msgspec.msgpack.decode(bytes.fromhex(RECORDED["hello"]))
    later = {"type": "hello", "session": fields["session"], "min_version": 90, "max_version": 91}
    data = msgspec.msgpack.encode(later)
    with pytest.raises(msgspec.ValidationError) as raised:
        decode_control(data)
    refused = refuse_unreadable(data, raised.value)
    assert refused is not None
    assert (refused.session, refused.code) == (SESSION, "version")
    assert refused.message.endswith("target 90 to 91")
