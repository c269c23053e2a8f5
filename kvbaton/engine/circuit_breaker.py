"""Leaves alone what fails, for longer each time (M. Nygard, "Release It!", 2007)."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""After the first failure; doubled with each further one in a row."""
MOST_PAUSE_S = 60.0


class CircuitBreaker:
    """Closed while all is well; open from a failure until a trial after the pause has worked.

    Args:
        what: whose calls these are, for the log.

    Attributes:
        is_open: whether nobody is to ask.
        opened: how often it has opened.
    """

    def __init__(self, what: str) -> None:
        self.is_open = False
        self.opened = 0
        self._what = what
        self._failures = 0
        self._until = 0.0

    def due(self, now: float) -> bool:
        """Whether it is open and it is time for a trial."""
        return self.is_open and now >= self._until

    def failed(self, now: float, reason: str) -> None:
        """A call failed. What was on its way when it opened does not lengthen the pause."""
        if self.is_open and now < self._until:
            return
        pause = min(PAUSE_S * 2**self._failures, MOST_PAUSE_S)
        self.opened += not self.is_open
        self._failures += 1
        self.is_open, self._until = True, now + pause
        logger.warning("%s: left alone for %g s, since %s", self._what, pause, reason)

    def close(self) -> None:
        """A trial has worked; if the next call fails, the pause is longer still."""
        self.is_open = False

    def worked(self) -> None:
        """A call has worked: all is well."""
        self.is_open, self._failures = False, 0
