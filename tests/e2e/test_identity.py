"""Who does not fit is refused at `Hello`, and what arrives wrong is never used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbaton.connectors.keys import model_digest
from tests.e2e.conftest import MakePair
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.served_pair import Pair, settle
from tests.support.servers import Node

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]
FAULTY = "faulty:" + json.dumps({"inner": "nixl", "corrupt": [0, 3]})
"""The first write and the fourth arrive with a flipped byte."""


# --- other weights ---


@pytest.fixture(scope="module")
def other_model(checkpoint: Callable[..., Path]) -> Path:
    """The same configuration with other weights."""
    return checkpoint(seed=1)


@pytest.fixture(scope="module")
def stranger(cluster: Cluster, other_model: Path) -> Iterator[Node]:
    """A prefill node with other weights."""
    node = cluster.start_node("prefill", "p-other", model=other_model)
    cluster.until_up(node)
    yield node
    cluster.stop([node])


def test_other_weights_are_refused_and_both_named(
    stranger: Node, small: Node, oracle: Oracle, prompt: Prompt, model: Path, other_model: Path
) -> None:
    """D, who may compute, answers alone."""
    pair = Pair(stranger, small, model)
    ids, transfer = prompt(50), os.urandom(16)
    theirs = stranger.generate(ids, pair.source_params(transfer), max_tokens=4)
    ours = small.generate(ids, pair.target_params(transfer), max_tokens=4)
    (wrong,), (right,) = theirs.choices, ours.choices
    assert list(right.token_ids) == oracle.greedy(ids, 4)
    assert wrong.token_ids[0] != right.token_ids[0], "the weights are the same"
    settle(small)
    p, d = pair.at_p(), pair.at_d()
    assert p("kvbaton_transfer_posted_bytes_total") == 0
    assert d("kvbaton_transfers_total", outcome="failed") == 1
    assert d("kvbaton_load_failures_total") == 1
    assert d("kvbaton_prompt_tokens_total", source="computed") == 50
    assert d("kvbaton_prompt_tokens_total", source="transferred") == 0
    told = "\n".join(line for line in story(small, transfer) if "identity" in line)
    for folder in (model, other_model):
        assert model_digest(folder) in told


def story(node: Node, transfer: bytes) -> list[str]:
    """What a node's machine says of a transfer."""
    lines: list[str] = node.state()["stories"][f"{transfer.hex()}/0"]
    return lines


# --- a flipped byte ---


@pytest.fixture(scope="module")
def spoiled(cluster: Cluster) -> Iterator[tuple[Node, Node]]:
    """A pair whose transport flips a byte now and then; this D may compute prompts."""
    p = cluster.start_node("prefill", "p-spoiled", {"transport": FAULTY})
    d = cluster.start_node("decode", "d-spoiled", {"transport": FAULTY, "debug-poison": None})
    cluster.until_up(p, d)
    yield p, d
    cluster.stop([p, d])


def test_a_flipped_byte_is_caught_and_the_answer_right(
    spoiled: tuple[Node, Node], make_pair: MakePair, oracle: Oracle, prompt: Prompt
) -> None:
    pair = make_pair(*spoiled)
    pair.moves = "some"
    ids = prompt(40)  # two writes: the first is number 0
    assert pair.tokens(ids, max_tokens=6) == oracle.greedy(ids, 6)
    settle(pair.p, pair.d)
    d = pair.at_d()
    assert d("kvbaton_transfer_digests_failed_total") == 1
    assert d("kvbaton_transfers_total", outcome="failed") == 1
    assert d("kvbaton_transfers_total", outcome="delivered") == 0
    assert d("kvbaton_prompt_tokens_total", source="computed") == 40
