"""Linux processes: groups, descendants, and listening sockets."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"
PARENT, GROUP = 0, 1


def python(*words: str) -> list[str]:
    """Command that runs Python with these arguments."""
    return [sys.executable, *words]


def group_of(leader: int) -> frozenset[int]:
    """Live processes of a process group."""
    return frozenset(pid for pid, stat in _all().items() if stat[GROUP] == leader)


def descendants_of(ancestor: int) -> frozenset[int]:
    """Live descendants of a process."""
    parents = {pid: stat[PARENT] for pid, stat in _all().items()}
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in {ancestor, *found}} - found:
        found |= more
    return frozenset(found)


def parent_of(pid: int) -> int:
    """Parent of a live process, or the process that adopted it."""
    return _all()[pid][PARENT]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    return pid in _all()


def processes_with(word: str) -> list[int]:
    """Processes with this argument in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word in line:
            found.append(int(entry.name))
    return found


def node_process(name: str, among: frozenset[int]) -> int:
    """The process among these that leads a node's group: the one that the launcher started."""
    for pid in among.intersection(processes_with(f"--node-id={name}\0")):
        with suppress(ProcessLookupError):  # it has just ended
            if os.getpgid(pid) == pid:
                return pid
    raise AssertionError(f"no process is the node {name}")


def _all() -> dict[int, list[int]]:
    """Parent and process group of every process but zombies."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if state not in ("Z", "X"):
                    found[int(entry.name)] = [int(number) for number in numbers]
    return found


def listening(pids: frozenset[int]) -> list[tuple[str, int]]:
    """TCP addresses and ports on which processes listen."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found: dict[tuple[str, int], None] = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, *_ = words = line.split()
            if state == LISTEN and words[9] in inodes:
                host, port = local.split(":")
                found[_address(host), int(port, 16)] = None
    return list(found)


def _sockets(pid: int) -> set[str]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            kind, _, number = str(link.readlink()).partition(":")
            if kind == "socket":
                inodes.add(number.strip("[]"))
    return inodes


def _address(text: str) -> str:
    """Parse an address as the kernel prints it: 32-bit words in the machine's byte order."""
    raw = b"".join(struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    address = socket.inet_ntop(family, raw)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
