"""``kvbaton router --workers 2``: processes behind one port that all know the nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from kvbaton.errors import ConfigError
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router import workers
from kvbaton.router.config import RouterConfig
from kvbaton.router.loads import NodeLoads
from kvbaton.router.membership import Member, Membership, NodeState
from kvbaton.router.nodes import EngineClients, Nodes
from kvbaton.router.workers import (
    ClusterState,
    WorkerNews,
    WorkerNodes,
    _Cluster,
    _running,
    worker,
)
from kvbaton.server.frontend import FrontendConfig
from kvbaton.server.network import bind
from kvbaton.server.sse import read_events
from kvbaton.server.supervisor import PublishedState, WorkerLink, _Channel
from kvbaton.types import PromptLimits
from tests.support.scripted_source import write_tokenizer
from tests.support.stand_in import MODEL, StandIn, stand_in
from tests.support.waiting import PATIENCE_S, eventually

WORKERS = 2


def children(pid: int) -> set[int]:
    """Worker processes: those that ran this program with ``spawn_main``."""
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ends meanwhile
                if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                    found.add(int(child))
    return found


async def ask(url: str) -> str:
    """A completion over a connection of its own, so that any worker may get it."""
    body = {"model": MODEL, "prompt": "The quick", "max_tokens": 4}
    async with aiohttp.ClientSession(url) as session:
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            text: str = (await response.json())["choices"][0]["text"]
            return text


async def refused(url: str, prompt: list[int]) -> str:
    """Why a prompt is, over a connection of its own."""
    async with aiohttp.ClientSession(url) as session:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == 400
            return await response.text()


@pytest.fixture
async def nodes(tmp_path: Path) -> Any:
    made: list[StandIn] = [stand_in("prefill", "p0"), stand_in("decode", "d0")]
    for node in made:
        await node.start()
        node.offer_socket(tmp_path)
        node.info = msgspec.structs.replace(node.info, prompt_limits=PromptLimits(100, 100, 8))
    yield made
    for node in made:
        await node.stop()


async def register(url: str, infos: list[NodeInfo]) -> None:
    async with aiohttp.ClientSession(url) as session:
        for _ in range(2):  # again, so that all know of all
            for info in infos:
                async with session.post("/nodes", data=msgspec.json.encode(info)) as response:
                    assert response.status == 200, await response.text()


async def beat(url: str, infos: list[NodeInfo]) -> None:
    """Heartbeats, without which nodes are given up after some seconds."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):  # a worker is killed meanwhile
            await register(url, infos)
        await asyncio.sleep(0.5)


async def test_all_workers_know_the_nodes_and_one_that_dies_is_replaced(
    tmp_path: Path, nodes: list[StandIn]
) -> None:
    command = ["router", "--port", "0", "--model", str(write_tokenizer(tmp_path))]
    command += ["--served-model-name", MODEL, "--workers", str(WORKERS)]
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvbaton", *command), stderr=asyncio.subprocess.PIPE
    )
    assert router.stderr is not None
    beating: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(120):
            while b"listening on " not in (line := await router.stderr.readline()):
                assert line, "it ended"
            url = line.decode().split()[-1]
            await register(url, [node.info for node in nodes])
            beating = asyncio.create_task(beat(url, [node.info for node in nodes]))
            first = children(router.pid)
            assert len(first) == WORKERS

            async def both_reached() -> bool:
                return all([await healthy(url) for _ in range(12)])

            await eventually(both_reached)
            texts = [await ask(url) for _ in range(16)]
            assert len(set(texts)) == 1
            assert len(nodes[1].received) == 16
            for _ in range(4):
                assert "100 is the most" in await refused(url, [1] * 101)
            async with aiohttp.ClientSession(url) as session:
                async with session.get("/metrics") as response:
                    metrics = await response.text()
                assert 'kvbaton_router_requests_total{outcome="finished"} 16.0' in metrics
                assert 'kvbaton_router_nodes{node="d0",role="decode",state="ready"} 1.0' in metrics
                async with session.get("/nodes") as response:
                    assert (await response.json())["pairs"] == [["p0", "d0"]]

            for order in ("pause", "resume"):
                async with aiohttp.ClientSession(url) as session:
                    async with session.post(f"/nodes/d0/{order}") as response:
                        assert response.status == 200
                for _ in range(12):
                    await ask(url)
            came = len(nodes[1].received) - 16
            assert 10 <= came <= 14, "workers hear of it at once, not with the next heartbeats"

            pages = [await said(url, "40 answered, 4 failed") for _ in range(4)]
            assert all(pages), "the totals are those of all workers"

            os.kill(min(first), signal.SIGKILL)

            async def replaced() -> bool:
                now = children(router.pid)
                return len(now) == WORKERS and now != first and await both_reached()

            await eventually(replaced)
            assert {await ask(url) for _ in range(8)} == set(texts)
            assert await said(url, "48 answered, 4 failed"), "what the dead one did stays"

            assert nodes[1].engine is not None
            nodes[1].engine.die()
            assert await ask(url) == texts[0], "a lost node is avoided by all workers"

            drain = ["drain", url, "--settle", "0.1", "--timeout", "20"]
            drained = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvbaton", *drain)
            assert await drained.wait() == 0

            async def all_say_so() -> bool:
                return not any([await healthy(url) for _ in range(12)])

            await eventually(all_say_so)
            async with aiohttp.ClientSession(url) as session:
                assert (await session.get("/live")).status == 200
            assert await ask(url) == texts[0], "who comes all the same is served"
            router.terminate()
            assert await router.wait() == 0
            drained = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvbaton", *drain)
            assert await drained.wait() == 0, "nobody is there: nothing to wait for"
    finally:
        if beating is not None:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        if router.returncode is None:
            router.kill()
            await router.wait()


