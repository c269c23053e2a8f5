from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web

from kvbaton.engine.outputs import TokenSource
from kvbaton.server.app import make_app
from kvbaton.server.frontend import Frontend, FrontendConfig, ModelFacts
from kvbaton.text.tokenizer import Tokenizer
from tests.support.listening import listen
from tests.support.scripted_source import MAX_MODEL_LEN, VOCAB, ScriptedSource, tokenizer

__all__ = ["tokenizer"]


class Endpoint:
    """A served endpoint: its source, its address and a session to it."""

    def __init__(
        self, source: ScriptedSource, frontend: Frontend, runner: web.AppRunner, port: int
    ) -> None:
        self.source = source
        self.frontend = frontend
        self.runner = runner
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.session = ClientSession(self.url)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(path, json=body, **kwargs) as response:
            return response.status, await response.json()


def make_frontend(source: TokenSource, tokenizer: Tokenizer, **config: Any) -> Frontend:
    return Frontend(
        source=source,
        tokenizer=tokenizer,
        config=FrontendConfig(model_name="tiny", **config),
        facts=lambda: ModelFacts(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB),
    )


Serve = Callable[..., Any]


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    """Starts endpoints on real sockets."""
    endpoints: list[Endpoint] = []

    async def start(
        text: str | None = "Hello wide world.", tokenizer: Tokenizer = tokenizer, **config: Any
    ) -> Endpoint:
        source = ScriptedSource(tokenizer, text)
        frontend = make_frontend(source, tokenizer, **config)
        runner, port = await listen(make_app(frontend), "127.0.0.1", 0, grace_s=1.0)
        endpoints.append(Endpoint(source, frontend, runner, port))
        return endpoints[-1]

    yield start
    for endpoint in endpoints:
        await endpoint.session.close()
        await endpoint.runner.cleanup()
    assert all(endpoint.source.running == 0 for endpoint in endpoints), "a stream was leaked"
