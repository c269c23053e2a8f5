"""One request of a client, prompt by prompt; their outputs as one stream of events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvbaton.engine.validate import INT32, Range, check_ids, check_range
from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.messages.engine import AddRequest, Item, Output, SamplingParams, TransferSpec
from kvbaton.messages.openai import SamplingFields
from kvbaton.server.config import Frontend
from kvbaton.text.choice import ChoiceText, TextDelta, TextOptions
from kvbaton.types import TokenLogprobs

T = TypeVar("T")

MAX_SALT = 4096


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """One prompt of a client's request.

    Attributes:
        index: of the prompt in the request.
        request: what the source is asked.
        options: how its tokens become text.
        echo_only: only the prompt is wanted; the token that the source must make is dropped.
    """

    index: int
    request: AddRequest
    options: TextOptions
    echo_only: bool = False


class Event(Struct, frozen=True, kw_only=True):
    """What is new of one choice of one prompt.

    Attributes:
        prompt: index of the prompt.
        choice: index in the answer: prompt times n plus choice.
        delta: new text and tokens.
        first: whether it is the choice's first event.
        prompt_logprobs: one per prompt token, where asked for, on a prompt's first event.
        cached_tokens: prompt tokens taken from a cache.
        kv_transfer_params: what to paste into the target's request.
    """

    prompt: int
    choice: int
    delta: TextDelta
    first: bool
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


def deadline(frontend: Frontend, timeout: float | None, name: str = "timeout") -> float:
    """Seconds that a request may take.

    Raises:
        RequestError: the client asked for none or for too many.
    """
    if timeout is None:
        return frontend.config.timeout_s
    check_range(name, timeout, Range(0, frontend.config.max_timeout_s, open=True))
    return timeout


def check_prompt(frontend: Frontend, ids: Sequence[int], max_tokens: int | None, name: str) -> int:
    """Check a prompt against the model; returns how many tokens may be generated.

    Raises:
        RequestError: it is empty, holds unknown ids, or is too long together with `max_tokens`.
    """
    limit = frontend.facts().max_model_len
    if not ids:
        raise RequestError(f"{name} has no tokens", param=name)
    check_ids(name, ids, frontend.vocab_size, most=INT32)
    wanted = 1 if max_tokens is None else max_tokens
    if len(ids) + wanted > limit:
        raise RequestError(
            f"this model's context is {limit} tokens; the prompt has {len(ids)} and "
            f"{wanted} are to be generated",
            param=name,
            code="context_length_exceeded",
        )
    return limit - len(ids) if max_tokens is None else max_tokens


def make_request(
    frontend: Frontend,
    body: SamplingFields,
    request_id: str,
    token_ids: Sequence[int],
    params: SamplingParams,
    transfer: TransferSpec | None,
    items: tuple[Item, ...] = (),
) -> AddRequest:
    """What the source is asked for one prompt.

    Raises:
        RequestError: priority, cache_salt or timeout are out of range.
    """
    priority = body.priority or 0
    check_range("priority", priority, Range(-INT32, INT32))
    if len(body.cache_salt or "") > MAX_SALT:
        raise RequestError(f"cache_salt may have at most {MAX_SALT} characters", param="cache_salt")
    return AddRequest(
        request_id=unique(request_id),
        token_ids=tuple(token_ids),
        params=params,
        priority=priority,
        cache_salt=body.cache_salt or "",
        deadline_s=deadline(frontend, body.timeout),
        transfer=transfer,
        items=items,
    )


def unique(request_id: str) -> str:
    """Clients may repeat an id; a source may not see one twice."""
    return f"{request_id}-{secrets.token_hex(4)}"


def run_prompts(frontend: Frontend, prompts: Sequence[PromptRequest]) -> AsyncGenerator[Event]:
    """Events of all prompts as they come; closing it cancels what still runs.

    Raises:
        RequestError, EngineDeadError: from the source, for any of the prompts.
    """
    streams = [_run(frontend, prompt) for prompt in prompts]
    return streams[0] if len(streams) == 1 else merge(streams)


async def _run(frontend: Frontend, prompt: PromptRequest) -> AsyncGenerator[Event]:
    request, n = prompt.request, prompt.request.params.n
    texts = [ChoiceText(frontend.tokenizer, request.token_ids, prompt.options) for _ in range(n)]
    unseen, open_choices = set(range(n)), set(range(n))
    with frontend.metrics.timed() as times:
        async with aclosing(frontend.source.generate(request)) as outputs:
            async for output in outputs:
                times.output(output)
                if output.finish_reason is not None:
                    raise_if_failed(output, times.elapsed_s >= request.deadline_s)
                choice = output.choice
                if choice not in open_choices:
                    continue
                delta = texts[choice].push(output)
                first = choice in unseen
                if first:
                    unseen.discard(choice)
                if delta.finish_reason is not None:
                    open_choices.discard(choice)
                if prompt.echo_only:
                    delta = TextDelta(finish_reason="length" if delta.finish_reason else None)
                yield Event(
                    prompt=prompt.index,
                    choice=prompt.index * n + choice,
                    delta=delta,
                    first=first,
                    prompt_logprobs=output.prompt_logprobs,
                    cached_tokens=output.cached_tokens,
                    kv_transfer_params=output.kv_transfer_params,
                )
                if not open_choices:
                    return
    raise EngineDeadError("the stream of tokens ended before the request was done")


def raise_if_failed(output: Output, expired: bool) -> None:
    """An output that says ``abort`` or ``error`` ends the whole request.

    Raises:
        RequestError: 504 after the deadline, else 503.
    """
    if output.finish_reason not in ("abort", "error"):
        return
    if expired:
        raise RequestError("the request took longer than its timeout", status=504, code="timeout")
    code = "aborted" if output.finish_reason == "abort" else "generation_failed"
    reason = output.error or "it was aborted"
    raise RequestError(f"the request did not complete: {reason}", status=503, code=code)


async def merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Items of several generators as they come; one that fails ends them all."""
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
    """The events of each choice as one, in order of choice."""
    by_choice: dict[int, list[Event]] = {}
    for event in events:
        by_choice.setdefault(event.choice, []).append(event)
    return [_joined(by_choice[choice]) for choice in sorted(by_choice)]


def _joined(events: Sequence[Event]) -> Event:
    deltas = [event.delta for event in events]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    delta = replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=logprobs if any(delta.logprobs is not None for delta in deltas) else None,
    )
    return replace(
        events[-1],
        delta=delta,
        first=events[0].first,
        prompt_logprobs=next((e.prompt_logprobs for e in events if e.prompt_logprobs), None),
        cached_tokens=max(event.cached_tokens for event in events),
        kv_transfer_params=next(
            (e.kv_transfer_params for e in reversed(events) if e.kv_transfer_params), None
        ),
    )
