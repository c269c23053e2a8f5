"""What nodes answer over HTTP: the endpoint over their engine, and what is only a node's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec.structs import replace
from prometheus_client import generate_latest

from kvbaton.engine.client import EngineClient
from kvbaton.errors import ConfigError, EngineDeadError, RequestError
from kvbaton.messages.engine import AddRequest, PrefixAt, SamplingParams, TransferSpec
from kvbaton.messages.nodes import GenerateRequest, GenerateResponse
from kvbaton.server.app import make_app
from kvbaton.server.auth import require_operator
from kvbaton.server.bodies import close_connection, error_response, flag_of, json_response
from kvbaton.server.config import NodeConfig, NodeRole
from kvbaton.server.frontend import Frontend, FrontendConfig, ModelFacts, TransferParser
from kvbaton.server.generate import engine_request, generate, respond
from kvbaton.server.metrics import CoreCollector, HttpMetrics, exposition, split_name
from kvbaton.server.openapi import contract
from kvbaton.server.transfer_params import KvTransferParams, parse_transfer
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.text.vision import VisionText

logger = logging.getLogger(__name__)

MakeApp = Callable[[EngineClient, FrontendConfig, Handler | None], web.Application]


def app_for_role(config: NodeConfig) -> MakeApp:
    """What a node answers, by its role; what it needs of the model is read before the engine is up.

    Raises:
        ConfigError: the tokenizer or chat template can't be read, or an encoder node's model takes
            no images.
    """
    if config.role == "encode":  # it needs no tokenizer
        vision = VisionText.load(config.engine.model)
        if vision is None:
            problem = f"{config.engine.model} takes no images: nothing to encode"
            raise ConfigError("--model", problem)
        return partial(make_encoder_app, vision=vision)
    tokenizer = Tokenizer.load(config.engine.model, config.chat_template)
    return lambda client, edge, forward: make_node_app(
        client, tokenizer, edge, forward, role=config.role
    )


CLIENT = web.AppKey("client", EngineClient)
EXPOSITION: web.AppKey[Callable[[], Awaitable[bytes]]] = web.AppKey("exposition")
"""What ``/metrics`` shows, in Prometheus' text format."""

ALARMS = ("kvbaton_unhealthy", "kvbaton_ledger_imbalance")
"""Gauges that make a node unhealthy while they are not 0."""

SEQUENCES = tuple(f"kvbaton_sequences_{state}" for state in ("running", "waiting", "loading"))
"""Gauges of what an engine has to do."""

METRICS_PATIENCE_S = 1.0
"""A scrape waits this long for the engine, which answers between two steps."""


def make_node_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: FrontendConfig,
    forward: Handler | None = None,
    *,
    role: NodeRole = "any",
) -> web.Application:
    """Everything that a node answers.

    Args:
        client: its engine, already up.
        tokenizer: the model's.
        config: settings of the endpoint.
        forward: in a worker of a node, what passes requests on to the one that knows all of it.
        role: of the node.
    """
    routes = [web.post("/inference/v1/generate", generate)]
    return _engine_app(client, tokenizer, config, forward, transfer_parser(role), routes)


def _engine_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: FrontendConfig,
    forward: Handler | None,
    transfer: TransferParser,
    routes: list[web.RouteDef],
    *,
    text: bool = True,
) -> web.Application:
    """What nodes of all roles answer, and these routes."""

    def facts() -> ModelFacts:
        if client.dead is not None:
            raise EngineDeadError(client.dead)
        ready = client.ready
        return ModelFacts(max_model_len=ready.max_model_len, vocab_size=ready.vocab_size)

    frontend = Frontend(
        source=client,
        tokenizer=tokenizer,
        config=config,
        facts=facts,
        transfer=transfer,
        transfer_type=KvTransferParams,
        metrics=HttpMetrics(latencies=False),
    )
    app = make_app(frontend, [*routes, *node_routes(forward)], text=text)
    registry = frontend.metrics.registry
    if forward is None:
        registry.register(CoreCollector(lambda: client.metrics))

    async def own() -> bytes:
        return generate_latest(registry)

    app[CLIENT], app[EXPOSITION] = client, own
    return app


