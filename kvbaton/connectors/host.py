"""Which machine and which process this is, and whether another process is proven gone."""

from __future__ import annotations

import ipaddress
import os
import socket
from functools import cache
from pathlib import Path

import msgspec

_PROC = Path("/proc")


class ProcessCard(msgspec.Struct, frozen=True):
    """One life of one process.

    Attributes:
        host: boot id, host name and process-id namespace: equal only where a process id means the
            same process.
        pid: process id.
        start: clock ticks from boot to the start of the process, so that a reused pid differs.
    """

    host: str
    pid: int
    start: int


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for every address of the machine, so that no peer can dial it."""
    try:
        return host in ("", "*") or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def this_process() -> ProcessCard:
    """Describe the process that calls."""
    pid = os.getpid()
    _, start = _stat(pid)
    return ProcessCard(_host_id(), pid, start)


def is_gone(process: ProcessCard) -> bool:
    """Whether it is proven that no thread of `process` runs any more.

    False where that can't be seen from here: on another machine, or in another pid namespace.
    """
    if process.host != _host_id():
        return False
    try:
        state, start = _stat(process.pid)
        if start != process.start or state not in "ZX":
            return start != process.start
        # A zombie whose other threads still run is only a process whose main thread has ended.
        return len(os.listdir(_PROC / str(process.pid) / "task")) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


@cache
def _host_id() -> str:
    """Read once: it can't change while we live, and peers are asked after many times a second."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {socket.gethostname()} {os.readlink(_PROC / 'self/ns/pid')}"


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process (proc(5), fields 3 and 22)."""
    with open(f"{_PROC}/{pid}/stat") as file:
        text = file.read()
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])
