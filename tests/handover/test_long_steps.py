"""A step that lasts long on either side does not stop the hand-over's conversation."""

from __future__ import annotations

import time

import pytest

from kvbaton.connectors.transfer import thread
from tests.support.engine_node import HUB
from tests.support.engine_pair import Expected, Pair
from tests.support.prompts import prompt_of
from tests.support.waiting import until

PROMPT = prompt_of(30)


def test_on_p_while_it_prefills(brisk: Pair, expected: Expected) -> None:
    """P's transfer thread tells of progress while P's engine stands still: D does not give up."""
    with brisk.p.held_step() as held:
        _, at_d = brisk.hand_over(PROMPT)
        until(held.waited_for, "P in a step")
        limit = time.monotonic() + 3 * brisk.timers.progress_deadline
        until(lambda: time.monotonic() > limit, "a long step")
    assert at_d.result() == expected(PROMPT)
    assert brisk.d.counters()["kvbaton_load_failures_total"] == 0
    brisk.settle()


def test_blocks_are_reported_before_their_step_is_over(brisk: Pair, expected: Expected) -> None:
    """So that all is prepared when it is; nothing is posted before."""
    sender = brisk.p.transfers.sender
    assert sender is not None
    with brisk.p.held_step() as held:
        _, at_d = brisk.hand_over(PROMPT)
        until(held.waited_for, "P in its first step")
        until(lambda: brisk.p.leases() == 1, "P has the reservation")
        held.let_one_pass()
        until(held.waited_for, "P in its second step")

        def reported() -> bool:
            return bool(brisk.p.transfers.inspect(sender.state)["reports_waiting"] == 2)

        until(reported, "the reports of both")
        assert not sender.published["posted_bytes"], "its rank has not come to the sums"
    assert at_d.result() == expected(PROMPT)
    brisk.settle()


def test_a_cached_prefix_leaves_while_the_rest_is_computed(
    brisk: Pair, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, prompt = brisk.p.transfers.sender, (*PROMPT, *prompt_of(9))
    assert sender is not None
    brisk.p.generate(PROMPT, max_tokens=1).result()
    with brisk.p.held_step() as held:
        with monkeypatch.context() as patch:
            patch.setattr(brisk.p.scheduler, "plan", lambda: None)  # nor its step launched before
            _, at_d = brisk.hand_over(prompt)
            until(lambda: brisk.p.leases() == 1, "P has the reservation")
            until(lambda: brisk.p.gauges()["kvbaton_transfers_live"] == 1, "its core knows it")
        until(held.waited_for, "P in the step")
        until(lambda: bool(sender.published["posted_bytes"]), "the prefix is on its way")
    assert at_d.result() == expected(prompt)
    assert brisk.p.counters()['kvbaton_prompt_tokens_total{source="local_cache"}'] > 0
    brisk.settle()


def test_on_d_while_it_decodes(brisk: Pair, expected: Expected) -> None:
    """All lands, is verified and acknowledged while D's engine stands still."""
    other = brisk.d.generate(prompt_of(5), max_tokens=200)
    other.wait_tokens(1)
    HUB.hold()
    _, at_d = brisk.hand_over(PROMPT)
    until(lambda: brisk.p.leases() == 1, "P has the reservation")
    with brisk.d.held_step() as held:
        until(held.waited_for, "D in a step")
        HUB.release()
        until(lambda: not brisk.p.leftovers(), "P is acknowledged and free")
        assert not at_d.outputs
    assert at_d.result() == expected(PROMPT)
    assert brisk.d.counters()["kvbaton_load_failures_total"] == 0
    other.abort()
    brisk.settle()


def test_on_d_while_it_cancels(brisk: Pair) -> None:
    """P's death is noticed, and its blocks fenced, while D's engine stands still."""
    other = brisk.d.generate(prompt_of(5), max_tokens=200)
    other.wait_tokens(1)
    HUB.hold()
    _, at_d = brisk.hand_over(PROMPT)
    until(lambda: bool(HUB._in_flight), "a write in flight")
    at_d.abort()
    until(at_d.over, "D's end")
    with brisk.d.held_step() as held:
        until(held.waited_for, "D in a step")
        HUB.release()
        until(lambda: not brisk.p.leftovers(), "P is free")
    other.abort()
    brisk.settle()


def test_a_question_about_a_stuck_transfer_thread_harms_nobody(
    brisk: Pair, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "ANSWER_S", 0.2)
    with brisk.p.frozen_transfers(), pytest.raises(AssertionError, match="did not answer"):
        brisk.p.ask("state")
    assert brisk.hand_over(PROMPT)[1].result() == expected(PROMPT)
    brisk.settle()
