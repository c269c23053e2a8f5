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

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvbaton.connectors.base import Device, Memory

KEY_BYTES = 32
"""Length of every object key."""

Pieces = Sequence[memoryview]
"""An object's bytes in order, in one or more pieces of host memory: contiguous, of format ``B``.

Targets are writable. Their lengths add up to the object's: the caller knows it from the key.
"""

Piece = memoryview | Memory
AnyPieces = Sequence[Piece]
"""Pieces for a store that takes memory by its address as well (`StoreCapabilities.devices`)."""


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
        hints: `store` takes `Hints` of its objects.
        expires: objects are gone once their `Hints.ttl_s` is over.
        prefix: `lookup` takes ``prefix=True``, and stops at the first object that is not there.
        claims: it has `Claiming.claim`.
        namespaces: it has the methods of `Namespaced`.
        devices: kinds of memory of which it takes pieces as `Memory`, once it was registered with
            it (`Registering`): ``"cpu"``, and ``"cuda"`` if it moves bytes straight from and to
            GPUs. By default it takes none, and all pieces are `memoryview`s.
    """

    persistent: bool
    shared: bool
    pins: bool
    deletes: bool = True
    max_keys: int = 1024
    synthetic: bool = False
    hints: bool = False
    expires: bool = False
    prefix: bool = False
    claims: bool = False
    namespaces: bool = False
    devices: frozenset[Device] = frozenset()


@dataclass(frozen=True, slots=True)
class Hints:
    """What a node tells of an object that it stores, beside key and bytes.

    A store makes of it what it can: only `ttl_s` binds, and only one that declares `expires`. Of an
    object that is there already the first ones stay.

    Attributes:
        namespace: of which model and settings; an operator may list and clear it. Letters, digits,
            ``-``, ``_`` and ``.``, at most `MAX_LABEL`; empty for none.
        tenant: whose request computed it, for quotas and accounts; the same characters, empty where
            nobody is told apart. Equal prefixes of several tenants are one object, the first one's.
        depth: its place in the prefix: whoever evicts should begin with deep ones, since what comes
            after a missing one is of no use.
        uses: how many requests shared it when it was saved, at least 1; 0 if that is not known.
        priority: of the request; lower is more important.
        ttl_s: seconds from now after which it is to be gone; None for never.
    """

    namespace: str = ""
    tenant: str = ""
    depth: int = 0
    uses: int = 0
    priority: int = 0
    ttl_s: float | None = None


NO_HINTS = Hints()
MAX_LABEL = 64
"""Characters of a namespace's or a tenant's name."""


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
        tenants: bytes by `Hints.tenant`, of those that it knows.
        counters: monotonic totals of its own, by name: letters, digits and ``_``. A node shows them
            as ``kvbaton_store_plugin_NAME_total``, at most 64 of each kind.
        gauges: values of its own now, as ``kvbaton_store_plugin_NAME``.
    """

    objects: int | None = None
    num_bytes: int | None = None
    capacity: int | None = None
    tenants: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Store(Protocol):
    """Keeps objects by key; see the laws at the top of this file.

    Written as ``Class(name: str, **options)``; the constructor does no I/O.
    """

    @property
    def name(self) -> str:
        """What metrics and events call it: the *medium* of its objects."""

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store can do."""

    def open(self) -> None:
        """Connect, make folders, start threads; may block for seconds.

        Raises:
            ConfigError: an option is wrong.
            StoreError: the back end can't be reached.
        """

    def health(self) -> str | None:
        """Why the store can't serve now, from what it knows; None if it can. Never blocks."""

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False) -> Future[Found]:
        """Which objects are there. With `pin`, those found stay until `release`.

        One that declares `prefix` takes it as a keyword: after the first object that is not there
        all answers are False, so it need not look further, and pins nothing there.
        """

    def release(self, ticket: int) -> None:
        """Give pins back. Unknown and released tickets are ignored; never blocks."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """Fill `targets` with the objects; per key whether all its bytes are right.

        After False a target's bytes may be anything. An object of another length is a miss.
        """

    def store(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> Future[list[bool]]:
        """Keep the objects; per key whether it is there now. False: there was no room.

        One that declares `hints` takes as a keyword ``hints: Sequence[Hints]``, one per key, which
        may be left out.
        """

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Forget objects; how many were there."""

    def usage(self) -> Usage:
        """What it holds; never blocks."""

    def close(self) -> None:
        """Finish or fail what is running, then give everything back. Idempotent; may block."""


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

    def register(self, regions: AnyPieces) -> None:
        """Prepare memory; called at most once, after `open` and before any load or store.

        Most pieces of later calls will lie in it, but not all. It stays until after `close`.

        Args:
            regions: writable, contiguous, of format ``B``. Of a kind that the store's capabilities
                name in `devices` also `Memory`; pieces in such a region are `Memory`, too.

        Raises:
            StoreError: it can't be registered; the store works without, and gets no `Memory`.
        """


@runtime_checkable
class Forgetting(Protocol):
    """A store that tells which objects it has given up by itself: optional.

    Attributes:
        on_forget: None, or called with keys that have been evicted or have expired, not with those
            that somebody deletes. It comes from any thread, does not block and does not call the
            store. Of a shared store, each process tells what it has evicted itself.
    """

    on_forget: Callable[[Sequence[bytes]], None] | None


@runtime_checkable
class InDirectory(Protocol):
    """A store that keeps its objects in a directory of this machine: optional.

    Attributes:
        directory: which one; `open` makes it, so that who only looks for objects checks it first.
    """

    directory: str


class Claiming(Protocol):
    """What a store that declares `claims` has besides: of several who compute, one stores."""

    def claim(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Per key, whether the caller is to store it: it is not there, and nobody else is at it.

        A claim ends with the `store` of its object, whatever comes of it, or after `CLAIM_S`
        without one. To store without a claim is allowed.
        """


CLAIM_S = 30.0
"""A claim of one that has died lasts so long, or a little more."""


class Namespaced(Protocol):
    """What a store that declares `namespaces` has besides, for operators."""

    def namespaces(self) -> Future[dict[str, Usage]]:
        """What it holds by `Hints.namespace`; it may have to look at every object."""

    def clear(self, namespace: str) -> Future[int]:
        """Forget all objects of a namespace; how many there were."""
