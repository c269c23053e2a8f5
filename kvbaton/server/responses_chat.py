"""A request of OpenAI's Responses API as a chat, which is served as any other.

Source: OpenAI's API reference, and what its SDK and Codex send.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from kvbaton.errors import RequestError
from kvbaton.messages import openai
from kvbaton.messages.responses import (
    FunctionChoice,
    FunctionTool,
    ResponseItem,
    ResponsePart,
    ResponsesRequest,
)
from kvbaton.server.conversation import EFFORTS, Conversation, arguments, function, thinks
from kvbaton.server.validation import check_refused, refused

LOGPROBS = "message.output_text.logprobs"
NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
ALIKE = {*ResponsesRequest.__struct_fields__} & {*openai.ChatRequest.__struct_fields__}
"""Fields that chats have, too."""
FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema.schema": "text.format.schema",
}
"""What clients call the fields of a chat."""
UNSUPPORTED = refused(ResponsesRequest)


def response_chat(body: ResponsesRequest) -> tuple[openai.ChatRequest, dict[str, str]]:
    """A request as a chat, and what the client calls its fields.

    Raises:
        RequestError: naming the field that is wrong.
    """
    check_refused(body, UNSUPPORTED)
    if LOGPROBS in (body.include or ()):
        raise RequestError(f"{LOGPROBS} is not supported", param="include", code="unsupported")
    said, tools = conversation(body), list[dict[str, Any]]()
    fields = {**FIELDS, **said.fields}
    for tool, namespace, where in functions(body):
        fields[f"tools[{len(tools)}].function.parameters"] = f"{where}.parameters"
        name = called(tool.name, namespace)
        tools.append(function(name, tool.description, tool.parameters or {}))
    choice: Any = body.tool_choice
    if isinstance(choice, FunctionChoice):
        named = {"name": called(choice.name, choice.namespace)}
        choice = {"type": "function", "function": named}
    chat = openai.ChatRequest(
        messages=said.messages(),
        max_tokens=body.max_output_tokens,
        **{name: getattr(body, name) for name in ALIKE},
    )
    chat.tools, chat.tool_choice = tools, choice
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort == "none":
        chat.chat_template_kwargs = {**thinks(False), **(body.chat_template_kwargs or {})}
    chat.reasoning_effort = EFFORTS.get(effort or "", effort)
    if body.text is not None and (form := body.text.format) is not None:
        chat.response_format = {"type": form.get("type"), "json_schema": form}
    return chat, fields


def functions(body: ResponsesRequest) -> Iterator[tuple[FunctionTool, str | None, str]]:
    """Each function that a request has, the namespace it is in, and the field where it stands."""
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, FunctionTool):
            yield tool, None, f"tools[{i}]"
        else:
            for j, inner in enumerate(tool.tools):
                yield inner, tool.name, f"tools[{i}].tools[{j}]"


def called(name: str, namespace: str | None) -> str:
    """What the model calls a function."""
    return name if namespace is None else f"{namespace}__{name}"


def conversation(body: ResponsesRequest) -> Conversation:
    """The items of a request as a chat's messages.

    An instruction amid the conversation goes to what the user says: many chat templates refuse a
    later message of the system, or leave it out.

    Raises:
        RequestError: an item lacks what it needs.
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
    """Add what an item tells, which has what it needs."""
    call_id, written = item.call_id or "", item.arguments or ""
    if item.type == "function_call_output":
        said.say("tool", parts(item.output, f"{where}.output"), tool_call_id=call_id)
    elif item.type == "function_call":
        found = arguments(written)
        if found.get("INVALID_JSON") == written:  # as of a call that was cut off
            written = json.dumps(found, ensure_ascii=False)
        said.call(call_id, called(item.name or "", item.namespace), written)
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
    """Content as parts of a chat's message, each with the field where it stands.

    Raises:
        RequestError: one lacks what it holds.
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