async def said(url: str, text: str) -> bool:
    """Whether a page, of any worker, says this soon."""
    async with aiohttp.ClientSession(url) as session, session.get("/events") as response:
        async with asyncio.timeout(PATIENCE_S):
            async for event in read_events(response.content):
                if text in event.decode():
                    return True
    return False


async def healthy(url: str) -> bool:
    try:
        async with aiohttp.ClientSession(url) as session:
            async with session.get("/health") as response:
                return response.status == 200 and (await response.json())["ready"] == 2
    except aiohttp.ClientError:
        return False


class OneWorker:
    """A worker in the test's process, and what its supervisor tells it."""

    def __init__(self, folder: Path) -> None:
        listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._listener, self._folder = listener, write_tokenizer(folder)

    async def __aenter__(self) -> OneWorker:
        ours, theirs = socket.socketpair()
        self._channel = await _Channel.open(ours)
        self._session = aiohttp.ClientSession()
        link = WorkerLink(self._listener, await _Channel.open(theirs), self._session)
        payload = RouterConfig(), FrontendConfig(model_name=MODEL), str(self._folder)
        self._serving = asyncio.create_task(worker(link, payload))
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._channel.close()
        await self._serving
        await self._session.close()

    def tell(self, *members: Member) -> None:
        """All nodes that there are."""
        data = msgspec.msgpack.encode(ClusterState(members))
        self._channel.send(msgspec.msgpack.encode(PublishedState(data)))

    async def status(self, path: str) -> int:
        async with aiohttp.ClientSession(self.url) as session, session.get(path) as response:
            return response.status


def members(nodes: list[StandIn], state: NodeState = NodeState.READY) -> list[Member]:
    """As a supervisor knows them."""
    return [Member(node.info, static=False, heard_at=0.0, state=state) for node in nodes]


@pytest.fixture
async def one_worker(tmp_path: Path) -> Any:
    async with OneWorker(tmp_path) as one:
        yield one


@pytest.mark.parametrize("told", [True, False])
async def test_a_worker_that_has_yet_to_reach_ready_nodes_refuses_nobody(
    one_worker: OneWorker, nodes: list[StandIn], told: bool
) -> None:
    """As one that was started in the place of another, which has yet to hear of them, too."""
    for node in nodes:
        node.attends.clear()
    if told:
        one_worker.tell(*members(nodes))
    asking = asyncio.create_task(ask(one_worker.url))
    probe = asyncio.create_task(one_worker.status("/health"))
    assert await one_worker.status("/live") == 200
    assert await one_worker.status("/live") == 200, "those came before"
    if not told:
        one_worker.tell(*members(nodes))
    for node in nodes:
        node.attends.set()
    assert await asking
    assert await probe == 200


async def test_a_worker_says_at_once_that_no_node_is_ready(
    one_worker: OneWorker, nodes: list[StandIn]
) -> None:
    for known in ([], members(nodes, NodeState.UNHEALTHY)):
        one_worker.tell(*known)
        async with asyncio.timeout(workers.REACH_S):
            assert await one_worker.status("/health") == 503


async def test_a_worker_that_reaches_no_node_says_so(
    one_worker: OneWorker, nodes: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "REACH_S", 0.05)
    for node in nodes:
        node.attends.clear()
    one_worker.tell(*members(nodes))
    assert await one_worker.status("/health") == 503


async def test_a_worker_reaches_nodes_beside_one_that_stands_still(
    one_worker: OneWorker, nodes: list[StandIn]
) -> None:
    nodes[0].attends.clear()
    one_worker.tell(*members(nodes))
    async with asyncio.timeout(workers.REACH_S):
        assert await ask(one_worker.url)


