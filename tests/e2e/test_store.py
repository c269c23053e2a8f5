"""Real nodes with stores: what one life saved, the next one loads, and damage changes no token."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.pair import POOL, Pair, settle
from tests.e2e.servers import Metrics, Node

pytestmark = pytest.mark.e2e

PATIENT = {"store-lookup-timeout": "20", "store-load-timeout": "20"}
PROMPTS: list[list[int]] = [
    np.random.default_rng(seed).integers(3, 384, 200 + seed).tolist() for seed in range(5)
]
BLOCKS = 200 // 16
_lives = itertools.count()


@pytest.fixture
def fresh(model: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of this test only."""
    cluster = Cluster(tmp_path, model)
    yield cluster
    cluster.stop()


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors"))


def spec(path: Path, **options: Any) -> str:
    inner = {"path": str(path), **options}
    return f"filesystem:{json.dumps(inner)}"


def tokens_of(node: Node) -> list[list[int]]:
    """What a node alone says to all prompts, asked at the same time."""
    answers = [POOL.submit(node.generate, prompt, max_tokens=12) for prompt in PROMPTS]
    return [list(answer.result().choices[0].token_ids) for answer in answers]


class Crew:
    """P and D over one filesystem store, asked one after the other."""

    def __init__(self, cluster: Cluster, store: str, **flags: str) -> None:
        self.cluster = cluster
        wanted = {**PATIENT, **flags, "store": store}
        life = next(_lives)
        self.p = cluster.start_node("prefill", f"p{life}", wanted)
        self.d = cluster.start_node("decode", f"d{life}", wanted)
        cluster.until_up(self.p, self.d)
        self._before = {node: node.metrics() for node in (self.p, self.d)}

    def settle(self) -> None:
        settle(self.p, self.d)

    def forget(self) -> None:
        self.settle()
        self.p.forget()
        self.d.forget()

    def count(self, node: Node, name: str, **labels: str) -> float:
        """A counter since the start."""
        metrics: Metrics = node.metrics() - self._before[node]
        return metrics(f"kvbaton_{name}_total", **labels)

    def stop(self) -> None:
        self.settle()
        self.cluster.stop()


def test_all_nodes_restart_and_load_what_was_saved(
    fresh: Cluster, tmp_path: Path, oracle: Any
) -> None:
    store = spec(tmp_path / "kv")
    first = Crew(fresh, store)
    said = tokens_of(first.p)
    assert said == [oracle.greedy(prompt, 12) for prompt in PROMPTS]
    assert first.count(first.p, "prompt_tokens", source="store") == 0
    first.stop()
    assert len(files(tmp_path / "kv")) >= len(PROMPTS) * BLOCKS
    second = Crew(fresh, store)
    for node in (second.p, second.d):
        assert tokens_of(node) == said
        assert second.count(node, "prompt_tokens", source="store") >= len(PROMPTS) * BLOCKS * 16
        assert second.count(node, "prompt_tokens", source="computed") <= len(PROMPTS) * 16
        assert second.count(node, "store_load_blocks", outcome="corrupt") == 0
    second.stop()


def test_a_pair_whose_prefill_node_has_a_store(fresh: Cluster, tmp_path: Path) -> None:
    """P does not compute what its store holds, and D gets it once."""
    p = fresh.start_node("prefill", "p", {**PATIENT, "store": spec(tmp_path / "kv")})
    d = fresh.start_node("decode", "d", {"debug-forbid-prompt-compute": None})
    fresh.until_up(p, d)
    pair = Pair(p, d, fresh.model)
    said = [pair.tokens(prompt, max_tokens=12) for prompt in PROMPTS]
    pair.forget()
    at_d = pair.at_d()
    for prompt, answer in zip(PROMPTS, said, strict=True):
        before = pair.at_p()
        assert pair.tokens(prompt, max_tokens=12) == answer
        settle(p, d)
        moved = pair.at_p() - before
        # If P is done before D's reservation arrives, it runs the prompt again, out of its cache
        # but for the tail, which fills no block.
        runs = 1 + moved("kvbaton_transfers_revived_total")
        assert moved("kvbaton_prompt_tokens_total", source="store") == BLOCKS * 16
        assert moved("kvbaton_prompt_tokens_total", source="computed") == runs * (len(prompt) % 16)
    got = pair.at_d() - at_d
    assert got("kvbaton_prompt_tokens_total", source="transferred") == sum(map(len, PROMPTS))
    assert got("kvbaton_prompt_tokens_total", source="computed") == 0
    pair.close_books()


def corrupt(paths: Sequence[Path]) -> None:
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-9] ^= 0x40
        path.write_bytes(data)


def remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink()


def test_damaged_files_change_no_token(fresh: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    crew = Crew(fresh, spec(folder))
    said = tokens_of(crew.p)
    damages: tuple[Callable[[Sequence[Path]], None], ...] = (corrupt, remove)
    for damage in damages:
        for share in (0.01, 0.1, 1.0):
            crew.forget()
            there = files(folder)
            assert len(there) >= len(PROMPTS) * BLOCKS, "what was computed anew is saved anew"
            damage(random.Random(0).sample(there, max(1, round(share * len(there)))))
            assert tokens_of(crew.p) == said, (damage.__name__, share)
            crew.settle()
    crew.forget()
    assert tokens_of(crew.d) == said
    crew.stop()


@pytest.mark.parametrize(
    "faults",
    [
        {"delay": 0.01, "delay_s": 1.0},
        {"delay": 0.1, "delay_s": 1.0},
        {"delay": 1.0, "delay_s": 1.0, "on": ["lookup", "load"]},
        {"error": 0.1, "on": ["lookup", "load", "store"]},
        {"corrupt": 0.1, "partial": 0.1, "lose": 0.1, "on": ["lookup", "load", "store"]},
        {"corrupt": 1.0},
        {"disconnect": 0.05, "outage_s": 0.3, "on": ["lookup", "load", "store"]},
    ],
    ids=["slow-1", "slow-10", "slow-100", "errors", "damage", "corrupt-100", "disconnects"],
)
def test_a_faulty_store_changes_no_token(
    fresh: Cluster, tmp_path: Path, faults: dict[str, Any]
) -> None:
    inner = {"filesystem": {"path": str(tmp_path / "kv")}}
    store = f"faulty:{json.dumps({'inner': inner, **faults})}"
    quick = {"store-lookup-timeout": "0.3", "store-load-timeout": "0.4"}
    node = fresh.start_node("prefill", "p", {**quick, "store": store})
    said = tokens_of(node)
    for _ in range(3):
        settle(node)
        node.forget()
        assert tokens_of(node) == said
    settle(node)
