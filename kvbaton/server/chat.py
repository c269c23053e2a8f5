"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from aiohttp import web
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from typing_extensions import override

from kvbaton.engine.validate import check_range
from kvbaton.errors import RequestError
from kvbaton.messages import openai
from kvbaton.messages.engine import Item
from kvbaton.server.answer import ChunkFormatter, Event, fold, respond
from kvbaton.server.auth import tenant
from kvbaton.server.bodies import made_of_body, read_body
from kvbaton.server.frontend import FRONTEND, Frontend
from kvbaton.server.images import load_images
from kvbaton.server.openapi import contract
from kvbaton.server.validation import (
    LIMITS,
    PromptRequest,
    check_common,
    encode,
    prompt_request,
    public_id,
    sampling_params,
    truncated,
)
from kvbaton.text.chat import ImageUrl, normalize_messages
from kvbaton.text.grammar_check import checked_grammar
from kvbaton.text.harmony import HarmonyFormat
from kvbaton.text.logprobs import chat_logprobs, prompt_logprobs
from kvbaton.text.output_parser import OutputFormat, OutputParser
from kvbaton.text.structured import (
    Functions,
    OutputGrammar,
    forced_functions,
    loosened,
    wanted,
)

REASONING_EFFORTS = ("low", "medium", "high")
"""Efforts of models with OpenAI's harmony format; for other models the chat template decides."""


class OutputReader(NamedTuple):
    """How to read a model's text: makes a parser per choice, and an id per tool call."""

    parser: Callable[[], OutputParser]
    call_id: Callable[[], str]


@contract(body=openai.ChatRequest, answer=openai.ChatCompletion, streams=True)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, openai.ChatRequest)
    request_id = f"chatcmpl-{public_id(request, body)}"
    asked, reader = await chat_prompt(request, frontend, body, request_id)
    prompts = [asked.request.token_ids]
    formatter = (
        ChatFormatter(frontend, body, request_id, prompts)
        if reader is None
        else ParsedFormatter(frontend, body, request_id, prompts, reader)
    )
    return await respond(request, frontend, [asked], formatter)


async def chat_prompt(
    request: web.Request, frontend: Frontend, body: openai.ChatRequest, request_id: str
) -> tuple[PromptRequest, OutputReader | None]:
    """Turn a chat into a request to the source, and a reader of the model's text.

    Returns:
        The request, and the reader; None if the text needs no parsing.

    Raises:
        RequestError: A field is wrong; the error names it.
    """
    check_common(frontend, body)
    check_chat(frontend, body)
    prompt, items = await encode_chat(
        frontend, body, request, whole=body.truncate_prompt_tokens is not None
    )
    form, functions = frontend.output_format, callable_functions(frontend, body)
    given = body.max_completion_tokens
    max_tokens = body.max_tokens if given is None else given
    prompt = truncated(frontend, prompt, body.truncate_prompt_tokens, max_tokens, items)
    params = sampling_params(
        frontend,
        body,
        len(prompt),
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=await chat_grammar(request, frontend, body, prompt, functions),
    )
    who = tenant(request)
    asked = prompt_request(
        frontend, body, request_id, prompt, params, name="messages", tenant=who, items=items
    )
    if form is None or body.skip_special_tokens is False:  # the client wants the raw text
        return asked, None
    if not (form.reasons or form.always_read or functions is not None):
        return asked, None
    only = isinstance(body.tool_choice, openai.AllowedToolsChoice)
    reader = OutputReader(partial(form.parser, prompt, functions, only=only), form.call_id)
    return with_marks(asked, form, calls=functions is not None), reader