def transfer_parser(role: NodeRole) -> TransferParser:
    """`parse_transfer`; of a node that is to do one half only it logs the first who asks for both.

    Such a request is served alone, as vLLM's nodes do.
    """
    if role == "any":
        return parse_transfer
    is_told = False

    def parse(params: dict[str, Any] | None) -> tuple[TransferSpec | None, PrefixAt | None]:
        nonlocal is_told
        if not params and not is_told:
            is_told = True
            logger.warning(
                "a request without kv_transfer_params: this %s node serves it alone, as all that "
                "come like this; requests to the router are handed over",
                role,
            )
        return parse_transfer(params)

    return parse


def node_routes(forward: Handler | None = None) -> list[web.RouteDef]:
    """What nodes of every role answer, for those who run them."""
    return [
        web.get("/health", forward or health),
        web.get("/live", forward or live),
        web.get("/ping", forward or health),
        web.post("/ping", forward or health),
        web.get("/load", forward or load),
        web.get("/metrics", forward or metrics),
        web.get("/state", forward or state),
        web.get("/debug/steps", forward or steps),
        web.post("/reset_prefix_cache", forward or reset_prefix_cache),
        web.post("/start_profile", forward or start_profile),
        web.post("/stop_profile", forward or stop_profile),
        *([] if forward is None else [web.get("/node", forward), web.post("/drain", forward)]),
    ]


def make_starting_app() -> web.Application:
    """What a node answers until its engine is up: 503, with the reason, but it lives."""

    async def starting(request: web.Request) -> web.Response:
        error = RequestError("the engine is starting", status=503, code="starting")
        return error_response(request, error)

    async def lives(request: web.Request) -> web.Response:
        return json_response({"status": "starting"})

    app = web.Application()
    app.on_response_prepare.append(close_connection)
    app.router.add_get("/live", lives)
    app.router.add_route("*", "/{path:.*}", starting)
    return app


async def health(request: web.Request) -> web.Response:
    """``GET /health``: 200 if it may get requests, or 503 with the reason."""
    if request.app[CLIENT].draining:
        raise RequestError("the node is being drained", status=503, code="draining")
    return await live(request)


async def live(request: web.Request) -> web.Response:
    """``GET /live``: 200, or 503 with a reason that only a restart takes away."""
    client = request.app[CLIENT]
    if client.dead is not None:
        reason = f"the engine is down: {client.dead}"
        raise RequestError(reason, status=503, code="unhealthy")
    gauges = client.metrics.gauges.items()
    alarms = sorted(key for key, value in gauges if value and split_name(key)[0] in ALARMS)
    if alarms:
        raise RequestError(f"alarms: {', '.join(alarms)}", status=503, code="unhealthy")
    return json_response({"status": "ok"})


@contract(content_type="text/plain")
async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics``: as of now, or the latest report of an engine that does not answer."""
    await _refresh(request.app[CLIENT])
    return exposition(await request.app[EXPOSITION]())


async def load(request: web.Request) -> web.Response:
    """``GET /load``, as vLLM calls it: sequences that the engine has, whoever asked for them."""
    client = request.app[CLIENT]
    await _refresh(client)
    running = sum(client.metrics.gauges.get(name, 0) for name in SEQUENCES)
    return json_response({"server_load": int(running)})


async def _refresh(client: EngineClient) -> None:
    """Have `metrics` as of now, if the engine answers in time."""
    # What keeps the engine from answering is told by `/health`, and must not hide the numbers.
    with suppress(TimeoutError, EngineDeadError):
        async with asyncio.timeout(METRICS_PATIENCE_S):
            await client.command("metrics")


async def state(request: web.Request) -> web.Response:
    """``GET /state``: the debugging dump, for operators."""
    require_operator(request)
    dump: Any = await request.app[CLIENT].command("state")
    body = msgspec.json.format(msgspec.json.encode(dump), indent=1)
    return web.Response(body=body, content_type="application/json")


async def steps(request: web.Request) -> web.Response:
    """``GET /debug/steps``: where the time of the latest steps went, for operators."""
    require_operator(request)
    return json_response(await request.app[CLIENT].command("steps"))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``: forget cached prefixes, for operators.

    With ``?reset_external=true``, as vLLM calls it, also what the model's nodes keep in the store.
    """
    require_operator(request)
    client, external = request.app[CLIENT], flag_of(request, "reset_external")
    answer = {"result": await client.command("reset_prefix_cache")}
    if external:
        try:
            answer["store"] = await client.command("reset_store")
        except (TimeoutError, ValueError) as error:
            told = f"the store was not cleared: {str(error) or 'it does not answer'}"
            raise RequestError(told, status=503, code="store") from None
    return json_response(answer)


