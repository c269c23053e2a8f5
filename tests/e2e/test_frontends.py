"""Engines of real nodes with several frontends: connections of routers, HTTP processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from kvbaton.engine.client import EngineClient
from kvbaton.errors import EngineDeadError
from kvbaton.messages.engine import (
    AddRequest,
    SamplingParams,
)
from tests.support import processes
from tests.support.cluster import Cluster
from tests.support.servers import Node, poll
from tests.support.waiting import PATIENCE_S, promised

KEY = "the key of this cluster"
WITHIN_S = 2.0
LONG = 480


@pytest.fixture(scope="module")
def nodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """One with a cluster key, one without, each with two HTTP processes."""
    cluster = Cluster(tmp_path_factory.mktemp("frontends"), model)
    keyed = cluster.start_node("decode", "keyed", {"cluster-key": KEY, "workers": "2"})
    plain = cluster.start_node("decode", "plain", {"workers": "2"})
    cluster.until_up(keyed, plain)
    yield keyed, plain
    keyed.kill()  # its core may have been killed
    cluster.stop()


@pytest.fixture
def keyed(nodes: tuple[Node, Node]) -> Node:
    return nodes[0]


@pytest.fixture(params=["keyed", "plain"])
def node(request: pytest.FixtureRequest, nodes: tuple[Node, Node]) -> Node:
    return nodes[["keyed", "plain"].index(request.param)]


def key_of(node: Node) -> str | None:
    return KEY if node.name == "keyed" else None


def asking(request_id: str, max_tokens: int = 8) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    return AddRequest(request_id=request_id, token_ids=array("I", range(5, 25)), params=params)


@asynccontextmanager
async def frontend(node: Node) -> AsyncIterator[EngineClient]:
    client = await EngineClient.connect(node.info()["engine_address"], cluster_key=key_of(node))
    try:
        yield client
    finally:
        await client.close()


def live(node: Node) -> float:
    """Sequences that the engine has."""
    metrics = node.metrics()
    kinds = ("running", "waiting", "loading")
    return sum(metrics(f"kvbaton_sequences_{kind}") for kind in kinds)


FRONTEND = """
import asyncio, sys
from kvbaton.engine.client import EngineClient
from tests.e2e.test_frontends import LONG, asking

async def main():
    address, key = sys.argv[1], sys.argv[2] or None
    client = await EngineClient.connect(address, cluster_key=key)
    streams = [client.generate(asking(f"r{i}", LONG)) for i in range(12)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    print("running", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_frontend_loses_its_requests(node: Node) -> None:
    before = node.metrics()
    words = [sys.executable, "-c", FRONTEND, node.info()["engine_address"], key_of(node) or ""]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        assert live(node) > 0
        child.send_signal(signal.SIGKILL)
        poll("no request is left", lambda: live(node) == 0, promised(WITHIN_S), node.tail)
    delta = node.metrics() - before
    assert delta("kvbaton_requests_finished_total", reason="abort") > 0, "none had ended by itself"
    assert delta("kvbaton_frontends_lost_total", reason="gone") == 1
    assert delta("kvbaton_frontend_requests_total", frontend="remote") == 12
    assert delta("kvbaton_frontend_tokens_total", frontend="remote") >= 12
    assert node.metrics()("kvbaton_ledger_imbalance") == 0


# --- HTTP processes ---


def workers_of(node: Node) -> frozenset[int]:
    """Processes that a node's main process started, without torch in them."""
    return frozenset(
        pid
        for pid in processes.descendants_of(node.pid)
        if "spawn_main" in _read(pid, "cmdline") and "libtorch" not in _read(pid, "maps")
    )


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has just ended
        return ""


def test_workers_share_port_engine_and_counts(keyed: Node) -> None:
    assert len(workers_of(keyed)) == 2
    before = keyed.metrics()
    with ThreadPoolExecutor(8) as pool:
        body = {"prompt": list(range(5, 25)), "max_tokens": 8, "temperature": 0}
        answers = list(pool.map(lambda i: keyed.post("/v1/completions", body), range(16)))
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    delta = keyed.metrics() - before
    assert delta("kvbaton_http_requests_total", path="/v1/completions", status="200") == 16
    assert delta("kvbaton_frontend_requests_total", frontend="local") == 16
    assert delta("kvbaton_time_to_first_token_seconds_count") == 16
    assert keyed.metrics()("kvbaton_frontends", frontend="local") == 3
    assert keyed.get("/health") == {"status": "ok"}


def test_a_killed_worker_is_replaced(keyed: Node) -> None:
    (victim, _) = sorted(workers_of(keyed))
    os.kill(victim, signal.SIGKILL)
    poll(
        "two workers again",
        lambda: len(workers_of(keyed)) == 2 and victim not in workers_of(keyed),
        PATIENCE_S,
        keyed.tail,
    )
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
    assert keyed.post("/v1/completions", body)["usage"]["completion_tokens"] == 2


# --- the end of a node: last, each is of no use after it ---


def test_told_to_stop_a_node_with_workers_leaves_nothing(nodes: tuple[Node, Node]) -> None:
    _, plain = nodes
    socket = Path(plain.info()["engine_address"].removeprefix("ipc://"))
    assert socket.exists()
    assert len(processes.group_of(plain.pid)) >= 4, "a supervisor, a core, two workers"
    plain.ask_to_stop()
    poll("all have ended", lambda: not processes.group_of(plain.pid), PATIENCE_S, plain.tail)
    assert not socket.parent.exists()
    said = plain.log.read_text()
    assert "Traceback" not in said
    assert "starting another" not in said


async def test_a_core_that_stands_still_or_dies_is_noticed(keyed: Node) -> None:
    """A process that stands still is one that its clients can't tell from a dead machine."""
    (core,) = (
        pid for pid in processes.descendants_of(keyed.pid) if "libtorch" in _read(pid, "maps")
    )
    for stop in (signal.SIGSTOP, signal.SIGKILL):
        await asyncio.to_thread(poll, "idle", lambda: not live(keyed), PATIENCE_S, keyed.tail)
        async with (
            frontend(keyed) as client,
            aclosing(client.generate(asking("r", LONG))) as outputs,
            asyncio.timeout(PATIENCE_S),
        ):
            await anext(outputs)
            os.kill(core, stop)
            async with asyncio.timeout(promised(WITHIN_S)):
                with pytest.raises(EngineDeadError):
                    async for _ in outputs:
                        pass
        if stop == signal.SIGSTOP:
            os.kill(core, signal.SIGCONT)
