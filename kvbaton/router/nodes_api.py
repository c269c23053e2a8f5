"""The nodes' own endpoint: ``/nodes``, and what an operator asks of a router."""

from __future__ import annotations

import functools
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct
from prometheus_client import generate_latest

from kvbaton.errors import RequestError
from kvbaton.messages.nodes import Members, NodeInfo
from kvbaton.router.loads import NodeLoads
from kvbaton.router.membership import Member, Membership
from kvbaton.router.nodes import Nodes
from kvbaton.router.page import render
from kvbaton.router.pairing import NodeLoad, encoder_pairs, pairs
from kvbaton.router.worker_nodes import WorkerNodes
from kvbaton.server.auth import from_loopback, require_operator
from kvbaton.server.body import json_response, read_body
from kvbaton.server.cluster_token import carries_token, registration_token
from kvbaton.server.config import FRONTEND
from kvbaton.server.metrics import exposition
from kvbaton.server.openapi import contract
from kvbaton.server.supervisor import WorkerLink

NODES = web.AppKey("nodes", Nodes)
MEMBERSHIP = web.AppKey("membership", Membership)
LOADS = web.AppKey("loads", NodeLoads)
TOKEN = web.AppKey("token", str)
"""Expected of who registers; empty without a cluster key."""
TRUSTED = web.AppKey("trusted", bool)
"""Whoever asks was let in by somebody else: a worker, who asks its supervisor."""


class NodeView(Struct, kw_only=True):
    """One node in the answer of ``GET /nodes``."""

    node_id: str
    generation: str
    role: str
    url: str
    state: str
    reason: str
    model: str
    control_address: str | None
    requests: int
    prompt_tokens: int
    item_rows: int


class NodesView(Struct, kw_only=True):
    """Answer of ``GET /nodes``.

    Attributes:
        nodes: all of them.
        pairs: (prefill node id, decode node id) that can hand over now.
        encoder_pairs: (encoder node id, other node id), too.
    """

    nodes: list[NodeView]
    pairs: list[tuple[str, str]]
    encoder_pairs: list[tuple[str, str]]


def routes() -> list[web.RouteDef]:
    """What a router answers beside the OpenAI endpoints."""
    return [
        web.get("/nodes", list_nodes),
        web.post("/nodes", register),
        web.delete("/nodes/{node_id:.+}", remove),
        web.post("/nodes/{node_id:.+}/drain", drain),
        web.post("/reset_prefix_cache", reset_prefix_cache),
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.get("/", page),
    ]


def worker_routes(link: WorkerLink) -> list[web.RouteDef]:
    """The same for a worker: it checks who asks, and passes on what its supervisor knows."""

    def passed_on(handler: Handler, guard: Callable[[web.Request], None]) -> Handler:
        @functools.wraps(handler)
        async def pass_on(request: web.Request) -> web.StreamResponse:
            guard(request)
            return await link.forward(request)

        return pass_on

    either, anybody = _require_member_or_operator, lambda request: None
    return [
        web.get("/nodes", passed_on(list_nodes, either)),
        web.post("/nodes", passed_on(register, require_member)),
        web.delete("/nodes/{node_id:.+}", passed_on(remove, either)),
        web.post("/nodes/{node_id:.+}/drain", passed_on(drain, either)),
        web.post("/reset_prefix_cache", passed_on(reset_prefix_cache, _require_operator)),
        web.get("/health", health),
        web.get("/metrics", passed_on(metrics, anybody)),
        web.get("/", passed_on(page, either)),
    ]


def app_keys(
    nodes: Nodes | WorkerNodes, loads: NodeLoads, cluster_key: str | None, app: web.Application
) -> None:
    """Give the handlers what they work on."""
    if isinstance(nodes, Nodes):
        app[NODES] = nodes
    app[MEMBERSHIP], app[LOADS] = nodes.membership, loads
    app[TOKEN] = registration_token(cluster_key) if cluster_key else ""


@contract(body=NodeInfo, answer=Members)
async def register(request: web.Request) -> web.Response:
    """``POST /nodes``: registration and heartbeat."""
    require_member(request)
    info = await read_body(request, NodeInfo)
    return json_response(request.app[NODES].register(info))


