"""What the router tells its nodes beside tokens: ids, keys, and to forget their caches."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvbaton.server.network import operator_token
from kvbaton.server.openapi import describe
from tests.support.waiting import PATIENCE_S


async def complete(rig: Any, **headers: str) -> Any:
    body = {"prompt": [1, 2, 3], "max_tokens": 4}
    async with rig.session.post("/v1/completions", json=body, headers=headers) as response:
        return response.status, response.headers, await response.json()


async def both_have_it(rig: Any) -> None:
    """D may answer before P has its part of a request."""
    arrived = (node.arrived.wait() for node in rig.nodes.values())
    await asyncio.wait_for(asyncio.gather(*arrived), PATIENCE_S)


async def test_both_legs_carry_the_clients_request_id(make_rig: Any) -> None:
    rig = await make_rig()
    status, headers, _ = await complete(rig, **{"X-Request-Id": "order-66"})
    assert (status, headers["X-Request-Id"]) == (200, "order-66")
    await both_have_it(rig)
    (p,), (d,) = (rig.nodes[name].received for name in ("p0", "d0"))
    assert p.request_id == d.request_id
    assert "order-66" in p.request_id


async def test_both_legs_carry_the_priority(make_rig: Any) -> None:
    rig = await make_rig()
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "priority": -3}
    async with rig.session.post("/v1/completions", json=body) as response:
        assert response.status == 200
    await both_have_it(rig)
    assert [node.received[0].priority for node in rig.nodes.values()] == [-3, -3]


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({"api_keys": ("front",)}, "Bearer front"),
        ({"api_keys": ("front",), "node_api_key": "back"}, "Bearer back"),
        ({"node_api_key": "back"}, "Bearer back"),
        ({}, None),
    ],
)
async def test_nodes_are_asked_with_their_key(
    make_rig: Any, settings: dict[str, Any], sent: str | None
) -> None:
    rig = await make_rig(**settings)
    if "api_keys" in settings:
        assert (await complete(rig))[0] == 401
    assert (await complete(rig, Authorization="Bearer front"))[0] == 200
    async with rig.session.post("/reset_prefix_cache") as response:
        assert response.status == 200
    for name in ("p0", "d0"):
        assert [headers.get("authorization") for headers in rig.nodes[name].headers] == [sent]


async def test_all_nodes_forget_their_caches(make_rig: Any) -> None:
    rig = await make_rig(prefill=2, decode=1)
    async with rig.session.post("/reset_prefix_cache") as response:
        answer = await response.json()
    assert (response.status, answer["result"]) == (200, True)
    assert answer["nodes"] == {"p0": True, "p1": True, "d0": True}
    assert [node.resets for node in rig.nodes.values()] == [1, 1, 1]


async def test_nodes_that_get_no_requests_forget_their_caches_too(make_rig: Any) -> None:
    """A node is paused to change what it serves from, and others may still fetch prefixes of it."""
    rig = await make_rig(prefill=2, decode=1)
    for path in ("/nodes/p0/pause", "/nodes/p1/drain"):
        async with rig.session.post(path) as response:
            assert response.status == 200
    async with rig.session.post("/reset_prefix_cache") as response:
        answer = await response.json()
    assert answer["nodes"] == {"p0": True, "p1": True, "d0": True}
    assert [node.resets for node in rig.nodes.values()] == [1, 1, 1]


async def test_the_log_tells_once_that_a_router_is_drained(
    make_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rig = await make_rig()
    for _ in range(2):
        async with rig.session.post("/drain") as response:
            assert response.status == 200
    assert caplog.text.count("drained on request") == 1


async def test_what_else_is_to_be_forgotten_must_be_clear(make_rig: Any) -> None:
    rig = await make_rig()
    async with rig.session.post("/reset_prefix_cache?reset_external=1") as response:
        answer = await response.json()
    assert (response.status, answer["error"]["param"]) == (400, "reset_external")
    assert [node.resets for node in rig.nodes.values()] == [0, 0]


async def test_what_a_node_says_of_its_store_is_passed_on(make_rig: Any) -> None:
    rig = await make_rig()
    rig.nodes["d0"].refusal = "the store was not cleared: it is gone"
    async with rig.session.post("/reset_prefix_cache?reset_external=true") as response:
        answer = await response.json()
    assert (response.status, answer["nodes"]) == (503, {"p0": True, "d0": False})
    assert answer["errors"] == {"d0": "the store was not cleared: it is gone"}


async def test_a_node_that_does_not_forget_is_named(make_rig: Any) -> None:
    rig = await make_rig()
    await rig.nodes["d0"].runner.cleanup()
    async with rig.session.post("/reset_prefix_cache") as response:
        answer = await response.json()
    assert (response.status, answer["nodes"]) == (503, {"p0": True, "d0": False})
    assert list(answer["errors"]) == ["d0"]


@pytest.mark.parametrize("babble", [b'{"a": "\xff"}', b'{"a":' * 20_000], ids=["bytes", "deep"])
async def test_a_node_that_says_what_nobody_can_read_is_named(make_rig: Any, babble: bytes) -> None:
    rig = await make_rig()
    rig.nodes["d0"].babble = babble
    async with rig.session.post("/reset_prefix_cache") as response:
        answer = await response.json()
    assert (response.status, answer["nodes"]) == (503, {"p0": True, "d0": False})
    assert list(answer["errors"]) == ["d0"]


async def test_nodes_of_the_cluster_know_their_router(make_rig: Any) -> None:
    """A node elsewhere has a cluster key, and takes it for an API key."""
    rig = await make_rig(cluster_key="secret")
    for node in rig.nodes.values():
        node.friend = f"Bearer {operator_token('secret')}"
    async with rig.session.post("/reset_prefix_cache") as response:
        assert (response.status, await response.json()) == (
            200,
            {"result": True, "nodes": {"p0": True, "d0": True}, "errors": {}},
        )


async def test_a_node_that_does_not_know_us_says_what_to_do(make_rig: Any) -> None:
    rig = await make_rig()
    rig.nodes["d0"].friend = f"Bearer {operator_token('secret')}"
    async with rig.session.post("/reset_prefix_cache") as response:
        answer = await response.json()
    assert (response.status, answer["nodes"]) == (503, {"p0": True, "d0": False})
    assert "--cluster-key" in answer["errors"]["d0"]
    assert "--node-api-key" in answer["errors"]["d0"]


async def test_the_description_names_every_endpoint(make_rig: Any) -> None:
    rig = await make_rig()
    async with rig.session.get("/openapi.json") as response:
        served = await response.json()
    assert served == describe(rig.app)
    assert {"/v1/completions", "/nodes/{node_id}/drain", "/reset_prefix_cache"} <= set(
        served["paths"]
    )


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("site.example:8000", 403),
        ("localhost.site.example", 403),
        ("127.0.0.1.site.example:8000", 403),
        ("10.0.0.7:8000", 403),
        ("", 403),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.2:8000", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
    ],
)
async def test_a_site_whose_name_leads_to_this_machine_is_no_operator(
    make_rig: Any, host: str, status: int
) -> None:
    """A browser takes what answers there for that site's own, and sends no Origin (rebinding)."""
    rig = await make_rig()
    for path in ("/nodes", "/debug/routes"):
        async with rig.session.get(path, headers={"Host": host}) as response:
            assert response.status == status, path


