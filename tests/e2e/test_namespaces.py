"""P or D in network and pid namespaces of its own, as in a container: no process table shows it.

It is killed, cut off and stopped with a hand-over in flight, over both lanes that can be fenced
from here: NIXL over sockets, and the TCP transport.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest

from kvbaton.messages.nodes import GenerateResponse
from kvbaton.types import TransferTimers
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import prompt_of
from tests.support.served_pair import Pair, settle
from tests.support.servers import HttpFailure, Node, poll
from tests.support.store_servers import need

pytestmark = pytest.mark.e2e

LONG = 1200
"""Tokens of a prompt that takes P, in chunks of 8, seconds; and D much less."""
BACK_S = 5.0
"""D's blocks are back so long after P is known to be gone."""
LET_GO_S = 2 * TransferTimers().lease + 20.0
"""P holds blocks for a silent D until the attempt's lease ends, then as long for the write."""
ENGINE = {"num-blocks": "512", "max-model-len": "2048", "cluster-key": "the same for both"}
SLOW = {**ENGINE, "max-num-batched-tokens": "8"}
SUBNET = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
CONTROL_PORT = 7000
"""Of a P that has the namespace for itself."""
HERE, THERE = f"{SUBNET}.1", f"{SUBNET}.2"


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)


class Link:
    """A namespace for one node and the cable to it."""

    def __init__(self) -> None:
        self.name = f"kvb{os.getpid()}"
        self.ours, self.theirs = f"{self.name}d", f"{self.name}p"

    def lay(self) -> None:
        there = ("ip", "-n", self.name)
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.ours, "type", "veth", "peer", self.theirs)
        run("ip", "link", "set", self.theirs, "netns", self.name)
        run("ip", "addr", "add", f"{HERE}/24", "dev", self.ours)
        run("ip", "link", "set", self.ours, "up")
        run(*there, "addr", "add", f"{THERE}/24", "dev", self.theirs)
        run(*there, "link", "set", self.theirs, "up")
        run(*there, "link", "set", "lo", "up")

    def cut(self) -> None:
        run("ip", "-n", self.name, "link", "set", self.theirs, "down")

    def mend(self) -> None:
        run("ip", "-n", self.name, "link", "set", self.theirs, "up")

    def remove(self) -> None:
        subprocess.run(["ip", "link", "del", self.ours], capture_output=True, timeout=30)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    need("netns", os.geteuid() == 0 and shutil.which("ip"), "namespaces need root and ip")
    link = Link()
    try:
        link.lay()
        yield link
    finally:
        link.remove()


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(
        hidden_size=128, intermediate_size=256, num_layers=4, max_position_embeddings=2048
    )


class Nodes:
    """P and D, one of them here and the other, which can be replaced, in the namespace.

    Args:
        far: the role of that one.
    """

    def __init__(
        self, cluster: Cluster, link: Link, transport: str, model: Path, far: Literal["p", "d"]
    ) -> None:
        self.link, self.model = link, model
        self._cluster, self._transport, self._far = cluster, transport, far
        self.p = self.start_p()
        address = f"tcp://{THERE}:{CONTROL_PORT}"
        self._peer = address if far == "p" else self.p.info()["control_address"]
        self.d = self.start_d()

    def start_p(self) -> Node:
        port = str(CONTROL_PORT if self._far == "p" else 0)
        return self._start("prefill", {**SLOW, "control-port": port}, self._far == "p")

    def start_d(self) -> Node:
        return self._start("decode", {**ENGINE, "peer": self._peer}, self._far == "d")

    def _start(self, role: Literal["prefill", "decode"], flags: dict[str, str], far: bool) -> Node:
        link, host = self.link, THERE if far else HERE
        return self._cluster.start_node(
            role,
            f"{role}-{self._transport}-{self._far}",
            {**flags, "transport": self._transport, "host": host},
            env={"UCX_TLS": "tcp", "UCX_NET_DEVICES": link.theirs if far else link.ours},
            network=link.name if far else "",
        )

    @property
    def far(self) -> Node:
        return self.p if self._far == "p" else self.d

    def kill_far(self) -> None:
        self.far.kill()
        self._cluster.servers.remove(self.far)
        self.far.log.unlink()

    def leased(self) -> float:
        """Blocks of P that it holds for D, and hand-overs that it holds them for."""
        metrics = self.p.metrics()
        return metrics("kvbaton_leases") + metrics("kvbaton_blocks", owner="outgoing")

    def fenced(self) -> float:
        """Blocks of D that nobody may use yet."""
        metrics = self.d.metrics()
        return metrics("kvbaton_blocks", owner="fenced") + metrics(
            "kvbaton_blocks", owner="incoming"
        )

    def until_back(self, seconds: float, what: str) -> None:
        poll(what, lambda: not self.fenced(), seconds, self.d.tail)


