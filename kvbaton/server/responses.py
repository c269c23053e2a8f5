"""``POST /v1/responses`` and ``/v1/responses/input_tokens``: OpenAI's Responses API.

A request becomes a chat, which is served like any other; the answer has items and typed events.
Nothing is stored. Source: OpenAI's API reference, and what its SDK and Codex send.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    AllowedFunctions,
    FunctionChoice,
    FunctionTool,
    InputTokens,
    ResponseFields,
    ResponseItem,
    ResponseObject,
    ResponsePart,
    ResponsesRequest,
    ResponseUsage,
)
from kvbaton.server.answer import Event
from kvbaton.server.bodies import json_response, made_of_body, read_body
from kvbaton.server.conversation import (
    EFFORTS,
    ContentBlock,
    ContentBlockFormatter,
    Conversation,
    function,
    num_input_tokens,
    respond_in_blocks,
    thinks,
)
from kvbaton.server.openapi import contract
from kvbaton.server.sse import named_event
from kvbaton.server.validation import NOT_STORED, check_refused, refused

KINDS = {
    "content": ("msg", "response.output_text", "text"),
    "reasoning": ("rs", "response.reasoning_text", "text"),
    "call": ("fc", "response.function_call_arguments", "arguments"),
}
"""By kind of block: prefix of item ids, common name of its events, field with its whole text."""


@contract(body=ResponsesRequest, answer=ResponseObject, streams=True)
async def responses(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, by OpenAI's Responses API."""
    asked = await read_body(request, ResponsesRequest)
    body, fields = await made_of_body(request, response_chat, asked)
    formatter = partial(ResponsesFormatter, asked=asked)
    return await respond_in_blocks(request, body, fields, "resp", formatter)


@contract(body=ResponsesRequest, answer=InputTokens)
async def count_input_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a conversation, by OpenAI's Responses API."""
    asked = await read_body(request, ResponsesRequest)
    body, fields = await made_of_body(request, response_chat, asked)
    return json_response(InputTokens(input_tokens=await num_input_tokens(request, body, fields)))


async def not_stored(request: web.Request) -> web.StreamResponse:
    """Answer that no response is stored."""
    raise RequestError(NOT_STORED, param="response_id", status=404)


def repeated(asked: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """Fields of a request that the answer repeats, encoded once."""
    told = {name: getattr(asked, name) for name in ResponseFields.__struct_fields__}
    told["parallel_tool_calls"] = asked.parallel_tool_calls is not False
    told |= {"tool_choice": asked.tool_choice or "auto", "tools": asked.tools or []}
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in told.items()}


@dataclass(eq=False)
class ResponsesFormatter(ContentBlockFormatter):
    """Formats events for ``/v1/responses``.

    Attributes:
        asked: The request.
    """

    asked: ResponsesRequest

    def __post_init__(self) -> None:
        super().__post_init__()
        self._functions = {
            called(tool.name, space): (tool.name, space) for tool, space, _ in functions(self.asked)
        }
        self._sequence = count()
        self.head |= {"created_at": int(time.time()), **repeated(self.asked)}

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
        response = self.answer(new)
        yield self._event(f"response.{response.status}", response=response)

    @override
    def failed(self, request: web.Request, error: RequestError) -> bytes:
        ours = error.code if error.status != 500 else None  # OpenAI has a name for these
        told = {"code": ours or "server_error", "message": error.message}
        for block in self.blocks[-1:]:
            block.status = "incomplete"
        response = ResponseObject(
            **self.head, status="failed", error=told, output=[*map(self._item, self.blocks)]
        )
        return self._event("response.failed", response=response)

    @override
    def answer(self, new: Event) -> ResponseObject:
        cut, usage = new.delta.finish_reason == "length", self.counter.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return ResponseObject(
            **self.head,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            output=[*map(self._item, self.blocks)],
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
        """A server-sent event, with the position of a block if it is about one."""
        where = {}
        if block is not None:
            where = {"item_id": self._item_id(block), "output_index": block.index}
            if block.kind != "call":
                where["content_index"] = 0
            if kind.startswith("response.output_text."):
                where["logprobs"] = []
        return named_event(kind, sequence_number=next(self._sequence), **where, **fields)


def part(block: ContentBlock) -> ResponsePart:
    """The content of a block as a part of an item."""
    if block.kind == "reasoning":
        return ResponsePart(type="reasoning_text", text=block.text)
    return ResponsePart(type="output_text", text=block.text, annotations=[], logprobs=[])


# --- the request as a chat ---

LOGPROBS = "message.output_text.logprobs"
NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
ALIKE = {*ResponsesRequest.__struct_fields__} & {*openai.ChatRequest.__struct_fields__}
"""Fields that chats have, too, with the same meaning."""
FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema.schema": "text.format.schema",
}
"""By field of a chat: the client's name of it."""
UNSUPPORTED = refused(ResponsesRequest)


