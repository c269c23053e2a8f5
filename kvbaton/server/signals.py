"""What SIGINT and SIGTERM do to a process whose event loop is about to close."""

from __future__ import annotations

import asyncio
import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD_TWICE = 130
"""Exit status of a process that did not wait for its requests."""


def end_when_told_again() -> None:
    """Have another signal end the process at once, without the loop.

    The loop's own handlers would write to its pipe, which it closes before it removes them: a
    traceback, and no more.
    """
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        if loop.remove_signal_handler(number):
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(TOLD_TWICE)
