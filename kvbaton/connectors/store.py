"""The connector SDK: the contract of a store, which keeps objects by key for later requests.

A store knows nothing of models, requests, tokens or layouts. An *object* is a byte string under a
32-byte key (`objects.py` makes both: one KV block in canonical order behind a header, or an encoder
output). Equal keys mean equal bytes, so objects never change: storing an existing key does nothing.

The rules for every store:

1. **Whole or absent.** An object is visible only once all its bytes are there, whatever crashes or
   fills up meanwhile; a reader never gets a part of an object.
2. **Asynchronous.** Every call returns at once with a future; the caller never blocks in a call.
3. **Buffers are borrowed.** From the call until its future is done the caller does not change
   sources and does not read targets; afterwards the store never accesses them again. Cancelling is
   a request: a future whose work may still access a buffer must refuse to be cancelled
   (`Future.cancel` does so by itself once the work is running).
4. **A miss is no error.** `load` answers False for an object that is gone, torn or corrupt. Errors
   (`StoreError`) are for what an operator should see: unreachable, refused, misconfigured.

For a client library with blocking calls it is enough to write a `Backend` (`stores/threaded.py`).

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
"""Length of every object key in bytes."""

Pieces = Sequence[memoryview]
"""An object's bytes in order, as one or more contiguous pieces of host memory, of format ``B``.

Targets are writable. Their lengths add up to the object's length, which the caller knows.
"""

Piece = memoryview | Memory
AnyPieces = Sequence[Piece]
"""Pieces for a store that also takes memory by its address (`StoreCapabilities.devices`)."""


@dataclass(frozen=True)
class StoreCapabilities:
    """What a store can do. Callers adapt to it; the conformance kit tests only what is declared.

    Attributes:
        persistent: Objects outlive the process that stored them.
        shared: Other processes that open the same store see its objects.
        pins: `lookup` can protect the objects that it found from eviction until `release`.
        deletes: `delete` removes objects.
        max_keys: Maximum number of keys of one call; the caller splits larger calls.
        synthetic: Every load makes up its bytes, so there is nothing to verify: benchmarks only.
        hints: `store` takes `Hints` for its objects.
        expires: Objects are gone once their `Hints.ttl_s` has passed.
        prefix: `lookup` takes ``prefix=True``, and stops at the first missing object.
        claims: The store has `Claiming.claim`.
        namespaces: The store has the methods of `Namespaced`.
        devices: Kinds of memory whose pieces it takes as `Memory`, once that memory was registered
            (`Registering`): ``"cpu"``, and ``"cuda"`` if it moves bytes directly from and to GPUs.
            By default none: all pieces are `memoryview`s.
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
    """What a node tells a store about an object, beside its key and bytes.

    Hints are advice. Only `ttl_s` is binding, for a store that declares `expires`. An object that
    is there already keeps its first hints.

    Attributes:
        namespace: Model and settings of the object; an operator may list and clear a namespace.
            Letters, digits, ``-``, ``_`` and ``.``, at most `MAX_LABEL`; empty for none.
        tenant: Tenant whose request computed the object, for quotas and accounting; the same
            characters, empty without tenants. A prefix that several tenants share is one object,
            and belongs to the first of them.
        depth: Number of the block in its prefix. Eviction should begin with the deepest blocks,
            since blocks after a missing one are of no use.
        uses: Number of requests that shared the block when it was saved, at least 1; 0 if unknown.
        priority: Priority of the request; lower is more important.
        ttl_s: Seconds from now after which the object expires; None for never.
    """

    namespace: str = ""
    tenant: str = ""
    depth: int = 0
    uses: int = 0
    priority: int = 0
    ttl_s: float | None = None


NO_HINTS = Hints()
MAX_LABEL = 64
"""Maximum length of a namespace's or a tenant's name, in characters."""


@dataclass(frozen=True)
class Found:
    """The answer to `Store.lookup`.

    Attributes:
        present: Per key, whether `load` would find its object now.
        ticket: Identifies the pins for `release`; None if nothing is pinned.
    """

    present: tuple[bool, ...]
    ticket: int | None = None


