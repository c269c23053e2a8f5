"""What a node tells its store, what the store tells it, and what both show of that."""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from kvbaton.connectors.store import Found, Pieces, Usage
from kvbaton.connectors.stores.memory import MemoryStore
from kvbaton.connectors.stores.threaded import ThreadedStore
from kvbaton.engine.build import ConnectorContext, ConnectorFactory, MakeConnectors
from kvbaton.engine.executor import Executor
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.kv_events import BlockRemoved, BlockStored, KVEventLog
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.store_calls import StoreCalls
from kvbaton.engine.store_saves import tenant_of
from kvbaton.engine.store_worker import Forgotten, StoreWorker
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import AddRequest, Metrics, SamplingParams
from kvbaton.server.node import stores_of
from tests.store_connector.test_store_faults import store_of
from tests.support.engine_node import Node, greedy
from tests.support.engine_pair import Expected
from tests.support.held_store import Backend, Box, HeldStore
from tests.support.prompts import prompt_of
from tests.support.store_nodes import Nodes, count, rest, save
from tests.support.waiting import until

MEMORY = 'memory:{"max_bytes": 16000000}'


class Told(Backend):
    """What it has of its own, a test sets."""

    usages: Usage = Usage()

    def usage(self) -> Usage:
        return self.usages


class ToldStore(ThreadedStore):
    def __init__(self, name: str) -> None:
        super().__init__(name, Told(Box(name)))


def ask_as(node: Node, name: str, tenant: str = "", salt: str = "", seed: int = 0) -> None:
    node.add(
        AddRequest(
            request_id=name,
            token_ids=array("I", prompt_of(40, seed)),
            params=greedy({}),
            tenant=tenant,
            cache_salt=salt,
        )
    ).result()
    rest(node)


def gauge(node: Node, name: str) -> float:
    return node.gauges()[f"kvbaton_store_{name}"]


