"""Whatever a store does, the tokens are the same, nothing hangs, and the ledger balances."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbaton.connectors.keys import block_keys, root_key
from kvbaton.connectors.objects import HEADER_BYTES
from kvbaton.engine import store_calls, store_connector, store_saves
from kvbaton.engine.store_connector import StoreConnector
from kvbaton.messages.engine import AddRequest
from tests.support.engine_node import Call, Node, greedy
from tests.support.engine_pair import Expected
from tests.support.held_store import Box
from tests.support.prompts import prompt_of
from tests.support.store_nodes import Nodes, count, rest
from tests.support.waiting import until

LENGTH = 60
PROMPTS = [prompt_of(LENGTH, seed) for seed in range(4)]


def fill(node: Node, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    """Save prompts, and forget them locally."""
    for call in [node.generate(prompt) for prompt in prompts]:
        call.result()
    rest(node)
    node.ask("reset_prefix_cache")


def chosen(box: Box, share: float) -> list[bytes]:
    keys = sorted(box.objects)
    return random.Random(0).sample(keys, max(1, round(share * len(keys))))


def check_all(node: Node, expected: Expected, **params: object) -> list[Call]:
    calls = [node.generate(prompt, **params) for prompt in PROMPTS]
    for call, prompt in zip(calls, PROMPTS, strict=True):
        assert call.result() == expected(prompt, **params)
    rest(node)
    return calls


@pytest.mark.parametrize(
    ("share", "place"),
    [(0.1, 3), (0.1, HEADER_BYTES - 1), (0.1, HEADER_BYTES), (0.01, -1), (0.1, -1), (1.0, -1)],
)
def test_corrupt_objects(
    nodes: Nodes,
    expected: Expected,
    box: Box,
    share: float,
    place: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_connector, "RETRY_S", 0.5)
    node = nodes.start(box.spec)
    fill(node)
    bad = chosen(box, share)
    box.corrupt(bad, place)
    check_all(node, expected)
    found = count(node, "store_load_blocks", outcome="corrupt")
    assert 0 < found <= len(bad)
    # They were deleted, and what was computed anew is saved anew: now all is well.
    rest(node)
    node.ask("reset_prefix_cache")
    loaded = count(node, "prompt_tokens", source="store")
    until(lambda: box.calls["delete"] >= found, "deletions")
    until(lambda: retried(node), "the end of the pause")
    check_all(node, expected)
    assert count(node, "store_load_blocks", outcome="corrupt") == found
    assert count(node, "prompt_tokens", source="store") - loaded == len(PROMPTS) * (LENGTH - 1)


def test_wrong_bytes_are_told_once(
    nodes: Nodes,
    expected: Expected,
    box: Box,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They cost their time each time, and a counter alone is not looked at."""
    monkeypatch.setattr(store_calls, "WARN_S", 3600.0)
    node = nodes.start(box.spec)
    fill(node)
    box.corrupt(list(box.objects))
    check_all(node, expected)
    (told,) = [line for line in caplog.messages if "wrong bytes" in line]
    assert told.startswith(f"{store_of(node).worker.calls.name} gave wrong bytes: ")
    assert any(key.hex() in told for key in box.objects)


def store_of(node: Node) -> StoreConnector:
    (found,) = (c for c in node.core.connectors if isinstance(c, StoreConnector))
    return found


def retried(node: Node) -> bool:
    """Whether no object is passed over any more."""
    return not store_of(node)._bad


