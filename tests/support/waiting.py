"""Waits for events elsewhere: every wait polls, and has a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from kvbaton.testing.kit import tasks_per_core

PATIENCE_S = 60.0
"""Seconds that a test waits for an event that must happen, but in no promised time."""


def promised(seconds: float) -> float:
    """Limit for an event promised within `seconds`, on a machine that others may use."""
    return seconds * tasks_per_core()


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> None:
    """Poll until a condition holds; fails the test if it does not in time."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, f"{what}: not within {seconds:g} s"
        time.sleep(min(max(0.002, waited / 50), 0.005))  # each check takes the interpreter


async def eventually(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    """As `until`, on the event loop; the condition may be a coroutine function."""
    limit = time.monotonic() + seconds
    while True:
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        assert time.monotonic() < limit, f"not within {seconds:g} s"
        await asyncio.sleep(0.005)
