"""Who is about to store which entry of a directory, as all processes that share it see it.

A claim is an empty file named by the entry's key, which only one process can make. It is removed
with the store of its object; that of a process that died is void after `CLAIM_S`. Two who find one
void at the same instant may both get it: then an object is written twice, and kept once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from kvbaton.connectors.store import CLAIM_S
from kvbaton.connectors.stores.filesystem_space import open_file


class EntryClaims:
    """Claims of one process.

    Args:
        folder: where all processes keep theirs, absolute.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ours: dict[bytes, tuple[int, int]] = {}
        """Which files they are; inodes are used again at once, so with the time."""

    def open(self) -> None:
        """Make the folder, and remove what is void."""
        os.makedirs(self._folder, 0o770, exist_ok=True)
        with os.scandir(self._folder) as found:
            for item in found:
                if self._is_void(item.path):
                    _unlink(item.path)

    def take(self, key: bytes) -> bool:
        """Whether it is ours from now on."""
        path = self._path(key)
        made = self._make(path)
        if made is None and self._is_void(path):
            _unlink(path)
            made = self._make(path)
        if made is not None:
            with self._lock:
                self._ours[key] = made
        return made is not None

    def drop(self, keys: Iterable[bytes]) -> None:
        """Give back those of them that are ours, and were not taken over."""
        with self._lock:
            ours = {key: self._ours.pop(key) for key in keys if key in self._ours}
        for key, made in ours.items():
            path = self._path(key)
            with suppress(FileNotFoundError):
                if _which(os.stat(path)) == made:
                    os.unlink(path)

    def close(self) -> None:
        """Give all back."""
        self.drop(tuple(self._ours))

    def _make(self, path: str) -> tuple[int, int] | None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            file = open_file(path, flags)
        except FileExistsError:
            return None
        try:
            return _which(os.fstat(file))
        finally:
            os.close(file)

    def _is_void(self, path: str) -> bool:
        try:
            return time.time() - os.stat(path).st_mtime > CLAIM_S
        except FileNotFoundError:
            return True

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}"


def _which(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
