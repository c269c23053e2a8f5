"""What requests of APIs beside chats have in common once they are chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvbaton.errors import RequestError

EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Those that most chat templates do not know."""


class Conversation:
    """A chat's messages, gathered from those of another API.

    What one says in a row is one message, but for results of calls: many chat templates want user
    and assistant to take turns.

    Attributes:
        fields: what the client calls the fields of the messages that may be wrong.
    """

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self._messages: list[dict[str, Any]] = []

    @property
    def last_role(self) -> str | None:
        """Whose the last message is; None if there is none."""
        return self._messages[-1]["role"] if self._messages else None

    def say(self, role: str, parts: Iterable[tuple[Any, str]] = (), **more: str) -> None:
        """Add parts of a message, each with what the client calls it.

        Args:
            role: who says it.
            parts: of a chat's message.
            more: fields of the message.
        """
        content = self._turn(role, **more)["content"]
        for part, where in parts:
            here = f"messages[{len(self._messages) - 1}].content[{len(content)}]"
            self.fields |= {here: where, f"{here}.image_url": where}
            content.append(part)

    def think(self, thought: str) -> None:
        """Add what the assistant has thought."""
        self._turn("assistant").setdefault("reasoning_content", []).append(thought)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call that the assistant has made."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def messages(self) -> list[dict[str, Any]]:
        """All, as chats have them."""
        for message in self._messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"])
            if "tool_calls" in message and not message["content"]:
                message["content"] = None  # what templates take for no text at all
        return self._messages

    def _turn(self, role: str, **more: str) -> dict[str, Any]:
        if role == "tool" or role != self.last_role:
            self._messages.append({"role": role, "content": [], **more})
        return self._messages[-1]


def function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool as a chat's."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def thinks(wanted: bool) -> dict[str, Any]:
    """What tells chat templates whether to begin with reasoning: Qwen's and DeepSeek's."""
    return dict.fromkeys(("enable_thinking", "thinking"), wanted)


def arguments(text: str) -> dict[str, Any]:
    """Of a call; what is no object, as of a call that was cut off, as ``INVALID_JSON``."""
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a field of the chat name the client's instead."""
    try:
        yield
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise
