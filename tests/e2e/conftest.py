"""Servers that all tests here share, and pairs of them whose books are closed after each test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbaton.types import TransferTimers
from tests.support.altered import StepHold, env_of
from tests.support.cluster import DECODE, SLOW_CHUNK, Cluster
from tests.support.making import making
from tests.support.oracle import Oracle
from tests.support.served_pair import Pair
from tests.support.servers import Node, Router

MakePair = Callable[..., Pair]
KV_EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
    "topic": "kv@d-small@tiny",
    "int_block_hashes": False,
}


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture(scope="session")
def oracle(reference: Callable[..., Any], model: Path) -> Oracle:
    return Oracle(reference(model))


@pytest.fixture(scope="session")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("e2e"), model)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def main_nodes(cluster: Cluster) -> tuple[Node, Node, Router]:
    """P and D with blocks of 16 tokens, behind a router that knows nobody else."""
    router = cluster.start_router()
    profiles = {"profile-dir": str(cluster.folder / "profiles")}
    p = cluster.start_node("prefill", "p16", profiles, router=router)
    d = cluster.start_node("decode", "d16", DECODE, router=router)
    cluster.until_up(p, d, router=router, pairs=1)
    return p, d, router


@pytest.fixture(scope="session")
def hold_of_a(cluster: Cluster) -> StepHold:
    """Holds the steps of the first of `any_nodes`."""
    return StepHold(cluster.folder / "any-a.hold")


@pytest.fixture(scope="session")
def any_nodes(cluster: Cluster, hold_of_a: StepHold) -> tuple[Node, Node, Router]:
    """Two nodes that prefill and generate, behind a router that knows nobody else.

    They give no transfer up because the machine is busy.
    """
    router = cluster.start_router("any-router", "--policy=prefix-aware")
    flags = {"num-blocks": "512", "max-num-seqs": "24"}
    patient = env_of((TransferTimers, {"progress_deadline": 40.0, "lease": 60.0}))
    a = cluster.start_node("any", "any-a", flags, router=router, env=patient | hold_of_a.env)
    b = cluster.start_node("any", "any-b", flags, router=router, env=patient)
    cluster.until_up(a, b, router=router, pairs=2)
    return a, b, router


@pytest.fixture(scope="session")
def odd_nodes(cluster: Cluster) -> tuple[Node, Node]:
    """P with blocks of 48 tokens, D with blocks of 32."""
    p = cluster.start_node("prefill", "p48", {"block-size": "48"})
    d = cluster.start_node("decode", "d32", {**DECODE, "block-size": "32"})
    cluster.until_up(p, d)
    return p, d


@pytest.fixture(scope="session")
def small(cluster: Cluster) -> Node:
    """D with 32 blocks of 16 tokens, who may compute prompts; it publishes what it caches."""
    flags = {
        **{"num-blocks": "33", "max-num-batched-tokens": "64", "debug-poison": None},
        "kv-events-config": json.dumps(KV_EVENTS),
    }
    d = cluster.start_node("decode", "d-small", flags)
    cluster.until_up(d)
    return d


@pytest.fixture(scope="session")
def slow_model(checkpoint: Callable[..., Path]) -> Path:
    """A model that needs tenths of a second for a chunk, for which milliseconds are nothing."""
    return checkpoint(
        hidden_size=512,
        intermediate_size=2048,
        num_layers=8,
        num_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
        config={"torch_dtype": "float32"},
    )


@pytest.fixture(scope="session")
def slow_nodes(cluster: Cluster, slow_model: Path) -> tuple[Node, Node]:
    flags = {"max-model-len": "2048", "max-num-batched-tokens": str(SLOW_CHUNK)}
    p = cluster.start_node("prefill", "p-slow", flags, model=slow_model)
    d = cluster.start_node("decode", "d-slow", {**DECODE, **flags}, model=slow_model)
    cluster.until_up(p, d)
    return p, d


@pytest.fixture
def make_pair(model: Path) -> Iterator[MakePair]:
    """Makes `Pair(p, d, model, router)`s, and closes their books after the test."""

    def start(p: Node, d: Node, router: Router | None = None) -> Pair:
        return Pair(p, d, model, router)

    with making(start, Pair.close_books) as make:
        yield make


@pytest.fixture
def pair(main_nodes: tuple[Node, Node, Router], make_pair: MakePair) -> Pair:
    """P and D with blocks of 16 tokens, and their router; caches empty."""
    pair = make_pair(*main_nodes)
    pair.forget()
    return pair


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Makes prompts of a length: random tokens, the same in every run of the test."""
    seed = list(request.node.nodeid.encode())
    rng = np.random.default_rng(seed)
    return lambda length: rng.integers(3, 384, length).tolist()