@contract(answer=NodesView)
async def list_nodes(request: web.Request) -> web.Response:
    """``GET /nodes``."""
    _require_member_or_operator(request)
    return json_response(view(request.app))


async def remove(request: web.Request) -> web.Response:
    """``DELETE /nodes/{id}``: forget a node; what it is serving goes on."""
    _require_member_or_operator(request)
    request.app[NODES].remove(request.match_info["node_id"])
    return json_response({"removed": request.match_info["node_id"]})


async def drain(request: web.Request) -> web.Response:
    """``POST /nodes/{id}/drain``: no new requests; answers how many still run there."""
    _require_member_or_operator(request)
    node_id = request.match_info["node_id"]
    request.app[NODES].drain(node_id)
    load = request.app[LOADS].get(node_id, NodeLoad())
    return json_response({"draining": node_id, "requests": load.sequences})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``: let all nodes forget cached prefixes; 503 if one does not."""
    _require_operator(request)
    errors = await request.app[NODES].reset_prefix_caches()
    done = {node_id: error is None for node_id, error in errors.items()}
    ok = bool(done) and all(done.values())
    answer = {
        "result": ok,
        "nodes": done,
        "errors": {node_id: error for node_id, error in errors.items() if error is not None},
    }
    return json_response(answer, status=200 if ok else 503)


async def health(request: web.Request) -> web.Response:
    """``GET /health``: 200 when a request could be served now."""
    ready = request.app[MEMBERSHIP].serving()
    if not ready:
        raise RequestError("no node is ready", status=503, code="no_node_ready")
    return json_response({"status": "ok", "ready": len(ready)})


@contract(content_type="text/plain")
async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics``."""
    return exposition(generate_latest(request.app[FRONTEND].metrics.registry))


@contract(content_type="text/html")
async def page(request: web.Request) -> web.Response:
    """``GET /``: the state of the cluster, for people."""
    _require_member_or_operator(request)
    rows = [_row(node) for node in view(request.app).nodes]
    body = render(request.app[FRONTEND].config.model_name, rows)
    return web.Response(text=body, content_type="text/html")


def view(app: web.Application) -> NodesView:
    """All nodes as they are now."""
    membership, loads = app[NODES].membership, app[LOADS]
    members = sorted(membership.members.values(), key=lambda m: (m.info.role, m.info.node_id))
    return NodesView(
        nodes=[_view(member, loads.get(member.info.node_id, NodeLoad())) for member in members],
        pairs=_ids(pairs(membership.ready())),
        encoder_pairs=_ids(encoder_pairs(membership.ready())),
    )


def _ids(found: list[tuple[Member, Member]]) -> list[tuple[str, str]]:
    return [(a.info.node_id, b.info.node_id) for a, b in found]


def _view(member: Member, load: NodeLoad) -> NodeView:
    info = member.info
    return NodeView(
        node_id=info.node_id,
        generation=info.generation,
        role=info.role,
        url=info.url,
        state=member.state,
        reason=member.reason,
        model=info.model,
        control_address=info.control_address,
        requests=load.sequences,
        prompt_tokens=load.prompt_tokens,
        item_rows=load.rows,
    )


def _row(node: NodeView) -> list[str]:
    state = f"{node.state} ({node.reason})" if node.reason else node.state
    loads = (node.requests, node.prompt_tokens, node.item_rows)
    return [node.node_id, node.role, state, node.url, *map(str, loads)]


def _has_token(request: web.Request) -> bool:
    token = request.app[TOKEN]
    return bool(token) and carries_token(request.headers.get("Authorization"), token)


def require_member(request: web.Request) -> None:
    """Only who holds the cluster key may register; without one, only this machine."""
    if request.app.get(TRUSTED):
        return
    if request.app[TOKEN]:
        if not _has_token(request):
            raise RequestError(
                "registration needs the token of this cluster; start the node with the same "
                "--cluster-key as the router",
                status=401,
                code="invalid_cluster_key",
            )
    elif not from_loopback(request):
        raise RequestError(
            "without a cluster key only nodes on the router's machine may register; start "
            "router and nodes with --cluster-key",
            status=403,
        )


def _require_member_or_operator(request: web.Request) -> None:
    if not _has_token(request):
        _require_operator(request)


def _require_operator(request: web.Request) -> None:
    if not request.app.get(TRUSTED):
        require_operator(request)
