"""Both machines of the hand-over, where blocks are asked for by key instead of by prompt."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.connectors.protocol.checks import check_complete, check_reserve, is_repetition
from kvbaton.connectors.protocol.events import (
    Crossing,
    Deliver,
    Engage,
    Fail,
    FirstTokens,
    Post,
    Release,
    SourceFailed,
    Start,
    StopSource,
    Verified,
)
from kvbaton.messages.control import (
    Accepted,
    Ack,
    Cancel,
    Complete,
    Drained,
    Failed,
    Refused,
    Reserve,
)
from kvbaton.types import BlockSpan
from tests.connectors import test_protocol_source as of_source
from tests.connectors import test_protocol_target as of_target
from tests.connectors.machine_rig import CHOICES, NAME, cards, layout, of, sent
from tests.connectors.test_protocol_source import refusals

KEYS = b"".join(bytes([number]) * 32 for number in range(1, 5))
LAST = KEYS[-32:]
SPANS = ((BlockSpan(1, (10, 11, 12, 13)),),)
"""Tokens 4 to 20 in blocks of 4."""


def source(**options: Any) -> of_source.Rig:
    rig = of_source.Rig(**options)
    rig.hello(ranks=cards(layout(4)))
    return rig


def ask(rig: of_source.Rig, **fields: Any) -> list[Any]:
    asked: dict[str, Any] = {
        "first": 1,
        "num_tokens": 20,
        "keys": KEYS,
        "prompt_key": LAST,
        "spans": SPANS,
    }
    return rig.reserve(**(asked | {"spans": SPANS} | fields))


def held(rig: of_source.Rig, end: int) -> list[Any]:
    """The engine holds tokens 4 to `end`."""
    return [*rig.ready(4, end), *rig.do(FirstTokens(NAME, ()))]


def test_blocks_that_are_held_are_pushed_at_once() -> None:
    rig = source()
    accepted, engage = ask(rig)
    assert isinstance(accepted.message, Accepted)
    assert engage == Engage(NAME, 4, (4,), KEYS)
    assert rig.machine.ledger()["pinned_by_key"] == 4
    actions = held(rig, 20)
    assert [(post.start, post.end) for post in of(actions, Post)] == [(4, 20)]
    (complete,) = sent(actions, Complete)
    assert (complete.num_tokens, complete.num_writes, complete.choices) == (20, 1, ())
    rig.land(0)
    assert of(rig.hear(Ack, verdict="ok"), Release) == [Release(NAME, "acked")]
    assert rig.machine.ledger()["pinned_by_key"] == 0


def test_a_source_that_has_lost_the_last_blocks_says_so() -> None:
    rig = source()
    ask(rig)
    actions = held(rig, 12)
    assert [(post.start, post.end) for post in of(actions, Post)] == [(4, 12)]
    (complete,) = sent(actions, Complete)
    assert complete.num_tokens == 12


def test_a_source_that_has_lost_all_fails_it() -> None:
    rig = source()
    ask(rig)
    actions = rig.do(SourceFailed(NAME, "none of it is held any more"))
    assert sent(actions, Failed)
    assert sent(actions, Drained)
    assert of(actions, Release) == [Release(NAME, "failed")]
    assert not of(actions, StopSource)
    assert rig.machine.ledger()["pinned_by_key"] == 0


def test_a_cancel_before_the_engine_has_looked_releases() -> None:
    rig = source()
    ask(rig)
    actions = rig.hear(Cancel)
    assert sent(actions, Drained)
    assert of(actions, Release) == [Release(NAME, "cancelled")]
    assert held(rig, 20) == [], "what the engine says later is late"


def test_a_full_source_refuses_at_once() -> None:
    """Of 100 blocks at most 25 are pinned for one peer."""
    rig = source()
    spans = ((BlockSpan(0, tuple(range(10, 36))),),)
    keys = b"".join(bytes([1 + n]) * 32 for n in range(26))
    many = {"first": 0, "num_tokens": 104, "spans": spans, "keys": keys, "prompt_key": keys[-32:]}
    actions = ask(rig, **many)
    assert refusals(actions) == ["too_many"]
    assert sent(actions, Refused)[0].retryable
    assert not of(actions, Engage)
    assert rig.machine.ledger()["pinned_by_key"] == 0
    assert of(ask(rig), Engage), "what fits is taken"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"keys": KEYS[:-32]}, "malformed"),
        ({"keys": KEYS[:-1]}, "malformed"),
        ({"prompt_key": KEYS[:32]}, "malformed"),
        ({"num_tokens": 19}, "malformed"),
        ({"spans": ((BlockSpan(1, (10, 10, 12, 13)),),)}, "malformed"),
        ({"spans": ((BlockSpan(1, (10, 11, 12)),),)}, "malformed"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], code: str) -> None:
    rig = source()
    actions = ask(rig, **fields)
    assert refusals(actions) == [code]
    assert not of(actions, Engage)
    assert not rig.machine.live


def test_tokens_that_the_pool_could_never_hold_are_refused() -> None:
    """A table of a prompt's blocks takes memory by its length, and this one has one block."""
    rig = source()
    far = {"keys": LAST, "spans": ((BlockSpan(1 << 34, (10,)),),)}
    actions = ask(rig, first=1 << 34, num_tokens=4 * ((1 << 34) + 1), **far)
    assert refusals(actions) == ["too_many"]
    assert not sent(actions, Refused)[0].retryable
    assert not rig.machine.live
    assert rig.machine.ledger()["pinned_by_key"] == 0


