"""Nodes on a Ray cluster of three raylets: answers, deaths of nodes and machines, and the end."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from tests.docs.test_commands import ROOT
from tests.support.chats import tokens_of
from tests.support.oracle import Oracle
from tests.support.processes import descendants_of, is_alive, node_process, parent_of
from tests.support.ray_machines import ENV, ray_machines
from tests.support.served_pair import bytes_per_token, settle
from tests.support.servers import HttpFailure, Node, Router, poll
from tests.support.store_servers import need

pytestmark = pytest.mark.e2e

SCRIPT = ROOT / "examples" / "ray.sh"
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SMALL = ("--num-blocks=256", "--max-model-len=512", "--max-num-batched-tokens=32")
BACK_S = 90.0
"""A node is back in 20 s; a busy machine takes longer, and Ray 5 s to miss a raylet."""
GONE_S = 30.0


class Placed(Node):
    """A node that `up` has placed, as others see it."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url

    @override
    def tail(self) -> str:
        return ""


class Up(Router):
    """``kvbaton up --ray``, whose HTTP is that of its router.

    Args:
        words: of the command.
        folder: for its log.
        address: of the Ray cluster.
        where: it is started.
    """

    says_url = r"ready: (http://\S+)/v1"

    def __init__(
        self, words: Sequence[str], folder: Path, address: str, where: Path = ROOT
    ) -> None:
        self.name = "up"
        self.log = folder / f"up-{len(list(folder.iterdir()))}.log"
        self._url = None
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=where,
                env={**os.environ, **ENV, "RAY_ADDRESS": address},
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def status(self) -> int:
        """With which it ends."""
        assert isinstance(self._process, subprocess.Popen)
        return self._process.wait(60.0)

    def cluster_key(self) -> str:
        """The key that it has made, as its router was told."""
        (router,) = (pid for pid in descendants_of(self.pid) if "router" in words_of(pid))
        environment = Path(f"/proc/{router}/environ").read_text().split("\0")
        return dict(line.split("=", 1) for line in environment if "=" in line)[
            "KVBATON_CLUSTER_KEY"
        ]

    def nodes(self) -> list[Placed]:
        return [Placed(node["node_id"], node["url"]) for node in self.get("/nodes")["nodes"]]

    def readied(self, name: str) -> int:
        """How often a node became ready."""
        return len(re.findall(rf"^{name}: ready in ", self.said(), re.MULTILINE))


def words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:  # it has just ended
        return []


def everybody() -> frozenset[int]:
    return frozenset(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def ours() -> frozenset[int]:
    """What this test has started, the cluster included."""
    return descendants_of(os.getpid())


def raylet_of(name: str) -> int:
    """The process that is the machine of a node: its actor's parent."""
    return parent_of(parent_of(node_process(name, ours())))


@pytest.fixture(scope="module")
def machines() -> Iterator[str]:
    """Address of a cluster of three."""
    need("ray", importlib.util.find_spec("ray"), "pip install 'kvbaton[ray]'")
    with ray_machines(3, cpus=2) as address:
        yield address


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def up(machines: str, model: Path, logs: Path) -> Iterator[Up]:
    """Two nodes that prefill and two that decode, started by the launch script."""
    text = SCRIPT.read_text()
    text = text.replace("exec kvbaton", f'exec "{sys.executable}" -m kvbaton')
    text = text.replace("--port 8000", "--port 0")
    more = (*SMALL, "--policy=least-loaded", "--served-model-name=tiny", "--log-level=info")
    up = Up(["bash", "-c", text, "ray.sh", str(model), *more], logs, machines)
    try:
        assert up.url
        yield up
    finally:
        up.ask_to_stop()
        up.stop()


@pytest.fixture
def start(machines: str, model: Path, logs: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*words: str, model: Path = model, where: Path = ROOT) -> Up:
        command = [sys.executable, "-m", "kvbaton", "up", f"--model={model}", "--port=0"]
        command += ["--host=0.0.0.0", *SMALL, *words]
        started.append(Up(command, logs, machines, where))
        return started[-1]

    yield start
    for up in started:
        up.ask_to_stop()
        up.stop()


def prompts(count: int, length: int = 100) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(7).integers(3, 384, (count, length)).tolist()
    return found


def test_answers_cross_machines(up: Up, model: Path, oracle: Oracle) -> None:
    nodes = up.nodes()
    before = {node.name: node.metrics() for node in nodes}
    asked = prompts(6)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda prompt: up.complete(prompt, max_tokens=8), asked))
    assert [tokens_of(answer) for answer in answers] == [oracle.greedy(p, 8) for p in asked]
    settle(*nodes)
    counted = {node.name: node.metrics() - before[node.name] for node in nodes}

    def total(name: str, **labels: str) -> float:
        return sum(metrics(name, **labels) for metrics in counted.values())

    moved = total("kvbaton_prompt_tokens_total", source="transferred")
    assert moved > 0
    sent = total("kvbaton_transfer_sent_bytes_total")
    assert sent == total("kvbaton_transfer_posted_bytes_total") == moved * bytes_per_token(model)
    assert total("kvbaton_transfer_digests_checked_total") > 0
    assert total("kvbaton_transfer_digests_failed_total") == 0


