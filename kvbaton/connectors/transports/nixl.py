"""Transport over NIXL with its UCX back end: RDMA, NVLink, shared memory or TCP, as UCX finds them.

One agent per transport, without NIXL's progress thread: every call into NIXL is made by the one
thread that owns the transport, and both sides must be polled (`Transport.notices`) for either to
make progress.

A write is cut into *parts*. Over shared memory UCX copies within the post itself, at some 4 GB/s,
so a call posts parts only until `POST_BUDGET_S` is spent and the next `status` goes on; over
hardware all parts are posted at once. The notice goes with the part if there is only one, else
after all are done.

Descriptor lists are made per part from N x 3 arrays with `initialize_xfer`: measured in 1.5.1 on a
CPU, 0.15 ms for 128 ranges and 0.57 ms for 4,096 (two prepared lists per write: 0.24 and 1.32 ms;
one list prepared per region, picked by index: 0.04 and 0.32 ms, but only for equal blocks). Posting
takes 2.1 ms for 128 x 64 KiB and 14.4 ms for 4,096 x 4 KiB, whichever was used.

Fence scope is PROCESS: a UCX writer that was stopped may go on writing after the target has
deregistered, so only the end of its process proves anything.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.connectors.base import (
    Capabilities,
    Device,
    FenceScope,
    Memory,
    Notice,
    Peer,
    Region,
    Status,
)
from kvbaton.connectors.host import ProcessCard, is_gone, is_loopback, this_process
from kvbaton.connectors.transports.nixl_parts import Part, RemoteRegion, cut
from kvbaton.connectors.transports.regions import RegionTable, expand
from kvbaton.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from types import ModuleType

    from kvbaton.connectors.base import Ranges

MAX_NOTICE_BYTES = 1 << 16
POST_BUDGET_S = 0.002
"""A call stops posting parts after this long; the next call goes on."""
LIVENESS_PERIOD_S = 0.05
SETTLE_S = 0.05
_MARK = b"N"
"""Leads every notice, since NIXL takes an empty one for none."""
_MEMORY_TYPE: dict[Device, str] = {"cpu": "DRAM", "cuda": "VRAM"}


class _Card(msgspec.Struct, frozen=True):
    name: str
    metadata: bytes
    process: ProcessCard
    regions: tuple[RemoteRegion | None, ...]


class NixlPeer:
    """A connection to one remote agent."""

    def __init__(self, card: _Card) -> None:
        self.name = card.name
        self.process = card.process
        self.regions = card.regions
        self.open = True
        self.lost = False


class NixlHandle:
    """One write: parts not yet posted, and NIXL transfers in flight."""

    def __init__(self, agent: _Agent, peer: NixlPeer, parts: list[Part], notice: bytes) -> None:
        self.peer = peer
        self._agent = agent
        self._parts = parts[::-1]
        self._notice = _MARK + notice
        self._rides_along = len(parts) == 1
        self._active: list[Any] = []
        self._posted = False
        self._status = Status.PENDING
        self._error: str | None = None

    def status(self) -> Status:
        """State now; posts and polls what is left of the write."""
        if self._status is Status.PENDING:
            self._advance()
        if self._status is Status.ERROR:
            self._settle()
        return self._status

    def error(self) -> str | None:
        """Why it failed."""
        return self._error

    @property
    def ended(self) -> bool:
        """No longer pending, as of the last `status`."""
        return self._status is not Status.PENDING

    def release(self) -> None:
        """Give up what NIXL still holds for this write."""
        self._active = [transfer for transfer in self._active if not _released(transfer)]

    def fail(self, reason: str) -> None:
        """End the write; what was posted may still land."""
        if self._status is Status.PENDING:
            self._parts.clear()
            self._error, self._status = reason, Status.ERROR
            self._settle()

    def _advance(self) -> None:
        try:
            self._poll()
            self._post()
            if not self._parts and not self._active:
                if not self._rides_along:
                    self._agent.api.send_notif(self.peer.name, self._notice)
                self._status = Status.DONE
        except self._agent.errors as error:
            self.peer.lost |= isinstance(error, self._agent.disconnect)
            self.fail(f"peer {self.peer.name}: {error}")

    def _poll(self) -> None:
        for transfer in tuple(self._active):
            self._note(transfer, self._agent.api.check_xfer_state(transfer))

    def _post(self) -> None:
        limit = time.monotonic() + POST_BUDGET_S
        while self._parts and time.monotonic() < limit:
            part = self._parts.pop()
            transfer = self._agent.prepare(self.peer.name, part)
            self._active.append(transfer)
            self._posted = True
            notice = self._notice if self._rides_along else b""
            self._note(transfer, self._agent.api.transfer(transfer, notice))

    def _note(self, transfer: Any, state: str) -> None:
        if state == "PROC":
            return
        if state != "DONE":
            raise self._agent.disconnect(f"NIXL reports {state}")
        transfer.release()
        self._active.remove(transfer)

    def _settle(self) -> None:
        """From ERROR to DRAINED once that is proven: nothing was posted, or the peer is no more."""
        self.release()
        if not self._active and (not self._posted or is_gone(self.peer.process)):
            self._status = Status.DRAINED


class _Agent:
    """A NIXL agent and the names of its module that the transport uses."""

    def __init__(self, name: str) -> None:
        module = _load_nixl()
        bindings = importlib.import_module(module.__name__.replace("._api", "._bindings"))
        self.errors = tuple(
            value
            for key, value in vars(bindings).items()
            if key.startswith("nixl") and key.endswith("Error")
        )
        self.disconnect: type[Exception] = bindings.nixlRemoteDisconnectError
        self.api: Any = module.nixl_agent(name, module.nixl_agent_config(enable_prog_thread=False))
        if "UCX" not in self.api.backends:
            raise ConfigError("--transport", "this NIXL has no UCX plugin")

    def prepare(self, peer: str, part: Part) -> Any:
        """Make a transfer of a part; the notice is given when it is posted."""
        local = self.api.get_xfer_descs(part.source, _MEMORY_TYPE[part.source_device])
        remote = self.api.get_xfer_descs(part.target, _MEMORY_TYPE[part.target_device])
        return self.api.initialize_xfer("WRITE", local, remote, peer)


class NixlTransport:
    """Writes into registered memory of other processes through NIXL."""

    def __init__(self, name: str, *, host: str = "127.0.0.1") -> None:
        """Start an agent.

        Args:
            name: unique per process and generation.
            host: a loopback address keeps UCX's own sockets on the loopback device; with any other
                address UCX takes what ``UCX_NET_DEVICES`` says.

        Raises:
            ConfigError: NIXL is not installed or has no UCX.
        """
        self._name = name
        with _net_devices(host):
            self._agent: _Agent | None = _Agent(name)
        self._process = this_process()
        self._regions = RegionTable()
        self._registered: dict[int, Any] = {}
        self._peers: list[NixlPeer] = []
        self._metadata: dict[str, bytes] = {}
        self._live: list[NixlHandle] = []
        self._inbox: list[Notice] = []
        self._next_look = 0.0

    @property
    def name(self) -> str:
        """Name of the agent."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """CPU and CUDA memory; a fence needs the peer's process to be gone."""
        return Capabilities(frozenset({"cpu", "cuda"}), MAX_NOTICE_BYTES, FenceScope.PROCESS)

    def register(self, memory: Memory) -> Region:
        """Register memory with UCX.

        Raises:
            TransportError: UCX can't reach it.
        """
        agent = self._running()
        entry = (memory.address, memory.num_bytes, memory.device_index, "")
        try:
            registered = agent.api.register_memory([entry], _MEMORY_TYPE[memory.device])
        except agent.errors as error:
            raise TransportError(f"NIXL can't register {memory}: {error}") from error
        region = self._regions.add(memory)
        self._registered[region.index] = registered
        return region

    def deregister(self, region: Region) -> None:
        """Undo `register`."""
        self._regions.remove(region)
        self._running().api.deregister_memory(self._registered.pop(region.index))

    def card(self) -> bytes:
        """The agent's metadata (addresses and remote keys), its process and its regions."""
        regions = tuple(
            RemoteRegion(m.address, m.num_bytes, m.device, m.device_index) if m else None
            for m in self._regions.memories()
        )
        metadata = self._running().api.get_agent_metadata()
        return msgspec.msgpack.encode(_Card(self._name, metadata, self._process, regions))

    def connect(self, card: bytes) -> NixlPeer:
        """Load the metadata of a card; UCX dials with the first write.

        Raises:
            TransportError: it is no card, or NIXL refuses it.
        """
        try:
            decoded = msgspec.msgpack.decode(card, type=_Card)
        except msgspec.MsgspecError as error:
            raise TransportError(f"not a card of the NIXL transport: {error}") from error
        if self._metadata.get(decoded.name) != decoded.metadata:
            self._load(decoded)
        peer = NixlPeer(decoded)
        self._peers.append(peer)
        return peer

    def close(self, peer: Peer) -> None:
        """End writes to a peer and, with its last connection, forget the remote agent."""
        own = _own(peer)
        if not own.open:
            return
        own.open = False
        for handle in self._live:
            if handle.peer is own:
                handle.fail(f"the connection to {own.name} is closed")
        self._peers = [other for other in self._peers if other is not own]
        if all(other.name != own.name for other in self._peers):
            self._forget(own.name)

    def fence(self, peer: Peer) -> bool:
        """True once the peer's process is gone and what it had sent has been taken in."""
        if not is_gone(_own(peer).process):
            return False
        # Bytes that wait in our sockets land as UCX makes progress: let them, before we say so.
        for _ in range(3):
            self._collect()
        return True

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> NixlHandle:
        """Post a write, or as much of it as a call may take."""
        if len(notice) > MAX_NOTICE_BYTES:
            raise ValueError(f"notice has {len(notice)} bytes, at most {MAX_NOTICE_BYTES}")
        own = _own(peer)
        sizes = tuple(region.num_bytes if region else 0 for region in own.regions)
        copies = expand(ranges, self._regions.sizes(), sizes)
        parts = cut(copies, self._regions.memories(), own.regions)
        handle = NixlHandle(self._running(), own, parts, notice)
        if own.open and not own.lost:
            self._live = [live for live in self._live if not live.ended]
            self._live.append(handle)
            handle.status()
        else:
            handle.fail(f"peer {own.name} is {'gone' if own.open else 'closed'}")
        return handle

    def notices(self) -> Sequence[Notice]:
        """Notices that have come in; lets UCX make progress."""
        self._collect()
        landed, self._inbox = self._inbox, []
        return tuple(landed)

    def lost(self) -> Sequence[NixlPeer]:
        """Peers that UCX found disconnected, or whose process on this machine has ended."""
        self._look_for_dead()
        gone = tuple(peer for peer in self._peers if peer.lost)
        self._peers = [peer for peer in self._peers if not peer.lost]
        return gone

    def shutdown(self) -> None:
        """Give back, in the order that NIXL wants: transfers, remote agents, memory, the agent."""
        if self._agent is None:
            return
        for peer in tuple(self._peers):
            self.close(peer)
        for name in tuple(self._metadata):
            self._forget(name)
        self._settle()
        for registered in self._registered.values():
            self._agent.api.deregister_memory(registered)
        self._registered.clear()
        self._live.clear()
        self._agent = None

    def _running(self) -> _Agent:
        if self._agent is None:
            raise TransportError(f"transport {self._name} is shut down")
        return self._agent

    def _load(self, card: _Card) -> None:
        agent = self._running()
        try:
            name = agent.api.add_remote_agent(card.metadata)
        except agent.errors as error:
            raise TransportError(f"NIXL refuses the card of {card.name}: {error}") from error
        if name != card.name.encode():
            raise TransportError(f"a card of {card.name} holds the metadata of {name!r}")
        self._metadata[card.name] = card.metadata

    def _forget(self, name: str) -> None:
        """Remove a remote agent."""
        agent = self._running()
        self._metadata.pop(name, None)
        try:
            agent.api.remove_remote_agent(name)
        except agent.errors as error:
            logging.getLogger(__name__).info("NIXL had already dropped %s: %s", name, error)

    def _settle(self) -> None:
        """Let UCX finish closing its end points: else it aborts the process."""
        limit = time.monotonic() + SETTLE_S
        while time.monotonic() < limit:
            self._collect()

    def _collect(self) -> None:
        if self._agent is None:
            return
        for messages in self._agent.api.get_new_notifs().values():
            self._inbox += [Notice(m[len(_MARK) :]) for m in messages if m.startswith(_MARK)]

    def _look_for_dead(self) -> None:
        """UCX tells a writer; a target learns of its writer's end here."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LIVENESS_PERIOD_S
            for peer in self._peers:
                peer.lost |= is_gone(peer.process)


def _own(peer: Peer) -> NixlPeer:
    if not isinstance(peer, NixlPeer):
        raise ValueError(f"{peer!r} is not a peer of the NIXL transport")
    return peer


def _released(transfer: Any) -> bool:
    """Try to give a transfer back; False while NIXL can't cancel it yet."""
    try:
        transfer.release()
    except Exception as error:
        logging.getLogger(__name__).info("NIXL keeps a cancelled transfer for now: %s", error)
        return False
    return True


def _load_nixl() -> ModuleType:
    errors = []
    for package in ("nixl_cu13", "nixl"):
        try:
            module = importlib.import_module(f"{package}._api")
        except ImportError as error:
            errors.append(str(error))
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return module
    raise ConfigError("--transport", f"nixl needs the package nixl-cu13: {'; '.join(errors)}")


@contextmanager
def _net_devices(host: str) -> Iterator[None]:
    """While UCX reads its environment, show it the loopback device alone if `host` is loopback."""
    before = os.environ.get("UCX_NET_DEVICES")
    if is_loopback(host):
        os.environ["UCX_NET_DEVICES"] = "lo"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("UCX_NET_DEVICES", None)
        else:
            os.environ["UCX_NET_DEVICES"] = before
