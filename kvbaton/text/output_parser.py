"""What reads a model's output for clients: reasoning, calls of functions and content apart.

Each family of models marks them in its own way. Markers that are tokens of the vocabulary stand as
noncharacters of Unicode in the text of a choice (`OutputFormat.marks`), so that what only looks
like one is text; they are seen here although `skip_special_tokens` hides them from clients.
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
"""Both as vLLM has them; ``auto`` takes what the model's folder says."""


class MessagePart(Struct, frozen=True):
    """A piece of what the assistant says.

    Attributes:
        kind: what it is for the client.
        text: new; of a call, of its arguments: empty where one begins.
        number: of the call, from 0.
        function: whose call begins; None within one, and of other kinds.
    """

    kind: Kind
    text: str
    number: int = 0
    function: str | None = None


class OutputParser(ABC):
    """Reads the text of one choice; the parts of a kind, joined, do not depend on how it is cut.

    Attributes:
        kind: of the text that comes now; a call may stand in any.
        num_calls: that have begun.
    """

    kind: Kind
    num_calls = 0

    @abstractmethod
    def push(self, text: str, *, last: bool = False) -> list[MessagePart]:
        """What new text adds.

        Args:
            text: of the choice, with marks.
            last: nothing follows.
        """


class OutputFormat(ABC):
    """How one model marks what it writes.

    Attributes:
        reasons: its reasoning is told apart.
        calls: so are its calls.
        always_read: also of requests that neither is told apart for.
        stops: tokens with which it hands over, beside those that end any text of the model's.
        message_mark: stop strings count only after this mark and before the next other one; empty
            if they count everywhere.
    """

    reasons: bool
    calls: bool
    always_read = False
    stops: tuple[int, ...] = ()
    message_mark = ""

    @abstractmethod
    def marks(self, *, calls: bool) -> Mapping[int, str]:
        """What stands in texts for which tokens, if functions may be called or not."""

    @abstractmethod
    def parser(self, prompt: Sequence[int], functions: Functions | None) -> OutputParser:
        """For one choice.

        Args:
            prompt: which may have begun what the choice goes on with.
            functions: None if none may be called.
        """

    @abstractmethod
    def reasoning_rule(self, prompt: Sequence[int], grammar: OutputGrammar) -> str:
        """What it may write before its answer or its calls, in a grammar; empty for nothing.

        Args:
            prompt: which may have begun the reasoning, or ended it.
            grammar: takes further rules.
        """

    def answer_rule(self, answer: str) -> str:
        """How an answer stands in what it writes."""
        return answer

    @abstractmethod
    def calls_rule(self, functions: Functions, grammar: OutputGrammar, *, one: bool) -> str:
        """How it writes calls, in a grammar.

        Args:
            functions: that may be called, by names of letters, digits, ``_``, ``.`` and ``-``.
            grammar: takes the rules of their arguments.
            one: there is to be one call.
        """

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A conversation as the model's chat template wants it."""
        return [dict(message) for message in messages]

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tools as the model's chat template wants them."""
        return [dict(tool) for tool in tools]

    def call_id(self) -> str:
        """A name for a new call, which its result repeats."""
        return f"call_{uuid.uuid4().hex[:24]}"


def split_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in which each message has one call at most, and its result follows it."""
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
            name = call.get("id") if isinstance(call, Mapping) else ...  # which nothing equals
            mine = [result for result in results if result.get("tool_call_id") == name]
            found += mine
            results = [result for result in results if result not in mine]
        found += results
    return found
