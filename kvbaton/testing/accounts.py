"""What a process holds that must be given back: descriptors, threads, children, memory."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Self

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Accounts:
    """Counts at one moment.

    Attributes:
        file_descriptors: open ones.
        threads: those of the operating system, so also those that Python does not know.
        children: processes started by this one and not waited for.
    """

    file_descriptors: int
    threads: int
    children: int

    @classmethod
    def now(cls) -> Self:
        """Count."""
        tasks = [int(entry) for entry in os.listdir("/proc/self/task")]
        return cls(len(os.listdir("/proc/self/fd")), len(tasks), sum(map(_children, tasks)))

    def above(self, before: Accounts, rounds: int) -> str:
        """What has grown by one or more in each of so many rounds; empty if nothing has.

        Pools that libraries keep and fill once do not count as leaks.
        """
        pairs = zip(fields(self), astuple(self), astuple(before), strict=True)
        grown = [f"{now - then} more {f.name}" for f, now, then in pairs if now - then >= rounds]
        return ", ".join(grown).replace("_", " ")


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def _children(task: int) -> int:
    try:
        return len(Path(f"/proc/self/task/{task}/children").read_text().split())
    except OSError:  # the thread has just ended, or the kernel does not tell
        return 0
