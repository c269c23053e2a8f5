"""One of the stores of a `TieredStore`: asked unless it fails, and how it does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvbaton.connectors.store import Hints, Pieces, Store
from kvbaton.errors import StoreError

T = TypeVar("T")


class Tier:
    """One of the stores, and how it does.

    Attributes:
        store: the store.
        name: its name, made unique among the tiers.
        hits: objects that were loaded from it.
        failures: calls that failed.
    """

    def __init__(self, store: Store, name: str, retry_s: float) -> None:
        self.store = store
        self.name = name
        self.hits = 0
        self.failures = 0
        self._retry_s = retry_s
        self._error = ""
        self._again_at = 0.0

    def outage(self) -> str | None:
        """Why it is passed over now; None if it is not."""
        return self._error if time.monotonic() < self._again_at else self.store.health()

    def storing(
        self, keys: Sequence[bytes], sources: Sequence[Pieces], hints: Sequence[Hints]
    ) -> Callable[[], Future[list[bool]]]:
        """A call for `ask`, with hints if there are any and the store takes them."""
        options: Any = {"hints": hints} if hints and self.store.capabilities.hints else {}
        return partial(self.store.store, keys, sources, **options)

    async def ask(
        self,
        call: Callable[[], Future[T]],
        within: float | None = None,
        late: Callable[[Future[T]], None] | None = None,
    ) -> T | None:
        """The answer to a call; None if there is none.

        Args:
            call: asks the store.
            within: seconds to wait, for calls that borrow no buffers.
            late: is given the future that was not waited for any longer, once it is done.
        """
        if self.outage() is not None:
            return None
        try:
            future = call()
            waiting = asyncio.wrap_future(future)
            if not (await asyncio.wait((waiting,), timeout=within))[0]:
                waiting.cancel()
                if late is not None:
                    future.add_done_callback(late)
                raise StoreError(f"no answer within {within:g} s")
            return waiting.result()
        except StoreError as error:
            self.failures += 1
            self._error = str(error)
            self._again_at = time.monotonic() + self._retry_s
            return None


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