def callable_functions(frontend: Frontend, body: openai.ChatRequest) -> Functions | None:
    """The functions whose calls are parsed, as parameters by name; None if none are."""
    form, tools = frontend.output_format, body.tools
    if form is None or not form.calls or not tools or body.tool_choice == "none":
        return None
    functions = {}
    for i, tool in enumerate(tools):
        function = tool.get("function")
        function = function if isinstance(function, dict) else {}
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str):
            raise RequestError("a tool needs a function with a name", param=f"tools[{i}].function")
        if not isinstance(parameters, dict | None):
            raise RequestError(
                "must be a JSON schema, an object", param=f"tools[{i}].function.parameters"
            )
        functions[name] = parameters or {}
    choice, chosen = body.tool_choice, dict[str, openai.NamedFunction]()
    if isinstance(choice, openai.NamedFunction):
        chosen = {"tool_choice": choice}
    elif isinstance(choice, openai.AllowedToolsChoice):
        where, allowed = "tool_choice.allowed_tools.tools", choice.allowed_tools.tools
        chosen = {f"{where}[{i}]": named for i, named in enumerate(allowed)}
    for field, named in chosen.items():
        if (name := named.function.name) not in functions:
            raise RequestError(f"there is no function {name[:300]!r} in tools", param=field)
    names = [named.function.name for named in chosen.values()] or functions
    return {name: functions[name] for name in names}


def forces_calls(body: openai.ChatRequest) -> bool:
    """Whether the answer has to call a function."""
    choice = body.tool_choice
    if isinstance(choice, openai.AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice not in (None, "none", "auto")


async def chat_grammar(
    request: web.Request,
    frontend: Frontend,
    body: openai.ChatRequest,
    prompt: Sequence[int],
    functions: Functions | None,
) -> str:
    """The grammar of everything that the model writes; empty if the text is unconstrained.

    Args:
        request: The HTTP request that brought the body.
        frontend: The endpoint, for the model's output format.
        body: The request.
        prompt: Token ids of the prompt, which may have begun the reasoning.
        functions: Functions that may be called.

    Raises:
        RequestError: A field is wrong; the error names it.
    """
    asks = await made_of_body(request, wanted, body.response_format, body.structured_outputs)
    field, piece = asks or ("tools", None)
    form, forces = frontend.output_format, forces_calls(body)
    begins = not body.continue_final_message  # a new message may begin with reasoning
    named = isinstance(body.tool_choice, openai.NamedFunction)
    one = body.parallel_tool_calls is False or named

    def whole(calls: Functions | None) -> str:
        grammar, rules = OutputGrammar(), list[str]()
        if piece is not None and not forces:
            rule = grammar.part(piece)
            rules.append(form.answer_rule(rule) if form and begins else rule)
        if calls is not None:
            assert form is not None, "see callable_functions"
            rules.append(form.calls_rule(calls, grammar, one=one))
        before = form.reasoning_rule(prompt, grammar) if form and begins else ""
        return grammar.whole(f"{before} ({' | '.join(rules)})")

    async def checked(calls: Functions | None) -> str:
        made = await made_of_body(request, whole, calls)
        return await checked_grammar(made, "tools" if forces else field)

    if forces:
        if field == "structured_outputs":
            raise RequestError("excludes a tool_choice that forces calls", param=field)
        assert functions is not None, "see check_chat"
        return await checked(await made_of_body(request, forced_functions, functions))
    if piece is None:
        return ""
    answer = await checked(None)
    if functions is not None and begins and field != "structured_outputs":
        try:
            wanted_calls = await made_of_body(request, forced_functions, functions)
        except RequestError:  # for names and schemas that no grammar can express
            return answer
        for calls in (wanted_calls, loosened(wanted_calls)):
            try:
                return await checked(calls)
            except RequestError as error:
                if error.status != HTTPStatus.BAD_REQUEST:
                    raise
    return answer


def with_marks(asked: PromptRequest, form: OutputFormat, *, calls: bool) -> PromptRequest:
    """Set the marks and stop tokens of a prompt whose text a parser reads.

    The text then ends where the model ends its turn.
    """
    params = asked.request.params
    if form.stops and not params.ignore_eos:
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *form.stops)))
        params = replace(params, stop_token_ids=stops)
    marks = form.marks(calls=calls)
    return replace(
        asked,
        request=replace(asked.request, params=params),
        options=replace(asked.options, marks=marks, message_mark=form.message_mark),
    )


