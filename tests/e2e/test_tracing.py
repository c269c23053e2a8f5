"""One trace per request, from a real router and its nodes into a real receiver."""

from __future__ import annotations

import http.client
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.support.cluster import DECODE, SLOW_CHUNK, Cluster
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.support.served_pair import Pair, settle
from tests.support.servers import STOP_S, HttpFailure, Node, Router, completion, poll

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "20"}
"""Milliseconds that spans may wait for others."""
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
DECODES = ("wire", "verify", "first_decode")
"""Stages of the second token if the decode node samples it; of the prefill node it is the last."""
ROUNDING_S = 1e-6
SHARE = 0.02
ATTEMPTS = 5


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def router(
    cluster: Cluster, slow_nodes: tuple[Node, Node], receiver: OtlpReceiver
) -> Iterator[Router]:
    p, d = slow_nodes
    flags = (f"--prefill={p.url}", f"--decode={d.url}")
    endpoint = f"--otlp-traces-endpoint={receiver.endpoint}"
    router = cluster.start_router("traced", endpoint, *flags, env=SOON)
    cluster.until_up(router=router, pairs=1)
    yield router
    cluster.stop([router])


class Seen:
    """A streamed answer as its client saw it: seconds of the epoch of its begin and tokens."""

    def __init__(self, server: Router | Node, body: dict[str, Any], **headers: str) -> None:
        where = urlsplit(server.url)
        self.tokens: list[float] = []
        self.events: list[dict[str, Any]] = []
        with closing(
            http.client.HTTPConnection(where.hostname or "", where.port, 60)
        ) as connection:
            connection.connect()
            ahead = time.time() - time.monotonic()
            self.began = time.monotonic() + ahead
            connection.request(
                "POST", "/v1/completions", msgspec.json.encode(body | {"stream": True}),
                {"Content-Type": "application/json", **headers},
            )  # fmt: skip
            response = connection.getresponse()
            assert response.status == 200
            for line in response:
                if line.startswith(b"data: {"):
                    event = msgspec.json.decode(line.removeprefix(b"data: "))
                    self.events.append(event)
                    ids = [t for choice in event["choices"] for t in choice["token_ids"]]
                    self.tokens += [time.monotonic() + ahead] * len(ids)


def trace_id() -> str:
    return os.urandom(16).hex()


