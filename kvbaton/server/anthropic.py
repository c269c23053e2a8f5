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
    ImageBlock,
    MessagesRequest,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from kvbaton.server.conversation import EFFORTS, Conversation, function, thinks

BILLING = "x-anthropic-billing-header:"
"""Of a line that Claude Code puts before its system prompt: it is for Anthropic's servers, and may
change from one request to the next, after which no prefix would be found again."""
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
    said = conversation(body)
    goes_on = said.last_role == "assistant"  # with the text that the client has begun
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
    """Messages as a chat's.

    Results of tools become messages of their own, before what the user says beside them. An
    instruction amid the conversation goes to what the user says: many chat templates refuse a
    later message of the system, or leave it out.
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
    """Content, which may be a text alone, as blocks."""
    return [TextBlock(content)] if isinstance(content, str) else content or []


def part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    """A block as a part of a chat's message."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(source, Base64Source):
        return {"type": "image_url", "image_url": f"data:{source.media_type};base64,{source.data}"}
    return {"type": "image_url", "image_url": source.url}


def answer(said: Conversation, held: Sequence[Struct], where: str) -> None:
    """Add what the assistant has said, thought and called."""
    said.say("assistant")
    for i, block in enumerate(held):
        if isinstance(block, TextBlock) and block.text:
            said.say("assistant", [(part(block), f"{where}[{i}]")])
        elif isinstance(block, ThinkingBlock):
            said.think(block.thinking)
        elif isinstance(block, ToolUseBlock):
            said.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


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
