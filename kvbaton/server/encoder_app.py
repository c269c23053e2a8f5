"""The HTTP face of an encoder node: items in, and nothing out but a sign that they are encoded."""

from __future__ import annotations

from functools import partial

import tokenizers
from aiohttp import web
from aiohttp.typedefs import Handler
from tokenizers.models import WordLevel

from kvbaton.engine.validate import INT32, Range, check_range
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import AddRequest, Item, SamplingParams
from kvbaton.messages.nodes import GenerateRequest, GenerateResponse
from kvbaton.server.app import make_app
from kvbaton.server.config import EdgeConfig, Frontend
from kvbaton.server.generate import respond
from kvbaton.server.metrics import HttpMetrics
from kvbaton.server.node import MakeApp
from kvbaton.server.node_app import attach_client, node_facts, node_routes
from kvbaton.server.node_client import NodeClient
from kvbaton.server.node_config import NodeConfig
from kvbaton.server.openapi import contract
from kvbaton.server.prompt_request import deadline, unique
from kvbaton.server.transfer_params import KvTransferParams, parse_transfer
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.text.vision import VisionText

VISION = web.AppKey("vision", VisionText)
ENCODE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
"""How a "prompt" of rows is sampled: there is nothing to sample."""


def encoder_face(config: NodeConfig) -> MakeApp:
    """See `node.Face`; an encoder node needs no tokenizer.

    Raises:
        ConfigError: the model takes no images.
    """
    vision = VisionText.load(config.engine.model)
    if vision is None:
        raise ConfigError("--model", f"{config.engine.model} takes no images: nothing to encode")
    return partial(make_encoder_app, vision=vision)


def make_encoder_app(
    client: NodeClient, edge: EdgeConfig, forward: Handler | None = None, *, vision: VisionText
) -> web.Application:
    """Everything that an encoder node answers.

    Args:
        client: its engine, already up.
        edge: settings of the endpoint.
        forward: see `make_node_app`.
        vision: checks what items say of themselves.
    """
    frontend = Frontend(
        source=client,
        tokenizer=Tokenizer(tokenizers.Tokenizer(WordLevel({}, unk_token=""))),  # no text here
        config=edge,
        facts=lambda: node_facts(client),
        transfer=parse_transfer,
        transfer_type=KvTransferParams,
        metrics=HttpMetrics(latencies=False),
    )
    routes = [web.post("/inference/v1/generate", encode), *node_routes(forward)]
    app = make_app(frontend, [*routes, web.route("*", "/v1/{path:.*}", no_text)], text=False)
    attach_client(app, client, forward)
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
    return await respond(request, partial(item_request, request.app[VISION]))


def item_request(
    vision: VisionText, frontend: Frontend, body: GenerateRequest, request_id: str
) -> AddRequest:
    """What the engine is asked.

    Raises:
        RequestError: it is no single item, or does not fit.
    """
    check_range("priority", body.priority, Range(-INT32, INT32))
    return AddRequest(
        request_id=unique(request_id),
        token_ids=body.token_ids,
        params=ENCODE,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        deadline_s=deadline(frontend, body.deadline_s, "deadline_s"),
        transfer=frontend.transfer(body.kv_transfer_params),
        items=(_only_item(vision, frontend, body),),
    )


def _only_item(vision: VisionText, frontend: Frontend, body: GenerateRequest) -> Item:
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
    return item
