"""Stores as tiers, the fastest first: host memory, then files, then something remote.

- `lookup` answers for all tiers together; each tier is asked only for keys that those before it
  lack.
- `load` takes each object from the first tier that has it. With `promote`, an object from a slower
  tier is then stored in the faster ones, from a copy and after the caller has its answer.
- With `prefetch`, a lookup also starts to copy objects from slower tiers into the faster ones,
  while the request waits in the queue. Stores don't report the lengths of objects, so prefetching
  begins once some objects were moved: their lengths are tried.
- `store` writes into every tier (``through``), or into the first tier that takes the object. In
  this mode (``on_eviction``) its evictions are written into the next tier; objects in the first
  tier are not written down when it closes.
- Hints are passed to tiers that take them on `store`, but not with promotions and demotions. Since
  copies have no hints, namespaces can't be cleared here, and times to live bind only without
  copies.
- An eviction is reported once no tier has the object, if all tiers report theirs.
- A tier that fails, or reports that it can't serve, is passed over; one call per `retry_s` tries it
  again.

The bytes of copies for background work are bounded; work beyond the bound is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from typing_extensions import override

from kvbaton.connectors.registry import Spec, load_store
from kvbaton.connectors.store import (
    Evicting,
    Forgetting,
    Found,
    Hints,
    Pieces,
    StoreCapabilities,
    Usage,
)
from kvbaton.connectors.stores.driver import ComposedStore
from kvbaton.connectors.stores.threaded import check_positive
from kvbaton.connectors.stores.tier import Allowance, Tier
from kvbaton.errors import ConfigError, StoreError

T = TypeVar("T")
PREFETCH_OBJECTS = 16
"""Number of objects prefetched at a time."""
LENGTHS = 4
"""Number of different object lengths that are remembered."""
MAX_NAME = 64
"""Maximum length of a counter's or a gauge's name in characters."""
COUNTED = ("hits", "failures", "loaded_bytes", "stored_bytes")
"""Attributes of each `Tier` that `usage` reports as counters."""

logger = logging.getLogger(__name__)


class TieredStore(ComposedStore):
    """Combines several stores into one; see the module.

    Args:
        name: See `Store.name`.
        tiers: Specs of the stores, the fastest first.
        write: ``through`` or ``on_eviction``.
        promote: Whether objects loaded from a slower tier are stored in the faster ones.
        prefetch: Whether lookups promote as well.
        lookup_s: Seconds after which a tier that does not answer a lookup is passed over.
        retry_s: Seconds for which a tier is passed over after it failed.
        copy_bytes: Maximum bytes of copies at a time.

    Attributes:
        tiers: The stores.
        counts: Numbers of objects ``promoted``, ``prefetched`` and ``demoted``, and of those
            ``left``, that is skipped because of `copy_bytes`.
        on_forget: See `Forgetting`; exists only if all tiers have it.

    Raises:
        ConfigError: A spec or a time is wrong; or `write` is ``on_eviction``, and a tier does not
            report its evictions.
    """

    on_forget: Callable[[Sequence[bytes]], None] | None

    def __init__(
        self,
        name: str,
        *,
        tiers: Sequence[Spec],
        write: str = "through",
        promote: bool = True,
        prefetch: bool = True,
        lookup_s: float = 0.25,
        retry_s: float = 1.0,
        copy_bytes: int = 256 << 20,
    ) -> None:
        if not isinstance(tiers, list | tuple) or not tiers:
            raise ConfigError("--store", f"tiers must be a list of specs, not {tiers!r}")
        if write not in ("through", "on_eviction"):
            raise ConfigError("--store", f"write must be through or on_eviction, not {write!r}")
        check_positive(lookup_s=lookup_s)
        super().__init__(name, [load_store(spec) for spec in tiers])
        self.tiers: list[Tier] = []
        for depth, store in enumerate(self.stores):
            taken = store.name in [tier.store.name for tier in self.tiers]
            name = f"{store.name}-{depth}" if taken else store.name
            self.tiers.append(Tier(store, name, retry_s))
        self.counts: Counter[str] = Counter()
        self._write = write
        self._promotes = promote
        self._prefetches = prefetch
        self._lookup_s = lookup_s
        self._allowance = Allowance(copy_bytes)
        self._tickets: dict[int, list[tuple[Tier, int]]] = {}
        self._last_ticket = 0
        self._lengths: dict[int, None] = {}
        self._deletes = 0
        self._deleting: Counter[bytes] = Counter()
        self._dropped: set[bytes] = set()
        self._to_prefetch: set[bytes] = set()
        self._moving: dict[bytes, set[asyncio.Task[Any]]] = {}
        for depth, tier in enumerate(self.tiers[:-1] if write == "on_eviction" else ()):
            if not isinstance(tier.store, Evicting):
                problem = f"tier {tier.name} does not tell what it evicts: write must be through"
                raise ConfigError("--store", problem)
            tier.store.on_evict = partial(self._evicted, depth)
        telling = [tier.store for tier in self.tiers if isinstance(tier.store, Forgetting)]
        if len(telling) == len(self.tiers):
            self.on_forget = None
            for store in telling:
                store.on_forget = self._gave_up

    @property
    def capabilities(self) -> StoreCapabilities:
        """The common capabilities of all tiers.

        Written through, objects are persistent if one tier is. The store is shared only if all
        tiers are: a private tier would still have objects that another process has deleted.
        """
        every = [tier.store.capabilities for tier in self.tiers]
        through = self._write == "through"
        some = any if through else all
        copies = self._promotes or self._prefetches or not through
        return StoreCapabilities(
            persistent=some(one.persistent for one in every),
            shared=all(one.shared for one in every),
            pins=all(one.pins for one in every),
            deletes=all(one.deletes for one in every),
            max_keys=min(one.max_keys for one in every),
            synthetic=any(one.synthetic for one in every),
            hints=any(one.hints for one in every),
            expires=not copies and all(one.expires for one in every),
            prefix=all(one.prefix for one in every),
        )

    def health(self) -> str | None:
        """See `Store.health`: one healthy tier is enough."""
        outages = self.outages()
        return None if len(outages) < len(self.tiers) else _told(outages)

    def outages(self) -> dict[str, str]:
        """The tiers that are passed over now, each with the reason."""
        every = {tier.name: tier.outage() for tier in self.tiers}
        return {name: reason for name, reason in every.items() if reason is not None}

    def usage(self) -> Usage:
        """See `Store.usage`: an object in several tiers counts once per tier.

        Counters and gauges are prefixed by tier, ``tier1_redis_...``, and include the stores' own.
        """
        every = [tier.usage() for tier in self.tiers]
        counters, gauges = dict[str, float](self.counts), dict[str, float]()
        for depth, (tier, usage) in enumerate(zip(self.tiers, every, strict=True)):
            label = f"tier{depth}_{re.sub('[^a-z0-9]+', '_', tier.name.lower())[:20]}_"
            own = {name: getattr(tier, name) for name in COUNTED}
            out = {"passed_over": float(tier.outage() is not None)}
            for told, of_tier in (
                (counters, own | dict(usage.counters)),
                (gauges, out | dict(usage.gauges)),
            ):
                told.update({(label + name)[:MAX_NAME]: n for name, n in of_tier.items()})
        return Usage(
            objects=_sum(one.objects for one in every),
            num_bytes=_sum(one.num_bytes for one in every),
            capacity=_sum(one.capacity for one in every),
            counters=counters,
            gauges=gauges,
        )

    # --- on the driver's thread, except for `_evicted` and `_gave_up` ---

    @override
    async def on_lookup(self, keys: list[bytes], pin: bool, prefix: bool) -> Found:
        pin = pin and self.capabilities.pins
        tickets: list[tuple[Tier, int]] = []
        deletes = self._deletes
        find = self._find_prefix if prefix and self.capabilities.prefix else self._find
        depths = await find(keys, tickets if pin else None)
        if self._prefetches and self._lengths and self._deletes == deletes:
            busy = self._to_prefetch | self._moving.keys() | self._deleting.keys()
            for depth in range(1, len(self.tiers)):
                pairs = zip(keys, depths, strict=True)
                wanted = [key for key, found in pairs if found == depth and key not in busy]
                if wanted:
                    self._to_prefetch.update(wanted)
                    self.submit(self._prefetch(depth, wanted))
        ticket = None
        if tickets:
            ticket = self._last_ticket = self._last_ticket + 1
            self._tickets[ticket] = tickets
        return Found(tuple(depth is not None for depth in depths), ticket)

    @override
    def on_release(self, ticket: int) -> None:
        for tier, inner in self._tickets.pop(ticket, ()):
            tier.release(inner)

    async def _find_prefix(
        self, keys: list[bytes], tickets: list[tuple[Tier, int]] | None = None
    ) -> list[int | None]:
        """Like `_find`, but with None for all keys from the first one that no tier has."""
        depths: list[int | None] = []
        while len(depths) < len(keys):
            found = await self._find(keys[len(depths) :], tickets, prefix=True)
            more = list(takewhile(lambda depth: depth is not None, found))
            depths += more
            # Tiers before the one that had the last key have not been asked for the next key.
            if not more or more[-1] == 0:
                break
        return depths + [None] * (len(keys) - len(depths))

    async def _find(
        self,
        keys: list[bytes],
        tickets: list[tuple[Tier, int]] | None = None,
        *,
        prefix: bool = False,
    ) -> list[int | None]:
        """Per key the first tier that has its object; pins it and adds to `tickets`, if given.

        With `prefix` each tier stops at its first missing one of the keys that it is asked for.
        """
        options: dict[str, Any] = {"pin": tickets is not None} | (
            {"prefix": True} if prefix else {}
        )

        def late(tier: Tier, future: Future[Found]) -> None:
            """Release pins of an answer that came too late."""
            ticket = None if future.cancelled() or future.exception() else future.result().ticket
            if ticket is not None and self.driver is not None:
                self.driver.post(tier.release, ticket)

        async def look(tier: Tier, left: list[bytes]) -> Sequence[bool] | None:
            call = partial(tier.store.lookup, left, **options)
            found = await tier.ask(call, len(left), self._lookup_s, partial(late, tier))
            if found is None:
                return None
            if found.ticket is not None and tickets is not None:
                tickets.append((tier, found.ticket))
            return found.present

        return await self._in_turn(look, keys)

    @override
    async def on_load(self, keys: list[bytes], targets: list[Pieces]) -> list[bool]:
        self._to_prefetch.difference_update(keys)
        await self._settled(keys)
        deletes = self._deletes
        depths = await self._in_turn(Tier.load, keys, targets)
        for depth, tier in enumerate(self.tiers):
            came = [i for i, found in enumerate(depths) if found == depth]
            tier.hits += len(came)
            self._remember(targets[i] for i in came)
            if depth and self._promotes and self._deletes == deletes:
                busy = self._moving.keys() | self._deleting.keys()
                wanted = {keys[i]: targets[i] for i in came if keys[i] not in busy}
                copies = {key: self._copy(target) for key, target in wanted.items()}
                kept = {key: [data] for key, data in copies.items() if data is not None}
                if kept:
                    storing = self._store_above("promoted", depth, kept)
                    self._move(list(kept), storing, sum(map(_length, kept.values())))
        return [depth is not None for depth in depths]

    @override
    async def on_store(
        self, keys: list[bytes], sources: list[Pieces], hints: list[Hints]
    ) -> list[bool]:
        self._remember(sources)
        if self._write == "through":
            return await self._store_in(self.tiers, keys, sources, hints)
        depths = await self._in_turn(Tier.save, keys, sources, hints)
        return [depth is not None for depth in depths]

    async def _store_in(
        self,
        tiers: Sequence[Tier],
        keys: list[bytes],
        sources: Sequence[Pieces],
        hints: Sequence[Hints] = (),
    ) -> list[bool]:
        """Store in several tiers at once; returns per object whether one of them has it."""
        saving = (tier.save(keys, sources, hints) for tier in tiers)
        answers = []
        for answer in await asyncio.gather(*saving, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            answers += [] if answer is None else [answer]
        if not answers:
            raise self._no_tier()
        return [any(of_one) for of_one in zip(*answers, strict=True)]

    @override
    async def on_delete(self, keys: list[bytes]) -> int:
        # Wait for moves in progress; `_deletes` and `_deleting` prevent new ones meanwhile.
        self._deletes += 1
        self._deleting += Counter(keys)
        try:
            self._to_prefetch.difference_update(keys)
            await self._settled(keys)
            depths = await self._find(keys)

            async def delete(tier: Tier) -> int:
                return await asyncio.wrap_future(tier.store.delete(keys))

            for answer in await asyncio.gather(*map(delete, self.tiers), return_exceptions=True):
                if isinstance(answer, BaseException):
                    raise answer
            there = {key for key, depth in zip(keys, depths, strict=True) if depth is not None}
            there |= self._dropped.intersection(keys)
            self._dropped -= there
            return len(there)
        finally:
            self._deletes += 1
            self._deleting -= Counter(keys)

    async def _in_turn(
        self,
        ask: Callable[..., Awaitable[Sequence[bool] | None]],
        keys: list[bytes],
        *more: list[Any],
    ) -> list[int | None]:
        """Ask one tier after the other for the remaining objects; per object the one with True.

        Args:
            ask: Asks a tier; gets those of `keys`, and of each list of `more`, that remain.
            keys: Keys of the objects.
            more: Further arguments, one per key.

        Raises:
            StoreError: No tier answered.
        """
        depths: list[int | None] = [None] * len(keys)
        demoted, asked_again = self.counts["demoted"], False
        while True:
            answered = False
            for depth, tier in enumerate(self.tiers):
                left = [i for i, found in enumerate(depths) if found is None]
                some = ([column[i] for i in left] for column in (keys, *more))
                answer = await ask(tier, *some) if left else ()
                if answer is not None:
                    answered = True
                    for i, yes in zip(left, answer, strict=True):
                        depths[i] = depth if yes else None
            if not answered:
                raise self._no_tier()
            missed = [key for key, depth in zip(keys, depths, strict=True) if depth is None]
            moved = self.counts["demoted"] != demoted
            moved = moved or not self._moving.keys().isdisjoint(missed)
            if asked_again or not (missed and moved):
                return depths
            # An object that was demoted meanwhile was in no tier for a moment: ask once more.
            asked_again = True
            await self._settled(missed)

    def _no_tier(self) -> StoreError:
        return StoreError(f"no tier of {self.name} can serve: {_told(self.outages())}")

    # --- background work ---

    async def _store_above(
        self, what: str, depth: int, objects: dict[bytes, list[memoryview]]
    ) -> None:
        """Store objects in the tiers above `depth`, and count them as `what`."""
        stored = await self._store_in(self.tiers[:depth], list(objects), list(objects.values()))
        self.counts[what] += sum(stored)

    async def _prefetch(self, depth: int, keys: list[bytes]) -> None:
        for first in range(0, len(keys), PREFETCH_OBJECTS):
            # Objects that were loaded meanwhile are promoted anyway.
            some = [k for k in keys[first : first + PREFETCH_OBJECTS] if k in self._to_prefetch]
            self._to_prefetch.difference_update(some)
            if some:
                await asyncio.wait((self._move(some, self._fetch(depth, some)),))

    async def _fetch(self, depth: int, keys: list[bytes]) -> None:
        """Copy objects of one tier into those above it; tries each remembered length."""
        tier = self.tiers[depth]
        for num_bytes in reversed(list(self._lengths)):
            if not keys:
                return
            if not self._allowance.take(num_bytes * len(keys)):
                self.counts["left"] += len(keys)
                return
            room = memoryview(bytearray(num_bytes * len(keys)))
            try:
                parts = [[room[i * num_bytes :][:num_bytes]] for i in range(len(keys))]
                found = await tier.load(list(keys), parts) or []
                got = {key: part for key, part, ok in zip(keys, parts, found, strict=False) if ok}
                if got:
                    await self._store_above("prefetched", depth, got)
            finally:
                self._allowance.give(len(room))
            keys = [key for key in keys if key not in got]

    def _evicted(self, depth: int, key: bytes, pieces: Pieces) -> None:
        """Copy an object that a tier evicts, to demote it; called on any thread."""
        driver = self.driver
        if driver is None or self._drop(key):
            return
        data = self._copy(pieces)
        if data is not None:
            driver.submit(self._demote(depth, key, data))

    def _gave_up(self, keys: Sequence[bytes]) -> None:
        """Handle that a tier has evicted or expired objects; called on any thread."""
        if self.driver is not None and self.on_forget is not None:
            self.driver.submit(self._tell_forgotten(list(keys)))

    async def _tell_forgotten(self, keys: list[bytes]) -> None:
        """Report the objects that no tier has any more."""
        await self._settled(keys)
        for start in range(0, len(keys), self.capabilities.max_keys):
            some = keys[start : start + self.capabilities.max_keys]
            try:
                depths = await self._find(some)
            except StoreError as error:
                logger.debug("what was evicted is not told: %s", error)
                return
            pairs = zip(some, depths, strict=True)
            gone = [key for key, found in pairs if found is None and key not in self._deleting]
            if gone and self.on_forget is not None:
                self.on_forget(gone)

    def _drop(self, key: bytes) -> bool:
        """Whether an evicted object is being deleted, and so must not be demoted."""
        if key not in self._deleting:
            return False
        self._dropped.add(key)
        return True

    async def _demote(self, depth: int, key: bytes, data: memoryview) -> None:
        if self._drop(key):
            self._allowance.give(len(data))
            return

        async def lower() -> None:
            for tier in self.tiers[depth + 1 :]:
                if await tier.save([key], [[data]]) == [True]:
                    self.counts["demoted"] += 1
                    return

        self._move([key], lower(), len(data))

    def _copy(self, pieces: Pieces) -> memoryview | None:
        if self._allowance.take(_length(pieces)):
            return memoryview(b"".join(pieces))
        self.counts["left"] += 1
        return None

    def _move(
        self, keys: Sequence[bytes], work: Coroutine[Any, Any, None], num_bytes: int = 0
    ) -> asyncio.Task[None]:
        """Run a coroutine that moves objects; loads and deletes of `keys` wait for it.

        When it ends, `num_bytes` are returned to the allowance.
        """
        task = asyncio.get_running_loop().create_task(work)
        for key in keys:
            self._moving.setdefault(key, set()).add(task)

        def moved(task: asyncio.Task[None]) -> None:
            self._allowance.give(num_bytes)
            for key in set(keys):
                self._moving[key].remove(task)
                if not self._moving[key]:
                    del self._moving[key]
            error = None if task.cancelled() else task.exception()
            if isinstance(error, StoreError):
                logger.debug("objects were not moved: %s", error)
            elif error is not None:  # log it, as nobody awaits the task: a store has a bug
                logger.error("objects were not moved", exc_info=error)

        task.add_done_callback(moved)
        return task

    async def _settled(self, keys: Iterable[bytes]) -> None:
        if tasks := set[asyncio.Task[Any]]().union(*(self._moving.get(key, ()) for key in keys)):
            await asyncio.wait(tasks)

    def _remember(self, objects: Iterable[Pieces]) -> None:
        for num_bytes in {_length(pieces) for pieces in objects}:
            self._lengths.pop(num_bytes, None)
            self._lengths[num_bytes] = None
        for old in list(self._lengths)[:-LENGTHS]:
            del self._lengths[old]


def _length(pieces: Pieces) -> int:
    return sum(map(len, pieces))


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value or 0 for value in known)


def _told(outages: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in outages.items())
