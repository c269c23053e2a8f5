"""Outputs of requests, from whoever makes them to whoever reads them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, Self

from msgspec.structs import replace

from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Mark, Output
from kvbaton.types import TokenLogprobs

MAX_BEHIND = 1 << 14
"""Tokens, and candidates of their log probabilities, that may wait for a request's reader."""
_MERGE_AT = 32
"""Outputs of one choice that wait before they are merged into one."""


class OutputReceiver(Protocol):
    """Who is told what comes of one request, in its source's event loop."""

    def put(self, output: Output) -> None:
        """New tokens of a choice."""

    def end(self, error: Exception | None) -> None:
        """Nothing more will come: all choices are complete, or the request has failed."""

    def flush(self) -> None:
        """All that came at once was said by `put` and `end`: now is the time to act on it."""


class TokenSource(ABC):
    """Tokens in, tokens out."""

    @abstractmethod
    def submit(self, request: AddRequest, receiver: OutputReceiver) -> None:
        """Run a request until every choice has a `finish_reason`, and tell its receiver.

        Raises:
            RequestError: the request can't be served as sent.
            EngineDeadError: nothing can be served.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """End a request that may still run; its receiver is told nothing more. Never fails."""

    def stop(self) -> None:  # noqa: B027
        """End what still runs, and tell why: nobody will be here to read more."""

    async def generate(self, request: AddRequest) -> AsyncGenerator[Output]:
        """Outputs of a request as they come; closing the generator early cancels it.

        Raises:
            RequestError: the request can't be served as sent, or was not read.
            EngineDeadError: nothing can be served.
        """
        with OutputCollector(self, request) as outputs:
            async for output in outputs:
                yield output


class OutputCollector:
    """A request that runs within a ``with``, and an iterator over its outputs.

    While the reader waits, new outputs are offered to `sink` first, in the callback in which they
    came: a task need not wake for every token. While it is busy, the outputs of one choice are
    merged into one; when more than `MAX_BEHIND` tokens wait, the request is cancelled and fails.

    Args:
        source: of its tokens.
        request: to run.
        sink: takes an output; or says that it can't now, and the reader gets it.
    """

    # Each token comes by here, and by what else of its request has slots: all that has left the
    # caches since the step before, so the dictionaries of these objects took 3 us a token.
    __slots__ = (
        "_behind", "_error", "_over", "_reader", "_request", "_sink", "_source", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        source: TokenSource,
        request: AddRequest,
        sink: Callable[[Output], bool] = lambda output: False,
    ) -> None:
        self._source = source
        self._request = request
        self._sink = sink
        self._waiting: dict[int, list[Output]] = {}
        self._behind = 0
        self._over = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        self._source.submit(self._request, self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._source.cancel(self._request.request_id)
        del self._sink  # which knows us

    # --- the source's side ---

    def put(self, output: Output) -> None:
        """See `OutputReceiver`."""
        waiting = self._waiting.setdefault(output.choice, [])
        waiting.append(output)
        if len(waiting) > 1:
            self._behind += len(output.token_ids)
            if output.logprobs is not None:
                self._behind += sum(len(entry.top) for entry in output.logprobs)
            if len(waiting) >= _MERGE_AT:
                waiting[:] = [merge_outputs(waiting)]

    def end(self, error: Exception | None = None) -> None:
        """See `OutputReceiver`; what has come is read first. A sink may also have enough."""
        if not self._over:
            self._over, self._error = True, error

    def flush(self) -> None:
        """See `OutputReceiver`."""
        if self._behind > MAX_BEHIND and not self._over:
            reason = "the client reads more slowly than its tokens are made"
            self.end(RequestError(reason, status=503, code="too_slow"))
            self._source.cancel(self._request.request_id)
        reader = self._reader
        if reader is None or reader.done():
            return
        waiting = self._waiting
        try:
            while waiting:
                choice = next(iter(waiting))
                outputs = waiting[choice]
                if not self._sink(outputs[0] if len(outputs) == 1 else merge_outputs(outputs)):
                    break
                del waiting[choice]
            else:
                self._behind = 0
                if not self._over:
                    return
        except Exception as error:  # of the sink: for the reader, not for the source
            waiting.clear()
            self._over, self._error = True, error
        reader.set_result(None)

    # --- the reader's side ---

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        waiting = self._waiting
        while not waiting:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        outputs = waiting.pop(next(iter(waiting)))
        if not waiting:
            self._behind = 0
        return merge_outputs(outputs)


def merge_outputs(outputs: Sequence[Output]) -> Output:
    """Consecutive outputs of one choice as one; that of a single one is itself."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    marks: list[Mark] = []
    prompt_logprobs = transfer = None
    cached = transferred = 0
    for output in outputs:
        tokens += output.token_ids
        marks += output.marks
        if output.logprobs is not None:
            logprobs = logprobs or []
            logprobs += output.logprobs
        if prompt_logprobs is None:
            prompt_logprobs = output.prompt_logprobs
        if output.kv_transfer_params is not None:
            transfer = output.kv_transfer_params
        cached = max(cached, output.cached_tokens)
        transferred = max(transferred, output.transferred_tokens)
    return replace(
        last,
        index=first.index,
        token_ids=tuple(tokens),
        logprobs=None if logprobs is None else tuple(logprobs),
        prompt_logprobs=prompt_logprobs,
        cached_tokens=cached,
        transferred_tokens=transferred,
        kv_transfer_params=transfer,
        marks=tuple(marks),
    )
