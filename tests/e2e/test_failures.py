"""Real processes that die, stop, get junk or lose their clients; and what the others do then."""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.support.cluster import Cluster
from tests.support.processes import group_of, listening
from tests.support.prompts import prompt_of
from tests.support.served_pair import POOL
from tests.support.servers import HttpFailure, Metrics, Node, Router, completion, poll
from tests.support.waiting import PATIENCE_S, promised

pytestmark = pytest.mark.e2e

PROMISE_S = 2.0
"""Blocks and leases are free again so long after a client has gone."""
FENCED_S = 60.0
"""A node that died takes nothing with it after this long."""
ENGINE = {"num-blocks": "512", "max-model-len": "2048"}
SLOW = {**ENGINE, "max-num-batched-tokens": "8"}
LONG = 1500
"""Tokens of a prompt that takes P, in chunks of 8, seconds; and the others much less."""
ANSWER = 200
"""Tokens of an answer during which nodes are killed: a second's, or more."""


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(
        hidden_size=128, intermediate_size=256, num_layers=4, max_position_embeddings=2048
    )


class Crew:
    """A router, a prefill node and two decode nodes; who died is replaced before the next test."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.router: Router = cluster.start_router("crew-router")
        self.nodes: dict[str, Node] = {}
        self._known: dict[tuple[int, ...], list[int]] = {}

    def muster(self) -> None:
        """Bring everybody up who is not there."""
        for name in [n for n in ("p", "d1", "d2") if n not in self.nodes]:
            self.nodes[name] = (
                self.cluster.start_node("prefill", name, SLOW, router=self.router)
                if name == "p"
                else self.cluster.start_node("decode", name, ENGINE, router=self.router)
            )
        self.cluster.until_up(*self.nodes.values(), router=self.router, pairs=2)

    @property
    def p(self) -> Node:
        return self.nodes["p"]

    def decoders(self) -> dict[str, Node]:
        return {name: node for name, node in self.nodes.items() if name != "p"}

    def servers(self) -> list[Router | Node]:
        return [self.router, *self.nodes.values()]

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of a node."""
        node = self.nodes.pop(name)
        node.kill()
        self.cluster.servers.remove(node)
        node.log.unlink()

    def expected(self, prompt: Sequence[int], max_tokens: int = 16) -> list[int]:
        """What one node answers; no cache remembers the question."""
        key = (*prompt, max_tokens)
        if key not in self._known:
            node = next(iter(self.decoders().values()))
            (choice,) = node.generate(prompt, max_tokens=max_tokens).choices
            self._known[key] = list(choice.token_ids)
            node.forget()
        return self._known[key]

    def ask(self, prompt: Sequence[int], max_tokens: int = 16) -> list[int]:
        """What the router answers."""
        (choice,) = self.router.complete(prompt, max_tokens=max_tokens)["choices"]
        tokens: list[int] = choice["token_ids"]
        return tokens

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Tokens of the router's answer as they come."""
        body = completion(prompt, max_tokens=max_tokens, stream=True)
        for event in self.router.stream("/v1/completions", body):
            if "error" in event:
                raise HttpFailure(200, msgspec.json.encode(event))
            for choice in event["choices"]:
                yield from choice.get("token_ids") or ()

    def decoding(self) -> str:
        """Name of the decode node that runs a request; waits for it."""

        def find() -> str | None:
            busy = (
                n for n, d in self.decoders().items() if d.metrics()("kvbaton_sequences_running")
            )
            return next(busy, None)

        name: str = poll("a node decodes", find, PATIENCE_S, self.router.tail)
        return name

    def given_up(self) -> float:
        """Hand-overs that failed or were called off, on all decode nodes."""
        name, outcomes = "kvbaton_transfers_total", ("failed", "cancelled")
        found = [d.metrics() for d in self.decoders().values()]
        return sum(m(name, role="target", outcome=outcome) for m in found for outcome in outcomes)

    def settle(self, seconds: float = PROMISE_S) -> None:
        """Wait until no living node holds anything for anybody."""
        for node in self.nodes.values():
            poll(
                f"{node.name} at rest",
                lambda node=node: not held(node.metrics()),  # type: ignore[misc]
                promised(seconds),
                lambda node=node: f"{held(node.metrics())} {node.state()}",  # type: ignore[misc]
            )
            node.check_alive()


def held(metrics: Metrics) -> dict[str, float]:
    """What a node at rest does not have."""
    names = ("ledger_imbalance", "unhealthy", "transfers_quarantined", "leases")
    states = ("waiting", "running", "loading")
    owners = ("request", "incoming", "outgoing", "fenced")
    found = {name: metrics(f"kvbaton_{name}") for name in names}
    found |= {state: metrics(f"kvbaton_sequences_{state}") for state in states}
    found |= {owner: metrics("kvbaton_blocks", owner=owner) for owner in owners}
    return {name: value for name, value in found.items() if value}


