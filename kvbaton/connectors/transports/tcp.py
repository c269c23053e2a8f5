"""Transport over plain sockets: needs nothing but Python, and its fence always succeeds.

Each connected peer has one connection, with a sending thread here and a receiving thread there. The
receiving thread reads payloads directly into registered memory, at offsets that it has checked
(`tcp_connections`). `tcp_wire` describes the wire format. GPU memory is staged through pinned host
memory (`tcp_staging`).

The fence scope is PEER: only this process's receiving threads write its memory, so once the thread
of a peer has ended, no byte of that peer can land, whatever the peer's process does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from kvbaton.connectors.address import check_dialable
from kvbaton.connectors.base import Capabilities, FenceScope, Memory, Notice, Peer, Ranges, Region
from kvbaton.connectors.guard import guard_card
from kvbaton.connectors.transports.regions import (
    MAX_NOTICE_BYTES,
    RegionTable,
    check_notice,
    decode_card,
    expand,
    own_peer,
)
from kvbaton.connectors.transports.tcp_connections import TcpCard, TcpHandle, TcpListener, TcpPeer
from kvbaton.connectors.transports.tcp_staging import (
    LANE_BYTES,
    GpuCopies,
    GpuRegion,
    PinnedBounceBuffer,
)
from kvbaton.connectors.transports.tcp_wire import MAX_NAME_BYTES
from kvbaton.errors import ConfigError, TransportError

JOIN_S = 1.0
"""Seconds that `shutdown` waits for the threads of all connections."""

_card = msgspec.msgpack.Decoder(TcpCard)


class TcpTransport:
    """Writes into registered memory of other processes over TCP."""

    capabilities = Capabilities(
        frozenset({"cpu", "cuda"}),
        MAX_NOTICE_BYTES,
        FenceScope.PEER,
        host_staged=frozenset({"cuda"}),
    )

    def __init__(self, name: str, *, host: str = "127.0.0.1", pinned_mib: int = 64) -> None:
        """Listen on a free port.

        Args:
            name: Unique per process and generation.
            host: Address to listen on, which peers dial as well.
            pinned_mib: Maximum MiB of pinned memory to stage GPU memory, over both directions; 16
                MiB let one connection per direction move bytes at the same time.

        Raises:
            ConfigError: The host is a wildcard, or it is impossible to listen on it; or
                `pinned_mib` is too small.
        """
        if pinned_mib << 20 < 2 * LANE_BYTES:
            raise ConfigError("pinned_mib", f"must be at least {2 * LANE_BYTES >> 20}")
        check_dialable(host)
        if len(name.encode()) > MAX_NAME_BYTES:
            raise ConfigError("name", f"has more than {MAX_NAME_BYTES} bytes")
        self.name = name
        self._host = host
        self._regions = RegionTable()
        self._views: list[memoryview | GpuRegion] = []
        self._pinned_bytes = pinned_mib << 20
        self._staging: PinnedBounceBuffer | None = None
        self._device_index = 0
        self._peers: list[TcpPeer] = []
        self._closing: list[TcpPeer] = []
        self._guard = guard_card(host)
        self._listener = self.listen(host)
        self._closed = False

    def register(self, memory: Memory) -> Region:
        """Make memory reachable.

        Raises:
            TransportError: The GPU can't be used, or memory of another GPU is registered already.
        """
        view: memoryview | GpuRegion
        if memory.device == "cpu":
            view = memory.view()
        else:
            if self._staging is None:
                gpu = self.gpu_copies(memory.device_index)
                self._device_index = memory.device_index
                self._staging = PinnedBounceBuffer(gpu, self._pinned_bytes)
            if memory.device_index != self._device_index:
                raise TransportError("a TCP transport reaches one GPU: use one transport for each")
            view = GpuRegion(self._staging, self._staging.gpu.region(memory))
        self._views.append(view)
        return self._regions.add(memory)

    def deregister(self, region: Region) -> None:
        """Undo `register`."""
        self._regions.remove(region)
        self._views[region.index] = memoryview(b"")

    def card(self) -> bytes:
        """The address to dial, the token, and the sizes of the regions."""
        card = TcpCard(
            self.name,
            self._host,
            self._listener.port,
            self._listener.token,
            self._guard,
            self._regions.sizes,
        )
        return msgspec.msgpack.encode(card)

    def connect(self, card: bytes) -> TcpPeer:
        """Start to dial the owner of a card.

        If it can't be reached, `lost` reports the peer and its writes fail.

        Raises:
            TransportError: The card is invalid.
        """
        peer = self.dial(decode_card(card, _card, "TCP"))
        self._peers.append(peer)
        return peer

    def close(self, peer: Peer) -> bool:
        """Hang up; False while the sending thread still sends a frame, for about 0.2 s at most."""
        own = own_peer(peer, TcpPeer, "TCP")
        if own in self._peers:
            self._peers.remove(own)
            self._closing.append(own)
        return self._close(own)

    def fence(self, peer: Peer) -> bool:
        """Cut the peer's connections to here and wait for their threads; changes this card."""
        return self._listener.fence(own_peer(peer, TcpPeer, "TCP").name)

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> TcpHandle:
        """Queue a write for the peer's sending thread."""
        check_notice(notice)
        own = own_peer(peer, TcpPeer, "TCP")
        copies = expand(ranges, self._regions.sizes, own.card.sizes)
        return own.post(copies, tuple(self._views), notice)

    def notices(self) -> Sequence[Notice]:
        """Notices of writes that landed here since the last call."""
        inbox = self._listener.inbox
        return tuple(inbox.popleft() for _ in range(len(inbox)))

    def lost(self) -> Sequence[TcpPeer]:
        """Peers whose connection broke, in either direction, without a goodbye."""
        names = self._listener.vanished
        vanished = {names.popleft() for _ in range(len(names))}
        for peer in tuple(self._closing):
            self._close(peer)
        for peer in self._peers:
            peer.read_acks()
            if peer.name in vanished:
                peer.hang_up(f"peer {peer.name} broke its connection to us")
            elif peer.watch.cut:
                peer.hang_up(f"peer {peer.name} can't be reached")
        gone = tuple(p for p in self._peers if p.broken is not None and not p.reported)
        for peer in gone:
            peer.reported = True
        return gone

    def shutdown(self) -> None:
        """Hang up everywhere and stop listening."""
        if self._closed:
            return
        self._closed = True
        for peer in tuple(self._peers):
            self.close(peer)
        limit = time.monotonic() + JOIN_S
        for peer in self._closing:
            peer.join(limit)
        self._listener.close()
        if self._staging is not None:
            self._staging.close()

    def _close(self, peer: TcpPeer) -> bool:
        ended = peer.close()
        if ended and peer in self._closing:
            self._closing.remove(peer)
        return ended

    # --- overridden by other transports ---

    def gpu_copies(self, device_index: int) -> GpuCopies:
        """Make the copier from and to a GPU."""
        return GpuCopies(device_index)

    def listen(self, host: str) -> TcpListener:
        """Make the receiving end of connections."""
        return TcpListener(host, self._regions, self._views)

    def dial(self, card: TcpCard) -> TcpPeer:
        """Make the sending end of a connection."""
        return TcpPeer(card, self.name)
