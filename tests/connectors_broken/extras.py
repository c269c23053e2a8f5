"""Memory stores with one defect each in what contract 1.2 added; see `stores.py`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from fnmatch import fnmatchcase

from kvbaton.connectors.store import NO_HINTS, Found, Hints, Pieces, Usage
from kvbaton.connectors.stores.memory import Arena
from tests.connectors_broken.stores import BrokenMemory


class TakesNoHints(BrokenMemory):
    """Declares hints, and its `store` has no argument for them."""

    def store(  # type: ignore[override]
        self, keys: Sequence[bytes], sources: Sequence[Pieces]
    ) -> Future[list[bool]]:
        """Keep all."""
        return super().store(keys, sources)


class KeepsByTenant(BrokenMemory):
    """Finds what a tenant has stored only for that tenant."""

    class Broken(Arena):
        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            return super().put(key if not hints.tenant else key[::-1], source, hints)


class NeverExpires(BrokenMemory):
    """Declares that objects expire, and forgets when."""

    class Broken(Arena):
        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            return super().put(key, source, replace(hints, ttl_s=None))


class LoadsWhatHasExpired(BrokenMemory):
    """No longer finds what has expired, but loads it."""

    class Broken(Arena):
        def _expire(self) -> None:
            pass

        def find(self, keys: Sequence[bytes], pin: bool = False, prefix: bool = False) -> Found:
            found = super().find(keys, pin, prefix)
            late = [key in self._entries and self._is_late(key) for key in keys]
            pairs = zip(found.present, late, strict=True)
            return replace(found, present=tuple(there and not over for there, over in pairs))

        def _is_late(self, key: bytes) -> bool:
            at = self._entries[key].expires_at
            return at is not None and at <= self._clock()


class FindsBehindTheGap(BrokenMemory):
    """Of a prefix it finds what comes after what is missing, too."""

    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        """Look everything up."""
        return super().lookup(keys, pin=pin)


class ClearsEverything(BrokenMemory):
    """Clears all namespaces instead of one."""

    class Broken(Arena):
        def clear(self, namespace: str) -> int:
            return self.remove(list(self._entries))


class EvictsInSilence(BrokenMemory):
    """Declares that it tells what it evicts, and does not."""

    def _evicted(self, key: bytes, pieces: Pieces | None) -> None:
        pass


class HandsOverWhatComes(BrokenMemory):
    """Hands over the bytes of an evicted object once they are overwritten."""

    def _evicted(self, key: bytes, pieces: Pieces | None) -> None:
        super()._evicted(key, pieces and [memoryview(bytes(len(piece))) for piece in pieces])


class BadMetricNames(BrokenMemory):
    """Has a gauge that no metrics page can show."""

    class Broken(Arena):
        def usage(self) -> Usage:
            return replace(super().usage(), gauges={"hit rate, %": 12.5})


class CountsBackwards(BrokenMemory):
    """A counter of its own is a gauge."""

    class Broken(Arena):
        def usage(self) -> Usage:
            usage = super().usage()
            return replace(usage, counters={"objects": usage.objects or 0})


class ForgetsTenants(BrokenMemory):
    """Counts the bytes of all tenants for the first one."""

    class Broken(Arena):
        def usage(self) -> Usage:
            usage = super().usage()
            every = sum(usage.tenants.values())
            return replace(usage, tenants={name: every for name in usage.tenants})


class _Rehinted(BrokenMemory):
    """Stores with other hints than it was given."""

    def _rehint(self, hints: Sequence[Hints]) -> Sequence[Hints]:
        raise NotImplementedError

    def store(
        self,
        keys: Sequence[bytes],
        sources: Sequence[Pieces],
        *,
        hints: Sequence[Hints] | None = None,
    ) -> Future[list[bool]]:
        """Store under them."""
        return super().store(keys, sources, hints=hints and self._rehint(hints))


class OneTimeForACall(_Rehinted):
    """All objects of a call live as long as its first one."""

    def _rehint(self, hints: Sequence[Hints]) -> Sequence[Hints]:
        return [replace(each, ttl_s=hints[0].ttl_s) for each in hints]


class HintsOfTheFirstBatch(_Rehinted):
    """Makes several batches of a call, and gives each the hints of the first one."""

    def _rehint(self, hints: Sequence[Hints]) -> Sequence[Hints]:
        return [hints[place % 16] for place in range(len(hints))]


class OneNamespaceForACall(_Rehinted):
    """All objects of a call are in the namespace of its first one."""

    def _rehint(self, hints: Sequence[Hints]) -> Sequence[Hints]:
        return [replace(each, namespace=hints[0].namespace) for each in hints]


class ClearsByPattern(BrokenMemory):
    """Takes ``_`` in the name of a namespace for any letter, as ``LIKE`` does."""

    class Broken(Arena):
        def clear(self, namespace: str) -> int:
            pattern = namespace.replace("_", "?")
            keys = [
                key
                for key, entry in self._entries.items()
                if fnmatchcase(entry.hints.namespace, pattern)
            ]
            return self.remove(keys)


class KeepsTenantsBytes(BrokenMemory):
    """What was deleted counts for its tenant for ever."""

    class Broken(Arena):
        def _clear(self) -> None:
            super()._clear()
            self._most: dict[str, int] = {}

        def usage(self) -> Usage:
            usage = super().usage()
            for name, num_bytes in usage.tenants.items():
                self._most[name] = max(num_bytes, self._most.get(name, 0))
            return replace(usage, tenants=dict(self._most))


BROKEN_EXTRAS: dict[type[BrokenMemory], str] = {
    TakesNoHints: "L1.hints-change-no-answer",
    KeepsByTenant: "L1.hints-change-no-answer",
    NeverExpires: "L1.what-expires-is-gone",
    LoadsWhatHasExpired: "L1.what-expires-is-gone",
    FindsBehindTheGap: "L1.prefixes-end-at-the-first-gap",
    ClearsEverything: "L1.namespaces-are-cleared-alone",
    EvictsInSilence: "L1.evictions-are-told",
    HandsOverWhatComes: "L1.evictions-are-told",
    BadMetricNames: "L1.metrics-of-its-own",
    CountsBackwards: "L1.metrics-of-its-own",
    OneTimeForACall: "L1.what-expires-is-gone",
    HintsOfTheFirstBatch: "L1.what-expires-is-gone",
    OneNamespaceForACall: "L1.namespaces-are-cleared-alone",
    ClearsByPattern: "L1.namespaces-are-cleared-alone",
    KeepsTenantsBytes: "L1.metrics-of-its-own",
    ForgetsTenants: "L1.metrics-of-its-own",
}
"""See `stores.BROKEN`."""
