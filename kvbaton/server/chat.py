"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from kvbaton.errors import RequestError
from kvbaton.messages.engine import Item
from kvbaton.messages.openai import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    TokenizeRequest,
    Usage,
)
from kvbaton.server.answer import respond
from kvbaton.server.body import read_body
from kvbaton.server.config import FRONTEND, Frontend
from kvbaton.server.fields import check_common, public_id, text_options, unset_unless
from kvbaton.server.images import load_images
from kvbaton.server.openapi import contract
from kvbaton.server.prompt_request import Event, PromptRequest, check_prompt, make_request
from kvbaton.server.prompts import encode
from kvbaton.server.sampling import checked, sampling_params
from kvbaton.server.sse import ChunkFrame, event
from kvbaton.text.chat import ImageUrl, normalize_messages
from kvbaton.text.logprobs import chat_logprobs, prompt_logprobs


@contract(body=ChatRequest, answer=ChatCompletion, streams=True)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, ChatRequest)
    check_common(frontend, body)
    _check_chat(body)
    request_id = f"chatcmpl-{public_id(request, body)}"
    prompt, items = await encode_chat(frontend, body)
    asked = _prompt_request(frontend, body, request_id, prompt, items)
    formatter = ChatFormatter(frontend, body, request_id, prompt)
    return await respond(request, frontend, body, [asked], formatter)


async def encode_chat(
    frontend: Frontend, body: ChatRequest | TokenizeRequest
) -> tuple[list[int], tuple[Item, ...]]:
    """Token ids of a conversation, and its images; its special tokens come from the template.

    Raises:
        RequestError: the model has no template, the messages do not fit it, or an image is wrong.
    """
    template = frontend.tokenizer.chat_template
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions", param="messages")
    vision, images = frontend.tokenizer.vision, list[ImageUrl]()
    text = template.render(
        normalize_messages(body.messages or [], None if vision is None else images),
        tools=body.tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
    )
    special = bool(body.add_special_tokens)
    ids = await encode(frontend.tokenizer, text, add_special_tokens=special)
    if vision is None:
        return ids, ()
    return vision.expand(ids, await load_images(images, vision, frontend.config.media))


def _check_chat(body: ChatRequest) -> None:
    if body.tools and body.tool_choice != "none":
        raise RequestError(
            'tool calls are not parsed; with tool_choice "none" the tools are shown to the model',
            param="tool_choice",
            code="unsupported",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise RequestError("tool_choice needs tools", param="tool_choice", code="unsupported")
    if body.modalities not in (None, ["text"]):
        raise RequestError("only text is generated", param="modalities", code="unsupported")
    if body.echo:
        raise RequestError("echo is for /v1/completions", param="echo", code="unsupported")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")


def _prompt_request(
    frontend: Frontend,
    body: ChatRequest,
    request_id: str,
    prompt: list[int],
    items: tuple[Item, ...],
) -> PromptRequest:
    given = body.max_completion_tokens
    given = body.max_tokens if given is None else given
    defaults = frontend.config.sampling_defaults
    max_tokens = check_prompt(frontend, prompt, given, "messages")
    if given is None:
        max_tokens = min(max_tokens, defaults.get("max_tokens", max_tokens))
    params = sampling_params(
        body,
        defaults,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    params = checked(params, frontend.config, frontend.vocab_size)
    transfer = frontend.transfer(body.kv_transfer_params)
    return PromptRequest(
        index=0,
        request=make_request(frontend, body, request_id, prompt, params, transfer, items),
        options=text_options(body),
    )


class ChatFormatter:
    """Formats events for ``/v1/chat/completions``; see `ResponseFormatter`.

    Args:
        frontend: for the tokenizer and the model's name.
        body: the request.
        request_id: of the answer.
        prompt: its token ids.
    """

    def __init__(
        self, frontend: Frontend, body: ChatRequest, request_id: str, prompt: list[int]
    ) -> None:
        self._tokenizer = frontend.tokenizer
        self._model = frontend.config.model_name
        self._body = body
        self._id = request_id
        self._prompt = prompt
        self._created = int(time.time())
        self._frame = ChunkFrame(self._chunk([]))

    def chunk(self, new: Event, usage: Usage | None) -> bytes:
        """One event of a stream; the first of a choice also names the role."""
        delta, first = new.delta, new.first
        choice = ChatChunkChoice(
            index=new.choice,
            delta=ChatMessage(role="assistant" if first else UNSET, content=delta.text),
            logprobs=self._logprobs(new) if self._body.logprobs else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
            token_ids=delta.token_ids if self._body.return_token_ids else UNSET,
        )
        ids = self._prompt_ids() if first else UNSET
        if usage is None and ids is UNSET and new.kv_transfer_params is None:
            return self._frame.event(choice)
        chunk = self._chunk([choice])
        chunk.usage, chunk.prompt_token_ids = unset_unless(usage), ids
        chunk.kv_transfer_params = unset_unless(new.kv_transfer_params)
        return event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """No choices, only usage."""
        chunk = self._chunk([])
        chunk.usage = usage
        return chunk

    def whole(self, events: Sequence[Event], usage: Usage) -> ChatCompletion:
        """All choices at once."""
        transfer = next((e.kv_transfer_params for e in events if e.kv_transfer_params), None)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(event) for event in events],
            usage=usage,
            prompt_logprobs=self._prompt_logprobs(events),
            prompt_token_ids=self._prompt_ids(),
            kv_transfer_params=unset_unless(transfer),
        )

    def _choice(self, event: Event) -> ChatChoice:
        return ChatChoice(
            index=event.choice,
            message=ChatMessage(role="assistant", content=event.delta.text),
            logprobs=self._logprobs(event) if self._body.logprobs else None,
            finish_reason=event.delta.finish_reason,
            stop_reason=event.delta.stop_reason,
            token_ids=event.delta.token_ids if self._body.return_token_ids else UNSET,
        )

    def _prompt_ids(self) -> list[int] | UnsetType:
        return self._prompt if self._body.return_token_ids else UNSET

    def _logprobs(self, event: Event) -> ChatLogprobs:
        return chat_logprobs(self._tokenizer, event.delta.token_ids, event.delta.logprobs or ())

    def _prompt_logprobs(self, events: Sequence[Event]) -> list[dict[str, Any] | None] | UnsetType:
        scores = next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None)
        if scores is None:
            return UNSET
        return prompt_logprobs(self._tokenizer, self._prompt, scores)
