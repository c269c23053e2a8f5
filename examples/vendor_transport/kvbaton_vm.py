"""A transport between processes of one Linux machine, by `process_vm_writev`.

The kernel copies from the writer's memory straight into the target's; the target process takes no
part. A notice follows as a datagram. Both processes need the same user and PID namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import select
import socket
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvbaton.connectors import (
    Capabilities,
    FenceScope,
    Memory,
    Notice,
    Peer,
    Ranges,
    Region,
    Status,
    TransportError,
)

MAX_NOTICE_BYTES = 65_536
MAX_PIECES = 1 << 24
CALL_PIECES = 1_024  # IOV_MAX
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
STOP_S = 10.0

libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_writev.restype = ctypes.c_ssize_t
libc.process_vm_writev.argtypes = [
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong),
    ctypes.c_ulong,
]


def started(pid: int) -> str:
    """Start time of a process: with the pid it identifies the process, since pids are reused."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


class VmPeer:
    """A remote transport, as described by its card."""

    def __init__(self, name: str, pid: int, start: str, at: str, secret: str, regions: Any) -> None:
        self.name, self.pid, self.start, self.at = str(name), int(pid), str(start), str(at)
        self.secret = bytes.fromhex(secret)
        self.regions = np.array(regions, np.int64).reshape(-1, 2)
        self.open, self.told = True, False
        self.writes: queue.SimpleQueue[VmHandle | None] = queue.SimpleQueue()
        self.worker = threading.Thread(target=self._work, name=f"to {name}", daemon=True)

    def dead(self) -> bool:
        """Whether its process has ended; then none of its system calls is running either."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        with open(pidfd, "rb", 0) as file, suppress(FileNotFoundError, ProcessLookupError):
            poll = select.poll()
            poll.register(file, select.POLLIN)
            return started(self.pid) != self.start or bool(poll.poll(0))
        return True

    def dial(self) -> socket.socket:
        """A socket for notices; ConnectionError if the peer does not accept them any more."""
        self.check()
        out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        out.settimeout(0.02)
        if out.connect_ex(f"\0{self.at}"):
            out.close()
            raise ConnectionError(f"{self.name} has shut down")
        return out

    def check(self) -> None:
        """Raise OSError if writes are not allowed any more."""
        if not self.open:
            raise ConnectionError("the connection was closed")
        if self.dead():
            raise ConnectionError(f"process {self.pid} has ended")

    def _work(self) -> None:
        while (handle := self.writes.get()) is not None:
            try:
                with self.dial() as out:
                    self._copy(handle.ours, handle.theirs)
                    self._tell(out, handle.notice)
                handle.end = Status.DONE, None
            except OSError as error:  # only this thread writes for the handle, so it has drained
                handle.end = Status.DRAINED, f"can't write to {self.name}: {error}"

    def _copy(self, ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
        first = 0
        while first < len(ours):
            self.check()
            here, there = ours[first : first + CALL_PIECES], theirs[first : first + CALL_PIECES]
            vectors = here.ctypes.data, len(here), there.ctypes.data, len(there)
            moved = libc.process_vm_writev(self.pid, *vectors, 0)
            if moved <= 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            ends = here[:, 1].cumsum()
            whole = int(ends.searchsorted(moved, side="right"))
            if whole < len(here):  # the kernel stopped in the middle of this piece
                part = moved - int(ends[whole] - here[whole, 1])
                here[whole] += (part, -part)
                there[whole] += (part, -part)
            first += whole

    def _tell(self, out: socket.socket, notice: bytes) -> None:
        while True:
            self.check()
            with suppress(TimeoutError):  # the peer's queue is full
                out.send(self.secret + notice)
                return


class VmHandle:
    """A write. The peer's worker uses the vectors until it sets the final status."""

    def __init__(self, ours: Any, theirs: Any, notice: bytes) -> None:
        self.ours, self.theirs, self.notice = ours, theirs, notice
        self.end: tuple[Status, str | None] = (Status.PENDING, None)

    def status(self) -> Status:
        """Current status."""
        return self.end[0]

    def error(self) -> str | None:
        """Reason of the failure; None if there was none."""
        return self.end[1]

    def release(self) -> None:
        """No resources to release."""