def test_a_node_tells_its_router_what_it_read_and_wrote(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    node, prompt = nodes.start(box.spec), prompt_of(24)

    def moved() -> dict[str, dict[str, float]]:
        return stores_of(Metrics(counters=node.counters(), gauges={}))

    assert moved() == {"HeldStore": {"load": 0, "save": 0}}
    save(node, prompt)
    assert moved() == {"HeldStore": {"load": 0, "save": sum(map(len, box.objects.values()))}}
    assert node.generate(prompt).result() == expected(prompt)
    rest(node)
    assert 0 < moved()["HeldStore"]["load"] <= moved()["HeldStore"]["save"]
    nodes.end(node)


def test_bytes_are_counted_by_tenant(nodes: Nodes) -> None:
    node = nodes.start(MEMORY)
    for number, tenant in enumerate(("ann", "bob", "bob")):
        ask_as(node, f"r{number}", tenant, seed=number)
    label = 'tenant_bytes{store="memory",tenant="%s"}'
    until(lambda: label % "bob" in str(node.gauges()), "usage is asked for")
    until(lambda: gauge(node, label % "bob") == 2 * gauge(node, label % "ann") > 0, "bytes")
    nodes.end(node)


def test_a_tenant_is_told_without_secrets() -> None:
    def named(tenant: str, salt: str) -> str:
        params = SamplingParams()
        return tenant_of(
            AddRequest(
                request_id="r",
                token_ids=array("I", (1,)),
                params=params,
                tenant=tenant,
                cache_salt=salt,
            )
        )

    assert named("", "") == ""
    assert named("team-1", "salt") == "team-1"
    hidden = {named("", "salt"), named("", "pepper"), named('a"b', ""), named("x" * 65, "")}
    assert len(hidden) == 4
    assert all(len(name) == 16 and "salt" not in name for name in hidden)


def test_calls_are_timed(nodes: Nodes, box: Box) -> None:
    node = nodes.start(box.spec)
    for _ in range(2):
        ask_as(node, "r")
        node.ask("reset_prefix_cache")
    found = node.core.metrics().histograms
    for call in ("lookup", "load", "store", "delete", "claim"):
        (name,) = (name for name in found if f'call="{call}"' in name)
        assert name.startswith('kvbaton_store_call_seconds{store="HeldStore"')
        assert (sum(found[name].counts) > 0) == (call in ("lookup", "load", "store"))
    nodes.end(node)


def test_a_store_shows_metrics_of_its_own(nodes: Nodes) -> None:
    node = nodes.start(f"{__name__}:ToldStore")
    plugin = store_of(node).worker.calls.plugin
    assert isinstance(plugin, ToldStore)
    assert isinstance(plugin.backend, Told)
    many = {f"g{number}": float(number) for number in range(100)}
    plugin.backend.usages = Usage(counters={"retries": 3}, gauges=many)
    until(lambda: "plugin_g63" in str(node.gauges()), "its gauges")
    assert sum("_plugin_g" in name for name in node.gauges()) == 64
    assert count(node, "store_plugin_retries") == 3
    plugin.backend.usages = Usage(gauges={'bad{x="': 1.0})
    until(lambda: node.gauges() and count(node, "store_errors", call="usage") > 0, "an error")
    assert count(node, "store_plugin_retries") == 3  # as it was
    nodes.end(node)


def test_evictions_are_told_and_what_was_evicted_is_saved_again(
    nodes: Nodes, expected: Expected
) -> None:
    logs: list[KVEventLog] = []

    class LogEvents:
        sends_blocks = False

        @property
        def items(self) -> ConnectorFactory:
            return self

        def __call__(self, surroundings: ConnectorContext) -> MakeConnectors:
            return self.make

        def make(self, executor: Executor, scheduler: Scheduler) -> list[KVConnector]:
            logs.append(KVEventLog(scheduler.blocks))
            return [*logs]

    node = nodes.start(MEMORY, LogEvents())
    plugin = store_of(node).worker.calls.plugin
    prompt = prompt_of(40)
    assert node.generate(prompt).result() == expected(prompt)
    rest(node)
    saved = count(node, "store_save_blocks", outcome="stored")
    told = [event for log in logs for event in log.take() if event.medium == "memory"]  # type: ignore[union-attr]
    assert sum(len(e.block_hashes) for e in told if isinstance(e, BlockStored)) == saved
    arena = plugin.backend  # type: ignore[attr-defined]
    with arena._changed:
        arena._make_room(16_000_000, "")  # all must go
    until(lambda: store_of(node).state()["known"] == 0, "the notice")
    (removed,) = (e for log in logs for e in log.take() if isinstance(e, BlockRemoved))
    assert removed.medium == "memory"
    assert sorted(removed.block_hashes) == sorted(h for e in told for h in e.block_hashes)  # type: ignore[union-attr]
    node.ask("reset_prefix_cache")
    assert node.generate(prompt).result() == expected(prompt)
    rest(node)
    assert count(node, "store_save_blocks", outcome="stored") == 2 * saved
    nodes.end(node)


def test_what_has_a_time_to_live_is_computed_after_it(nodes: Nodes, expected: Expected) -> None:
    node = nodes.start(MEMORY, store_ttl=0.3)
    prompt, began = prompt_of(40), time.monotonic()

    def computes() -> bool:
        before = count(node, "prompt_tokens", source="computed")
        node.ask("reset_prefix_cache")
        assert node.generate(prompt, max_tokens=1).result() == expected(prompt, max_tokens=1)
        rest(node)
        return count(node, "prompt_tokens", source="computed") - before == 40

    assert computes()
    until(computes, "that it expires")
    assert time.monotonic() - began >= 0.3
    nodes.end(node)


@pytest.mark.parametrize(
    ("ttl", "told"), [(0.0, "more than 0"), (5.0, "can't let single objects expire")]
)
def test_a_time_to_live_that_nobody_keeps_is_refused(
    nodes: Nodes, box: Box, ttl: float, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        nodes.start(box.spec, store_ttl=ttl)


def test_a_reset_of_the_store(nodes: Nodes, expected: Expected, box: Box) -> None:
    node = nodes.start(MEMORY)
    prompt = prompt_of(40)
    for _ in range(2):
        assert node.generate(prompt).result() == expected(prompt)
        rest(node)
        node.ask("reset_prefix_cache")
        assert node.ask("reset_store") == 12
    assert count(node, "prompt_tokens", source="computed") == 80
    nodes.end(node)
    other = nodes.start(box.spec)
    with pytest.raises(AssertionError, match="can't clear"):
        other.ask("reset_store")
    nodes.end(other)
    alone = nodes.start(None)
    assert alone.ask("reset_store") == 0
    nodes.end(alone)


class FirstContract(HeldStore):
    """Has the methods as contract 1.0 had them, and takes nothing else."""

    contract = "1.0"

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False) -> Future[Found]:  # type: ignore[override]
        return super().lookup(keys, pin=pin)

    def store(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> Future[list[bool]]:  # type: ignore[override]
        return super().store(keys, sources)


def test_stores_of_the_first_contract_are_asked_as_ever(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    node = nodes.start(
        box.spec.replace("tests.support.held_store:HeldStore", f"{__name__}:FirstContract")
    )
    prompt = prompt_of(40)
    for _ in range(2):
        assert node.generate(prompt).result() == expected(prompt)
        rest(node)
        node.ask("reset_prefix_cache")
    assert count(node, "prompt_tokens", source="store") == 39
    assert count(node, "store_errors") == 0
    nodes.end(node)


def test_two_who_compute_the_same_at_once_save_it_once(
    nodes: Nodes, expected: Expected, tmp_path: Path
) -> None:
    store = f'filesystem:{{"path": "{tmp_path}"}}'
    both = [nodes.start(store) for _ in range(2)]
    for seed in range(4):
        prompt = prompt_of(60, seed)
        calls = [node.generate(prompt) for node in both]
        assert [call.result() for call in calls] == [expected(prompt)] * 2
    for node in both:
        rest(node)
    saved = sum(count(node, "store_save_blocks", outcome="stored") for node in both)
    assert saved == len(list(tmp_path.rglob("*.safetensors"))) == 4 * 17
    assert list((tmp_path / "kvbaton-1" / "claims").iterdir()) == []
    for node in both:
        nodes.end(node)


class TellsMoreMeanwhile(deque[bytes]):
    """Another thread tells of one more while those that are known are taken."""

    def __init__(self, worker: StoreWorker) -> None:
        super().__init__()
        self._forget = worker._forget

    def popleft(self) -> bytes:
        key, forget = super().popleft(), self._forget
        self._forget = lambda keys: None
        forget([KEYS[2]])
        return key


KEYS = [bytes([number]) * 32 for number in range(3)]


def test_what_is_evicted_while_others_are_told_is_told_too() -> None:
    """It waited for the next save, for ever in a node that saves no more."""
    worker = StoreWorker(StoreCalls(MemoryStore("shelf")), cast(Any, None), (), bytes(32))
    worker._forgotten = TellsMoreMeanwhile(worker)
    worker._forget(KEYS[:2])
    worker._loop.post(worker._loop.stop)
    worker._loop.run()
    told = [key for order in worker.take() for key in cast(Forgotten, order).keys]
    os.close(worker.wake_fd)
    assert sorted(told) == KEYS