def test_only_the_tokens_from_the_bad_block_on_are_computed(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    node = nodes.start(box.spec)
    prompt = PROMPTS[0]
    fill(node, [prompt])
    store = store_of(node).worker
    tenth = block_keys(root_key(store.identity, ""), prompt, 4)[9]
    box.corrupt([store.forms[0].key(tenth)])
    computed = count(node, "prompt_tokens", source="computed")
    assert node.generate(prompt).result() == expected(prompt)
    assert count(node, "prompt_tokens", source="store") == 9 * 4
    assert count(node, "prompt_tokens", source="computed") - computed == LENGTH - 9 * 4
    assert count(node, "load_failures") == 1
    rest(node)


def test_what_is_wrong_is_gone_before_the_request_goes_on(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    """Else what it computes and saves anew could be deleted in its stead."""
    node = nodes.start(box.spec)
    fill(node, PROMPTS[:1])
    saved, form = dict(box.objects), store_of(node).worker.forms[0]
    chain = block_keys(root_key(store_of(node).worker.identity, ""), PROMPTS[0], 4)
    keys = [form.key(key) for key in chain]  # not the answer's
    box.corrupt(keys)
    with box.held("delete"):
        call = node.generate(PROMPTS[0])
        until(lambda: box.is_waiting("delete"), "a deletion")
        for _ in range(2):  # turns of the core, which would have seen the load's end
            assert len(node.ask("state")["store"]["loads"]) == 1
    assert call.result() == expected(PROMPTS[0])
    rest(node)
    assert all(box.objects[key] == saved[key] for key in keys)


@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
def test_objects_that_go_between_lookup_and_load(
    nodes: Nodes, expected: Expected, box: Box, share: float
) -> None:
    node = nodes.start(box.spec)
    fill(node)
    box.lost |= set(chosen(box, share))
    check_all(node, expected)
    assert count(node, "store_load_blocks", outcome="missing") > 0


@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
def test_deleted_objects(nodes: Nodes, expected: Expected, box: Box, share: float) -> None:
    node = nodes.start(box.spec)
    fill(node)
    for key in chosen(box, share):
        del box.objects[key]
    check_all(node, expected)
    assert count(node, "load_failures") == 0


@pytest.mark.parametrize("kind", ["lookup", "load", "store"])
def test_calls_that_fail(nodes: Nodes, expected: Expected, box: Box, kind: str) -> None:
    node = nodes.start(box.spec)
    fill(node, PROMPTS[:2])
    box.failing.add(kind)
    check_all(node, expected)
    outcomes = {"lookup": "store_lookups", "load": "store_loads", "store": "store_save_blocks"}
    assert count(node, outcomes[kind], outcome="failed") > 0
    box.failing.clear()
    check_all(node, expected)


def test_a_store_without_room(
    nodes: Nodes, expected: Expected, box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    node = nodes.start(box.spec)
    box.room = False
    for _ in range(2):
        check_all(node, expected)
        node.ask("reset_prefix_cache")
    assert count(node, "store_save_blocks", outcome="refused") > 0
    assert caplog.text.count("HeldStore has no room: it refused ") == 1


@pytest.mark.parametrize("kind", ["lookup", "load", "store"])
def test_a_store_that_hangs_holds_nobody_up(
    nodes: Nodes, expected: Expected, box: Box, kind: str
) -> None:
    node = nodes.start(box.spec, store_lookup_timeout=0.2, store_load_timeout=0.2)
    fill(node, PROMPTS[:2])
    until(lambda: len(box.objects) > 0, "saves")
    with box.held(kind):
        for prompt in PROMPTS:
            assert node.generate(prompt).result() == expected(prompt)
        if kind == "load" and count(node, "store_loads", outcome="late"):
            # The blocks stay as they are until the store is done with them.
            assert node.gauges()['kvbaton_blocks{group="0",owner="incoming"}'] > 0
    rest(node)


@pytest.mark.parametrize("kind", ["load", "store"])
def test_what_a_store_owes_for_too_long_keeps_no_node_from_draining(
    nodes: Nodes, expected: Expected, box: Box, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for what may never come until it was killed."""
    monkeypatch.setattr(store_saves, "SAVE_S", 0.3)
    node = nodes.start(box.spec, store_load_timeout=0.2)
    fill(node, PROMPTS[:1])
    with box.held(kind):
        for prompt in PROMPTS[:2]:
            assert node.generate(prompt).result() == expected(prompt)
        until(lambda: box.is_waiting(kind), "a call that is held")
        until(lambda: node.ask("drain"), "nothing that it waits for")
        node.core.draining = False
    rest(node)


def test_a_store_that_owes_too_many_blocks_makes_the_node_unhealthy(
    nodes: Nodes,
    expected: Expected,
    box: Box,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They can't be taken from it, so what does not fit beside them would wait for ever."""
    monkeypatch.setattr(store_connector, "LATE_S", 1.0)
    node = nodes.start(box.spec, store_load_timeout=0.2, num_blocks=33, max_model_len=128)
    prompt = prompt_of(100)
    for end in (28, 56, 84, 100):  # of 33 blocks no more than 8 wait to be saved
        fill(node, [prompt[:end]])
    with box.held("load"):
        call = node.generate(prompt)
        until(lambda: count(node, "store_loads", outcome="late") == 1, "its deadline")
        assert node.gauges()["kvbaton_unhealthy"] == 0
        until(lambda: node.gauges()["kvbaton_unhealthy"] == 1, "what /live tells")
        assert not call.over()
    told = r"2[45] of 32 blocks are in loads that HeldStore owes for more than 1 s"
    assert re.search(told, caplog.text)
    assert call.result() == expected(prompt)
    until(lambda: node.gauges()["kvbaton_unhealthy"] == 0, "the end of it")
    rest(node)


def test_a_late_load_can_not_spoil_what_others_compute(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    node = nodes.start(box.spec, store_lookup_timeout=60.0, store_load_timeout=0.1, num_blocks=65)
    prompt = PROMPTS[0]
    fill(node, [prompt])
    with box.held("load"):
        call = node.generate(prompt)
        assert call.result() == expected(prompt)
        late = node.generate(PROMPTS[1], max_tokens=100)
        late.wait_tokens(5)
        box.corrupt(list(box.objects))  # what lands late is garbage
    assert late.result() == expected(PROMPTS[1], max_tokens=100)
    rest(node)
    assert count(node, "store_loads", outcome="late") == 1


@pytest.mark.parametrize("kind", ["lookup", "load", "store"])
def test_aborts(nodes: Nodes, expected: Expected, box: Box, kind: str) -> None:
    node = nodes.start(box.spec)
    if kind != "store":
        fill(node)
    with box.held(kind):
        calls = [node.generate(prompt, max_tokens=40) for prompt in PROMPTS]
        until(lambda: box.is_waiting(kind), "a call that is held")
        for call in calls:
            call.abort()
        until(lambda: all(call.over() for call in calls), "the ends")
        assert {call.finish_reason for call in calls} == {"abort"}
        assert node.imbalance == 0
    rest(node)
    check_all(node, expected)


@pytest.mark.parametrize("kind", ["lookup", "load"])
def test_deadlines(nodes: Nodes, expected: Expected, box: Box, kind: str) -> None:
    node = nodes.start(box.spec)
    fill(node)
    with box.held(kind):
        request = AddRequest(
            request_id="late", token_ids=array("I", PROMPTS[0]), params=greedy({}), deadline_s=0.3
        )
        call = node.add(request)
        until(call.over, "its end")
        assert "deadline" in (call.error or "")
    rest(node)
    check_all(node, expected)


def test_followers_go_on_when_the_load_they_wait_for_is_aborted(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    node = nodes.start(box.spec)
    fill(node)
    with box.held("load"):
        first, second = node.generate(PROMPTS[0]), node.generate(PROMPTS[0])
        until(lambda: node.gauges()["kvbaton_sequences_waiting"] == 1, "a follower")
        first.abort()
        until(first.over, "the abort")
    assert second.result() == expected(PROMPTS[0])
    rest(node)


def test_a_slow_store_loses_saves_and_never_a_step(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    node = nodes.start(box.spec)
    with box.held("store"):
        for seed in range(12):
            prompt = prompt_of(100, seed)
            assert node.generate(prompt).result() == expected(prompt)
        assert count(node, "store_save_blocks", outcome="dropped") > 0
    rest(node)


def test_saves_give_way_when_blocks_are_scarce(nodes: Nodes, expected: Expected, box: Box) -> None:
    node = nodes.start(box.spec, num_blocks=65)
    prompts = [prompt_of(100, seed) for seed in range(6)]
    with box.held("store"):
        calls = [node.generate(prompt, max_tokens=60) for prompt in prompts]
        for call, prompt in zip(calls, prompts, strict=True):
            assert call.result() == expected(prompt, max_tokens=60)
    rest(node)


def test_the_policy_fail_ends_a_request_whose_load_fails(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    node = nodes.start(box.spec, kv_load_failure_policy="fail")
    fill(node)
    box.corrupt(list(box.objects))
    call = node.generate(PROMPTS[0])
    until(call.over, "its end")
    assert "could not be loaded from the store" in (call.error or "")
    rest(node)
    assert node.generate(PROMPTS[0]).result() == expected(PROMPTS[0])  # by now it was deleted
    rest(node)


FAULTS: dict[str, dict[str, object]] = {
    "slow-1": {"delay": 0.01, "delay_s": 1.0},
    "slow-10": {"delay": 0.1, "delay_s": 1.0},
    "slow-100": {"delay": 1.0, "delay_s": 1.0, "on": ["lookup", "load"]},
    "errors": {"error": 0.1, "on": ["lookup", "load", "store"]},
    "damage": {"corrupt": 0.1, "partial": 0.1, "lose": 0.1, "on": ["lookup", "load", "store"]},
    "corrupt-100": {"corrupt": 1.0},
    "disconnects": {"disconnect": 0.05, "outage_s": 0.3, "on": ["lookup", "load", "store"]},
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_faulty_store_over_files(
    nodes: Nodes, expected: Expected, tmp_path: Path, faults: dict[str, object]
) -> None:
    inner = {"filesystem": {"path": str(tmp_path / "kv")}}
    store = f"faulty:{json.dumps({'inner': inner, **faults})}"
    node = nodes.start(store, store_lookup_timeout=0.3, store_load_timeout=0.4)
    for _ in range(4):
        check_all(node, expected)
        node.ask("reset_prefix_cache")


def test_a_store_that_hangs_holds_no_more_than_a_quarter_of_the_pool(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    """What it reads can't be taken from it, so a prompt that needed that would wait for ever."""
    node = nodes.start(box.spec, num_blocks=33, max_model_len=128)
    with box.held("store"):
        for seed in (1, 2, 3):
            prompt = prompt_of(20 * 4, seed)
            assert node.generate(prompt).result() == expected(prompt)
            in_flight = store_of(node)._saves.state()["saves_in_flight"]
            assert sum(in_flight) <= node.core.scheduler.blocks.pool.usable // 4
    rest(node)


def test_a_prompt_that_lacks_what_a_store_that_hangs_reads_fails_once_that_is_late(
    nodes: Nodes, expected: Expected, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for its deadline, and all others behind it."""
    monkeypatch.setattr(store_saves, "SAVE_S", 0.3)
    node = nodes.start(box.spec, num_blocks=33, max_model_len=128)
    first, long = prompt_of(20 * 4, 1), prompt_of(30 * 4, 2)
    with box.held("store"):
        assert node.generate(first).result() == expected(first)
        calls = [node.generate(long, max_tokens=2), node.generate(first, max_tokens=2)]
        assert calls[0].result() == []
        assert "the store HeldStore has been saving" in (calls[0].error or "")
        assert calls[1].result() == expected(first, max_tokens=2)
        # One that grows until it lacks them says what it has.
        grows = node.generate(prompt_of(20 * 4, 3), max_tokens=47)
        assert 0 < len(grows.result()) < 47
        assert "KV blocks: the store" in (grows.error or "")
    rest(node)
    assert node.generate(long, max_tokens=2).result() == expected(long, max_tokens=2)
    rest(node)
