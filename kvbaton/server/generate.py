"""``POST /inference/v1/generate``: tokens in, tokens out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from kvbaton.engine.validate import INT32, Range, check_ids, check_range
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Output
from kvbaton.messages.nodes import GenerateChoice, GenerateRequest, GenerateResponse
from kvbaton.messages.openai import PromptTokensDetails, Usage
from kvbaton.server.body import json_response, read_body
from kvbaton.server.config import FRONTEND, Frontend
from kvbaton.server.openapi import contract
from kvbaton.server.prompt_request import check_prompt, deadline, raise_if_failed, unique
from kvbaton.server.request_id import REQUEST_ID, clean
from kvbaton.server.sampling import checked
from kvbaton.server.sse import event_stream
from kvbaton.server.transfer_params import check_item_transfer
from kvbaton.text.logprobs import floored
from kvbaton.types import TokenLogprobs

E = TypeVar("E", TokenLogprobs, TokenLogprobs | None)

_encoder = msgspec.json.Encoder()


@contract(body=GenerateRequest, answer=GenerateResponse, streams=True)
async def generate(request: web.Request) -> web.StreamResponse:
    """Answer with a stream of `Output` or with one `GenerateResponse`."""
    return await respond(request, add_request)


async def respond(
    request: web.Request, add_request: Callable[[Frontend, GenerateRequest, str], AddRequest]
) -> web.StreamResponse:
    """Answer a `GenerateRequest`.

    Args:
        request: with the body.
        add_request: makes of it, with a request id, what the engine is asked.

    Raises:
        RequestError: it is wrong, or did not complete.
    """
    frontend = request.app[FRONTEND]
    body = await read_body(request, GenerateRequest)
    request_id = clean(body.request_id) or request[REQUEST_ID]
    add = add_request(frontend, body, request_id)
    outputs = _outputs(frontend, add, request_id)
    limit_s = add.deadline_s + frontend.config.deadline_grace_s
    if body.stream:
        return await _stream(request, outputs, limit_s)
    async with asyncio.timeout(limit_s):
        return json_response(await _collect(outputs, add, request_id))


def add_request(frontend: Frontend, body: GenerateRequest, request_id: str) -> AddRequest:
    """What the engine is asked.

    Raises:
        RequestError: a field is out of range.
    """
    vocab_size, resume = frontend.vocab_size, body.resume_token_ids
    params = checked(body.sampling_params, frontend.config, vocab_size, prefix="sampling_params.")
    check_prompt(frontend, body.token_ids, params.max_tokens, "token_ids")
    check_ids("resume_token_ids", resume, vocab_size, most=INT32)
    if len(resume) >= params.max_tokens:
        raise RequestError(
            f"resume_token_ids must be fewer than max_tokens ({params.max_tokens})",
            param="resume_token_ids",
        )
    check_range("priority", body.priority, Range(-INT32, INT32))
    _check_items(frontend, body)
    return AddRequest(
        request_id=unique(request_id),
        token_ids=body.token_ids,
        params=params,
        resume_ids=resume,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        deadline_s=deadline(frontend, body.deadline_s, "deadline_s"),
        transfer=frontend.transfer(body.kv_transfer_params),
        items=body.items,
    )


def _check_items(frontend: Frontend, body: GenerateRequest) -> None:
    vision, most = frontend.tokenizer.vision, frontend.config.media.max_images
    if len(body.items) > most:
        raise RequestError(f"{len(body.items)} items; --limit-images is {most}", param="items")
    if vision is not None:
        vision.check(body.token_ids, body.items)
    elif body.items:
        raise RequestError("this model takes text only, no items", param="items")
    for number, item in enumerate(body.items):
        check_item_transfer(item.transfer, f"items[{number}].transfer")


async def _outputs(frontend: Frontend, add: AddRequest, request_id: str) -> AsyncGenerator[Output]:
    """The source's outputs as they may be shown: the client's id, numbers that JSON can say."""
    with frontend.metrics.timed() as times:
        async with aclosing(frontend.source.generate(add)) as outputs:
            async for output in outputs:
                times.output(output)
                yield replace(
                    output,
                    request_id=request_id,
                    logprobs=_floored(output.logprobs),
                    prompt_logprobs=_floored(output.prompt_logprobs),
                )


def _floored(entries: tuple[E, ...] | None) -> tuple[E, ...] | None:
    return None if entries is None else tuple(map(floored, entries))


async def _stream(
    request: web.Request, outputs: AsyncGenerator[Output], limit_s: float
) -> web.StreamResponse:
    async with event_stream(request, limit_s) as stream, aclosing(outputs):
        async for output in outputs:
            await stream.send(b"data: %b\n\n" % _encoder.encode(output))
    return stream.response


async def _collect(
    stream: AsyncGenerator[Output], add: AddRequest, request_id: str
) -> GenerateResponse:
    outputs: list[Output] = []
    start = time.monotonic()
    async with aclosing(stream):
        async for output in stream:
            raise_if_failed(output, time.monotonic() - start >= add.deadline_s)
            outputs.append(output)
    return GenerateResponse(
        request_id=request_id,
        choices=tuple(_choice(outputs, index) for index in range(add.params.n)),
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs), None),
        usage=msgspec.to_builtins(_usage(add, outputs)),
        kv_transfer_params=next(
            (o.kv_transfer_params for o in outputs if o.kv_transfer_params), None
        ),
    )


def _choice(outputs: Sequence[Output], index: int) -> GenerateChoice:
    mine = [output for output in outputs if output.choice == index]
    logprobs = tuple(entry for output in mine for entry in output.logprobs or ())
    ends = [output for output in mine if output.finish_reason is not None]
    return GenerateChoice(
        index=index,
        token_ids=tuple(token for output in mine for token in output.token_ids),
        logprobs=logprobs if any(output.logprobs is not None for output in mine) else None,
        finish_reason=ends[-1].finish_reason if ends else None,
        stop_reason=ends[-1].stop_reason if ends else None,
    )


def _usage(add: AddRequest, outputs: Sequence[Output]) -> Usage:
    generated = sum(len(output.token_ids) for output in outputs)
    cached = max((output.cached_tokens for output in outputs), default=0)
    prompt = len(add.token_ids)
    return Usage(prompt, generated, prompt + generated, PromptTokensDetails(cached))
