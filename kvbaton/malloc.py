"""How glibc's `malloc` treats memory that is freed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3), from ``malloc.h``."""
KEPT_BYTES = 32 << 20
"""Of freed memory at the end of the heap, 64 KiB to 2 MiB without us."""
LARGE_BYTES = 4 << 20
"""What is as large is a mapping of its own, and goes back to the system at once."""


def keep_freed_memory() -> None:
    """Let this process keep some of what it frees, where its `malloc` is glibc's.

    Bodies, texts and messages with images are some 100 KiB each, and several of them in a row. By
    itself `malloc` gives that back to Linux after each, which then clears it anew, page by page, by
    faults that take longer than what is done with the bytes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
