"""D asks after P has finished, or twice, or for what nobody knows: never wrong, never stuck."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvbaton.connectors.protocol import source
from kvbaton.messages.engine import AddRequest, Command, TransferSpec
from kvbaton.types import TransferTimers
from tests.support.engine_node import Call, Node
from tests.support.engine_pair import Expected, Pair
from tests.support.prompts import prompt_of
from tests.support.waiting import until

PROMPT = prompt_of(50)
TRANSFERRED = 'kvbaton_prompt_tokens_total{source="transferred"}'


def evict_all(node: Node) -> None:
    """Crowd a node's cache until nothing of an earlier prompt is left."""
    for seed in range(40, 44):
        node.generate(prompt_of(240, seed), max_tokens=1).result()


def nothing(node: Node) -> None:
    """Leave the cache as it is."""


def reset(node: Node) -> None:
    """Empty the cache."""
    assert node.ask("reset_prefix_cache") > 0


@pytest.mark.parametrize("meanwhile", [nothing, evict_all, reset])
def test_first_p_then_d(pair: Pair, expected: Expected, meanwhile: object) -> None:
    assert callable(meanwhile)
    of_p, of_d = pair.requests(PROMPT)
    first = pair.p.add(of_p).result()
    assert first == expected(PROMPT)[:1]
    pair.settle()
    meanwhile(pair.p)
    assert pair.d.add(of_d).result() == expected(PROMPT)
    assert pair.d.counters()[TRANSFERRED] == len(PROMPT)
    pair.settle()


def test_p_remembers_so_many_prompts_only_that_nobody_has_claimed(
    pair: Pair, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is forgotten; who claims it late computes it himself."""
    monkeypatch.setattr(source, "MIN_IDLE_TOKENS", len(PROMPT))
    monkeypatch.setattr(source, "MAX_IDLE_TOKENS", 3 * len(PROMPT))
    late = []
    for seed in range(5):
        of_p, of_d = pair.requests(prompt_of(len(PROMPT), seed))
        pair.p.add(of_p).result()
        late.append(of_d)
    pair.settle()
    until(lambda: pair.p.gauges()["kvbaton_transfers_announced"] == 3, "the oldest are forgotten")
    for seed in (4, 0):
        assert pair.d.add(late[seed]).result() == expected(prompt_of(len(PROMPT), seed))
    assert pair.d.counters()[TRANSFERRED] == len(PROMPT), "only the younger one was there"
    pair.settle()


def test_who_reserves_late_waits_for_no_queue(make_pair: Callable[..., Pair]) -> None:
    """Its client has had the first token: the run for it goes before prompts that have yet to."""
    pair = make_pair(p={"max_num_seqs": 1, "max_num_batched_tokens": 64})
    of_p, of_d = pair.requests(PROMPT)
    pair.p.add(of_p).result()
    pair.settle()
    queue, again = pair.p.scheduler, f"{of_p.request_id}#1"
    with pair.p.held_step() as held:
        calls = pair.p.add_together([pair.requests(prompt_of(20, n))[0] for n in range(4)])
        until(held.waited_for, "P computes the first")
        assert len(queue.requests) == len(calls)
        calls.append(pair.d.add(of_d))
        until(lambda: pair.p.leases() == 1, "P's transfer thread has engaged")
        while again not in [s.request.request_id for s in queue.running]:
            held.let_one_pass()
            until(held.waited_for, "P computes the next")
        assert len(queue.waiting) >= 2
    for call in calls:
        call.result()
    pair.settle()


def test_seeded_first_token_is_the_same_when_computed_again(pair: Pair, expected: Expected) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 8}
    of_p, of_d = pair.requests(PROMPT, **how)
    first = pair.p.add(of_p).result()
    reset(pair.p)
    tokens = pair.d.add(of_d).result()
    assert tokens == expected(PROMPT, **how)
    assert tokens[:1] == first


def test_d_continues_from_the_first_token_that_was_told(
    pair: Pair, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a step of another shape may sample another one; here the logits are turned over."""
    of_p, of_d = pair.requests(PROMPT)
    first = pair.p.add(of_p).result()
    reset(pair.p)
    model = pair.p.worker.model
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda *args: -logits(*args))
    assert pair.d.add(of_d).result() == expected(PROMPT)
    assert first == expected(PROMPT)[:1]
    assert pair.d.counters()[TRANSFERRED] == len(PROMPT)
    pair.settle()


def test_abort_while_p_computes_again(pair: Pair, expected: Expected) -> None:
    """The run that a late reservation caused must stop, and its blocks with it."""
    of_p, of_d = pair.requests(PROMPT)
    pair.p.add(of_p).result()
    reset(pair.p)
    with pair.p.held_step() as held:
        at_d = pair.d.add(of_d)
        held.let_one_pass()
        until(held.waited_for, "P computes the next chunk")
        at_d.abort()
        until(at_d.over, "D's end")
        until(lambda: not pair.d.leftovers(), "P's transfer thread has drained the transfer")
    assert_at_rest(pair, expected)


