"""The router's application: the OpenAI endpoints over the dispatcher, ``/nodes`` and its page."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct
from prometheus_client import generate_latest
from typing_extensions import override

from kvbaton.engine.outputs import OutputReceiver, TokenSource
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest
from kvbaton.messages.nodes import DrainProgress, Members, NodeInfo, NodesView
from kvbaton.router.chooser import Decision, RouteChooser
from kvbaton.router.config import RouterConfig
from kvbaton.router.dispatch import Dispatcher, RetryBudget
from kvbaton.router.loads import IDLE, NodeLoads, RouterTotals
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.nodes import KnownNodes, Nodes
from kvbaton.router.page import FEED, events, page
from kvbaton.router.policies import Policy
from kvbaton.router.route import no_node_ready
from kvbaton.server.app import make_app
from kvbaton.server.auth import from_loopback, has_password, operator_keys, require_operator
from kvbaton.server.bodies import REQUEST_ID, close_connection, flag_of, json_response, read_body
from kvbaton.server.frontend import FRONTEND, Frontend, FrontendConfig, ModelFacts
from kvbaton.server.metrics import HttpMetrics, exposition
from kvbaton.server.network import carries_token, registration_token
from kvbaton.server.openapi import contract
from kvbaton.server.supervisor import WorkerLink
from kvbaton.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RouterState:
    """State of the router's handlers.

    Attributes:
        nodes: All nodes; handlers of a worker use only their membership.
        loads: Their loads.
        totals: Returns the totals of what was done for clients.
        token: Token that registering nodes must present; empty without a cluster key.
        trusted: Whether requests were authorized already: a supervisor's come from its workers.
    """

    nodes: KnownNodes
    loads: NodeLoads
    totals: Callable[[], RouterTotals]
    token: str
    trusted: bool = False


ROUTER = web.AppKey("router", RouterState)
CHOOSER = web.AppKey("chooser", RouteChooser)
ROUTE_HEADER = "X-KVBaton-Route"
"""Sent with any value in a request, it is in the answer: the route of the request, and why."""


def router_app(
    config: RouterConfig,
    policy: Policy,
    nodes: KnownNodes,
    tokenizer: Tokenizer,
    edge: FrontendConfig,
    loads: NodeLoads,
    own_routes: list[web.RouteDef],
) -> web.Application:
    """The application with which a router, or one worker of it, answers clients.

    Args:
        config: Settings.
        policy: Chooses nodes.
        nodes: Nodes that serve.
        tokenizer: Tokenizer of their model.
        edge: Settings of the endpoint, with the model's name for clients and nodes.
        loads: Loads of the nodes.
        own_routes: Routes beside those of the OpenAI endpoints.
    """

    def facts() -> ModelFacts:
        ready = nodes.membership.ready()
        if not ready.serving:
            raise no_node_ready()
        vocab_size = ready.vocab_size or tokenizer.vocab_size
        return ModelFacts(max_model_len=ready.max_model_len, vocab_size=vocab_size)

    metrics = HttpMetrics()
    counted = RouterMetrics(metrics.registry)
    chooser = RouteChooser(nodes, loads, policy, counted)
    retries = RetryBudget(config.dispatch.retry_budget)
    dispatcher = Dispatcher(nodes, counted, loads, chooser, config.dispatch.timers, retries)
    frontend = Frontend(
        source=dispatcher, tokenizer=tokenizer, config=edge, facts=facts, metrics=metrics
    )
    app = make_app(frontend, own_routes)
    token = registration_token(config.cluster_key)
    app[ROUTER] = RouterState(nodes, loads, dispatcher.totals, token)
    app[CHOOSER] = chooser
    app.on_response_prepare.append(explain_route)
    app.on_response_prepare.append(close_if_draining)
    return app


async def explain_route(request: web.Request, response: web.StreamResponse) -> None:
    """Add the route's explanation to the answer if the client asks for it (``X-KVBaton-Route``)."""
    if ROUTE_HEADER in request.headers and REQUEST_ID in request:
        told = request.app[CHOOSER].explain(request[REQUEST_ID])
        if told is not None:
            response.headers[ROUTE_HEADER] = told


async def close_if_draining(request: web.Request, response: web.StreamResponse) -> None:
    """Close connections while draining, so that clients turn to another router."""
    if request.app[ROUTER].nodes.draining:
        await close_connection(request, response)


class RoutesView(Struct, kw_only=True):
    """Answer of ``GET /debug/routes``.

    Attributes:
        worker: Process id of the answering worker; each worker knows its own decisions only.
        output_tokens: Number of tokens that a request is expected to generate.
        blocks: Number of blocks in the prefix index, by node id.
        routes: The last decisions, newest first.
    """

    worker: int
    output_tokens: float
    blocks: dict[str, int]
    routes: list[Decision]


