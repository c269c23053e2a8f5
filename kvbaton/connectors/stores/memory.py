"""Objects in host memory: a tier that outlives the device's KV cache, but not the process.

All objects are in one *arena*, which is mapped when the store opens and backed by memory page by
page as it fills. If the node's KV blocks are on GPUs, the arena is pinned when these are
registered, and copy engines move objects directly between arena and blocks, a batch at a time,
without CPU copies.

Laws, all under one lock:

- An object is visible once its bytes are there; while a thread copies it, its bytes stay.
- Eviction is LRU; loading, storing again and pinning count as use. Among the least recently used
  eighth, at most `WINDOW` objects, hints decide: objects of the least important requests are
  evicted first, then those that fewer requests share, then the deepest, as an object is of no use
  without those before it. Expired objects are removed before all others, at the next call.
- A tenant that has reached its limit evicts its own objects.
- Objects that are held (pinned, being read or written) stay; if all are held, `store` answers
  False.
- `delete` hides held objects, too; their bytes are freed once they are not held any more.
"""

from __future__ import annotations

import heapq
import mmap
import threading
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import Memory
from kvbaton.connectors.store import (
    NO_HINTS,
    AnyPieces,
    Found,
    Hints,
    Pieces,
    StoreCapabilities,
    Usage,
)
from kvbaton.connectors.stores.arena_copies import ArenaCopies, Extent, copy
from kvbaton.connectors.stores.threaded import (
    ONE,
    BatchLimit,
    ThreadedStore,
    check_positive,
    usage_by_namespace,
)
from kvbaton.errors import ConfigError, StoreError

WINDOW = 64
"""Maximum number of least recently used objects among which hints decide the eviction."""
EXPIRING = 1000
"""Number of stale expiry times, of evicted objects, beyond which they are dropped."""
GPU_BATCH = BatchLimit(64, 64 << 20)
"""Batch that a thread copies from or to a GPU before it waits for the copies."""


