"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from kvbaton.errors import RequestError
from kvbaton.messages.openai import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from kvbaton.server.answer import respond
from kvbaton.server.body import read_body
from kvbaton.server.config import FRONTEND, Frontend
from kvbaton.server.fields import check_common, public_id, text_options, unset_unless
from kvbaton.server.openapi import contract
from kvbaton.server.prompt_request import Event, PromptRequest, check_prompt, make_request
from kvbaton.server.prompts import encode, split_prompts
from kvbaton.server.sampling import checked, sampling_params
from kvbaton.server.sse import ChunkFrame, event
from kvbaton.text.logprobs import completion_logprobs, prompt_logprobs
from kvbaton.types import TokenLogprobs

DEFAULT_MAX_TOKENS = 16


@contract(body=CompletionRequest, answer=Completion, streams=True)
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one or several prompts."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, CompletionRequest)
    check_common(frontend, body)
    prompts = await _prompts(frontend, body)
    request_id = f"cmpl-{public_id(request, body)}"
    asked = [_prompt_request(frontend, body, request_id, i, ids) for i, ids in enumerate(prompts)]
    formatter = CompletionFormatter(frontend, body, request_id, prompts)
    return await respond(request, frontend, body, asked, formatter)


async def _prompts(frontend: Frontend, body: CompletionRequest) -> list[list[int]]:
    config = frontend.config
    prompts = split_prompts(body.prompt, config.max_prompts)
    if len(prompts) * (body.n or 1) > config.max_choices:
        raise RequestError(f"prompts times n may be at most {config.max_choices}", param="n")
    if body.kv_transfer_params and len(prompts) > 1:
        raise RequestError("a hand-over takes one prompt per request", param="prompt")
    special = body.add_special_tokens is not False
    return [
        await encode(frontend.tokenizer, prompt, add_special_tokens=special)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


def _prompt_request(
    frontend: Frontend, body: CompletionRequest, request_id: str, index: int, ids: list[int]
) -> PromptRequest:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo_only = max_tokens == 0 and bool(body.echo)
    max_tokens = 1 if echo_only else max_tokens
    scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    params = sampling_params(
        body,
        frontend.config.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=scored,
    )
    params = checked(params, frontend.config, frontend.vocab_size)
    check_prompt(frontend, ids, max_tokens, "prompt")
    transfer = frontend.transfer(body.kv_transfer_params)
    return PromptRequest(
        index=index,
        request=make_request(frontend, body, request_id, ids, params, transfer),
        options=text_options(body),
        echo_only=echo_only,
    )


class CompletionFormatter:
    """Formats events for ``/v1/completions``; see `ResponseFormatter`.

    Args:
        frontend: for the tokenizer and the model's name.
        body: the request.
        request_id: of the answer.
        prompts: token ids of each.
    """

    def __init__(
        self,
        frontend: Frontend,
        body: CompletionRequest,
        request_id: str,
        prompts: Sequence[list[int]],
    ) -> None:
        self._tokenizer = frontend.tokenizer
        self._model = frontend.config.model_name
        self._body = body
        self._id = request_id
        self._prompts = prompts
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}
        self._scores: dict[int, Sequence[TokenLogprobs | None]] = {}
        self._frame = ChunkFrame(self._answer([], None))

    def chunk(self, new: Event, usage: Usage | None) -> bytes:
        """One event of a stream."""
        plain = usage is None and new.kv_transfer_params is None and new.prompt_logprobs is None
        return self._frame.event(self._choice(new)) if plain else event(self._answer([new], usage))

    def usage_chunk(self, usage: Usage) -> Completion:
        """No choices, only usage."""
        return self._answer([], usage)

    def whole(self, events: Sequence[Event], usage: Usage) -> Completion:
        """All choices at once."""
        return self._answer(events, usage)

    def _answer(self, events: Sequence[Event], usage: Usage | None) -> Completion:
        transfer = next((e.kv_transfer_params for e in events if e.kv_transfer_params), None)
        scores = {e.prompt: e.prompt_logprobs for e in events if e.prompt_logprobs is not None}
        self._scores.update(scores)  # they come once per prompt, and every choice shows them
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(event) for event in events],
            usage=usage if usage is not None else UNSET,
            kv_transfer_params=unset_unless(transfer),
        )

    def _choice(self, event: Event) -> CompletionChoice:
        delta, body, first = event.delta, self._body, event.first
        ids = body.return_token_ids
        return CompletionChoice(
            index=event.choice,
            text=self._echo(event) + delta.text if first and body.echo else delta.text,
            logprobs=None if body.logprobs is None else self._logprobs(event),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_logprobs=self._prompt_scores(event) if first else UNSET,
            token_ids=delta.token_ids if ids else UNSET,
            prompt_token_ids=self._prompts[event.prompt] if ids and first else UNSET,
        )

    def _prompt_scores(self, event: Event) -> list[dict[str, Any] | None] | UnsetType:
        scores = self._scores.get(event.prompt)
        if self._body.prompt_logprobs is None or scores is None:
            return UNSET
        return prompt_logprobs(self._tokenizer, self._prompts[event.prompt], scores)

    def _echo(self, event: Event) -> str:
        skip = self._body.skip_special_tokens is not False
        return self._tokenizer.decode(self._prompts[event.prompt], skip_special_tokens=skip)

    def _logprobs(self, event: Event) -> CompletionLogprobs:
        ids = list(event.delta.token_ids)
        entries: list[TokenLogprobs | None] = list(event.delta.logprobs or ())
        scores = self._scores.get(event.prompt)
        if self._body.echo and event.first and scores is not None:
            ids = [*self._prompts[event.prompt], *ids]
            entries = [*scores, *entries]
        result = completion_logprobs(
            self._tokenizer, ids, entries, offset=self._offsets.get(event.choice, 0)
        )
        if result.tokens:
            self._offsets[event.choice] = result.text_offset[-1] + len(result.tokens[-1])
        return result
