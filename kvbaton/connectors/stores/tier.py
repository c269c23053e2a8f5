"""One of the stores of a `TieredStore`, with its failures and statistics."""

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
"""Minimum seconds between two warnings about failures of one tier."""

logger = logging.getLogger(__name__)


class Tier:
    """One of the stores, passed over while it fails.

    Args:
        store: The store.
        name: Its name, made unique among the tiers.
        retry_s: Interval in seconds at which the store is tried after a failure, or while its
            `health` says that it can't serve.

    Attributes:
        store, name: As given.
        hits: Number of objects loaded from it.
        failures: Number of failed calls.
        loaded_bytes: Bytes of objects loaded from it, including copies for faster tiers.
        stored_bytes: Bytes of objects that it has taken, or had already.
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
        """Why the store is passed over now; None if it is not."""
        if time.monotonic() < self._again_at:
            return self._error
        return self._or(str, self.store.health)

    def usage(self) -> Usage:
        """See `Store.usage`; unknown if the store raises."""
        return self._or(lambda _: Usage(), self.store.usage)

    def release(self, ticket: int) -> None:
        """See `Store.release`."""
        self._or(lambda _: None, self.store.release, ticket)

    def _or(self, otherwise: Callable[[str], T], call: Callable[..., T], *arguments: int) -> T:
        """Result of a call, or, if it raises, of `otherwise` with the error's text."""
        try:
            return call(*arguments)
        except (Exception, SystemExit) as error:
            return otherwise(self._warn("fails", error))

    async def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Sequence[bool] | None:
        """Call `Store.load` and count the bytes; None if it fails or is passed over."""
        found = await self.ask(partial(self.store.load, keys, targets), len(keys))
        self.loaded_bytes += _length_of(targets, found)
        return found

    async def save(
        self, keys: Sequence[bytes], sources: Sequence[Pieces], hints: Sequence[Hints] = ()
    ) -> list[bool] | None:
        """Call `Store.store`, with hints if it takes them; None if it fails or is passed over."""
        options: Any = {"hints": hints} if hints and self.store.capabilities.hints else {}
        kept = await self.ask(partial(self.store.store, keys, sources, **options), len(keys))
        self.stored_bytes += _length_of(sources, kept)
        return kept

    def _is_due(self) -> bool:
        """Whether to call the store now.

        A store whose `health` reports an error is called once per `retry_s`, since its health may
        be the error of its last call until another one succeeds.
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
        """The answer to a call; None if the store is passed over, fails or answers wrongly.

        Args:
            call: Calls the store.
            num_keys: Number of keys of the call.
            within: Seconds to wait, for calls that borrow no buffers; None for no limit.
            late: Called with the future once it is done, if it took longer than `within`.
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
            if waiting.cancelled():  # by the store: cancelling this task ends the wait above
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
        """Log an error, at most once per `WARN_S`; returns its text."""
        text = str(error) if isinstance(error, StoreError) else error_text(error)
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_S
            logger.warning("tier %s %s: %s", self.name, what, as_written(text))
        return text


def _length_of(objects: Sequence[Pieces], which: Sequence[bool] | None) -> int:
    """Bytes of the objects for which `which` is True."""
    pairs = zip(objects, which or (), strict=False)
    return sum(sum(map(len, pieces)) for pieces, there in pairs if there)


class Allowance:
    """A bound on bytes held at a time. Thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take bytes; returns False, and takes none, if fewer are left."""
        with self._lock:
            enough = num_bytes <= self._left
            self._left -= num_bytes if enough else 0
        return enough

    def give(self, num_bytes: int) -> None:
        """Return bytes."""
        with self._lock:
            self._left += num_bytes
