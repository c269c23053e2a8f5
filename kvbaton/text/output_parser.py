"""Interfaces for parsing a model's output into reasoning, function calls and content.

Each family of models marks these in its own way. Markers that are tokens of the vocabulary become
noncharacters of Unicode in the text of a choice (`OutputFormat.marks`). So text that only looks
like a marker stays text, and parsers see markers that `skip_special_tokens` hides from clients.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from kvbaton.text.structured import Functions, OutputGrammar

Kind = Literal["content", "reasoning", "call"]
ToolCallParserName = Literal[
    "auto", "none", "deepseek_v3", "deepseek_v31", "hermes", "llama3_json", "mistral", "openai",
    "qwen3_coder",
]  # fmt: skip
ReasoningParserName = Literal[
    "auto", "none", "deepseek_r1", "deepseek_v3", "mistral", "openai_gptoss", "qwen3"
]
"""Names of parsers, as in vLLM; ``auto`` decides by the model's folder."""


class MessagePart(Struct, frozen=True):
    """A piece of the assistant's message.

    Attributes:
        kind: Kind of the piece.
        text: New text; of a call, new text of its arguments, empty where the call begins.
        number: Number of the call, from 0.
        function: Name of the function where a call begins; else None.
    """

    kind: Kind
    text: str
    number: int = 0
    function: str | None = None


class OutputParser(ABC):
    """Parses the text of one choice; the joined parts of a kind do not depend on how it is cut.

    Attributes:
        kind: Kind of the current text; calls may be within content or reasoning.
        num_calls: Number of calls that have begun.
    """

    kind: Kind
    num_calls = 0

    @abstractmethod
    def push(self, text: str, *, last: bool = False) -> list[MessagePart]:
        """Parse new text and return the parts that it adds.

        Args:
            text: New text of the choice, with marks.
            last: Whether no more text follows.
        """


class OutputFormat(ABC):
    """How a model marks reasoning, calls and content.

    Attributes:
        reasons: Whether reasoning is parsed.
        calls: Whether calls are parsed.
        always_read: Whether text must be parsed even if a request needs neither.
        stops: Tokens with which the model ends its turn, beside the model's own end tokens.
        message_mark: Stop strings count only between this mark and the next other one; empty if
            they count everywhere.
    """

    reasons: bool
    calls: bool
    always_read = False
    stops: tuple[int, ...] = ()
    message_mark = ""

    @abstractmethod
    def marks(self, *, calls: bool) -> Mapping[int, str]:
        """Marks by token id, for requests whose functions may (`calls`) or may not be called."""

    @abstractmethod
    def parser(
        self, prompt: Sequence[int], functions: Functions | None, *, only: bool = False
    ) -> OutputParser:
        """Make the parser of one choice.

        Args:
            prompt: Token ids of the prompt, which may have begun the text.
            functions: Functions that may be called; None if none may.
            only: Whether a call of any other function is content. Otherwise it is a call, unless
                the name alone tells calls from content.
        """

    @abstractmethod
    def reasoning_rule(self, prompt: Sequence[int], grammar: OutputGrammar) -> str:
        """Grammar rule of the text before the answer or calls; empty for no text.

        Args:
            prompt: Token ids of the prompt, which may have begun the reasoning, or ended it.
            grammar: Grammar to which further rules are added.
        """

    def answer_rule(self, answer: str) -> str:
        """Grammar rule of an answer, with the model's marks around the rule of its content."""
        return answer

    @abstractmethod
    def calls_rule(self, functions: Functions, grammar: OutputGrammar, *, one: bool) -> str:
        """Grammar rule of calls.

        Args:
            functions: Functions that may be called; names of letters, digits, ``_.-``.
            grammar: Grammar to which rules of arguments are added.
            one: Whether there must be exactly one call.
        """

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Bring a conversation into the form that the model's chat template needs."""
        return [dict(message) for message in messages]

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Bring tools into the form that the model's chat template needs."""
        return [dict(tool) for tool in tools]

    def call_id(self) -> str:
        """Make an id for a new call, which its result repeats."""
        return f"call_{uuid.uuid4().hex[:24]}"


def split_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Split messages so that each has at most one call, which its result follows."""
    found: list[dict[str, Any]] = []
    rest = deque(messages)
    while rest:
        message = dict(rest.popleft())
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while rest and rest[0].get("role") == "tool":
            results.append(dict(rest.popleft()))
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            said = ("content", "reasoning_content", "reasoning")
            message = {k: message[k] for k in message if k not in said}
            name = call.get("id") if isinstance(call, Mapping) else ...  # equals no id
            mine = [result for result in results if result.get("tool_call_id") == name]
            found += mine
            results = [result for result in results if result not in mine]
        found += results
    return found
