"""`AsyncLLM`: an engine in a child process, for programs that run an event loop.

Parameters and outputs have vLLM's names and shapes.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any, Self, get_type_hints

import msgspec
import numpy as np

from kvbaton.config import flag_of, instead_of
from kvbaton.engine.config import EngineConfig, check_model_folder
from kvbaton.engine.gguf import model_folder
from kvbaton.engine.process import EngineProcess
from kvbaton.engine.validate import INT32, MAX_DEADLINE_S, Range, check_range
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import AddRequest, Item, SamplingParams
from kvbaton.messages.openai import ChatRequest
from kvbaton.server.answer import run_prompts
from kvbaton.server.bodies import malformed
from kvbaton.server.chat import encode_chat
from kvbaton.server.config import GenerationConfigMode, MediaConfig
from kvbaton.server.frontend import Frontend, FrontendConfig, ModelFacts, sampling_defaults
from kvbaton.server.validation import (
    PromptRequest,
    bad_words_token_ids,
    check_prompt,
    check_stops,
    checked,
    encode,
    truncated,
    unique,
)
from kvbaton.text.detokenize import TextOptions
from kvbaton.text.grammar_check import checked_grammar
from kvbaton.text.logprobs import Logprobs, named_logprobs
from kvbaton.text.structured import BODY, StructuredOutputs, joined, wanted
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.types import NodeId


class TextSamplingParams(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of the engine (`SamplingParams`), and of how tokens become text.

    As in vLLM, None is also allowed where it is not the default, and stands for the default.

    Attributes:
        max_tokens: Maximum number of tokens to generate; None for as many as fit the context.
        stop: Strings that end the text.
        include_stop_str_in_output: Keep the stop string, or stop token, in the text.
        skip_special_tokens: Leave special tokens out of the text.
        structured_outputs: Constraint on the text.
        bad_words: Texts that are not generated, with and without a space before them.
        truncate_prompt_tokens: Number of tokens at the prompt's end to keep; -1 keeps as many as
            leave room for `max_tokens`.
    """

    max_tokens: int | None = 16  # type: ignore[assignment]  # the engine always gets a number
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()  # type: ignore[assignment]
    logit_bias: dict[int, float] | None = None  # type: ignore[assignment]
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    bad_words: Sequence[str] | None = ()
    truncate_prompt_tokens: int | None = None

    def for_engine(self, room: int, tokenizer: Tokenizer) -> SamplingParams:
        """Make the engine's parameters.

        Args:
            room: Number of tokens that fit after the prompt, or 1.
            tokenizer: Tokenizer, for `bad_words`.

        Raises:
            ValueError: A field has a wrong type; the message names it.
            RequestError: `structured_outputs` or `bad_words` are wrong.
        """
        said = {name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        fields = {name: value for name, value in said.items() if value is not None}
        if self.max_tokens is None:
            fields["max_tokens"] = room
        bad_words = bad_words_token_ids(tokenizer, self.bad_words or ())
        fields["bad_words_token_ids"] = self.bad_words_token_ids + bad_words
        if (found := wanted(None, self.structured_outputs)) is not None:
            _, piece = found
            fields["grammar"] = joined(f"start: {BODY}", {"body": piece})
        return msgspec.convert(fields, SamplingParams)

    def for_text(self) -> TextOptions:
        """Make the options of detokenization.

        Raises:
            RequestError: `stop` is wrong.
        """
        return TextOptions(
            stop=check_stops(self.stop),
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            min_tokens=self.min_tokens,
        )


@dataclass
class CompletionOutput:
    """One choice, or the new part of it.

    Attributes:
        index: Index of the choice.
        text: Generated text.
        token_ids: Generated tokens, the stop token included.
        logprobs: One per token, if asked for.
        finish_reason: ``stop`` or ``length``; None while the choice goes on.
        stop_reason: The stop string or stop token id that ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log probabilities of `token_ids`; None without `logprobs`."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(named[token].logprob for token, named in pairs if named is not None)

    def finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None

    def append(self, delta: CompletionOutput) -> None:
        """Add a new part of this choice."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *delta.logprobs]
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class RequestOutput:
    """Answer to one prompt, or the new part of it.

    Attributes:
        request_id: Id of the request.
        prompt: Text of the prompt; None if it was given as tokens.
        prompt_token_ids: Tokens of the prompt.
        outputs: The choices; in a delta, the one that has a new part.
        prompt_logprobs: One per prompt token, if asked for.
        num_cached_tokens: Number of prompt tokens from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether all of `outputs` have ended."""
        return all(output.finished() for output in self.outputs)


# --- the engine ---

Message = dict[str, Any]

DEADLINE_S = 7 * 86400.0
"""Deadline in seconds of a request without a `timeout`: a long list of prompts may take long."""


@dataclass(frozen=True)
class Rendered:
    """A conversation rendered as a prompt: its tokens and images."""

    token_ids: list[int]
    items: tuple[Item, ...] = ()


Prompt = str | Sequence[int] | Rendered | dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A checked request, ready to run."""

    request_id: str
    prompt: str | None
    asked: PromptRequest


RENDERED = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Options of a chat for its template."""


def template_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of `AsyncLLM.render` from `options`, and return them."""
    return {name: options.pop(name) for name in RENDERED if name in options}


def _prompt_of(said: dict[str, Any]) -> str | Sequence[int]:
    """Prompt of vLLM's ``TextPrompt`` or ``TokensPrompt``; token ids win over the text.

    Raises:
        RequestError: It has neither, or another key.
    """
    if other := sorted(said.keys() - {"prompt", "prompt_token_ids"}):
        told = "prompts may have prompt or prompt_token_ids only; images come in chats"
        raise RequestError(told, param=other[0])
    ids: Sequence[int] | None = said.get("prompt_token_ids")
    text = said.get("prompt")
    if ids is not None:
        return ids
    if not isinstance(text, str):
        raise RequestError("a prompt needs a text, or prompt_token_ids", param="prompt")
    return text


def _fields(form: type[EngineConfig | MediaConfig], settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a dataclass of settings from `settings`, and return their values.

    Raises:
        ConfigError: A value has the wrong type.
    """
    types, values = get_type_hints(form), dict[str, Any]()
    for name in settings.keys() & form.__dataclass_fields__.keys():
        match settings.pop(name):
            case dict() as value:
                plain: Any = json.dumps(value)
            case os.PathLike() as value:
                plain = os.fspath(value)
            case np.integer() as value:
                plain = int(value)
            case value:
                plain = value
        values[name] = _setting(name, plain, types[name])
    return values


def _setting(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(name, f"{error}: {value!r}") from error


class AsyncLLM:
    """An engine in a child process. Make one with `start`; it is also an async context manager.

    Each request is an async iterator of deltas; leaving it early cancels the request.
    """

    def __init__(self, client: EngineProcess, frontend: Frontend) -> None:
        self._client = client
        self._frontend = frontend

    @classmethod
    async def start(
        cls,
        model: str | Path,
        *,
        chat_template: str | Path | None = None,
        generation_config: GenerationConfigMode = "auto",
        log_level: str = "warning",
        **settings: Any,
    ) -> Self:
        """Load a model and wait until it can generate.

        Args:
            model: A Hugging Face folder, or a GGUF file.
            chat_template: File with a chat template that replaces the model's.
            generation_config: Whether the model's recommended sampling parameters are defaults.
            log_level: Log level of the engine's process.
            settings: Other fields of `EngineConfig` (JSON ones also as dicts) and of `MediaConfig`.

        Raises:
            ConfigError: A setting or the model folder is wrong.
            EngineDeadError: The engine died.
        """
        _setting("generation_config", generation_config, GenerationConfigMode)
        if str(log_level).upper() not in logging.getLevelNamesMapping():
            raise ConfigError("log_level", f"{log_level!r} is no level of a log")
        folder = model_folder(model)
        media = MediaConfig(**_fields(MediaConfig, settings))
        config = EngineConfig(model=folder, **_fields(EngineConfig, settings))
        if settings:
            name = next(iter(settings))
            known = EngineConfig.__dataclass_fields__ | MediaConfig.__dataclass_fields__
            hint = instead_of(flag_of(name), map(flag_of, known))
            raise ConfigError(name, f"the engine has no such setting{hint}")
        check_model_folder(folder)
        tokenizer = Tokenizer.load(folder, chat_template)
        defaults = sampling_defaults(folder, generation_config)
        client = await EngineProcess.start(
            config,
            (),
            node=NodeId("llm", os.urandom(16)),
            log_level=log_level,
        )
        ready = client.ready
        facts = ModelFacts(max_model_len=ready.max_model_len, vocab_size=ready.vocab_size)
        served = FrontendConfig(model_name=str(model), sampling_defaults=defaults, media=media)
        return cls(
            client, Frontend(source=client, tokenizer=tokenizer, config=served, facts=lambda: facts)
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self._frontend.tokenizer

    def default_params(self) -> TextSamplingParams:
        """Parameters of a request without any: the model's defaults."""
        return TextSamplingParams(**self._frontend.config.sampling_defaults)

    async def generate(
        self, prompt: Prompt, sampling_params: TextSamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput]:
        """Continue a prompt.

        Args:
            prompt: A text, token ids, a result of `render`, or vLLM's ``{"prompt": ...}`` or
                ``{"prompt_token_ids": ...}``.
            sampling_params: Sampling parameters; None takes the model's defaults.
            options: `request_id`, `priority`, `cache_salt`, `timeout` (seconds).

        Yields:
            New text and tokens, of one choice at a time.

        Raises:
            RequestError: The request is wrong, or took longer than its timeout.
            EngineDeadError: The engine is gone.
            TypeError: `sampling_params` is not a `SamplingParams`, or there is no such option.
        """
        prepared = await self.prepare(prompt, sampling_params, **options)
        async with aclosing(self.run(prepared)) as deltas:
            async for delta in deltas:
                yield delta

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: TextSamplingParams | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer a conversation; `options` are those of `render` and `generate`."""
        prompt = await self.render(messages, **template_options(options))
        async with aclosing(self.generate(prompt, sampling_params, **options)) as deltas:
            async for delta in deltas:
                yield delta

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Rendered:
        """Render a conversation by the model's chat template; arguments are as in OpenAI's API.

        Raises:
            RequestError: The model has no template, or the conversation does not fit it.
        """
        listed = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not listed or not all(isinstance(message, dict) for message in messages):
            raise RequestError(
                "messages must be a list of {'role': ..., 'content': ...}", param="messages"
            )
        try:
            body = msgspec.convert(
                {
                    "messages": list(messages),
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                    "continue_final_message": continue_final_message,
                    "chat_template_kwargs": chat_template_kwargs,
                },
                ChatRequest,
            )
        except msgspec.ValidationError as error:
            raise malformed(error) from error
        return Rendered(*await encode_chat(self._frontend, body))

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: TextSamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Prepared:
        """Check a request; see `generate`."""
        for name in unknown:
            known = f"request_id, priority, cache_salt, timeout; of chats {', '.join(RENDERED)}"
            raise TypeError(f"there is no option {name!r}; there are: {known}")
        frontend, given = self._frontend, sampling_params or self.default_params()
        if not isinstance(given, TextSamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {type(given).__name__}")
        if isinstance(prompt, dict):
            prompt = _prompt_of(prompt)
        text = prompt if isinstance(prompt, str) else None
        ids, items = list[int](), tuple[Item, ...]()
        if isinstance(prompt, Rendered):
            ids, items = prompt.token_ids, prompt.items
        elif isinstance(prompt, str):
            ids = await encode(frontend, prompt, add_special_tokens=True)
        else:
            try:
                if isinstance(prompt, bytes) or bool in set(map(type, prompt)):
                    raise TypeError
                ids = [index(token) for token in prompt]  # also NumPy integers
            except TypeError:
                problem = "a prompt must be a text, or token ids"
                raise RequestError(problem, param="prompt") from None
        facts = frontend.facts()
        ids = truncated(frontend, ids, given.truncate_prompt_tokens, given.max_tokens, items)
        room = max(1, facts.max_model_len - len(ids))
        engine_params = given.for_engine(room, frontend.tokenizer)
        if sampling_params is None:  # nobody asked for as many
            most = min(room, engine_params.max_tokens)
            engine_params = msgspec.structs.replace(engine_params, max_tokens=most)
        params = checked(engine_params, facts.vocab_size)
        if params.grammar:
            field = "grammar" if given.structured_outputs is None else "structured_outputs"
            await checked_grammar(params.grammar, field)
        check_range("priority", priority, Range(-INT32, INT32))
        if timeout is not None:
            check_range("timeout", timeout, Range(0, MAX_DEADLINE_S, open=True))
        request_id = request_id or secrets.token_hex(8)
        request = AddRequest(
            request_id=unique(request_id),
            token_ids=check_prompt(facts, ids, params.max_tokens, "prompt"),
            params=params,
            priority=priority,
            cache_salt=cache_salt or "",
            deadline_s=DEADLINE_S if timeout is None else timeout,
            items=items,
        )
        asked = PromptRequest(index=0, request=request, options=given.for_text())
        return Prepared(request_id, text, asked)

    async def run(self, prepared: Prepared) -> AsyncGenerator[RequestOutput]:
        """Run a request that `prepare` has checked, and yield its deltas."""
        ids = list(prepared.asked.request.token_ids)
        async with aclosing(run_prompts(self._frontend, [prepared.asked])) as events:
            async for event in events:
                delta, scores = event.delta, event.output.prompt_logprobs
                logprobs = None
                if delta.logprobs is not None:
                    logprobs = named_logprobs(self.tokenizer, delta.token_ids, delta.logprobs)
                choice = CompletionOutput(
                    index=event.choice,
                    text=delta.text,
                    token_ids=delta.token_ids,
                    logprobs=logprobs,
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
                yield RequestOutput(
                    request_id=prepared.request_id,
                    prompt=prepared.prompt,
                    prompt_token_ids=ids,
                    outputs=[choice],
                    prompt_logprobs=named_logprobs(self.tokenizer, ids, scores) if scores else None,
                    num_cached_tokens=event.output.cached_tokens,
                )

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; return whether that was possible, which it always is."""
        await self._client.command("reset_prefix_cache")
        return True

    async def shutdown(self, grace_s: float = 0.0) -> None:
        """End the engine; running requests get `grace_s` seconds. Idempotent."""
        await self._client.shutdown(grace_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()