def pieces(ranges: Ranges, regions: Any, side: int) -> Any:
    """Address and length of each piece, as `struct iovec`, on side 0 (source) or 1 (target).

    Raises:
        ValueError: A row exceeds its region, or names none. No number here can overflow.
    """
    known = np.vstack([regions, np.zeros((1, 2), np.int64)])
    region, offset, stride = ranges[:, 2 * side], ranges[:, 2 * side + 1], ranges[:, 6 + side]
    length, count = ranges[:, 4], ranges[:, 5]
    address, size = known[np.minimum(region, len(regions))].T
    room = size - length - offset
    if np.any(room < 0) or np.any((count > 1) & (stride > room // np.maximum(count - 1, 1))):
        raise ValueError(f"a row leaves its {('source', 'target')[side]} region")
    piece = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    start = np.repeat(address + offset, count) + piece * np.repeat(stride, count)
    return np.stack([start, np.repeat(length, count)], axis=1)


class VmTransport:
    """Writes into the memory of other processes on this machine.

    Args:
        name: Unique per process and generation.
        host: Ignored: all traffic stays on the machine.
    """

    def __init__(self, name: str, *, host: str = "127.0.0.1") -> None:
        self.name = name
        self.capabilities = Capabilities(
            frozenset({"cpu"}), MAX_NOTICE_BYTES, FenceScope.PROCESS, max_ranges=65_536
        )
        self._at, self._secret = f"kvbaton-vm-{uuid.uuid4()}", os.urandom(16)
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._inbox.bind(f"\0{self._at}")
        self._regions: list[tuple[int, int]] = []
        self._peers: list[VmPeer] = []
        # Needed where Yama restricts ptrace; elsewhere the error is harmless.
        libc.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)

    def register(self, memory: Memory) -> Region:
        """Make memory available to peers."""
        if memory.device != "cpu":
            raise TransportError(f"process_vm_writev can't reach {memory.device} memory")
        self._regions.append((memory.address, memory.num_bytes))
        return Region(len(self._regions) - 1, memory)

    def deregister(self, region: Region) -> None:
        """Undo `register`."""
        self._regions[region.index] = (0, 0)

    def card(self) -> bytes:
        """What peers need to write here: address, secret and regions."""
        me = self.name, os.getpid(), started(os.getpid())
        return json.dumps([*me, self._at, self._secret.hex(), self._regions]).encode()

    def connect(self, card: bytes) -> VmPeer:
        """Connect to the owner of a card."""
        try:
            peer = VmPeer(*json.loads(card))
            peer.dial().close()
        except (ValueError, TypeError, OverflowError, OSError) as error:
            raise TransportError(f"can't reach the owner of this card: {error}") from error
        peer.worker.start()
        self._peers.append(peer)
        return peer

    def close(self, peer: Peer) -> bool:
        """Stop the peer's worker; whether it, the only reader of our memory, has ended."""
        assert isinstance(peer, VmPeer)
        if peer.open:
            peer.open = False
            peer.writes.put(None)
            self._peers.remove(peer)
        return not peer.worker.is_alive()

    def fence(self, peer: Peer) -> bool:
        """Whether the peer's process has ended."""
        assert isinstance(peer, VmPeer)
        return peer.dead()

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> VmHandle:
        """Queue the copy for the peer's worker."""
        if not isinstance(peer, VmPeer) or len(notice) > MAX_NOTICE_BYTES:
            raise ValueError(f"no peer of mine, or a notice of more than {MAX_NOTICE_BYTES} bytes")
        if ranges.ndim != 2 or ranges.shape[1] != 8 or ranges.dtype != np.int64:
            raise ValueError(f"ranges must be int64 of shape [n, 8], not {ranges.shape}")
        if np.any(ranges < 0) or np.any(ranges[:, 4:6] < 1):
            raise ValueError("a row has a negative number, or no byte, or no piece")
        if len(ranges) > 65_536 or np.minimum(ranges[:, 5], MAX_PIECES + 1).sum() > MAX_PIECES:
            raise ValueError(f"more than 65536 rows or {MAX_PIECES} pieces")
        own = np.array(self._regions, np.int64).reshape(-1, 2)
        handle = VmHandle(pieces(ranges, own, 0), pieces(ranges, peer.regions, 1), notice)
        if peer.open:
            peer.writes.put(handle)
        else:
            handle.end = Status.DRAINED, "the connection was closed"
        return handle

    def notices(self) -> Sequence[Notice]:
        """Notices received since the last call, from senders that know the secret."""
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(self._inbox.recv(1 << 17))
        return [Notice(data[16:]) for data in found if data[:16] == self._secret]

    def lost(self) -> Sequence[VmPeer]:
        """Peers whose process has ended, or that accept no notices any more."""
        gone = []
        for peer in self._peers:
            try:
                if not peer.told:
                    peer.dial().close()
            except ConnectionError:
                peer.told = True
                gone.append(peer)
        return gone

    def shutdown(self) -> None:
        """Close all peers, and wait until no worker reads our memory."""
        for peer in list(self._peers):
            self.close(peer)
            peer.worker.join(STOP_S)
        self._inbox.close()
