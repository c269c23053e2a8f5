"""How many retries a router may ask of its nodes: a share of its requests, and a few beside.

Where nodes refuse because they have too much to do, each request that is tried again makes it more:
without a bound all of them are asked as often as there are attempts. A bucket of retries, as
Finagle's ``RetryBudget`` is one, lets those through that a healthy cluster needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

RESERVE_PER_S = 10.0
"""Retries per second that are allowed however few requests there are."""
MOST = 100.0
"""Retries that can be saved up."""


class RetryBudget:
    """Retries that are left.

    Args:
        share: retries that each request adds.
        clock: monotonic seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._left, self._at = MOST, clock()

    def request(self) -> None:
        """A request has come."""
        self._left = min(MOST, self._left + self._share)

    def spend(self) -> bool:
        """Take one retry; False if none is left."""
        now = self._clock()
        self._left = min(MOST, self._left + RESERVE_PER_S * (now - self._at))
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
