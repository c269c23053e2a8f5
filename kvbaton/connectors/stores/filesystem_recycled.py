"""Evicted files, kept to be written over: a full store needs no new ones.

To write over a file of the right size takes a fifth of what it takes to remove it and to make
another: its inode, its blocks and often its pages are there already (docs/performance.md). Who has
the old entry still open reads bytes that its checksum refuses.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class RecycledFiles:
    """Files of one process, under names that nobody reads.

    Args:
        max_bytes: most bytes of them all.
    """

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._lock = threading.Lock()
        self._by_size: dict[int, list[str]] = {}

    def add(self, path: str, num_bytes: int) -> None:
        """Keep a file, or remove it if there are enough."""
        with self._lock:
            if num_bytes <= self._room:
                self._room -= num_bytes
                self._by_size.setdefault(num_bytes, []).append(path)
                return
        _remove(path)

    def take(self, num_bytes: int) -> str | None:
        """A file of that size; if there is none, as many bytes of others go, since one is made."""
        with self._lock:
            if num_bytes in self._by_size:
                return self._pop(num_bytes)
            others = list[str]()
            while self._by_size and num_bytes > 0:
                size = next(iter(self._by_size))
                others.append(self._pop(size))
                num_bytes -= size
        for path in others:
            _remove(path)
        return None

    def _pop(self, size: int) -> str:
        path = self._by_size[size].pop()
        self._room += size
        if not self._by_size[size]:
            del self._by_size[size]
        return path

    def clear(self) -> None:
        """Remove them all."""
        with self._lock:
            spares, self._by_size = self._by_size, {}
            self._room += sum(size * len(paths) for size, paths in spares.items())
        for paths in spares.values():
            for path in paths:
                _remove(path)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):  # swept by another process
        os.unlink(path)
