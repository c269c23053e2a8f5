"""Abort at any moment: blocks are free again soon, and never before nothing can land in them."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kvbaton.decode.target_connector import TargetConnector
from kvbaton.engine.request import Request
from kvbaton.messages.engine import AbortRequest
from tests.support.engine_node import HUB, Call, Node
from tests.support.engine_pair import PATIENT, PROMISE_S, Expected, Pair
from tests.support.prompts import prompt_of
from tests.support.waiting import until

PROMPT = prompt_of(100)
LONG = 100

Moment = Callable[[Pair], Iterator[tuple[Call, Call]]]


def loading(node: Node) -> bool:
    return node.gauges()["kvbaton_sequences_loading"] > 0


def queued(pair: Pair) -> Iterator[tuple[Call, Call]]:
    """Both nodes have their one place taken."""
    others = [node.generate(prompt_of(8, seed=1), max_tokens=240) for node in (pair.p, pair.d)]
    for other in others:
        other.wait_tokens(1)
    calls = pair.hand_over(PROMPT, max_tokens=LONG)
    for call in calls:
        assert call.node.gauges()["kvbaton_sequences_waiting"] == 1
    yield calls
    for other in others:
        other.abort()


def reserving(pair: Pair) -> Iterator[tuple[Call, Call]]:
    """P has the request, but its transfer thread does not answer."""
    with pair.p.frozen_transfers():
        calls = pair.hand_over(PROMPT, max_tokens=LONG)
        until(lambda: loading(pair.d), "D reserves")
        yield calls


def mid_transfer(pair: Pair) -> Iterator[tuple[Call, Call]]:
    """Some writes are in flight, and P still computes."""
    HUB.hold()
    with ExitStack() as stack:
        calls = pair.hand_over(PROMPT, max_tokens=LONG)
        until(lambda: bool(HUB._in_flight), "a write in flight")
        stack.enter_context(pair.p.held_step())
        yield calls
    HUB.release()


def between_the_legs(pair: Pair) -> Iterator[tuple[Call, Call]]:
    """P is done and all bytes have landed, but D has not verified them."""
    with pair.d.held_digests():
        calls = pair.hand_over(PROMPT, max_tokens=LONG)
        calls[0].result()
        sent = len(HUB._in_flight)
        assert not sent
        yield calls


def streaming(pair: Pair) -> Iterator[tuple[Call, Call]]:
    """D decodes."""
    calls = pair.hand_over(PROMPT, max_tokens=LONG)
    calls[1].wait_tokens(3)
    yield calls


MOMENTS = (queued, reserving, mid_transfer, between_the_legs, streaming)


@pytest.mark.parametrize("sides", ["both", "d", "p"])
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: m.__name__)
def test_blocks_are_free_soon(
    make_pair: Callable[..., Pair], expected: Expected, moment: Moment, sides: str
) -> None:
    places = {"max_num_seqs": 1} if moment is queued else {}
    pair = make_pair(p=places, d=places)
    with contextmanager(moment)(pair) as (at_p, at_d):
        for side, call in (("p", at_p), ("d", at_d)):
            if sides in (side, "both"):
                call.abort()
        if sides != "p":
            until(at_d.over, "D's end")
    if sides != "p":
        assert at_d.finish_reason == "abort"
    else:
        assert at_d.result() == expected(PROMPT, max_tokens=LONG)
    until(at_p.over, "P's end")
    pair.settle()
    assert_serves(pair, expected)


@pytest.mark.parametrize("side", ["d", "p"])
def test_an_abort_does_not_wait_for_the_other_engine(
    pair: Pair, expected: Expected, side: str
) -> None:
    """P's engine stands still in a long step; the transfer threads settle it between themselves."""
    with pair.p.held_step() as held:
        calls = dict(zip("pd", pair.hand_over(PROMPT), strict=True))
        until(held.waited_for, "P in a step")
        until(lambda: pair.p.leases() == 1, "P has the reservation")
        calls[side].abort()
        if side == "d":
            until(lambda: not pair.d.leftovers(), "D's blocks are free", PROMISE_S)
            until(lambda: pair.p.leases() == 0, "P has let go", PROMISE_S)
    assert calls["d"].result() == ([] if side == "d" else expected(PROMPT))
    pair.settle()


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "stays"])
def test_a_hand_over_fails_only_who_still_waits_for_it(
    pair: Pair, expected: Expected, caplog: pytest.LogCaptureFixture, leaves: bool
) -> None:
    """D, in a step, hears that P has stopped before it hears that the client has left."""
    other = pair.d.generate(prompt_of(8, seed=1), max_tokens=LONG)
    other.wait_tokens(1)
    with ExitStack() as stack:
        with pair.p.held_step():
            at_p, at_d = pair.hand_over(PROMPT)
            until(lambda: pair.p.leases() == 1, "P has the reservation")
            held = stack.enter_context(pair.d.held_step())
            until(held.waited_for, "D in a step")
            at_p.abort()
        until(lambda: not any(s["attempts"] for s in pair.d.sessions()), "D's thread knows")
        if leaves:
            at_d.abort()
    assert at_d.result() == ([] if leaves else expected(PROMPT))
    pair.settle()
    told = [line for line in caplog.messages if "the hand-over failed" in line]
    assert len(told) == (0 if leaves else 1)
    assert not [name for name in pair.d.gauges() if name.startswith("kvbaton_wire_failures")]