class MemoryStore(ThreadedStore):
    """Keeps objects in host memory and evicts the least recently used; see the module.

    Args:
        name: See `Store.name`.
        max_bytes: Size of the arena, and so the maximum bytes of all objects.
        threads: See `ThreadedStore`.
        pin_seconds: Seconds after which a pin expires unless it is released; should be longer than
            any load takes.
        tenant_max_bytes: Maximum bytes of one tenant; None for no limit. Objects without a tenant
            are not limited.
        clock: Monotonic clock in seconds.
    """

    backend: Arena

    def __init__(
        self,
        name: str,
        *,
        max_bytes: int = 1 << 30,
        threads: int = 2,
        pin_seconds: float = 300.0,
        tenant_max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        arena = Arena(max_bytes, pin_seconds, clock, self._evicted, tenant_max_bytes)
        super().__init__(name, arena, threads=threads)
        self.load_limit = self.store_limit = ONE
        self.on_evict: Callable[[bytes, Pieces], None] | None = None
        """See `Evicting`."""
        self.on_forget: Callable[[Sequence[bytes]], None] | None = None
        """See `Forgetting`."""

    def register(self, regions: AnyPieces) -> None:
        """See `Registering.register`; only GPU memory has an effect.

        Raises:
            StoreError: The arena can't be pinned.
        """
        devices = {
            region.device_index
            for region in regions
            if isinstance(region, Memory) and region.device == "cuda"
        }
        if devices:
            self.backend.copies = ArenaCopies(self.backend.memory, devices)
            self.load_limit = self.store_limit = GPU_BATCH

    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        """See `Store.lookup`; the future is already done, as this only reads a table."""
        answer: Future[Found] = Future()
        answer.set_result(self.backend.find(keys, pin, prefix))
        return answer

    def release(self, ticket: int) -> None:
        """See `Store.release`."""
        self.backend.release(ticket)

    def _evicted(self, key: bytes, pieces: Pieces | None) -> None:
        """Report an eviction, with the bytes, or an expiry, without."""
        if self.on_evict is not None and pieces is not None:
            self.on_evict(key, pieces)
        if self.on_forget is not None:
            self.on_forget([key])


@dataclass(slots=True, eq=False)
class ArenaEntry:
    """An object in the arena: where its bytes are, and how many pins and copies hold it."""

    extents: list[Extent]
    num_bytes: int
    hints: Hints
    expires_at: float | None
    holds: int = 0
    written: bool = False
    forgotten: bool = False

    @property
    def worth(self) -> tuple[int, int, int]:
        """Sort key among eviction candidates; the lowest is evicted first."""
        return -self.hints.priority, self.hints.uses, -self.hints.depth


class Arena:
    """The backend of `MemoryStore`."""

    capabilities = StoreCapabilities(
        persistent=False,
        shared=False,
        pins=True,
        hints=True,
        expires=True,
        prefix=True,
        namespaces=True,
        devices=frozenset({"cpu", "cuda"}),
    )

    def __init__(
        self,
        max_bytes: int,
        pin_seconds: float,
        clock: Callable[[], float],
        evicted: Callable[[bytes, Pieces | None], None],
        tenant_max_bytes: int | None = None,
    ) -> None:
        check_positive(max_bytes=max_bytes, pin_seconds=pin_seconds)
        if tenant_max_bytes is not None:
            check_positive(tenant_max_bytes=tenant_max_bytes)
        self._evicted = evicted
        self._tenant_max_bytes = tenant_max_bytes
        self._max_bytes = max_bytes
        self._pin_seconds = pin_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._bytes: npt.NDArray[np.uint8] | None = None
        self.copies: ArenaCopies | None = None
        """Copies from and to GPUs; None if no GPU memory is registered."""
        self._last_ticket = 0
        self._clear()

    def open(self) -> None:
        """Map the arena.

        Raises:
            ConfigError: `max_bytes` can't be mapped.
        """
        try:
            area = mmap.mmap(-1, self._max_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError("max_bytes", f"can't map {self._max_bytes} bytes: {error}") from error
        with suppress(OSError):  # kernels without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(area, np.uint8)
        self._clear()

    def close(self) -> None:
        """Forget all objects; the arena is unmapped once `memory` is not referenced any more."""
        copies, self.copies = self.copies, None
        if copies is not None:
            copies.close()
        self._bytes = None
        self._clear()

    @property
    def memory(self) -> Memory:
        """The arena as one contiguous memory, from `open` to `close`."""
        if self._bytes is None:
            raise StoreError("the memory store is not open")
        return Memory(self._bytes.ctypes.data, self._max_bytes, owner=self._bytes)

    def health(self) -> str | None:
        """See `Store.health`."""
        return "not open" if self._bytes is None else None

    def usage(self) -> Usage:
        """See `Store.usage`."""
        with self._changed:
            used = self._max_bytes - self._free.num_bytes
            return Usage(
                len(self._entries),
                used,
                self._max_bytes,
                tenants={tenant: held for tenant, held in self._of_tenant.items() if held},
                counters={
                    "evicted_objects": self._gone["evicted"],
                    "expired_objects": self._gone["expired"],
                },
            )

    def namespaces(self) -> dict[str, Usage]:
        """See `Namespaced.namespaces`."""
        with self._changed:
            self._expire()
            return usage_by_namespace(
                (entry.hints.namespace, entry.hints.tenant, entry.num_bytes)
                for entry in self._entries.values()
            )

    def clear(self, namespace: str) -> int:
        """See `Namespaced.clear`."""
        with self._changed:
            self._expire()
            entries = self._entries.items()
            return self.remove([key for key, e in entries if e.hints.namespace == namespace])

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """See `DeclaredBackend.longest_prefix`."""
        return sum(self.find(keys, prefix=True).present)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`."""
        return list(self.find(keys).present)

    def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
        """See `Store.lookup`."""
        with self._changed:
            self._expire()
            entries = [self._written(key) for key in keys]
            if prefix and None in entries:
                gap = entries.index(None)
                entries[gap:] = [None] * (len(entries) - gap)
            found = [entry for entry in entries if entry is not None]
            ticket = None
            if pin and found:
                self._void_pins()
                self._last_ticket = ticket = self._last_ticket + 1
                self._pins[ticket] = (self._clock() + self._pin_seconds, found)
                for key, entry in zip(keys, entries, strict=True):
                    if entry is not None:
                        self._entries.move_to_end(key)
                        self._hold(entry)
        return Found(tuple(entry is not None for entry in entries), ticket)

    def release(self, ticket: int) -> None:
        """See `Store.release`."""
        with self._changed:
            _, entries = self._pins.pop(ticket, (0.0, []))
            for entry in entries:
                self._let_go(entry)

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`."""
        return self.get_many([key], [target])[0]

    def get_many(self, keys: Sequence[bytes], targets: Sequence[AnyPieces]) -> list[bool]:
        """See `BatchBackend.get_many`; waits once for all copies to GPUs."""
        found = dict[int, ArenaEntry]()
        with self._changed:
            self._expire()
            for number, (key, target) in enumerate(zip(keys, targets, strict=True)):
                entry = self._written(key)
                if entry is not None and entry.num_bytes == sum(map(len, target)):
                    self._entries.move_to_end(key)
                    self._hold(entry)
                    found[number] = entry
        try:
            if self.copies is not None:
                self.copies.load([(targets[n], entry.extents) for n, entry in found.items()])
            else:
                for number, entry in found.items():
                    copy(targets[number], self._views(entry))
        finally:
            with self._changed:
                for entry in found.values():
                    self._let_go(entry)
        return [number in found for number in range(len(keys))]

    def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
        """See `Backend.put`."""
        return self.put_many([key], [source], [hints])[0]

    def put_many(
        self, keys: Sequence[bytes], sources: Sequence[AnyPieces], hints: Sequence[Hints]
    ) -> list[bool]:
        """See `BatchBackend.put_many`; waits once for all copies from GPUs."""
        answers = [True] * len(keys)
        begun = dict[int, ArenaEntry]()
        others = list[int]()
        written = False
        try:
            with self._changed:
                self._expire()
                items = zip(keys, sources, hints, strict=True)
                for number, (key, source, hint) in enumerate(items):
                    num_bytes = sum(map(len, source))
                    there = self._entries.get(key)
                    if there is not None and not there.written:
                        others.append(number)
                    elif there is not None:
                        self._entries.move_to_end(key)
                    elif not self._make_room(num_bytes, hint.tenant):
                        answers[number] = False
                    else:
                        begun[number] = self._begin(key, num_bytes, hint)
            if self.copies is not None:
                self.copies.store([(sources[n], entry.extents) for n, entry in begun.items()])
            else:
                for number, entry in begun.items():
                    copy(self._views(entry), sources[number])
            written = True
        finally:
            with self._changed:
                for number, entry in begun.items():
                    entry.written = written
                    if not written and not entry.forgotten:
                        self._forget(keys[number])
                    self._let_go(entry)
                    answers[number] = not entry.forgotten
                self._changed.notify_all()
        for number in others:  # objects that another thread, or this call, is writing
            key = keys[number]
            with self._changed:
                while (there := self._entries.get(key)) is not None and not there.written:
                    self._changed.wait()
            [answers[number]] = self.put_many([key], [sources[number]], [hints[number]])
        return answers

    def _begin(self, key: bytes, num_bytes: int, hints: Hints) -> ArenaEntry:
        """Add an entry to be written; there must be room for it."""
        expires_at = None if hints.ttl_s is None else self._clock() + hints.ttl_s
        entry = ArenaEntry(self._free.take(num_bytes), num_bytes, hints, expires_at)
        self._hold(entry)
        self._entries[key] = entry
        self._of_tenant[hints.tenant] += num_bytes if hints.tenant else 0
        if expires_at is not None:
            heapq.heappush(self._expiring, (expires_at, key))
            if len(self._expiring) > 2 * len(self._entries) + EXPIRING:
                ends = ((entry.expires_at, key) for key, entry in self._entries.items())
                self._expiring[:] = [(end, key) for end, key in ends if end is not None]
                heapq.heapify(self._expiring)
        return entry

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`."""
        with self._changed:
            known = [key for key in dict.fromkeys(keys) if key in self._entries]
            for key in known:
                self._forget(key)
            self._changed.notify_all()
        return len(known)

    def _clear(self) -> None:
        self._free = FreeList(self._max_bytes)
        self._entries: OrderedDict[bytes, ArenaEntry] = OrderedDict()
        self._of_tenant = Counter[str]()
        self._expiring: list[tuple[float, bytes]] = []
        self._gone = Counter[str]()
        self._held_bytes = 0
        self._pins: dict[int, tuple[float, list[ArenaEntry]]] = {}

    def _written(self, key: bytes) -> ArenaEntry | None:
        entry = self._entries.get(key)
        return entry if entry is not None and entry.written else None

    def _make_room(self, num_bytes: int, tenant: str) -> bool:
        """Evict until `num_bytes` fit, also for the tenant; False if impossible."""
        self._void_pins()
        if num_bytes > self._max_bytes - self._held_bytes:
            return False
        victims = list[bytes]()
        if tenant and self._tenant_max_bytes is not None:
            over = self._of_tenant[tenant] + num_bytes - self._tenant_max_bytes
            victims = self._victims(over, lambda _, entry: entry.hints.tenant == tenant)
            if over > sum(self._entries[key].num_bytes for key in victims):
                return False
        missing = num_bytes - self._free.num_bytes
        missing -= sum(self._entries[key].num_bytes for key in victims)
        gone = frozenset(victims)
        victims += self._victims(missing, lambda key, _: key not in gone)
        for key in victims:
            self._evicted(key, self._views(self._entries[key]))
            self._gone["evicted"] += 1
            self._forget(key)
        return True

    def _victims(self, num_bytes: int, may_go: Callable[[bytes, ArenaEntry], bool]) -> list[bytes]:
        """Objects to evict with at least `num_bytes` together, or all that `may_go`."""
        if num_bytes <= 0:
            return []
        free = (
            (key, entry)
            for key, entry in self._entries.items()
            if not entry.holds and may_go(key, entry)
        )
        victims, oldest = list[bytes](), min(WINDOW, max(1, len(self._entries) // 8))
        while window := sorted(islice(free, oldest), key=lambda item: item[1].worth):
            for key, entry in window:
                victims.append(key)
                num_bytes -= entry.num_bytes
                if num_bytes <= 0:
                    return victims
        return victims

    def _expire(self) -> None:
        """Forget expired objects."""
        now, expiring = self._clock(), self._expiring
        while expiring and expiring[0][0] <= now:
            at, key = heapq.heappop(expiring)
            entry = self._entries.get(key)
            if entry is not None and entry.expires_at == at:
                self._evicted(key, None)
                self._gone["expired"] += 1
                self._forget(key)

    def _void_pins(self) -> None:
        now = self._clock()
        while self._pins and next(iter(self._pins.values()))[0] <= now:
            self.release(next(iter(self._pins)))

    def _hold(self, entry: ArenaEntry) -> None:
        self._held_bytes += 0 if entry.holds else entry.num_bytes
        entry.holds += 1

    def _let_go(self, entry: ArenaEntry) -> None:
        entry.holds -= 1
        self._held_bytes -= 0 if entry.holds else entry.num_bytes
        if entry.forgotten and not entry.holds:
            self._free.give(entry.extents)

    def _forget(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        entry.forgotten = True
        if tenant := entry.hints.tenant:
            self._of_tenant[tenant] -= entry.num_bytes
        if not entry.holds:
            self._free.give(entry.extents)

    def _views(self, entry: ArenaEntry) -> list[memoryview]:
        assert self._bytes is not None, "the memory store is not open"
        return [self._bytes[start : start + length].data for start, length in entry.extents]


class FreeList:
    """Free bytes of an arena, allocated as one run if possible, and else as several.

    So fragmentation never keeps out an object that fits. If all objects have one size, each gets
    one run. Best fit with coalescing; the cost grows with the number of holes, not of objects.

    Args:
        num_bytes: Size of the arena, all of it free.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = 0
        self._by_length: list[Extent] = []
        """(length, first byte) of each hole, sorted."""
        self._lengths: dict[int, int] = {}
        """Length of each hole, by its first byte."""
        self._starts: dict[int, int] = {}
        """First byte of each hole, by the byte after its end."""
        self.give([(0, num_bytes)])

    def take(self, num_bytes: int) -> list[Extent]:
        """Allocate bytes; there must be as many free ones."""
        assert num_bytes <= self.num_bytes, f"{num_bytes} bytes of {self.num_bytes} free ones"
        taken = []
        while num_bytes:
            fits = bisect_left(self._by_length, (num_bytes, 0))
            length, start = self._by_length[min(fits, len(self._by_length) - 1)]
            self._remove(start, length)
            used = min(length, num_bytes)
            self._add(start + used, length - used)
            taken.append((start, used))
            num_bytes -= used
        return taken

    def give(self, extents: list[Extent]) -> None:
        """Free allocated bytes."""
        for start, length in extents:
            end = start + length
            if (after := self._lengths.get(end)) is not None:
                self._remove(end, after)
                end += after
            if (before := self._starts.get(start)) is not None:
                self._remove(before, start - before)
                start = before
            self._add(start, end - start)

    def _add(self, start: int, length: int) -> None:
        if length:
            insort(self._by_length, (length, start))
            self._lengths[start] = length
            self._starts[start + length] = start
            self.num_bytes += length

    def _remove(self, start: int, length: int) -> None:
        del self._by_length[bisect_left(self._by_length, (length, start))]
        del self._lengths[start], self._starts[start + length]
        self.num_bytes -= length
