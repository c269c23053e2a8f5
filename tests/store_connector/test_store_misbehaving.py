"""A bug in a plug-in costs hits, not the node."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvbaton.engine import store_calls, store_connector, store_worker
from kvbaton.engine.store_calls import Job, JobLoop, StoreCalls
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import Command
from tests.store_connector import misbehaving
from tests.store_connector.misbehaving import (
    BUGS,
    BuildRaises,
    HangsAtStop,
    HangsInLookup,
    NoCapabilities,
    NoKeys,
    NoName,
    OddFutureOfLoad,
    OpenRaises,
    OpenTimesOut,
    OwnName,
    RaisesInHealth,
    RaisesInUsage,
    RoundKeys,
    ShortContains,
    SlowUsage,
    Sound,
    TellsItsPassword,
)
from tests.store_connector.test_store_faults import store_of
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_node import Node
from tests.support.engine_pair import Expected
from tests.support.held_store import Box
from tests.support.prompts import prompt_of
from tests.support.store_nodes import Nodes, count, rest, save
from tests.support.waiting import PATIENCE_S, promised, until

REQUESTS = 24
LOOKUP_S = LOAD_S = 0.2
MOST_S = 15.0
"""For all requests; each of them once waited for a slow `usage`, 3 s."""
LOGGED = {
    "ListLookup": "lookup", "NoneLoad": "load",
    "ShortLookup": "lookup", "ShortContains": "lookup", "ShortLoad": "load",
    "ShortStore": "store", "PutsNone": "store", "NoFuture": "lookup", "RaisesInLookup": "lookup",
    "ExitsInLoad": "load", "RaisesInUsage": "usage", "RaisesInHealth": "health",
    "GeneratorExitInLoad": "load", "NoTextInLookup": "lookup", "NoTextInUsage": "usage",
    "WritesSources": "store", "OddFutureOfLoad": "load", "ForgetsWhatIsNoKey": "load",
    "WrongUsage": "usage", "RaisesInClose": "close", "HangsAtStop": "close",
}  # fmt: skip
"""Which call is counted and logged as wrong, by class."""
TOLD = {
    "ListLookup": "it answered with a list, not a Found",
    "NoneLoad": "it answered with a NoneType, not a Sequence",
    "WrongUsage": "it answered with a dict, not a Usage",
    "PutsNone": "it answered with a NoneType, not a bool",
    "NoFuture": "it returned Found, not a concurrent.futures.Future",
}
"""What the log's line says of it."""


def spec_of(store: type) -> str:
    return f"{store.__module__}:{store.__name__}"


