"""``--transport tcp``, and nodes that want a key; P and D on other transports do not pair."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MakePair
from tests.support.cluster import DECODE, Cluster
from tests.support.oracle import Oracle
from tests.support.served_pair import Pair, settle
from tests.support.servers import Node, Router

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]
TCP = {"transport": "tcp"}


@pytest.fixture(scope="module")
def tcp_nodes(cluster: Cluster) -> Iterator[tuple[Node, Node, Router]]:
    """P and D over TCP, with the key ``back``, behind a router with the key ``front``."""
    flags = [f"--model={cluster.model}", "--served-model-name=tiny", "--api-key=front"]
    words = ["router", "--port=0", *flags, "--node-api-key=back", "--policy=least-loaded"]
    router = Router("router-tcp", words, cluster.folder)
    cluster.servers.append(router)
    locked = {**TCP, "api-key": "back"}
    p = cluster.start_node("prefill", "p-tcp", locked, router=router)
    d = cluster.start_node("decode", "d-tcp", {**DECODE, **locked}, router=router)
    cluster.until_up(p, d, router=router, pairs=1)
    yield p, d, router
    cluster.stop([p, d, router])


def ask(url: str, ids: list[int], key: str | None) -> tuple[int, Any]:
    """Status and answer of a completion."""
    body = {"prompt": ids, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body | {"max_tokens": 8}).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("length", [1, 16, 100])
def test_the_same_tokens_over_tcp_and_behind_keys(
    tcp_nodes: tuple[Node, Node, Router],
    make_pair: MakePair,
    oracle: Oracle,
    prompt: Prompt,
    length: int,
) -> None:
    """The books prove that every byte went over the transport."""
    pair = make_pair(*tcp_nodes)
    ids = prompt(length)
    status, answer = ask(pair.router.url, ids, "front")
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] == oracle.greedy(ids, 8)
    assert pair.p.info()["transport"] == pair.d.info()["transport"] == "tcp"


@pytest.mark.parametrize("key", [None, "wrong", "front", "back"])
def test_keys(tcp_nodes: tuple[Node, Node, Router], key: str | None) -> None:
    p, d, router = tcp_nodes
    assert ask(router.url, [5], key)[0] == (200 if key == "front" else 401)
    for node in (p, d):
        assert ask(node.url, [5], key)[0] == (200 if key == "back" else 401)


def test_other_transports_are_refused_and_both_named(
    tcp_nodes: tuple[Node, Node, Router],
    small: Node,
    oracle: Oracle,
    prompt: Prompt,
    model: Path,
) -> None:
    """P on TCP, D on NIXL: D serves alone."""
    pair = Pair(tcp_nodes[0], small, model)
    small.forget()
    ids, transfer = prompt(50), os.urandom(16)
    (choice,) = small.generate(ids, pair.target_params(transfer), max_tokens=4).choices
    assert list(choice.token_ids) == oracle.greedy(ids, 4)
    settle(small)
    assert pair.at_p()("kvbaton_transfer_posted_bytes_total") == 0
    assert pair.at_d()("kvbaton_prompt_tokens_total", source="computed") == 50
    story: list[str] = small.state()["stories"][f"{transfer.hex()}/0"]
    refusal = next(line for line in story if "transport" in line)
    assert "nixl" in refusal
    assert "tcp" in refusal
