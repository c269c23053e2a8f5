"""An app on a real socket in its own thread, fuzzed from its OpenAPI description."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import schemathesis
from hypothesis import given, settings
from schemathesis.checks import CheckFunction
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
]
OF_BOTH = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/version"),
    ("GET", "/health"),
    ("GET", "/live"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/load"),
    ("GET", "/metrics"),
]
"""Operations of both nodes and routers."""


class Background:
    """An event loop in a thread.

    Attributes:
        complaints: Exceptions that nothing else handled.
        url: URL of the app.
    """

    def __init__(self, start: Callable[[AsyncExitStack], Awaitable[str]]) -> None:
        self.complaints: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: self.complaints.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._stack = AsyncExitStack()
        self.url: str = self.wait(start(self._stack))

    def wait(self, work: Any) -> Any:
        """Run a coroutine on the loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        """End everything started, and the thread."""
        self.wait(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        assert self.complaints == [], "a task died unseen"

    def description(self) -> Any:
        """The OpenAPI description that the app serves."""
        return schemathesis.openapi.from_url(f"{self.url}/openapi.json")


def described(api: Any) -> set[tuple[str, str]]:
    """All operations of a description."""
    paths = api.raw_schema["paths"].items()
    return {(method.upper(), path) for path, operations in paths for method in operations}


def fuzz(api: Any, method: str, path: str, model: str, *, bodies: int = 30) -> None:
    """Send requests that match the description, and ones that don't; none may break the server.

    Args:
        api: The description.
        method: Of the operation.
        path: Of the operation.
        model: The served model's name.
        bodies: Number of requests to an operation that takes a body.
    """
    operation = api[path][method]
    requests = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    has_body = "requestBody" in operation.definition.raw
    if has_body:
        requests |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @settings(max_examples=bodies if has_body else 5, deadline=None, derandomize=True)
    @given(requests)
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = model  # any other model gives 404, whatever the rest is
        case.call_and_validate(checks=CHECKS, timeout=20)

    ask()
