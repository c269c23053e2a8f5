"""How processes end: by signals, and when their parent dies."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]
"""Signals that end a process in good order; SIGHUP too, unless `nohup` started the process."""
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    STOP_SIGNALS.append(signal.SIGHUP)


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG).

    Args:
        parent: Process id of the parent. If it has died already, this process ends now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def begin_child(*ignored: signal.Signals, parent: int | None = None) -> None:
    """Let this child process die with its parent, and ignore the signals of a terminal.

    A terminal sends its signals to children, too; a child ends when its parent tells it to.

    Args:
        ignored: Further signals to ignore.
        parent: Process id of the parent; None in a child that multiprocessing made.
    """
    if parent is None:
        maker = multiprocessing.parent_process()
        parent = None if maker is None else maker.pid
    assert parent is not None, "no child of multiprocessing"
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGHUP, *ignored):
        signal.signal(number, signal.SIG_IGN)
