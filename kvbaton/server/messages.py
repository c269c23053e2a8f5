"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API.

What the model writes is told in Anthropic's content blocks and events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
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
from kvbaton.server.answer import Event, ResponseFormatter, UsageCounter, respond
from kvbaton.server.anthropic import chat_request
from kvbaton.server.bodies import REQUEST_ID, json_response, read_body
from kvbaton.server.chat import OutputReader, chat_prompt, encode_chat
from kvbaton.server.frontend import FRONTEND, Frontend
from kvbaton.server.openapi import contract
from kvbaton.server.validation import check_model
from kvbaton.text.output_parser import MessagePart

DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@contract(body=MessagesRequest, answer=MessagesResponse, streams=True, error=MessagesError)
async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, by Anthropic's Messages API."""
    frontend = request.app[FRONTEND]
    body, names = chat_request(await read_body(request, MessagesRequest))
    request_id = f"msg_{request[REQUEST_ID]}"
    with renamed(names):
        asked, reader = await chat_prompt(request, frontend, body, request_id)
    prompts = [list(asked.request.token_ids)]
    formatter = MessagesFormatter(frontend, body, request_id, prompts, reader)
    return await respond(request, frontend, [asked], formatter)


@contract(body=CountTokensRequest, answer=CountTokensResponse, error=MessagesError)
async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a conversation, by Anthropic's Messages API."""
    frontend = request.app[FRONTEND]
    body, names = chat_request(await read_body(request, CountTokensRequest))
    check_model(frontend, body.model)
    with renamed(names):
        ids, _ = await encode_chat(frontend, body)
    return json_response(CountTokensResponse(len(ids)))


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a field of the chat name the client's instead."""
    try:
        yield
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise


class MessagesFormatter(ResponseFormatter):
    """Formats events for ``/v1/messages``.

    Args:
        frontend: for the model's name.
        body: the request, as a chat.
        request_id: of the answer.
        prompts: token ids of the only one.
        reader: tells reasoning and calls apart; None if all is text.
    """

    body: openai.ChatRequest
    OPERATION = "chat"

    def __init__(
        self,
        frontend: Frontend,
        body: openai.ChatRequest,
        request_id: str,
        prompts: Sequence[list[int]],
        reader: OutputReader | None,
    ) -> None:
        super().__init__(frontend, body, request_id, prompts)
        self._reader = reader
        self._parser = None if reader is None else reader.parser()
        self._counter = UsageCounter(prompts)
        self._open: tuple[str, int] | None = None
        self._index = -1

    @override
    def event(self, new: Event) -> bytes:
        self._counter.add(new)
        sent = []
        if new.first:
            begun = MessagesResponse(**self.head, usage=tokens_used(self._counter.usage()))
            sent += [named("message_start", message=begun), PING]
        for found in self._parts(new):
            if self._begins(found):
                if self._index > 0:
                    sent.append(named("content_block_stop", index=self._index - 1))
                block = self._block(found)
                sent.append(named("content_block_start", index=self._index, content_block=block))
            if found.text:
                kind, field = DELTAS[found.kind]
                delta = {"type": kind, field: found.text}
                sent.append(named("content_block_delta", index=self._index, delta=delta))
        if new.delta.finish_reason is not None:
            if self._open is not None:
                sent.append(named("content_block_stop", index=self._index))
            usage = tokens_used(self._counter.usage())
            sent += [named("message_delta", delta=self._stop(new), usage=usage), STOP]
        return b"".join(sent) or PING  # an event a token, as the streams of chats have it

    @override
    def whole(self, events: Sequence[Event], usage: openai.TokenUsage) -> MessagesResponse:
        (new,) = events
        content: list[Content] = []
        texts: list[str] = []
        for found in self._parts(new):
            if self._begins(found):
                content.append(self._block(found))
                texts.append("")
            texts[-1] += found.text
        for block, text in zip(content, texts, strict=True):
            if isinstance(block, TextBlock):
                block.text = text
            elif isinstance(block, ThinkingBlock):
                block.thinking = text
            else:
                block.input = arguments(text)
        return MessagesResponse(
            **self.head,
            **self._stop(new),
            usage=tokens_used(usage),
            content=content,
            kv_transfer_params=new.output.kv_transfer_params or UNSET,
        )

    def _parts(self, new: Event) -> list[MessagePart]:
        text, parallel = new.delta.text, self.body.parallel_tool_calls is not False
        if self._parser is None:
            return [MessagePart("content", text)] if text else []
        found = self._parser.push(text, last=new.delta.finish_reason is not None)
        return [part for part in found if parallel or part.kind != "call" or not part.number]

    def _begins(self, found: MessagePart) -> bool:
        """Whether a part begins a block, which is the open one then."""
        place = found.kind, found.number if found.kind == "call" else 0
        if place == self._open:
            return False
        self._open = place
        self._index += 1
        return True

    def _block(self, found: MessagePart) -> Content:
        """The block that a part begins, still empty."""
        if found.kind == "content":
            return TextBlock("")
        if found.kind == "reasoning":
            return ThinkingBlock("")
        assert self._reader is not None, "it has found the call"
        return ToolUseBlock(self._reader.call_id(), found.function or "", {})

    def _stop(self, new: Event) -> dict[str, Any]:
        """Why the text has ended."""
        delta = new.delta
        if isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        reason = "max_tokens" if delta.finish_reason == "length" else "end_turn"
        if reason == "end_turn" and self._parser is not None and self._parser.num_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}


def tokens_used(usage: openai.TokenUsage) -> MessagesUsage:
    """Tokens as Anthropic counts them: those from a cache are none of the input."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
    )


def arguments(text: str) -> dict[str, Any]:
    """Of a call; see `ToolUseBlock`."""
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


_encoder = msgspec.json.Encoder()


def named(kind: str, **fields: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encoder.encode({"type": kind, **fields}))


PING = named("ping")
STOP = named("message_stop")
