"""A store over a client with blocking calls: its author writes a `Backend`, threads do the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from kvbaton.connectors.store import Found, Pieces, StoreCapabilities, Usage


class Backend(Protocol):
    """Blocking calls on one object, or a few. Every method may run in several threads at once.

    They raise `StoreError` for what an operator should see, and nothing else.
    """

    @property
    def capabilities(self) -> StoreCapabilities:
        """What the store can do; `pins` is False, since threads can't keep others from evicting."""
        ...

    def open(self) -> None:
        """See `Store.open`."""
        ...

    def health(self) -> str | None:
        """See `Store.health`."""
        ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys are there."""
        ...

    def get(self, key: bytes, target: Pieces) -> bool:
        """Fill `target`; False if the object is gone, torn, corrupt or of another length."""
        ...

    def put(self, key: bytes, source: Pieces) -> bool:
        """Keep an object, whole or not at all; True if it is there now, False without room."""
        ...

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget objects; how many were there."""
        ...

    def usage(self) -> Usage:
        """See `Store.usage`."""
        ...

    def close(self) -> None:
        """Give everything back; no other call is running."""
        ...


class ThreadedStore:
    """Makes a `Store` of a `Backend`.

    Args:
        name: see `Store.name`.
        backend: does the work.
        threads: objects that move at the same time.
    """

    def __init__(self, name: str, backend: Backend, *, threads: int = 4) -> None:
        self.name = name
        self.capabilities = backend.capabilities
        self.backend = backend
        self._threads = threads
        self._lookups: ThreadPoolExecutor | None = None
        self._movers: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """See `Store.open`. Lookups have a thread of their own: they never wait behind bytes."""
        self.backend.open()
        self._lookups = ThreadPoolExecutor(1, f"{self.name}-lookup")
        self._movers = ThreadPoolExecutor(self._threads, f"{self.name}-move")

    def health(self) -> str | None:
        """See `Store.health`."""
        return self.backend.health()

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False) -> Future[Found]:
        """See `Store.lookup`; nothing is pinned."""
        assert self._lookups is not None, "the store is not open"
        wanted = list(keys)
        return self._lookups.submit(lambda: Found(tuple(self.backend.contains(wanted))))

    def release(self, ticket: int) -> None:
        """See `Store.release`; there are no pins."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """See `Store.load`; one thread per object."""
        return self._each(self.backend.get, keys, targets)

    def store(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> Future[list[bool]]:
        """See `Store.store`; one thread per object."""
        return self._each(self.backend.put, keys, sources)

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """See `Store.delete`."""
        assert self._movers is not None, "the store is not open"
        return self._movers.submit(self.backend.remove, list(keys))

    def usage(self) -> Usage:
        """See `Store.usage`."""
        return self.backend.usage()

    def close(self) -> None:
        """See `Store.close`; what has not begun is cancelled, what runs is waited for."""
        for pool in (self._lookups, self._movers):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        if self._movers is not None:
            self._lookups = self._movers = None
            self.backend.close()

    def _each(
        self, action: Callable[[bytes, Pieces], bool], keys: Sequence[bytes], many: Sequence[Pieces]
    ) -> Future[list[bool]]:
        """Run `action` for each object; the future is done when no thread touches any of them."""
        assert self._movers is not None, "the store is not open"
        parts = [
            self._movers.submit(action, key, pieces) for key, pieces in zip(keys, many, strict=True)
        ]
        return Gathered(parts)


class Gathered(Future[list[bool]]):
    """Many answers as one: done when all parts are, with their results or the first error.

    Cancelling stops the parts that have not begun, whose answer is then False. Since others may
    still run, the whole is never cancelled: it is done when no part touches a buffer any more.
    """

    def __init__(self, parts: Sequence[Future[bool]]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._parts = parts
        self._left = len(parts)
        self._lock = threading.Lock()
        for part in parts:
            part.add_done_callback(self._part_done)
        if not parts:
            self.set_result([])

    def cancel(self) -> bool:
        """Stop what has not begun; always False."""
        for part in self._parts:
            part.cancel()
        return False

    def _part_done(self, _: Future[bool]) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        errors = [part.exception() for part in self._parts if not part.cancelled()]
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result([not part.cancelled() and part.result() for part in self._parts])
