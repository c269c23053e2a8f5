"""The reference transport: both peers live in one process, and a write is a copy.

It is the reference for the other transports and for model-based tests. A `MemoryHub` stands for the
network. While it is held, all writes stay in flight, so that tests can stop, fence or kill a side
meanwhile.

Laws: state shared by two transports changes only under the hub's lock. A write lands as a whole or
not at all. A write that has not landed when its connection is closed, its writer is fenced, or
either side is shut down, never lands.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvbaton.connectors.base import Capabilities, FenceScope, Memory, Notice, Peer, Region, Status
from kvbaton.connectors.transports.regions import (
    MAX_NOTICE_BYTES,
    BaseHandle,
    Copies,
    RegionTable,
    check_notice,
    decode_card,
    expand,
    own_peer,
)
from kvbaton.errors import TransportError

if TYPE_CHECKING:
    from kvbaton.connectors.base import Ranges


class MemoryCard(msgspec.Struct, frozen=True):
    """Card: the name on the hub, and the bytes of each region."""

    name: str
    sizes: tuple[int, ...]


_card = msgspec.msgpack.Decoder(MemoryCard)


class MemoryHub:
    """All transports that can reach each other, and the writes that are in flight."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._held = False
        self._in_flight: list[MemoryHandle] = []
        self._members: weakref.WeakValueDictionary[str, MemoryTransport] = (
            weakref.WeakValueDictionary()
        )

    def hold(self) -> None:
        """Keep writes posted from now on in flight until `release`."""
        with self.lock:
            self._held = True

    def release(self) -> None:
        """Let held writes land, in order; later ones land at once."""
        with self.lock:
            self._held = False
            for handle in self._in_flight:
                handle.land()
            self._in_flight.clear()

    def join(self, member: MemoryTransport) -> None:
        """Make a transport reachable by its name."""
        with self.lock:
            if member.name in self._members:
                raise TransportError(f"the name {member.name!r} is taken on this hub")
            self._members[member.name] = member

    def leave(self, name: str) -> None:
        """Remove a transport, as if its process had died; does nothing for unknown names."""
        with self.lock:
            gone = self._members.pop(name, None)
            if gone is None:
                return
            self.void(lambda handle: name in (handle.writer.name, handle.peer.name))
            for member in self._members.values():
                member.lose(name)

    def find(self, name: str) -> MemoryTransport | None:
        """The transport of this name, if any."""
        return self._members.get(name)

    def post(self, handle: MemoryHandle) -> None:
        """Start a write: it lands now, or when the hub is released."""
        with self.lock:
            if self._held:
                self._in_flight.append(handle)
            else:
                handle.land()

    def void(self, doomed: Callable[[MemoryHandle], bool]) -> None:
        """End in-flight writes without landing them."""
        for handle in self._in_flight:
            if doomed(handle):
                handle.drain("the write was given up in flight")
        self._in_flight = [h for h in self._in_flight if h.status() is Status.PENDING]


PROCESS_HUB = MemoryHub()
"""Hub of all transports of this process that get none explicitly (``--transport memory``)."""


class MemoryPeer:
    """A connection from one transport to another of the same hub."""

    def __init__(self, card: MemoryCard) -> None:
        self.name = card.name
        self.sizes = card.sizes
        self.open = True


@dataclass(eq=False)
class MemoryHandle(BaseHandle):
    """One write; its state changes under the hub's lock only."""

    writer: MemoryTransport
    peer: MemoryPeer
    copies: Copies
    notice: bytes

    def land(self) -> None:
        """Copy the bytes, then deliver the notice; fail if the target does not accept the write."""
        target = self.writer.hub.find(self.peer.name)
        if target is None or not self.peer.open or self.writer.closed:
            self.drain(f"the connection to {self.peer.name} is closed")
        elif not target.receive(self.writer, self.copies, self.notice):
            self.drain(f"peer {self.peer.name} does not take this write")
        else:
            self._status = Status.DONE

    def drain(self, reason: str) -> None:
        """Fail the write; no byte of it lands any more."""
        self._status, self._error = Status.DRAINED, reason


