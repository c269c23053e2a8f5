"""A node's registrar against a real router."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvbaton.errors import ConfigError
from kvbaton.messages.nodes import Members, NodeInfo
from kvbaton.router.config import MembershipTimers
from kvbaton.server import registration
from kvbaton.server.app import serve_on
from kvbaton.server.config import EndpointConfig
from kvbaton.server.network import TlsConfig, TrustConfig, bind
from kvbaton.server.registration import REFUSALS, NodeRegistrar, targets_of
from tests.support.certificates import NAME as CERTIFIED
from tests.support.certificates import write_certificates
from tests.support.waiting import PATIENCE_S, eventually

Start = Callable[..., tuple[NodeRegistrar, "asyncio.Task[None]", list[tuple[str, ...]]]]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    tasks: list[asyncio.Task[None]] = []

    def begin(
        url: str,
        info: Callable[[], NodeInfo],
        *,
        cluster_key: str | None = None,
        trust: TrustConfig | None = None,
        **seconds: float,
    ) -> Any:
        told: list[tuple[str, ...]] = []

        async def on_members(addresses: tuple[str, ...]) -> None:
            told.append(addresses)

        for name, value in seconds.items():
            monkeypatch.setattr(registration, name, value)
        registrar = NodeRegistrar(
            url.split(), info, on_members, cluster_key=cluster_key, trust=trust
        )
        tasks.append(asyncio.create_task(registrar.run()))
        return registrar, tasks[-1], told

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_node_registers_and_hears_of_the_others(make_rig: Any, start: Start) -> None:
    quick = MembershipTimers(heartbeat_s=0.05, probe_period_s=0.05)
    rig = await make_rig(prefill=0, decode=0, membership=quick)
    other = await make_rig()
    p, d = (other.nodes[name].info for name in ("p0", "d0"))
    _, _, told = start(rig.url, lambda: d)
    await eventually(lambda: rig.states() == {"d0": "ready"})
    start(rig.url, lambda: p)
    await eventually(lambda: told == [(), (p.control_address,)])
    await eventually(lambda: rig.states() == {"d0": "ready", "p0": "ready"})


async def test_news_are_told_at_once(make_rig: Any, start: Start) -> None:
    slow = MembershipTimers(heartbeat_s=60.0, probe_period_s=0.05)
    rig = await make_rig(prefill=0, decode=0, membership=slow)
    other = await make_rig(prefill=0)
    state = ["loading"]
    info = other.nodes["d0"].info
    registrar, _, _ = start(rig.url, lambda: msgspec.structs.replace(info, state=state[0]))
    await eventually(lambda: rig.states() == {"d0": "loading"})
    state[0] = "ready"
    registrar.nudge()
    await eventually(lambda: rig.states() == {"d0": "ready"})
    await registrar.leave()
    assert rig.states() == {}


async def test_it_ends_however_news_and_its_cancellation_meet(make_rig: Any, start: Start) -> None:
    rig, other = await make_rig(prefill=0, decode=0), await make_rig(prefill=0)
    for turns in range(8):
        registrar, task, told = start(rig.url, lambda: other.nodes["d0"].info)
        await eventually(partial(len, told))
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        registrar.nudge()
        done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        assert done, f"it goes on, with news {turns} turns of the loop after it was cancelled"


async def test_it_waits_for_a_router_that_comes_later_but_not_for_ever(
    make_rig: Any, start: Start
) -> None:
    other = await make_rig(prefill=0)
    info = other.nodes["d0"].info
    _, task, _ = start("http://127.0.0.1:9", lambda: info, FIRST_DEADLINE_S=0.2)
    with pytest.raises(ConfigError, match=r"^--router: can't register at http://127.0.0.1:9/nodes"):
        await asyncio.wait_for(task, PATIENCE_S)


async def test_a_router_that_is_away_for_long_ends_nothing(
    make_rig: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await make_rig(prefill=0)
    pauses: list[float] = []

    def at_once(shortest: float, longest: float) -> float:
        pauses.append(longest)
        return 0.0

    monkeypatch.setattr(registration, "random", SimpleNamespace(uniform=at_once))
    _, task, _ = start("http://127.0.0.1:9", lambda: other.nodes["d0"].info, FIRST_DEADLINE_S=1e6)
    await eventually(lambda: task.done() or len(pauses) > 1100)
    assert not task.done()
    assert (pauses[:3], max(pauses)) == ([0.2, 0.4, 0.8], 2.0)


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_refusal_ends_it_with_the_routers_reason(
    make_rig: Any, start: Start, key: str | None
) -> None:
    rig = await make_rig(prefill=0, decode=0, cluster_key="right")
    other = await make_rig(prefill=0)
    _, task, _ = start(rig.url, lambda: other.nodes["d0"].info, cluster_key=key)
    with pytest.raises(ConfigError, match="--cluster-key"):
        await asyncio.wait_for(task, PATIENCE_S)
    _, _, told = start(rig.url, lambda: other.nodes["d0"].info, cluster_key="right")
    await eventually(lambda: told == [()])


async def test_a_node_whose_id_is_in_use_waits_is_told_whose_it_is_and_removes_nobody(
    make_rig: Any, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvbaton.server.registration")
    rig = await make_rig(prefill=0)
    other = await make_rig(prefill=0)
    info = msgspec.structs.replace(other.nodes["d0"].info, generation="2")
    registrar, task, told = start(rig.url, lambda: info, FIRST_DEADLINE_S=0.2)
    where = rig.nodes["d0"].info.url
    with pytest.raises(ConfigError, match=rf"'d0' belongs to the node at {where}.*--node-id"):
        await asyncio.wait_for(task, PATIENCE_S)
    await registrar.leave()
    assert "could not tell" not in caplog.text, "the router does not know it, as it should be"
    assert (rig.states(), told) == ({"d0": "ready"}, [])
    _, _, told = start(rig.url, lambda: info)
    await rig.nodes["d0"].stop()
    await eventually(lambda: told == [()])
    assert rig.directory.membership.members["d0"].info.generation == "2"


async def test_each_reason_why_it_can_not_register_is_logged_once(
    make_rig: Any, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    other = await make_rig(prefill=0)
    answers = itertools.cycle(("first", "second"))
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(next(answers))
        return web.Response(status=502, text=asked[-1])

    app = web.Application()
    app.router.add_post("/nodes", answer)
    async with TestServer(app) as server:
        start(str(server.make_url("")), lambda: other.nodes["d0"].info, MAX_BACKOFF_S=0.06)
        await eventually(lambda: len(asked) > 5)
    said = [record.getMessage() for record in caplog.records if "trying on" in record.msg]
    assert [text.rpartition(" ")[2] for text in said[:2]] == ["first", "second"]
    assert sum("first" in text or "second" in text for text in said) == 2


GOOD = b'{"control_addresses": [], "heartbeat_s": 0.01}'
GOOD_TOO = b'{"control_addresses": ["tcp://127.0.0.1:5"], "heartbeat_s": 0.01}'
NONSENSE = [
    b"",
    b"<html>502 Bad Gateway</html>",
    b"null",
    b"[]",
    b'{"control_addresses": "tcp://127.0.0.1:1", "heartbeat_s": 0.01}',
    b'{"control_addresses": [5], "heartbeat_s": 0.01}',
    b'{"control_addresses": []}',
    b'{"control_addresses": [], "heartbeat_s": null}',
    b'{"control_addresses": [], "heartbeat_s": 0}',
    b'{"control_addresses": [], "heartbeat_s": -1}',
    b'{"control_addresses": [], "heartbeat_s": 1e300}',
    b'{"control_addresses": [], "heartbeat_s": 1e999}',
    b"[" * 100_000,
    b'{"later": ' + b"[" * 100_000,
    b'{"control_addresses": ["\xff"], "heartbeat_s": 0.01}',
]


async def test_whatever_a_router_answers_a_registered_node_goes_on(
    make_rig: Any, start: Start
) -> None:
    rig = await make_rig(prefill=0)
    asked: list[web.Request] = []
    refusals = itertools.product([*REFUSALS, 302, 500], [*NONSENSE[1:3], *NONSENSE[-2:]])
    answers = [(200, GOOD), *((200, body) for body in NONSENSE), *refusals, (200, GOOD_TOO)]

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        status, body = answers[min(len(asked), len(answers)) - 1]
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_post("/nodes", answer)
    async with TestServer(app) as server:
        info = rig.nodes["d0"].info
        _, task, told = start(str(server.make_url("/")), lambda: info, MAX_BACKOFF_S=0.0)
        await eventually(lambda: len(asked) > len(answers) or task.done(), 60)
        assert not task.done(), task.result()
        assert told == [(), ("tcp://127.0.0.1:5",)]


# --- several routers ---

QUICK = MembershipTimers(heartbeat_s=0.05, probe_period_s=0.05)
NAME = "routers.test"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What host names resolve to, besides those that really do."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in known:
            return real(host, port, *args, **kwargs)
        if not known[host]:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return [found for one in known[host] for found in real(one, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


async def test_a_name_stands_for_all_its_addresses(names: dict[str, list[str]]) -> None:
    url = f"http://{NAME}:8000"
    names[NAME] = ["127.0.0.2", "127.0.0.1", "127.0.0.2"]
    assert await targets_of(url) == [(url, "127.0.0.1"), (url, "127.0.0.2")]
    names[NAME] = ["::1", "127.0.0.1"]
    assert await targets_of(url) == [(url, "127.0.0.1")]
    names[NAME] = ["::1"]
    assert await targets_of(url) == [(url, "::1")]
    names[NAME] = []
    with pytest.raises(socket.gaierror):
        await targets_of(url)
    for alone in ("http://localhost:8000", "http://127.0.0.1:8000", "http://[::1]:8000"):
        assert await targets_of(alone) == [(alone, None)]


async def test_it_registers_with_all_routers_of_a_name_as_they_come_and_go(
    make_rig: Any, start: Start, names: dict[str, list[str]]
) -> None:
    first = await make_rig(prefill=0, decode=0, membership=QUICK)
    port = first.runner.addresses[0][1]
    second = await make_rig(prefill=0, decode=0, membership=QUICK, at=("127.0.0.2", port))
    other = await make_rig()
    p, d = (other.nodes[name].info for name in ("p0", "d0"))
    url = f"http://{NAME}:{port}"

    names[NAME] = ["127.0.0.1"]
    registrar, task, told = start(url, lambda: d, LOOKUP_PERIOD_S=0.05)
    await eventually(lambda: first.states() == {"d0": "ready"})
    assert second.states() == {}

    names[NAME] = ["127.0.0.1", "127.0.0.2"]  # a replica comes
    await eventually(lambda: second.states() == {"d0": "ready"})
    start(second.url, lambda: p)  # who is known to one of them only is a member all the same
    await eventually(lambda: told == [(), (p.control_address,)])

    names[NAME] = ["127.0.0.2"]  # one goes: it is called as long as it answers
    await eventually(lambda: not all(r.listed for r in registrar._registrations.values()))
    heard = first.directory.membership.members["d0"].heard_at
    await eventually(lambda: first.directory.membership.members["d0"].heard_at > heard)
    await first.runner.cleanup()
    await eventually(lambda: len(registrar._registrations) == 1)
    assert told[-1] == (p.control_address,)

    names[NAME] = []  # the name service is down
    heard = second.directory.membership.members["d0"].heard_at
    await eventually(lambda: second.directory.membership.members["d0"].heard_at > heard)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await registrar.leave()
    assert second.states() == {"p0": "ready"}


async def test_a_certificate_is_of_the_name_whichever_address_is_dialled(
    tmp_path: Path, make_rig: Any, start: Start, names: dict[str, list[str]]
) -> None:
    ca, certificate, key = map(str, write_certificates(tmp_path))
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.host} {request.raw_path}")
        body = msgspec.json.encode(Members(control_addresses=(), heartbeat_s=60.0))
        return web.Response(body=body)

    app, tls = web.Application(), TlsConfig(ssl_certfile=certificate, ssl_keyfile=key)
    app.add_routes([web.post("/nodes", answer), web.delete("/nodes/{id:.+}", answer)])
    runner = await serve_on(bind("127.0.0.2", 0), app, EndpointConfig(tls=tls))
    try:
        port = runner.addresses[0][1]
        names[CERTIFIED] = ["127.0.0.2"]
        info = msgspec.structs.replace(
            (await make_rig(prefill=0)).nodes["d0"].info, node_id="d %41"
        )
        url, trust = f"https://{CERTIFIED}:{port}", TrustConfig(ssl_ca_certs=ca)
        patient = {"HEARTBEAT_TIMEOUT_S": PATIENCE_S}  # a busy machine would ask again
        registrar, _, told = start(url, lambda: info, trust=trust, **patient)
        await eventually(lambda: told == [()])
        await registrar.leave()
        where = f"{CERTIFIED}:{port} /nodes"
        assert asked == [where, f"{where}/d%20%2541?generation={info.generation}"]
        _, task, _ = start(url, lambda: info, FIRST_DEADLINE_S=0.2)
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.wait_for(task, PATIENCE_S)
        _, task, _ = start(f"http://127.0.0.2:{port}", lambda: info, FIRST_DEADLINE_S=0.2)
        with pytest.raises(ConfigError, match=r"can't register at .*; it may want https://"):
            await asyncio.wait_for(task, PATIENCE_S)
    finally:
        await runner.cleanup()


async def test_a_router_that_refuses_ends_nothing_while_another_does_not(
    make_rig: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "REFUSED_PAUSE_S", 0.05)
    good = await make_rig(prefill=0, decode=0, membership=QUICK)
    bad = await make_rig(prefill=0, decode=0, membership=QUICK, cluster_key="another")
    other = await make_rig(prefill=0)
    info = other.nodes["d0"].info
    registrar, task, told = start(f"{bad.url} {good.url}", lambda: info)
    await eventually(lambda: good.states() == {"d0": "ready"} and told == [()])
    await eventually(lambda: any(one.refusal for one in registrar._registrations.values()))
    good.directory.membership.remove("d0")  # for good: then all refuse it
    with pytest.raises(ConfigError, match="it refused this node"):
        await asyncio.wait_for(task, PATIENCE_S)


async def test_a_name_without_addresses_is_told_after_a_while(
    make_rig: Any, start: Start, names: dict[str, list[str]]
) -> None:
    other = await make_rig(prefill=0)
    info, names[NAME] = other.nodes["d0"].info, []
    _, task, _ = start(f"http://{NAME}:8000", lambda: info, FIRST_DEADLINE_S=0.2)
    with pytest.raises(
        ConfigError, match=rf"^--router: can't register at http://{NAME}:8000/nodes"
    ):
        await asyncio.wait_for(task, PATIENCE_S)


async def test_what_is_announced_is_known_at_once(make_rig: Any, start: Start) -> None:
    slow = MembershipTimers(heartbeat_s=60.0, probe_period_s=0.05)
    rigs = [await make_rig(prefill=0, decode=0, membership=slow) for _ in range(2)]
    other = await make_rig(prefill=0)
    info, state = other.nodes["d0"].info, ["ready"]
    urls = " ".join(rig.url for rig in rigs)
    registrar, _, _ = start(urls, lambda: msgspec.structs.replace(info, state=state[0]))
    await eventually(lambda: all(rig.states() == {"d0": "ready"} for rig in rigs))
    state[0] = "draining"
    await registrar.announce()
    assert [rig.states() for rig in rigs] == [{"d0": "draining"}] * 2
