"""What APIs beside chats have in common: a conversation to ask, content blocks as the answer."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from aiohttp import web
from msgspec import Struct
from typing_extensions import override

from kvbaton.errors import RequestError
from kvbaton.messages import openai
from kvbaton.server.answer import Event, ResponseFormatter, fold, respond
from kvbaton.server.bodies import REQUEST_ID
from kvbaton.server.chat import OutputReader, chat_prompt
from kvbaton.server.frontend import FRONTEND
from kvbaton.text.output_parser import Kind, MessagePart

# --- the request as a chat ---

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

    def say(self, role: str, parts: Iterable[tuple[dict[str, Any], str]] = (), **more: str) -> None:
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
    """Of a call; what is no object, as of a call that was cut off, as ``INVALID_JSON``.

    Halves of characters, which JSON may escape and no answer may hold, are question marks.
    """
    try:
        found = json.loads(text) if text else {}
        found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a field of the chat name the client's instead."""
    try:
        yield
    except RequestError as error:
        ours = error.param or ""
        error.param = names.get(ours, error.param)
        if ours in names and error.message.startswith(f"{ours} "):
            error.message = f"{error.param}{error.message.removeprefix(ours)}"
        raise


# --- the answer, in blocks ---


class ContentBlock(Struct):
    """What a model thinks, says or calls without a break; the last one of an answer may grow.

    Attributes:
        index: in the answer.
        kind: what it is.
        function: that is called.
        call_id: which its result repeats.
        status: whether it may grow, or was cut off.
        pieces: of the text, or of the call's arguments.
    """

    index: int
    kind: Kind
    function: str
    call_id: str
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of it until now."""
        return "".join(self.pieces)


async def respond_in_blocks(
    request: web.Request,
    body: openai.ChatRequest,
    fields: Mapping[str, str],
    prefix: str,
    formatter: Callable[..., ContentBlockFormatter],
) -> web.StreamResponse:
    """Answer a chat that stands for a request of another API.

    Args:
        request: to answer.
        body: the chat.
        fields: what the client calls those of the chat.
        prefix: of the answer's id.
        formatter: makes one, see `ContentBlockFormatter`.

    Raises:
        RequestError, EngineDeadError, TimeoutError: see `respond`.
    """
    frontend, request_id = request.app[FRONTEND], f"{prefix}_{request[REQUEST_ID]}"
    with renamed(fields):
        asked, reader = await chat_prompt(request, frontend, body, request_id)
    prompts = [asked.request.token_ids]
    answer = formatter(frontend, body, request_id, prompts, reader)
    return await respond(request, frontend, [asked], answer)


@dataclass(eq=False)
class ContentBlockFormatter(ResponseFormatter):
    """Formats the events of a chat's only choice as content blocks.

    Attributes:
        reader: tells reasoning and calls apart; None if all is text.
        blocks: that have begun.
        reasoning_tokens: about as many were reasoning: of tokens that came at once, by characters.
    """

    body: openai.ChatRequest
    OPERATION = "chat"
    DONE = b""
    SILENCE: ClassVar[bytes] = b":\n\n"
    """What a token that adds no text is in a stream, which has an event a token as chats do."""

    reader: OutputReader | None
    blocks: list[ContentBlock] = field(default_factory=list, init=False)
    reasoning_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parser = None if self.reader is None else self.reader.parser()

    @abstractmethod
    def begin(self) -> Iterable[bytes]:
        """What a stream tells first."""

    @abstractmethod
    def open(self, block: ContentBlock) -> Iterable[bytes]:
        """That a block begins."""

    @abstractmethod
    def grow(self, block: ContentBlock, text: str) -> bytes:
        """What is new of it."""

    @abstractmethod
    def close(self, block: ContentBlock) -> Iterable[bytes]:
        """That it has ended."""

    @abstractmethod
    def end(self, new: Event) -> Iterable[bytes]:
        """That and why the answer ends."""

    @abstractmethod
    def answer(self, new: Event) -> Struct:
        """All at once, as of one event with all that was told."""

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._parser is not None and self._parser.num_calls > 0

    @override
    def event(self, new: Event) -> bytes:
        return b"".join(self._told(new)) or self.SILENCE

    @override
    def whole(self, events: Sequence[Event]) -> Struct:
        for new in events:
            for block, text in self._added(new):
                block.pieces.append(text)
        (new,) = fold(events)
        return self.answer(new)

    def _told(self, new: Event) -> Iterator[bytes]:
        self.counter.add(new)
        if new.first:
            yield from self.begin()
        for block, text in self._added(new):
            if not block.pieces:
                yield from self.close(self.blocks[-2]) if block.index else ()
                yield from self.open(block)
            block.pieces.append(text)
            if text:
                yield self.grow(block, text)
        if new.delta.finish_reason is not None:
            yield from self.close(self.blocks[-1]) if self.blocks else ()
            yield from self.end(new)

    def _added(self, new: Event) -> Iterator[tuple[ContentBlock, str]]:
        """What an event adds to which blocks."""
        for part in self._parts(new):
            last = self.blocks[-1] if self.blocks else None
            if last is None or part.kind != last.kind or part.function is not None:
                if last is not None:
                    last.status = "completed"
                call_id = self.reader.call_id() if self.reader and part.kind == "call" else ""
                begun = ContentBlock(len(self.blocks), part.kind, part.function or "", call_id)
                self.blocks.append(begun)
            yield self.blocks[-1], part.text
        if new.delta.finish_reason is not None and self.blocks:
            cut = new.delta.finish_reason == "length"
            self.blocks[-1].status = "incomplete" if cut else "completed"

    def _parts(self, new: Event) -> list[MessagePart]:
        text, parallel = new.delta.text, self.body.parallel_tool_calls is not False
        if self._parser is None:
            return [MessagePart("content", text)] if text else []
        parts = self._parser.push(text, last=new.delta.finish_reason is not None)
        told = sum(len(part.text) for part in parts)
        thought = sum(len(part.text) for part in parts if part.kind == "reasoning")
        if not told and self._parser.kind == "reasoning":
            told = thought = 1  # what is not yet told
        self.reasoning_tokens += round(len(new.delta.token_ids) * thought / max(1, told))
        return [part for part in parts if parallel or part.kind != "call" or not part.number]
