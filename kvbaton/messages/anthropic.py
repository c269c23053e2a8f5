"""Types of Anthropic's Messages API: requests, content blocks, answers, errors.

Names and shapes are those of Anthropic's API reference; fields marked *extension* are those of
chats (`messages.openai`). Unknown fields of a request are ignored, as for chats; ``cache_control``
is one of them, because prefixes are always cached.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from kvbaton.messages.openai import Refused

# --- content blocks ---


class TextBlock(Struct, tag_field="type", tag="text"):
    """A text."""

    text: str


class Base64Source(Struct, tag_field="type", tag="base64"):
    """An image, base64-encoded."""

    media_type: str
    data: str


class UrlSource(Struct, tag_field="type", tag="url"):
    """The URL of an image."""

    url: str


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | UrlSource


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning before the answer.

    Attributes:
        signature: For Anthropic's own servers; kvbaton's is empty, and none is required.
    """

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning that only Anthropic can read; it is left out of the prompt."""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool call.

    Attributes:
        id: Id of the call, which its result repeats.
        input: The arguments. If they are not a JSON object, for example of a call that was cut off,
            the field ``INVALID_JSON`` has the model's text, as Anthropic recommends.
    """

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """The result of a tool call.

    Attributes:
        tool_use_id: Id of the call.
        content: A text, or blocks of text and images.
    """

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None


Content = TextBlock | ThinkingBlock | ToolUseBlock
"""Content block of an answer."""

# --- requests ---


class UserMessage(Struct, tag_field="role", tag="user"):
    """A message of the user, with results of tool calls."""

    content: str | list[TextBlock | ImageBlock | ToolResultBlock]


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    """A message of the model; the last one may be the beginning of its answer."""

    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


class SystemMessage(Struct, tag_field="role", tag="system"):
    """An instruction; after the first message, models get it as part of the user's message."""

    content: str | list[TextBlock]


class CustomTool(Struct):
    """A tool that the client runs; tools that Anthropic defines or runs are refused."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class ToolChoice(Struct):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    """Whether the model reasons, if its chat template has such a switch; budgets are ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputConfig(Struct):
    """Field ``output_config``: effort for the chat template, ``json_schema`` for the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class RequestMetadata(Struct):
    """Field ``metadata``."""

    user_id: str | None = None


class CountTokensRequest(Struct, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``.

    Attributes:
        output_format: The older name of ``output_config.format``.
        chat_template_kwargs: Extension.
    """

    model: str
    messages: list[UserMessage | AssistantMessage | SystemMessage]
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Refused = None
    mcp_servers: Refused = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of ``POST /v1/messages``.

    Attributes:
        priority: Extension, as all fields below it.
    """

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: RequestMetadata | None = None

    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    kv_transfer_params: dict[str, Any] | None = None


# --- answers ---


class MessagesUsage(Struct, kw_only=True):
    """Numbers of tokens; the prompt has `input_tokens` plus `cache_read_input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessagesResponse(Struct, kw_only=True):
    """Answer of ``/v1/messages``; in the event ``message_start`` it has no content yet.

    Attributes:
        stop_sequence: The stop sequence that ended the text; null without one.
        kv_transfer_params: Extension.
    """

    id: str
    model: str
    usage: MessagesUsage
    content: list[Content] = []
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class CountTokensResponse(Struct):
    """Answer of ``/v1/messages/count_tokens``."""

    input_tokens: int


class MessagesErrorInfo(Struct, kw_only=True):
    """Description of an error."""

    type: str
    message: str


class MessagesError(Struct, kw_only=True):
    """Body of every error answer, and of an error event in a stream."""

    error: MessagesErrorInfo
    request_id: str
    type: Literal["error"] = "error"
