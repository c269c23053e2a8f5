"""The HTTP face of an encoder node, over a scripted engine."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from kvbaton.engine.config import EngineConfig
from kvbaton.errors import ConfigError
from kvbaton.server.config import NodeConfig
from kvbaton.server.frontend import FrontendConfig
from kvbaton.server.node_app import app_for_role, make_node_app
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.text.vision import VisionText
from tests.node_server.conftest import Node
from tests.support.listening import listen
from tests.support.scripted_source import MAX_MODEL_LEN, ScriptedClient

GENERATE = "/inference/v1/generate"
IMAGE = b"an image, which is decoded by the engine only"
SETTINGS = {"image_processor_type": "Qwen2VLImageProcessor"}
VISION = VisionText(7, SETTINGS)
ITEM = {
    "start": 0,
    "length": 40,
    "digest": b64encode(VISION.digest(IMAGE)).decode(),
    "grid": [1, 10, 16],
    "data": b64encode(IMAGE).decode(),
}
BODY = {
    "token_ids": [0] * 64,
    "items": [ITEM],
    "cache_salt": "s",
    "priority": 2,
    "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "ab" * 16, "attempt": 1},
}


@pytest.fixture
async def encoder(tokenizer: Tokenizer) -> AsyncIterator[Node]:
    client = ScriptedClient(tokenizer)
    config = FrontendConfig(model_name="tiny")
    app = make_node_app(client, Tokenizer.of_nothing(), config, role="encode", encodes=VISION)
    runner, port = await listen(app, "127.0.0.1", 0, grace_s=1.0)
    async with ClientSession(f"http://127.0.0.1:{port}") as session:
        yield Node(client, session)
    await runner.cleanup()


async def test_an_item_reaches_the_engine_as_a_prompt_of_its_own(encoder: Any) -> None:
    status, answer = await encoder.post(GENERATE, BODY)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "length"
    [request] = encoder.client.requests
    assert request.token_ids.tolist() == [0] * 64
    assert (request.params.temperature, request.params.max_tokens) == (0.0, 1)
    assert request.params.ignore_eos
    assert (request.cache_salt, request.priority) == ("s", 2)
    assert (request.transfer.role, request.transfer.attempt) == ("source", 1)
    assert (request.items[0].length, request.items[0].data) == (40, IMAGE)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"items": []}, "items"),
        ({"items": [ITEM, ITEM]}, "items"),
        ({"resume_token_ids": [1]}, "items"),
        ({"items": [ITEM | {"start": 1}]}, "items[0]"),
        ({"items": [ITEM | {"data": ""}]}, "items[0]"),
        ({"items": [ITEM | {"transfer": {"role": "target", "transfer_id": "AA=="}}]}, None),
        ({"items": [ITEM | {"digest": b64encode(bytes(32)).decode()}]}, "items[0]"),
        ({"items": [ITEM | {"grid": [1, 10, 18]}]}, "items[0]"),
        ({"token_ids": [0] * 40}, "token_ids"),
        ({"token_ids": [0] * 63 + [1]}, "token_ids"),
        ({"priority": 1 << 40}, "priority"),
        ({"items": [ITEM | {"length": MAX_MODEL_LEN}], "token_ids": [0] * 256}, "items[0].length"),
    ],
)
async def test_what_is_no_item_is_refused_by_name(
    encoder: Any, change: dict[str, Any], param: str | None
) -> None:
    status, answer = await encoder.post(GENERATE, BODY | change)
    assert status == 400
    assert param is None or answer["error"]["param"] == param
    assert encoder.client.requests == []


def test_a_model_without_images_has_nothing_to_encode(checkpoint: Callable[..., Path]) -> None:
    engine = EngineConfig(model=str(checkpoint()), encoder_only=True)
    with pytest.raises(ConfigError, match="takes no images"):
        app_for_role(NodeConfig(engine=engine, role="encode", node_id="e"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_prompts_are_told_where_to_go(encoder: Any, path: str) -> None:
    status, answer = await encoder.post(path, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (404, "encoder_node")
    assert "router" in answer["error"]["message"]


async def test_what_every_node_answers(encoder: Any) -> None:
    assert (await encoder.get("/health"))[0] == 200
    assert (await encoder.get("/version"))[1]["version"]
    assert (await encoder.get("/state"))[1] == {"asked": "state"}
    assert (await encoder.session.get("/metrics")).status == 200
    described = (await encoder.get("/openapi.json"))[1]["paths"]
    assert GENERATE in described
    assert "/v1/completions" not in described
