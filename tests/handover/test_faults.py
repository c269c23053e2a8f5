"""Writes that fail, wait, land in part or wrong, and notices that get lost: tokens stay right."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvbaton.connectors.protocol.events import Unquarantine
from kvbaton.connectors.transports.faulty import FaultyTransport
from kvbaton.engine.core import EngineCore
from kvbaton.prefill.source_connector import SourceConnector
from kvbaton.types import TransferTimers
from tests.support.engine_pair import PATIENT, PROMISE_S, Expected, Pair
from tests.support.prompts import prompt_of
from tests.support.waiting import until

SHORT = TransferTimers(
    resend=0.1,
    progress_deadline=0.4,
    total=2.0,
    lease=0.6,
    quarantine_limit=0.2,
)
CALM = dataclasses.replace(SHORT, progress_deadline=2.0, total=6.0, lease=2.0)
"""For a hand-over that must come as far as its first write, on a busy machine too."""
RATES = {
    "delay": 0.15,
    "error": 0.05,
    "partial": 0.05,
    "corrupt": 0.05,
    "lose_notice": 0.05,
    "disconnect": 0.02,
}
PROMPTS = [prompt_of(length, seed=length) for length in (1, 4, 30, 31, 64, 90)]


def faulty(**options: Any) -> str:
    return "faulty:" + json.dumps({"inner": "memory", **options})


def injected(core: EngineCore) -> dict[str, int]:
    (source,) = (c for c in core.connectors if isinstance(c, SourceConnector))
    (transport,) = source.sender.transports
    assert isinstance(transport, FaultyTransport)
    return dict(transport.injected)


def crowd(pair: Pair, expected: Expected, order: random.Random) -> None:
    """All prompts at once, twice; every answer must be that of one node."""
    for _ in range(2):
        prompts = order.sample(PROMPTS, len(PROMPTS))
        calls = [pair.hand_over(prompt)[1] for prompt in prompts]
        for prompt, call in zip(prompts, calls, strict=True):
            assert call.result() == expected(prompt)
        for node in (pair.p, pair.d):
            node.ask("reset_prefix_cache")


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 24))]
)
def test_any_mix(make_pair: Callable[..., Pair], expected: Expected, seed: int) -> None:
    pair = make_pair(timers=SHORT, transport=faulty(seed=seed, delay_polls=30, **RATES))
    crowd(pair, expected, random.Random(seed))
    pair.settle(SHORT.lease + SHORT.total + PROMISE_S)


def test_why_a_hand_over_failed_is_in_the_log(
    make_pair: Callable[..., Pair], expected: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(timers=CALM, transport=faulty(corrupt=[0]))
    assert pair.hand_over(PROMPTS[0])[1].result() == expected(PROMPTS[0])
    [line] = [r.getMessage() for r in caplog.records if "hand-over" in r.getMessage()]
    assert line.endswith("do not match their digests")


@pytest.mark.parametrize("fault", sorted(RATES))
def test_each_alone(make_pair: Callable[..., Pair], expected: Expected, fault: str) -> None:
    """The first write is hit; a hand-over after that works again."""
    pair = make_pair(timers=CALM, transport=faulty(**{fault: [0]}))
    prompt = PROMPTS[-1]
    assert pair.hand_over(prompt)[1].result() == expected(prompt)
    assert injected(pair.p.core) == {fault: 1}
    pair.settle(CALM.lease + PROMISE_S)
    for node in (pair.p, pair.d):  # P's may be empty: a write ends its prompt before a step is over
        node.ask("reset_prefix_cache")
    moved = 'kvbaton_prompt_tokens_total{source="transferred"}'
    before = pair.d.counters()[moved]
    until(lambda: pair.hand_over(prompt)[1].result() == expected(prompt), "a right answer")
    if fault != "disconnect":
        assert pair.d.counters()[moved] - before == len(prompt)
    pair.settle(CALM.lease + PROMISE_S)


def test_a_flipped_byte_is_seen(make_pair: Callable[..., Pair], expected: Expected) -> None:
    pair = make_pair(timers=CALM, transport=faulty(corrupt=[0]))
    prompt = PROMPTS[-1]
    assert pair.hand_over(prompt)[1].result() == expected(prompt)
    counters = pair.d.counters()
    assert counters["kvbaton_transfer_digests_failed_total"] == 1
    assert counters["kvbaton_load_failures_total"] == 1
    pair.settle()


def test_wrong_bytes_again_and_again(make_pair: Callable[..., Pair], expected: Expected) -> None:
    """A peer that lies is put out; requests are answered all the same."""
    timers = dataclasses.replace(PATIENT, quarantine_limit=600.0)
    pair = make_pair(timers=timers, transport=faulty(corrupt=1.0))
    for seed in range(8):
        prompt = prompt_of(20, seed=seed)
        assert pair.hand_over(prompt)[1].result() == expected(prompt)
    assert pair.d.counters()["kvbaton_transfer_digests_failed_total"] < 8, "nobody was put out"
    pair.settle()


@pytest.mark.parametrize("fault", ["error", "partial", "corrupt", "lose_notice"])
def test_policy_fail(make_pair: Callable[..., Pair], expected: Expected, fault: str) -> None:
    """``--kv-load-failure-policy fail``: an error that says why, and the next request is fine."""
    pair = make_pair(
        timers=SHORT,
        transport=faulty(**{fault: [0]}),
        d={"kv_load_failure_policy": "fail"},
    )
    prompt = PROMPTS[-1]
    _, at_d = pair.hand_over(prompt)
    assert at_d.result() == []
    assert at_d.finish_reason == "error"
    assert "could not be loaded" in str(at_d.error)
    pair.settle(SHORT.lease + PROMISE_S)
    assert pair.hand_over(prompt)[1].result() == expected(prompt)
    pair.settle(SHORT.lease + PROMISE_S)


@pytest.mark.parametrize("host", ["[::1%?]", "[::1%a b]", "[::1", "x" * 245])
def test_a_reference_that_is_no_address_ends_neither_node(pair: Pair, host: str) -> None:
    """As it came in a request that passed no HTTP door, or one that is open too wide."""
    for node, request in zip((pair.p, pair.d), pair.requests(PROMPTS[2]), strict=True):
        assert request.transfer is not None
        named = msgspec.structs.replace(request.transfer, role="target", peer=f"tcp://{host}:1")
        call = node.add(msgspec.structs.replace(request, request_id="hostile", transfer=named))
        until(call.over, "a refusal")
        assert call.rejected is not None
        assert call.rejected.status == 400
    _, of_d = pair.hand_over(PROMPTS[2])
    of_d.result()
    pair.settle()


def test_what_raises_costs_nothing_of_what_was_told_with_it(
    pair: Pair, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a quarantine is told behind the delivery that the scheduler stumbles over."""
    prompt, finish_load = prompt_of(30), pair.d.scheduler.finish_load
    receiver = pair.d.transfers.receiver
    assert receiver is not None

    def stumble(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(pair.d.scheduler, "finish_load", finish_load)
        raise RuntimeError("a bug")

    def deliver_with_the_rest(action: Any) -> None:
        if isinstance(action, Unquarantine):
            for one in (*held, action):
                to_engine(one)
        else:
            held.append(action)

    held, to_engine = list[Any](), receiver.to_engine
    monkeypatch.setattr(pair.d.scheduler, "finish_load", stumble)
    monkeypatch.setattr(receiver, "to_engine", deliver_with_the_rest)
    assert pair.hand_over(prompt)[1].result() == expected(prompt)
    pair.settle()
