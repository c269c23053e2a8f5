"""Seeded schedules of injected faults, for the faulty transport and store."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from kvbaton.errors import ConfigError

Schedule = float | Sequence[int]
"""When a fault is injected: its probability, 0 to 1, or the numbers of the operations it hits."""


class Schedules:
    """Numbers operations from 0 and draws the faults of each; reproducible from the seed.

    Args:
        flag: Flag that errors name.
        seed: Seed of the random draws.
        by_fault: Schedule of each kind of fault.

    Raises:
        ConfigError: A schedule is neither a probability nor a list of operations' numbers.
    """

    def __init__(self, flag: str, seed: int, by_fault: Mapping[str, Schedule]) -> None:
        for fault, schedule in by_fault.items():
            if isinstance(schedule, int | float):
                valid = 0 <= schedule <= 1
            else:
                valid = isinstance(schedule, list | tuple) and all(
                    isinstance(number, int) for number in schedule
                )
            if not valid:
                right = "a probability or a list of operations' numbers"
                raise ConfigError(flag, f"{fault} must be {right}, not {schedule!r}")
        self.injected: Counter[str] = Counter()
        self._by_fault = dict(by_fault)
        self._next = 0
        self.random = random.Random(seed)

    def hit(self, fault: str, drawn: set[str]) -> bool:
        """Whether a fault is among those drawn; if so, it is counted in `injected`."""
        self.injected.update({fault} & drawn)
        return fault in drawn

    def draw(self) -> set[str]:
        """Draw the faults of the next operation."""
        number = self._next
        self._next += 1
        faults = set()
        for fault, when in self._by_fault.items():
            draw = self.random.random()  # also if unused: later draws must not depend on `when`
            if draw < when if isinstance(when, int | float) else number in when:
                faults.add(fault)
        return faults
