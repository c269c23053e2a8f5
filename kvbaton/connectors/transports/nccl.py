"""Transport over NCCL between GPUs; the same code runs over gloo on CPUs.

A writer announces each frame over an authenticated socket as the TCP transport's does; the
target's thread checks its ranges and then posts the matching receive (`nccl_group`). Each direction
of a pair has a group of its own, so both may be busy. Two GPUs are needed: NCCL refuses one twice.

Fence scope is PEER, for the same reason as over TCP: only our own thread writes to our regions.
"""

from __future__ import annotations

import ctypes
import socket
from typing import TYPE_CHECKING, Any

from kvbaton.connectors.base import Capabilities, FenceScope, Memory, Region
from kvbaton.connectors.transports import nccl_group, tcp_wire
from kvbaton.connectors.transports.tcp import TcpTransport
from kvbaton.connectors.transports.tcp_incoming import Incoming, Landing, Listener
from kvbaton.connectors.transports.tcp_outgoing import TcpCard, TcpPeer
from kvbaton.connectors.transports.tcp_wire import MAX_NOTICE_BYTES
from kvbaton.errors import TransportError

if TYPE_CHECKING:
    from kvbaton.connectors.transports.nccl_group import Group, Library


class NcclPeer(TcpPeer):
    """The sending end: announcements over the socket, bytes through the group."""

    def __init__(self, card: TcpCard, own_name: str, library: Library) -> None:
        self._library = library
        self._group: Group | None = None
        super().__init__(card, own_name)

    def hang_up(self, reason: str) -> None:
        """End the connection and what is in flight."""
        super().hang_up(reason)
        if self._group is not None:
            self._group.abort()

    def _prepare(self) -> None:
        self._group = nccl_group.meet(self._library, self._socket, self.card.host)

    def _run(self) -> None:
        super()._run()
        self._group = None

    def _send_frame(self, head: bytes, pieces: Any) -> None:
        assert self._group is not None
        tcp_wire.send_all(self._socket, [head])
        self._group.send(pieces, lambda: self.broken is None and _connected(self._socket))


class NcclListener(Listener):
    """The receiving end."""

    def __init__(self, host: str, token: bytes, landing: Landing, library: Library) -> None:
        self._host, self._library = host, library
        self._groups: dict[Incoming, Group] = {}
        super().__init__(host, token, landing)

    def _greet(self, connection: Incoming) -> None:
        super()._greet(connection)
        group = nccl_group.accept(self._library, connection.socket, self._host)
        self._groups[connection] = group
        connection.on_cut = group.abort

    def _run(self, connection: Incoming) -> None:
        super()._run(connection)
        connection.on_cut = None
        self._groups.pop(connection, None)

    def _fill(self, connection: Incoming, targets: Any) -> None:
        def alive() -> bool:
            return not connection.cut and _connected(connection.socket)

        self._groups[connection].receive(targets, alive)


class NcclTransport(TcpTransport):
    """Writes into registered memory of other processes through NCCL or gloo."""

    def __init__(self, name: str, *, host: str = "127.0.0.1", backend: str = "auto") -> None:
        """Listen on a free port.

        Args:
            name: unique per process and generation.
            host: address to listen on, which peers dial as well.
            backend: ``nccl``, ``gloo``, or ``auto``: NCCL for a GPU's memory.

        Raises:
            ConfigError: bad host or backend, or no torch.
        """
        self._library = nccl_group.Library(backend)
        super().__init__(name, host=host)

    @property
    def capabilities(self) -> Capabilities:
        """CPU memory, and CUDA memory over NCCL; a fence always holds."""
        devices = {"cpu", "cuda"} if self._library.reaches_gpus else {"cpu"}
        return Capabilities(frozenset(devices), MAX_NOTICE_BYTES, FenceScope.PEER)  # type: ignore[arg-type]

    def register(self, memory: Memory) -> Region:
        """Make memory reachable.

        Raises:
            TransportError: the backend can't reach it.
        """
        if memory.device not in self.capabilities.devices:
            raise TransportError(f"{self._library.backend} can't reach {memory.device} memory")
        if not self._views:
            self._library.settle(memory.device, memory.device_index)
        self._views.append(_tensor(self._library.torch, memory))
        return self._regions.add(memory)

    def _listen(self, host: str) -> Listener:
        return NcclListener(host, self._token, self, self._library)

    def _dial(self, card: TcpCard) -> TcpPeer:
        return NcclPeer(card, self._name, self._library)


class _CudaBytes:
    """Memory of a GPU as torch takes it in without a copy."""

    def __init__(self, memory: Memory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def _tensor(torch: Any, memory: Memory) -> Any:
    """Memory as a uint8 tensor [num_bytes] that shares it."""
    if memory.device == "cuda":
        return torch.as_tensor(_CudaBytes(memory), device=f"cuda:{memory.device_index}")
    array = (ctypes.c_ubyte * memory.num_bytes).from_address(memory.address)
    return torch.frombuffer(array, dtype=torch.uint8)


def _connected(sock: socket.socket) -> bool:
    """False once the other side has closed; never blocks."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False
