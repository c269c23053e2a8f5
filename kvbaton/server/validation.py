"""Turns a request's fields into a request to the source of tokens: defaults, ranges, refusals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import get_type_hints

from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from kvbaton.engine.validate import INT32, RANGES, Range, check_ids, check_params, check_range
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item, SamplingParams
from kvbaton.messages.openai import ChatRequest, Refused, SamplingFields
from kvbaton.server.bodies import REQUEST_ID, REQUEST_ID_HEADER, clean
from kvbaton.server.frontend import Frontend, ModelFacts
from kvbaton.server.timeline import RequestTimeline
from kvbaton.text.detokenize import TextOptions
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.types import TokenIds

SEED_MASK = 2**63 - 1
LONG_TOKEN = 16
"""Characters per token, more than nearly all tokens have."""
MAX_TIMEOUT_S = 3600.0
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_SALT = 4096
MAX_BAD_WORDS = 1024
LIMITS = {
    **RANGES,
    "n": Range(1, 128),
    "logprobs": Range(0, 20),
    "prompt_logprobs": Range(0, 20),
}
"""Valid ranges of clients' fields of `SamplingParams`."""
NOT_STORED = "no response is stored here, so pass what was said before as input"
GIVE = 'give structured_outputs {{"{}": ...}}'

HINTS = {
    "previous_response_id": NOT_STORED,
    "conversation": NOT_STORED,
    "output_format": "give output_config.format",
    "guided_json": GIVE.format("json"),
    "guided_regex": GIVE.format("regex"),
    "guided_choice": GIVE.format("choice"),
    "guided_grammar": GIVE.format("grammar"),
    "regex": GIVE.format("regex"),
    "ebnf": GIVE.format("grammar"),
    "json_schema": GIVE.format("json"),
}
"""By field that is not supported: what to do instead."""


def refused(kind: type[Struct]) -> tuple[str, ...]:
    """The fields of a request that are known and not supported."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(name for name, hint in hints.items() if hint == Refused)


UNSUPPORTED = refused(ChatRequest)
COPIED = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "n", "min_tokens", "ignore_eos",
)  # fmt: skip

Prompt = str | list[int]


class PromptRequest(Struct, frozen=True, kw_only=True):
    """One prompt of a client's request.

    Attributes:
        index: Index of the prompt in the request.
        request: Request to the source.
        options: How its tokens become text.
        echo_only: Only the prompt is wanted; the token that the source must generate is dropped.
        timeline: Records the prompt's times, if the request is timed; else None.
    """

    index: int
    request: AddRequest
    options: TextOptions
    echo_only: bool = False
    timeline: RequestTimeline | None = None


# --- the request ---


def check_common(frontend: Frontend, body: SamplingFields) -> None:
    """Check the fields that are wrong for any prompt.

    Raises:
        RequestError: Another model, an unsupported field, or fields that exclude each other.
    """
    check_model(frontend, body.model)
    check_refused(body, UNSUPPORTED)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of must equal n", param="best_of", code="unsupported")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs can't be streamed", param="prompt_logprobs")


def check_refused(body: Struct, names: Sequence[str]) -> None:
    """Check that unsupported fields ask for nothing.

    Raises:
        RequestError: An unsupported field has a value; the error names it.
    """
    for name in names:
        value = getattr(body, name, None)
        harmless = value is None or value is False or value in ("", [])
        if not harmless:
            hint = f": {HINTS[name]}" if name in HINTS else ""
            raise RequestError(f"{name} is not supported{hint}", param=name, code="unsupported")


def check_model(frontend: Frontend, model: str | None) -> None:
    """Raise `RequestError` (404) for any model except the served one."""
    served, aliases = frontend.config.model_name, frontend.config.aliases
    if model is not None and model != served and model not in aliases:
        raise RequestError(
            f"the model {model[:256]!r} does not exist; this endpoint serves {served!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def public_id(request: web.Request, body: SamplingFields) -> str:
    """Request id from the header, else from the body, else the generated one."""
    if body.request_id is not None and REQUEST_ID_HEADER not in request.headers:
        request[REQUEST_ID] = clean(body.request_id) or request[REQUEST_ID]
    return request[REQUEST_ID]


def unique(request_id: str) -> str:
    """Make a request id unique: clients may repeat one, a source must not get one twice."""
    return f"{request_id}-{random.getrandbits(32):08x}"


def deadline(frontend: Frontend, timeout: float | None, name: str = "timeout") -> float:
    """Seconds that a request may take.

    Raises:
        RequestError: The client's timeout is 0 or less, or too long.
    """
    if timeout is None:
        return frontend.config.timeout_s
    check_range(name, timeout, Range(0, MAX_TIMEOUT_S, open=True))
    return timeout


# --- its prompts ---


def split_prompts(prompt: str | Sequence[str | int | list[int]]) -> list[Prompt]:
    """Split the field `prompt`, which is a text, texts, token ids, or lists of token ids.

    Raises:
        RequestError: It is empty, too long, or a meaningless mixture.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [list(prompt)]  # type: ignore[arg-type]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if int in kinds or not prompts:
        raise RequestError(
            "prompt must be a text, a list of texts, a list of token ids or a list of such lists",
            param="prompt",
        )
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt may hold at most {MAX_PROMPTS} prompts", param="prompt")
    return prompts