def check_chat(frontend: Frontend, body: openai.ChatRequest) -> None:
    """Check the fields that only chats have.

    Raises:
        RequestError: A field has an unsupported value; the error names it.
    """
    if body.tools and body.tool_choice != "none":
        form = frontend.output_format
        if form is None or not form.calls or body.skip_special_tokens is False:
            raise RequestError(
                "calls of tools are not parsed here: how this model writes them is not known "
                "(--tool-call-parser names it), or skip_special_tokens is false; with tool_choice "
                '"none" the tools are shown to the model',
                param="tool_choice",
                code="unsupported",
            )
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise RequestError("tool_choice needs tools", param="tool_choice", code="unsupported")
    harmony = isinstance(frontend.output_format, HarmonyFormat)
    raw, effort = body.skip_special_tokens is False, body.reasoning_effort
    if harmony and not raw and effort not in (None, *REASONING_EFFORTS):
        raise RequestError(
            f"must be one of {', '.join(REASONING_EFFORTS)}", param="reasoning_effort"
        )
    if body.modalities not in (None, ["text"]):
        raise RequestError("only text is generated", param="modalities", code="unsupported")
    if body.echo:
        raise RequestError("echo is for /v1/completions", param="echo", code="unsupported")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    if body.max_completion_tokens is not None:
        check_range("max_completion_tokens", body.max_completion_tokens, LIMITS["max_tokens"])
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs, LIMITS["logprobs"])


async def encode_chat(
    frontend: Frontend,
    body: openai.ChatRequest | openai.TokenizeRequest,
    request: web.Request | None = None,
    *,
    whole: bool = True,
) -> tuple[list[int], tuple[Item, ...]]:
    """Token ids of a conversation, and its images; special tokens come from the template.

    Args:
        frontend: The endpoint, for tokenizer and template.
        body: The request with the messages.
        request: The HTTP request that brought it.
        whole: See `validation.encode`.

    Raises:
        RequestError: The model has no template, the messages do not fit it, or an image is wrong.
    """
    vision, special = frontend.tokenizer.vision, bool(body.add_special_tokens)
    text, images = await made_of_body(request, _rendered, frontend, body)
    ids = await encode(frontend, text, add_special_tokens=special, name="messages", whole=whole)
    if vision is None:
        return ids, ()
    return vision.expand(ids, await load_images(images, vision, frontend.config.media))


def _rendered(
    frontend: Frontend, body: openai.ChatRequest | openai.TokenizeRequest
) -> tuple[str, list[ImageUrl]]:
    """Text of a conversation, and its images."""
    template = frontend.tokenizer.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template: give one by --chat-template, or ask for completions",
            param="messages",
        )
    begins, goes_on = body.add_generation_prompt is not False, bool(body.continue_final_message)
    if begins and goes_on:
        raise RequestError(
            "a new message can't begin where the final one goes on: set add_generation_prompt to "
            "false",
            param="continue_final_message",
        )
    vision, images = frontend.tokenizer.vision, list[ImageUrl]()
    messages = normalize_messages(body.messages or [], None if vision is None else images)
    tools = body.tools or None
    if (form := frontend.output_format) is not None:
        messages, tools = form.messages(messages), form.tools(tools or []) or None
    effort = body.reasoning_effort if isinstance(body, openai.ChatRequest) else None
    text = template.render(
        messages,
        tools=tools,
        add_generation_prompt=begins,
        continue_final_message=goes_on,
        variables={
            **({} if effort is None else {"reasoning_effort": effort}),
            **(body.chat_template_kwargs or {}),
        },
    )
    return text if vision is None else vision.prepare(text), images


