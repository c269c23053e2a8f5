"""How far another machine's monotonic clock is from ours, by the messages that cross.

A message that left here at `sent` and had come there by `received` (their clock) says that their
clock is ahead by at most ``received - sent``; one that they sent at `told` and that was here at
`heard` says that it is ahead by at least ``told - heard`` (Cristian, 1989). The bounds of all
messages hold at once, so the offset is known within the shortest ways there and back; wall clocks
play no part.
"""

from __future__ import annotations

import math

DRIFT = 2e-4
"""Two clocks may run apart by so many seconds a second: twice what a bad quartz does."""


class ClockOffset:
    """Bounds of an offset, which widen as time goes by and narrow with each message."""

    def __init__(self) -> None:
        self._low, self._high = -math.inf, math.inf
        self._at = 0.0

    def observe(self, sent: float, received: float, told: float, heard: float) -> None:
        """Take in a question and an answer; `sent` and `heard` are on our clock, in seconds.

        Args:
            sent: when the question left, or before.
            received: when it had come, or later.
            told: when the answer left, or before.
            heard: when it had come, or later.
        """
        slack = DRIFT * (heard - self._at)
        self._at = heard
        low, high = max(self._low - slack, told - heard), min(self._high + slack, received - sent)
        if low > high:  # one of the clocks stood still, with its machine
            low, high = told - heard, received - sent
        self._low, self._high = low, high

    @property
    def seconds(self) -> float:
        """By how much their clock is ahead; 0 if it may be the same one, as on one machine."""
        if self._low <= 0 <= self._high:
            return 0.0
        return (self._low + self._high) / 2
