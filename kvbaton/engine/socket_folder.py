"""Folders for a process's Unix sockets, which are removed even if the process is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from kvbaton.errors import ConfigError

PREFIX = "kvbaton-run-"
"""Prefix of these folders' names, and of no others: unlocked folders with it are removed."""
MAX_PARENT = 70
"""Longest path of the parent folder in bytes: the address of a Unix socket has 107."""


class SocketFolder:
    """A folder for Unix sockets, in ``/tmp`` if the path of ``TMPDIR`` is too long for them.

    It has mode 0700: only its user may connect. Its process holds a lock on it (flock(2)), which is
    released however the process ends. Whoever makes such a folder removes those of the same user
    beside it that are not locked any more. (systemd-tmpfiles spares locked folders, too.)

    Raises:
        ConfigError: There is no writable folder for temporary files.

    Attributes:
        path: Path of the folder.
    """

    def __init__(self) -> None:
        try:
            parent = tempfile.gettempdir()
            if len(os.fsencode(parent)) > MAX_PARENT:
                parent = "/tmp"
            self.path, self._lock = _make(parent)
        except OSError as error:
            text = f"must name a folder that can be written to, for sockets: {error}"
            raise ConfigError("TMPDIR", text) from error
        for other in Path(parent).glob(f"{PREFIX}*"):
            with suppress(OSError):  # it is in use, or belongs to another user
                _remove_unused(str(other))

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _make(parent: str) -> tuple[str, int]:
    """Make a folder; returns its path and the descriptor that locks it."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        with suppress(FileNotFoundError):  # another process removed it before it was locked
            return path, _locked(path, fcntl.LOCK_EX)


def _locked(path: str, how: int) -> int:
    """Lock a folder; returns the descriptor that holds the lock.

    Raises:
        OSError: It is locked by another process, was removed, or is not a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
        os.stat(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_unused(path: str) -> None:
    """Remove a folder that no process uses any more.

    Raises:
        OSError: It is in use, or can't be removed.
    """
    descriptor = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            shutil.rmtree(path)
    finally:
        os.close(descriptor)
