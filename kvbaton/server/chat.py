"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence

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
    RequestTimings,
    TokenizeRequest,
    TokenUsage,
)
from kvbaton.server.answer import Event, ResponseFormatter, respond
from kvbaton.server.auth import tenant
from kvbaton.server.bodies import read_body
from kvbaton.server.frontend import FRONTEND, Frontend
from kvbaton.server.images import load_images
from kvbaton.server.openapi import contract
from kvbaton.server.validation import check_common, encode, prompt_request, public_id
from kvbaton.text.chat import ImageUrl, normalize_messages
from kvbaton.text.logprobs import chat_logprobs, prompt_logprobs


@contract(body=ChatRequest, answer=ChatCompletion, streams=True)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, ChatRequest)
    check_common(frontend, body)
    check_chat(body)
    request_id = f"chatcmpl-{public_id(request, body)}"
    prompt, items = await encode_chat(frontend, body)
    given = body.max_completion_tokens
    asked = prompt_request(
        frontend,
        body,
        request_id,
        prompt,
        name="messages",
        max_tokens=body.max_tokens if given is None else given,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        items=items,
        tenant=tenant(request),
    )
    formatter = ChatFormatter(frontend, body, request_id, [prompt])
    return await respond(request, frontend, [asked], formatter)


def check_chat(body: ChatRequest) -> None:
    """Refuse what only conversations can ask for, and can't have here.

    Raises:
        RequestError: naming the field.
    """
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


class ChatFormatter(ResponseFormatter[ChatRequest]):
    """Formats events for ``/v1/chat/completions``; the first chunk of a choice names the role."""

    EMPTY_TEXT = b'"content":""'
    OPERATION = "chat"

    def chunk(self, new: Event, usage: TokenUsage | None) -> ChatChunk:
        """See `ResponseFormatter`."""
        delta, first = new.delta, new.first
        choice = ChatChunkChoice(
            index=new.choice,
            delta=ChatMessage(role="assistant" if first else UNSET, content=delta.text),
            logprobs=self._logprobs(new),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
            token_ids=self._ids(delta.token_ids),
        )
        return ChatChunk(
            **self.head,
            choices=[choice],
            usage=UNSET if usage is None else usage,
            prompt_token_ids=self._ids(self.prompts[0]) if first else UNSET,
            kv_transfer_params=new.output.kv_transfer_params or UNSET,
        )

    def last_chunk(
        self, usage: TokenUsage | UnsetType, timings: RequestTimings | UnsetType
    ) -> ChatChunk:
        """See `ResponseFormatter`."""
        return ChatChunk(**self.head, choices=[], usage=usage, timings=timings)

    def whole(self, events: Sequence[Event], usage: TokenUsage) -> ChatCompletion:
        """See `ResponseFormatter`."""
        prompt, outputs = self.prompts[0], [new.output for new in events]
        scores = (o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None)
        transfers = (o.kv_transfer_params for o in outputs if o.kv_transfer_params)
        choices = [
            ChatChoice(
                index=new.choice,
                message=ChatMessage(role="assistant", content=new.delta.text),
                logprobs=self._logprobs(new),
                finish_reason=new.delta.finish_reason,
                stop_reason=new.delta.stop_reason,
                token_ids=self._ids(new.delta.token_ids),
            )
            for new in events
        ]
        return ChatCompletion(
            **self.head,
            choices=choices,
            usage=usage,
            prompt_logprobs=next(
                (prompt_logprobs(self.tokenizer, prompt, found) for found in scores), UNSET
            ),
            prompt_token_ids=self._ids(prompt),
            kv_transfer_params=next(transfers, UNSET),
            timings=self.times(),
        )

    def _ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self.body.return_token_ids else UNSET

    def _logprobs(self, new: Event) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.tokenizer, new.delta.token_ids, new.delta.logprobs or ())
