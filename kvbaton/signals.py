"""What ends processes: signals, and the death of a parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]
"""They end a process in good order, and so does its terminal's end, unless it runs by `nohup`."""
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    STOP_SIGNALS.append(signal.SIGHUP)


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG).

    Args:
        parent: its process id. If it has died already, this process ends now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def begin_child(*ignored: signal.Signals, parent: int | None = None) -> None:
    """What a child does first: die with its parent, but not sooner.

    The signals of a terminal come to children, too; they end when their parent tells them to.

    Args:
        ignored: signals that do not end it either.
        parent: its process id; a child that multiprocessing made knows it.
    """
    if parent is None:
        maker = multiprocessing.parent_process()
        parent = None if maker is None else maker.pid
    assert parent is not None, "no child of multiprocessing"
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGHUP, *ignored):
        signal.signal(number, signal.SIG_IGN)
