"""``POST /v1/responses``: OpenAI's Responses API.

What the model writes is told in items and typed events. Nothing is stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET
from typing_extensions import override

from kvbaton.errors import RequestError
from kvbaton.messages import openai
from kvbaton.messages.responses import (
    ResponseFields,
    ResponseItem,
    ResponseObject,
    ResponsePart,
    ResponsesRequest,
    ResponseUsage,
)
from kvbaton.server.answer import Event
from kvbaton.server.bodies import read_body
from kvbaton.server.content_blocks import (
    ContentBlock,
    ContentBlockFormatter,
    respond_in_blocks,
)
from kvbaton.server.openapi import contract
from kvbaton.server.responses_chat import called, functions, response_chat
from kvbaton.server.sse import named_event

KINDS = {
    "content": ("msg", "response.output_text", "text"),
    "reasoning": ("rs", "response.reasoning_text", "text"),
    "call": ("fc", "response.function_call_arguments", "arguments"),
}
"""What ids of items begin with; the common name of a block's events; the field of all its text."""


@contract(body=ResponsesRequest, answer=ResponseObject, streams=True)
async def responses(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, by OpenAI's Responses API."""
    asked = await read_body(request, ResponsesRequest)
    body, fields = response_chat(asked)
    formatter = partial(ResponsesFormatter, asked)
    return await respond_in_blocks(request, body, fields, "resp", formatter)


async def not_stored(request: web.Request) -> web.StreamResponse:
    """Answer that no response is stored."""
    problem = "no response is stored here: pass what was said before as input"
    raise RequestError(problem, param="response_id", status=404)


def repeated(asked: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """What an answer repeats of its request, encoded once."""
    told = {name: getattr(asked, name) for name in ResponseFields.__struct_fields__}
    told["parallel_tool_calls"] = asked.parallel_tool_calls is not False
    told |= {"tool_choice": asked.tool_choice or "auto", "tools": asked.tools or []}
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in told.items()}


class ResponsesFormatter(ContentBlockFormatter):
    """Formats events for ``/v1/responses``.

    Args:
        asked: the request.
        more: see `ContentBlockFormatter`.
    """

    def __init__(self, asked: ResponsesRequest, *more: Any) -> None:
        super().__init__(*more)
        self._functions = {
            called(tool.name, space): (tool.name, space) for tool, space, _ in functions(asked)
        }
        self._sequence = count()
        self.head |= {"created_at": int(time.time()), **repeated(asked)}

    @override
    def begin(self) -> Iterable[bytes]:
        begun = ResponseObject(**self.head, status="in_progress")
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=begun)

    @override
    def open(self, block: ContentBlock) -> Iterable[bytes]:
        item = self._item(block)
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._event("response.content_part.added", block, part=part(block))

    @override
    def grow(self, block: ContentBlock, text: str) -> bytes:
        return self._event(f"{KINDS[block.kind][1]}.delta", block, delta=text)

    @override
    def close(self, block: ContentBlock) -> Iterable[bytes]:
        _, kind, field = KINDS[block.kind]
        yield self._event(f"{kind}.done", block, **{field: block.text})
        if block.kind != "call":
            yield self._event("response.content_part.done", block, part=part(block))
        item = self._item(block)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    @override
    def end(self, new: Event) -> Iterable[bytes]:
        response = self.answer(new, self.counter.usage())
        yield self._event(f"response.{response.status}", response=response)

    @override
    def failed(self, request: web.Request, error: RequestError) -> bytes:
        told = {"code": error.code or "server_error", "message": error.message}
        response = ResponseObject(**self.head, status="failed", error=told)
        return self._event("response.failed", response=response)

    @override
    def answer(self, new: Event, usage: openai.TokenUsage) -> ResponseObject:
        cut = new.delta.finish_reason == "length"
        cached = usage.prompt_tokens_details.cached_tokens
        return ResponseObject(
            **self.head,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            output=[self._item(block) for block in self.blocks],
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details={"cached_tokens": cached, "cache_write_tokens": 0},
                output_tokens=usage.completion_tokens,
                output_tokens_details={"reasoning_tokens": self.reasoning_tokens},
                total_tokens=usage.total_tokens,
            ),
            kv_transfer_params=new.output.kv_transfer_params or UNSET,
        )

    def _item(self, block: ContentBlock) -> ResponseItem:
        item = ResponseItem(type="message", id=self._item_id(block), status=block.status)
        if block.kind == "call":
            item.type, item.call_id, item.arguments = "function_call", block.call_id, block.text
            name = block.function
            item.name, item.namespace = self._functions.get(name, (name, None))
            return item
        item.content = [part(block)] if block.status != "in_progress" else []
        if block.kind == "content":
            item.role = "assistant"
        else:
            item.type, item.summary = "reasoning", []
        return item

    def _item_id(self, block: ContentBlock) -> str:
        return f"{KINDS[block.kind][0]}_{self.head['id'].removeprefix('resp_')}_{block.index}"

    def _event(self, kind: str, block: ContentBlock | None = None, **fields: Any) -> bytes:
        """An event, perhaps about what is in a block."""
        where = {}
        if block is not None:
            where = {"item_id": self._item_id(block), "output_index": block.index}
            if block.kind != "call":
                where["content_index"] = 0
            if kind.startswith("response.output_text."):
                where["logprobs"] = []
        return named_event(kind, sequence_number=next(self._sequence), **where, **fields)


def part(block: ContentBlock) -> ResponsePart:
    """What a block holds, as the part of an item."""
    if block.kind == "reasoning":
        return ResponsePart(type="reasoning_text", text=block.text)
    return ResponsePart(type="output_text", text=block.text, annotations=[], logprobs=[])