async def test_a_worker_reaches_nodes_that_come_while_one_stands_still(
    one_worker: OneWorker, nodes: list[StandIn]
) -> None:
    nodes[0].attends.clear()
    one_worker.tell(*members(nodes[:1]))
    for _ in range(3):  # so that it asks that one by now
        assert await one_worker.status("/live") == 200
    one_worker.tell(*members(nodes))
    async with asyncio.timeout(workers.REACH_S):
        assert await ask(one_worker.url)


class Told:
    """A supervisor whose workers read less often than it publishes, and one of its workers."""

    def __init__(self) -> None:
        nodes = Nodes(Membership(), None, None)  # type: ignore[arg-type]
        with bind("127.0.0.1", 0) as listener:
            edge = FrontendConfig(model_name=MODEL)
            self.cluster = _Cluster(RouterConfig(workers=2), nodes, listener, edge, "")
        self.nodes = nodes
        link: Any = SimpleNamespace(report=lambda data: None)
        self.worker = WorkerNodes(link, NodeLoads(), None)
        self.events: list[str] = []
        self.worker.on_lost = lambda node_id, reason: self.events.append(f"{node_id}: {reason}")
        self.worker.on_leaving = self.events.append

    def add(self, reached_by: EngineClients | None) -> Member:
        """A ready node, whose engine these clients have reached."""
        info = stand_in("decode", "d0").info
        member = Member(info, static=False, heard_at=0.0, state=NodeState.READY)
        self.nodes.membership.members[info.node_id] = member
        if reached_by is not None:
            client: Any = SimpleNamespace(dead=None)
            reached_by._clients[info.node_id] = info, client
        return member

    def change(self, name: str, reason: str = "") -> None:
        """One node leaves or, with a reason, is lost."""
        (self.nodes.on_lost(name, reason) if reason else self.nodes.on_leaving(name))
        self.nodes.on_change()

    def read(self) -> list[str]:
        """What the worker is told by what it reads next, which is the latest state only."""
        self.events.clear()
        self.worker.take_state(
            msgspec.msgpack.decode(self.cluster.supervisor.state, type=PublishedState).data
        )
        return sorted(self.events)


async def test_a_worker_hears_of_all_nodes_that_leave_at_once() -> None:
    """Each state takes the place of the one before, which the worker may not have read."""
    told = Told()
    told.cluster.publish()
    assert told.read() == []
    told.change("a")
    told.change("b")
    told.change("c", "its engine is gone")
    told.change("d", "so is its")
    assert told.read() == ["a", "b", "c: its engine is gone", "d: so is its"]
    told.cluster.publish()
    assert told.read() == [], "but of each once"
    told.change("a")
    assert told.read() == ["a"]


@pytest.mark.parametrize("reached", [True, False], ids=["to the worker only", "to all"])
async def test_a_node_that_a_worker_has_lost_is_lost_if_its_supervisor_has_lost_it(
    reached: bool,
) -> None:
    """A worker that stood still for a second is hung up on by all engines at once."""
    told = Told()
    member = told.add(told.nodes.engines if reached else None)
    info = member.info
    lost = info.node_id, info.generation, "its engine: the connection was lost"
    news = WorkerNews(1, {}, unreachable=lost)
    told.cluster._take_report(0, msgspec.msgpack.encode(news))
    told.cluster.publish()
    assert (member.state is NodeState.READY) == reached
    assert told.read() == ([] if reached else [f"d0: {lost[-1]}"])


@pytest.mark.parametrize("reached", [True, False])
async def test_a_node_that_only_a_supervisor_has_lost_goes_on_for_workers(reached: bool) -> None:
    """A supervisor that stood still is hung up on, too; the tokens of workers still come."""
    told = Told()
    member = told.add(told.worker.engines if reached else None)
    told.nodes.unreachable(member.info, "its engine: the connection was lost")
    assert member.state is NodeState.UNHEALTHY
    assert told.read() == ([] if reached else ["d0: its engine: the connection was lost"])


async def test_what_runs_beside_a_worker_ends_it_with_itself() -> None:
    """Else it would serve on without, and nobody would know."""

    async def breaks() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        async with asyncio.timeout(PATIENCE_S), _running(breaks()):
            await asyncio.Event().wait()


async def test_what_runs_beside_a_worker_ends_with_it() -> None:
    ended = asyncio.Event()

    async def runs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with _running(runs()):
        await asyncio.sleep(0)
    assert ended.is_set()
    ended.clear()

    async def fails() -> None:
        async with _running(runs()):
            await asyncio.sleep(0)
            raise ConfigError("--workers", "of the worker itself")

    with pytest.raises(ConfigError, match="of the worker itself"):
        await fails()
    assert ended.is_set()
