"""What is made of a body with very many messages leaves others their turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvbaton.server import chat, completions, messages, responses
from tests.support.waiting import PATIENCE_S

TALK = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 1000
CHOICES = {"choice": [f"word{i}" for i in range(5000)]}
MADE_OF = {
    "/v1/completions": (
        {"prompt": "x", "structured_outputs": CHOICES},
        [(completions, "wanted")],
    ),
    "/v1/chat/completions": ({"messages": TALK}, [(chat, "normalize_messages")]),
    "/v1/chat/completions?": (
        {"messages": TALK[:1], "max_tokens": 1, "structured_outputs": CHOICES},
        [(chat, "normalize_messages"), (chat, "wanted")],
    ),
    "/tokenize": ({"messages": TALK}, [(chat, "normalize_messages")]),
    "/v1/messages": (
        {"model": "tiny", "max_tokens": 1, "messages": TALK},
        [(messages, "conversation"), (chat, "normalize_messages")],
    ),
    "/v1/messages/count_tokens": (
        {"model": "tiny", "messages": TALK},
        [(messages, "conversation"), (chat, "normalize_messages")],
    ),
    **{
        path: (
            {"model": "tiny", "input": TALK},
            [(responses, "conversation"), (chat, "normalize_messages")],
        )
        for path in ("/v1/responses", "/v1/responses/input_tokens")
    },
}


@pytest.mark.parametrize("path", MADE_OF)
async def test_others_are_answered_meanwhile(
    serve: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, works = MADE_OF[path]
    begun, others = threading.Semaphore(0), threading.Semaphore(0)

    def after_others(work: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*args: Any) -> Any:
            begun.release()
            assert others.acquire(timeout=PATIENCE_S), "nobody else was answered"
            return work(*args)

        return waits

    for room, name in works:
        monkeypatch.setattr(room, name, after_others(getattr(room, name)))
    endpoint = await serve()
    asked = asyncio.create_task(endpoint.post(path, body))
    for _ in works:
        assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE_S)
        async with endpoint.session.get("/v1/models") as response:
            assert response.status == 200
        others.release()
    status, answer = await asked
    assert status == 200 or "context" in str(answer), answer
