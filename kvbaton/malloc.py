"""How glibc's `malloc` treats freed memory."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3), from ``malloc.h``."""
KEPT_BYTES = 32 << 20
"""Freed bytes that are kept at the end of the heap; glibc's own choice is 64 KiB to 2 MiB."""
LARGE_BYTES = 4 << 20
"""Bytes from which an allocation is a mapping of its own, which goes back to Linux when freed."""


def keep_freed_memory() -> None:
    """Let this process keep some of the memory that it frees, if its `malloc` is glibc's.

    Bodies, texts and messages with images are allocated and freed in a row, some 100 KiB each.
    By default `malloc` returns that memory to Linux each time. Linux then clears it again, page by
    page, in page faults that take longer than the work on the bytes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
