"""Nodes whose store is a connector written for vLLM, ``examples/vllm_connector``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import MakePair
from tests.support.cluster import DECODE, Cluster
from tests.support.oracle import Oracle
from tests.support.served_pair import SETTLE_S, settle
from tests.support.servers import Node, poll

pytestmark = pytest.mark.e2e

PACKAGE = Path(__file__).parents[2] / "examples" / "vllm_connector"
PROMPT: list[int] = np.random.default_rng(7).integers(3, 384, 200).tolist()
BLOCKS = len(PROMPT) // 16
PROMPT_TOKENS = "kvbaton_prompt_tokens_total"
STORE_BYTES = "kvbaton_store_bytes_total"


@pytest.fixture(scope="module")
def heirs(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Node, Node]]:
    """P and D over the files that a node of an earlier life has saved."""
    options = {
        "connector": "kv_files:KVFilesConnector",
        "extra_config": {"path": str(tmp_path_factory.mktemp("kv"))},
        "persistent": True,
        "shared": True,
        "block_bytes": 16384,
    }
    flags = {"store": f"vllm:{json.dumps(options)}"}
    flags |= {"store-lookup-timeout": "20", "store-load-timeout": "20"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PACKAGE), prepend=":")
        first = cluster.start_node("prefill", "p-vllm-first", flags)
        cluster.until_up(first)
        first.generate(PROMPT, max_tokens=8)
        saved = "kvbaton_store_save_blocks_total"
        poll("all is saved", lambda: first.metrics()(saved) >= BLOCKS, SETTLE_S, first.tail)
        settle(first)
        assert first.metrics()(STORE_BYTES, direction="load") == 0
        cluster.stop([first])
        p = cluster.start_node("prefill", "p-vllm", flags)
        d = cluster.start_node("decode", "d-vllm", {**DECODE, **flags})
    cluster.until_up(p, d)
    yield p, d
    cluster.stop([p, d])


def test_two_nodes_load_what_an_earlier_life_saved(
    heirs: tuple[Node, Node], make_pair: MakePair, oracle: Oracle
) -> None:
    """The same tokens; and by the metrics all whole blocks came through the connector."""
    pair = make_pair(*heirs)
    assert pair.tokens(PROMPT, max_tokens=8) == oracle.greedy(PROMPT, 8)
    settle(*heirs)
    counts = [node.metrics() for node in heirs]
    assert sum(count(PROMPT_TOKENS, source="store") for count in counts) >= BLOCKS * 16
    assert sum(count(STORE_BYTES, direction="load") for count in counts) >= BLOCKS * 16
    assert counts[0](PROMPT_TOKENS, source="computed") <= 2 * (len(PROMPT) % 16)
