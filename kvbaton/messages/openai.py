"""Types of the OpenAI HTTP API: requests, responses, chunks, errors.

Field names and shapes are those of OpenAI's API reference; fields marked *extension* have vLLM's
names. Unknown fields of a request are ignored, because clients send extra ones; known fields that
are not supported are refused in `server.validation`. Every field that a client may send as ``null``
is optional here; its default is filled in when the request is converted.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

# --- requests ---

Messages = Annotated[
    list[dict[str, Any]],
    Meta(
        description="as in OpenAI's API; content is a text, or a list of parts of type text and, "
        "for models that take images, image_url"
    ),
]


Refused = Annotated[Any, Meta(description="known and not supported: refused by name")]
"""Type of an unsupported field, which is declared so that it is refused and not ignored."""


class StreamOptions(Struct, kw_only=True):
    """Field ``stream_options`` of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """Fields of completions and chats.

    Attributes:
        top_k: Extension, as all fields below it. Number of candidates; 0 or -1 keeps all.
        stop_token_ids: Token ids that end the text.
        allowed_token_ids: Only these token ids are generated.
        bad_words: Texts that are not generated, each tokenized with and without a space before it.
        truncate_prompt_tokens: Number of tokens at the prompt's end to keep; -1 keeps as many as
            leave room for `max_tokens`.
        skip_special_tokens: Leave special tokens out of the text (default true).
        include_stop_str_in_output: Keep the stop string, or stop token, in the text.
        return_token_ids: Answer with prompt and output token ids, too.
        return_tokens_as_token_ids: Name tokens of log probabilities by id: ``token_id:5``.
        return_timings: Answer with timings (kvbaton's own); takes one prompt.
        timeout: Seconds after which the request is ended (kvbaton's own).
        response_format: Text, ``json_object`` or ``json_schema``, as in OpenAI's API.
        structured_outputs: See `text.structured.StructuredOutputs`.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_timings: bool | None = None
    echo: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    kv_transfer_params: dict[str, Any] | None = None

    response_format: Any = None
    structured_outputs: Any = None

    best_of: int | None = None
    use_beam_search: Refused = None
    suffix: Refused = None
    prompt_embeds: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    regex: Refused = None
    ebnf: Refused = None
    json_schema: Refused = None
    logits_processors: Refused = None
    thinking_token_budget: Refused = None
    repetition_detection: Refused = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


ToolMode = Literal["none", "auto", "required"]
"""Whether functions can't, may or must be called."""


class FunctionName(Struct):
    """Name of one of the request's tools."""

    name: str


class NamedFunction(Struct, tag_field="type", tag="function"):
    """A function; as ``tool_choice`` it must be called."""

    function: FunctionName


class AllowedTools(Struct):
    """Functions that may be called (``auto``), or of which one must be called (``required``)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1)]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools"):
    """Restricts calls to some of the request's tools; the model sees all of them."""

    allowed_tools: AllowedTools


class ChatRequest(SamplingFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``.

    Attributes:
        reasoning_effort: Variable of the model's chat template (gpt-oss: low, medium or high).
    """

    messages: Messages
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolMode | NamedFunction | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    modalities: list[str] | None = None
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    web_search_options: Refused = None


class TokenizeRequest(Struct, kw_only=True):
    """Body of ``POST /tokenize``: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


# --- responses ---


class PromptTokensDetails(Struct):
    """Part of `TokenUsage`: number of prompt tokens that came from a cache."""

    cached_tokens: int


class TokenUsage(Struct):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RequestTimings(Struct, kw_only=True):
    """Where the time of a request went, in milliseconds from its arrival.

    Attributes:
        total_ms: Time until now.
        first_token_ms: Time until the first token was written; null if there is none.
        second_token_ms: Time until the second token was written; null if there is none.
        first_token: Time by stage on the way to the first token; adds up to `first_token_ms`.
        second_token: Time by stage on the way to the second token; adds up to `second_token_ms`.
        reserve_ms: Time to reserve blocks at the node that decodes, parallel to other stages.
        nodes: Node ids by their part: ``source`` and ``target`` of a hand-over, ``alone``,
            ``encoder``.
    """

    total_ms: float
    first_token_ms: float | None
    second_token_ms: float | None
    first_token: dict[str, float]
    second_token: dict[str, float]
    reserve_ms: float | None
    nodes: dict[str, str]


class CompletionLogprobs(Struct):
    """Log probabilities in the format of ``/v1/completions``: four parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class AnswerFields(Struct, kw_only=True):
    """Fields of all answers and chunks.

    Attributes:
        kv_transfer_params: Extension.
        timings: Extension (kvbaton's own).
    """

    id: str
    created: int
    model: str
    usage: TokenUsage | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    timings: RequestTimings | UnsetType = UNSET


class ChoiceFields(Struct, kw_only=True):
    """Fields of all choices, whole or in a chunk."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(ChoiceFields, kw_only=True):
    """One choice of a completion, or of a chunk of one."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[int, Any] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(AnswerFields, kw_only=True):
    """Answer of ``/v1/completions``, or a chunk of it, which has the same shape."""

    choices: list[CompletionChoice]
    object: str = "text_completion"


class TopLogprobEntry(Struct):
    """One candidate token in the format of ``/v1/chat/completions``."""

    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(Struct):
    """The chosen token and the best candidates in the format of ``/v1/chat/completions``."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobEntry]


class ChatLogprobs(Struct):
    """Log probabilities of a chat choice."""

    content: list[LogprobEntry]


class FunctionCall(Struct, kw_only=True):
    """A function and its arguments, which are JSON if the model wrote JSON."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(Struct, kw_only=True):
    """A tool call of the assistant; in a chunk, the new part of it.

    Attributes:
        index: Index of the call in the message; only in chunks.
        id: Id that the call's result must name; only in the call's first chunk, as are its type and
            function name.
    """

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct, kw_only=True):
    """The assistant's message; in a chunk, the new part of it.

    Attributes:
        content: Text of the answer; null if there are only tool calls.
        reasoning_content: Reasoning before the answer (extension).
        reasoning: Equal to `reasoning_content`; vLLM's name since 0.11 (extension).
    """

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(ChoiceFields, kw_only=True):
    """One choice of a whole chat completion."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(AnswerFields, kw_only=True):
    """Answer of ``/v1/chat/completions``."""

    choices: list[ChatChoice]
    object: str = "chat.completion"
    prompt_logprobs: list[dict[int, Any] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(ChoiceFields, kw_only=True):
    """New part of one choice of a streamed chat completion."""

    delta: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatChunk(AnswerFields, kw_only=True):
    """One event of a streamed chat completion."""

    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    """One model of ``GET /v1/models``.

    Attributes:
        type: For Anthropic's SDK, as are `display_name` and `created_at`.
    """

    id: str
    created: int
    max_model_len: int
    display_name: str
    created_at: datetime
    object: str = "model"
    type: str = "model"
    owned_by: str = "kvbaton"


class ModelList(Struct, kw_only=True):
    """Answer of ``GET /v1/models``.

    Attributes:
        has_more: For Anthropic's SDK, which reads pages; so are `first_id` and `last_id`.
    """

    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False
    object: str = "list"


class TokenizeResponse(Struct, kw_only=True):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct, kw_only=True):
    """Answer of ``POST /detokenize``."""

    prompt: str


class ErrorInfo(Struct, kw_only=True):
    """Description of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, kw_only=True):
    """Body of every error answer, and of an error event in a stream."""

    error: ErrorInfo
