"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API.

A request becomes a chat, which is served like any other; the answer has Anthropic's content blocks
and events. Source: Anthropic's API reference, version 2023-06-01.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from aiohttp import web
from msgspec import UNSET, Struct
from typing_extensions import override

from kvbaton.errors import RequestError
from kvbaton.messages import openai
from kvbaton.messages.anthropic import (
    AssistantMessage,
    Base64Source,
    Content,
    CountTokensRequest,
    CountTokensResponse,
    ImageBlock,
    MessagesError,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
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
from kvbaton.server.validation import check_refused, refused

PING = named_event("ping")
DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@contract(body=MessagesRequest, answer=MessagesResponse, streams=True, error=MessagesError)
async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, by Anthropic's Messages API."""
    body, names = await made_of_body(
        request, chat_request, await read_body(request, MessagesRequest)
    )
    return await respond_in_blocks(request, body, names, "msg", MessagesFormatter)


@contract(body=CountTokensRequest, answer=CountTokensResponse, error=MessagesError)
async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a conversation, by Anthropic's Messages API."""
    body, names = await made_of_body(
        request, chat_request, await read_body(request, CountTokensRequest)
    )
    return json_response(CountTokensResponse(await num_input_tokens(request, body, names)))


class MessagesFormatter(ContentBlockFormatter):
    """Formats events for ``/v1/messages``."""

    SILENCE = PING

    @override
    def begin(self) -> Iterable[bytes]:
        begun = MessagesResponse(**self.head, usage=self._usage())
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
        yield named_event("message_delta", delta=self._stop(new), usage=self._usage())
        yield named_event("message_stop")

    @override
    def failed(self, request: web.Request, error: RequestError) -> bytes:
        return b"event: error\n" + super().failed(request, error)

    @override
    def answer(self, new: Event) -> MessagesResponse:
        return MessagesResponse(
            **self.head,
            **self._stop(new),
            usage=self._usage(),
            content=[content(block) for block in self.blocks],
            kv_transfer_params=new.output.kv_transfer_params or UNSET,
        )

    def _stop(self, new: Event) -> dict[str, Any]:
        """Stop reason, in Anthropic's format."""
        delta = new.delta
        if isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        reason = "max_tokens" if delta.finish_reason == "length" else "end_turn"
        if reason == "end_turn" and self.called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> MessagesUsage:
        """Usage as Anthropic counts it: input tokens do not include cached ones."""
        usage = self.counter.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )


def content(block: ContentBlock) -> Content:
    """A content block in Anthropic's format."""
    if block.kind == "content":
        return TextBlock(block.text)
    if block.kind == "reasoning":
        return ThinkingBlock(block.text)
    return ToolUseBlock(block.call_id, block.function, arguments(block.text))


def arguments(text: str) -> dict[str, Any]:
    """Arguments of a call; text that is not a JSON object becomes the field ``INVALID_JSON``.

    Such text comes from a call that was cut off. Lone surrogates, which JSON may escape but no
    answer may contain, become question marks.
    """
    try:
        found = json.loads(text) if text else {}
        found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


# --- the request as a chat ---

BILLING = "x-anthropic-billing-header:"
"""Start of a line that Claude Code puts before its system prompt. The line is for Anthropic's
servers and may change with each request, which would make every prefix hit miss."""
CHOICES: dict[str, openai.ToolMode] = {"auto": "auto", "any": "required", "none": "none"}
COPIED = (
    "stream", "max_tokens", "temperature", "top_p", "top_k", "priority", "cache_salt", "timeout",
    "kv_transfer_params",
)  # fmt: skip
FIELDS = {
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.type": "output_config.format.type",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""By field of a chat: the client's name of it."""

UNSUPPORTED = refused(CountTokensRequest)

B = TypeVar("B")


def chat_request(body: CountTokensRequest) -> tuple[openai.ChatRequest, dict[str, str]]:
    """Turn a request into a chat.

    Returns:
        The chat, and by field of the chat the client's name of it.

    Raises:
        RequestError: A field is wrong; the error names it.
    """
    check_refused(body, UNSUPPORTED)
    if not body.messages:
        raise RequestError("must hold at least one message", param="messages")
    said = conversation(body)
    goes_on = said.last_role == "assistant"  # the answer continues the text that the client began
    tools = [function(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()]
    chat = openai.ChatRequest(
        model=body.model,
        messages=said.messages(),
        tools=tools or None,
        continue_final_message=goes_on,
        add_generation_prompt=not goes_on,
        **{name: getattr(body, name, None) for name in COPIED},
    )
    if body.tool_choice is not None:
        chat.tool_choice = tool_choice(body.tool_choice)
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    if (config := body.output_config) is not None:
        chat.reasoning_effort = EFFORTS.get(config.effort or "", config.effort)
        if (form := config.format) is not None:
            chat.response_format = {"type": form.get("type"), "json_schema": form}
    wanted = {} if body.thinking is None else thinks(body.thinking.type != "disabled")
    chat.chat_template_kwargs = {**wanted, **(body.chat_template_kwargs or {})}
    if isinstance(body, MessagesRequest):
        chat.stop = body.stop_sequences
        chat.user = None if body.metadata is None else body.metadata.user_id
    return chat, {**FIELDS, **said.fields}


def conversation(body: CountTokensRequest) -> Conversation:
    """Turn messages into those of a chat.

    Tool results become messages of their own, before the user's text beside them. A system message
    after the first becomes the user's, because many chat templates refuse or drop it.
    """
    said = Conversation()
    system = [block for block in blocks(body.system) if not block.text.startswith(BILLING)]
    if system:
        said.say("system", [(part(block), "system") for block in system])
    for i, message in enumerate(body.messages):
        if isinstance(message, AssistantMessage):
            answer(said, blocks(message.content), f"messages[{i}].content")
            continue
        held, shown = blocks(message.content), []
        for j, block in enumerate(held):
            where = f"messages[{i}].content[{j}]"
            if isinstance(block, ToolResultBlock):
                told = enumerate(blocks(block.content))
                inner = [(part(piece), f"{where}.content[{k}]") for k, piece in told]
                said.say("tool", inner, tool_call_id=block.tool_use_id)
            else:
                shown.append((part(block), where))
        if shown or not held:
            said.say("system" if i == 0 and isinstance(message, SystemMessage) else "user", shown)
    return said


def blocks(content: str | Sequence[B] | None) -> Sequence[B | TextBlock]:
    """Content as a list of blocks; a plain text is one block."""
    return [TextBlock(content)] if isinstance(content, str) else content or []


def part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    """Turn a block into a part of a chat's message."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(source, Base64Source):
        return {"type": "image_url", "image_url": f"data:{source.media_type};base64,{source.data}"}
    return {"type": "image_url", "image_url": source.url}


def answer(said: Conversation, held: Sequence[Struct], where: str) -> None:
    """Add the assistant's text, reasoning and tool calls."""
    said.say("assistant")
    for i, block in enumerate(held):
        if isinstance(block, TextBlock) and block.text:
            said.say("assistant", [(part(block), f"{where}[{i}]")])
        elif isinstance(block, ThinkingBlock):
            said.think(block.thinking)
        elif isinstance(block, ToolUseBlock):
            said.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


def tool_choice(given: ToolChoice) -> openai.ToolMode | openai.NamedFunction:
    """Turn a tool choice into that of a chat.

    Raises:
        RequestError: It has type ``tool`` and names no tool.
    """
    if given.type != "tool":
        return CHOICES[given.type]
    if given.name is None:
        raise RequestError("type tool needs the name of a tool", param="tool_choice.name")
    return openai.NamedFunction(openai.FunctionName(given.name))
