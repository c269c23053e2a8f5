"""Types of OpenAI's Responses API: requests, items, answers.

Names and shapes are those of OpenAI's API reference; fields marked *extension* are those of chats
(`messages.openai`). Unknown fields of a request are ignored, as for chats.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from kvbaton.messages.openai import Refused, ToolMode

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Kind = Literal["message", "reasoning", "function_call", "function_call_output"]


class ResponsePart(Struct, kw_only=True, omit_defaults=True):
    """A part of an item.

    Attributes:
        image_url: URL of an image, which may be a ``data:`` URL.
        refusal: Text of a model that refused to answer.
        annotations: Always empty in kvbaton's answers.
    """

    type: Literal[
        "input_text", "input_image", "output_text", "reasoning_text", "summary_text", "refusal"
    ]
    text: str | None = None
    image_url: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponseItem(Struct, kw_only=True, omit_defaults=True):
    """A message, reasoning, a function call, or the result of a call.

    Attributes:
        type: Type of the item; without one it is a message.
        content: Content of a message or of reasoning.
        call_id: Id that a call and its result have in common.
        namespace: Namespace of the called function.
        arguments: Arguments of a call, in JSON.
        output: Result of a call.
    """

    type: Kind | None = None
    id: str | None = None
    status: Status | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ResponsePart] | None = None
    summary: list[ResponsePart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ResponsePart] | None = None


# --- requests ---


class FunctionTool(Struct, tag_field="type", tag="function"):
    """A tool that the client runs."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Struct, tag_field="type", tag="namespace"):
    """Tools with a common namespace."""

    name: str
    tools: list[FunctionTool]
    description: str | None = None


class FunctionChoice(Struct, tag_field="type", tag="function", omit_defaults=True):
    """A function; as ``tool_choice`` it must be called."""

    name: str
    namespace: str | None = None


class AllowedFunctions(Struct, tag_field="type", tag="allowed_tools"):
    """Restricts calls to some of the request's tools; the model sees all of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1)]


class TextConfig(Struct, kw_only=True):
    """Field ``text``: text, ``json_object`` or ``json_schema``; verbosity is ignored."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, kw_only=True):
    """Field ``reasoning``: the effort is for the chat template; no summary is made."""

    effort: str | None = None
    summary: str | None = None


class ResponseFields(Struct, kw_only=True):
    """Fields of a request that its answer repeats."""

    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningConfig | None = None
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: ToolMode | FunctionChoice | AllowedFunctions | None = "auto"
    tools: list[FunctionTool | NamespaceTool] | None = []
    top_p: float | None = None


class ResponsesRequest(ResponseFields, kw_only=True):
    """Body of ``POST /v1/responses``.

    Ignored fields include ``store``, because nothing is stored, and ``truncation``: a prompt that
    does not fit the model is refused.

    Attributes:
        top_k: Extension, as all fields between it and `previous_response_id`.
    """

    input: str | list[ResponseItem]
    model: str | None = None
    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    kv_transfer_params: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    previous_response_id: Refused = None
    conversation: Refused = None
    background: Refused = None
    prompt: Refused = None
    context_management: Refused = None


# --- answers ---


class ResponseUsage(Struct, kw_only=True):
    """Numbers of tokens; details are ``cached_tokens`` of input, ``reasoning_tokens`` of output."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class InputTokens(Struct, kw_only=True):
    """Answer of ``POST /v1/responses/input_tokens``."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseObject(ResponseFields, kw_only=True):
    """Answer of ``POST /v1/responses``; in the first events of a stream it has no output yet.

    Attributes:
        kv_transfer_params: Extension.
    """

    id: str
    created_at: int
    model: str
    status: Status
    completed_at: int | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    output: list[ResponseItem] = []
    usage: ResponseUsage | None = None
    object: Literal["response"] = "response"
    store: bool = False
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
