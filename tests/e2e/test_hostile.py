"""Clients, routers and lives of nodes that no sane cluster has; nodes live through all of it.

Real processes, with a cluster key and without one, registered at something that answers whatever a
test wants in a router's place. After each test all nodes live, are healthy, hand over, and hold no
more files and threads than before.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbaton.types import TransferTimers
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.processes import group_of
from tests.support.served_pair import POOL, Pair
from tests.support.servers import HttpFailure, Node, generation, poll

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("hostile")]

DEADLINE_S = 2.0
"""Of a request that refers to nobody."""
FORGOTTEN_S = 2 * TransferTimers().lease + 20.0
"""An address that nobody uses costs nothing any more after so long."""
SLACK = {"files": 6, "threads": 4, "MiB": 48}
"""What may come and go: connections of HTTP clients, threads that end, an allocator's arenas."""
LIVES = 10


class FalseRouter(ThreadingHTTPServer):
    """Answers registrations as a test wants.

    Attributes:
        answer: status and body.
        asked: how often it was asked, by node.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answerer)
        self.answer: tuple[int, bytes] = (503, b"{}")
        self.asked: dict[str, int] = {}
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def vouch(self, *addresses: str) -> None:
        members = {"control_addresses": addresses, "heartbeat_s": 0.1}
        self.answer = 200, json.dumps(members).encode()

    def heard_by(self, *nodes: Node) -> None:
        """Wait until each node has had an answer, and has asked again."""
        before = {node.name: self.asked.get(node.name, 0) for node in nodes}

        def heard() -> bool:
            return all(self.asked.get(name, 0) > count + 2 for name, count in before.items())

        poll("nodes ask again", heard, 60.0, lambda: "\n".join(node.tail() for node in nodes))

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Answerer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        router = self.server
        assert isinstance(router, FalseRouter)
        info = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, body = router.answer
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        router.asked[info["node_id"]] = router.asked.get(info["node_id"], 0) + 1

    def do_DELETE(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""


def costs(node: Node) -> dict[str, int]:
    """Files, threads and resident memory of a node's processes."""
    found = dict.fromkeys(SLACK, 0)
    for pid in group_of(node.pid):
        with suppress(OSError):
            found["files"] += len(os.listdir(f"/proc/{pid}/fd"))
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            found["threads"] += int(status["Threads"])
            found["MiB"] += int(status["VmRSS"].split()[0]) >> 10
    return found


class Rig:
    """A prefill and a decode node, and who answers in their router's place."""

    def __init__(self, cluster: Cluster, key: str | None, oracle: Oracle) -> None:
        self.cluster, self.oracle = cluster, oracle
        self.flags = {"num-blocks": "128"} | ({"cluster-key": key} if key else {})
        self.router = FalseRouter()
        self.router.vouch()
        self.name = "keyed" if key else "open"
        self.lives = 0
        self.p = self.start_p()
        self.d = self._start("decode", f"d-{self.name}")
        self._seeds = iter(range(1000))
        cluster.until_up(self.p, self.d)

    def _start(self, role: Any, name: str) -> Node:
        node = self.cluster.start_node(role, name, {**self.flags, "router": self.router.url})
        return node

    def start_p(self) -> Node:
        self.lives += 1
        return self._start("prefill", f"p-{self.name}-{self.lives}")

    def kill_p(self) -> None:
        self.p.kill()
        self.cluster.servers.remove(self.p)
        self.p.log.unlink()

    def prompt(self) -> list[int]:
        rng = np.random.default_rng([len(self.name), next(self._seeds)])
        tokens: list[int] = rng.integers(3, 384, 40).tolist()
        return tokens

    def hand_over_works(self) -> None:
        """All live, none is ill, and blocks cross; until the session is up prompts are computed."""
        self.router.vouch(self.p.info()["control_address"])
        self.router.heard_by(self.p, self.d)

        def crosses() -> bool:
            for node in (self.p, self.d):
                node.check_alive()
                node.call("GET", "/health")
            pair, ids = Pair(self.p, self.d, self.cluster.model), self.prompt()
            assert pair.tokens(ids, max_tokens=4) == self.oracle.greedy(ids, 4)
            return pair.at_d()("kvbaton_prompt_tokens_total", source="transferred") == len(ids)

        poll("blocks cross", crosses, 60.0, lambda: self.p.tail() + self.d.tail())

    @contextmanager
    def costs_nothing(self, *nodes: Node) -> Iterator[None]:
        """What happens meanwhile leaves nothing behind on nodes."""
        self.hand_over_works()
        before = {node: costs(node) for node in nodes}
        yield
        self.hand_over_works()
        for node in nodes:
            most = {name: count + SLACK[name] for name, count in before[node].items()}
            poll(
                f"{node.name} costs no more than {most}",
                lambda node=node, most=most: all(  # type: ignore[misc]
                    count <= most[name] for name, count in costs(node).items()
                ),
                FORGOTTEN_S,
                lambda node=node: f"{costs(node)}",  # type: ignore[misc]
            )


@pytest.fixture(scope="module")
def oracle(reference: Callable[..., Any], model: Path) -> Oracle:
    return Oracle(reference(model))


