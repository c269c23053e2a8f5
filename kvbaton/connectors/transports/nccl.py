"""Transport over NCCL between GPUs; the same code runs over gloo on CPUs.

A writer announces each frame over an authenticated socket, as in the TCP transport. The target's
thread checks the ranges and then posts the matching receive. Each direction of a pair has its own
process group of two ranks, so both directions can be busy; the default group is not used. Two GPUs
are needed, as NCCL refuses to use one twice.

Both sides copy all bytes through a buffer of `CHUNK_BYTES`. So many small pieces are sent as one
message, and only this transport's threads access registered memory: NCCL or gloo can't access it
after an abort. That is why the fence scope is PEER, as over TCP.

The rendezvous store listens only on the transport's host, but does not authenticate.
"""

from __future__ import annotations

import importlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

from typing_extensions import override

from kvbaton.connectors.base import Capabilities, Device, FenceScope, Memory, Region
from kvbaton.connectors.transports import tcp_wire
from kvbaton.connectors.transports.regions import MAX_NOTICE_BYTES
from kvbaton.connectors.transports.tcp import TcpTransport
from kvbaton.connectors.transports.tcp_connections import (
    AcceptedConnection,
    TcpCard,
    TcpListener,
    TcpPeer,
)
from kvbaton.connectors.transports.tcp_staging import Run, tensor_of
from kvbaton.errors import ConfigError, RemoteProtocolError, TransportError

CHUNK_BYTES = 16 << 20
"""Size of the buffer of each end in bytes, and maximum of one message."""
OPEN_S = 5.0
"""Time-out of the rendezvous in seconds."""
STALL_S = 20.0
"""Time-out of one chunk in seconds."""
POLL_S = 0.00005
"""Seconds between polls of a NCCL operation."""
CHECK_S = 0.02
"""Seconds between checks whether the connection of a gloo operation still lives."""
_OFFER = struct.Struct("<4sH")


class NcclLibrary:
    """torch, imported on first use, and the choice of the backend and of the buffers' device.

    Attributes:
        backend: ``nccl`` or ``gloo``.
        device: Device of the buffers.
    """

    def __init__(self, backend: str) -> None:
        if backend not in ("auto", "nccl", "gloo"):
            raise ConfigError("backend", f"must be auto, nccl or gloo, not {backend!r}")
        if backend == "nccl" and not self.has_nccl:
            raise ConfigError("backend", "nccl needs a GPU and a torch with NCCL; gloo does not")
        self._asked = backend
        self.settle("cpu", 0)

    @cached_property
    def torch(self) -> Any:
        """The module ``torch``."""
        return importlib.import_module("torch")

    @cached_property
    def distributed(self) -> Any:
        """The module ``torch.distributed``."""
        return importlib.import_module("torch.distributed")

    @property
    def has_nccl(self) -> bool:
        """Whether there is a GPU, and torch was built with NCCL."""
        return bool(self.torch.cuda.is_available() and self.distributed.is_nccl_available())

    def settle(self, kind: str, index: int) -> None:
        """Set `backend` and `device` for memory of a device; ``auto`` takes NCCL for a GPU."""
        auto = "nccl" if kind == "cuda" else "gloo"
        self.backend = auto if self._asked == "auto" else self._asked
        self.device = f"cuda:{index}" if self.backend == "nccl" else "cpu"