async def encode(
    frontend: Frontend,
    text: str,
    *,
    add_special_tokens: bool,
    name: str = "prompt",
    whole: bool = True,
) -> list[int]:
    """Tokenize a text; a long one in a thread, so that other streams go on.

    Args:
        frontend: The endpoint, for tokenizer and context length.
        text: The prompt.
        add_special_tokens: Whether to add the model's own start and end tokens.
        name: Name of the field that has the text.
        whole: Whether to tokenize a text of any length, which may take seconds. Otherwise a text
            far longer than the model's context is judged by its beginning first.

    Raises:
        RequestError: The beginning alone is twice as long as the context, or the text is not valid
            Unicode.
    """
    tokenizer = frontend.tokenizer
    try:
        if len(text) <= tokenizer.quick_characters:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        most = frontend.facts().max_model_len
        begin = text[: most * LONG_TOKEN]
        if not whole and len(begin) < len(text):
            found = await asyncio.to_thread(tokenizer.encode, begin, add_special_tokens=False)
            if len(found) > 2 * most:
                raise RequestError(
                    f"this model's maximum context length is {most} tokens, and the prompt is too "
                    f"long: of its {len(text)} characters the first {len(begin)} alone have "
                    f"{len(found)}",
                    param=name,
                    code="context_length_exceeded",
                )
        return await asyncio.to_thread(
            tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
    except UnicodeEncodeError as error:
        raise RequestError(f"a prompt must be Unicode: {error}", param=name) from None


def bad_words_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Tokenize the field `bad_words`: each word at the start of a text, and after a space.

    Raises:
        RequestError: Too many words, or a word is too long or only white space.
    """
    if isinstance(words, str) or len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words must be a list of {MAX_BAD_WORDS} texts at most", param="bad_words"
        )
    found = dict[tuple[int, ...], None]()
    for word in words:
        if not isinstance(word, str) or not 0 < len(word.lstrip()) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"bad words must be texts of 1 to {MAX_STOP_LENGTH} characters beside white space",
                param="bad_words",
            )
        for text in (word.lstrip(), f" {word.lstrip()}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)


def truncated(
    frontend: Frontend,
    ids: list[int],
    keep: int | None,
    max_tokens: int | None,
    items: Sequence[Item] = (),
) -> list[int]:
    """Keep the last tokens of a prompt, as the field `truncate_prompt_tokens` says.

    Raises:
        RequestError: The field is neither -1 nor a length within the context, or there are images.
    """
    if keep is None:
        return ids
    if items:
        raise RequestError("prompts with images stay whole", param="truncate_prompt_tokens")
    most = frontend.facts().max_model_len
    if keep == -1:
        new = max_tokens or frontend.config.sampling_defaults.get("max_tokens", 1)
        return ids[-max(1, most - new) :]
    if not isinstance(keep, int) or not 1 <= keep <= most:  # from Python it may have any type
        name, allowed = "truncate_prompt_tokens", f"-1, for as many as fit, or in [1, {most}]"
        raise RequestError(f"{name} must be {allowed}", param=name)
    return ids[-keep:]


def check_prompt(facts: ModelFacts, ids: Sequence[int], max_tokens: int, name: str) -> TokenIds:
    """Check a prompt against the model, and return it in the engine's type.

    Raises:
        RequestError: It is empty, has unknown ids, or is too long together with `max_tokens`.
    """
    if not ids:
        raise RequestError(f"{name} has no tokens", param=name)
    found = check_ids(name, ids, facts.vocab_size, most=INT32)
    if len(ids) + max_tokens > (most := facts.max_model_len):
        # Clients (LiteLLM, Claude Code) shorten a prompt, or ask for less, by these words.
        why = "input length and `max_tokens` exceed context limit: "
        why += f"{len(ids)} + {max_tokens} > {most}"
        if len(ids) >= most:
            why = f"the prompt is too long: {len(ids)} tokens > {most} maximum"
        raise RequestError(
            f"this model's maximum context length is {most} tokens; {why}",
            param=name,
            code="context_length_exceeded",
        )
    return found


def sampling_params(
    frontend: Frontend,
    body: SamplingFields,
    num_tokens: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str,
) -> SamplingParams:
    """Sampling parameters for a prompt: the fields of the request, else the model's defaults.

    Args:
        frontend: The endpoint.
        body: The request.
        num_tokens: Number of tokens of the prompt.
        max_tokens: Maximum number of tokens to generate; None takes the model's default, or as many
            as fit.
        logprobs: Number of candidates per generated token; None for no log probabilities.
        prompt_logprobs: Number of candidates per prompt token; None for no log probabilities.
        grammar: Grammar that the text must follow; empty for none.

    Raises:
        RequestError: A field is out of range.
    """
    facts, defaults = frontend.facts(), frontend.config.sampling_defaults
    if max_tokens is None:
        room = max(1, facts.max_model_len - num_tokens)
        max_tokens = min(room, defaults.get("max_tokens", room))
    given = ((field, getattr(body, field)) for field in COPIED)
    named = {field: defaults.get(field) if value is None else value for field, value in given}
    params = SamplingParams(
        **{field: value for field, value in named.items() if value is not None},
        seed=body.seed,
        max_tokens=max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words_token_ids=bad_words_token_ids(frontend.tokenizer, body.bad_words)
        if body.bad_words
        else (),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
    return checked(params, facts.vocab_size)


def prompt_request(
    frontend: Frontend,
    body: SamplingFields,
    request_id: str,
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    name: str,
    tenant: str,
    index: int = 0,
    items: tuple[Item, ...] = (),
    echo_only: bool = False,
) -> PromptRequest:
    """Make the request to the source for one prompt.

    Args:
        frontend: The endpoint.
        body: The request.
        request_id: Id in the answer.
        token_ids: The prompt.
        params: Result of `sampling_params`.
        name: Name of the field that has the prompt.
        tenant: Tenant of the request.
        index: Index of the prompt in the request.
        items: Images of the prompt.
        echo_only: See `PromptRequest`.

    Raises:
        RequestError: A field is out of range, or the prompt does not fit the model.
    """
    prompt = check_prompt(frontend.facts(), token_ids, params.max_tokens, name)
    if body.priority:
        frontend.config.check_priority(body.priority)
    if len(body.cache_salt or "") > MAX_SALT:
        raise RequestError(f"cache_salt may have at most {MAX_SALT} characters", param="cache_salt")
    transfer, prefix = frontend.transfer(body.kv_transfer_params)
    return PromptRequest(
        index=index,
        request=AddRequest(
            request_id=unique(request_id),
            token_ids=prompt,
            params=params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            deadline_s=deadline(frontend, body.timeout),
            transfer=transfer,
            items=items,
            tenant=tenant,
            prefix=prefix,
        ),
        options=TextOptions(
            stop=check_stops(body.stop),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
        ),
        echo_only=echo_only,
    )


def checked(params: SamplingParams, vocab_size: int, *, prefix: str = "") -> SamplingParams:
    """Check every value, and choose a missing seed (63 bits).

    A `top_k` of -1 becomes 0, and a `top_p` of 0, which OpenAI allows, a temperature of 0.

    Args:
        params: Parameters as sent.
        vocab_size: Number of token ids.
        prefix: Prefix of field names in errors (``sampling_params.``).

    Raises:
        RequestError: A value is out of range; the error names the field and its range.
    """
    seed = random.getrandbits(63) if params.seed is None else params.seed & SEED_MASK
    likeliest = params.top_p == 0
    top_k, top_p = 0 if params.top_k == -1 else params.top_k, 1.0 if likeliest else params.top_p
    params = replace(params, seed=seed, top_k=top_k, top_p=top_p)
    check_params(params, vocab_size, prefix=prefix, limits=LIMITS)
    return replace(params, temperature=0.0) if likeliest else params


def check_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The `stop` field as a tuple.

    Raises:
        RequestError: Too many strings, or one is too long or empty; or, from Python, not a text.
    """
    stops = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) for text in stops):
        raise RequestError("stop must be a text or a list of texts", param="stop")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop may hold at most {MAX_STOPS} strings", param="stop")
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise RequestError(
            f"stop strings must have 1 to {MAX_STOP_LENGTH} characters", param="stop"
        )
    return tuple(stops)
