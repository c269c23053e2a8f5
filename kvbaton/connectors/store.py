"""The connector SDK: what a store is. It keeps objects by key for whoever asks later.

A store knows no model, request, token or layout. An *object* is a row of bytes under a 32-byte key
(`objects.py` makes both: one block of KV in canonical order behind a header, or an encoder output).
Equal keys mean equal bytes, so an object never changes: storing a key that is there does nothing.

What a store must hold to:

1. **Whole or absent.** An object is visible only after all its bytes are there, whatever dies or
   fills up meanwhile; a reader never gets a part of one.
2. **Asynchronous.** Every call returns at once with a future; the caller never waits in one.
3. **Buffers are borrowed.** From the call until its future is done the caller leaves sources as
   they are and does not look at targets; once it is done the store never touches them again.
   Cancelling is a request: a future that can still touch a buffer must refuse it
   (`Future.cancel` does so by itself once the work is running).
4. **A miss is no error.** `load` says False for an object that is gone, torn or corrupt. Errors
   (`StoreError`) are for what an operator should see: unreachable, refused, misconfigured.

Whoever has a client with blocking calls writes a `Backend` (`stores/threaded.py`) and is done.

Threading: one thread makes all calls, except `health` and `usage`, which any thread may make.
Futures may be completed from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

KEY_BYTES = 32
"""Length of every object key."""

Pieces = Sequence[memoryview]
"""An object's bytes in order, in one or more pieces of host memory: contiguous, of format ``B``.

Targets are writable. Their lengths add up to the object's: the caller knows it from the key.
"""


@dataclass(frozen=True)
class StoreCapabilities:
    """What a store can do; callers adapt to it, and the kit skips what it declares it can't.

    Attributes:
        persistent: objects outlive the process that stored them.
        shared: other processes that open the same store see its objects.
        pins: `lookup` can keep what it found from being evicted until `release`.
        deletes: `delete` removes objects.
        max_keys: most keys of one call; the caller splits above it.
        synthetic: every load makes its bytes up, so there is nothing to verify: benchmarks only.
    """

    persistent: bool
    shared: bool
    pins: bool
    deletes: bool = True
    max_keys: int = 1024
    synthetic: bool = False


@dataclass(frozen=True)
class Found:
    """The answer to `Store.lookup`.

    Attributes:
        present: per key, whether `load` would find it now.
        ticket: names the pins to `release`; None if nothing is pinned.
    """

    present: tuple[bool, ...]
    ticket: int | None = None


@dataclass(frozen=True)
class Usage:
    """What a store holds, as far as it knows.

    Attributes:
        objects: how many; None if it can't tell.
        num_bytes: their bytes; None if it can't tell.
        capacity: bytes that it will hold at most; None for no limit of its own.
    """

    objects: int | None = None
    num_bytes: int | None = None
    capacity: int | None = None


@runtime_checkable
class Store(Protocol):
    """Keeps objects by key; see the laws at the top of this file.

    Written as ``Class(name: str, **options)``; the constructor does no I/O.
    """

    @property
    def name(self) -> str:
        """What metrics and events call it: the *medium* of its objects."""
        ...

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store can do."""
        ...

    def open(self) -> None:
        """Connect, make folders, start threads; may block for seconds.

        Raises:
            ConfigError: an option is wrong.
            StoreError: the back end can't be reached.
        """
        ...

    def health(self) -> str | None:
        """Why the store can't serve now, from what it knows; None if it can. Never blocks."""
        ...

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False) -> Future[Found]:
        """Which objects are there. With `pin`, those found stay until `release`."""
        ...

    def release(self, ticket: int) -> None:
        """Give pins back. Unknown and released tickets are ignored; never blocks."""
        ...

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """Fill `targets` with the objects; per key whether all its bytes are right.

        After False a target's bytes may be anything. An object of another length is a miss.
        """
        ...

    def store(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> Future[list[bool]]:
        """Keep the objects; per key whether it is there now. False: there was no room."""
        ...

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Forget objects; how many were there."""
        ...

    def usage(self) -> Usage:
        """What it holds; never blocks."""
        ...

    def close(self) -> None:
        """Finish or fail what is running, then give everything back. Idempotent; may block."""
        ...


@runtime_checkable
class Evicting(Protocol):
    """A store that tells which objects it is about to evict: optional, for tiers below it.

    Attributes:
        on_evict: None, or called with the key and the bytes of each object that makes room for
            others. The bytes stay until it returns; it copies what it wants. It comes from any
            thread, does not block and does not call the store.
    """

    on_evict: Callable[[bytes, Pieces], None] | None


@runtime_checkable
class Registering(Protocol):
    """A store that moves bytes faster from and to memory that it was told of: optional."""

    def register(self, regions: Sequence[memoryview]) -> None:
        """Prepare host memory; called at most once, after `open` and before any load or store.

        Most pieces of later calls will lie in it, but not all. It stays until after `close`.

        Args:
            regions: writable, contiguous, of format ``B``.

        Raises:
            StoreError: it can't be registered; the store works without.
        """
        ...