@pytest.fixture(autouse=True)
def let_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What hangs hangs for the whole test, and no longer."""
    monkeypatch.setattr(store_worker, "CLOSE_S", 0.3)
    misbehaving.HUNG.clear()
    yield
    misbehaving.HUNG.set()


@pytest.mark.parametrize("store", BUGS)
def test_a_bug_costs_hits(
    nodes: Nodes, expected: Expected, store: type[Sound], caplog: pytest.LogCaptureFixture
) -> None:
    node = nodes.start(spec_of(store), store_lookup_timeout=LOOKUP_S, store_load_timeout=LOAD_S)
    began = time.monotonic()
    for number in range(REQUESTS):
        prompt = prompt_of(24, number % 4)
        assert node.generate(prompt, max_tokens=2).result() == expected(prompt, max_tokens=2)
        node.ask("metrics")
        if number % 8 == 3 and store is not HangsInLookup:
            if store is not OddFutureOfLoad or number == 3:  # its loads never end
                rest(node)
            node.ask("reset_prefix_cache")
    assert time.monotonic() - began < promised(MOST_S)
    assert node.gauges()["kvbaton_unhealthy"] == 0
    if store is RaisesInUsage:  # while its other calls work, it is used
        assert count(node, "store_lookups", outcome="hit") > 0
    worker = store_of(node).worker
    assert worker.failure is None
    assert all(thread.is_alive() for thread in (worker._thread, worker.status._thread))
    nodes.stop(node)
    if (call := LOGGED.get(store.__name__)) is not None:
        assert store_of(node).worker.calls.errors[call] > 0
        (line, *_) = (r.message for r in caplog.records if r.message.startswith(f"{call} "))
        assert store.__name__ in line
        assert TOLD.get(store.__name__, "") in line
        if call in ("lookup", "load", "store") and store is not OddFutureOfLoad:  # its `cancel`
            assert len(line.partition("first ")[2].partition(" ")[0]) == 64, line


def test_a_call_back_that_comes_too_early_makes_nobody_wait() -> None:
    class Early(Future[int]):
        def add_done_callback(self, fn: Callable[[Future[int]], object]) -> None:
            fn(self)

        def result(self, timeout: float | None = None) -> int:
            assert self.done(), "whoever asks would wait for ever"
            return super().result(timeout)

    store, early, answers = Sound("early"), Early(), list[int]()
    store.delete = lambda keys: early  # type: ignore[method-assign]
    calls, loop = StoreCalls(store), JobLoop()

    def ask() -> Job[None]:
        answers.append((yield from calls.delete([bytes(32)])))

    loop.go_on(job := ask())
    assert (answers, loop.num_jobs) == ([], 1)
    early.set_result(3)
    loop.go_on(job)
    assert answers == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "store",
    [ShortContains, RaisesInUsage, RaisesInHealth, SlowUsage, HangsInLookup, HangsAtStop],
)
def test_a_thousand_requests(nodes: Nodes, store: type[Sound]) -> None:
    """Side by side with a node without a store: the same answers, and as soon but for 10 ms.

    On a machine that is busy, where a request takes longer, twice that.
    """
    plain, ours = nodes.start(None), nodes.start(spec_of(store), store_lookup_timeout=0.5)
    waited: dict[Node, list[float]] = {plain: [], ours: []}
    for number in range(1000):
        prompt = prompt_of(24, number % 50)
        tokens = []
        for node in (plain, ours) if number % 2 else (ours, plain):
            began = time.monotonic()
            call = node.generate(prompt, max_tokens=2)
            until(lambda call=call: bool(call.tokens), "a token")  # type: ignore[misc]
            waited[node].append(time.monotonic() - began)
            tokens.append(call.result())
            if number % 10 == 9:
                node.mailbox.post(Command(command_id=-1, name="metrics"))
            if number % 50 == 49:
                node.ask("reset_prefix_cache")
        assert tokens[0] == tokens[1]
    assert ours.gauges()["kvbaton_unhealthy"] == 0
    told = {}
    for name, node in (("without", plain), ("with", ours)):
        times = sorted(waited[node])
        told[name] = (sum(times) / 1000, times[500], times[990], times[-1])
        print(store.__name__, name, "mean p50 p99 max ms", *(f"{t * 1e3:.1f}" for t in told[name]))
    for told_with, without in zip(told["with"][:2], told["without"][:2], strict=True):
        assert told_with < without + max(0.01, without)
    nodes.stop(ours)


def test_what_works_again_is_used_again(
    nodes: Nodes, expected: Expected, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_calls, "PAUSE_S", 0.1)
    monkeypatch.setattr(store_connector, "RETRY_S", 0.1)
    node = nodes.start(box.spec)
    prompt = prompt_of(24)

    def ask() -> float:
        rest(node)
        node.ask("reset_prefix_cache")
        assert node.generate(prompt, max_tokens=2).result() == expected(prompt, max_tokens=2)
        return count(node, "store_lookups", outcome="hit")

    ask()
    assert ask() == 1
    box.failing.add("load")
    ask()
    ask()
    assert count(node, "store_lookups", outcome="skipped") > 0
    assert count(node, "store_circuit_opened", calls="read") == 1
    is_open = 'kvbaton_store_circuit_open{store="HeldStore",calls="%s"}'
    assert [node.gauges()[is_open % calls] for calls in ("read", "write")] == [1, 0]
    assert count(node, "store_load_blocks", outcome="failed") > 0
    assert count(node, "store_load_blocks", outcome="missing") == 0
    box.failing.clear()
    until(lambda: ask() > 2, "a hit")
    assert node.gauges()[is_open % "read"] == 0
    nodes.end(node)


def test_what_fails_for_days_is_left_alone_for_a_minute_at_a_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    breaker, now, pauses = store_calls.CircuitBreaker("calls"), 0.0, []
    for _ in range(1100):
        breaker.failed(now, "it is away")
        began = now
        while not breaker.due(now):
            now += 1.0
        pauses.append(now - began)
    assert (pauses[:7], set(pauses[7:])) == ([1, 2, 4, 8, 16, 32, 60], {60.0})
    for _ in range(2):
        breaker.worked()
    assert caplog.text.count("calls: asked again") == 1, "the log tells that it is over, once"
    breaker.failed(now, "again")
    assert breaker.due(now + 1.0)


def test_cancelled_loads_are_not_missing(nodes: Nodes, box: Box) -> None:
    node = nodes.start(box.spec)
    prompt = prompt_of(24)
    save(node, prompt)
    with box.held("load"):
        call = node.generate(prompt)
        until(lambda: box.is_waiting("load"), "a load")
        call.abort()
        until(call.over, "the abort")
    rest(node)
    assert count(node, "store_load_blocks", outcome="cancelled") == 6
    assert count(node, "store_load_blocks", outcome="missing") == 0
    assert count(node, "store_errors") == 0
    nodes.end(node)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            'memory:{"max_bytes": "lots"}',
            "memory's option max_bytes has a wrong type: Expected `int`",
        ),
        ('filesystem:{"path": 5}', "path has a wrong type: Expected `str`"),
        ('filesystem:{"path": "/tmp/x", "max_bytes": [1]}', "Expected `int | null`, got `array`"),
        ('memory:{"threads": "4"}', "threads has a wrong type"),
        ('memory:{"max_bytes": -5}', "--store: memory's max_bytes: must be above 0, not -5"),
        ('memory:{"threads": 0}', "--store: memory's threads: must be at least 1, not 0"),
        (spec_of(NoCapabilities), "declares no valid capabilities"),
        (spec_of(NoKeys), "declares max_keys=0; it must be at least 1"),
        (spec_of(OwnName), "the name 'OwnName \"shelf\"' of a store can't be a metric's label"),
        (spec_of(NoName), "NoName is not a Store: it lacks name"),
        ('memory:{"name": "a\\nb"}', "the name 'a\\nb' of a store can't be a metric's label"),
        (spec_of(RoundKeys), "declares max_keys=16.0, which is no int"),
        (spec_of(OpenTimesOut), "can't open OpenTimesOut: TimeoutError: no answer from 10.0.0.7"),
        (spec_of(OpenRaises), "can't open OpenRaises: TypeError: 'str' and 'int'"),
        (spec_of(BuildRaises), "BuildRaises can't be built: KeyError: 'HOME_OF_VENDOR'"),
    ],
)
def test_a_wrong_option_is_told(nodes: Nodes, spec: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        nodes.start(spec)


def test_a_wrong_option_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    """Weights may take minutes."""
    folder = make_checkpoint(tmp_path / "model")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="--model: the checkpoint has no tensor"):
        Node("node", folder, store="memory")
    with pytest.raises(ConfigError, match="--store: memory does not take these options"):
        Node("node", folder, store='memory:{"colour": 1}')
    with pytest.raises(ConfigError, match="--store-ttl: must be more than 0"):
        Node("node", folder, store="memory", store_ttl=0.0)
    with pytest.raises(ConfigError, match="--store: the name 'two words!' of a store can't be"):
        Node("node", folder, store='memory:{"name": "two words!"}')


def test_an_option_that_open_finds_wrong_is_told_as_it_was_written(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_PASSWORD", "hunter2")
    told = "--store: TellsItsPassword's password: '{env:KV_PASSWORD}' is too short"
    with pytest.raises(ConfigError, match=re.escape(told)) as raised:
        nodes.start(f'{spec_of(TellsItsPassword)}:{{"password": "{{env:KV_PASSWORD}}"}}')
    assert "hunter2" not in "".join(traceback.format_exception(raised.value))


def test_a_process_ends_though_a_store_hangs() -> None:
    """As a node's core does: the interpreter alone would wait for the thread of the pool."""
    done = subprocess.run(
        [sys.executable, "-c", HANGING],
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ends without waiting for the threads HangsAtStop-store_0" in done.stderr


HANGING = f"""
import logging, threading
logging.basicConfig()
from kvbaton.connectors.registry import load_store
from kvbaton.engine.process import leave
store = load_store({spec_of(HangsAtStop)!r})
opening = threading.Thread(target=store.open, daemon=True)  # so its pools' threads are daemons, too
opening.start()
opening.join()
leave()
"""
