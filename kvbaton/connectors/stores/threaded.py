"""Stores over clients with blocking calls: a `Backend` makes the calls, in a pool of threads."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable
from weakref import WeakSet

import xxhash

from kvbaton.connectors.members import check_members
from kvbaton.connectors.store import (
    NO_HINTS,
    Claiming,
    Found,
    Hints,
    Namespaced,
    Pieces,
    StoreCapabilities,
    Usage,
)
from kvbaton.connectors.stores.arena_copies import copy
from kvbaton.errors import ConfigError, StoreError


class BatchLimit(NamedTuple):
    """Limit of a batch, which one thread moves at a time.

    Attributes:
        objects: Maximum number of objects.
        num_bytes: Bytes from which on no further object is added.
    """

    objects: int
    num_bytes: int


ONE = BatchLimit(1, 1)
"""One object per call."""
MANY = BatchLimit(128, 32 << 20)
"""Default limit for a `BatchBackend`: one call for all objects of a prompt, unless it is long."""


class Backend(Protocol):
    """Blocking calls on one or a few objects. Every method may run in several threads at once.

    Methods raise `StoreError` for what an operator should see, and nothing else. If the
    capabilities declare ``hints``, `put` is ``put(key, source, hints)``; for ``prefix``,
    ``claims`` and ``namespaces`` see `DeclaredBackend`.
    """

    @property
    def capabilities(self) -> StoreCapabilities:
        """What the store can do; `pins` is False, since threads can't prevent evictions."""

    def open(self) -> None:
        """See `Store.open`."""

    def health(self) -> str | None:
        """See `Store.health`."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Per key, whether its object is there."""

    def get(self, key: bytes, target: Pieces) -> bool:
        """Read an object into `target`; False if it is gone, torn, corrupt or of another length."""

    def put(self, key: bytes, source: Pieces) -> bool:
        """Store an object, whole or not at all; True if it is there now, False without room."""

    def remove(self, keys: Sequence[bytes]) -> int:
        """Delete objects; returns how many were there."""

    def usage(self) -> Usage:
        """See `Store.usage`."""

    def close(self) -> None:
        """Free all resources; no other call is running."""