@pytest.mark.parametrize("sides", ["both", "d", "p"])
def test_before_admission(pair: Pair, expected: Expected, sides: str) -> None:
    """The abort reaches the core together with the request."""
    of_p, of_d = pair.requests(PROMPT)
    gone = AbortRequest(request_id=of_p.request_id)
    at_p = pair.p.add(of_p, *([gone] if sides != "d" else []))
    at_d = pair.d.add(of_d, *([gone] if sides != "p" else []))
    until(at_p.over, "P's end")
    tokens = at_d.result()
    assert tokens == (expected(PROMPT) if sides == "p" else [])
    pair.settle()
    assert_serves(pair, expected)


def assert_serves(pair: Pair, expected: Expected, seed: int = 77) -> None:
    """The next hand-over works as if nothing had been."""
    prompt = prompt_of(30, seed)
    assert pair.hand_over(prompt)[1].result() == expected(prompt)
    pair.settle()


def test_only_p_gets_it_and_goes(pair: Pair, expected: Expected) -> None:
    of_p, _ = pair.requests(PROMPT)
    call = pair.p.add(of_p)
    call.abort()
    until(call.over, "P's end")
    pair.settle()
    assert_serves(pair, expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_aborts(make_pair: Callable[..., Pair], expected: Expected, seed: int) -> None:
    rng = random.Random(seed)
    pair = make_pair(d={"num_blocks": 80}, p={"num_blocks": 80})
    prompts = [prompt_of(rng.choice((1, 4, 17, 60)), seed=100 * seed + i) for i in range(18)]
    calls = [pair.hand_over(prompt) for prompt in prompts]
    doomed = {i: rng.randrange(160) for i in range(18) if rng.random() < 0.6}

    def all_aborted() -> bool:
        emitted = sum(len(call.outputs) for pair_of in calls for call in pair_of)
        finished = all(at_d.over() for _, at_d in calls)
        for i in [i for i, when in doomed.items() if finished or when <= emitted]:
            del doomed[i]
            for call in rng.choice(((0, 1), (1, 0), (1,))):
                calls[i][call].abort()
        return not doomed

    until(all_aborted, "the moment of the last abort")
    for prompt, (_, at_d) in zip(prompts, calls, strict=True):
        tokens = at_d.result()
        right = expected(prompt)
        assert tokens == right[: len(tokens)]
        assert at_d.finish_reason == "abort" or tokens == right
    pair.settle()


# --- none is reused early ---


@dataclass
class Held:
    """D's blocks while writes to the aborted request are in flight."""

    pair: Pair
    others: list[Call]
    prompts: list[tuple[int, ...]]

    def memory(self) -> np.ndarray:
        """D's pool as bytes [block, bytes of a block], without the null block."""
        node = self.pair.d
        memory = node.core.executor.memories[0][0]
        raw = ctypes.string_at(memory.address, memory.num_bytes)
        return np.frombuffer(raw, np.uint8).reshape(
            node.core.executor.layouts[0][0].num_blocks, -1
        )[1:]

    def changed_by_release(self) -> list[int]:
        """Let the writes land while D's steps stand still; blocks of others that changed."""
        node = self.pair.d
        with node.held_step() as held:
            until(held.waited_for, "D in a step")
            tables = [s.tables[0] for s in node.scheduler.sequences()]
            owned = sorted({block for table in tables for block in table})
            before = self.memory()
            HUB.release()
            changed = np.flatnonzero((before != self.memory()).any(axis=1)) + 1
            assert len(changed), "the writes landed nowhere"
        return sorted(set(changed.tolist()) & set(owned))


def hold_abort_and_fill(pair: Pair) -> Held:
    """Hold a hand-over's writes, abort it on D, and crowd D's pool with other requests."""
    HUB.hold()
    _, at_d = pair.hand_over(PROMPT)
    until(lambda: bool(HUB._in_flight), "writes in flight")
    at_d.abort()
    until(at_d.over, "D's end")
    prompts = [prompt_of(9, seed=i) for i in range(8)]
    others = [pair.d.generate(prompt, max_tokens=50) for prompt in prompts]
    full = "kvbaton_preemptions_total"
    until(lambda: pair.d.counters()[full] > 0, "D's pool full to the brim")
    return Held(pair, others, prompts)


@pytest.fixture
def tight(make_pair: Callable[..., Pair]) -> Pair:
    """D's pool: 25 blocks for the aborted prompt, 38 for all others."""
    return make_pair(timers=PATIENT, d={"num_blocks": 64, "max_model_len": 128})


def test_late_writes_change_nobodys_bytes(tight: Pair, expected: Expected) -> None:
    held = hold_abort_and_fill(tight)
    assert tight.d.gauges()['kvbaton_blocks{group="0",owner="incoming"}'] == 25
    assert held.changed_by_release() == []
    for prompt, call in zip(held.prompts, held.others, strict=True):
        assert call.result() == expected(prompt, max_tokens=50)
    tight.settle()


def test_a_planted_early_free_is_caught(
    tight: Pair, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = TargetConnector.finished

    def free_at_once(target: TargetConnector, request: Request) -> None:
        live = list(target._live)
        finished(target, request)
        for attempt in set(live) - set(target._live):
            target.scheduler.blocks.release_incoming(target._reserved.pop(attempt))

    monkeypatch.setattr(TargetConnector, "finished", free_at_once)
    held = hold_abort_and_fill(tight)
    assert held.changed_by_release() != []
    tokens = [call.result() for call in held.others]
    assert tokens != [expected(prompt, max_tokens=50) for prompt in held.prompts]
    tight.settle()


def test_quarantine_counts_as_absent(tight: Pair, expected: Expected) -> None:
    """A request that needs the quarantined blocks waits for them, and then runs."""
    HUB.hold()
    _, at_d = tight.hand_over(PROMPT)
    until(lambda: bool(HUB._in_flight), "writes in flight")
    at_d.abort()
    until(at_d.over, "D's end")
    prompt = prompt_of(120, seed=5)
    large = tight.d.generate(prompt, max_tokens=4)
    small = tight.p.generate(prompt_of(5), max_tokens=4)
    assert small.result() == expected(prompt_of(5), max_tokens=4)
    assert tight.d.gauges()["kvbaton_sequences_waiting"] in (0, 1)
    HUB.release()
    assert large.result() == expected(prompt, max_tokens=4)
    tight.settle()
