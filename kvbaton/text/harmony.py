"""What gpt-oss writes: messages on channels, between special tokens (OpenAI's "harmony" format).

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{...}<|call|>

A header says whose message it is (the template has begun the first one), on which channel, and to
whom: the recipient may stand before the channel or after it. The channel ``analysis`` is reasoning,
``final`` the answer; ``commentary`` to a function is a call of it, to nobody a preamble for the
user. Source: "OpenAI harmony response format", OpenAI cookbook, 2025. OpenAI's own library fetches
its vocabulary from the internet and takes token ids only; here the markers alone are told apart.

In the text of a choice the special tokens are noncharacters of Unicode (`MARKERS`), so that what
only looks like a marker in an answer is none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

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
"""What stands in texts for each special token."""

MARKED = re.compile(f"([{START}-{RETURN}])")
"""Any marker."""
_RECIPIENT = re.compile(rf"\bto=([^\s{START}-{RETURN}]+)")
_CHANNEL = re.compile(rf"{CHANNEL}\s*([^\s{START}-{RETURN}]+)")
_FUNCTIONS = "functions."

Kind = Literal["content", "reasoning", "call"]


def harmony_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as gpt-oss's template wants it.

    Reasoning is called ``thinking`` there. A message with a call has no content: what the user was
    told before goes on the same channel. It has one call, and its result follows it.
    """
    found: list[dict[str, Any]] = []
    rest = deque(messages)
    while rest:
        message = dict(rest.popleft())
        calls, texts = message.pop("tool_calls", None) or [], [message.get("reasoning_content")]
        if calls:
            texts.append(message.pop("content", None))
        if any(texts):
            message["thinking"] = "\n".join(filter(None, texts))
        if not calls:
            found.append(message)
            continue
        results = []
        while rest and rest[0].get("role") == "tool":
            results.append(dict(rest.popleft()))
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            message.pop("thinking", None)
            name = call.get("id") if isinstance(call, Mapping) else ...  # which nothing equals
            mine = [r for r in results if len(calls) == 1 or r.get("tool_call_id") == name]
            found += mine
            results = [r for r in results if r not in mine]
        found += results
    return found


def harmony_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as gpt-oss's template wants them: each function has a description."""
    found = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("description") is None:
            tool = {**tool, "function": {**function, "description": ""}}
        found.append(dict(tool))
    return found


class HarmonyPart(Struct, frozen=True):
    """A piece of a message.

    Attributes:
        kind: what it is for the client.
        text: of the message; empty where a call begins.
        number: of the call, from 0.
        function: whose call begins; None within one, and of other kinds.
    """

    kind: Kind
    text: str
    number: int = 0
    function: str | None = None


class HarmonyParser:
    """Reads the text of one choice, however it is cut.

    Messages of one kind follow each other after a newline. What a model writes without any header
    is content.

    Args:
        prompt: the end of the prompt, from the last start of a message on: the choice goes on
            with that message.
        calls: whether functions may be called; else a message to one is content.

    Attributes:
        num_calls: that have begun.
    """

    def __init__(self, prompt: str, *, calls: bool) -> None:
        self._calls = calls
        self._state: Literal["header", "message", "between"] = "header"
        self._header = ""
        self._kind: Kind = "content"
        self._seen: set[Kind] = set()
        self._gap = ""
        self._bare: str | None = None
        self.num_calls = 0
        self.push(prompt)
        self._seen.clear()
        self._bare = ""  # all text, until there is a marker

    def push(self, text: str, *, last: bool = False) -> list[HarmonyPart]:
        """What new text adds.

        Args:
            text: of the choice, with `MARKERS`.
            last: nothing follows.
        """
        parts = [part for piece in MARKED.split(text) if (part := self._read(piece)) is not None]
        if self._bare is not None:
            self._bare = None if parts or MARKED.search(text) else self._bare + text
        if last and self._bare:
            parts.append(HarmonyPart("content", self._bare))
        return parts

    def _read(self, piece: str) -> HarmonyPart | None:
        """Take a marker, or text between two."""
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
            self._seen.add(self._kind)
            return HarmonyPart(self._kind, text, self.num_calls - 1)
        return None

    def _begin(self) -> HarmonyPart | None:
        """The header is whole, its message begins."""
        self._state = "message"
        found = _RECIPIENT.search(self._header)
        name = found[1] if found else ""
        to_function = name.startswith(_FUNCTIONS)
        self._gap = ""
        if to_function and self._calls:
            self._kind = "call"
            self.num_calls += 1
            function = name.removeprefix(_FUNCTIONS)
            return HarmonyPart("call", "", self.num_calls - 1, function)
        channel = _CHANNEL.search(self._header)
        # A tool of the model's own (browser, python) is part of how it reasons.
        reasons = (channel and channel[1] == "analysis") or (name and not to_function)
        self._kind = "reasoning" if reasons else "content"
        if self._kind in self._seen:
            self._gap = "\n"
        return None
