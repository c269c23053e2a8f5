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
"""Stands behind the final message while it is rendered, where the prompt is to end."""


@dataclass(frozen=True)
class ImageUrl:
    """An image as a client names it, and the field where that stands."""

    url: str
    where: str


class Arguments(dict[str, Any]):
    """Arguments of a past call, an object for templates and a text where they join texts.

    Args:
        values: the object.
        text: its JSON as it was written.
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
    """Of a message that has calls only: None where a template asks, and nothing where it writes."""

    __slots__ = ()


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's part for training; serving renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Parse up to ``{% endgeneration %}`` and keep the body as a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: jinja2 text.
        special_tokens: variables such as ``bos_token``.

    Attributes:
        source: the same.

    Raises:
        ConfigError: it does not compile.
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
        """The prompt for a conversation; its special tokens are part of the text.

        Args:
            messages: normalized.
            tools: for the template.
            add_generation_prompt: let it end with what begins an answer.
            continue_final_message: let it end with the text of the last message, which the answer
                goes on with; blanks at the end of it go where the template takes them away.
            variables: more, for the template.

        Raises:
            RequestError: a variable is reserved, or the template does not take these messages.
        """
        variables = variables or {}
        if taken := sorted(RESERVED & variables.keys()):
            raise RequestError(f"{taken[0]!r} can't be set here", param="chat_template_kwargs")
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
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
        except Exception as error:  # a template may fail in any way on what a client sends
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
    """The message with `HERE` behind its text, and a blank by which to see whether any are cut."""
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
    """Check a conversation and bring it to the form that templates expect.

    Text parts are joined by newlines, unless there is an image among them; arguments of past tool
    calls are parsed from their JSON.

    Args:
        messages: of the client.
        images: takes those that the messages have, in order; None if the model can't see.

    Raises:
        RequestError: naming the message and the field that is wrong.
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
    result.pop("tool_calls", None)  # templates ask whether there are any by the name alone
    if content is None:
        is_answer = role == "assistant" and "content" in message  # its reasoning may be left out
        if reasoning is None and calls is None and not is_answer:
            raise RequestError("content is missing", param=f"{where}.content")
        # Without calls it was cut off before there was any.
        result["content"] = "" if calls is None else NoContent()
    return result


def _content(
    content: Any, where: str, images: list[ImageUrl] | None
) -> str | list[dict[str, str]] | None:
    """A text, or parts that templates know if there are images."""
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
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError) as error:
        raise RequestError("arguments must be JSON", param=f"{where}.function.arguments") from error
    if isinstance(parsed, dict):
        parsed = Arguments(parsed, arguments or "{}")
    return {**call, "function": {**function, "arguments": parsed}}


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
        # Jinja's own filter escapes for HTML, which a prompt must not be.
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        # Half of a character, which a model's call may have, stays the escape that it was.
        return text.encode(errors="backslashreplace").decode()

    environment.filters["tojson"] = tojson
    environment.tests["none"] = lambda value: value is None or isinstance(value, NoContent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