async def test_a_page_in_a_browser_on_this_machine_is_no_operator(make_rig: Any) -> None:
    """Any site can have it post to loopback addresses; then it says which site that is."""
    rig = await make_rig()
    site, node = {"Origin": "https://site.example"}, rig.nodes["d0"].info
    for path in ("/nodes/d0/drain", "/nodes/d0/pause", "/drain", "/reset_prefix_cache", "/nodes"):
        data = msgspec.json.encode(node) if path == "/nodes" else None
        async with rig.session.post(path, data=data, headers=site) as response:
            assert response.status == 403, path
    assert rig.states()["d0"] == "ready"
    async with rig.session.get("/nodes", headers=site) as response:
        assert response.status == 200, "which changes nothing, and the site can't read it"
    async with rig.session.post("/nodes/d0/pause") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "header",
    [
        {"X-Forwarded-For": "203.0.113.7"},
        {"X-Real-IP": "203.0.113.7"},
        {"Forwarded": "for=203.0.113.7"},
        {"Via": "1.1 proxy"},
    ],
    ids=lambda header: next(iter(header)),
)
async def test_a_proxy_on_this_machine_makes_no_operators_of_its_clients(
    make_rig: Any, header: dict[str, str]
) -> None:
    rig = await make_rig()
    node = msgspec.json.encode(rig.nodes["d0"].info)
    for path in ("/nodes/d0/drain", "/drain", "/reset_prefix_cache", "/nodes"):
        data = node if path == "/nodes" else None
        async with rig.session.post(path, data=data, headers=header) as response:
            assert response.status == 403, path
    async with rig.session.get("/nodes", headers=header) as response:
        assert response.status == 403
    assert rig.states()["d0"] == "ready"