def test_nodes_are_spread_and_heard(up: Up) -> None:
    assert len({raylet_of(name) for name in NAMES}) == 3
    for name in NAMES:
        assert re.search(rf"^{name}: on \S+$", up.said(), re.MULTILINE)
        assert re.search(rf"^\[{name}\] .* serves at http", up.said(), re.MULTILINE)


def test_the_key_is_on_no_command_line(up: Up) -> None:
    key = up.cluster_key()
    assert len(key) == 64
    assert not any(key in word for pid in everybody() for word in words_of(pid))
    with pytest.raises(HttpFailure) as refused:
        up.call("POST", "/nodes", b"{}")
    assert refused.value.status == 401


class Load:
    """Clients that ask all the time; what they are told must be right, or to try again."""

    def __init__(self, up: Up, expected: Callable[[list[int]], list[int]]) -> None:
        self._up, self._stop = up, threading.Event()
        self._expected = [(prompt, expected(prompt)) for prompt in prompts(3)]
        self._pool = ThreadPoolExecutor(3)
        self.answered = 0
        self.refused: list[int] = []
        self._clients = [self._pool.submit(self._ask, *pair) for pair in self._expected]

    def _ask(self, prompt: list[int], expected: list[int]) -> None:
        while not self._stop.is_set():
            try:
                assert tokens_of(self._up.complete(prompt, max_tokens=8)) == expected
                self.answered += 1
            except HttpFailure as failure:
                self.refused.append(failure.status)

    def until_answered(self, more: int) -> None:
        wanted = self.answered + more
        poll("answers", lambda: self.answered >= wanted, BACK_S, self._up.said)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()
        assert set(self.refused) <= {503}


@pytest.fixture
def load(up: Up, oracle: Oracle) -> Iterator[Load]:
    with Load(up, lambda prompt: oracle.greedy(prompt, 8)) as load:
        yield load


@pytest.mark.parametrize("name", ["decode-1", "prefill-0"])
def test_a_killed_node_comes_back(up: Up, load: Load, name: str) -> None:
    load.until_answered(3)
    lives = up.readied(name)
    os.kill(node_process(name, ours()), signal.SIGKILL)
    poll(f"{name} is back", lambda: up.readied(name) > lives, BACK_S, up.said)
    assert re.search(rf"^{name} on \S+ was killed by signal 9", up.said(), re.MULTILINE)
    load.until_answered(3)


def test_nodes_of_a_lost_machine_are_placed_elsewhere(up: Up, load: Load) -> None:
    load.until_answered(3)
    # Not the first, which is the cluster's head and ours.
    lost = max(raylet_of(name) for name in NAMES)
    moved = [name for name in NAMES if raylet_of(name) == lost]
    lives = {name: up.readied(name) for name in moved}
    before = {name: node_process(name, ours()) for name in moved}
    os.kill(lost, signal.SIGKILL)
    for name in moved:
        poll(f"{name} is back", lambda n=name: up.readied(n) > lives[n], BACK_S, up.said)  # type: ignore[misc]
        assert raylet_of(name) != lost
        assert not is_alive(before[name])
    load.until_answered(3)


def test_told_to_stop_it_drains_and_leaves_nothing(up: Up) -> None:
    nodes = [node_process(name, ours()) for name in NAMES]
    (prompt,) = prompts(1)
    body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    events = up.stream("/v1/completions", {**body, "stream": True, "return_token_ids": True})
    tokens = list(next(events)["choices"][0]["token_ids"])
    up.ask_to_stop()  # as `ray job stop` does
    for event in events:
        tokens += [token for choice in event["choices"] for token in choice["token_ids"] or ()]
    assert len(tokens) == 48
    assert up.status == 0
    assert "killing" not in up.said()
    assert "Traceback" not in up.said()
    poll("no node", lambda: not any(map(is_alive, nodes)), GONE_S, up.said)


def test_a_killed_driver_leaves_nothing(start: Callable[..., Up]) -> None:
    up = start("--ray", "--any=1")
    assert up.url
    node = node_process("any-0", ours())
    children = descendants_of(up.pid)
    os.kill(up.pid, signal.SIGKILL)
    left = {node, *descendants_of(node), *children}
    poll("nobody", lambda: not any(map(is_alive, left)), GONE_S, up.said)


def test_a_model_that_another_machine_lacks(
    start: Callable[..., Up], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(model)
    # Each process finds another folder there, as each machine may.
    up = start("--ray", "--any=1", model=Path("/proc/self/cwd/model"), where=tmp_path)
    assert up.status == 1
    assert re.search(r"kvbaton: any-0 on \S+ ended with status 2", up.said())
    assert "--model: '/proc/self/cwd/model' is no model folder" in up.said()
    assert "Traceback" not in up.said()


def test_no_room(start: Callable[..., Up]) -> None:
    """Both GPUs of a node are wanted on one machine."""
    up = start("--ray", "--any=1", "--device=cuda", "--tensor-parallel-size=2", "--start-timeout=2")
    assert up.status == 1
    needs = "no room on the Ray cluster: nodes need any-0: 1 CPU + 2 GPU; its machines have"
    assert needs in up.said()
    assert "2 CPU + 0 GPU" in up.said()


def test_one_question_on_loopback(start: Callable[..., Up]) -> None:
    """All raylets have one address, so they reach the router there."""
    up = start("--ray", "--any=1", "--host=127.0.0.1", "--prompt=Hello", "--max-tokens=2")
    assert up.status == 0
    assert "served by" in up.said()
