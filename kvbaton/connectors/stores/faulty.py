"""A store that injects faults into another one on a schedule, for tests and for the kit.

An *operation* is one key of a call named by `on`; operations are numbered from 0 in the order of
the calls. Each kind of fault has a schedule: the numbers of the operations that it hits, or a
probability. Draws come from one seed, so a run can be repeated. The first three faults hit a whole
call if they hit one of its objects; the others hit single objects of these calls:

==============  ======  =======================================================================
fault           call    what happens
==============  ======  =======================================================================
``delay``       any     the call begins only after `delay_s`, so its bytes move late
``error``       any     the call fails with `StoreError`; nothing is done
``disconnect``  any     this call and all others fail for `outage_s`, and `health` says so
``lose``        lookup  the object is reported as missing
..              load    it is a miss, and its target is not changed
..              store   it is reported as stored, but is not
``partial``     load    its first half is loaded, the rest is overwritten; it is a miss
..              store   its first half is stored under its key, as if it were all: a torn write
``corrupt``     load    up to 8 bytes are wrong, but it is reported as right
..              store   it is stored with up to 8 wrong bytes
==============  ======  =======================================================================
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from typing_extensions import override

from kvbaton.connectors.faults import Schedule, Schedules
from kvbaton.connectors.registry import Spec, load_store
from kvbaton.connectors.store import Found, Hints, Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.arena_copies import cut
from kvbaton.connectors.stores.driver import ComposedStore
from kvbaton.errors import ConfigError, StoreError

T = TypeVar("T")
Hits = list[set[str]]
"""Per object of a call, the faults that hit it."""

CALLS = ("lookup", "load", "store", "delete")
FAULTS = ("delay", "error", "disconnect", "lose", "partial", "corrupt")
_SPOILED_BYTES = 8


class FaultyStore(ComposedStore):
    """Injects faults into another store.

    Attributes:
        inner: The inner store.
        injected: Number of injected faults of each kind.
    """

    def __init__(
        self,
        name: str,
        *,
        inner: Spec = "memory",
        seed: int = 0,
        on: Sequence[str] = ("load",),
        delay_s: float = 0.1,
        outage_s: float = 1.0,
        delay: Schedule = 0.0,
        error: Schedule = 0.0,
        disconnect: Schedule = 0.0,
        lose: Schedule = 0.0,
        partial: Schedule = 0.0,
        corrupt: Schedule = 0.0,
    ) -> None:
        """Wrap a store.

        Args:
            name: See `Store.name`.
            inner: Spec of the inner store.
            seed: Seed of the random draws.
            on: Calls whose objects are operations, of `CALLS`.
            delay_s: Seconds by which a delayed call is late.
            outage_s: Duration of a disconnect in seconds.
            delay: Operations that begin late.
            error: Operations that fail.
            disconnect: Operations before which an outage begins.
            lose: Operations whose objects are lost.
            partial: Operations that move their objects in part.
            corrupt: Operations whose objects get wrong bytes.

        Raises:
            ConfigError: A schedule is neither a probability nor a list of operations' numbers, or
                there is no such call or inner store.
        """
        if unknown := set(on) - set(CALLS):
            raise ConfigError("--store", f"on must be of {CALLS}, not {sorted(unknown)}")
        values = (delay, error, disconnect, lose, partial, corrupt)
        self._schedules = Schedules("--store", seed, dict(zip(FAULTS, values, strict=True)))
        self._on = frozenset(on)
        self._delay_s = delay_s
        self._outage_s = outage_s
        self._back_at = 0.0
        self.inner = load_store(inner)
        super().__init__(name, [self.inner])
        self.injected = self._schedules.injected

    @property
    def capabilities(self) -> StoreCapabilities:
        """The inner store's capabilities, without those that are not passed on."""
        return replace(
            self.inner.capabilities,
            hints=False,
            expires=False,
            prefix=False,
            claims=False,
            namespaces=False,
            devices=frozenset(),
        )

    def health(self) -> str | None:
        """The injected outage, else the inner store's health."""
        return "injected disconnect" if self._is_gone() else self.inner.health()

    def usage(self) -> Usage:
        """Pass on."""
        return self.inner.usage()

    def _is_gone(self) -> bool:
        return time.monotonic() < self._back_at

    async def _call(self, hits: Hits, post: Callable[[], Future[T]]) -> T:
        """Call the inner store, with the faults that hit the whole call."""
        every = set().union(*hits)
        if self._schedules.hit("disconnect", every):
            self._back_at = time.monotonic() + self._outage_s
        if self._is_gone():
            raise StoreError("injected disconnect")
        if self._schedules.hit("error", every):
            raise StoreError("injected error")
        if self._schedules.hit("delay", every):
            await asyncio.sleep(self._delay_s)
        return await asyncio.wrap_future(post())

    def _draw(self, call: str, keys: list[bytes]) -> Hits:
        return [self._schedules.draw() if call in self._on else set() for _ in keys]

    def _escapes(self, hit: set[str]) -> bool:
        """Whether an object escapes ``lose``."""
        return not self._schedules.hit("lose", hit)

    @override
    async def on_lookup(self, keys: list[bytes], pin: bool, prefix: bool) -> Found:
        hits = self._draw("lookup", keys)
        found = await self._call(hits, lambda: self.inner.lookup(keys, pin=pin))
        pairs = zip(hits, found.present, strict=True)
        return Found(tuple(there and self._escapes(hit) for hit, there in pairs), found.ticket)

    @override
    def on_release(self, ticket: int) -> None:
        self.inner.release(ticket)

    @override
    async def on_load(self, keys: list[bytes], targets: list[Pieces]) -> list[bool]:
        hits = self._draw("load", keys)
        left = [place for place, hit in enumerate(hits) if self._escapes(hit)]
        answer = await self._call(
            hits, lambda: self.inner.load([keys[i] for i in left], [targets[i] for i in left])
        )
        loaded = [False] * len(keys)
        for place, ok in zip(left, answer, strict=True):
            hit, target = hits[place], targets[place]
            if ok and self._schedules.hit("corrupt", hit):
                _flip(target, keys[place])
            if ok and self._schedules.hit("partial", hit):
                num_bytes = sum(map(len, target))
                for piece in cut(target, num_bytes // 2, num_bytes):
                    piece[:] = b"\xff" * len(piece)  # NaN in most float types
            loaded[place] = ok and "partial" not in hit
        return loaded

    @override
    async def on_store(
        self, keys: list[bytes], sources: list[Pieces], hints: list[Hints]
    ) -> list[bool]:
        hits = self._draw("store", keys)
        left = [place for place, hit in enumerate(hits) if self._escapes(hit)]
        data = []
        for place in left:
            hit, source = hits[place], sources[place]
            if hit & {"corrupt", "partial"}:  # a damaged copy
                copied = memoryview(bytearray().join(source))
                if self._schedules.hit("corrupt", hit):
                    _flip([copied], keys[place])
                if self._schedules.hit("partial", hit):
                    copied = copied[: len(copied) // 2]
                source = [copied]
            data.append(source)
        answer = await self._call(hits, lambda: self.inner.store([keys[i] for i in left], data))
        kept = dict(zip(left, answer, strict=True))
        return [kept.get(place, True) for place in range(len(keys))]

    @override
    async def on_delete(self, keys: list[bytes]) -> int:
        return await self._call(self._draw("delete", keys), lambda: self.inner.delete(keys))


def _flip(pieces: Pieces, key: bytes) -> None:
    """Flip a high bit of each of 8 bytes, at an offset that depends on the key.

    In little-endian floats this includes the highest bit of an exponent, which is a large error.
    """
    place = int.from_bytes(key[:8]) % max(sum(map(len, pieces)), 1) // 8 * 8
    for piece in cut(pieces, place, _SPOILED_BYTES):
        for index in range(len(piece)):
            piece[index] ^= 0x40
