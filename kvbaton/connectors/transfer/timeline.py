"""When what happened to a transfer, on the machine-wide monotonic clock, for diagnosis."""

from __future__ import annotations

import time
from typing import Any

from kvbaton.types import Attempt

MAX_ATTEMPTS = 256


class Timelines:
    """What happened to the latest attempts; the oldest are forgotten."""

    def __init__(self) -> None:
        self._marks: dict[Attempt, list[dict[str, Any]]] = {}

    def mark(self, attempt: Attempt, what: str, **detail: int) -> None:
        """Note that something happened now."""
        marks = self._marks.setdefault(attempt, [])
        marks.append({"what": what, "time": time.monotonic(), **detail})
        while len(self._marks) > MAX_ATTEMPTS:
            del self._marks[next(iter(self._marks))]

    def dump(self) -> dict[str, list[dict[str, Any]]]:
        """Marks in order, by ``transfer_id/attempt``."""
        return {attempt_name(attempt): list(marks) for attempt, marks in self._marks.items()}


def attempt_name(attempt: Attempt) -> str:
    """An attempt for people: ``transfer_id/attempt``, the id in hex."""
    return f"{attempt.transfer_id.hex()}/{attempt.number}"
