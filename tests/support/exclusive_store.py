"""A correct store for one process at a time, like embedded databases that lock their folder."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.errors import StoreError


class ExclusiveStore(FilesystemStore):
    """A filesystem store with a lock that is held from `open` to `close`."""

    def __init__(self, name: str, *, path: str) -> None:
        super().__init__(name, path=path)
        self.capabilities = replace(self.capabilities, shared=False)
        self._lock_path = Path(path).with_suffix(".lock")
        self._lock: Any = None

    @override
    def open(self) -> None:
        lock = self._lock_path.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise StoreError("another process has opened it") from error
        self._lock = lock
        super().open()

    @override
    def close(self) -> None:
        super().close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