def response_chat(body: ResponsesRequest) -> tuple[openai.ChatRequest, dict[str, str]]:
    """Turn a request into a chat.

    Returns:
        The chat, and by field of the chat the client's name of it.

    Raises:
        RequestError: A field is wrong; the error names it.
    """
    check_refused(body, UNSUPPORTED)
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        field = "top_logprobs" if body.top_logprobs else "include"
        raise RequestError("no log probabilities here", param=field, code="unsupported")
    said, tools = conversation(body), list[dict[str, Any]]()
    fields = {**FIELDS, **said.fields}
    for tool, namespace, where in functions(body):
        fields[f"tools[{len(tools)}].function.parameters"] = f"{where}.parameters"
        name = called(tool.name, namespace)
        tools.append(function(name, tool.description, tool.parameters or {}))
    chat = openai.ChatRequest(
        messages=said.messages(),
        max_tokens=body.max_output_tokens,
        **{name: getattr(body, name) for name in ALIKE},
    )
    chat.tools, chat.tool_choice = tools, tool_choice(body.tool_choice)
    if isinstance(body.tool_choice, AllowedFunctions):
        for i in range(len(body.tool_choice.tools)):
            fields[f"tool_choice.allowed_tools.tools[{i}]"] = f"tool_choice.tools[{i}]"
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort == "none":
        chat.chat_template_kwargs = {**thinks(False), **(body.chat_template_kwargs or {})}
    chat.reasoning_effort = EFFORTS.get(effort or "", effort)
    if body.text is not None and (form := body.text.format) is not None:
        chat.response_format = {"type": form.get("type"), "json_schema": form}
    return chat, fields


def tool_choice(given: Any) -> Any:
    """Turn a tool choice into that of a chat."""
    if isinstance(given, AllowedFunctions):
        allowed = openai.AllowedTools(given.mode, [tool_choice(tool) for tool in given.tools])
        return openai.AllowedToolsChoice(allowed)
    if isinstance(given, FunctionChoice):
        return openai.NamedFunction(openai.FunctionName(called(given.name, given.namespace)))
    return given


def functions(body: ResponsesRequest) -> Iterator[tuple[FunctionTool, str | None, str]]:
    """Yield each function of a request, its namespace, and the name of the field that has it."""
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, FunctionTool):
            yield tool, None, f"tools[{i}]"
        else:
            for j, inner in enumerate(tool.tools):
                yield inner, tool.name, f"tools[{i}].tools[{j}]"


def called(name: str, namespace: str | None) -> str:
    """Name of a function for the model."""
    return name if namespace is None else f"{namespace}__{name}"


def conversation(body: ResponsesRequest) -> Conversation:
    """Turn the items of a request into messages of a chat.

    A system message after the first becomes the user's, because many chat templates refuse or drop
    it.

    Raises:
        RequestError: An item lacks a field that its type needs.
    """
    said = Conversation()
    if body.instructions is not None:
        said.say("system", parts(body.instructions, "instructions"))
    if isinstance(body.input, str):
        said.say("user", parts(body.input, "input"))
    elif not body.input:
        raise RequestError("must be a text, or hold at least one item", param="input")
    for i, item in enumerate(body.input if isinstance(body.input, list) else ()):
        where = f"input[{i}]"
        for name in NEEDED.get(item.type or "message", ()):
            if getattr(item, name) is None:
                raise RequestError(f"{item.type or 'message'} needs it", param=f"{where}.{name}")
        add_item(said, item, where)
    return said


def add_item(said: Conversation, item: ResponseItem, where: str) -> None:
    """Add an item that has all the fields that its type needs."""
    call_id = item.call_id or ""
    if item.type == "function_call_output":
        said.say("tool", parts(item.output, f"{where}.output"), tool_call_id=call_id)
    elif item.type == "function_call":
        said.call(call_id, called(item.name or "", item.namespace), item.arguments or "")
    elif item.type == "reasoning":
        field = "content" if item.content else "summary"
        for part, _ in parts(getattr(item, field), f"{where}.{field}"):
            said.think(part.get("text", ""))
    else:
        role = str(item.role)
        if role in ("system", "developer"):
            role = "system" if said.last_role in (None, "system") else "user"
        said.say(role, parts(item.content, f"{where}.content"))


def parts(
    content: str | Sequence[ResponsePart] | None, where: str
) -> list[tuple[dict[str, Any], str]]:
    """Turn content into parts of a chat's message, each with the name of the client's field.

    Raises:
        RequestError: A part lacks its content.
    """
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    found = []
    for i, part in enumerate(content or ()):
        field = {"input_image": "image_url", "refusal": "refusal"}.get(part.type, "text")
        held, kind = getattr(part, field), "image_url" if field == "image_url" else "text"
        if held is None:
            raise RequestError(f"{part.type} needs it", param=f"{where}[{i}].{field}")
        found.append(({"type": kind, kind: held}, f"{where}[{i}]"))
    return found
