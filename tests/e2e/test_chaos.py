"""Nodes and routers are killed, stopped and restarted under load, in an order drawn from a seed.

Every answer has the tokens of an undisturbed run, or ends in an error that says so; and when all is
over nobody holds anything for anybody.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_failures import FENCED_S, PROMISE_S, held
from tests.support.cluster import Cluster
from tests.support.processes import descendants_of, group_of
from tests.support.prompts import prompt_of
from tests.support.servers import Node, Router, completion, poll
from tests.support.store_servers import free_port
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOST, ADDRESSES = "routers.kvbaton.test", ("127.0.0.1", "127.0.0.2")
ENGINE = {"num-blocks": "512", "max-model-len": "2048", "max-num-batched-tokens": "16"}
ROLES: dict[str, Any] = {"a1": "any", "a2": "any", "p": "prefill", "d": "decode"}
LENGTHS = (40, 90, 300, 1500)
"""The last takes a node, in steps of 16 tokens, seconds: it stands for 100 k tokens on a GPU."""
MAX_TOKENS = 24
CLIENTS = 3
ANSWER_S = 60.0
STOPPED_S = 2.0
CANCELLED = 400
CUT = 0.15
"""Share of answers that clients do not wait for the end of."""
FDS = 24
"""A process may have so many files open more than before: connections to who has come back."""


class Unserved(Exception):
    """An answer that says clearly that there is none."""


class Client:
    """Asks one request after the other, on connections that it keeps.

    Attributes:
        outcomes: how many were right, ended in an error, were left, or lost with their router.
        wrong: what may not happen.
        connections: by address, with the life of the router that they lead to.
    """

    def __init__(self, service: Service, seed: int) -> None:
        self.service, self.rng = service, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.connections: dict[str, tuple[http.client.HTTPConnection, int]] = {}

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set() and not self.wrong:
            which = self.rng.choices(range(len(LENGTHS)), (4, 4, 2, 1))[0]
            self.ask(self.rng.randrange(2), which, cut=self.rng.random() < CUT)
        self.close()

    def close(self) -> None:
        for connection, _ in self.connections.values():
            connection.close()
        self.connections.clear()

    def ask(self, router: int, which: int, *, cut: bool = False) -> str:
        """What became of a request; what may not happen is noted."""
        address, began = ADDRESSES[router], time.monotonic()
        if address not in self.connections:
            made = http.client.HTTPConnection(address, self.service.port, timeout=ANSWER_S)
            self.connections[address] = made, self.service.kills[router]
        try:
            outcome = self._ask(address, which, cut)
        except Unserved:
            outcome = "error"
        except (OSError, http.client.HTTPException) as error:
            connection, kills = self.connections.pop(address)
            connection.close()
            outcome = "lost"
            if kills == self.service.kills[router] and address not in self.service.down:
                self.wrong.append(f"{address} hung up after {time.monotonic() - began}: {error!r}")
        except AssertionError as error:
            outcome = "wrong"
            self.wrong.append(str(error))
        self.outcomes[outcome] += 1
        return outcome

    def _ask(self, address: str, which: int, cut: bool) -> str:
        body = completion(self.service.prompts[which], max_tokens=MAX_TOKENS, stream=True)
        connection, _ = self.connections[address]
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            assert json.loads(response.read())["error"]["message"]
            raise Unserved
        right, tokens = self.service.right[which], list[int]()
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                response.read()
                assert tokens == right, f"{tokens} instead of {right}"
                return "right"
            event = json.loads(line.removeprefix(b"data: "))
            tokens += [t for c in event.get("choices", ()) for t in c.get("token_ids") or ()]
            assert tokens == right[: len(tokens)], f"{tokens} is not how {right} begins"
            if "error" in event:
                assert event["error"]["message"]
                response.read()
                raise Unserved
            if cut and tokens:
                self.connections.pop(address)[0].close()
                return "left"
        raise http.client.IncompleteRead(b"")


class Service:
    """2 nodes of any role, a P, a D, and 2 routers that all of them know.

    Attributes:
        kills: of each router, so far.
        down: addresses of routers that are being replaced.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.port = cluster, free_port()
        self.names = cluster.folder / "hosts.json"
        self.names.write_text(json.dumps({HOST: ADDRESSES}))
        self.kills, self.down = [0, 0], set[str]()
        self.routers = [self.start_router(i) for i in range(2)]
        self.nodes = {name: self.start_node(name) for name in ROLES}
        self.until_up()
        self.prompts = [prompt_of(length, seed=length) for length in LENGTHS]
        self.right = []
        for prompt in self.prompts:
            (choice,) = self.nodes["a1"].generate(prompt, max_tokens=MAX_TOKENS).choices
            self.right.append(list(choice.token_ids))
        self.nodes["a1"].forget()

    def start_router(self, number: int) -> Router:
        words = f"--host={ADDRESSES[number]}", f"--port={self.port}", "--policy=cost"
        return self.cluster.start_router(f"r{number}-{self.kills[number]}", *words)

    def start_node(self, name: str) -> Node:
        flags = {**ENGINE, "router": f"http://{HOST}:{self.port}"}
        return self.cluster.start_node(ROLES[name], name, flags, names=self.names)

    def until_up(self) -> None:
        """All nodes serve, and both routers know all pairs: each source with each other target."""
        for node in self.nodes.values():
            assert node.url
        for router in self.routers:

            def known(router: Router = router) -> bool:
                return router.num_pairs() == 7

            poll(f"all pairs at {router.name}", known, FENCED_S, self.cluster.tails)

    def fds(self) -> dict[int, int]:
        """Open files of all processes."""
        pids = frozenset().union(*(descendants_of(s.pid) | {s.pid} for s in self.cluster.servers))
        return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}

    # --- blows ---

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of a node, and another life of it."""
        node = self.nodes[name]
        node.kill()
        self.cluster.servers.remove(node)
        node.log.rename(node.log.with_suffix(f".{node.pid}"))
        self.nodes[name] = self.start_node(name)

    def stop(self, name: str) -> None:
        """A node stands still for a while."""
        os.killpg(self.nodes[name].pid, signal.SIGSTOP)
        try:
            time.sleep(STOPPED_S)
        finally:
            os.killpg(self.nodes[name].pid, signal.SIGCONT)

    def kill_router(self, number: int) -> None:
        """As `kill`."""
        router = self.routers[number]
        self.down.add(ADDRESSES[number])
        self.kills[number] += 1
        router.kill()
        self.cluster.servers.remove(router)
        self.routers[number] = self.start_router(number)
        assert self.routers[number].url
        self.down.remove(ADDRESSES[number])


@pytest.fixture(scope="module")
def service(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    model = checkpoint(
        hidden_size=128, intermediate_size=256, num_layers=4, max_position_embeddings=2048
    )
    cluster = Cluster(tmp_path_factory.mktemp("chaos"), model)
    try:
        service = Service(cluster)
        groups = [server.pid for server in cluster.servers]
        yield service
        groups += [server.pid for server in cluster.servers]
    finally:
        cluster.stop()
    # The last processes of a group may end a moment after its leader.
    until(lambda: not any(map(group_of, groups)), "the end of all processes", PROMISE_S)


@pytest.mark.parametrize("seed", [1])
def test_right_tokens_or_a_clear_error_and_nothing_left(service: Service, seed: int) -> None:
    rng = random.Random(seed)
    blows: list[Callable[[], None]] = [
        *(lambda name=name: service.kill(name) for name in ROLES),
        *(lambda name=name: service.stop(name) for name in rng.sample(sorted(ROLES), 2)),
        lambda: service.kill_router(rng.randrange(2)),
    ]
    rng.shuffle(blows)
    idle, stop = Client(service, seed), threading.Event()
    for router in range(2):  # connections that are used, and then left alone for long
        assert idle.ask(router, 0) == "right", idle.wrong
    before, kept = service.fds(), dict(idle.connections)
    clients = [Client(service, 100 * seed + number) for number in range(CLIENTS)]
    threads = [threading.Thread(target=client.run, args=(stop,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        for blow in blows:
            strike_under_a_long_prompt(service, blow, idle.rng.randrange(1 << 30))
            service.until_up()
    finally:
        stop.set()
        for thread in threads:
            thread.join(2 * ANSWER_S)
    assert not any(thread.is_alive() for thread in threads)
    assert [wrong for client in (idle, *clients) for wrong in client.wrong] == []
    assert sum(client.outcomes["right"] for client in clients) >= len(blows), (
        service.cluster.tails()
    )
    at_rest(service)
    for router in range(2):
        # Who was killed has closed its side: that is told at once, and the next is served.
        if idle.ask(router, 0) == "lost":
            assert idle.ask(router, 0) == "right", idle.wrong
        else:
            assert idle.connections[ADDRESSES[router]] is kept[ADDRESSES[router]]
    assert idle.wrong == []
    for which in range(len(LENGTHS)):
        assert idle.ask(which % 2, which) == "right", idle.wrong
    idle.close()
    at_rest(service)
    after = service.fds()
    grown = {pid: (before[pid], count) for pid, count in after.items() if pid in before}
    assert [counts for counts in grown.values() if counts[1] > counts[0] + FDS] == []


def test_requests_are_cancelled_at_random_moments(service: Service) -> None:
    """Their blocks are free again within 2 s of the last one, on every node."""
    service.until_up()
    at_rest(service)
    left: Counter[str] = Counter()

    def leave(seed: int) -> str:
        rng = random.Random(seed)
        where = rng.choice(ADDRESSES), service.port
        prompt = service.prompts[rng.choices(range(len(LENGTHS)), (4, 4, 2, 1))[0]]
        # A beginning of its own for some of them, so that not all are hits.
        start = [rng.randrange(3, 384)] * rng.choice((0, 1))
        body = completion([*start, *prompt], max_tokens=MAX_TOKENS, stream=True)
        events, patience = rng.randrange(MAX_TOKENS), rng.choice((0.02, 0.2, 2.0))
        connection = http.client.HTTPConnection(*where, timeout=patience)
        try:
            connection.connect()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            for line, _ in zip(response, range(2 * events), strict=False):
                if line.startswith(b"data: [DONE]"):
                    return "ended"
            return "left while it generated"
        except TimeoutError:
            return "left while it waited"
        finally:
            connection.close()

    with ThreadPoolExecutor(16) as pool:
        left.update(pool.map(leave, range(CANCELLED)))
    assert left["left while it generated"] > 10 < left["left while it waited"], left
    assert left["ended"] < CANCELLED // 2, left
    at_rest(service, PROMISE_S)
    client = Client(service, 0)
    for which in range(len(LENGTHS)):
        assert client.ask(which % 2, which) == "right", client.wrong
    client.close()


def strike_under_a_long_prompt(service: Service, blow: Callable[[], None], seed: int) -> None:
    """While the long prompt is computed somewhere."""
    client = Client(service, seed)
    asks = threading.Thread(target=client.ask, args=(client.rng.randrange(2), len(LENGTHS) - 1))

    def computes() -> bool:
        waiting = "kvbaton_prompt_tokens_waiting"
        return not asks.is_alive() or any(n.metrics()(waiting) for n in service.nodes.values())

    asks.start()
    try:
        poll("a prompt is computed", computes, 30.0, service.cluster.tails)
        blow()
    finally:
        asks.join(2 * ANSWER_S)
        client.close()
    assert not asks.is_alive()
    assert client.wrong == []


def at_rest(service: Service, seconds: float = FENCED_S) -> None:
    """Nobody holds anything for anybody."""
    for node in service.nodes.values():

        def rests(node: Node = node) -> bool:
            return not held(node.metrics())

        def why(node: Node = node) -> str:
            with suppress(Exception):
                return f"{held(node.metrics())} {node.state()}"
            return node.tail()

        poll(f"{node.name} at rest", rests, seconds, why)
    for router in service.routers:
        metrics = router.metrics()
        names = "kvbaton_router_in_flight", "kvbaton_router_prompt_tokens_in_flight"
        assert {metrics(name, node=node) for name in names for node in ROLES} == {0.0}
