"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API.

What the model writes is told in Anthropic's content blocks and events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp import web
from msgspec import UNSET
from typing_extensions import override

from kvbaton.errors import RequestError
from kvbaton.messages import openai
from kvbaton.messages.anthropic import (
    Content,
    CountTokensRequest,
    CountTokensResponse,
    MessagesError,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from kvbaton.server.answer import Event
from kvbaton.server.anthropic import chat_request
from kvbaton.server.bodies import json_response, read_body
from kvbaton.server.chat import encode_chat
from kvbaton.server.content_blocks import ContentBlock, ContentBlockFormatter, respond_in_blocks
from kvbaton.server.conversation import arguments, renamed
from kvbaton.server.frontend import FRONTEND
from kvbaton.server.openapi import contract
from kvbaton.server.sse import named_event
from kvbaton.server.validation import check_model

PING = named_event("ping")
DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@contract(body=MessagesRequest, answer=MessagesResponse, streams=True, error=MessagesError)
async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, by Anthropic's Messages API."""
    body, names = chat_request(await read_body(request, MessagesRequest))
    return await respond_in_blocks(request, body, names, "msg", MessagesFormatter)


@contract(body=CountTokensRequest, answer=CountTokensResponse, error=MessagesError)
async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a conversation, by Anthropic's Messages API."""
    frontend = request.app[FRONTEND]
    body, names = chat_request(await read_body(request, CountTokensRequest))
    check_model(frontend, body.model)
    with renamed(names):
        ids, _ = await encode_chat(frontend, body)
    return json_response(CountTokensResponse(len(ids)))


class MessagesFormatter(ContentBlockFormatter):
    """Formats events for ``/v1/messages``."""

    SILENCE = PING

    @override
    def begin(self) -> Iterable[bytes]:
        begun = MessagesResponse(**self.head, usage=tokens_used(self.counter.usage()))
        return named_event("message_start", message=begun), PING

    @override
    def open(self, block: ContentBlock) -> Iterable[bytes]:
        shown = content(block)
        yield named_event("content_block_start", index=block.index, content_block=shown)

    @override
    def grow(self, block: ContentBlock, text: str) -> bytes:
        kind, field = DELTAS[block.kind]
        delta = {"type": kind, field: text}
        return named_event("content_block_delta", index=block.index, delta=delta)

    @override
    def close(self, block: ContentBlock) -> Iterable[bytes]:
        yield named_event("content_block_stop", index=block.index)

    @override
    def end(self, new: Event) -> Iterable[bytes]:
        usage = tokens_used(self.counter.usage())
        yield named_event("message_delta", delta=self._stop(new), usage=usage)
        yield named_event("message_stop")

    @override
    def failed(self, request: web.Request, error: RequestError) -> bytes:
        return b"event: error\n" + super().failed(request, error)

    @override
    def answer(self, new: Event, usage: openai.TokenUsage) -> MessagesResponse:
        return MessagesResponse(
            **self.head,
            **self._stop(new),
            usage=tokens_used(usage),
            content=[content(block) for block in self.blocks],
            kv_transfer_params=new.output.kv_transfer_params or UNSET,
        )

    def _stop(self, new: Event) -> dict[str, Any]:
        """Why the text has ended."""
        delta = new.delta
        if isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        reason = "max_tokens" if delta.finish_reason == "length" else "end_turn"
        if reason == "end_turn" and self.called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}


def content(block: ContentBlock) -> Content:
    """A block as Anthropic has it."""
    if block.kind == "content":
        return TextBlock(block.text)
    if block.kind == "reasoning":
        return ThinkingBlock(block.text)
    return ToolUseBlock(block.call_id, block.function, arguments(block.text))


def tokens_used(usage: openai.TokenUsage) -> MessagesUsage:
    """Tokens as Anthropic counts them: those from a cache are none of the input."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
    )
