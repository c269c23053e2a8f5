"""KV events of a node as a process, set by its flag."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.kv_subscriber import Subscriber
from tests.support.served_pair import settle
from tests.support.servers import Node

pytestmark = pytest.mark.e2e


def test_an_indexer_follows_a_node(small: Node, prompt: Callable[[int], list[int]]) -> None:
    settle(small)
    small.forget()
    before = small.get("/state")["kv_events"]["published"]
    first = prompt(40)
    small.generate(first, max_tokens=2)
    sockets = small.get("/state")["kv_events"]
    subscriber = Subscriber(sockets["endpoint"], sockets["replay_endpoint"], "kv@d-small")
    subscriber.load()
    blocks = subscriber.index.blocks[0]
    assert sorted(tokens for _, tokens in blocks.values()) == sorted([first[:16], first[16:32]])
    assert all(isinstance(block, bytes) and len(block) == 32 for block in blocks)
    small.forget()
    small.generate(prompt(20), max_tokens=2)
    last = small.get("/state")["kv_events"]["published"] - 1
    for number, payload in subscriber.ask((subscriber.last + 1).to_bytes(8, "big")):
        subscriber.take(number, payload)
    assert before < subscriber.last == last
    assert len(subscriber.index.hashes()) == 1
    subscriber.close()
    assert small.metrics()("kvbaton_kv_event_batches_total") == last + 1
