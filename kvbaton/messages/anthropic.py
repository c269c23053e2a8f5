"""Anthropic's Messages API as types: requests, content blocks, answers, errors.

Names and shapes are those of Anthropic's API reference; fields marked *extension* are those of
chats (`messages.openai`). Unknown fields of a request are ignored, as there: ``cache_control`` is
one, since prefixes are cached anyway.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

# --- content blocks ---


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class Base64Source(Struct, tag_field="type", tag="base64"):
    """An image itself."""

    media_type: str
    data: str


class UrlSource(Struct, tag_field="type", tag="url"):
    """Where an image is."""

    url: str


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | UrlSource


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What came before the answer.

    Attributes:
        signature: for Anthropic's own servers; ours is empty, and none is asked for.
    """

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """The same, which only Anthropic can read; left out."""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool.

    Attributes:
        id: which its result repeats.
        input: the arguments; of a call that was cut off, or whose arguments are no object, what the
            model wrote as ``INVALID_JSON``, as Anthropic has such told.
    """

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """What a call came to.

    Attributes:
        content: a text, or blocks of text and images.
    """

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None


Content = TextBlock | ThinkingBlock | ToolUseBlock
"""Of an answer."""

# --- requests ---


class UserMessage(Struct, tag_field="role", tag="user"):
    """What the user says, and what calls came to."""

    content: str | list[TextBlock | ImageBlock | ToolResultBlock]


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    """What the model has said; the last message may be the beginning of its answer."""

    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


class SystemMessage(Struct, tag_field="role", tag="system"):
    """An instruction amid the conversation, which models get with what the user says."""

    content: str | list[TextBlock]


class CustomTool(Struct):
    """A tool that the client runs; those that Anthropic defines or runs are refused."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class ToolChoice(Struct):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    """Whether the model is to think, where its template asks; budgets are ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputConfig(Struct):
    """``output_config``: the effort for the template, and a ``json_schema`` for the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class RequestMetadata(Struct):
    """``metadata``."""

    user_id: str | None = None


class CountTokensRequest(Struct, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``.

    Attributes:
        chat_template_kwargs: extension.
    """

    model: str
    messages: list[UserMessage | AssistantMessage | SystemMessage]
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of ``POST /v1/messages``.

    Attributes:
        priority: extension, as all below it.
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
    """Tokens counted; those of the prompt are `input_tokens` and `cache_read_input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessagesResponse(Struct, kw_only=True):
    """Answer of ``/v1/messages``; in ``message_start`` still without content.

    Attributes:
        stop_sequence: which one ended the text.
        kv_transfer_params: extension.
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
    """What went wrong."""

    type: str
    message: str


class MessagesError(Struct, kw_only=True):
    """Body of every error answer, and of an error event in a stream."""

    error: MessagesErrorInfo
    request_id: str
    type: Literal["error"] = "error"
