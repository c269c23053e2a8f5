"""Where a process has its Unix sockets: a folder that outlives a killed process not for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from kvbaton.errors import ConfigError

PREFIX = "kvbaton-run-"
"""Of these folders' names and of no others: what has it and is locked by nobody is removed."""
MAX_PARENT = 70
"""Bytes of a path to which a socket's is added: the address of a Unix socket has 107."""


class SocketFolder:
    """A folder for Unix sockets, in ``/tmp`` if the path of ``TMPDIR`` is too long for them.

    It has mode 0700: only we may connect. Its process holds a lock on it (flock(2)), which ends
    with the process however that ends: so whoever makes such a folder removes those beside it of
    the same user that are locked no more. (systemd-tmpfiles leaves alone what is locked, too.)

    Raises:
        ConfigError: no folder for temporary files can be written to.

    Attributes:
        path: of the folder.
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
            with suppress(OSError):  # it is in use, or another user's
                _remove_unused(str(other))

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _make(parent: str) -> tuple[str, int]:
    """A new folder, and the descriptor that locks it."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        with suppress(FileNotFoundError):  # somebody has removed it before it was locked
            return path, _locked(path, fcntl.LOCK_EX)


def _locked(path: str, how: int) -> int:
    """The descriptor that locks a folder.

    Raises:
        OSError: it is locked by another process, removed or none.
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
    """Remove a folder that no process has any more.

    Raises:
        OSError: one has, or it can't be removed.
    """
    descriptor = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            shutil.rmtree(path)
    finally:
        os.close(descriptor)
