"""The HTTP application of nodes: the endpoint over their engine, and routes of nodes only."""

from __future__ import annotations

import asyncio
import logging
import time
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
    """Return a function that makes a node's application, for the node's role.

    Tokenizer and processor are read now, before the engine is up.

    Raises:
        ConfigError: The tokenizer or chat template can't be read, or the model of an encoder node
            takes no images.
    """
    role, model, vision = config.role, config.engine.model, None
    if role == "encode":
        tokenizer, vision = Tokenizer.of_nothing(), VisionText.load(model)
        if vision is None:
            raise ConfigError("--model", f"{model} takes no images: nothing to encode")
    else:
        tokenizer = Tokenizer.load(model, config.chat_template)
    return lambda client, edge, forward: make_node_app(
        client, tokenizer, edge, forward, role=role, encodes=vision
    )


CLIENT = web.AppKey("client", EngineClient)
EXPOSITION: web.AppKey[Callable[[], Awaitable[bytes]]] = web.AppKey("exposition")
"""Makes the text of ``/metrics``, in Prometheus' format."""

ALARMS = ("kvbaton_unhealthy", "kvbaton_ledger_imbalance")
"""Gauges that make a node unhealthy while they are not 0."""

SEQUENCES = tuple(f"kvbaton_sequences_{state}" for state in ("running", "waiting", "loading"))
"""Gauges that add up to the number of sequences in an engine."""

METRICS_PATIENCE_S = 1.0
"""Seconds that a scrape waits for the engine, which answers between two steps."""


def make_node_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: FrontendConfig,
    forward: Handler | None = None,
    *,
    role: NodeRole = "any",
    encodes: VisionText | None = None,
) -> web.Application:
    """Make the application of a node.

    Args:
        client: Client of the node's engine, already up.
        tokenizer: Tokenizer of the model.
        config: Settings of the endpoint.
        forward: In a worker, the handler that passes requests on to the supervisor.
        role: Role of the node.
        encodes: Checks the items that an encoder node encodes; None makes a node that serves texts
            and tokens.
    """

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
        transfer=transfer_parser(role),
        transfer_type=KvTransferParams,
        metrics=HttpMetrics(latencies=False),
    )
    tokens = web.post("/inference/v1/generate", generate if encodes is None else encode)
    app = make_app(frontend, [tokens, *node_routes(forward)], text=encodes is None)
    if encodes is not None:
        app[VISION] = encodes
        app.router.add_route("*", "/v1/{path:.*}", no_text)
    registry = frontend.metrics.registry
    if forward is None:
        registry.register(CoreCollector(lambda: client.metrics))

    async def own() -> bytes:
        return generate_latest(registry)

    app[CLIENT], app[EXPOSITION] = client, own
    return app


def transfer_parser(role: NodeRole) -> TransferParser:
    """`parse_transfer`; on prefill and decode nodes it logs the first request without parameters.

    Such a request is served by this node alone, as vLLM's nodes do.
    """
    if role not in ("prefill", "decode"):
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
    """Routes of nodes of every role, for operation and monitoring."""
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
    """Make the application of a node until its engine is up: 503, but 200 for ``/live``."""

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
    """Tell whether requests may be sent: 200, or 503 with the reason."""
    if request.app[CLIENT].draining:
        raise RequestError("the node is being drained", status=503, code="draining")
    return await live(request)


async def live(request: web.Request) -> web.Response:
    """Tell whether the process works: 200, or 503 with a reason that only a restart removes."""
    client = request.app[CLIENT]
    if client.dead is not None:
        reason = f"the engine is down: {client.dead}"
        raise RequestError(reason, status=503, code="unhealthy")
    if client.hangs:
        silent = time.monotonic() - client.heard_at
        reason = f"the engine has not been heard of for {silent:.0f} s"
        raise RequestError(reason, status=503, code="unhealthy")
    gauges = client.metrics.gauges.items()
    alarms = sorted(key for key, value in gauges if value and split_name(key)[0] in ALARMS)
    if alarms:
        raise RequestError(f"alarms: {', '.join(alarms)}", status=503, code="unhealthy")
    return json_response({"status": "ok"})


@contract(content_type="text/plain")
async def metrics(request: web.Request) -> web.Response:
    """Metrics for Prometheus: as of now, or the latest of an engine that does not answer."""
    await _refresh(request.app[CLIENT])
    return exposition(await request.app[EXPOSITION]())


async def load(request: web.Request) -> web.Response:
    """Number of sequences in the engine, from all frontends, by vLLM's name."""
    client = request.app[CLIENT]
    await _refresh(client)
    running = sum(client.metrics.gauges.get(name, 0) for name in SEQUENCES)
    return json_response({"server_load": int(running)})


async def _refresh(client: EngineClient) -> None:
    """Update the client's `metrics`, if the engine answers in time."""
    # `/health` reports an engine that does not answer for long; its latest numbers are still shown.
    with suppress(TimeoutError, EngineDeadError):
        async with asyncio.timeout(METRICS_PATIENCE_S):
            await client.command("metrics")


async def state(request: web.Request) -> web.Response:
    """Internal state of the engine, for debugging; for operators."""
    require_operator(request)
    dump: Any = await request.app[CLIENT].command("state")
    body = msgspec.json.format(msgspec.json.encode(dump), indent=1)
    return web.Response(body=body, content_type="application/json")


async def steps(request: web.Request) -> web.Response:
    """Where the time of the latest steps went; for operators."""
    require_operator(request)
    return json_response(await request.app[CLIENT].command("steps"))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Clear the prefix cache; for operators.

    With ``?reset_external=true`` (vLLM's name) also clear this model's objects in the store.
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
    """Profile the engine's process until `stop_profile`; for operators."""
    return await _profile(request, "start_profile")


async def stop_profile(request: web.Request) -> web.Response:
    """Stop profiling and write the profile into ``--profile-dir``; for operators."""
    return await _profile(request, "stop_profile")


async def _profile(request: web.Request, command: str) -> web.Response:
    require_operator(request)
    try:
        path = await request.app[CLIENT].command(command)
    except ValueError as refusal:
        raise RequestError(str(refusal), status=409, code="profile") from None
    return json_response({"profile": path})


# --- encoder nodes: an item in, and only a sign out that it is encoded ---

VISION = web.AppKey("vision", VisionText)
ENCODE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
"""Sampling parameters of a "prompt" of rows, for which nothing is sampled."""


async def no_text(request: web.Request) -> web.Response:
    """Answer that an encoder node does not serve this endpoint."""
    raise RequestError(
        "this is an encoder node: it encodes images for nodes that serve prompts, one per POST "
        "/inference/v1/generate; send prompts to the router, or to a prefill or decode node",
        status=404,
        code="encoder_node",
    )


@contract(body=GenerateRequest, answer=GenerateResponse, streams=True)
async def encode(request: web.Request) -> web.StreamResponse:
    """Encode one item, sent as a prompt of as many zeros as the item has (padded) rows.

    The answer says that the item is encoded; `kv_transfer_params` say where its rows are handed
    over to.
    """
    return await respond(request, partial(item_request, request.app[VISION]), "encoder")


def item_request(
    vision: VisionText, frontend: Frontend, body: GenerateRequest, request_id: str
) -> AddRequest:
    """Make the engine's request for an item.

    Raises:
        RequestError: The body does not have exactly one item, or the item is wrong or too large.
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