class ChatFormatter(ChunkFormatter[openai.ChatRequest]):
    """Formats events for ``/v1/chat/completions``; the first chunk of a choice names the role."""

    EMPTY_TEXT = b'"content":""'
    OPERATION = "chat"

    def chunk(
        self,
        new: Event | None,
        usage: openai.TokenUsage | UnsetType = UNSET,
        timings: openai.RequestTimings | UnsetType = UNSET,
    ) -> openai.ChatChunk:
        """Make a chunk; see `ChunkFormatter`."""
        if new is None:
            return openai.ChatChunk(**self.head, choices=[], usage=usage, timings=timings)
        delta, first = new.delta, new.first
        choice = openai.ChatChunkChoice(
            index=new.choice,
            delta=self.message(new),
            logprobs=self._logprobs(new),
            finish_reason=self.finish_reason(new),
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
            token_ids=self._ids(delta.token_ids),
        )
        return openai.ChatChunk(
            **self.head,
            choices=[choice],
            usage=usage,
            prompt_token_ids=self._ids(self.prompts[0]) if first else UNSET,
            kv_transfer_params=new.output.kv_transfer_params or UNSET,
        )

    def message(self, new: Event) -> openai.ChatMessage:
        """Part of the assistant's message that an event adds."""
        return openai.ChatMessage(role="assistant" if new.first else UNSET, content=new.delta.text)

    def finish_reason(self, new: Event) -> str | None:
        """Finish reason of an event, after `message` was called for it; None while it goes on."""
        return new.delta.finish_reason

    def whole(self, events: Sequence[Event]) -> openai.ChatCompletion:
        """Make the whole answer; see `ResponseFormatter`."""
        prompt, events = self.prompts[0], fold(events)
        outputs = [new.output for new in events]
        scores = (o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None)
        transfers = (o.kv_transfer_params for o in outputs if o.kv_transfer_params)
        choices = [
            openai.ChatChoice(
                index=new.choice,
                message=self.message(new),
                logprobs=self._logprobs(new),
                finish_reason=self.finish_reason(new),
                stop_reason=new.delta.stop_reason,
                token_ids=self._ids(new.delta.token_ids),
            )
            for new in events
        ]
        return openai.ChatCompletion(
            **self.head,
            choices=choices,
            usage=self.counter.usage(),
            prompt_logprobs=next(
                (prompt_logprobs(self.tokenizer, prompt, found) for found in scores), UNSET
            ),
            prompt_token_ids=self._ids(prompt),
            kv_transfer_params=next(transfers, UNSET),
            timings=self.times(),
        )

    def _ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return list(token_ids) if self.body.return_token_ids else UNSET

    def _logprobs(self, new: Event) -> openai.ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        ids, scores = new.delta.token_ids, new.delta.logprobs or ()
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(self.tokenizer, ids, scores, as_ids=as_ids)


@dataclass(eq=False)
class ParsedFormatter(ChatFormatter):
    """Formats events of a model with an output format: reasoning, calls and content apart."""

    reader: OutputReader

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_plain = False  # new text may be in any field of a chunk
        self._parsers = defaultdict[int, OutputParser](self.reader.parser)

    @override
    def message(self, new: Event) -> openai.ChatMessage:
        parser, streams = self._parsers[new.choice], bool(self.body.stream)
        texts: defaultdict[str, str] = defaultdict(str)
        calls: dict[int, openai.ToolCall] = {}
        for part in parser.push(new.delta.text, last=new.delta.finish_reason is not None):
            if part.kind != "call":
                texts[part.kind] += part.text
                continue
            if part.number and self.body.parallel_tool_calls is False:
                continue
            index = part.number if streams else UNSET
            call = calls.setdefault(
                part.number, openai.ToolCall(index=index, function=openai.FunctionCall())
            )
            if part.function is not None:
                call.id, call.type = self.reader.call_id(), "function"
                call.function.name = part.function
            call.function.arguments += part.text
        nothing = UNSET if streams else None if texts or calls else ""
        reasoning = texts.get("reasoning", UNSET)
        return openai.ChatMessage(
            role="assistant" if new.first else UNSET,
            content=texts.get("content", nothing),
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=list(calls.values()) or UNSET,
        )

    @override
    def finish_reason(self, new: Event) -> str | None:
        # As in OpenAI's API and vLLM: with a named function in `tool_choice` the reason is "stop".
        named = isinstance(self.body.tool_choice, openai.NamedFunction)
        ended = new.delta.finish_reason == "stop" and not named
        called = ended and self._parsers[new.choice].num_calls
        return "tool_calls" if called else new.delta.finish_reason