@runtime_checkable
class BatchBackend(Protocol):
    """Further methods of a `Backend` whose client is faster with many objects per call."""

    def get_many(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Sequence[bool]:
        """`Backend.get` for several objects. Targets do not overlap; a key may occur twice."""

    def put_many(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> Sequence[bool]:
        """`Backend.put` for several objects. Each is stored whole or not at all, independently."""


class PrefixBackend(Protocol):
    """Further method of a `Backend` that declares ``prefix``."""

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Number of keys before the first one whose object is missing."""


class DeclaredBackend(PrefixBackend, Protocol):
    """Further methods of a `Backend`, each required by a declared capability."""

    def claim(self, keys: Sequence[bytes]) -> list[bool]:
        """For ``claims``: see `Claiming.claim`."""

    def namespaces(self) -> dict[str, Usage]:
        """For ``namespaces``: see `Namespaced.namespaces`."""

    def clear(self, namespace: str) -> int:
        """For ``namespaces``: see `Namespaced.clear`."""


_FURTHER = [
    (BatchBackend, None),
    (PrefixBackend, "prefix"),
    (Claiming, "claims"),
    (Namespaced, "namespaces"),
]


_BLOCKS = (
    "but its calls block; a client that is asynchronous itself needs a Store, whose calls return "
    "futures of `concurrent.futures`"
)


def _check_backend(name: str, backend: Backend) -> None:
    who = f"{name}'s back end, a {type(backend).__name__},"
    check_members("--store", who, backend, Backend, StoreCapabilities, _FURTHER, _BLOCKS)


def usage_by_namespace(found: Iterable[tuple[str, str, int]]) -> dict[str, Usage]:
    """Usage by namespace, from the (namespace, tenant, bytes) of each object."""
    objects, held = Counter[str](), Counter[str]()
    tenants = dict[str, Counter[str]]()
    for namespace, tenant, num_bytes in found:
        objects[namespace] += 1
        held[namespace] += num_bytes
        if tenant:
            tenants.setdefault(namespace, Counter())[tenant] += num_bytes
    return {
        name: Usage(count, held[name], tenants=tenants.get(name, {}))
        for name, count in objects.items()
    }


def check_positive(**options: float) -> None:
    """Raise `ConfigError` naming the first option that is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ConfigError(name, f"must be above 0, not {value:g}")


class ClientBackend(ABC):
    """Base of backends over a client: health from the client's last call, and default methods.

    Attributes:
        prefix_step: Number of keys of a prefix in the first call of `contains`.
        prefix_growth: Factor by which this number grows with each further call.
    """

    prefix_step, prefix_growth = 128, 1
    _trouble: str | None = "not open"

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`."""

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """See `DeclaredBackend.longest_prefix`; keys far behind a missing one are not looked up."""
        start, count = 0, self.prefix_step
        while start < len(keys):
            present = self.contains(keys[start : start + count])
            if not all(present):
                return start + present.index(False)
            start, count = start + count, count * self.prefix_growth
        return len(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`; does nothing, for clients that can't delete."""
        return 0

    def usage(self) -> Usage:
        """See `Store.usage`; unknown by default."""
        return Usage()

    def health(self) -> str | None:
        """See `Store.health`: the error of the client's last call, if it failed."""
        return self._trouble

    def close(self) -> None:
        """See `Store.close`."""
        self._trouble = "not open"

    @contextmanager
    def _calling(self, what: str, *errors: type[Exception]) -> Iterator[None]:
        """Turn a client's errors into `StoreError`; they are the health until a call succeeds.

        Args:
            what: Start of the message, for example "can't read X".
            errors: Exceptions of the client; the message has the first line of their text.
        """
        try:
            yield
        except ConfigError:
            raise
        except errors as error:
            self._trouble = f"{what}: {str(error).partition(chr(10))[0]}"
            raise StoreError(self._trouble) from error
        self._trouble = None


class HeldClaims:
    """The claims in a shared store that this process holds, and when they expire."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def keys(self) -> list[bytes]:
        """Keys of all claims, including expired ones."""
        return list(self._until)

    def add(self, keys: Iterable[bytes], until: float) -> None:
        """Note that claims are held until time `until` of the monotonic clock."""
        with self._lock:
            self._until.update(dict.fromkeys(keys, until))

    def take(self, keys: Iterable[bytes]) -> list[bytes]:
        """Remove the claims of `keys`; returns the keys of those that had not expired."""
        now = time.monotonic()
        with self._lock:
            return [key for key in keys if self._until.pop(key, 0.0) > now]

    def forget_void(self) -> None:
        """Remove expired claims, whose objects were never stored."""
        now = time.monotonic()
        with self._lock:
            self._until = {key: end for key, end in self._until.items() if end > now}


class ThreadedStore:
    """A `Store` over a `Backend`.

    Lookups have a thread of their own, and loads and stores a pool each: lookups never wait for
    transfers, and loads never wait for stores.

    Args:
        name: See `Store.name`.
        backend: Makes the blocking calls.
        threads: Size of the pool for loads, and of that for stores. Each thread moves one object
            at a time or, with a `BatchBackend`, one batch.

    Attributes:
        load_limit: Maximum batch of one load call; more than `ONE` needs a `BatchBackend`.
        store_limit: Likewise for stores.

    Raises:
        ConfigError: `threads` is below 1, or `backend` is no `Backend`.
    """

    def __init__(self, name: str, backend: Backend, *, threads: int = 4) -> None:
        if threads < 1:
            raise ConfigError("threads", f"must be at least 1, not {threads}")
        _check_backend(name, backend)
        self.name = name
        self.capabilities = backend.capabilities
        self.backend = backend
        self.load_limit = self.store_limit = MANY if isinstance(backend, BatchBackend) else ONE
        self._threads = threads
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._moves: WeakSet[Moves] = WeakSet()

    def open(self) -> None:
        """See `Store.open`."""
        self.backend.open()
        for job, threads in (("lookup", 1), ("load", self._threads), ("store", self._threads)):
            self._pools[job] = ThreadPoolExecutor(threads, f"{self.name}-{job}")

    def health(self) -> str | None:
        """See `Store.health`."""
        return self.backend.health()

    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        """See `Store.lookup`; nothing is pinned."""
        wanted, backend = list(keys), self.backend

        def look() -> Found:
            if not (prefix and self.capabilities.prefix):
                return Found(tuple(backend.contains(wanted)))
            there = cast(DeclaredBackend, backend).longest_prefix(wanted)
            return Found((True,) * there + (False,) * (len(wanted) - there))

        return self._pool("lookup").submit(look)

    def release(self, ticket: int) -> None:
        """See `Store.release`; there are no pins."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """See `Store.load`; each object, or batch, is loaded by one thread."""
        if self.load_limit is ONE:
            return self._move("load", _one_by_one(self.backend.get), ONE, keys, targets)
        action = _together(cast(BatchBackend, self.backend).get_many)
        return self._move("load", action, self.load_limit, keys, targets)

    def store(
        self,
        keys: Sequence[bytes],
        sources: Sequence[Pieces],
        *,
        hints: Sequence[Hints] | None = None,
    ) -> Future[list[bool]]:
        """See `Store.store`; each object, or batch, is stored by one thread."""
        given: list[Sequence[Any]] = [keys, sources]
        if self.capabilities.hints:
            given.append([NO_HINTS] * len(keys) if hints is None else hints)
        if self.store_limit is ONE:
            return self._move("store", _one_by_one(self.backend.put), ONE, *given)
        action = _together(cast(BatchBackend, self.backend).put_many)
        return self._move("store", action, self.store_limit, *given)

    def claim(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """See `Claiming.claim`."""
        return self._pool("store").submit(cast(DeclaredBackend, self.backend).claim, list(keys))

    def namespaces(self) -> Future[dict[str, Usage]]:
        """See `Namespaced.namespaces`."""
        return self._pool("store").submit(cast(DeclaredBackend, self.backend).namespaces)

    def clear(self, namespace: str) -> Future[int]:
        """See `Namespaced.clear`."""
        return self._pool("store").submit(cast(DeclaredBackend, self.backend).clear, namespace)

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """See `Store.delete`."""
        return self._pool("store").submit(self.backend.remove, list(keys))

    def usage(self) -> Usage:
        """See `Store.usage`."""
        return self.backend.usage()

    def close(self) -> None:
        """See `Store.close`; cancels calls that have not begun, and waits for running ones."""
        pools, self._pools = self._pools, {}
        for moves in list(self._moves):
            moves.cancel()
        for pool in pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        if pools:
            self.backend.close()

    def _move(self, job: str, action: Action, limit: BatchLimit, *given: Sequence[Any]) -> Moves:
        items: list[tuple[Any, ...]] = list(zip(*given, strict=True))
        moves = Moves(self._pool(job), self._threads, action, items, limit)
        self._moves.add(moves)
        return moves

    def _pool(self, job: str) -> ThreadPoolExecutor:
        if job not in self._pools:
            raise StoreError(f"store {self.name} is not open")
        return self._pools[job]


Action = Callable[[Sequence[tuple[Any, ...]]], Sequence[bool]]
"""Moves a batch of objects, each given as key, pieces and, if the backend takes them, `Hints`."""


def _one_by_one(move: Callable[..., bool]) -> Action:
    return lambda items: [move(*item) for item in items]


def _together(move: Callable[..., Sequence[bool]]) -> Action:
    return lambda items: move(*map(list, zip(*items, strict=True)))


class Moves(Future[list[bool]]):
    """Future of one load or store call, whose batches several threads move.

    Each thread takes the next batch until none is left; the future is done when all threads are.
    The first error ends the call and becomes its result. Cancelling drops batches that have not
    begun; their answers are False. The future itself is never cancelled, as running threads may
    still access buffers.

    Args:
        pool: Pool that runs the threads.
        threads: Maximum number of threads.
        action: Moves one batch.
        items: Arguments of `action` for each object.
        limit: Limit of a batch.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        threads: int,
        action: Action,
        items: Sequence[tuple[Any, ...]],
        limit: BatchLimit,
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._waiting = deque(_batches([item[1] for item in items], limit))
        """Batches that no thread has taken yet."""
        self._answers = [False] * len(items)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._left = count = min(threads, len(self._waiting))

        def work() -> None:
            while True:
                try:
                    share = self._waiting.popleft()
                except IndexError:
                    return
                answers = action(items[share])
                if len(answers) != share.stop - share.start:
                    asked = share.stop - share.start
                    raise ValueError(f"the back end answered for {len(answers)} of {asked} objects")
                self._answers[share] = answers

        self._workers = list[Future[None]]()
        for _ in range(count):
            try:
                self._workers.append(pool.submit(work))
            except RuntimeError:  # no thread could be started; an existing one may still run `work`
                if not self._workers:
                    self._waiting.clear()  # it must find nothing: the caller owns the buffers again
                    raise
                self._left = len(self._workers)
                break

        def ended(worker: Future[None]) -> None:
            error = None if worker.cancelled() else worker.exception()
            with self._lock:
                if error is not None:
                    self._waiting.clear()
                    self._error = self._error or error
                self._left -= 1
                if self._left:
                    return
            if self._error is not None:
                self.set_exception(self._error)
            else:
                self.set_result(self._answers)

        for worker in self._workers:
            worker.add_done_callback(ended)
        if not count:
            self.set_result([])

    def cancel(self) -> bool:
        """Drop batches that have not begun; always returns False."""
        self._waiting.clear()
        for worker in self._workers:
            worker.cancel()
        return False


def _batches(many: Sequence[Pieces], limit: BatchLimit) -> Iterator[slice]:
    """Cut objects into batches."""
    total = sum(map(len, chain.from_iterable(many)))
    if 0 < len(many) <= limit.objects and total < limit.num_bytes:
        yield slice(0, len(many))  # the usual case, without a loop over the objects
        return
    start = num_bytes = 0
    for end, pieces in enumerate(many, 1):
        num_bytes += sum(map(len, pieces))
        full = end - start == limit.objects or num_bytes >= limit.num_bytes
        if full or end == len(many):
            yield slice(start, end)
            start, num_bytes = end, 0


SEAL_BYTES = 16
"""Length of a checksum in bytes."""


def seal(key: bytes, pieces: Pieces) -> bytes:
    """Checksum of an object's key and bytes, `SEAL_BYTES` long."""
    checksum = xxhash.xxh3_128(key)
    for piece in pieces:
        checksum.update(piece)
    return checksum.digest()


def unseal(
    backend: Backend, key: bytes, sealed: memoryview, target: Pieces, *, skip: int = 0
) -> bool:
    """Check a stored value, checksum and bytes, and copy its bytes into `target`.

    Returns the answer of `Backend.get`. A value whose checksum is wrong is removed; one of another
    length is kept. `skip` bytes between checksum and object are covered by the checksum, but not
    copied.
    """
    body = sealed[SEAL_BYTES:]
    if seal(key, [body]) != sealed[:SEAL_BYTES]:
        backend.remove([key])
        return False
    body = body[skip:]
    if len(body) != sum(map(len, target)):
        return False
    copy(target, [body])
    return True
