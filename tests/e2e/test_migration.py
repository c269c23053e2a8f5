"""Running sequences that go on at another node, with their KV."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.altered import StepHold
from tests.support.cluster import Cluster
from tests.support.served_pair import POOL, bytes_per_token, settle
from tests.support.servers import Node, Router, completion

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]
MAX_TOKENS = 340
NUMBERS = itertools.count()
LEAVES_AT = 24
"""Tokens that every stream has told when the node is drained."""
MAX_HELD = 120
"""Tokens after which the node waits for the drain: the last prompt is computed long before."""
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.1, "seed": 12, "frequency_penalty": 1.2, "presence_penalty": 0.7},
    {"temperature": 0.8, "seed": 13, "repetition_penalty": 1.5, "top_p": 0.9},
    {"frequency_penalty": 1.5, "logprobs": 2},
    {"temperature": 1.0, "seed": 14, "top_k": 20, "min_p": 0.01, "logprobs": 1},
    {
        "temperature": 1.3,
        "seed": 15,
        "ignore_eos": False,
        "logit_bias": {"1": 60},
        "min_tokens": 300,
    },
    {"temperature": 1.0, "seed": 16, "stop_token_ids": list(range(3, 40)), "min_tokens": 250},
    {
        "temperature": 1.0,
        "seed": 17,
        "ignore_eos": False,
        "structured_outputs": {"regex": "([a-f]{3} ){80}[0-9]"},
    },
]


class Stream:
    """A completion as a client sees it."""

    def __init__(self, router: Router, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.grown = threading.Condition()
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        self._answer: Future[None] = POOL.submit(self._read, router, body | usage)

    def _read(self, router: Router, body: dict[str, Any]) -> None:
        try:
            for event in router.stream("/v1/completions", body):
                assert "error" not in event, event
                with self.grown:
                    self.events.append(event)
                    for choice in event["choices"]:
                        self.tokens += choice["token_ids"] or ()
                    self.grown.notify_all()
        finally:
            with self.grown:
                self.grown.notify_all()

    def until(self, count: int) -> None:
        """Wait for so many tokens."""
        with self.grown:
            there = self.grown.wait_for(
                lambda: len(self.tokens) >= count or self._answer.done(), 60.0
            )
        assert there, f"{len(self.tokens)} tokens"

    def result(self) -> dict[str, Any]:
        """All that it said, added up as the answer to a request without a stream."""
        self._answer.result(90.0)
        *_, last = self.events
        told: dict[str, Any] = {"token_ids": self.tokens, "text": "", "finish_reason": None}
        logprobs: list[float] = []
        for event in self.events:
            for choice in event["choices"]:
                told["text"] += choice["text"]
                told["finish_reason"] = choice["finish_reason"] or told["finish_reason"]
                logprobs += (choice["logprobs"] or {"token_logprobs": ()})["token_logprobs"]
        told["logprobs"] = [pytest.approx(value, abs=1e-3) for value in logprobs]
        told["completion_tokens"] = last["usage"]["completion_tokens"]
        return told


def undisturbed(node: Node, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What one node says to them."""
    return list(POOL.map(lambda body: answer_of(node, body), bodies))


def answer_of(node: Node, body: dict[str, Any]) -> dict[str, Any]:
    answer = node.post("/v1/completions", body)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"] or {"token_logprobs": []}
    return {
        "token_ids": choice["token_ids"],
        "text": choice["text"],
        "finish_reason": choice["finish_reason"],
        "logprobs": logprobs["token_logprobs"],
        "completion_tokens": answer["usage"]["completion_tokens"],
    }


StartRouter = Callable[..., Router]


@pytest.fixture
def start_router(cluster: Cluster, any_nodes: tuple[Node, Node, Router]) -> Iterator[StartRouter]:
    """Starts routers of the test's own over two nodes: what they drain, others still use."""
    a, b, _ = any_nodes
    started: list[Router] = []

    def start(*flags: str) -> Router:
        known = f"--any={a.url}", f"--any={b.url}"
        name = f"move-router-{next(NUMBERS)}"
        router = cluster.start_router(name, "--min-fetch-tokens=16", *known, *flags)
        started.append(router)
        cluster.until_up(a, b, router=router, pairs=2)
        return router

    yield start
    cluster.stop(started)


def outcomes(router: Router, outcome: str) -> float:
    return router.metrics()("kvbaton_router_moves_total", outcome=outcome)