class PairGroup:
    """One end of a process group of two: rank 0 accepts and receives, rank 1 dials and sends."""

    def __init__(self, library: NcclLibrary, host: str, port: int, listener: int | None) -> None:
        self._library = library
        self._rank = 1 if listener is None else 0
        self._aborted = False
        torch, distributed = library.torch, library.distributed
        extra = {} if listener is None else {"master_listen_fd": listener}
        limit = timedelta(seconds=OPEN_S)
        store = distributed.TCPStore(
            host, port, 2, not self._rank, limit, wait_for_workers=False, **extra
        )
        if library.backend == "gloo":
            options = distributed.ProcessGroupGloo._Options()
            options._timeout = limit
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
            self._group = distributed.ProcessGroupGloo(store, self._rank, 2, options)
        else:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=STALL_S)
            self._group = distributed.ProcessGroupNCCL(store, self._rank, 2, options)
            self._stream = torch.cuda.Stream(torch.device(library.device))
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=library.device)

    def send(self, views: Sequence[Any], alive: Callable[[], bool]) -> None:
        """Send pieces, uint8 tensors [n]. Raises `ConnectionError`."""
        with self._on_stream():
            for pieces in chunks(views):
                mine = self._buffer[: sum(map(len, pieces))]
                self._library.torch._foreach_copy_(_split(mine, pieces), pieces)
                self._cross(lambda data=mine: self._group.send([data], 0, 0), alive)  # type: ignore[misc]

    def receive(self, views: Sequence[Any], alive: Callable[[], bool]) -> None:
        """Receive pieces, uint8 tensors [n], complete on return. Raises `ConnectionError`."""
        with self._on_stream():
            for pieces in chunks(views):
                mine = self._buffer[: sum(map(len, pieces))]
                self._cross(lambda data=mine: self._group.recv([data], 1, 0), alive)  # type: ignore[misc]
                if not alive():
                    raise ConnectionAbortedError("fenced")
                self._library.torch._foreach_copy_(list(pieces), _split(mine, pieces))
                self._synchronize()

    def abort(self) -> None:
        """Abort operations in flight. Thread-safe and idempotent."""
        if not self._aborted:
            self._aborted = True
            self._group.abort()

    def _on_stream(self) -> Any:
        cuda = self._library.torch.cuda
        return cuda.stream(self._stream if self._library.backend == "nccl" else None)

    def _synchronize(self) -> None:
        if self._library.backend == "nccl":
            self._stream.synchronize()

    def _cross(self, start: Callable[[], Any], alive: Callable[[], bool]) -> None:
        try:
            work = start()
            if self._library.backend == "gloo":
                self._wait_aside(work, alive)
                return
            limit = time.monotonic() + STALL_S
            while not work.is_completed():
                if not alive() or time.monotonic() > limit:
                    self.abort()
                    raise ConnectionAbortedError("the other side is gone or stalled")
                time.sleep(POLL_S)
            work.wait()
            self._synchronize()
        except RuntimeError as error:
            raise ConnectionAbortedError(str(error).partition("\n")[0]) from error

    def _wait_aside(self, work: Any, alive: Callable[[], bool]) -> None:
        """Wait in a separate thread, as an abort does not end gloo's wait.

        A thread that is left behind holds this end's buffer, never registered memory, for at most
        `STALL_S`.
        """
        ended = threading.Event()
        failed: list[RuntimeError] = []

        def wait() -> None:
            try:
                work.wait(timedelta(seconds=STALL_S))
            except RuntimeError as error:
                failed.append(error)
            ended.set()

        threading.Thread(target=wait, name="gloo wait", daemon=True).start()
        while not ended.wait(CHECK_S):
            if not alive():
                raise ConnectionAbortedError("the other side is gone, or we have hung up")
        if failed:
            raise failed[0]


class NcclPeer(TcpPeer):
    """The sending end: frame headers over the socket, payloads through the process group."""

    def __init__(self, card: TcpCard, own_name: str, library: NcclLibrary) -> None:
        self._library = library
        self._group: PairGroup | None = None
        super().__init__(card, own_name)

    def hang_up(self, reason: str) -> None:
        """End the connection, and abort operations in flight."""
        super().hang_up(reason)
        if self._group is not None:
            self._group.abort()

    @override
    def introduced(self, sock: socket.socket) -> None:
        data = sock.recv(_OFFER.size, socket.MSG_WAITALL)
        if len(data) < _OFFER.size:
            raise ConnectionResetError("the connection was closed during the rendezvous")
        backend, port = _OFFER.unpack(data)
        if backend != self._library.backend.encode():
            raise RemoteProtocolError(f"they use {backend!r}, we {self._library.backend}")
        self._group = PairGroup(self._library, self.card.host, port, None)

    def _run(self) -> None:
        super()._run()
        self._group = None

    @override
    def send_frame(self, sock: socket.socket, head: bytes, runs: Sequence[Run]) -> None:
        assert self._group is not None
        tcp_wire.send_all(sock, [head])
        for pieces in runs:
            self._group.send(pieces, lambda: self.broken is None and _connected(sock))


