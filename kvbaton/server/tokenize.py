"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

from aiohttp import web

from kvbaton.engine.validate import INT32, check_ids
from kvbaton.errors import RequestError
from kvbaton.messages.openai import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from kvbaton.server.bodies import json_response, read_body
from kvbaton.server.chat import encode_chat
from kvbaton.server.frontend import FRONTEND
from kvbaton.server.openapi import contract
from kvbaton.server.validation import check_model, encode


@contract(body=TokenizeRequest, answer=TokenizeResponse)
async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or a conversation."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, TokenizeRequest)
    check_model(frontend, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.prompt is None:
        ids, _ = await encode_chat(frontend, body)
    else:
        special = body.add_special_tokens is not False
        ids = await encode(frontend.tokenizer, body.prompt, add_special_tokens=special)
    texts = [frontend.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    return json_response(
        TokenizeResponse(
            count=len(ids),
            max_model_len=frontend.facts().max_model_len,
            tokens=ids,
            token_strs=texts,
        )
    )


@contract(body=DetokenizeRequest, answer=DetokenizeResponse)
async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids, special tokens included."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, DetokenizeRequest)
    check_model(frontend, body.model)
    check_ids("tokens", body.tokens, frontend.limits().vocab_size, most=INT32)
    text = frontend.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(prompt=text))