class MemoryTransport:
    """Copies between transports of one process."""

    capabilities = Capabilities(
        frozenset({"cpu"}), MAX_NOTICE_BYTES, FenceScope.PEER, processes=False
    )

    def __init__(self, name: str, *, host: str = "127.0.0.1", hub: MemoryHub | None = None) -> None:
        """Join a hub.

        Args:
            name: Unique on the hub.
            host: Ignored, as nothing leaves the process.
            hub: The hub; `PROCESS_HUB` if not given.
        """
        self.name = name
        self.hub = hub if hub is not None else PROCESS_HUB
        self._regions = RegionTable()
        self._peers: list[MemoryPeer] = []
        self._inbox: deque[Notice] = deque()
        self._lost: list[MemoryPeer] = []
        self._fenced: set[str] = set()
        self.closed = False
        self.hub.join(self)

    def register(self, memory: Memory) -> Region:
        """Make memory reachable.

        Raises:
            TransportError: The memory is not CPU memory.
        """
        if memory.device != "cpu":
            raise TransportError(f"the memory transport can't reach {memory.device} memory")
        with self.hub.lock:
            return self._regions.add(memory)

    def deregister(self, region: Region) -> None:
        """Undo `register`."""
        with self.hub.lock:
            self._regions.remove(region)

    def card(self) -> bytes:
        """The name, and the sizes of the regions."""
        return msgspec.msgpack.encode(MemoryCard(self.name, self._regions.sizes))

    def connect(self, card: bytes) -> MemoryPeer:
        """Connect to the owner of a card; lifts an earlier fence against it.

        Raises:
            TransportError: The card is invalid, or its owner is gone.
        """
        decoded = decode_card(card, _card, "memory")
        with self.hub.lock:
            if self.hub.find(decoded.name) is None:
                raise TransportError(f"no transport {decoded.name!r} in this process")
            self._fenced.discard(decoded.name)
            peer = MemoryPeer(decoded)
            self._peers.append(peer)
            return peer

    def close(self, peer: Peer) -> bool:
        """Drop writes to a peer that have not landed. Always returns True."""
        with self.hub.lock:
            own = own_peer(peer, MemoryPeer, "memory")
            own.open = False
            self.hub.void(lambda handle: handle.peer is own)
            self._peers = [p for p in self._peers if p is not own]
        return True

    def fence(self, peer: Peer) -> bool:
        """Refuse writes that the peer has in flight or sends from now on. Always returns True."""
        with self.hub.lock:
            self._fenced.add(peer.name)
            self.hub.void(lambda h: (h.writer.name, h.peer.name) == (peer.name, self.name))
        return True

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
        """Copy now, or when the hub is released."""
        check_notice(notice)
        own = own_peer(peer, MemoryPeer, "memory")
        copies = expand(ranges, self._regions.sizes, own.sizes)
        handle = MemoryHandle(self, own, copies, notice)
        self.hub.post(handle)
        return handle

    def receive(self, writer: MemoryTransport, copies: Copies, notice: bytes) -> bool:
        """Accept a write of another transport; False if that is fenced, or a region is unknown."""
        targets = self._regions.addresses()
        named = np.unique(copies.target_region).tolist()
        if writer.name in self._fenced or not all(targets[index] for index in named):
            return False
        sources = writer._regions.addresses()
        columns = (column.tolist() for column in copies)
        for source, source_offset, target, target_offset, length in zip(*columns, strict=True):
            ctypes.memmove(targets[target] + target_offset, sources[source] + source_offset, length)
        self._inbox.append(Notice(notice))
        return True

    def notices(self) -> Sequence[Notice]:
        """Notices of writes that landed here since the last call."""
        with self.hub.lock:
            landed, self._inbox = self._inbox, deque()
        return tuple(landed)

    def lose(self, name: str) -> None:
        """Note that the peers of this name are gone."""
        self._lost += [peer for peer in self._peers if peer.name == name]

    def lost(self) -> Sequence[MemoryPeer]:
        """Peers that were found to be gone since the last call."""
        with self.hub.lock:
            gone, self._lost = self._lost, []
        return tuple(gone)

    def shutdown(self) -> None:
        """Leave the hub; writes in flight from or to this transport never land."""
        if not self.closed:
            self.closed = True
            self.hub.leave(self.name)
