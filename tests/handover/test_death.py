"""One side dies, stops or comes back: the other ends every request, with right tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.engine_node import HUB, Call
from tests.support.engine_pair import PROMISE_S, Expected, Pair
from tests.support.prompts import prompt_of
from tests.support.waiting import until

PROMPT = prompt_of(100)
Moment = Callable[[Pair], Iterator[tuple[Call, Call]]]


def reserving(pair: Pair) -> Iterator[tuple[Call, Call]]:
    """D waits for an answer to its first word."""
    with pair.p.held_step():
        yield pair.hand_over(PROMPT)


def mid_transfer(pair: Pair) -> Iterator[tuple[Call, Call]]:
    """Writes are in flight."""
    HUB.hold()
    with ExitStack() as stack:
        calls = pair.hand_over(PROMPT)
        until(lambda: bool(HUB._in_flight), "a write in flight")
        stack.enter_context(pair.p.held_step())
        yield calls


def between_the_legs(pair: Pair) -> Iterator[tuple[Call, Call]]:
    """All has landed; D verifies."""
    with pair.d.held_digests():
        calls = pair.hand_over(PROMPT)
        calls[0].result()
        yield calls


def streaming(pair: Pair) -> Iterator[tuple[Call, Call]]:
    """D decodes."""
    calls = pair.hand_over(PROMPT)
    calls[1].wait_tokens(3)
    yield calls


MOMENTS = (reserving, mid_transfer, between_the_legs, streaming)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: m.__name__)
def test_p_dies(brisk: Pair, expected: Expected, moment: Moment) -> None:
    with contextmanager(moment)(brisk) as (_, at_d):
        brisk.kill("p")
    assert at_d.result() == expected(PROMPT)
    brisk.settle()
    prompt = prompt_of(20, seed=4)
    assert brisk.hand_over_to_d(prompt).result() == expected(prompt)
    brisk.settle()


def test_p_dies_before_d_connects(brisk: Pair, expected: Expected) -> None:
    """P's `Welcome` is on its way when P dies: D can connect to nobody, hence fence nobody."""
    with ExitStack() as stack:
        with brisk.p.frozen_transfers():
            at_d = brisk.hand_over_to_d(PROMPT)
            until(lambda: bool(brisk.d.sessions()), "D has sent its Hello")
            stack.enter_context(brisk.d.frozen_transfers())
        until(lambda: bool(brisk.p.sessions()), "P has sent its Welcome")
        brisk.kill("p")
    assert at_d.result() == expected(PROMPT)
    brisk.settle()


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: m.__name__)
def test_d_dies(brisk: Pair, expected: Expected, moment: Moment) -> None:
    with contextmanager(moment)(brisk) as (at_p, _):
        brisk.kill("d")
    until(at_p.over, "P's end")
    brisk.settle()
    prompt = prompt_of(20, seed=4)
    assert brisk.p.generate(prompt).result() == expected(prompt)


def test_the_death_of_p_is_noticed_before_any_deadline(pair: Pair, expected: Expected) -> None:
    with contextmanager(mid_transfer)(pair) as (_, at_d):
        pair.kill("p")
        assert at_d.result(PROMISE_S) == expected(PROMPT)
    pair.settle()


def test_the_death_of_d_is_noticed_before_any_deadline(pair: Pair) -> None:
    """No write is in flight that could fail: P waits for an answer, and holds its blocks."""
    with contextmanager(between_the_legs)(pair):
        assert pair.p.leases() == 1
        pair.kill("d")
        pair.settle()


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: m.__name__)
def test_p_restarts(brisk: Pair, expected: Expected, moment: Moment) -> None:
    """The same address, another generation: no token of the old one counts, the next works."""
    with contextmanager(moment)(brisk) as (_, at_d):
        brisk.kill("p")
    brisk.start_p_again()
    HUB.release()
    assert at_d.result() == expected(PROMPT)
    before = brisk.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}']
    for seed in range(3):
        prompt = prompt_of(30, seed=50 + seed)
        assert brisk.hand_over(prompt)[1].result() == expected(prompt)
    after = brisk.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}']
    assert after - before >= 30, "no hand-over works after the restart"
    brisk.settle()


@pytest.mark.parametrize("wakes_up", ["at once", "never"])
def test_p_stands_still(brisk: Pair, expected: Expected, wakes_up: str) -> None:
    """P's transfer thread stops in the middle, with writes in flight, and may go on much later."""
    HUB.hold()
    with ExitStack() as stack:
        at_p, at_d = brisk.hand_over(PROMPT)
        until(lambda: bool(HUB._in_flight), "a write in flight")
        stack.enter_context(brisk.p.frozen_transfers())
        assert at_d.result() == expected(PROMPT)
        if wakes_up == "never":
            until(lambda: not brisk.d.leftovers(), "D's blocks are free by its fence")
    HUB.release()
    until(at_p.over, "P's end")
    brisk.settle(2 * brisk.timers.lease + PROMISE_S)
    prompt = prompt_of(30, seed=60)
    assert brisk.hand_over(prompt)[1].result() == expected(prompt)
    brisk.settle()


def test_d_stands_still(brisk: Pair, expected: Expected) -> None:
    """P gives its blocks back when the lease is over; D goes on by itself when it wakes up."""
    with brisk.d.frozen_transfers():
        HUB.hold()
        at_p, at_d = brisk.hand_over(PROMPT)
        HUB.release()
        until(at_p.over, "P's end")
        until(
            lambda: not brisk.p.leftovers(), "P's blocks are free", brisk.timers.lease + PROMISE_S
        )
    assert at_d.result() == expected(PROMPT)
    brisk.settle(brisk.timers.total + PROMISE_S)


def test_d_stands_still_after_reserving(brisk: Pair, expected: Expected) -> None:
    HUB.hold()
    with ExitStack() as stack:
        at_p, at_d = brisk.hand_over(PROMPT)
        until(lambda: bool(HUB._in_flight), "a write in flight")
        stack.enter_context(brisk.d.frozen_transfers())
        HUB.release()
        until(at_p.over, "P's end")
        until(
            lambda: not brisk.p.leftovers(), "P's blocks are free", brisk.timers.lease + PROMISE_S
        )
    assert at_d.result() == expected(PROMPT)
    brisk.settle()


def test_d_forgets_what_lives_of_p_have_said(pair: Pair, expected: Expected) -> None:
    """Layouts of sessions that are over are dropped, however often P comes back."""
    receiver = pair.d.transfers.receiver
    assert receiver is not None
    seen: set[bytes] = set()
    for seed in range(4):
        prompt = prompt_of(20, seed=seed)
        _, at_d = pair.hand_over(prompt)
        assert at_d.result() == expected(prompt)
        kept = set(receiver.target.known)
        seen |= kept
        assert len(kept) <= 2, "the session in use, and one that has ended since it began"
        pair.kill("p")
        pair.start_p_again()
    assert len(seen) >= 2, "too few sessions to tell"
