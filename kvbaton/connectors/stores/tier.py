"""One of the stores of a `TieredStore`: asked unless it fails, and how it does."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvbaton.connectors.registry import as_written
from kvbaton.connectors.store import Found, Hints, Pieces, Store, Usage
from kvbaton.errors import StoreError, error_text

Answer = TypeVar("Answer", Found, list[bool])
T = TypeVar("T")
WARN_S = 10.0
"""Between two lines in the log about failures of one tier."""

logger = logging.getLogger(__name__)


class Tier:
    """One of the stores, and how it does.

    Args:
        store: the store.
        name: its name, made unique among the tiers.
        retry_s: once in so long it is asked after it failed, or while it says that it can't serve.

    Attributes:
        store, name: as given.
        hits: objects that were loaded from it.
        failures: calls that failed.
        loaded_bytes: of objects that were loaded from it, copies for faster tiers included.
        stored_bytes: of objects that it has taken, or had already.
    """

    def __init__(self, store: Store, name: str, retry_s: float) -> None:
        self.store = store
        self.name = name
        self.hits = 0
        self.failures = 0
        self.loaded_bytes = self.stored_bytes = 0
        self._retry_s = retry_s
        self._error = ""
        self._again_at = self._warn_at = 0.0

    def outage(self) -> str | None:
        """Why it is passed over now; None if it is not."""
        if time.monotonic() < self._again_at:
            return self._error
        return self._or(str, self.store.health)

    def usage(self) -> Usage:
        """See `Store.usage`; of one that raises nothing is known."""
        return self._or(lambda _: Usage(), self.store.usage)

    def release(self, ticket: int) -> None:
        """See `Store.release`."""
        self._or(lambda _: None, self.store.release, ticket)

    def _or(self, otherwise: Callable[[str], T], call: Callable[..., T], *arguments: int) -> T:
        """What a call gives, or, if it raises, what is made of the error's text."""
        try:
            return call(*arguments)
        except (Exception, SystemExit) as error:
            return otherwise(self._warn("fails", error))

    async def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Sequence[bool] | None:
        """The answers of `Store.load`, counted; None if there are none."""
        found = await self.ask(partial(self.store.load, keys, targets), len(keys))
        self.loaded_bytes += _length_of(targets, found)
        return found

    async def save(
        self, keys: Sequence[bytes], sources: Sequence[Pieces], hints: Sequence[Hints] = ()
    ) -> list[bool] | None:
        """The same of `Store.store`, with hints if there are any and the store takes them."""
        options: Any = {"hints": hints} if hints and self.store.capabilities.hints else {}
        kept = await self.ask(partial(self.store.store, keys, sources, **options), len(keys))
        self.stored_bytes += _length_of(sources, kept)
        return kept

    def _is_due(self) -> bool:
        """Whether to ask it now: what its last call ended with is its health until another works.

        So one call in `retry_s` goes to a store that says that it can't serve.
        """
        now = time.monotonic()
        if now < self._again_at:
            return False
        trouble = self.store.health()
        if trouble is not None:
            self._error, self._again_at = trouble, now + self._retry_s
        return True

    async def ask(
        self,
        call: Callable[[], Future[Answer]],
        num_keys: int,
        within: float | None = None,
        late: Callable[[Future[Answer]], None] | None = None,
    ) -> Answer | None:
        """The answer to a call; None if there is none, or one for another number of keys.

        Args:
            call: asks the store.
            num_keys: of the call.
            within: seconds to wait, for calls that borrow no buffers.
            late: is given the future that was not waited for any longer, once it is done.
        """
        try:
            if not self._is_due():
                return None
            future = call()
            waiting = asyncio.wrap_future(future)
            if not (await asyncio.wait((waiting,), timeout=within))[0]:
                waiting.cancel()
                if late is not None:
                    future.add_done_callback(late)
                raise StoreError(f"no answer within {within:g} s")
            if waiting.cancelled():  # by the store: who cancels us ends the wait above
                raise StoreError("the call was cancelled")
            answer = waiting.result()
            count = len(answer.present if isinstance(answer, Found) else answer)
            if count != num_keys:
                raise StoreError(f"it answered for {count} of {num_keys} keys")
        except (Exception, SystemExit) as error:
            self.failures += 1
            self._error = self._warn("is passed over", error)
            self._again_at = time.monotonic() + self._retry_s
            return None
        self._again_at = 0.0
        return answer

    def _warn(self, what: str, error: BaseException) -> str:
        """Log what it raised, now and then; returns that as text."""
        text = str(error) if isinstance(error, StoreError) else error_text(error)
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_S
            logger.warning("tier %s %s: %s", self.name, what, as_written(text))
        return text


def _length_of(objects: Sequence[Pieces], which: Sequence[bool] | None) -> int:
    """Bytes of those of these objects."""
    pairs = zip(objects, which or (), strict=False)
    return sum(sum(map(len, pieces)) for pieces, there in pairs if there)


class Allowance:
    """Bytes that may be held at a time; any thread takes and gives."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Whether there were as many."""
        with self._lock:
            enough = num_bytes <= self._left
            self._left -= num_bytes if enough else 0
        return enough

    def give(self, num_bytes: int) -> None:
        """Give some back."""
        with self._lock:
            self._left += num_bytes