@contract(answer=RoutesView)
async def debug_routes(request: web.Request) -> web.Response:
    """``GET /debug/routes``: the last routing decisions, with predicted and observed times."""
    chooser, index = request.app[CHOOSER], request.app[ROUTER].nodes.index
    told = {} if index is None else index.nodes
    return json_response(
        RoutesView(
            worker=os.getpid(),
            output_tokens=chooser.policy.costs.output_tokens,
            blocks={node_id: blocks.num_blocks for node_id, blocks in told.items()},
            routes=list(reversed(chooser.decisions)),
        )
    )


@contract(body=NodeInfo, answer=Members)
async def register(request: web.Request) -> web.Response:
    """``POST /nodes``: registration and heartbeat of a node."""
    info = await read_body(request, NodeInfo)
    return json_response(_nodes(request).register(info))


@contract(answer=NodesView)
async def list_nodes(request: web.Request) -> web.Response:
    """``GET /nodes``: nodes, pairs that can hand over, and traffic."""
    return json_response(request.app[FEED].status.view())


async def remove(request: web.Request) -> web.Response:
    """``DELETE /nodes/{id}?generation=...``: forget a node; its running requests go on.

    A node that leaves names its generation: another one may have its id by now.
    """
    node_id = request.match_info["node_id"]
    _nodes(request).remove(node_id, request.query.get("generation"))
    return json_response({"removed": node_id})


async def drain(request: web.Request) -> web.Response:
    """``POST /nodes/{id}/drain``: stop new requests to a node; returns how many still run there.

    They move to other nodes with their KV, if one can fetch it, or end where they are.
    """
    node_id = request.match_info["node_id"]
    _nodes(request).drain(node_id)
    load = request.app[ROUTER].loads.get(node_id, IDLE)
    return json_response({"draining": node_id, "requests": load.sequences})


async def migrate(request: web.Request) -> web.Response:
    """``POST /nodes/{id}/migrate``: move a node's running requests away; returns how many.

    The node still gets new requests; pause it first to prevent that.
    """
    node_id = request.match_info["node_id"]
    _nodes(request).migrate(node_id)
    load = request.app[ROUTER].loads.get(node_id, IDLE)
    return json_response({"migrating": node_id, "requests": load.sequences})


async def pause(request: web.Request) -> web.Response:
    """``POST /nodes/{id}/pause``: stop new requests to a node until it is resumed."""
    node_id = request.match_info["node_id"]
    _nodes(request).pause(node_id, paused=True)
    return json_response({"paused": node_id})


async def resume(request: web.Request) -> web.Response:
    """``POST /nodes/{id}/resume``: undo a pause."""
    node_id = request.match_info["node_id"]
    _nodes(request).pause(node_id, paused=False)
    return json_response({"resumed": node_id})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``: empty the prefix caches of all nodes; 503 if one fails.

    With ``?reset_external=true`` it also empties their stores.
    """
    external = flag_of(request, "reset_external")
    errors = await _nodes(request).reset_prefix_caches(external=external)
    done = {node_id: error is None for node_id, error in errors.items()}
    ok = bool(done) and all(done.values())
    answer = {
        "result": ok,
        "nodes": done,
        "errors": {node_id: error for node_id, error in errors.items() if error is not None},
    }
    return json_response(answer, status=200 if ok else 503)


@contract(answer=DrainProgress)
async def drain_router(request: web.Request) -> web.Response:
    """``POST /drain``: report as unhealthy at ``/health``; returns whether requests still run."""
    nodes = _nodes(request)
    if not nodes.draining:
        logger.info("drained on request: not healthy until it is started again, but serves on")
    nodes.draining = True
    nodes.on_command()
    return json_response(DrainProgress(idle=not request.app[ROUTER].loads))


async def live(request: web.Request) -> web.Response:
    """``GET /live``: 200 while the router answers, whatever the state of its nodes."""
    return json_response({"status": "ok"})


async def health(request: web.Request) -> web.Response:
    """``GET /health``: 200 if requests can be served now and are to be sent here."""
    if request.app[ROUTER].nodes.draining:
        raise RequestError("this router is being drained", status=503, code="draining")
    ready = request.app[ROUTER].nodes.membership.ready().serving
    if not ready:
        raise no_node_ready()
    return json_response({"status": "ok", "ready": len(ready)})


async def load(request: web.Request) -> web.Response:
    """``GET /load``, as vLLM's: number of clients' requests that have not ended."""
    totals = request.app[ROUTER].totals()
    return json_response({"server_load": totals.waiting + totals.running})


@contract(content_type="text/plain")
async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics``: Prometheus metrics."""
    return exposition(generate_latest(request.app[FRONTEND].metrics.registry))


