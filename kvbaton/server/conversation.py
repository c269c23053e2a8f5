"""Shared by the Messages and Responses APIs: a request as a chat, an answer as content blocks."""

from __future__ import annotations

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
from kvbaton.server.chat import OutputReader, chat_prompt, encode_chat
from kvbaton.server.frontend import FRONTEND
from kvbaton.server.validation import check_model
from kvbaton.text.output_parser import Kind, MessagePart

# --- the request as a chat ---

EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""By effort that most chat templates do not know: the nearest one that they know."""


class Conversation:
    """Messages of a chat, gathered from a request of another API.

    Consecutive parts of one role become one message, except results of calls, because many chat
    templates require user and assistant to alternate.

    Attributes:
        fields: By field of the chat's messages, the name of the client's field, for errors.
    """

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self._messages: list[dict[str, Any]] = []

    @property
    def last_role(self) -> str | None:
        """Role of the last message; None if there is none."""
        return self._messages[-1]["role"] if self._messages else None

    def say(self, role: str, parts: Iterable[tuple[dict[str, Any], str]] = (), **more: str) -> None:
        """Add parts to a message.

        Args:
            role: Role of the message.
            parts: Parts of a chat's message, each with the name of the client's field.
            more: Further fields of the message.
        """
        content = self._turn(role, **more)["content"]
        for part, where in parts:
            here = f"messages[{len(self._messages) - 1}].content[{len(content)}]"
            self.fields |= {here: where, f"{here}.image_url": where}
            content.append(part)

    def think(self, thought: str) -> None:
        """Add reasoning of the assistant."""
        self._turn("assistant").setdefault("reasoning_content", []).append(thought)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def messages(self) -> list[dict[str, Any]]:
        """All messages, in the format of chats."""
        for message in self._messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"])
            if "tool_calls" in message and not message["content"]:
                message["content"] = None  # chat templates take this as no text
        return self._messages

    def _turn(self, role: str, **more: str) -> dict[str, Any]:
        if role == "tool" or role != self.last_role:
            self._messages.append({"role": role, "content": [], **more})
        return self._messages[-1]


def function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A function tool, in the format of chats."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def thinks(wanted: bool) -> dict[str, Any]:
    """Variables by which Qwen's and DeepSeek's chat templates turn reasoning on or off."""
    return dict.fromkeys(("enable_thinking", "thinking"), wanted)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors that name a field of the chat name the client's field instead."""
    try:
        yield
    except RequestError as error:
        ours = error.param or ""
        error.param = names.get(ours, error.param)
        if ours in names and error.message.startswith(f"{ours} "):
            error.message = f"{error.param}{error.message.removeprefix(ours)}"
        raise


async def num_input_tokens(
    request: web.Request, body: openai.ChatRequest, fields: Mapping[str, str]
) -> int:
    """Number of prompt tokens of a chat that was made from a request of another API.

    Args:
        request: HTTP request to answer.
        body: The chat.
        fields: By field of the chat, the name of the client's field.

    Raises:
        RequestError: See `encode_chat`; or another model.
    """
    frontend = request.app[FRONTEND]
    check_model(frontend, body.model)
    with renamed(fields):
        ids, _ = await encode_chat(frontend, body, request)
    return len(ids)


# --- the answer, in blocks ---


class ContentBlock(Struct):
    """A piece of the answer: reasoning, text or a call. The last block of an answer may grow.

    Attributes:
        index: Position in the answer.
        kind: Kind of the content.
        function: Name of the function that is called.
        call_id: Id of the call, which its result repeats.
        status: Whether the block may grow, is complete or was cut off.
        pieces: Pieces of the text, or of the call's arguments.
    """

    index: int
    kind: Kind
    function: str
    call_id: str
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    pieces: list[str] = []

    @property
    def text(self) -> str:
        """Whole text until now."""
        return "".join(self.pieces)


async def respond_in_blocks(
    request: web.Request,
    body: openai.ChatRequest,
    fields: Mapping[str, str],
    prefix: str,
    formatter: Callable[..., ContentBlockFormatter],
) -> web.StreamResponse:
    """Answer a chat that was made from a request of another API.

    Args:
        request: HTTP request to answer.
        body: The chat.
        fields: By field of the chat, the name of the client's field.
        prefix: Prefix of the answer's id.
        formatter: Makes a `ContentBlockFormatter`.

    Raises:
        RequestError, EngineDeadError, TimeoutError: See `respond`.
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
        reader: Parses reasoning and calls; None if all is text.
        blocks: Blocks that have begun.
        reasoning_tokens: Estimated number of reasoning tokens; tokens of one event are divided by
            characters.
    """

    body: openai.ChatRequest
    OPERATION = "chat"
    DONE = b""
    SILENCE: ClassVar[bytes] = b":\n\n"
    """Event for a token that adds no text: a stream has one event per token, as in chats."""

    reader: OutputReader | None
    blocks: list[ContentBlock] = field(default_factory=list, init=False)
    reasoning_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parser = None if self.reader is None else self.reader.parser()

    @abstractmethod
    def begin(self) -> Iterable[bytes]:
        """Server-sent events at the start of a stream."""

    @abstractmethod
    def open(self, block: ContentBlock) -> Iterable[bytes]:
        """Server-sent events for the start of a block."""

    @abstractmethod
    def grow(self, block: ContentBlock, text: str) -> bytes:
        """Server-sent event for new text of a block."""

    @abstractmethod
    def close(self, block: ContentBlock) -> Iterable[bytes]:
        """Server-sent events for the end of a block."""

    @abstractmethod
    def end(self, new: Event) -> Iterable[bytes]:
        """Server-sent events for the end of the answer and its reason."""

    @abstractmethod
    def answer(self, new: Event) -> Struct:
        """The whole answer, from one event that has everything."""

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
        """Yield the text that an event adds, with its block."""
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
            told = thought = 1  # the parser holds text back: count its tokens as reasoning
        self.reasoning_tokens += round(len(new.delta.token_ids) * thought / max(1, told))
        return [part for part in parts if parallel or part.kind != "call" or not part.number]
