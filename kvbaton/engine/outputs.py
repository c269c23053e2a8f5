"""Outputs of requests, on their way from a token source to a reader."""

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
"""Tokens, plus alternatives in their logprobs, that may wait for a request's reader."""
_MERGE_AT = 32
"""Number of waiting outputs of one choice at which they are merged into one."""


class OutputReceiver(Protocol):
    """Receives the outputs of one request, in its source's event loop."""

    def put(self, output: Output) -> None:
        """Take new tokens of a choice."""

    def end(self, error: Exception | None) -> None:
        """Note that nothing more will come: all choices are complete, or the request failed."""

    def flush(self) -> None:
        """Act on what `put` and `end` have brought; called once for all that arrived together."""


class TokenSource(ABC):
    """Runs requests: prompt tokens in, sampled tokens out."""

    @abstractmethod
    def submit(self, request: AddRequest, receiver: OutputReceiver) -> None:
        """Run a request until every choice has a `finish_reason`, and pass outputs to a receiver.

        Raises:
            RequestError: The request can't be served as sent.
            EngineDeadError: Nothing can be served.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """End a request that may still run; its receiver gets nothing more. Never fails."""

    def stop(self) -> None:  # noqa: B027
        """End all requests with an error, since this process stops reading."""

    async def generate(self, request: AddRequest) -> AsyncGenerator[Output]:
        """Yield the outputs of a request; closing the generator early cancels the request.

        Raises:
            RequestError: The request can't be served as sent, or was read too slowly.
            EngineDeadError: Nothing can be served.
        """
        with OutputCollector(self, request) as outputs:
            async for output in outputs:
                yield output


class OutputCollector:
    """A request that runs within a ``with`` statement, and an iterator over its outputs.

    While the reader waits, new outputs are offered to `sink` first, in the callback in which they
    arrived, so that no task has to wake for every token. While the reader is busy, the outputs of
    one choice are merged; when more than `MAX_BEHIND` tokens wait, the request is cancelled and
    fails.

    Args:
        source: Source of the tokens.
        request: Request to run.
        sink: Takes an output and returns True, or returns False to leave it to the reader.
    """

    # Every token passes through this object and others of its request. Their dictionaries, which
    # are no longer in the CPU's caches by the next step, took 3 us a token.
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
        self._behind: dict[int, int] = {}  # by choice with more than one output
        self._over = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        self._source.submit(self._request, self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._source.cancel(self._request.request_id)
        del self._sink  # it refers to us: a cycle

    # --- the source's side ---

    def put(self, output: Output) -> None:
        """See `OutputReceiver`."""
        waiting = self._waiting.setdefault(output.choice, [])
        waiting.append(output)
        if len(waiting) > 1:
            behind = len(output.token_ids)
            if output.logprobs is not None:
                behind += sum(len(entry.top) for entry in output.logprobs)
            self._behind[output.choice] = self._behind.get(output.choice, 0) + behind
            if len(waiting) >= _MERGE_AT:
                waiting[:] = [merge_outputs(waiting)]

    def end(self, error: Exception | None = None) -> None:
        """See `OutputReceiver`; waiting outputs are read first. A sink may call it, too."""
        if not self._over:
            self._over, self._error = True, error

    def flush(self) -> None:
        """See `OutputReceiver`."""
        if self._behind and sum(self._behind.values()) > MAX_BEHIND and not self._over:
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
                self._behind.pop(choice, None)
            else:
                if not self._over:
                    return
        except Exception as error:  # of the sink: raise it to the reader, not to the source
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
        choice = next(iter(waiting))
        self._behind.pop(choice, None)
        return merge_outputs(waiting.pop(choice))


def merge_outputs(outputs: Sequence[Output]) -> Output:
    """Merge consecutive outputs of one choice; a single one is returned as it is."""
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
