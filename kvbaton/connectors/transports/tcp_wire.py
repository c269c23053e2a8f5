"""Wire format of the TCP transport, and the blocking calls that send and receive it.

A connection carries writes in one direction and acknowledgements in the other::

    accepting side  -> greeting: magic, nonce                                    40 bytes
    dialling side   -> hello: magic, nonce, proof of the token over both nonces and the name, name
    accepting side  -> its own proof                                             32 bytes
    dialling side   -> frames: header, copies [n, 3], notice, payload
    accepting side  -> acks: number of a write whose last frame has landed        8 bytes each

A proof is an HMAC-SHA256 keyed by the token in the accepting side's card. So the token itself is
never sent, and each side knows that the other has the card. All numbers are little-endian.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.transports.regions import MAX_NOTICE_BYTES
from kvbaton.errors import RemoteProtocolError

MAGIC = b"kvbaton1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_NAME_BYTES = 512
MAX_FRAME_COPIES = 4096
ACK = struct.Struct("<Q")
_HELLO = struct.Struct(f"<{NONCE_BYTES}s{PROOF_BYTES}sH")
_HEADER = struct.Struct("<8sB3xIIQQ")
_IOV = 512
"""Maximum number of buffers per system call; Linux allows 1024."""
_BUFFER_BYTES = 4 << 20
_DEAD_AFTER_MS = 20_000


class FrameKind(enum.IntEnum):
    """Kind of a frame."""

    PART = 1
    """Some copies of a write; more frames of the write follow."""
    LAST = 2
    """The last copies of a write, and its notice."""
    BYE = 3
    """The dialling side closes the connection on purpose."""


class Header(NamedTuple):
    """Header of a frame."""

    kind: FrameKind
    num_copies: int
    notice_bytes: int
    write: int
    payload_bytes: int

    def pack(self) -> bytes:
        """Encode."""
        return _HEADER.pack(MAGIC, *self)


def tune(sock: socket.socket) -> None:
    """Set options of a new connection: no delay, and time-outs that detect dead peers."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MS)


def enlarge_buffers(sock: socket.socket) -> None:
    """Ask for large kernel buffers; called before `listen` or `connect`, so that windows scale."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def greet(sock: socket.socket, token: bytes, deadline: float, admit: Callable[[str], None]) -> None:
    """Handshake of the accepting side: learns the dialler's name, and that it holds the card.

    Args:
        sock: A new connection.
        token: Token of this side's card.
        deadline: Deadline on the monotonic clock.
        admit: Called with the name before the handshake is answered; raises to refuse the dialler.

    Raises:
        RemoteProtocolError: The dialler does not speak this protocol, or lacks the token.
        OSError: The connection broke, or the deadline passed (`TimeoutError`).
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    sock.sendall(MAGIC + nonce)
    _expect_magic(sock, deadline)
    theirs, proof, length = _HELLO.unpack(_receive_until(sock, _HELLO.size, deadline))
    if length > MAX_NAME_BYTES:
        raise RemoteProtocolError(f"a name of {length} bytes")
    name = _receive_until(sock, length, deadline)
    if not hmac.compare_digest(proof, _prove(token, b"dial", nonce, theirs, name)):
        raise RemoteProtocolError("a dialler does not hold our card")
    admit(name.decode(errors="replace"))
    sock.sendall(_prove(token, b"accept", theirs, nonce, b""))


def introduce(sock: socket.socket, token: bytes, name: str, deadline: float) -> None:
    """Handshake of the dialling side; `token` is from the other side's card. Raises as `greet`."""
    _expect_magic(sock, deadline)
    theirs = _receive_until(sock, NONCE_BYTES, deadline)
    nonce, encoded = secrets.token_bytes(NONCE_BYTES), name.encode()
    proof = _prove(token, b"dial", theirs, nonce, encoded)
    sock.sendall(MAGIC + _HELLO.pack(nonce, proof, len(encoded)) + encoded)
    answer = _receive_until(sock, PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, _prove(token, b"accept", nonce, theirs, b"")):
        raise RemoteProtocolError("whoever listens there does not hold the card we were given")


def receive_header(sock: socket.socket) -> Header:
    """Wait for the header of a frame.

    Raises:
        RemoteProtocolError: It is no header, or exceeds a limit.
        ConnectionError: The other side has closed the connection.
    """
    magic, kind, *numbers = _HEADER.unpack(receive(sock, _HEADER.size))
    if magic != MAGIC or kind not in set(FrameKind):
        raise RemoteProtocolError(f"not a frame: {magic!r}, kind {kind}")
    header = Header(FrameKind(kind), *numbers)
    if header.num_copies > MAX_FRAME_COPIES or header.notice_bytes > MAX_NOTICE_BYTES:
        raise RemoteProtocolError(f"a frame over the limits: {header}")
    return header


def receive_copies(
    sock: socket.socket, header: Header, sizes: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Read a frame's copies, int64 [n, 3] (region, offset, bytes), and check each of them.

    Raises:
        RemoteProtocolError: A copy exceeds a region, or their sum differs from the payload.
    """
    data = receive(sock, header.num_copies * 24)
    copies = np.frombuffer(data, dtype="<i8").reshape(-1, 3).astype(np.int64)
    region, offset, length = copies.T
    known = np.append(np.asarray(sizes, dtype=np.int64), 0)
    inside = (region >= 0) & (region < len(sizes))
    room = known[np.where(inside, region, len(sizes))] - np.maximum(length, 0)
    if not np.all(inside & (length > 0) & (offset >= 0) & (room >= 0) & (offset <= room)):
        raise RemoteProtocolError("a frame writes outside of our regions")
    if sum(length.tolist()) != header.payload_bytes:
        raise RemoteProtocolError("a frame's copies do not add up to its payload")
    return copies


def send_all(sock: socket.socket, views: Sequence[bytes | memoryview]) -> None:
    """Send buffers in order (gather write), without copying them."""
    _move_all(sock.sendmsg, [memoryview(view) for view in views])


def receive_all(sock: socket.socket, views: Iterable[memoryview]) -> None:
    """Fill buffers in order (scatter read).

    Raises:
        ConnectionError: The other side closed before they were full.
    """

    def fill(batch: list[memoryview]) -> int:
        count: int = sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        return count

    _move_all(fill, list(views))


def receive(sock: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes."""
    data = sock.recv(size, socket.MSG_WAITALL) if size else b""
    if len(data) < size:  # closed, or interrupted by a signal
        rest = bytearray(size - len(data))
        receive_all(sock, [memoryview(rest)])
        data += rest
    return data


def _move_all(move: Callable[[list[memoryview]], int], views: list[memoryview]) -> None:
    """Call `move`, which returns the bytes moved, with views until all their bytes are moved."""
    position = 0
    while position < len(views):
        batch = views[position : position + _IOV]
        count = move(batch)
        if count == sum(map(len, batch)):
            position += len(batch)
            continue
        while count >= len(views[position]):
            count -= len(views[position])
            position += 1
        views[position] = views[position][count:]


def _receive_until(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left)
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed during the handshake")
        data += piece
    return data


def _expect_magic(sock: socket.socket, deadline: float) -> None:
    found = _receive_until(sock, len(MAGIC), deadline)
    if found != MAGIC:
        raise RemoteProtocolError(f"not a transport of ours: {found!r}")


def _prove(token: bytes, role: bytes, first: bytes, second: bytes, name: bytes) -> bytes:
    return hmac.digest(token, role + b"\0" + first + second + name, hashlib.sha256)