class NcclListener(TcpListener):
    """The receiving end."""

    def __init__(self, library: NcclLibrary, host: str, *words: Any) -> None:
        self._library, self._host = library, host
        self._groups: dict[AcceptedConnection, PairGroup] = {}
        super().__init__(host, *words)

    @override
    def greet(self, connection: AcceptedConnection) -> None:
        super().greet(connection)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((self._host, 0))
            listener.listen(4)
            port = listener.getsockname()[1]
            connection.socket.sendall(_OFFER.pack(self._library.backend.encode(), port))
            try:
                group = PairGroup(self._library, self._host, port, listener.detach())
            except RuntimeError as error:
                raise ConnectionAbortedError(f"no process group: {error}") from error
        self._groups[connection] = group
        connection.on_cut = group.abort

    def _run(self, connection: AcceptedConnection) -> None:
        super()._run(connection)
        connection.on_cut = None
        self._groups.pop(connection, None)

    @override
    def receive_payload(self, connection: AcceptedConnection, runs: Sequence[Run]) -> None:
        def alive() -> bool:
            return not connection.cut and _connected(connection.socket)

        for pieces in runs:
            self._groups[connection].receive(pieces, alive)


class NcclTransport(TcpTransport):
    """Writes into registered memory of other processes through NCCL or gloo."""

    def __init__(self, name: str, *, host: str = "127.0.0.1", backend: str = "auto") -> None:
        """Listen on a free port.

        Args:
            name: Unique per process and generation.
            host: Address to listen on, which peers dial as well.
            backend: ``nccl``, ``gloo``, or ``auto``: NCCL for GPU memory, else gloo.

        Raises:
            ConfigError: The host or the backend is invalid.
        """
        self._library = NcclLibrary(backend)
        super().__init__(name, host=host)
        devices: set[Device] = {"cpu"} if backend == "gloo" else {"cpu", "cuda"}
        self.capabilities = Capabilities(frozenset(devices), MAX_NOTICE_BYTES, FenceScope.PEER)

    def register(self, memory: Memory) -> Region:
        """Make memory reachable.

        Raises:
            TransportError: The backend can't use this memory.
        """
        if memory.device == "cuda" and not (
            "cuda" in self.capabilities.devices and self._library.has_nccl
        ):
            raise TransportError(f"{self._library.backend} can't reach cuda memory")
        if not self._views:
            self._library.settle(memory.device, memory.device_index)
        self._views.append(tensor_of(self._library.torch, memory))
        return self._regions.add(memory)

    @override
    def listen(self, host: str) -> TcpListener:
        return NcclListener(self._library, host, self._regions, self._views)

    @override
    def dial(self, card: TcpCard) -> TcpPeer:
        return NcclPeer(card, self.name, self._library)


def chunks(views: Sequence[Any]) -> Iterator[list[Any]]:
    """Group pieces into chunks of at most `CHUNK_BYTES`, cut in the same way on both sides."""
    batch: list[Any] = []
    room = CHUNK_BYTES
    for view in views:
        while len(view):
            batch.append(view[:room])
            view = view[room:]
            room -= len(batch[-1])
            if not room:
                yield batch
                batch, room = [], CHUNK_BYTES
    if batch:
        yield batch


def _split(buffer: Any, pieces: Sequence[Any]) -> list[Any]:
    return list(buffer.split([len(piece) for piece in pieces]))


def _connected(sock: socket.socket) -> bool:
    """Whether the other side has not closed the connection; never blocks."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False
