"""The served OpenAPI description, and what hypothesis makes of it: requests right and wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis.checks import CheckFunction
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

from kvbaton.edge.app import listen
from kvbaton.edge.config import EdgeConfig
from kvbaton.serving.app import make_node_app
from kvbaton.text.tokenizer import Tokenizer
from tests.serving_support import ScriptedClient


class Background:
    """A node's HTTP face in a thread of its own, over an engine that answers from a script."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.client = ScriptedClient(tokenizer, "Hello wide world.")
        self.complaints: list[dict[str, Any]] = []
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: self.complaints.append(context))
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        app = make_node_app(self.client, tokenizer, EdgeConfig(model_name="tiny"))
        self.runner, port = self.wait(listen(app, "127.0.0.1", 0, grace_s=1.0))
        self.url = f"http://127.0.0.1:{port}"

    def wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self) -> None:
        self.wait(self.runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Background]:
    served = Background(tokenizer)
    yield served
    served.close()
    assert served.client.running == 0, "a stream was leaked"
    assert served.complaints == [], "a task died unseen"


@pytest.fixture(scope="module")
def api(served: Background) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/version"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/state"),
]


def test_every_endpoint_is_described_and_tried(api: Any) -> None:
    paths = api.raw_schema["paths"].items()
    described = {(method.upper(), path) for path, operations in paths for method in operations}
    assert described == {*OPERATIONS, ("GET", "/openapi.json")}


def requests_to(api: Any, method: str, path: str) -> st.SearchStrategy[Any]:
    """Requests that fit the description, and requests that do not."""
    operation = api[path][method]
    right: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if method == "GET" or path == "/reset_prefix_cache":
        return right
    wrong: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    return right | wrong


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_input_breaks_a_node(api: Any, method: str, path: str) -> None:
    @settings(max_examples=60 if method == "POST" else 5, deadline=None, derandomize=True)
    @given(requests_to(api, method, path))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # any other is a 404, whatever else the request says
        case.call_and_validate(checks=CHECKS, timeout=20)

    ask()