async def start_profile(request: web.Request) -> web.Response:
    """``POST /start_profile``: profile the engine's process until `stop_profile`, for operators."""
    return await _profile(request, "start_profile")


async def stop_profile(request: web.Request) -> web.Response:
    """``POST /stop_profile``: write the profile into ``--profile-dir``, for operators."""
    return await _profile(request, "stop_profile")


async def _profile(request: web.Request, command: str) -> web.Response:
    require_operator(request)
    try:
        path = await request.app[CLIENT].command(command)
    except ValueError as refusal:
        raise RequestError(str(refusal), status=409, code="profile") from None
    return json_response({"profile": path})


# --- encoder nodes: items in, and nothing out but a sign that they are encoded ---

VISION = web.AppKey("vision", VisionText)
ENCODE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
"""How a "prompt" of rows is sampled: there is nothing to sample."""


def make_encoder_app(
    client: EngineClient,
    edge: FrontendConfig,
    forward: Handler | None = None,
    *,
    vision: VisionText,
) -> web.Application:
    """Everything that an encoder node answers.

    Args:
        client: its engine, already up.
        edge: settings of the endpoint.
        forward: see `make_node_app`.
        vision: checks what items say of themselves.
    """
    routes = [web.post("/inference/v1/generate", encode), web.route("*", "/v1/{path:.*}", no_text)]
    nothing = Tokenizer.of_nothing()
    app = _engine_app(client, nothing, edge, forward, parse_transfer, routes, text=False)
    app[VISION] = vision
    return app


async def no_text(request: web.Request) -> web.Response:
    """The OpenAI endpoints: not here."""
    raise RequestError(
        "this is an encoder node: it encodes images for nodes that serve prompts, one per POST "
        "/inference/v1/generate; send prompts to the router, or to a prefill or decode node",
        status=404,
        code="encoder_node",
    )


@contract(body=GenerateRequest, answer=GenerateResponse, streams=True)
async def encode(request: web.Request) -> web.StreamResponse:
    """``POST /inference/v1/generate``: one item, as a prompt of as many zeros as it has rows.

    The answer says that it is encoded; the rows are handed over as `kv_transfer_params` say.
    """
    return await respond(request, partial(item_request, request.app[VISION]), "encoder")


def item_request(
    vision: VisionText, frontend: Frontend, body: GenerateRequest, request_id: str
) -> AddRequest:
    """What the engine is asked.

    Raises:
        RequestError: it is no single item, or does not fit.
    """
    if len(body.items) != 1 or body.resume_token_ids:
        raise RequestError(
            f"an encoder node takes one item per request and no text; this has {len(body.items)} "
            f"items and {len(body.resume_token_ids)} tokens to resume from",
            param="items",
            code="encoder_node",
        )
    (item,) = body.items
    if item.start or not item.data or item.transfer is not None:
        raise RequestError(
            "to be encoded, an item needs start 0 and data, and no transfer of its own",
            param="items[0]",
        )
    padded = item.padded_rows
    if len(body.token_ids) != padded or any(body.token_ids):
        raise RequestError(
            f"token_ids must be {padded} zeros for an item of {item.length} rows", param="token_ids"
        )
    limit = frontend.facts().max_model_len
    if padded >= limit:
        raise RequestError(
            f"an item of {item.length} rows does not fit into the encoder cache; raise "
            "--encoder-cache-tokens",
            param="items[0].length",
            code="item_too_large",
        )
    error = vision.mismatch(item)
    if error is not None:
        raise RequestError(error, param="items[0]")
    return replace(engine_request(frontend, body, request_id, ENCODE), prefix=None)