@dataclass(frozen=True)
class Usage:
    """What a store holds, as far as it knows.

    Attributes:
        objects: Number of objects; None if unknown.
        num_bytes: Bytes of all objects; None if unknown.
        capacity: Maximum of `num_bytes`; None if the store has no limit of its own.
        tenants: Bytes by `Hints.tenant`, for the tenants that the store knows.
        counters: The store's own monotonic totals, by name: letters, digits and ``_``. A node shows
            them as ``kvbaton_store_plugin_NAME_total``; at most 64 counters and 64 gauges.
        gauges: The store's own current values, shown as ``kvbaton_store_plugin_NAME``.
    """

    objects: int | None = None
    num_bytes: int | None = None
    capacity: int | None = None
    tenants: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Store(Protocol):
    """Keeps objects by key; see the rules at the top of this file.

    Written as ``Class(name: str, **options)``; the constructor does no I/O.
    """

    @property
    def name(self) -> str:
        """Name of the store in metrics, and the *medium* of its objects in KV events."""

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store can do."""

    def open(self) -> None:
        """Connect, create directories, start threads; may block for seconds.

        Raises:
            ConfigError: An option is wrong.
            StoreError: The back end can't be reached.
        """

    def health(self) -> str | None:
        """Why the store can't serve now, as far as it knows; None if it can. Never blocks."""

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False) -> Future[Found]:
        """Find out which objects are there. With `pin`, those found are kept until `release`.

        A store that declares `prefix` also takes the keyword ``prefix: bool``. With it, all answers
        after the first missing object are False, and no object after that one is pinned.
        """

    def release(self, ticket: int) -> None:
        """Release pins. Unknown and released tickets are ignored. Never blocks."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """Read the objects into `targets`; the result says per key whether all its bytes are right.

        Where it is False, the target may contain anything. An object of another length is a miss.
        """

    def store(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> Future[list[bool]]:
        """Store the objects; the result says per key whether it is there now. False: no room.

        A store that declares `hints` also takes the optional keyword ``hints: Sequence[Hints]``,
        one per key.
        """

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Delete objects; the result is the number of objects that were there."""

    def usage(self) -> Usage:
        """What the store holds. Never blocks."""

    def close(self) -> None:
        """Finish or fail running calls, then free all resources. Idempotent; may block."""


@runtime_checkable
class Evicting(Protocol):
    """A store that reports the objects that it is about to evict: optional, for the tier below it.

    Attributes:
        on_evict: None, or a callback that gets the key and the bytes of each object before its
            eviction. The bytes are valid until it returns. It is called from any thread, does not
            block and does not call the store.
    """

    on_evict: Callable[[bytes, Pieces], None] | None


@runtime_checkable
class Registering(Protocol):
    """A store that moves bytes faster from and to registered memory: optional."""

    def register(self, regions: AnyPieces) -> None:
        """Register memory; called at most once, after `open` and before any load or store.

        Most pieces of later calls lie in these regions, but not all. They stay valid until after
        `close`.

        Args:
            regions: Writable, contiguous, of format ``B``; or `Memory`, if its kind is among the
                `devices` of the store's capabilities. Pieces in such a region are `Memory`, too.

        Raises:
            StoreError: It can't be registered; the store works without, and gets no `Memory`.
        """


@runtime_checkable
class Forgetting(Protocol):
    """A store that reports which objects it has evicted or let expire: optional.

    Attributes:
        on_forget: None, or a callback that gets the keys of objects that were evicted or expired,
            but not of those deleted by a caller. It is called from any thread, does not block and
            does not call the store. With a shared store, each process reports its own evictions.
    """

    on_forget: Callable[[Sequence[bytes]], None] | None


@runtime_checkable
class InDirectory(Protocol):
    """A store that keeps its objects in a directory of this machine: optional.

    Attributes:
        directory: Its path. `open` creates it, so a command that only reads checks first whether
            it exists.
    """

    directory: str


class Claiming(Protocol):
    """Further method of a store that declares `claims`: of several writers one stores a key."""

    def claim(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Per key, whether the caller should store it: it is missing, and nobody else claims it.

        A claim ends with the `store` of its object, also if that fails, or without one after
        `CLAIM_S`. Storing without a claim is allowed.
        """


CLAIM_S = 30.0
"""Seconds after which a claim expires, or a little more: its owner may have died."""


class Namespaced(Protocol):
    """Further methods of a store that declares `namespaces`, for operators."""

    def namespaces(self) -> Future[dict[str, Usage]]:
        """What the store holds, by `Hints.namespace`; this may read every object's metadata."""

    def clear(self, namespace: str) -> Future[int]:
        """Delete all objects of a namespace; the result is the number of objects deleted."""
