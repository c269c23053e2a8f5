"""`LLM`: lists of prompts in, lists of answers out."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from tqdm import tqdm

from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.llm.streaming import (
    AsyncLLM,
    CompletionOutput,
    Message,
    Prepared,
    Prompt,
    Rendered,
    RequestOutput,
    TextSamplingParams,
    template_options,
)
from kvbaton.text.tokenizer import Tokenizer

T = TypeVar("T")
Params = TextSamplingParams | Sequence[TextSamplingParams] | None

SAVES_S = 5.0
"""Seconds at the end for saves to a store, so that the next engine finds the blocks there."""
STOP_S = 20.0


class LLM:
    """An engine in a child process, for synchronous code.

    No client waits for single tokens, so `max_num_mixed_tokens` defaults to
    `max_num_batched_tokens`.

    Args:
        model: A Hugging Face folder, or a GGUF file.
        settings: See `AsyncLLM.start`.

    Raises:
        ConfigError: A setting or the model folder is wrong.
        EngineDeadError: The engine died.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self._loop, self._process = asyncio.new_event_loop(), os.getpid()
        thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        thread.start()
        self._started: list[AsyncLLM] = []  # one, or none yet
        # Also runs when the object is garbage, and when the interpreter ends.
        ending = self._process, self._loop, thread, self._started
        self.close = weakref.finalize(self, _stop, *ending)
        try:
            settings = {"max_num_mixed_tokens": sys.maxsize, **settings}
            self._started.append(self._wait(AsyncLLM.start(model, **settings)))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue prompts, all at the same time.

        Args:
            prompts: A text, token ids, vLLM's ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``,
                or a list of these.
            sampling_params: For all prompts, or one per prompt; None takes the model's defaults.
            use_tqdm: Show a progress bar on standard error.
            options: `priority`, `cache_salt` and `timeout` of each prompt; see `AsyncLLM.generate`.

        Returns:
            One answer per prompt, in order.

        Raises:
            RequestError: A prompt or its parameters are wrong (then none is run), or a request
                fails.
            EngineDeadError: The engine is gone.
            TypeError: `sampling_params` has something other than `SamplingParams`.
            ValueError: There are not as many `sampling_params` as prompts.
        """
        if not isinstance(prompts, Sequence | Rendered | dict):
            told = "prompts must be a text, token ids, or a list of such"
            raise RequestError(told, param="prompts")
        single = isinstance(prompts, str | Rendered | dict) or (
            bool(prompts) and all(isinstance(item, int) for item in prompts)
        )
        listed = cast("Sequence[Prompt]", [prompts] if single else prompts)
        if not isinstance(sampling_params, list | tuple):
            sampling_params = [sampling_params] * len(listed)  # type: ignore[list-item]
        if len(sampling_params) != len(listed):
            raise ValueError(f"{len(sampling_params)} sampling_params for {len(listed)} prompts")
        return self._wait(self._run(listed, sampling_params, use_tqdm, options))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations.

        See `generate`; `options` may also be those of `AsyncLLM.render` (`tools` ...). Tool calls
        are part of the text, as the model writes them.
        """
        shown = template_options(options)
        single = not isinstance(messages, Sequence) or (
            bool(messages) and isinstance(messages[0], dict)
        )
        talks = cast("list[Sequence[Message]]", [messages] if single else list(messages))
        prompts = [self._wait(self._own.render(talk, **shown)) for talk in talks]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **options)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; return whether that was possible."""
        return self._wait(self._own.reset_prefix_cache())

    def get_tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self._own.tokenizer

    def get_default_sampling_params(self) -> TextSamplingParams:
        """Parameters of a request without any: the model's defaults."""
        return self._own.default_params()

    @property
    def _own(self) -> AsyncLLM:
        (engine,) = self._started
        return engine

    async def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[TextSamplingParams | None],
        use_tqdm: bool,
        options: dict[str, Any],
    ) -> list[RequestOutput]:
        pairs = zip(prompts, params, strict=True)
        prepared = [await self._own.prepare(p, chosen, **options) for p, chosen in pairs]
        with tqdm(total=len(prepared), desc="prompts", disable=not use_tqdm) as bar:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._answer(p, bar)) for p in prepared]
            except* Exception as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _answer(self, prepared: Prepared, bar: tqdm[Any]) -> RequestOutput:
        """Run a prompt and join its deltas into one answer."""
        choices: dict[int, CompletionOutput] = {}
        scores, cached = None, 0
        async for delta in self._own.run(prepared):
            (news,) = delta.outputs
            choices.setdefault(news.index, CompletionOutput(news.index)).append(news)
            scores = scores or delta.prompt_logprobs
            cached = max(cached, delta.num_cached_tokens)
        bar.update()
        return RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=list(prepared.asked.request.token_ids),
            outputs=[choices[index] for index in sorted(choices)],
            prompt_logprobs=scores,
            num_cached_tokens=cached,
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        forked = os.getpid() != self._process
        if forked or not self.close.alive:
            work.close()
            told = "is of the process that this one was forked from" if forked else "was closed"
            raise EngineDeadError(f"this LLM {told}")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupted caller does not need the result
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _stop(
    process: int,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    started: list[AsyncLLM],
) -> None:
    if os.getpid() != process:  # a fork has no thread that runs the loop
        return
    ending = started[0].shutdown(SAVES_S) if started else _end_start()
    asyncio.run_coroutine_threadsafe(ending, loop).result(STOP_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(STOP_S)
    loop.close()


async def _end_start() -> None:
    """Cancel an interrupted start, and wait until it has ended its engine."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not any(task.cancelling() for task in tasks):  # else it is already ending its engine
        for task in tasks:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
