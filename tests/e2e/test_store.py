"""Real nodes with stores: what one life saved, the next one loads, and damage changes no token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.served_pair import POOL, SETTLE_S, settle
from tests.support.servers import Metrics, Node, poll

pytestmark = pytest.mark.e2e

PATIENT = {"store-lookup-timeout": "20", "store-load-timeout": "20"}
PROMPTS: list[list[int]] = [
    np.random.default_rng(seed).integers(3, 384, 200 + seed).tolist() for seed in range(5)
]
BLOCKS = 200 // 16
STORED = "kvbaton_prompt_tokens_total"


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors"))


def tokens_of(node: Node) -> list[list[int]]:
    """What a node alone says to all prompts, asked at the same time."""
    answers = [POOL.submit(node.generate, prompt, max_tokens=12) for prompt in PROMPTS]
    return [list(answer.result().choices[0].token_ids) for answer in answers]


def until_saved(node: Node, folder: Path) -> None:
    """Wait until all blocks of the prompts lie in the folder."""
    wanted = len(PROMPTS) * BLOCKS
    poll("all is saved", lambda: len(files(folder)) >= wanted, SETTLE_S, node.tail)


class Heirs:
    """P and D over a store that a node of an earlier life has filled.

    Attributes:
        said: what that one answered.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        flags = {**PATIENT, "store": f"filesystem:{json.dumps({'path': str(folder)})}"}
        first = cluster.start_node("prefill", "p-first-life", flags)
        self.said = tokens_of(first)
        until_saved(first, folder)
        settle(first)
        assert first.metrics()(STORED, source="store") == 0
        cluster.stop([first])
        self.p = cluster.start_node("prefill", "p-heir", flags)
        self.d = cluster.start_node("decode", "d-heir", flags)
        cluster.until_up(self.p, self.d)


@pytest.fixture(scope="module")
def shared_heirs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heirs]:
    heirs = Heirs(cluster, tmp_path_factory.mktemp("store"))
    yield heirs
    cluster.stop([heirs.p, heirs.d])


@pytest.fixture
def heirs(shared_heirs: Heirs) -> Iterator[Heirs]:
    """Caches empty before the test, books balanced after it."""
    for node in (shared_heirs.p, shared_heirs.d):
        settle(node)
        node.forget()
    yield shared_heirs
    settle(shared_heirs.p, shared_heirs.d)


def test_all_nodes_restart_and_load_what_was_saved(heirs: Heirs, oracle: Oracle) -> None:
    assert heirs.said == [oracle.greedy(prompt, 12) for prompt in PROMPTS]
    assert len(files(heirs.folder)) >= len(PROMPTS) * BLOCKS
    for node in (heirs.p, heirs.d):
        before = node.metrics()
        assert tokens_of(node) == heirs.said
        count: Metrics = node.metrics() - before
        assert count(STORED, source="store") >= len(PROMPTS) * BLOCKS * 16
        assert count(STORED, source="computed") <= len(PROMPTS) * 16
        assert count("kvbaton_store_load_blocks_total", outcome="corrupt") == 0


def corrupt(paths: Sequence[Path]) -> None:
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-9] ^= 0x40
        path.write_bytes(data)


def remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink()


def test_damaged_files_change_no_token(heirs: Heirs) -> None:
    damages: tuple[Callable[[Sequence[Path]], None], ...] = (corrupt, remove)
    for damage in damages:
        for share in (0.01, 0.1, 1.0):
            until_saved(heirs.p, heirs.folder)  # what was computed anew is saved anew
            settle(heirs.p)
            heirs.p.forget()
            there = files(heirs.folder)
            damage(random.Random(0).sample(there, max(1, round(share * len(there)))))
            assert tokens_of(heirs.p) == heirs.said, (damage.__name__, share)
    settle(heirs.p)
    assert tokens_of(heirs.d) == heirs.said