def traceparent(trace: str, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{PARENT}-{'01' if sampled else '00'}"}


def on_path(spans: list[ReceivedSpan], token: str) -> list[ReceivedSpan]:
    """Spans on the critical path to a token, in order; each begins where the last one ends."""
    path = sorted((s for s in spans if token in s.paths), key=lambda span: (span.start, span.end))
    for before, after in itertools.pairwise(path):
        assert after.start == pytest.approx(before.end, abs=ROUNDING_S), f"{before} {after}"
    return path


def ways_to_the_second_token() -> list[list[str]]:
    """Its stages through a pair: if the decode node samples it, and if the prefill node does."""
    begin = ["tokenize", "route", "queue", "prefill"]
    return [[*begin, *decodes, "respond"] for decodes in (DECODES, DECODES[-1:])]


def root_of(spans: list[ReceivedSpan]) -> ReceivedSpan:
    (root,) = (span for span in spans if "http.route" in span.attributes)
    return root


def within_two_percent(
    ask: Callable[[], tuple[Seen, list[ReceivedSpan]]], tokens: dict[str, int]
) -> list[ReceivedSpan]:
    """Ask until what spans add up to is what the client saw; a busy machine may delay a client."""
    for _ in range(ATTEMPTS):
        seen, spans = ask()
        root = root_of(spans)
        off = []
        for token, index in tokens.items():
            path = on_path(spans, token)
            assert path[0].start == pytest.approx(root.start, abs=ROUNDING_S)
            took = seen.tokens[index] - seen.began
            summed = sum(span.seconds for span in path)
            # Too much as well: a client may have read before the last span's end was noted.
            off.append(abs(1 - summed / took))
        if max(off) <= SHARE:
            return spans
    raise AssertionError(f"{off} of the time is missing, or too much, after {ATTEMPTS} attempts")


def test_spans_add_up_to_what_the_client_saw(
    router: Router, slow_nodes: tuple[Node, Node], receiver: OtlpReceiver, prompt: Prompt
) -> None:
    ids = prompt(4 * SLOW_CHUNK - 3)

    def ask() -> tuple[Seen, list[ReceivedSpan]]:
        settle(*slow_nodes)
        for node in slow_nodes:
            node.forget()
        trace = trace_id()
        seen = Seen(router, completion(ids, max_tokens=3), **traceparent(trace))
        return seen, receiver.trace(trace)

    spans = within_two_percent(ask, {"first_token": 0, "second_token": 1})
    names = [span.name for span in on_path(spans, "first_token")]
    assert names == ["tokenize", "route", "queue", "prefill", "respond"]
    path = on_path(spans, "second_token")
    stages = [span.name for span in path]
    assert stages in ways_to_the_second_token()
    stage = {span.name: span for span in path}
    assert stage["prefill"].seconds > 0.5 * sum(span.seconds for span in path)
    stage = {span.name: span for span in spans}
    assert min(stage[name].seconds for name in DECODES) > 0

    # Whose child each is, and who says so.
    root = root_of(spans)
    assert root.parent_id == PARENT
    assert (root.name, root.service) == ("POST /v1/completions", "kvbaton-router")
    nodes = {span.attributes["kvbaton.part"]: span for span in spans if span.name == "llm_request"}
    assert {part: (n.service, n.instance) for part, n in nodes.items()} == {
        "source": ("kvbaton-prefill", "p-slow"),
        "target": ("kvbaton-decode", "d-slow"),
    }
    parents = {
        **{name: {root.span_id} for name in ("tokenize", "route", "respond")},
        "prefill": {nodes["source"].span_id},
        "queue": {node.span_id for node in nodes.values()},
        **{name: {nodes["target"].span_id} for name in (*DECODES, "reserve")},
        "first_decode": {nodes["target" if "wire" in stages else "source"].span_id},
        "llm_request": {root.span_id},
        root.name: {PARENT},
    }
    found: dict[str, set[str]] = {}
    for span in spans:
        found.setdefault(span.name, set()).add(span.parent_id)
    assert found == parents
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parent is not None:
            assert parent.start - ROUNDING_S <= span.start
            assert span.end <= parent.end + ROUNDING_S
    # Blocks had crossed while the prefill ran, and D had reserved before they did.
    landed = nodes["target"].events["first_landed"]
    (reserve,) = (span for span in spans if span.name == "reserve")
    assert stage["prefill"].start < landed < stage["prefill"].end
    assert reserve.end < landed
    assert root.attributes["gen_ai.usage.prompt_tokens"] == len(ids)
    assert root.attributes["gen_ai.usage.completion_tokens"] == 3
    ttft = root.attributes["gen_ai.latency.time_to_first_token"]
    assert ttft == pytest.approx(sum(s.seconds for s in on_path(spans, "first_token")), abs=1e-5)


def test_timings_in_the_answer(
    router: Router, slow_nodes: tuple[Node, Node], prompt: Prompt
) -> None:
    ids = prompt(SLOW_CHUNK + 16)
    seen = Seen(router, completion(ids, max_tokens=3, return_timings=True))
    timings = seen.events[-1]["timings"]
    assert seen.events[-1]["choices"] == []
    for token in ("first_token", "second_token"):
        assert sum(timings[token].values()) == pytest.approx(timings[f"{token}_ms"], abs=0.02)
    assert list(timings["second_token"]) in ways_to_the_second_token()
    assert timings["first_token_ms"] < timings["second_token_ms"] <= timings["total_ms"]
    assert timings["reserve_ms"] > 0
    assert timings["nodes"] == {"source": "p-slow", "target": "d-slow"}
    whole = router.complete(ids, max_tokens=3, return_timings=True)["timings"]
    assert whole["nodes"]["target"] == "d-slow", "all is cached there, and nothing crosses"
    assert "wire" not in whole["second_token"]
    settle(*slow_nodes)


def test_timings_of_a_lone_node(slow_nodes: tuple[Node, Node], prompt: Prompt) -> None:
    p, _ = slow_nodes
    alone = p.post("/v1/completions", completion(prompt(40), max_tokens=2, return_timings=True))
    timings = alone["timings"]
    assert timings["nodes"] == {}
    assert list(timings["second_token"]) == [
        *("tokenize", "queue", "prefill", "first_decode", "respond")
    ]
    assert "timings" not in p.post("/v1/completions", completion(prompt(40), max_tokens=2))
    with pytest.raises(HttpFailure, match="one prompt"):
        p.post("/v1/completions", completion("x", return_timings=True) | {"prompt": ["a", "b"]})


def test_the_client_decides_whether_it_is_traced(
    router: Router, receiver: OtlpReceiver, prompt: Prompt
) -> None:
    body = completion(prompt(20), max_tokens=2)
    no, yes = trace_id(), trace_id()
    Seen(router, body, **traceparent(no, sampled=False))
    before = receiver.traced()
    Seen(router, body)  # a trace of its own
    Seen(router, body, traceparent="00-junk")
    Seen(router, body, **traceparent(yes))
    receiver.trace(yes)
    mine = receiver.traced() - before
    assert len(mine) == 3
    assert no not in mine
    for trace in mine - {yes}:
        assert root_of(receiver.trace(trace)).parent_id == ""


def test_nodes_behind_another_proxy_share_its_trace(
    cluster: Cluster, main_nodes: tuple[Node, Node, Router], receiver: OtlpReceiver, prompt: Prompt
) -> None:
    """Each is asked by HTTP, and makes its own spans; the proxy passes the header on."""
    flags = {"otlp-traces-endpoint": receiver.endpoint}
    p = cluster.start_node("prefill", "p-traced", flags)
    d = cluster.start_node("decode", "d-traced", {**DECODE, **flags})
    cluster.until_up(p, d)
    pair = Pair(p, d, cluster.model)
    trace, ours = trace_id(), os.urandom(16)
    body = completion(prompt(100), max_tokens=4)
    with ThreadPoolExecutor(2) as pool:
        source = {**body, "max_tokens": 1, "kv_transfer_params": pair.source_params(ours)}
        target = {**body, "kv_transfer_params": pair.target_params(ours)}
        asked = [
            pool.submit(Seen, node, its, **traceparent(trace))
            for node, its in ((p, source), (d, target))
        ]
        assert [len(one.result().tokens) for one in asked] == [1, 4]
    pair.close_books()
    cluster.stop([p, d])  # what they have not sent yet they send then
    spans = receiver.trace(trace, requests=2)
    roots = {span.service: span for span in spans if "http.route" in span.attributes}
    assert {root.parent_id for root in roots.values()} == {PARENT}
    names = {
        service: [s.name for s in on_path([s for s in spans if s.service == service], token)]
        for service, token in (
            ("kvbaton-prefill", "first_token"),
            ("kvbaton-decode", "second_token"),
        )
    }
    assert names["kvbaton-prefill"] == ["tokenize", "queue", "prefill", "respond"]
    assert names["kvbaton-decode"] == ["tokenize", "queue", "reserve", *DECODES, "respond"]


def test_a_collector_that_fails_hurts_nobody(
    cluster: Cluster, main_nodes: tuple[Node, Node, Router], prompt: Prompt
) -> None:
    p, d, _ = main_nodes
    flags = (f"--prefill={p.url}", f"--decode={d.url}")
    with OtlpReceiver() as broken:
        broken.status = 503
        endpoint = f"--otlp-traces-endpoint={broken.endpoint}"
        env = {**SOON, "OTEL_BSP_MAX_QUEUE_SIZE": "16", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8"}
        router = cluster.start_router("untraced", endpoint, *flags, env=env)
        cluster.until_up(router=router, pairs=1)
        for length in range(20, 40):
            answer = router.complete(prompt(length), max_tokens=2)
            assert len(answer["choices"][0]["token_ids"]) == 2
        poll("an export was tried", lambda: broken.exports, 20, router.tail)
    assert router.complete(prompt(50), max_tokens=2), "nobody listens there any more"
    router.check_alive()
    began = time.monotonic()
    cluster.stop([router])
    assert time.monotonic() - began < STOP_S, "it does not wait for ever to be rid of its spans"
    assert "Traceback" not in router.log.read_text()
    settle(p, d)
