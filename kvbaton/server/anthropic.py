"""A request of Anthropic's Messages API as a chat, which is served as any other.

Source: Anthropic's API reference, version 2023-06-01.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from kvbaton.errors import RequestError
from kvbaton.messages import openai
from kvbaton.messages.anthropic import (
    Base64Source,
    CountTokensRequest,
    CustomTool,
    ImageBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from kvbaton.server.bodies import malformed

BLOCKS: dict[str, tuple[type[Struct], ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""What messages of each role may hold."""
BILLING = "x-anthropic-billing-header:"
"""Of a line that Claude Code puts before its system prompt: it is for Anthropic's servers, and is
another one in each request, so that no prefix would ever be found again."""
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
        tools=[tool(given, f"tools[{i}]") for i, given in enumerate(body.tools or ())] or None,
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

    Results of tools become messages of their own; their images follow with the user's.
    """
    said: list[dict[str, Any]] = []
    images: dict[str, str] = {}
    system = blocks(body.system or [], BLOCKS["system"], "system")
    if shown := [block for _, block in system if not block.text.startswith(BILLING)]:
        said.append(spoken("system", shown))
    for i, message in enumerate(body.messages):
        role, where = message.get("role"), f"messages[{i}]"
        if not isinstance(role, str) or role not in BLOCKS:
            raise RequestError(f"must be one of {', '.join(BLOCKS)}", param=f"{where}.role")
        held = blocks(message.get("content"), BLOCKS[role], f"{where}.content")
        if role != "user":
            said.append(spoken(role, [block for _, block in held]))
            continue
        shows: list[tuple[str, Any]] = []
        for place, block in held:
            if not isinstance(block, ToolResultBlock):
                shows.append((place, block))
                continue
            told = blocks(block.content or [], (TextBlock, ImageBlock), f"{place}.content")
            text = joined([block for _, block in told if isinstance(block, TextBlock)])
            said.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            shows += [at for at in told if isinstance(at[1], ImageBlock)]
        if shows or not held:
            parts = [part(block) for _, block in shows]
            for k, (place, _) in enumerate(shows):
                images[f"messages[{len(said)}].content[{k}].image_url"] = place
            said.append({"role": "user", "content": parts})
    return said, images


def blocks(content: Any, kinds: Sequence[type[Struct]], where: str) -> list[tuple[str, Any]]:
    """Content as blocks, each with the name of its field.

    Raises:
        RequestError: naming the block that is wrong, or of no such kind.
    """
    if isinstance(content, str):
        return [(where, TextBlock(content))]
    if not isinstance(content, list):
        raise RequestError("must be a text or a list of blocks", param=where)
    types = {kind.__struct_config__.tag: kind for kind in kinds}
    found = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        given = block.get("type") if isinstance(block, dict) else None
        if not isinstance(given, str) or given not in types:
            names = ", ".join(map(str, types))
            raise RequestError(f"must be one of {names}, not {given!r:.80}", param=f"{place}.type")
        found.append((place, converted(block, types[given], place)))
    return found


def converted(given: Any, kind: type[B], where: str) -> B:
    """A part of a body as a struct.

    Raises:
        RequestError: naming the field that is wrong.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise malformed(error, where) from error


def joined(texts: Sequence[TextBlock]) -> str:
    """Blocks of text as one, as those of chats are."""
    return "\n".join(block.text for block in texts)


def part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    """A block as a part of a chat's message."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(source, Base64Source):
        return {"type": "image_url", "image_url": f"data:{source.media_type};base64,{source.data}"}
    return {"type": "image_url", "image_url": source.url}


def spoken(role: str, held: Sequence[Any]) -> dict[str, Any]:
    """A message of the assistant or the system as a chat's: what it says, thinks and calls."""
    texts = [block for block in held if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in held if isinstance(block, ThinkingBlock)]
    message: dict[str, Any] = {"role": role, "content": joined(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in held if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.input, ensure_ascii=False),
                },
            }
            for call in calls
        ]
    return message


def tool(given: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool as a chat's.

    Raises:
        RequestError: it is wrong, or one of Anthropic's own.
    """
    if given.get("type") not in (None, "custom"):
        raise RequestError(
            f"only tools of type custom, with an input_schema, are supported, not "
            f"{given['type']!r:.80}",
            param=f"{where}.type",
            code="unsupported",
        )
    known = converted(given, CustomTool, where)
    function = {"name": known.name, "parameters": known.input_schema}
    if known.description is not None:
        function["description"] = known.description
    return {"type": "function", "function": function}


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