def test_abort_while_p_computes_again_what_it_has_just_sampled(
    pair: Pair, expected: Expected
) -> None:
    """The reservation comes while P's last chunk is computed.

    P's transfer thread gets the first tokens right after it; the engine runs the prompt again.
    """
    of_p, of_d = pair.requests(prompt_of(30))
    with pair.p.held_step() as held:
        pair.p.add(of_p)
        held.let_one_pass()
        until(held.waited_for, "P's last chunk")
        at_d = pair.d.add(of_d)
        until(lambda: pair.p.leases() == 1, "P's transfer thread has engaged")
        pair.p.mailbox.post(Command(command_id=0, name="reset_prefix_cache"))
        held.let_one_pass()
        until(held.waited_for, "P computes the first chunk again")
        at_d.abort()
        until(lambda: pair.p.leases() == 0, "P's transfer thread has released")
    assert_at_rest(pair, expected)


def assert_at_rest(pair: Pair, expected: Expected) -> None:
    """Nothing is left, and the next hand-over works."""
    pair.settle()
    prompt = prompt_of(30, seed=9)
    assert pair.hand_over(prompt)[1].result() == expected(prompt)
    pair.settle()


@pytest.fixture
def brisk(make_pair: Callable[..., Pair]) -> Pair:
    """Deadlines that a test can wait for."""
    return make_pair(timers=TransferTimers(progress_deadline=1.0, total=1.0, lease=1.0))


def test_p_never_heard_of_it(brisk: Pair, expected: Expected) -> None:
    """P waits a `lease` for the request; then D computes by itself."""
    _, of_d = brisk.requests(PROMPT)
    assert brisk.d.add(of_d).result() == expected(PROMPT)
    assert brisk.d.counters()[TRANSFERRED] == 0
    brisk.settle()


# --- names used twice ---


def again(request: AddRequest, name: str) -> AddRequest:
    return msgspec.structs.replace(request, request_id=name)


def refused(call: Call) -> str | None:
    until(call.over, "an answer")
    return call.rejected.code if call.rejected is not None else call.error


def test_a_transfer_id_is_used_twice_on_p(pair: Pair, expected: Expected) -> None:
    of_p, of_d = pair.requests(PROMPT)
    with pair.p.held_step():
        at_p = pair.p.add(of_p)
        twin = pair.p.add(again(of_p, "twin"))
    assert "transfer_consumed" in str(refused(twin))
    assert pair.d.add(of_d).result() == expected(PROMPT)
    assert at_p.result() == expected(PROMPT)[:1]
    late = pair.p.add(again(of_p, "late twin"))
    if refused(late) is None:  # it was faster than the transfer thread's refusal, and harmed nobody
        assert late.tokens == expected(PROMPT)[:1]
    pair.settle()


def test_a_transfer_id_is_used_twice_on_d(pair: Pair, expected: Expected) -> None:
    of_p, of_d = pair.requests(PROMPT)
    at_p = pair.p.add(of_p)
    with pair.d.held_digests():
        at_d = pair.d.add(of_d)
        twin = pair.d.add(again(of_d, "twin"))
        assert "transfer_consumed" in str(refused(twin))
        at_p.result()
    assert at_d.result() == expected(PROMPT)
    pair.settle()


def test_d_asks_again_for_what_it_got(pair: Pair, expected: Expected) -> None:
    """The blocks are in D's cache, or P refuses: right tokens in both cases."""
    of_p, of_d = pair.requests(PROMPT)
    pair.p.add(of_p)
    assert pair.d.add(of_d).result() == expected(PROMPT)
    reset(pair.d)
    assert pair.d.add(again(of_d, "again")).result() == expected(PROMPT)
    pair.settle()


def test_one_transfer_id_for_two_prompts(pair: Pair, expected: Expected) -> None:
    """D asks under P's transfer id for another prompt: it must not get P's bytes."""
    other = prompt_of(50, seed=3)
    of_p, of_d = pair.requests(PROMPT)
    at_p = pair.p.add(of_p)
    at_d = pair.d.add(msgspec.structs.replace(of_d, token_ids=array("I", other)))
    assert at_d.result() == expected(other)
    until(at_p.over, "P's end")
    assert pair.d.counters()[TRANSFERRED] == 0
    pair.settle()


def test_nobody_listens_at_the_address(brisk: Pair, expected: Expected) -> None:
    spec = TransferSpec(role="target", transfer_id=bytes(16), peer="tcp://127.0.0.1:9")
    _, of_d = brisk.requests(PROMPT)
    at_d = brisk.d.add(msgspec.structs.replace(of_d, transfer=spec))
    assert at_d.result() == expected(PROMPT)
    brisk.settle()
