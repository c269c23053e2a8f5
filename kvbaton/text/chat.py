"""Chat templates, rendered as `transformers` renders them, in jinja2's immutable sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from kvbaton.errors import ConfigError, RequestError

RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
    }
)
"""Template variables that `chat_template_kwargs` may not set."""

Message = dict[str, Any]
HERE = "CONTINUEFINALMESSAGEHERE"
"""Marker after the final message while it is rendered: the prompt is cut there."""


@dataclass(frozen=True)
class ImageUrl:
    """The URL of an image in a request, and the name of the field that has it."""

    url: str
    where: str


class Arguments(dict[str, Any]):
    """Arguments of a past call: a dict for templates, but its JSON text where they join texts.

    Args:
        values: The arguments.
        text: Their JSON as it was written.
    """

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    @override
    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class NoContent(str):
    """Content of a message that has only calls: ``none`` in a template's tests, rendered empty."""

    __slots__ = ()


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's part for training; serving renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Parse up to ``{% endgeneration %}``; the body becomes a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Template text for jinja2.
        special_tokens: Values of variables such as ``bos_token``.

    Attributes:
        source: Template text.

    Raises:
        ConfigError: It does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError("chat_template", f"does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Render the prompt of a conversation; special tokens are part of the text.

        Args:
            messages: Messages, normalized.
            tools: Tools for the template.
            add_generation_prompt: Whether the prompt ends with the beginning of an answer.
            continue_final_message: Whether the prompt ends with the text of the last message, which
                the answer continues; trailing blanks are removed if the template removes them.
            variables: Further variables of the template.

        Raises:
            RequestError: A variable is reserved, or the template does not take these messages.
        """
        variables = variables or {}
        if taken := sorted(RESERVED & variables.keys()):
            raise RequestError(f"{taken[0]!r} can't be set here", param="chat_template_kwargs")
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        if "developer" not in self.source:  # most templates drop or refuse unknown roles
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in messages
            ]
        context = {
            **self._special_tokens,
            **variables,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(context)
        except Exception as error:  # a template may raise anything for a client's messages
            raise RequestError(
                f"the model's chat template does not take these messages: {error}", param="messages"
            ) from error
        if not continue_final_message:
            return text
        begun, found, rest = text.rpartition(HERE)
        if not found:
            raise RequestError(
                "the model's chat template does not show the final message",
                param="continue_final_message",
            )
        return begun if rest.startswith(" ") else begun.rstrip()


def _marked(message: Message) -> Message:
    """Append `HERE` and a blank to a message's text; the blank shows whether trailing ones stay."""
    content = message.get("content")
    if isinstance(content, str):
        if not isinstance(content, NoContent):
            return {**message, "content": f"{content}{HERE} "}
    elif content and content[-1].get("type") == "text":
        last = {**content[-1], "text": f"{content[-1]['text']}{HERE} "}
        return {**message, "content": [*content[:-1], last]}
    raise RequestError(
        "the final message does not end with a text to continue", param="continue_final_message"
    )


def normalize_messages(
    messages: Sequence[Message], images: list[ImageUrl] | None = None
) -> list[Message]:
    """Check a conversation and bring it into the form that templates expect.

    Text parts are joined by newlines, unless there is an image among them; arguments of past tool
    calls are parsed from their JSON; a text that is no JSON object becomes the field
    ``INVALID_JSON`` of one.

    Args:
        messages: Messages of the client.
        images: The messages' images are appended to it, in order; None if the model takes none.

    Raises:
        RequestError: A message is wrong; the error names the message and the field.
    """
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    return [_normalize(message, f"messages[{i}]", images) for i, message in enumerate(messages)]


def _normalize(message: Message, where: str, images: list[ImageUrl] | None) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError("role must be a non-empty string", param=f"{where}.role")
    content = _content(message.get("content"), f"{where}.content", images)
    result = {**message, "content": content}
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = message.get("reasoning")
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise RequestError("tool_calls must be a list", param=f"{where}.tool_calls")
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    if calls:
        if content is None:
            result["content"] = NoContent()
        return result
    result.pop("tool_calls", None)  # templates only test whether this key is there
    if content is None:
        is_answer = role == "assistant" and "content" in message  # its reasoning may be left out
        if reasoning is None and calls is None and not is_answer:
            raise RequestError("content is missing", param=f"{where}.content")
        # An empty list of calls: the message was cut off before there was any text.
        result["content"] = "" if calls is None else NoContent()
    return result


def _content(
    content: Any, where: str, images: list[ImageUrl] | None
) -> str | list[dict[str, str]] | None:
    """Content as a text, or as a list of parts for templates if there are images."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("content must be a string or a list of parts", param=where)
    parts = [_part(part, f"{where}[{i}]", images) for i, part in enumerate(content)]
    if any(isinstance(part, ImageUrl) for part in parts):
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in parts
        ]
    return "\n".join(part for part in parts if isinstance(part, str))


def _part(part: Any, where: str, images: list[ImageUrl] | None) -> str | ImageUrl:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else part
    if kind == "image_url":
        if images is None:
            raise RequestError("this model takes text only, no images", param=where)
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str) or not url:
            raise RequestError("image_url needs a url", param=f"{where}.image_url")
        images.append(ImageUrl(url, f"{where}.image_url"))
        return images[-1]
    if kind not in ("text", "refusal"):
        raise RequestError(
            f"only parts of type text and image_url are supported, not {kind!r}", param=where
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise RequestError("text must be a string", param=f"{where}.text")
    return text


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError("a tool call needs a function", param=where)
    if not isinstance(function.get("name"), str):
        raise RequestError("name must be a string", param=f"{where}.function.name")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str | dict):
        raise RequestError("arguments must be JSON text", param=f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": _arguments(arguments)}}


def _arguments(given: str | dict[str, Any]) -> Arguments:
    if isinstance(given, str):
        try:
            parsed = json.loads(given)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            return Arguments(parsed, given)
        given = {"INVALID_JSON": given}  # as our own answers have it, if a call was cut off
    return Arguments(given, json.dumps(given, ensure_ascii=False))


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes for HTML, which would be wrong in a prompt.
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        # A lone surrogate, which a model's call may have, becomes its escape again.
        return text.encode(errors="backslashreplace").decode()

    environment.filters["tojson"] = tojson
    environment.tests["none"] = lambda value: value is None or isinstance(value, NoContent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