@pytest.fixture(scope="module", params=[None, "the same for all"], ids=["open", "keyed"])
def rig(
    request: pytest.FixtureRequest,
    model: Path,
    oracle: Oracle,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    cluster = Cluster(tmp_path_factory.mktemp("hostile"), model)
    rig = Rig(cluster, request.param, oracle)
    try:
        yield rig
    finally:
        cluster.stop()
        rig.router.close()


HOSTS = [
    *("::1%?", "::1%a b", "[::1%a b]", "fe80::1%lo", "x" * 253, "x." * 126, "a b", "..", "[", "]"),
    *("127.0.0.1:80", "me@127.0.0.1", "http://127.0.0.1", "127.0.0.1/..", "0.0.0.0", "::", "*"),
    *("255.255.255.255", "192.0.2.1", "127.0.0.1\x00", "127.0.0.1\n", "\u00e9" * 100, "0x7f.1"),
]
REFERENCES: list[dict[str, Any]] = [
    *({"remote_host": host} for host in HOSTS),
    *({"remote_port": port} for port in (0, 1, 9, -1, 65_535, 65_536, 1 << 40)),
    *({"remote_port": port} for port in ("80", None, 1.5)),
    *({"remote_engine_id": name} for name in ("", "x" * 253, "x" * 10_000, "\x00", 5)),
    *({"transfer_id": name} for name in ("", "00" * 16, "ff" * 16, "xyz", "ab" * 10_000, 5)),
    *({"attempt": number} for number in (-1, 7, (1 << 31) - 1, 1 << 31, "0")),
    *({"remote_block_ids": ids} for ids in (5, [[-1]], [[1 << 62]], [list(range(5000))])),
    {"do_remote_decode": True},
    {"remote_prefix": {"remote_host": "::1%?", "remote_port": 5, "num_tokens": 16}},
    {"remote_prefix": {"remote_host": "127.0.0.1", "remote_port": 9, "num_tokens": 16}},
    {"remote_prefix": {"remote_host": "127.0.0.1", "remote_port": 9, "num_tokens": 1 << 40}},
]


def test_references(rig: Rig) -> None:
    """Whatever clients say of a hand-over, to either role: the right tokens, or a refusal."""

    def ask(node: Node, ids: list[int], params: dict[str, Any]) -> int:
        body = generation(ids, params, max_tokens=2)
        try:
            answer = node.post(
                "/inference/v1/generate", msgspec.structs.replace(body, deadline_s=DEADLINE_S)
            )
        except HttpFailure as failure:
            return failure.status if json.loads(failure.body)["error"]["message"] else 0
        told = answer["choices"][0]["token_ids"]
        assert told == rig.oracle.greedy(ids, 2)[: len(told)]
        return 200

    with rig.costs_nothing(rig.p, rig.d):
        pair = Pair(rig.p, rig.d, rig.cluster.model)
        asked: list[tuple[dict[str, Any], Future[int]]] = []
        for reference in REFERENCES:
            of_d = {**pair.target_params(os.urandom(16)), **reference}
            of_p = {**pair.source_params(os.urandom(16)), **reference}
            for node, params in ((rig.d, of_d), (rig.p, of_d), (rig.p, of_p), (rig.d, of_p)):
                asked.append((params, POOL.submit(ask, node, rig.prompt(), params)))
        for params, status in asked:
            assert status.result() in (200, *range(400, 500), 503, 504), params


def test_routers_that_tell_nonsense(rig: Rig) -> None:
    """No answer ends a node, and no address that it names costs the others theirs."""
    members = [
        *(f"tcp://{host}:5" for host in HOSTS),
        *(
            "",
            "tcp://",
            "tcp://:5",
            "tcp://127.0.0.1",
            "tcp://127.0.0.1:0",
            "tcp://127.0.0.1:99999",
        ),
        *("ipc:///etc/passwd", "inproc://x", "http://127.0.0.1:5", "tcp://127.0.0.1:x", "\x00"),
    ]
    nobody = [f"tcp://127.0.0.1:{port}" for port in range(1, 400)]
    bodies = [
        b"",
        b"<html>404 not found</html>",
        b"[" * 100_000,
        b'{"error": {"message": "go away", "type": "x", "code": "x"}}',
        b'{"control_addresses": [5], "heartbeat_s": 0.1}',
        b'{"control_addresses": ["tcp://127.0.0.1:5"], "heartbeat_s": -1}',
        json.dumps({"control_addresses": ["x" * 100_000], "heartbeat_s": 0.1}).encode(),
        json.dumps({"control_addresses": members, "heartbeat_s": 0.1}).encode(),
        json.dumps({"control_addresses": nobody, "heartbeat_s": 0.1}).encode(),
    ]
    with rig.costs_nothing(rig.p, rig.d):
        answers = [(200, body) for body in bodies] + [(status, bodies[1]) for status in (401, 404)]
        for answer in [*answers, (409, bodies[3]), (500, b"")]:
            rig.router.answer = answer
            rig.router.heard_by(rig.p, rig.d)


def test_lives_of_a_prefill_node(rig: Rig) -> None:
    """One that crashes again and again, each time with a hand-over under way and at a new port."""
    with rig.costs_nothing(rig.d):
        for _ in range(LIVES):
            pair = Pair(rig.p, rig.d, rig.cluster.model)
            ids = rig.prompt()
            answer = pair.submit_to_both(ids, max_tokens=4)
            rig.kill_p()
            (choice,) = answer.result(60).choices
            assert list(choice.token_ids) == rig.oracle.greedy(ids, 4)
            rig.p = rig.start_p()
            rig.hand_over_works()
