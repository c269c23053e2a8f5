"""The router's page: what it says, how it is kept up to date, and who may read it."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import kvbaton.router.page
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.loads import NodeLoad, NodeLoads, RouterTotals
from kvbaton.router.membership import Membership
from kvbaton.router.page import FEED, MAX_STREAMS, fragment
from kvbaton.router.status import WINDOW, ClusterStatus
from kvbaton.server.sse import read_events
from tests.support.router_rig import Rig
from tests.support.waiting import PATIENCE_S, eventually


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvbaton.router.page, "INTERVAL_S", 0.02)


@asynccontextmanager
async def opened(rig: Rig) -> AsyncIterator[AsyncIterator[bytes]]:
    async with rig.session.get("/events") as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        yield read_events(response.content)


async def until(events: AsyncIterator[bytes], text: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async for event in events:
            if text in event.decode():
                return
    raise AssertionError(f"the stream ended without {text}")


async def test_a_page_says_what_is_and_needs_nothing_else(make_rig: Any) -> None:
    rig = await make_rig()
    async with rig.session.get("/") as response:
        text, policy = await response.text(), response.headers["Content-Security-Policy"]
    assert re.search(r">p0<small>http://127\.0\.0\.1:\d+</small></th>", text)
    assert "1 pair for prompts" in text
    assert not re.search(r"(src|href)=.(https?:|//)", text), "it loads something from elsewhere"
    assert "style=" not in text
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(text) < 20_000


async def test_a_stream_follows_requests_and_nodes(make_rig: Any) -> None:
    rig = await make_rig()
    node = rig.nodes["d0"]
    node.gate.clear()
    rig.nodes["p0"].gate.clear()
    body = {"prompt": [1, 2, 3], "max_tokens": 4}
    async with opened(rig) as events:
        await until(events, "0 running, 0 waiting")
        asked = asyncio.create_task(rig.session.post("/v1/completions", json=body))
        await until(events, "0 running, 1 waiting")
        node.gate.set()
        await until(events, "1 answered, 0 failed")
        assert (await asked).status == 200
        (await asked).release()
        await until(events, "4 in all")
        await rig.session.post("/nodes/d0/drain")
        await until(events, '<span class="state draining">')
    await eventually(lambda: rig.app[FEED].streams == 0)


async def test_all_pages_are_told_the_same_made_once(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig()
    made: list[object] = []
    render = kvbaton.router.page.fragment

    def counted(*args: Any) -> str:
        made.append(args)
        return render(*args)

    monkeypatch.setattr(kvbaton.router.page, "fragment", counted)
    heard: dict[int, list[bytes]] = {}

    async def follow(number: int) -> None:
        async with opened(rig) as events:
            heard[number] = [await anext(events) for _ in range(5)]

    await asyncio.gather(*(follow(number) for number in range(8)))
    told = {event for events in heard.values() for event in events}
    assert len(told) <= len(made) < 8 * 5
    await eventually(lambda: rig.app[FEED].streams == 0)
    await asyncio.sleep(0.1)  # one that was on its way
    before = len(made)
    samples = len(rig.app[FEED].status.history)
    await eventually(lambda: len(rig.app[FEED].status.history) > min(samples, 50))
    assert len(made) == before, "nobody looks"


async def test_what_nodes_say_stays_text(make_rig: Any) -> None:
    rig = await make_rig()
    bad = "<script>alert(1)</script>\n\ndata: forged"
    rig.directory.membership.members["d0"].reason = bad
    async with opened(rig) as events:
        event = (await anext(events)).decode()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in event
    assert "forged" in event
    assert "<script" not in event
    assert "\n" not in event


async def test_there_is_a_limit_of_pages(make_rig: Any) -> None:
    rig = await make_rig()
    rig.app[FEED].streams = MAX_STREAMS
    async with rig.session.get("/events") as response:
        assert response.status == 503
        assert "pages are open" in (await response.json())["error"]["message"]


async def test_open_pages_do_not_keep_a_router_from_ending(make_rig: Any) -> None:
    rig = await make_rig()
    async with opened(rig) as events:
        await anext(events)
        async with asyncio.timeout(PATIENCE_S):
            await rig.app.shutdown()
            async for _ in events:
                pass


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer secret", 200),
        (basic("secret"), 200),
        (basic("wrong"), 401),
        ("Basic nonsense", 401),
    ],
)
async def test_a_browser_elsewhere_may_read_with_an_api_key(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, authorization: str | None, status: int
) -> None:
    rig = await make_rig(api_keys=("secret",))
    monkeypatch.setattr("kvbaton.server.auth.from_loopback", lambda request: False)
    headers = {} if authorization is None else {"Authorization": authorization}
    for path in ("/", "/events"):
        async with rig.session.get(path, headers=headers) as response:
            assert response.status == status
            if status == 401:
                assert response.headers["WWW-Authenticate"].startswith("Basic ")
    # A browser sends a password along with whatever any site makes it ask of us.
    async with rig.session.post("/nodes/d0/drain", headers=headers) as response:
        assert response.status == (200 if authorization == "Bearer secret" else 403)


async def test_without_api_keys_nobody_elsewhere_reads(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig()
    monkeypatch.setattr("kvbaton.server.auth.from_loopback", lambda request: False)
    async with rig.session.get("/events") as response:
        assert response.status == 403


def test_rates_are_of_the_last_seconds() -> None:
    now, done = 0.0, RouterTotals()
    info = NodeInfo(
        node_id="p", generation="1", role="prefill", url="http://127.0.0.1:1", model="m"
    )
    membership = Membership()
    status = ClusterStatus(membership, NodeLoads(), lambda: done, lambda: now)

    def pass_second(tokens: int, sent: float) -> None:
        nonlocal now, done
        load = {"generated_tokens": float(tokens), "sent_bytes": sent, "free_blocks": 30.0}
        told = msgspec.structs.replace(info, load=load, num_blocks=40)
        membership.register(told, now)
        status.sample()
        now += 1.0
        done = RouterTotals(running=1, finished=done.finished + 1, tokens=done.tokens + 10)

    for second in range(20):
        pass_second(tokens=7 * second, sent=1000.0 * second)
    view = status.view()
    (node,) = view.nodes
    assert node.kv_usage == 0.25
    assert node.tokens_per_s == pytest.approx(7.0 * (WINDOW - 1) / WINDOW)
    assert view.traffic.tokens_per_s == pytest.approx(10.0)
    assert view.traffic.requests_per_s == pytest.approx(1.0)
    assert view.traffic.sent_bytes == 19_000
    assert node.running is None, "an older node does not say"

    # Another life of it counts from 0, and what the first has sent stays.
    membership.remove("p")
    info = msgspec.structs.replace(info, generation="2")
    pass_second(tokens=0, sent=500.0)
    view = status.view()
    assert view.traffic.sent_bytes == 19_500
    assert view.nodes[0].tokens_per_s == 0.0
    assert len(status.history) == 21


def test_bytes_of_stores_are_shown_where_a_node_has_one() -> None:
    membership = Membership()
    status = ClusterStatus(membership, NodeLoads(), RouterTotals)
    plain = NodeInfo(node_id="p", generation="1", role="any", url="http://127.0.0.1:1", model="m")
    membership.register(plain, 0.0)
    assert "Stores" not in fragment(status.view(), [])
    moved = {"redis": {"load": 1_500_000.0, "save": 2000.0}}
    membership.register(
        msgspec.structs.replace(plain, node_id="q", url="http://127.0.0.1:2", stores=moved), 0.0
    )
    view = status.view()
    assert [node.stores for node in view.nodes] == [{}, moved]
    assert re.findall(r'data-label="Stores">([^<]*)<', fragment(view, [])) == [
        "—",
        "redis: 1.5 MB read, 2.0 kB written",
    ]


def test_loads_of_this_router_are_shown() -> None:
    membership, loads = Membership(), NodeLoads()
    info = NodeInfo(node_id="d", generation="1", role="decode", url="http://127.0.0.1:1", model="m")
    membership.register(info, 0.0)
    loads.change("d", NodeLoad(), NodeLoad(prompt_tokens=5, sequences=2))
    (node,) = ClusterStatus(membership, loads, RouterTotals).view().nodes
    assert (node.requests, node.prompt_tokens) == (2, 5)


def test_what_a_node_is_used_for_follows_slowly() -> None:
    membership, loads = Membership(), NodeLoads()
    info = NodeInfo(node_id="a", generation="1", role="any", url="http://127.0.0.1:1", model="m")
    membership.register(info, 0.0)
    status, load = ClusterStatus(membership, loads, RouterTotals), NodeLoad()

    def used_after(now: NodeLoad, seconds: int) -> list[str]:
        nonlocal load
        loads.change("a", load, now)
        load = now
        for _ in range(seconds):
            (node,) = status.sample().nodes
        return node.used_for

    prefills, generates = NodeLoad(prompt_tokens=9), NodeLoad(sequences=2, pending=1)
    assert used_after(prefills, 1) == []
    assert used_after(prefills, 4) == ["prefill"]
    assert used_after(NodeLoad(), 3) == ["prefill"], "a pause is no change"
    assert used_after(generates, 2) == ["prefill"]
    assert used_after(generates, 2) == ["prefill", "decode"]
    assert used_after(generates, 6) == ["decode"]
    assert used_after(prefills, 4) == ["prefill", "decode"]
    assert used_after(NodeLoad(sequences=1, pending=1), 20) == [], "that one waits for its prompt"
