"""Nodes and routers are replaced one after the other, as Kubernetes does it, and no request fails.

What a pod's end is made of is done by hand, with real processes: ``kvbaton drain`` (the ``preStop``
of the chart), then SIGTERM. Nodes find all routers by one host name; clients behave as behind a
Service: a connection goes to any router that said at ``/health`` that it is ready.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.servers import HttpFailure, Metrics, Node, Router, Server, completion, poll
from tests.support.store_servers import free_port
from tests.support.waiting import promised

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOST = "routers.kvbaton.test"
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""Of routers, one of which is replaced by the third."""
CLIENTS = 2
DRAIN_S = "60"
SETTLE_S = "3"


@dataclass
class Service:
    """Routers that may get connections, as a Service's endpoints."""

    routers: list[Router] = field(default_factory=list)

    def ready(self) -> list[Router]:
        """In the order in which to try them."""
        found = list(self.routers)
        random.shuffle(found)
        return found


@dataclass
class Load:
    """Clients that ask all the time until told to stop, half of them for streams.

    Attributes:
        wrong: what was not as it should be.
        served: answers.
    """

    service: Service
    prompts: list[list[int]]
    right: dict[int, list[int]]
    max_tokens: int
    wrong: list[str] = field(default_factory=list)
    served: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def _run(self, client: int) -> None:
        for number in itertools.count(client):
            if self.stop.is_set():
                return
            which = number % len(self.prompts)
            try:
                tokens = self._ask(self.prompts[which], stream=bool(client % 2))
            except Exception as error:
                self.wrong.append(f"client {client}: {error!r}")
                return
            if tokens != self.right[which]:
                self.wrong.append(f"prompt {which}: {tokens} instead of {self.right[which]}")
                return
            self.served += 1

    def _ask(self, prompt: list[int], *, stream: bool) -> list[int]:
        body = completion(prompt, max_tokens=self.max_tokens, stream=stream)
        refused: list[str] = []
        for router in self.service.ready():
            where = router.url.removeprefix("http://")
            with closing(http.client.HTTPConnection(where, timeout=60)) as connection:
                try:
                    connection.connect()
                except ConnectionRefusedError as error:  # a Service would not have led us there
                    refused.append(f"{where}: {error}")
                    continue
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                response = connection.getresponse()
                answer = response.read().decode()
                assert response.status == 200, f"HTTP {response.status}: {answer}"
                return _tokens(answer, stream=stream)
        raise AssertionError(f"no router takes connections: {refused}")

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()

    def go_on(self, more: int) -> None:
        """So many more answers come."""
        wanted = self.served + more
        poll(f"{more} answers", lambda: self.served >= wanted or self.wrong, 120.0, str)
        assert not self.wrong, self.wrong


def _tokens(answer: str, *, stream: bool) -> list[int]:
    if not stream:
        (choice,) = json.loads(answer)["choices"]
        found: list[int] = choice["token_ids"]
        return found
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert lines[-1] == "[DONE]", f"cut off after {lines[-1:]}"
    events = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in event for event in events), events
    return [t for event in events for c in event["choices"] for t in c["token_ids"]]


@pytest.fixture(scope="module")
def own(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("rolling"), model)
    yield cluster
    cluster.stop()


