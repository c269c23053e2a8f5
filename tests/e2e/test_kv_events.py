"""KV events of a node as a process, set by its flag."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster
from tests.engine.kv_subscriber import Subscriber

pytestmark = pytest.mark.e2e


def test_an_indexer_follows_a_node(cluster: Cluster, prompt: Callable[[int], list[int]]) -> None:
    told = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
        "topic": "kv@d-events@tiny",
        "int_block_hashes": False,
    }
    node = cluster.start_node("decode", "d-events", {"kv-events-config": json.dumps(told)})
    cluster.until_up(node)
    try:
        first = prompt(40)
        node.generate(first, max_tokens=2)
        sockets = node.get("/state")["kv_events"]
        subscriber = Subscriber(sockets["endpoint"], sockets["replay_endpoint"], "kv@d-events")
        subscriber.load()
        blocks = subscriber.index.blocks[0]
        assert sorted(tokens for _, tokens in blocks.values()) == sorted([first[:16], first[16:32]])
        assert all(isinstance(block, bytes) and len(block) == 32 for block in blocks)
        node.post("/reset_prefix_cache", None)
        node.generate(prompt(20), max_tokens=2)
        last = node.get("/state")["kv_events"]["published"] - 1
        for number, payload in subscriber.ask((subscriber.last + 1).to_bytes(8, "big")):
            subscriber.take(number, payload)
        assert subscriber.last == last
        assert len(subscriber.index.hashes()) == 1
        subscriber.close()
        assert node.metrics()("kvbaton_kv_event_batches_total") == last + 1
    finally:
        cluster.stop([node])