# --- without nodes ---


class NoNodes(TokenSource):
    """A token source without nodes, for applications without routes for text and tokens."""

    @override
    def submit(self, request: AddRequest, receiver: OutputReceiver) -> None:
        raise no_node_yet()

    @override
    def cancel(self, request_id: str) -> None: ...

    def facts(self) -> ModelFacts:
        """Not known yet."""
        raise no_node_yet()


def no_node_yet() -> RequestError:
    """Error for requests that come before the first node."""
    return RequestError("no node has registered yet; retry shortly", status=503, code="starting")


def app_without_text(edge: FrontendConfig, own_routes: list[web.RouteDef]) -> web.Application:
    """An application without routes for text and tokens."""
    nobody = NoNodes()
    nothing = Tokenizer.of_nothing()
    frontend = Frontend(source=nobody, tokenizer=nothing, config=edge, facts=nobody.facts)
    return make_app(frontend, own_routes, text=False)


# --- routes and their authorization ---


def routes(link: WorkerLink | None = None) -> list[web.RouteDef]:
    """A router's routes beside the OpenAI endpoints.

    Args:
        link: Link of a worker, which authorizes requests and forwards those that only its
            supervisor can answer.
    """

    def guarded(
        handler: Handler, guard: Callable[[web.Request], None], *, own: bool = False
    ) -> Handler:
        @functools.wraps(handler)
        async def answer(request: web.Request) -> web.StreamResponse:
            guard(request)
            return await (handler if own or link is None else link.forward)(request)

        return answer

    return [
        web.get("/nodes", guarded(list_nodes, _require_member_or_operator)),
        web.post("/nodes", guarded(register, _require_member)),
        web.delete("/nodes/{node_id:.+}", guarded(remove, _require_member_or_operator)),
        web.post("/nodes/{node_id:.+}/drain", guarded(drain, _require_member_or_operator)),
        web.post("/nodes/{node_id:.+}/migrate", guarded(migrate, _require_operator)),
        web.post("/nodes/{node_id:.+}/pause", guarded(pause, _require_operator)),
        web.post("/nodes/{node_id:.+}/resume", guarded(resume, _require_operator)),
        web.post("/drain", guarded(drain_router, _require_operator)),
        web.post("/reset_prefix_cache", guarded(reset_prefix_cache, _require_operator)),
        web.get("/debug/routes", guarded(debug_routes, _require_operator, own=True)),
        web.get("/health", health),
        web.get("/live", live),
        web.get("/ping", health),
        web.post("/ping", health),
        web.get("/load", guarded(load, _let_in)),
        web.get("/metrics", guarded(metrics, _let_in)),
        web.get("/", guarded(page, _require_reader)),
        web.get("/events", guarded(events, _require_reader)),
    ]


def _nodes(request: web.Request) -> Nodes:
    """All nodes, in handlers of processes that know them."""
    nodes = request.app[ROUTER].nodes
    assert isinstance(nodes, Nodes), "workers pass on what only their supervisor can answer"
    return nodes


def check_member(request: web.Request, token: str) -> None:
    """Let only holders of the cluster key register; without a key, only this machine.

    Raises:
        RequestError: 401 or 403.
    """
    if token and not carries_token(request.headers.get("Authorization"), token):
        raise RequestError(
            "registration needs the token of this cluster; start the node with the same "
            "--cluster-key as the router",
            status=401,
            code="invalid_cluster_key",
        )
    if not token and not from_loopback(request):
        raise RequestError(
            "without a cluster key only nodes on the router's machine may register; start "
            "router and nodes with --cluster-key",
            status=403,
        )


def _let_in(request: web.Request) -> None:
    """No authorization needed."""


def _require_member(request: web.Request) -> None:
    if not request.app[ROUTER].trusted:
        check_member(request, request.app[ROUTER].token)


def _require_member_or_operator(request: web.Request) -> None:
    token = request.app[ROUTER].token
    if not token or not carries_token(request.headers.get("Authorization"), token):
        _require_operator(request)


def _require_reader(request: web.Request) -> None:
    """As for an operator; a browser may send the key as a password.

    Only for these routes: browsers send a password again with any request that another site
    triggers, and these routes change nothing.
    """
    try:
        _require_member_or_operator(request)
    except RequestError:
        keys = operator_keys(request)
        if not keys or request.app[ROUTER].trusted:
            raise
        if not has_password(request, keys):
            raise RequestError(
                "only from loopback, or with an operator's API key as the password",
                status=401,
                code="password_required",
            ) from None


def _require_operator(request: web.Request) -> None:
    if not request.app[ROUTER].trusted:
        require_operator(request)
