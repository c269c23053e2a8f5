"""Turns the outputs of a client's prompts into its answer, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from typing_extensions import override

from kvbaton.engine.outputs import OutputCollector, merge_outputs
from kvbaton.engine.stats import RequestTimes
from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.messages import openai
from kvbaton.messages.engine import ERROR_STATUSES, Output
from kvbaton.server.bodies import json_response
from kvbaton.server.frontend import Frontend
from kvbaton.server.sse import DONE_EVENT, error_event, event, event_stream
from kvbaton.server.tracing import TimedRequest
from kvbaton.server.validation import PromptRequest
from kvbaton.text.detokenize import ChoiceText, TextDelta

T = TypeVar("T")
Body = TypeVar("Body", openai.CompletionRequest, openai.ChatRequest)

_encoder = msgspec.json.Encoder()


class Event(Struct, frozen=True, kw_only=True):
    """New text and tokens of one choice of one prompt.

    Attributes:
        prompt: Index of the prompt.
        choice: Index in the answer: prompt index times n, plus the choice of the prompt.
        delta: New text and tokens.
        first: Whether this is the choice's first event.
        last: Whether this is the prompt's last event.
        output: Output of the source; it may have more tokens than `delta`.
    """

    prompt: int
    choice: int
    delta: TextDelta
    first: bool
    last: bool
    output: Output


# --- from the source to events ---


def run_prompts(
    frontend: Frontend,
    prompts: Sequence[PromptRequest],
    take: Callable[[Event], None] = lambda new: None,
    is_free: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[Event]:
    """Run prompts and yield their events; closing the generator cancels the prompts.

    Args:
        frontend: The endpoint, whose source makes the tokens.
        prompts: Prompts to run.
        take: While the generator is awaited, it gets an event within the callback that received the
            tokens; these events are not yielded.
        is_free: Whether `take` may be called now.

    Raises:
        RequestError, EngineDeadError: From the source, for any of the prompts.
    """
    if len(prompts) == 1:
        return _run(frontend, prompts[0], take, is_free)
    return merge([_run(frontend, prompt, take, is_free) for prompt in prompts])


async def _run(
    frontend: Frontend,
    prompt: PromptRequest,
    take: Callable[[Event], None],
    is_free: Callable[[], bool],
) -> AsyncGenerator[Event]:
    request, n, timeline = prompt.request, prompt.request.params.n, prompt.timeline
    texts = [ChoiceText(frontend.tokenizer, request.token_ids, prompt.options) for _ in range(n)]
    unseen, open_choices = set(range(n)), set(range(n))

    def event_of(output: Output) -> Event | None:
        if output.marks and timeline is not None:
            timeline.add(output.marks)
            if not output.request_id:  # it carries only marks
                return None
        times.output(output)
        if output.finish_reason is not None:
            raise_if_failed(output, times.elapsed_s >= request.deadline_s)
        choice = output.choice
        if choice not in open_choices:
            return None
        delta = texts[choice].push(output)
        first = choice in unseen
        unseen.discard(choice)
        if delta.finish_reason is not None:
            open_choices.discard(choice)
        if prompt.echo_only:
            delta = TextDelta(finish_reason="length" if delta.finish_reason else None)
        return Event(
            prompt=prompt.index,
            choice=prompt.index * n + choice,
            delta=delta,
            first=first,
            last=not open_choices,
            output=output,
        )

    def sink(output: Output) -> bool:
        if not is_free() or (output.finish_reason is not None and len(open_choices) == 1):
            return False  # the reader wakes for the end anyway: it writes both at once
        if (new := event_of(output)) is not None:
            take(new)
            if not open_choices:
                outputs.end()
        return True

    if timeline is not None:
        timeline.submit()
    with (
        closing(RequestTimes(frontend.metrics.latencies)) as times,
        OutputCollector(frontend.source, request, sink) as outputs,
    ):
        async for output in outputs:
            if (new := event_of(output)) is not None:
                yield new
            if not open_choices:
                break
    if open_choices:
        raise EngineDeadError("the stream of tokens ended before the request was done")


def raise_if_failed(output: Output, expired: bool) -> None:
    """Raise if an output has the finish reason ``abort`` or ``error``: it ends the whole request.

    Args:
        output: The output.
        expired: Whether the request's deadline has passed.

    Raises:
        RequestError: 504 after the deadline; 400 if the request is to blame; 500 if it would fail
            again; else 503.
    """
    if output.finish_reason not in ("abort", "error"):
        return
    if expired:
        raise RequestError("the request took longer than its timeout", status=504, code="timeout")
    code = "aborted" if output.finish_reason == "abort" else "generation_failed"
    reason = f"the request did not complete: {output.error or 'it was aborted'}"
    if output.error_code is not None:
        status = ERROR_STATUSES.get(output.error_code, 500)
        raise RequestError(reason, status=status, code=output.error_code)
    raise RequestError(reason, status=503, code=code)


async def merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of several generators as they come; an exception of one ends all."""
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                yield task.result()
                waiting[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def fold(events: Sequence[Event]) -> list[Event]:
    """Merge the events of each choice into one; the result is in order of choice."""
    by_choice: dict[int, list[Event]] = {}
    for new in events:
        by_choice.setdefault(new.choice, []).append(new)
    folded = []
    for _, mine in sorted(by_choice.items()):
        deltas = [new.delta for new in mine]
        scored = any(delta.logprobs is not None for delta in deltas)
        delta = replace(
            deltas[-1],
            text="".join(delta.text for delta in deltas),
            token_ids=[token for delta in deltas for token in delta.token_ids],
            logprobs=[p for delta in deltas for p in delta.logprobs or ()] if scored else None,
        )
        output = merge_outputs([new.output for new in mine])
        folded.append(replace(mine[-1], delta=delta, first=mine[0].first, output=output))
    return folded


# --- from events to the answer ---


@dataclass(eq=False)
class ResponseFormatter(ABC):
    """Formats the answer to one client's request; each endpoint has its own subclass.

    Attributes:
        frontend: The endpoint, for the tokenizer and the model's name.
        body: The request.
        request_id: Id in the answer.
        prompts: Token ids of each prompt.
        head: Fields that every answer and chunk begins with.
        counter: Counts tokens for the answer's usage.
        timings: Returns the request's timings until now; None if the client does not want them.
        error: Why the stream ended early; empty if it did not.
    """

    OPERATION: ClassVar[str]
    """Name of the operation by OpenTelemetry's conventions."""
    DONE: ClassVar[bytes] = DONE_EVENT
    """End of a stream without an error."""

    frontend: Frontend
    body: openai.SamplingFields
    request_id: str
    prompts: Sequence[Sequence[int]]
    head: dict[str, Any] = field(init=False)
    counter: UsageCounter = field(init=False)
    timings: Callable[[], openai.RequestTimings] | None = field(default=None, init=False)
    error: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.head = {"id": self.request_id, "model": self.frontend.config.model_name}
        self.counter = UsageCounter(sum(map(len, self.prompts)), [0] * len(self.prompts))

    @abstractmethod
    def event(self, new: Event) -> bytes:
        """Format an event for a stream, as one or more whole server-sent events."""

    def closing(self) -> bytes:
        """Server-sent events after the last event of the prompts."""
        return b""

    def failed(self, request: web.Request, error: RequestError) -> bytes:
        """End of a stream that fails."""
        return error_event(request, error)

    @abstractmethod
    def whole(self, events: Sequence[Event]) -> Struct:
        """The whole answer, from all events in order; `counter` has counted them."""


@dataclass(eq=False)
class ChunkFormatter(ResponseFormatter, Generic[Body]):
    """Formats streams as chunks of OpenAI's API."""

    body: Body
    EMPTY_TEXT: ClassVar[bytes]
    """Encoded field for new text of a chunk without text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        body = self.body
        self.tokenizer = self.frontend.tokenizer
        self.head["created"] = int(time.time())
        scored = body.logprobs is not None and body.logprobs is not False  # 0 candidates count
        self._is_plain = not scored and not body.return_token_ids
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        options: openai.StreamOptions = body.stream_options or openai.StreamOptions()
        self._tells_usage = bool(options.include_usage)
        self._usage_always = bool(options.continuous_usage_stats)

    @abstractmethod
    def chunk(
        self,
        new: Event | None,
        usage: openai.TokenUsage | UnsetType = UNSET,
        timings: openai.RequestTimings | UnsetType = UNSET,
    ) -> Struct:
        """Make the chunk of an event; without an event, the last chunk with usage and timings."""

    @override
    def event(self, new: Event) -> bytes:
        """Format a chunk as a server-sent event; if only the text is new, encode only the text."""
        delta, usage = new.delta, None
        if self._tells_usage:
            self.counter.add(new)
            usage = self.counter.usage() if self._usage_always else None
        if not self._is_plain or new.first or delta.finish_reason is not None or usage is not None:
            return event(self.chunk(new, usage or UNSET))
        frame = self._frames.get(new.choice)
        if frame is None:
            blank = event(self.chunk(replace(new, delta=TextDelta())))
            head, empty, tail = blank.partition(self.EMPTY_TEXT)
            frame = self._frames[new.choice] = head + empty.removesuffix(b'""'), tail
        return frame[0] + _encoder.encode(delta.text) + frame[1]

    def times(self) -> openai.RequestTimings | UnsetType:
        """Current value of the answer's field ``timings``."""
        return UNSET if self.timings is None else self.timings()

    @override
    def closing(self) -> bytes:
        if not self._tells_usage and self.timings is None:
            return b""
        usage = self.counter.usage() if self._tells_usage else UNSET
        return event(self.chunk(None, usage, self.times()))


class UsageCounter(Struct):
    """Counts the tokens of one client's request.

    Attributes:
        prompt_tokens: Number of tokens of all prompts.
        cached: For each prompt, number of tokens that came from a cache.
        completion_tokens: Number of generated tokens until now.
    """

    prompt_tokens: int
    cached: list[int]
    completion_tokens: int = 0

    def add(self, new: Event) -> None:
        """Count the tokens of an event."""
        self.completion_tokens += len(new.delta.token_ids)
        self.cached[new.prompt] = max(self.cached[new.prompt], new.output.cached_tokens)

    def usage(self) -> openai.TokenUsage:
        """Usage until now; a prompt with several choices counts once."""
        return openai.TokenUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=openai.PromptTokensDetails(sum(self.cached)),
        )


