"""``kvbaton router --workers 2``: processes behind one port that all know the nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvbaton.errors import ConfigError
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.workers import _running
from kvbaton.server.sse import read_events
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
