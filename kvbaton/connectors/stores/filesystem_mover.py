"""How bytes of an object's file get between disk and memory."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from kvbaton.connectors.store import Pieces

logger = logging.getLogger(__name__)

PAGE = 4096
"""Bytes of what direct I/O moves: where a piece begins, in memory and file, and its length."""
_MAX_PIECES = 1024
"""IOV_MAX."""


class FileMover(Protocol):
    """Moves pieces from and to an open file, from its first byte on.

    Both return False if the file ends before, or takes no more, and raise `OSError` otherwise.
    """

    def read(self, file: int, pieces: Pieces) -> bool:
        """Fill the pieces."""
        ...

    def write(self, file: int, pieces: Pieces) -> bool:
        """Write the pieces."""
        ...


class SystemCalls:
    """Moves by ``preadv`` and ``pwritev``."""

    def read(self, file: int, pieces: Pieces) -> bool:
        """See `FileMover.read`."""
        return _move_all(os.preadv, file, pieces)

    def write(self, file: int, pieces: Pieces) -> bool:
        """See `FileMover.write`."""
        return _move_all(os.pwritev, file, pieces)


class DirectCalls(SystemCalls):
    """Moves past the page cache what lies on borders of pages, here and in memory.

    Where the file system refuses that it goes on as `SystemCalls`.
    """

    def __init__(self) -> None:
        self.refused = False
        """Whether a file system has done so."""

    def read(self, file: int, pieces: Pieces) -> bool:
        """See `FileMover.read`."""
        return self._move(super().read, file, pieces)

    def write(self, file: int, pieces: Pieces) -> bool:
        """See `FileMover.write`."""
        return self._move(super().write, file, pieces)

    def _move(self, move: Callable[[int, Pieces], bool], file: int, pieces: Pieces) -> bool:
        if self.refused or not all(map(_is_aligned, pieces)):
            return move(file, pieces)
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            return move(file, pieces)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            logger.warning("no direct I/O: the file system refuses it (%s)", error)
            self.refused = True
        finally:
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return move(file, pieces)


def _is_aligned(piece: memoryview) -> bool:
    address: int = np.frombuffer(piece, np.uint8).ctypes.data if piece else 0
    return address % PAGE == 0 and len(piece) % PAGE == 0


def _move_all(
    move: Callable[[int, Sequence[memoryview], int], int], file: int, pieces: Pieces
) -> bool:
    """Read or write pieces from the start of a file on; False if it ends before."""
    if len(pieces) <= _MAX_PIECES and move(file, pieces, 0) == sum(map(len, pieces)):
        return True
    left, offset = deque(piece for piece in pieces if piece), 0
    while left:
        done = move(file, list(islice(left, _MAX_PIECES)), offset)
        if not done:
            return False
        offset += done
        while done:
            piece = left.popleft()
            if done < len(piece):
                left.appendleft(piece[done:])
            done -= min(done, len(piece))
    return True
