"""What a machine remembers: alarms in a heap, and bounded histories of attempts."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable

Key = tuple[str, Hashable]
"""Name of an alarm and whose it is."""

MAX_LINES = 64
MAX_STORIES = 512
MAX_TOMBSTONES = 16_384


class Alarms:
    """At most one alarm per key; setting it again moves it."""

    def __init__(self) -> None:
        self._at: dict[Key, float] = {}
        self._names: dict[Hashable, set[str]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def set(self, name: str, owner: Hashable, at: float) -> None:
        """Ring at a time."""
        key = (name, owner)
        self._at[key] = at
        self._names.setdefault(owner, set()).add(name)
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 4 * len(self._at) + 64:
            self._rebuild()

    def clear(self, name: str, owner: Hashable) -> None:
        """Do not ring."""
        if self._at.pop((name, owner), None) is not None:
            names = self._names[owner]
            names.discard(name)
            if not names:
                del self._names[owner]

    def keep(self, owner: Hashable, names: Iterable[str]) -> None:
        """Clear all alarms of an owner but these."""
        for name in self._names.get(owner, set()) - set(names):
            self.clear(name, owner)

    def at(self, name: str, owner: Hashable) -> float | None:
        """When an alarm rings; None if it is not set."""
        return self._at.get((name, owner))

    def next(self) -> float | None:
        """When the earliest alarm rings."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._at.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> Key | None:
        """Take out the earliest alarm that rings until now; only one, as it may clear others."""
        at = self.next()
        if at is None or at > now:
            return None
        key = self._heap[0][2]
        self.clear(*key)
        return key

    def _rebuild(self) -> None:
        self._heap = [(at, i, key) for i, (key, at) in enumerate(self._at.items())]
        heapq.heapify(self._heap)


class Stories:
    """What happened to whom: the latest lines of the latest subjects."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[str]] = {}

    def note(self, subject: Hashable, now: float, line: str) -> None:
        """Add a line; the oldest subject is forgotten above `MAX_STORIES`."""
        if subject not in self._lines:
            while len(self._lines) >= MAX_STORIES:
                del self._lines[next(iter(self._lines))]
            self._lines[subject] = deque(maxlen=MAX_LINES)
        self._lines[subject].append(f"{now:.3f} {line}")

    def of(self, subject: Hashable) -> list[str]:
        """Lines about one subject, oldest first."""
        return list(self._lines.get(subject, ()))

    def subjects(self) -> list[Hashable]:
        """All subjects, oldest first."""
        return list(self._lines)


class Tombstones:
    """How the latest attempts ended, to answer late messages right.

    Args:
        seconds: how long each is remembered.
        most: how many; the oldest are forgotten first.
    """

    def __init__(self, seconds: float, most: int = MAX_TOMBSTONES) -> None:
        self._seconds = seconds
        self._most = most
        self._outcomes: OrderedDict[Hashable, tuple[str, float]] = OrderedDict()

    def add(self, name: Hashable, outcome: str, now: float) -> None:
        """Remember an end."""
        self._outcomes[name] = outcome, now + self._seconds
        while len(self._outcomes) > self._most or next(iter(self._outcomes.values()))[1] <= now:
            self._outcomes.popitem(last=False)

    def outcome(self, name: Hashable, now: float) -> str | None:
        """How it ended; None if that is not known (any more)."""
        outcome, until = self._outcomes.get(name, ("", now))
        return outcome if until > now else None

    def __len__(self) -> int:
        return len(self._outcomes)
