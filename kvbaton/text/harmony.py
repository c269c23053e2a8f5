"""Output format of gpt-oss: messages on channels, between special tokens (OpenAI's "harmony").

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{...}<|call|>

A header names the message's author (the template has begun the first message), its channel and its
recipient, which may stand before or after the channel. Messages on the channel ``analysis`` are
reasoning, on ``final`` the answer. On ``commentary`` a message to a function is a call of it, and
one without a recipient is a preamble for the user. Source: "OpenAI harmony response format", OpenAI
cookbook, 2025. OpenAI's own library is not used, because it downloads its vocabulary and takes only
token ids; this module needs only the markers.

"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from kvbaton.text.detokenize import Detokenizer
from kvbaton.text.output_parser import Kind, MessagePart, OutputFormat, OutputParser, split_calls
from kvbaton.text.structured import TEXT, Functions, OutputGrammar, quoted
from kvbaton.text.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN = (chr(0xFDD0 + i) for i in range(7))
MARKERS = {
    "<|start|>": START,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|message|>": MESSAGE,
    "<|end|>": END,
    "<|call|>": CALL,
    "<|return|>": RETURN,
}
"""By special token: the mark that replaces it in texts."""

MARKED = re.compile(f"([{START}-{RETURN}])")
"""Matches any mark."""
_RECIPIENT = re.compile(rf"\bto=([^\s{START}-{RETURN}]+)")
_CHANNEL = re.compile(rf"{CHANNEL}\s*([^\s{START}-{RETURN}]+)")
_FUNCTIONS = "functions."


class HarmonyFormat(OutputFormat):
    """Format of a model whose vocabulary has `MARKERS`.

    Args:
        tokenizer: Tokenizer of the model.
        calls: Whether calls are parsed.
        reasons: Whether reasoning is parsed.
    """

    message_mark = MESSAGE

    def __init__(self, tokenizer: Tokenizer, *, calls: bool, reasons: bool) -> None:
        self.calls, self.reasons = calls, reasons
        self.always_read = calls or reasons
        self._tokenizer = tokenizer
        self._marks = {tokenizer.added_tokens[name]: mark for name, mark in MARKERS.items()}
        self.stops = tuple(i for i, mark in self._marks.items() if mark in (CALL, RETURN))

    @override
    def marks(self, *, calls: bool) -> Mapping[int, str]:
        return self._marks

    @override
    def parser(
        self, prompt: Sequence[int], functions: Functions | None, *, only: bool = False
    ) -> HarmonyParser:
        first = len(prompt)
        begins = next(
            (i for i in range(first - 1, -1, -1) if self._marks.get(prompt[i]) == START), first
        )
        text = Detokenizer.of(self._tokenizer, marks=self._marks)
        begun = "".join(map(text.push, prompt[begins:])) + text.flush()
        calls, allowed = functions is not None, functions if only else None
        return HarmonyParser(begun, calls=calls, allowed=allowed, reasons=self.reasons)

    @override
    def reasoning_rule(self, prompt: Sequence[int], grammar: OutputGrammar) -> str:
        return (
            f'({self._header("analysis")} {TEXT} {self._tag(END)} {self._tag(START)} "assistant")?'
        )

    @override
    def answer_rule(self, answer: str) -> str:
        return f"{self._header('final')} {answer}"

    @override
    def calls_rule(self, functions: Functions, grammar: OutputGrammar, *, one: bool) -> str:
        return " | ".join(  # the model ends its turn after one call
            self._header(f"commentary to={_FUNCTIONS}{name} ", f'{self._tag(CONSTRAIN)} "json"')
            + f" {grammar.arguments(schema)}"
            for name, schema in functions.items()
        )

    def _header(self, channel: str, form: str = "") -> str:
        return f"{self._tag(CHANNEL)} {quoted(channel)} {form} {self._tag(MESSAGE)}"

    def _tag(self, mark: str) -> str:
        return next(f"<[{token}]>" for token, m in self._marks.items() if m == mark)

    @override
    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Bring a conversation into the form of the template, where reasoning is ``thinking``.

        A message with a call has no content: text for the user before the call becomes
        ``thinking``, too. Such a message has one call, and the call's result follows it.
        """
        found = split_calls(messages)
        for message in found:
            calls, texts = message.pop("tool_calls", None), [message.get("reasoning_content")]
            if calls:
                message["tool_calls"] = calls
                texts.append(message.pop("content", None))
            if any(texts):
                message["thinking"] = "\n".join(filter(None, texts))
        return found

    @override
    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Give each function a description, which the template needs."""
        found = []
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and function.get("description") is None:
                tool = {**tool, "function": {**function, "description": ""}}
            found.append(dict(tool))
        return found


class HarmonyParser(OutputParser):
    """Parses the text of one choice, however it is cut.

    Messages of one kind are joined by newlines. Text without any header is content.

    Args:
        prompt: End of the prompt, from the last start of a message on; the choice continues that
            message.
        calls: Whether functions may be called; else a message to a function is content.
        allowed: Functions that may be called; None for any.
        reasons: Whether reasoning is parsed; else it is content.
    """

    def __init__(
        self, prompt: str, *, calls: bool, allowed: Functions | None = None, reasons: bool = True
    ) -> None:
        self._calls, self._allowed, self._reasons = calls, allowed, reasons
        self._state: Literal["header", "message", "between"] = "header"
        self._header = ""
        self.kind = "content"
        self._seen: set[Kind] = set()
        self._gap = ""
        self._bare: str | None = None
        self.push(prompt)
        self._seen.clear()
        self._bare = ""  # all text until the first mark

    @override
    def push(self, text: str, *, last: bool = False) -> list[MessagePart]:
        parts = [part for piece in MARKED.split(text) if (part := self._read(piece)) is not None]
        if self._bare is not None:
            self._bare = None if parts or MARKED.search(text) else self._bare + text
        if last and self._bare:
            parts.append(MessagePart("content", self._bare))
        return parts

    def _read(self, piece: str) -> MessagePart | None:
        """Read a mark, or text between two marks."""
        if piece == START or (piece == CHANNEL and self._state != "header"):
            self._state, self._header = "header", piece.replace(START, "")
        elif piece in (END, CALL, RETURN):
            self._state = "between"
        elif self._state == "header":
            if piece == MESSAGE:
                return self._begin()
            self._header += piece
        elif self._state == "message" and piece and piece not in (MESSAGE, CONSTRAIN):
            text, self._gap = self._gap + piece, ""
            self._seen.add(self.kind)
            return MessagePart(self.kind, text, self.num_calls - 1)
        return None

    def _begin(self) -> MessagePart | None:
        """Begin the message of a complete header."""
        self._state = "message"
        found = _RECIPIENT.search(self._header)
        name = found[1] if found else ""
        to_function = name.startswith(_FUNCTIONS)
        self._gap = ""
        function = name.removeprefix(_FUNCTIONS)
        may_call = self._calls and (self._allowed is None or function in self._allowed)
        if to_function and may_call:
            self.kind = "call"
            self.num_calls += 1
            return MessagePart("call", "", self.num_calls - 1, function)
        channel = _CHANNEL.search(self._header)
        # A call of the model's own tools (browser, python) is part of its reasoning.
        reasons = (channel and channel[1] == "analysis") or (name and not to_function)
        self.kind = "reasoning" if reasons and self._reasons else "content"
        if self.kind in self._seen:
            self._gap = "\n"
        return None
