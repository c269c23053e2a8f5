"""Which operations a fault hits, by a seeded schedule; for the faulty transport and store."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from kvbaton.errors import ConfigError

Schedule = float | Sequence[int]
"""A probability from 0 to 1, or numbers of operations."""


class Schedules:
    """Numbers operations from 0 and draws the faults of each; a run with equal draws is the same.

    Args:
        flag: that errors name.
        seed: of the draws.
        by_fault: kinds of faults and when they hit.

    Raises:
        ConfigError: a schedule is neither a probability nor numbers of operations.
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
        """Whether a fault is among those drawn; it is counted then."""
        self.injected.update({fault} & drawn)
        return fault in drawn

    def draw(self) -> set[str]:
        """Faults of the next operation."""
        number = self._next
        self._next += 1
        faults = set()
        for fault, when in self._by_fault.items():
            draw = self.random.random()  # also where it decides nothing: draws stay in step
            if draw < when if isinstance(when, int | float) else number in when:
                faults.add(fault)
        return faults
