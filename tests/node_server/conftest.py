from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession

from kvbaton.server.frontend import FrontendConfig
from kvbaton.server.node_app import make_node_app
from kvbaton.text.tokenizer import Tokenizer
from tests.support.listening import listen
from tests.support.scripted_source import ScriptedClient, tokenizer

__all__ = ["tokenizer"]


class Node:
    """A node's HTTP face on a real socket."""

    def __init__(self, client: ScriptedClient, session: ClientSession) -> None:
        self.client = client
        self.session = session

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def served(tokenizer: Tokenizer, answer: str) -> AsyncIterator[Node]:
    """A node that always answers the same."""
    client = ScriptedClient(tokenizer, answer)
    app = make_node_app(client, tokenizer, FrontendConfig(model_name="tiny"))
    runner, port = await listen(app, "127.0.0.1", 0, grace_s=1.0)
    async with ClientSession(f"http://127.0.0.1:{port}") as session:
        yield Node(client, session)
    await runner.cleanup()
    assert client.running == 0, "a stream was leaked"


@pytest.fixture
async def node(tokenizer: Tokenizer) -> AsyncIterator[Node]:
    async with served(tokenizer, "Hello wide world.") as node:
        yield node
