"""``POST /v1/completions``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvbaton.errors import RequestError
from kvbaton.messages import openai
from kvbaton.server.answer import ChunkFormatter, Event, fold, respond
from kvbaton.server.auth import tenant
from kvbaton.server.bodies import made_of_body, read_body
from kvbaton.server.frontend import FRONTEND, Frontend
from kvbaton.server.openapi import contract
from kvbaton.server.validation import (
    check_common,
    encode,
    prompt_request,
    public_id,
    sampling_params,
    split_prompts,
    truncated,
)
from kvbaton.text.grammar_check import checked_grammar
from kvbaton.text.logprobs import Logprobs, completion_logprobs, prompt_logprobs
from kvbaton.text.structured import BODY, joined, wanted
from kvbaton.types import TokenLogprobs

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 512
"""Maximum of prompts times n."""


@contract(body=openai.CompletionRequest, answer=openai.Completion, streams=True)
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one or several prompts."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, openai.CompletionRequest)
    check_common(frontend, body)
    grammar = ""
    asks = await made_of_body(request, wanted, body.response_format, body.structured_outputs)
    if asks is not None:
        name, piece = asks
        grammar = await checked_grammar(joined(f"start: {BODY}", {"body": piece}), name)
    prompts = await encode_prompts(frontend, body)
    request_id = f"cmpl-{public_id(request, body)}"
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo_only = max_tokens == 0 and bool(body.echo)
    scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    params = sampling_params(
        frontend,
        body,
        len(prompts[0]),
        max_tokens=1 if echo_only else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=scored,
        grammar=grammar,
    )
    asked = [
        prompt_request(
            frontend,
            body,
            request_id,
            token_ids,
            params if body.seed is not None else replace(params, seed=random.getrandbits(63)),
            name="prompt",
            tenant=tenant(request),
            index=index,
            echo_only=echo_only,
        )
        for index, token_ids in enumerate(prompts)
    ]
    formatter = CompletionFormatter(frontend, body, request_id, prompts)
    return await respond(request, frontend, asked, formatter)


async def encode_prompts(frontend: Frontend, body: openai.CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        RequestError: There are no prompts, or too many.
    """
    prompts = split_prompts(body.prompt)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise RequestError(f"prompts times n may be at most {MAX_CHOICES}", param="n")
    if body.kv_transfer_params and len(prompts) > 1:
        raise RequestError("a hand-over takes one prompt per request", param="prompt")
    special = body.add_special_tokens is not False
    keep = body.truncate_prompt_tokens
    encoded = [
        await encode(frontend, prompt, add_special_tokens=special, whole=keep is not None)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]
    if keep is None:
        return encoded
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return [truncated(frontend, ids, keep, max_tokens) for ids in encoded]


@dataclass(eq=False)
class CompletionFormatter(ChunkFormatter[openai.CompletionRequest]):
    """Formats events for ``/v1/completions``, where a chunk has the shape of a whole answer."""

    EMPTY_TEXT = b'"text":""'
    OPERATION = "text_completion"

    _offsets: dict[int, int] = field(default_factory=dict, init=False)
    _scores: dict[int, Sequence[TokenLogprobs | None]] = field(default_factory=dict, init=False)

    def chunk(
        self,
        new: Event | None,
        usage: openai.TokenUsage | UnsetType = UNSET,
        timings: openai.RequestTimings | UnsetType = UNSET,
    ) -> openai.Completion:
        """Make a chunk; see `ChunkFormatter`."""
        return self._answer([] if new is None else [new], usage, timings)

    def whole(self, events: Sequence[Event]) -> openai.Completion:
        """Make the whole answer; see `ResponseFormatter`."""
        return self._answer(fold(events), self.counter.usage(), self.times())

    def _answer(
        self,
        events: Sequence[Event],
        usage: openai.TokenUsage | UnsetType,
        timings: openai.RequestTimings | UnsetType,
    ) -> openai.Completion:
        transfers = (new.output.kv_transfer_params for new in events)
        for new in events:  # prompt_logprobs come once per prompt, and every choice shows them
            if new.output.prompt_logprobs is not None:
                self._scores[new.prompt] = new.output.prompt_logprobs
        return openai.Completion(
            **self.head,
            choices=[self._choice(new) for new in events],
            usage=usage,
            kv_transfer_params=next((params for params in transfers if params), UNSET),
            timings=timings,
        )

    def _choice(self, new: Event) -> openai.CompletionChoice:
        delta, body, first, prompt = new.delta, self.body, new.first, self.prompts[new.prompt]
        text, scores = delta.text, self._scores.get(new.prompt)
        if first and body.echo:
            skip = body.skip_special_tokens is not False
            text = self.tokenizer.decode(list(prompt), skip_special_tokens=skip) + text
        shown: Logprobs | UnsetType = UNSET
        if first and body.prompt_logprobs is not None and scores is not None:
            shown = prompt_logprobs(self.tokenizer, prompt, scores)
        return openai.CompletionChoice(
            index=new.choice,
            text=text,
            logprobs=None if body.logprobs is None else self._logprobs(new, scores),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_logprobs=shown,
            token_ids=delta.token_ids if body.return_token_ids else UNSET,
            prompt_token_ids=list(prompt) if body.return_token_ids and first else UNSET,
        )

    def _logprobs(
        self, new: Event, scores: Sequence[TokenLogprobs | None] | None
    ) -> openai.CompletionLogprobs:
        """Log probabilities of new tokens, after those of an echoed prompt."""
        ids = list(new.delta.token_ids)
        entries: list[TokenLogprobs | None] = list(new.delta.logprobs or ())
        if self.body.echo and new.first and scores is not None:
            ids = [*self.prompts[new.prompt], *ids]
            entries = [*scores, *entries]
        offset = self._offsets.get(new.choice, 0)
        as_ids = bool(self.body.return_tokens_as_token_ids)
        result = completion_logprobs(self.tokenizer, ids, entries, offset=offset, as_ids=as_ids)
        if ids:
            last = len(self.tokenizer.token_text(ids[-1]))
            self._offsets[new.choice] = result.text_offset[-1] + last
        return result