@pytest.fixture(scope="module")
def whole_crew(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    cluster = Cluster(tmp_path_factory.mktemp("failures"), model)
    yield Crew(cluster)
    cluster.stop()


@pytest.fixture
def crew(whole_crew: Crew) -> Crew:
    """Everybody is up, at rest and without cache."""
    whole_crew.muster()
    whole_crew.settle(FENCED_S)
    for node in whole_crew.nodes.values():
        node.forget()
    return whole_crew


# --- nobody dies of it ---


JUNK = {
    "random": random.Random(0).randbytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n{",
    "zmtp": bytes.fromhex("ff00000000000000017f") + b"\x03\x01NULL" + b"\0" * 48 + b"\x04\x29\xff",
    "zeros": bytes(1 << 20),
    "nothing": b"",
}


def throw(junk: bytes, where: tuple[str, int]) -> None:
    """Connect, send, hang up without a word."""
    with suppress(OSError), closing(socket.create_connection(where, timeout=2.0)) as connection:
        connection.settimeout(1.0)
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(4096)


def test_junk_on_every_port(crew: Crew) -> None:
    prompt = prompt_of(100, seed=1)
    right = crew.expected(prompt)
    assert crew.ask(prompt) == right  # so that every transport listens
    before = {server.name: group_of(server.pid) for server in crew.servers()}
    ports = {s.name: listening(before[s.name]) for s in crew.servers()}
    assert all(len(ports[name]) >= 2 for name in crew.nodes), f"HTTP and control: {ports}"
    targets = [where for found in ports.values() for where in found]
    list(POOL.map(lambda case: throw(*case), [(j, w) for w in targets for j in JUNK.values()]))
    for node in crew.nodes.values():
        node.forget()
    assert crew.ask(prompt) == right
    assert {server.name: group_of(server.pid) for server in crew.servers()} == before
    crew.settle()


# --- clients go ---


def go_away(crew: Crew, prompt: Sequence[int], events: int) -> None:
    """Start a stream, read some events, and hang up."""
    where = urlsplit(crew.router.url)
    body = msgspec.json.encode(completion(prompt, max_tokens=60, stream=True, model="tiny"))
    with closing(http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)) as client:
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if events:
            response = client.getresponse()
            for _ in range(2 * events):
                response.readline()


def test_fifty_clients_go_away(crew: Crew) -> None:
    rng = random.Random(7)
    lengths = [rng.choice((3, 40, 150)) for _ in range(50)]
    events = [rng.randrange(6) for _ in lengths]
    prompts = [prompt_of(length, seed=i) for i, length in enumerate(lengths)]
    list(POOL.map(lambda case: go_away(crew, *case), zip(prompts, events, strict=True)))
    crew.settle()
    prompt = prompt_of(100, seed=2)
    assert crew.ask(prompt) == crew.expected(prompt)
    crew.settle()


# --- nodes die or stand still ---


def until_mid_transfer(crew: Crew, posted: float) -> None:
    """Wait until P has posted some of a prompt, but is not done."""
    poll(
        "P posts",
        lambda: crew.p.metrics()("kvbaton_transfer_posted_bytes_total") > posted,
        PATIENCE_S,
        crew.p.tail,
    )


def test_p_is_killed_mid_transfer(crew: Crew) -> None:
    prompt = prompt_of(LONG, seed=3)
    right = crew.expected(prompt)
    posted = crew.p.metrics()("kvbaton_transfer_posted_bytes_total")
    before = crew.given_up()
    answer = POOL.submit(crew.ask, prompt)
    until_mid_transfer(crew, posted)
    crew.kill("p")
    assert answer.result(60) == right
    assert crew.given_up() > before, "P was done before it died"
    crew.settle(FENCED_S)
    short = prompt_of(50, seed=4)
    assert crew.ask(short) == crew.expected(short)


def test_p_stands_still_for_a_while(crew: Crew) -> None:
    prompt = prompt_of(LONG, seed=5)
    right = crew.expected(prompt)
    posted = crew.p.metrics()("kvbaton_transfer_posted_bytes_total")
    before = crew.given_up()
    answer = POOL.submit(crew.ask, prompt)
    until_mid_transfer(crew, posted)
    os.killpg(crew.p.pid, signal.SIGSTOP)
    try:
        assert answer.result(60) == right
        assert crew.given_up() > before, "P was done before it stood still"
    finally:
        os.killpg(crew.p.pid, signal.SIGCONT)
    crew.settle(FENCED_S)
    poll("both pairs again", lambda: crew.router.num_pairs() == 2, PATIENCE_S, crew.router.tail)
    short = prompt_of(60, seed=6)
    right = crew.expected(short)
    assert crew.ask(short) == right
    crew.settle()


def test_d_is_killed_and_another_goes_on(crew: Crew) -> None:
    prompt = prompt_of(300, seed=8)
    right = crew.expected(prompt, ANSWER)
    retries = crew.router.metrics()("kvbaton_router_retries_total")
    stream = crew.stream(prompt, ANSWER)
    tokens = [next(stream) for _ in range(5)]
    crew.kill(crew.decoding())
    tokens += stream
    assert tokens == right
    assert crew.router.metrics()("kvbaton_router_retries_total") > retries, "D was done"
    crew.settle(FENCED_S)


def test_the_last_d_is_killed(whole_crew: Crew) -> None:
    """A clean error within the stream, or an answer by P, and not a hang.

    Whoever has died before stays dead: nobody comes after this test.
    """
    crew = whole_crew
    if "p" not in crew.nodes or not crew.decoders():
        crew.muster()
    prompt = prompt_of(300, seed=9)
    right = crew.expected(prompt, ANSWER)
    stream = crew.stream(prompt, ANSWER)
    tokens = [next(stream) for _ in range(5)]
    for name in list(crew.decoders()):
        crew.kill(name)
    with suppress(HttpFailure):
        tokens += stream
    assert tokens == right[: len(tokens)]
    crew.settle(FENCED_S)