@contextmanager
def nodes_of(
    far: Literal["p", "d"], transport: str, link: Link, model: Path, folder: Path
) -> Iterator[Nodes]:
    cluster = Cluster(folder, model)
    try:
        nodes = Nodes(cluster, link, transport, model, far)
        cluster.until_up(nodes.p, nodes.d)
        yield nodes
        nodes.kill_far()  # SIGTERM is not passed on
    finally:
        cluster.stop()


@pytest.fixture(scope="module", params=["nixl", "tcp"])
def nodes(
    request: pytest.FixtureRequest,
    link: Link,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp(f"namespaces-{request.param}")
    with nodes_of("p", request.param, link, model, folder) as nodes:
        yield nodes


@pytest.fixture(scope="module", params=["nixl", "tcp"])
def turned(
    request: pytest.FixtureRequest,
    link: Link,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Nodes]:
    """Those of which D is in the namespace."""
    folder = tmp_path_factory.mktemp(f"namespaces-d-{request.param}")
    with nodes_of("d", request.param, link, model, folder) as nodes:
        yield nodes


@contextmanager
def always_healthy(node: Node) -> Iterator[None]:
    """Ask a node for its health all the time."""
    ill: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            try:
                node.call("GET", "/health")
            except HttpFailure as failure:
                ill.append(str(failure))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not ill, ill[0]


def begin(nodes: Nodes, oracle: Oracle, seed: int) -> Callable[[], None]:
    """Start a hand-over and wait until some of it has landed; returns what checks D's tokens.

    A session may end just now, of what was done to P before: D then computes the prompt, and
    another one is handed over.
    """
    rounds = itertools.count()
    answer: Future[GenerateResponse] | None = None
    landed = nodes.d.metrics()("kvbaton_transfer_notices_total")
    ids: tuple[int, ...] = ()

    def has_landed() -> bool:
        nonlocal answer, ids
        if nodes.d.metrics()("kvbaton_transfer_notices_total") > landed:
            return True
        if answer is None or answer.done():
            ids = prompt_of(LONG, 1000 * seed + next(rounds))
            pair = Pair(nodes.p, nodes.d, nodes.model)
            answer = pair.submit_to_both(ids, max_tokens=4)
        return False

    poll("a write has landed", has_landed, 30.0, lambda: nodes.p.tail() + nodes.d.tail())
    assert answer is not None
    under_way = answer

    def check() -> None:
        (choice,) = under_way.result(60).choices
        assert list(choice.token_ids) == oracle.greedy(ids, 4)

    return check


def reachable(node: Node) -> bool:
    with suppress(OSError):
        node.call("GET", "/health")
        return True
    return False


def hand_over_works(nodes: Nodes, oracle: Oracle, seed: int) -> None:
    """Blocks cross again; until the session is up, prompts are computed."""
    poll("P can be reached", lambda: reachable(nodes.p), 30.0, nodes.p.tail)
    rounds = itertools.count()

    def crosses() -> bool:
        ids = prompt_of(64, 1000 * seed + next(rounds))
        settle(nodes.p, nodes.d)
        pair = Pair(nodes.p, nodes.d, nodes.model)
        assert pair.tokens(ids, max_tokens=4) == oracle.greedy(ids, 4)
        return pair.at_d()("kvbaton_prompt_tokens_total", source="transferred") == 64

    poll("blocks cross", crosses, 30.0, lambda: nodes.p.tail() + nodes.d.tail())


@pytest.fixture(scope="module")
def oracle(reference: Callable[..., object], model: Path) -> Oracle:
    return Oracle(reference(model))


def test_p_is_stopped_and_continued(nodes: Nodes, oracle: Oracle) -> None:
    """Its blocks stay, everything else goes on; when it goes on, they come back."""
    other = prompt_of(40, 2)
    with always_healthy(nodes.d):
        for seed in range(10, 20):
            check = begin(nodes, oracle, seed)
            os.killpg(nodes.p.pid, signal.SIGSTOP)
            check()
            if nodes.fenced() > 0:
                break
            os.killpg(nodes.p.pid, signal.SIGCONT)  # all had landed before it stopped
        try:
            (choice,) = nodes.d.generate(other, max_tokens=4).choices
            assert list(choice.token_ids) == oracle.greedy(other, 4)
            assert nodes.fenced() > 0
        finally:
            os.killpg(nodes.p.pid, signal.SIGCONT)
        nodes.until_back(BACK_S, "its blocks are back once it goes on")
    hand_over_works(nodes, oracle, 3)


def test_p_is_cut_off(nodes: Nodes, oracle: Oracle) -> None:
    """No word, no FIN: but a fence that needs neither."""
    with always_healthy(nodes.d):
        check = begin(nodes, oracle, 4)
        nodes.link.cut()
        try:
            nodes.until_back(TransferTimers().lease + BACK_S, "its blocks are back")
            check()
        finally:
            nodes.link.mend()
    hand_over_works(nodes, oracle, 5)


def test_p_is_killed(nodes: Nodes, oracle: Oracle) -> None:
    """Only its guard tells; another P takes its place."""
    with always_healthy(nodes.d):
        check = begin(nodes, oracle, 6)
        nodes.kill_far()
        nodes.until_back(BACK_S, "its blocks are back")
        check()
    nodes.p = nodes.start_p()
    hand_over_works(nodes, oracle, 7)


# --- the other way round: what P holds for a D in the namespace ---


def serves_alone(node: Node, oracle: Oracle, seed: int) -> None:
    """P's own requests go on, whatever it holds for others."""
    ids = prompt_of(40, seed)
    (choice,) = node.generate(ids, max_tokens=4).choices
    assert list(choice.token_ids) == oracle.greedy(ids, 4)


@pytest.mark.slow
@pytest.mark.parametrize("turned", ["tcp"], indirect=True)
def test_d_is_stopped_and_continued(turned: Nodes, oracle: Oracle) -> None:
    """P lets go of what it holds for D, and writes to it again when it goes on."""
    with always_healthy(turned.p):
        begin(turned, oracle, 11)  # its client may be gone before D goes on
        assert turned.leased() > 0
        os.killpg(turned.d.pid, signal.SIGSTOP)
        try:
            serves_alone(turned.p, oracle, 12)
            poll("P has let go", lambda: not turned.leased(), LET_GO_S, turned.p.tail)
        finally:
            os.killpg(turned.d.pid, signal.SIGCONT)
        # P lives, and can't say whether what it wrote has landed: their session ends with a fence.
        turned.until_back(BACK_S, "D's blocks are back once it goes on")
        settle(turned.d, turned.p)
    hand_over_works(turned, oracle, 13)


@pytest.mark.slow
def test_d_is_killed(turned: Nodes, oracle: Oracle) -> None:
    """Another D takes its place."""
    with always_healthy(turned.p):
        begin(turned, oracle, 14)
        assert turned.leased() > 0
        turned.kill_far()
        poll("P has let go", lambda: not turned.leased(), BACK_S, turned.p.tail)
        serves_alone(turned.p, oracle, 15)
    turned.d = turned.start_d()
    hand_over_works(turned, oracle, 16)
