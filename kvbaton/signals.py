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


def begin_child() -> None:
    """What a child that multiprocessing made does first: die with its parent, but not sooner.

    The signals of a terminal come to children, too; they end when their parent tells them to.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "no child of multiprocessing"
    assert parent.pid is not None, "a parent has started"
    die_with_parent(parent.pid)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