async def respond(
    request: web.Request,
    frontend: Frontend,
    prompts: Sequence[PromptRequest],
    formatter: ResponseFormatter,
) -> web.StreamResponse:
    """Run the prompts and answer.

    A stream has one chunk per event, even if a token adds no text, as in vLLM: load generators
    count chunks as tokens. The last chunk and the end of the stream are one write.

    Raises:
        RequestError, EngineDeadError: The request can't be served, and nothing was sent yet.
        TimeoutError: The deadline is long over, and nothing was sent yet.
    """
    wanted = bool(formatter.body.return_timings)
    if wanted and len(prompts) > 1:
        raise RequestError("return_timings takes one prompt per request", param="return_timings")
    model = frontend.config.model_name
    timing = TimedRequest(
        frontend.tracing,
        request,
        [prompt.request for prompt in prompts],
        wanted=wanted,
        attributes={
            "gen_ai.operation.name": formatter.OPERATION,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        },
    )
    response: web.StreamResponse
    with timing as timed:
        both = zip(prompts, timed.asks, timed.timelines, strict=True)
        prompts = [replace(p, request=ask, timeline=its) for p, ask, its in both]
        if wanted and (timeline := prompts[0].timeline) is not None:
            formatter.timings = timeline.timings
        limit_s = prompts[0].request.deadline_s + frontend.config.deadline_grace_s
        if formatter.body.stream:
            response = await _stream(request, frontend, prompts, formatter, limit_s)
        else:
            response = await _whole(frontend, prompts, formatter, limit_s)
        timed.status, timed.error = response.status, formatter.error
    return response


