"""A request of Anthropic's Messages API as a chat, which is served as any other.

Source: Anthropic's API reference, version 2023-06-01.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import Struct

from kvbaton.errors import RequestError
from kvbaton.messages import openai
from kvbaton.messages.anthropic import (
    AssistantMessage,
    Base64Source,
    CountTokensRequest,
    CustomTool,
    ImageBlock,
    MessagesRequest,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)

BILLING = "x-anthropic-billing-header:"
"""Of a line that Claude Code puts before its system prompt: it is for Anthropic's servers, and may
change from one request to the next, after which no prefix would be found again."""
EFFORTS = {"xhigh": "high", "max": "high"}
"""Those that no chat template knows."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
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
"""What clients call the fields of a chat."""

B = TypeVar("B")


def chat_request(body: CountTokensRequest) -> tuple[openai.ChatRequest, dict[str, str]]:
    """A request as a chat, and what the client calls its fields.

    Raises:
        RequestError: naming the field that is wrong.
    """
    if not body.messages:
        raise RequestError("must hold at least one message", param="messages")
    said, images = conversation(body)
    goes_on = said[-1]["role"] == "assistant"  # with the text that the client has begun
    chat = openai.ChatRequest(
        model=body.model,
        messages=said,
        tools=[function(tool) for tool in body.tools or ()] or None,
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
    thinks = {}
    if body.thinking is not None:  # Qwen's templates ask for the one, DeepSeek's for the other
        thinks = dict.fromkeys(("enable_thinking", "thinking"), body.thinking.type != "disabled")
    chat.chat_template_kwargs = {**thinks, **(body.chat_template_kwargs or {})}
    if isinstance(body, MessagesRequest):
        chat.stop = body.stop_sequences
        chat.user = None if body.metadata is None else body.metadata.user_id
    return chat, {**FIELDS, **images}


def conversation(body: CountTokensRequest) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Messages of a chat, and what the client calls each image of theirs.

    Results of tools become messages of their own, before what the user says beside them. An
    instruction amid the conversation goes to what the user says: many chat templates refuse a
    later message of the system, or leave it out. What one says in a row is one message.
    """
    said: list[dict[str, Any]] = []
    images: dict[str, str] = {}

    def say(role: str, shown: Sequence[tuple[TextBlock | ImageBlock, str]], **more: str) -> None:
        if role == "tool" or not said or said[-1]["role"] != role:
            said.append({"role": role, "content": [], **more})
        content = said[-1]["content"]
        for block, where in shown:
            images[f"messages[{len(said) - 1}].content[{len(content)}].image_url"] = where
            content.append(part(block))

    system = [block for block in blocks(body.system) if not block.text.startswith(BILLING)]
    if system:
        say("system", [(block, "") for block in system])
    for i, message in enumerate(body.messages):
        if isinstance(message, AssistantMessage):
            said.append(assistant(blocks(message.content)))
            continue
        held, shown = blocks(message.content), []
        for j, block in enumerate(held):
            where = f"messages[{i}].content[{j}]"
            if isinstance(block, ToolResultBlock):
                told = enumerate(blocks(block.content))
                inner = [(piece, f"{where}.content[{k}]") for k, piece in told]
                say("tool", inner, tool_call_id=block.tool_use_id)
            else:
                shown.append((block, where))
        if shown or not held:
            say("system" if i == 0 and isinstance(message, SystemMessage) else "user", shown)
    return said, images


def blocks(content: str | Sequence[B] | None) -> Sequence[B | TextBlock]:
    """Content, which may be a text alone, as blocks."""
    return [TextBlock(content)] if isinstance(content, str) else content or []


def joined(held: Sequence[Struct]) -> str:
    """The blocks of text as one text, as those of chats are."""
    return "\n".join(block.text for block in held if isinstance(block, TextBlock))


def part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    """A block as a part of a chat's message."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(source, Base64Source):
        return {"type": "image_url", "image_url": f"data:{source.media_type};base64,{source.data}"}
    return {"type": "image_url", "image_url": source.url}


def assistant(held: Sequence[Struct]) -> dict[str, Any]:
    """What the assistant has said, thought and called, as a message of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": joined(held)}
    if thoughts := [block.thinking for block in held if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [call_of(block) for block in held if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None  # what templates take for no text at all
    return message


def call_of(block: ToolUseBlock) -> dict[str, Any]:
    """A past call as a chat's.

    Raises:
        RequestError: its input is nested as deep as can just be read.
    """
    try:
        written = json.dumps(block.input, ensure_ascii=False)
    except RecursionError as error:
        problem = f"the input of {block.id[:64]!r} is nested too deep"
        raise RequestError(problem, param="messages") from error
    function = {"name": block.name, "arguments": written}
    return {"id": block.id, "type": "function", "function": function}


def function(tool: CustomTool) -> dict[str, Any]:
    """A tool as a chat's."""
    described = {} if tool.description is None else {"description": tool.description}
    named = {"name": tool.name, **described, "parameters": tool.input_schema}
    return {"type": "function", "function": named}


def tool_choice(given: ToolChoice) -> str | dict[str, Any]:
    """A choice of tools as a chat's.

    Raises:
        RequestError: it names no tool.
    """
    if given.type != "tool":
        return CHOICES[given.type]
    if given.name is None:
        raise RequestError("type tool needs the name of a tool", param="tool_choice.name")
    return {"type": "function", "function": {"name": given.name}}
