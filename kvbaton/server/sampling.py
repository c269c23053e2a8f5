"""From a request's fields to `SamplingParams`: defaults, ranges, and what is not supported."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from kvbaton.engine.validate import RANGES, Range, check_params
from kvbaton.errors import RequestError
from kvbaton.messages.engine import SamplingParams
from kvbaton.messages.openai import SamplingFields
from kvbaton.server.config import EdgeConfig

SEED_MASK = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_LENGTH = 256

UNSUPPORTED = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "suffix",
    "prompt_embeds",
    "use_beam_search",
    "audio",
    "functions",
    "function_call",
    "web_search_options",
    "chat_template",
    "continue_final_message",
)
COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "n",
    "min_tokens",
    "ignore_eos",
)


def refuse_unsupported(body: SamplingFields) -> None:
    """Name what was asked for and can't be had, rather than ignore it.

    Raises:
        RequestError: 400.
    """
    for name in UNSUPPORTED:
        value = getattr(body, name, None)
        harmless = name == "response_format" and value == {"type": "text"}
        if value not in (None, False, "") and not harmless:
            raise RequestError(f"{name} is not supported", param=name, code="unsupported")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of must equal n", param="best_of", code="unsupported")


def sampling_params(
    body: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The fields that were given, over the model's defaults, over those of `SamplingParams`.

    They are not checked yet.
    """
    named = {name: defaults[name] for name in COPIED if name in defaults}
    named |= {name: getattr(body, name) for name in COPIED if getattr(body, name) is not None}
    return SamplingParams(
        **named,
        seed=body.seed,
        max_tokens=max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def checked(
    params: SamplingParams, config: EdgeConfig, vocab_size: int, *, prefix: str = ""
) -> SamplingParams:
    """Check every value; turns a `top_k` of -1 into 0 and mints a missing seed (63 bits).

    Args:
        params: as sent.
        config: its limits.
        vocab_size: token ids are below it.
        prefix: of the field names in messages (``sampling_params.``).

    Raises:
        RequestError: naming the field and its range.
    """
    seed = secrets.randbits(63) if params.seed is None else params.seed & SEED_MASK
    params = replace(params, seed=seed, top_k=max(params.top_k, 0) if params.top_k >= -1 else -1)
    limits = dict(RANGES, n=Range(1, config.max_n))
    for name in ("logprobs", "prompt_logprobs"):
        limits[name] = Range(0, config.max_logprobs)
    check_params(params, vocab_size, prefix=prefix, limits=limits)
    return params


def check_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The `stop` field as a tuple.

    Raises:
        RequestError: too many, too long, or empty.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop may hold at most {MAX_STOPS} strings", param="stop")
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise RequestError(
            f"stop strings must have 1 to {MAX_STOP_LENGTH} characters", param="stop"
        )
    return stops