def test_other_block_sizes_have_other_keys() -> None:
    rig = of_source.Rig()
    rig.hello(ranks=cards(layout(8)))
    spans = ((BlockSpan(0, (10, 11)),),)
    actions = ask(rig, first=0, num_tokens=16, spans=spans, keys=KEYS[64:])
    assert refusals(actions) == ["layout"]


def test_a_repeated_question_is_answered_and_pins_nothing_more() -> None:
    rig = source()
    ask(rig)
    assert [type(m) for m in sent(ask(rig), Accepted)] == [Accepted]
    assert rig.machine.ledger()["pinned_by_key"] == 4
    other = bytes(32) + KEYS[32:]
    assert refusals(ask(rig, keys=other)) == ["conflict"]


def test_keys_are_no_part_of_a_prompts_attempt() -> None:
    rig = source()
    rig.announce(num_tokens=20, key=LAST)
    assert refusals(ask(rig)) == ["conflict"]
    rig = source()
    ask(rig)
    refused = rig.announce(num_tokens=20, key=LAST)
    assert [action.code for action in refused] == ["conflict"]


# --- the target ---


def target() -> tuple[of_target.Rig, list[Any]]:
    rig = of_target.Rig()
    start = Start(NAME, of_target.ADDRESS, KEYS[64:96], 16, of_target.SPANS, 0.0, KEYS[:96])
    rig.do(start)
    return rig, rig.welcome()


def test_a_target_names_keys() -> None:
    _, actions = target()
    (reserve,) = sent(actions, Reserve)
    assert (reserve.keys, reserve.num_tokens) == (KEYS[:96], 16)


@pytest.mark.parametrize("end", [8, 16])
def test_a_target_takes_what_there_is(end: int) -> None:
    rig, _ = target()
    rig.now = 0.25
    rig.land(0, 4, end)
    rig.do(Verified(NAME, 0))
    actions = rig.complete(num_writes=1, num_tokens=end, choices=())
    (delivered,) = of(actions, Deliver)
    crossing = Crossing(of_target.ADDRESS, True, end - 4, 0.0, 0.25)
    assert replace(delivered, times=()) == Deliver(NAME, (), 0, end, crossing=crossing)


@pytest.mark.parametrize(
    "fields", [{"num_tokens": 10}, {"num_tokens": 4}, {"num_tokens": 20}, {"num_writes": 0}]
)
def test_a_target_takes_no_other_number_of_tokens(fields: dict[str, Any]) -> None:
    rig, _ = target()
    told: dict[str, Any] = {"num_writes": 1, "choices": ()}
    (fail,) = of(rig.complete(**(told | fields)), Fail)
    assert "nonsense" in fail.reason


def test_a_prompt_is_whole_or_wrong() -> None:
    told: dict[str, Any] = {"session": bytes(16), "seq": 0, "transfer_id": bytes(16), "attempt": 0}
    short = Complete(**told, num_tokens=12, num_writes=1, choices=CHOICES)
    assert check_complete(short, 0, 16) is not None
    without = Complete(**told, num_tokens=16, num_writes=1, choices=())
    assert check_complete(without, 0, 16) is not None
    assert check_complete(without, 0, 16, held_unit=4) is None


def test_keys_belong_to_what_is_frozen() -> None:
    told: dict[str, Any] = {"session": bytes(16), "seq": 0, "transfer_id": bytes(16), "attempt": 0}
    asked = Reserve(**told, prompt_key=LAST, num_tokens=20, spans=SPANS, remaining_ms=9, keys=KEYS)
    groups = [KVLayout(0, GroupKind.FULL, 4, 100, ())]
    assert check_reserve(asked, groups) is None
    plain = Reserve(**told, prompt_key=LAST, num_tokens=20, spans=SPANS, remaining_ms=9)
    assert not is_repetition(asked, plain)
    assert is_repetition(asked, asked)