async def _whole(
    frontend: Frontend,
    prompts: Sequence[PromptRequest],
    formatter: ResponseFormatter,
    limit_s: float,
) -> web.Response:
    got: list[Event] = []

    def take(new: Event) -> None:
        got.append(new)
        _wrote(prompts, new)

    events = run_prompts(frontend, prompts, take, lambda: True)
    async with asyncio.timeout(limit_s), aclosing(events):
        async for new in events:
            take(new)
    for new in got:
        formatter.counter.add(new)
    return json_response(formatter.whole(got))


async def _stream(
    request: web.Request,
    frontend: Frontend,
    prompts: Sequence[PromptRequest],
    formatter: ResponseFormatter,
    limit_s: float,
) -> web.StreamResponse:
    timed = prompts[0].timeline is not None
    async with event_stream(request, limit_s) as stream:
        stream.done, stream.failed = formatter.DONE, formatter.failed

        def write(new: Event) -> None:
            stream.write(formatter.event(new))
            if timed:
                _wrote(prompts, new)

        events = run_prompts(frontend, prompts, write, stream.is_free)
        async with aclosing(events):
            async for new in events:
                if new.last and len(prompts) == 1:
                    stream.held = formatter.event(new)
                else:
                    await stream.send(formatter.event(new))
                _wrote(prompts, new)
        stream.held += formatter.closing()
    formatter.error = stream.error
    return stream.response


def _wrote(prompts: Sequence[PromptRequest], new: Event) -> None:
    """Note in the prompt's timeline that an event was written."""
    timeline = prompts[new.prompt].timeline
    if timeline is not None:
        first = new.prompt * prompts[0].request.params.n
        timeline.wrote(len(new.delta.token_ids), new.choice - first)
