"""Fields that both generating endpoints read the same way."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web
from msgspec import UNSET, UnsetType

from kvbaton.errors import RequestError
from kvbaton.messages.openai import SamplingFields
from kvbaton.server.config import Frontend
from kvbaton.server.request_id import HEADER, REQUEST_ID, clean
from kvbaton.server.sampling import check_stops, refuse_unsupported
from kvbaton.text.choice import TextOptions

T = TypeVar("T")


def check_common(frontend: Frontend, body: SamplingFields) -> None:
    """Refuse what no prompt could make right.

    Raises:
        RequestError: another model, something unsupported, or options that exclude each other.
    """
    check_model(frontend, body.model)
    refuse_unsupported(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs can't be streamed", param="prompt_logprobs")


def check_model(frontend: Frontend, model: str | None) -> None:
    """Raise `RequestError` (404) for any model but the one that is served."""
    served = frontend.config.model_name
    if model is not None and model != served:
        raise RequestError(
            f"the model {model[:256]!r} does not exist; this endpoint serves {served!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def public_id(request: web.Request, body: SamplingFields) -> str:
    """The header's id, else the body's, else the one that was made."""
    named = None if HEADER in request.headers else clean(body.request_id)
    if named is not None:
        request[REQUEST_ID] = named
    return request[REQUEST_ID]


def text_options(body: SamplingFields) -> TextOptions:
    """How the request wants its tokens as text.

    Raises:
        RequestError: `stop` is wrong.
    """
    return TextOptions(
        stop=check_stops(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )


def unset_unless(value: T | None) -> T | UnsetType:
    """Leave a field out of the answer when there is nothing to say."""
    return UNSET if value is None else value