class Fleet:
    """2 routers and 2 P + 2 D that find them by name, and how each of them is replaced."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.port = cluster, free_port()
        self.names = cluster.folder / "hosts.json"
        self.service = Service()
        self.addresses: dict[Router, str] = {}
        self.name(*ADDRESSES[:2])
        self.routers = [self.start_router(f"r{i}", ADDRESSES[i]) for i in range(2)]
        names = ("p0", "p1", "d0", "d1")
        self.nodes = {name: self.start_node(name) for name in names}
        for router in self.routers:
            self.until_known(router, 4)
        self.service.routers = list(self.routers)

    def name(self, *addresses: str) -> None:
        """What the routers' host name resolves to from now on."""
        draft = self.names.with_suffix(".new")
        draft.write_text(json.dumps({HOST: addresses}))
        draft.replace(self.names)

    def start_router(self, name: str, address: str) -> Router:
        flags = (f"--host={address}", f"--port={self.port}", "--shutdown-timeout=60")
        router = self.cluster.start_router(name, *flags)
        self.addresses[router] = address
        return router

    def start_node(self, name: str) -> Node:
        """Each life takes a free port: a new pod has another address, too."""
        role: Any = {"p": "prefill", "d": "decode"}[name[0]]
        flags = {"router": f"http://{HOST}:{self.port}", "shutdown-timeout": "60"}
        return self.cluster.start_node(role, name, flags, names=self.names)

    def until_known(self, router: Router, pairs: int) -> None:
        def known() -> bool:
            return router.num_pairs() == pairs

        poll(f"{pairs} pairs at {router.name}", known, 120.0, self.cluster.tails)

    def end(self, server: Server) -> None:
        """``preStop``, then SIGTERM: its process must end by itself, with nothing left to do."""
        words = ["drain", server.url, "--timeout", DRAIN_S]
        words += ["--settle", SETTLE_S] if isinstance(server, Router) else []
        done = subprocess.run(
            [sys.executable, "-m", "kvbaton", *words], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr + self.cluster.tails()
        began = time.monotonic()
        self.cluster.stop([server])
        assert time.monotonic() - began < promised(20.0), "it was idle"
        said = server.log.read_text()
        assert said.count("drained on request") == 1
        assert "stopping; " in said

    def _leave(self, router: Router) -> None:
        def is_ready() -> bool:
            try:
                return bool(router.get("/health"))
            except HttpFailure:
                return False

        poll("it is drained", lambda: not is_ready(), 60.0, self.cluster.tails)
        self.service.routers.remove(router)

    def books(self, name: str) -> Metrics:
        return self.nodes[name].metrics()

    def replace_node(self, name: str) -> None:
        """As a StatefulSet does it: the old one ends before the new one starts."""
        old = self.nodes[name]
        was = old.info()["generation"]
        self.end(old)
        old.log.rename(old.log.with_suffix(".old"))
        self.nodes[name] = self.start_node(name)
        for router in self.service.routers:
            self.until_known(router, 4)
        assert self.nodes[name].info()["generation"] != was

    def replace_router(self, old: Router, name: str, address: str) -> Router:
        """As a Deployment does it: the new one is ready before the old one ends."""
        new = self.start_router(name, address)
        assert new.url
        kept = [self.addresses[router] for router in self.service.routers]
        self.name(*kept, address)
        self.until_known(new, 4)
        new.get("/health")
        self.service.routers.append(new)
        # A pod that is to end leaves the endpoints once its preStop has begun, not before.
        leaves = threading.Thread(target=self._leave, args=(old,))
        leaves.start()
        self.end(old)
        leaves.join()
        kept.remove(self.addresses[old])
        self.name(*kept, address)
        return new


@pytest.fixture(scope="module")
def fleet(own: Cluster) -> Fleet:
    return Fleet(own)


@pytest.fixture
def load(fleet: Fleet, reference: Callable[..., Any], model: Path) -> Iterator[Load]:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 384) for _ in range(length)] for length in (40, 70, 100, 150)]
    oracle = Oracle(reference(model))
    right = {i: oracle.greedy(prompt, 48) for i, prompt in enumerate(prompts)}
    load = Load(fleet.service, prompts, right, 48)
    yield load
    load.end()


def test_every_node_is_replaced_under_load(fleet: Fleet, load: Load) -> None:
    load.go_on(6)
    crossed = sum(fleet.books(name)("kvbaton_prompt_tokens_total") for name in ("d0", "d1"))
    assert crossed > 0
    for name in ("p0", "d0", "p1", "d1"):
        fleet.replace_node(name)
        load.go_on(4)

    def transferred(name: str) -> float:
        return fleet.books(name)("kvbaton_prompt_tokens_total", source="transferred")

    for name in ("d0", "d1"):  # the new ones take part
        poll(f"{name} takes part", partial(transferred, name), 60.0, fleet.cluster.tails)
    load.end()
    assert not load.wrong
    # Each finished what it had: only what was on its way to a node while it said no went elsewhere.
    retries = sum(router.metrics()("kvbaton_router_retries_total") for router in fleet.routers)
    assert retries <= len(fleet.nodes)
    for name in fleet.nodes:
        assert fleet.books(name)("kvbaton_ledger_imbalance") == 0


def test_every_router_is_replaced_under_load(fleet: Fleet, load: Load) -> None:
    load.go_on(6)
    first, second = fleet.routers
    third = fleet.replace_router(first, "r2", ADDRESSES[2])
    load.go_on(4)
    fourth = fleet.replace_router(second, "r3", ADDRESSES[0])
    load.go_on(4)
    load.end()
    assert not load.wrong
    for router in (third, fourth):
        assert router.metrics()("kvbaton_router_requests_total", outcome="finished") > 0
        assert router.metrics()("kvbaton_router_requests_total", outcome="failed") == 0
