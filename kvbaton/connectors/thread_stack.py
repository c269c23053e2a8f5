"""Where another thread is, for errors that tell of one which hangs."""

from __future__ import annotations

import gc
import sys
import threading
import traceback


def stack_of(thread: threading.Thread) -> list[str]:
    """The lines in which a thread is, as `traceback.format_stack` has them; none if it has ended.

    CPython before 3.11.8 and 3.12.2 holds the lock of all threads in `sys._current_frames`: if
    garbage is collected there and a finalizer starts a thread or waits for one, the process hangs,
    beyond the reach of any signal (https://github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(thread.ident or 0)
    finally:
        if collects:
            gc.enable()
    return [] if frame is None else traceback.format_stack(frame)