def test_a_drained_node_hands_its_sequences_over_with_their_kv(
    any_nodes: tuple[Node, Node, Router],
    hold_of_a: StepHold,
    start_router: StartRouter,
    model: Path,
    prompt: Prompt,
) -> None:
    a, b, _ = any_nodes
    router = start_router()
    prompts = [prompt(70 + 9 * i) for i in range(len(KINDS))]
    bodies = [
        completion(ids, max_tokens=MAX_TOKENS, **kind)
        for ids, kind in zip(prompts, KINDS, strict=True)
    ]
    expected = undisturbed(b, bodies)
    for node in (a, b):
        settle(node)
        node.forget()
    before = {node: node.metrics() for node in (a, b)}
    router.post("/nodes/any-b/pause", {})
    with hold_of_a.between(len(bodies), MAX_HELD):
        streams = [Stream(router, body) for body in bodies]
        for stream in streams:
            stream.until(LEAVES_AT)
        router.post("/nodes/any-b/resume", {})
        answer = router.post("/nodes/any-a/drain", {})
    assert answer["requests"] == len(streams), "all run there"
    told = [stream.result() for stream in streams]
    assert told == expected
    settle(a, b)
    at_a, at_b = (node.metrics() - before[node] for node in (a, b))
    moved = int(outcomes(router, "moved"))
    assert moved > len(streams) // 2, "hardly any ends where it is"
    assert outcomes(router, "failed") == 0
    # Whole blocks of prompt and generated tokens crossed, and nothing of them was computed again.
    least = sum((len(ids) + LEAVES_AT - 1) // 16 * 16 for ids in prompts[:moved])
    fetched = at_b("kvbaton_prompt_tokens_total", source="peer")
    assert fetched > 0
    sent = at_a("kvbaton_transfer_sent_bytes_total")
    assert sent >= least * bytes_per_token(model)
    assert at_b("kvbaton_transfers_total", role="prefix", outcome="delivered") >= moved
    assert at_b("kvbaton_transfer_digests_checked_total") > 0
    assert at_b("kvbaton_transfer_digests_failed_total") == 0
    assert at_b("kvbaton_prompt_tokens_total", source="computed") == 0
    states = {node["node_id"]: node["state"] for node in router.get("/nodes")["nodes"]}
    assert states == {"any-a": "draining", "any-b": "ready"}


def test_sequences_move_to_and_fro_behind_several_workers(
    any_nodes: tuple[Node, Node, Router], start_router: StartRouter, prompt: Prompt
) -> None:
    *nodes, _ = any_nodes
    router = start_router("--policy=cost", "--workers=2")
    prompts = [prompt(50 + 11 * i) for i in range(6)]
    bodies = [
        completion(ids, max_tokens=MAX_TOKENS, **kind)
        for ids, kind in zip(prompts, KINDS, strict=False)
    ]
    expected = undisturbed(nodes[0], bodies)
    settle(*nodes)
    for node in nodes:
        node.forget()  # else what moves may be there before it
    streams = [Stream(router, body) for body in bodies]
    for turn in range(4):
        for stream in streams:
            stream.until(LEAVES_AT + 60 * turn)
        router.post(f"/nodes/{('any-a', 'any-b')[turn % 2]}/migrate", {})
    assert [stream.result() for stream in streams] == expected
    settle(*nodes)
    assert outcomes(router, "moved") >= 3


@pytest.mark.parametrize("end", ["told to stop", "killed"])
def test_a_node_that_ends_loses_nothing(
    cluster: Cluster,
    any_nodes: tuple[Node, Node, Router],
    start_router: StartRouter,
    prompt: Prompt,
    end: str,
) -> None:
    """Told to stop, it sends what runs there; killed while it does that, others compute it."""
    a, b, _ = any_nodes
    router = start_router("--policy=least-loaded", "--min-handover-tokens=512")
    leaving = cluster.start_node("any", "any-c", {"num-blocks": "512"}, router=router)
    cluster.until_up(leaving, router=router, pairs=6)
    for name in ("any-a", "any-b"):
        router.post(f"/nodes/{name}/pause", {})
    bodies = [completion(prompt(80 + i), max_tokens=MAX_TOKENS, **KINDS[i]) for i in range(6)]
    streams = [Stream(router, body) for body in bodies]
    for stream in streams:
        stream.until(LEAVES_AT)
    for name in ("any-a", "any-b"):
        router.post(f"/nodes/{name}/resume", {})
    if end == "killed":
        router.post("/nodes/any-c/migrate", {})
        leaving.kill()
    cluster.stop((leaving,))
    told = [stream.result() for stream in streams]
    assert router.metrics()("kvbaton_router_requests_total", outcome="finished") == len(streams)
    if end == "told to stop":
        assert outcomes(router, "moved") > 0
    assert told == undisturbed(a, bodies)
    settle(a, b)
