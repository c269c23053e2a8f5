"""``POST /inference/v1/generate``: tokens in, tokens out."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing

from aiohttp import web
from msgspec.structs import asdict, replace

from kvbaton.engine.outputs import merge_outputs
from kvbaton.engine.stats import RequestTimes
from kvbaton.engine.validate import INT32, check_ids
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Output, SamplingParams
from kvbaton.messages.nodes import GenerateChoice, GenerateChunk, GenerateRequest, GenerateResponse
from kvbaton.messages.openai import PromptTokensDetails, TokenUsage
from kvbaton.server.answer import raise_if_failed
from kvbaton.server.auth import tenant
from kvbaton.server.bodies import REQUEST_ID, clean, json_response, read_body
from kvbaton.server.frontend import FRONTEND, Frontend
from kvbaton.server.openapi import contract
from kvbaton.server.sse import event, event_stream
from kvbaton.server.timeline import RequestTimeline
from kvbaton.server.tracing import TimedRequest
from kvbaton.server.transfer_params import check_item_transfer
from kvbaton.server.validation import check_prompt, checked, deadline, unique
from kvbaton.text.grammar_check import checked_grammar
from kvbaton.text.logprobs import floored


@contract(body=GenerateRequest, answer=GenerateResponse, streams=True)
async def generate(request: web.Request) -> web.StreamResponse:
    """Answer with a stream of `GenerateChunk` or with one `GenerateResponse`."""
    return await respond(request, add_request)


async def respond(
    request: web.Request,
    add_request: Callable[[Frontend, GenerateRequest, str], AddRequest],
    role: str | None = None,
) -> web.StreamResponse:
    """Answer a `GenerateRequest`.

    Args:
        request: HTTP request with the body.
        add_request: Makes the engine's request from the body and a request id.
        role: Role of this node, for traces; None takes the request's role in its hand-over.

    Raises:
        RequestError: The request is wrong, or did not complete.
    """
    frontend = request.app[FRONTEND]
    body = await read_body(request, GenerateRequest)
    request_id = clean(body.request_id) or request[REQUEST_ID]
    add = replace(add_request(frontend, body, request_id), tenant=tenant(request))
    if add.params.grammar:
        await checked_grammar(add.params.grammar, "sampling_params.grammar")
    model = frontend.config.model_name
    about = {"gen_ai.operation.name": "generate", "gen_ai.request.model": model}
    limit_s = add.deadline_s + frontend.config.deadline_grace_s
    with TimedRequest(frontend.tracing, request, [add], role=role, attributes=about) as timed:
        (add,), (timeline,) = timed.asks, timed.timelines
        outputs = shown_outputs(frontend, add, request_id, timeline)
        if not body.stream:
            return json_response(await whole_response(add, request_id, outputs, limit_s))
        async with event_stream(request, limit_s) as stream, aclosing(outputs):
            async for output in outputs:
                await stream.send(event(output))
        return stream.response


def add_request(frontend: Frontend, body: GenerateRequest, request_id: str) -> AddRequest:
    """Make the engine's request from a `GenerateRequest`.

    Raises:
        RequestError: A field is out of range.
    """
    facts, resume, given = frontend.facts(), body.resume_token_ids, body.sampling_params
    params = checked(given, facts.vocab_size, prefix="sampling_params.")
    check_prompt(facts, body.token_ids, params.max_tokens, "token_ids")
    check_ids("resume_token_ids", resume, facts.vocab_size, most=INT32)
    if len(resume) >= params.max_tokens:
        raise RequestError(
            f"resume_token_ids must be fewer than max_tokens ({params.max_tokens})",
            param="resume_token_ids",
        )
    vision, most = frontend.tokenizer.vision, frontend.config.media.max_images
    if len(body.items) > most:
        raise RequestError(f"{len(body.items)} items; --limit-images is {most}", param="items")
    if vision is not None:
        vision.check(body.token_ids, body.items)
    elif body.items:
        raise RequestError("this model takes text only, no items", param="items")
    for number, item in enumerate(body.items):
        check_item_transfer(item.transfer, f"items[{number}].transfer")
    return replace(engine_request(frontend, body, request_id, params), resume_ids=resume)


def engine_request(
    frontend: Frontend, body: GenerateRequest, request_id: str, params: SamplingParams
) -> AddRequest:
    """Make the engine's request from a `GenerateRequest`, without `resume_token_ids`.

    Raises:
        RequestError: The priority, the deadline or `kv_transfer_params` are wrong.
    """
    if body.priority:
        frontend.config.check_priority(body.priority)
    transfer, prefix = frontend.transfer(body.kv_transfer_params)
    return AddRequest(
        request_id=unique(request_id),
        token_ids=array("I", body.token_ids),
        params=params,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        deadline_s=deadline(frontend, body.deadline_s, "deadline_s"),
        transfer=transfer,
        prefix=prefix,
        items=body.items,
    )


async def shown_outputs(
    frontend: Frontend, add: AddRequest, request_id: str, timeline: RequestTimeline | None
) -> AsyncGenerator[GenerateChunk]:
    """Yield the source's outputs as the client gets them; see `_shown`."""
    if timeline is not None:
        timeline.submit()
    with closing(RequestTimes(frontend.metrics.latencies)) as times:
        async with aclosing(frontend.source.generate(add)) as outputs:
            async for output in outputs:
                times.output(output)
                if timeline is not None:
                    timeline.add(output.marks)
                    timeline.wrote(len(output.token_ids), output.choice)
                yield _shown(output, request_id)


def _shown(output: Output, request_id: str) -> GenerateChunk:
    """An output for the client: with the client's request id, and numbers that JSON can express."""
    fields = asdict(output) | {"request_id": request_id}
    del fields["marks"]
    for name in ("logprobs", "prompt_logprobs"):
        if fields[name] is not None:
            fields[name] = tuple(map(floored, fields[name]))
    return GenerateChunk(**fields)


async def whole_response(
    add: AddRequest, request_id: str, chunks: AsyncGenerator[GenerateChunk], limit_s: float
) -> GenerateResponse:
    """All outputs of a request as one answer.

    Raises:
        RequestError: The request did not complete.
        TimeoutError: It took longer than `limit_s` seconds.
    """
    outputs: list[Output] = []
    start = time.monotonic()
    async with asyncio.timeout(limit_s), aclosing(chunks):
        async for chunk in chunks:
            raise_if_failed(chunk, time.monotonic() - start >= add.deadline_s)
            outputs.append(chunk)
    choices = [
        merge_outputs([output for output in outputs if output.choice == index])
        for index in range(add.params.n)
    ]
    prompt, generated = len(add.token_ids), sum(len(output.token_ids) for output in outputs)
    cached = max(output.cached_tokens for output in outputs)
    usage = TokenUsage(prompt, generated, prompt + generated, PromptTokensDetails(cached))
    transfers = (output.kv_transfer_params for output in outputs)
    return GenerateResponse(
        request_id=request_id,
        choices=tuple(
            GenerateChoice(
                index=index,
                token_ids=choice.token_ids,
                logprobs=choice.logprobs,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for index, choice in enumerate(choices)
        ),
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs), None),
        usage=usage,
        kv_transfer_params=next((params for params in transfers if params), None),
    )
