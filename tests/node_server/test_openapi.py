"""The served OpenAPI description, and what hypothesis makes of it: requests right and wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbaton.server.frontend import FrontendConfig
from kvbaton.server.node_app import make_node_app
from kvbaton.text.tokenizer import Tokenizer
from tests.support.fuzzing import OF_BOTH, Background, described, fuzz
from tests.support.listening import listen
from tests.support.scripted_source import ScriptedClient


@pytest.fixture(scope="module")
def api(checkpoint: Callable[..., Path]) -> Iterator[Any]:
    """HTTP face of a node that takes images, over an engine that answers from a script."""
    tokenizer = Tokenizer.load(checkpoint(family="qwen2_5_vl"))
    client = ScriptedClient(tokenizer, "Hello wide world.")

    async def start(stack: AsyncExitStack) -> str:
        app = make_node_app(client, tokenizer, FrontendConfig(model_name="tiny"))
        runner, port = await listen(app, "127.0.0.1", 0, grace_s=1.0)
        stack.push_async_callback(runner.cleanup)
        return f"http://127.0.0.1:{port}"

    served = Background(start)
    yield served.description()
    served.close()
    assert client.running == 0, "a stream was leaked"


OPERATIONS = [
    *OF_BOTH,
    ("POST", "/inference/v1/generate"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("GET", "/state"),
    ("GET", "/debug/steps"),
]


def test_every_endpoint_is_described_and_tried(api: Any) -> None:
    assert described(api) == {*OPERATIONS, ("GET", "/openapi.json")}


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_input_breaks_a_node(api: Any, method: str, path: str) -> None:
    fuzz(api, method, path, "tiny")
