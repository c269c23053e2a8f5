"""Stack of another thread, for errors about a thread that hangs."""

from __future__ import annotations

import gc
import sys
import threading
import traceback


def stack_of(thread: threading.Thread) -> list[str]:
    """The stack of a thread, formatted as by `traceback.format_stack`; empty if it has ended.

    Garbage collection is disabled meanwhile. CPython before 3.11.8 and 3.12.2 holds the lock of all
    threads in `sys._current_frames`: if a finalizer that runs there starts a thread or waits for
    one, the process deadlocks, and no signal is handled any more
    (https://github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(thread.ident or 0)
    finally:
        if collects:
            gc.enable()
    return [] if frame is None else traceback.format_stack(frame)
