"""Transport over NIXL with its UCX back end: RDMA, NVLink, shared memory or TCP, as UCX finds them.

A transport has one agent, without NIXL's progress thread: the thread that owns the transport makes
all calls into NIXL, and both sides must be polled (`Transport.notices`) for either to make
progress.

A write is cut into *parts*. Over shared memory UCX copies within the post itself, at about 4 GB/s,
so one call posts parts only until `POST_BUDGET_S` is spent, and the next `status` continues. Over
hardware all parts are posted at once. A write of one part carries the notice; otherwise the notice
is sent after all parts are done.

A write can be prepared before its bytes are there (`NixlTransport.prepare`), so that only the post
remains once they are.

Descriptor lists are made per part from N x 3 arrays with `initialize_xfer`. Measured with NIXL
1.5.1 on a CPU, that takes 0.15 ms for 128 ranges and 0.57 ms for 4,096 (two prepared lists per
write: 0.24 and 1.32 ms; one prepared list per region, picked by index: 0.04 and 0.32 ms, but only
for equal blocks). Posting takes 2.1 ms for 128 x 64 KiB and 14.4 ms for 4,096 x 4 KiB in each case.

How a fence works depends on the *lane* that UCX may take from the peer to here (`nixl_parts`).
Measured with NIXL 1.5.1 and a writer that was stopped at a tenth and continued: nothing that a
target does to its registrations stops the rest of the write. Destroying the target's agent stops it
completely over TCP, but not over shared memory. So:

- Over shared memory (and CUDA IPC) only the death of the peer's process, which its guard proves
  (`connectors.guard`), is a fence.
- Over sockets the agent is destroyed and a new one made. That ends the writes in flight and the
  sessions of all other peers, so it is done only when the peer's process is dead (its kernel may
  still send buffered bytes) or can't be reached. A silent process whose kernel still answers gets
  `PATIENCE_S` first.
- Over RDMA, and CUDA IPC between machines, both are required: the death and a new agent. It is not
  proven that a new agent alone is enough there.

A new agent has another name and other metadata, so `card` changes with it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import msgspec

from kvbaton.connectors.address import is_loopback
from kvbaton.connectors.base import (
    Capabilities,
    FenceScope,
    Memory,
    Notice,
    Peer,
    Ranges,
    Region,
    Status,
)
from kvbaton.connectors.guard import GuardCard, guard_card, watch
from kvbaton.connectors.nixl_library import loopback_only
from kvbaton.connectors.transports.nixl_parts import (
    NixlAgent,
    Place,
    RemoteRegion,
    UcxLane,
    WritePart,
    choose_lane,
    cut,
    this_place,
)
from kvbaton.connectors.transports.regions import (
    MAX_NOTICE_BYTES,
    BaseHandle,
    RegionTable,
    check_notice,
    decode_card,
    expand,
    own_peer,
)
from kvbaton.errors import TransportError

POST_BUDGET_S = 0.002
"""Seconds after which a call stops posting parts; the next call continues."""
SETTLE_S = 0.05
"""Seconds that UCX gets to close its endpoints before an agent is destroyed."""
DIAL_S = 0.5
"""Seconds that `connect` waits for the guard of the peer's process; usually one round trip."""
PATIENCE_S = 40.0
"""Seconds that a fence waits for a silent process whose kernel answers, as it disturbs others."""
RETRY_S = 0.5
"""Seconds between attempts to make an agent."""
CALL_OFF_S = 2.0
"""Seconds after `close` within which UCX may notice by itself that the peer is gone."""
_MARK = b"N"
"""Prefix of every notice, since NIXL treats an empty notice as none."""

log = logging.getLogger(__name__)


class NixlCard(msgspec.Struct, frozen=True):
    """Card of a transport.

    Attributes:
        name: Name of the transport.
        number: Number of its current agent, from 1 on; an agent is destroyed before the next is
            made.
        metadata: NIXL's metadata of that agent.
        guard: Guard of the process.
        place: Where the process runs.
        regions: Regions by number; None for removed ones.
    """

    name: str
    number: int
    metadata: bytes
    guard: GuardCard
    place: Place
    regions: tuple[RemoteRegion | None, ...]

    @property
    def agent(self) -> str:
        """The agent's name."""
        return f"{self.name}/{self.number}"


_card = msgspec.msgpack.Decoder(NixlCard)


class NixlPeer:
    """A connection to one remote agent.

    Attributes:
        made_of: The local agent of this connection.
        lane: The lane that UCX may take from the peer to here.
        near: The peer is in the same network namespace, so TCP uses the loopback device.
        open: Whether writes may be posted.
        lost: The peer was found to be gone.
        reported: `lost` has reported the peer, or a fence made that unnecessary.
        replaced: The peer's agent is gone, and its transport has a newer one.
        asked_since: Time at which `waited` was first called.
    """

    def __init__(self, card: NixlCard, made_of: NixlAgent, lane: UcxLane, *, near: bool) -> None:
        self.name = card.name
        self.agent_name, self.agent_number = card.agent, card.number
        self.regions = card.regions
        self.made_of = made_of
        self.lane = lane
        self.near = near
        self.watch = watch(card.guard)
        self.watch.close_with(self)
        self.open = True
        self.lost = self.reported = self.replaced = False
        self.asked_since: float | None = None

    @property
    def unreachable(self) -> bool:
        """Whether the peer is dead, or cut off on a lane where that allows a fence."""
        return self.watch.dead or (self.lane is UcxLane.SOCKETS and self.watch.cut)

    @property
    def gone(self) -> bool:
        """Whether the peer's agent is proven to be gone."""
        return self.replaced or self.watch.dead

    def waited(self) -> float:
        """Seconds since the first call of this method."""
        now = time.monotonic()
        if self.asked_since is None:
            self.asked_since = now
        return now - self.asked_since


class NixlHandle(BaseHandle):
    """One write: parts not yet posted, some of them prepared, and NIXL transfers in flight.

    A posted transfer is kept until NIXL reports its end. Releasing it earlier does not stop UCX
    from reading its source (measured over TCP with a stopped target: the rest was read and sent
    once the target continued).
    """

    def __init__(self, agent: NixlAgent, peer: NixlPeer, parts: list[WritePart]) -> None:
        self.peer = peer
        self._agent = agent
        self._parts = deque(parts)
        self._prepared: deque[Any] = deque()
        self._notice = _MARK
        self._rides_along = len(parts) == 1
        self._active: list[Any] = []
        self._broken = False

    def prepare(self) -> None:
        """Make NIXL transfers of parts, as many as the time budget of a call allows."""
        limit = time.monotonic() + POST_BUDGET_S
        with suppress(*self._agent.errors):  # the post meets the same error and reports it
            while self._parts and time.monotonic() < limit:
                self._prepared.append(self._agent.prepare(self.peer.agent_name, self._parts[0]))
                self._parts.popleft()

    def begin(self, notice: bytes) -> None:
        """Post the write, or as much of it as the time budget allows."""
        self._notice = _MARK + notice
        self.status()
        self.status()  # UCX starts to copy when it is polled

    def status(self) -> Status:
        """The current state; posts more parts and polls transfers."""
        if self._status is Status.PENDING:
            self._advance()
        if self._status is Status.ERROR:
            self._settle()
        return self._status

    @property
    def reads(self) -> bool:
        """Whether UCX may still read the write's source, as of the last `status`."""
        return bool(self._active)

    @property
    def moves(self) -> bool:
        """Whether the write still has to be polled, as of the last `status`."""
        return self._status is Status.PENDING or self.reads

    def fail(self, reason: str) -> None:
        """Fail, and post nothing more; posted transfers continue."""
        if self._status is Status.PENDING:
            self._parts.clear()
            while self._prepared:
                _give_back(self._prepared.popleft())
            self._error, self._status = reason, Status.ERROR
            self._settle()

    def abandon(self, reason: str) -> None:
        """Fail because the agent is about to be destroyed; sent bytes may still land."""
        self.fail(reason)
        self._broken |= bool(self._active)
        for transfer in self._active:
            _give_back(transfer)
        self._active.clear()

    def _advance(self) -> None:
        """Poll transfers, post more within the time budget, and send a separate notice last."""
        api = self._agent.api
        try:
            for transfer in tuple(self._active):
                self._take_state(transfer, api.check_xfer_state)
            limit = time.monotonic() + POST_BUDGET_S
            notice = self._notice if self._rides_along else b""
            while (self._prepared or self._parts) and time.monotonic() < limit:
                if self._prepared:
                    transfer = self._prepared.popleft()
                else:
                    transfer = self._agent.prepare(self.peer.agent_name, self._parts.popleft())
                self._active.append(transfer)
                self._take_state(transfer, lambda of: api.transfer(of, notice))
            if not self._parts and not self._prepared and not self._active:
                if not self._rides_along:
                    api.send_notif(self.peer.agent_name, self._notice)
                self._status = Status.DONE
        except self._agent.errors as error:
            self.peer.lost |= isinstance(error, self._agent.disconnect)
            self.fail(f"peer {self.peer.name}: {error}")

    def _take_state(self, transfer: Any, ask: Callable[[Any], str]) -> None:
        """Ask for a transfer's state; release the transfer if it has ended or failed."""
        try:
            state = ask(transfer)
            if state == "PROC":
                return
            if state != "DONE":
                raise self._agent.disconnect(f"NIXL reports {state}")
        except self._agent.errors:
            self._broken = True
            self._give_up(transfer)
            raise
        self._give_up(transfer)

    def _give_up(self, transfer: Any) -> None:
        self._active.remove(transfer)
        _give_back(transfer)

    def _settle(self) -> None:
        """Change ERROR to DRAINED once all posted transfers have landed or provably never will.

        The source of a failed transfer is read no more (UCX has given it up), but its bytes may
        still land.
        """
        for transfer in tuple(self._active):
            with suppress(*self._agent.errors):
                self._take_state(transfer, self._agent.api.check_xfer_state)
        if not self._active and (not self._broken or self.peer.gone):
            self._status = Status.DRAINED


class NixlTransport:
    """Writes into registered memory of other processes through NIXL."""

    contract = "1.1"
    capabilities = Capabilities(frozenset({"cpu", "cuda"}), MAX_NOTICE_BYTES, FenceScope.PROCESS)

    def __init__(self, name: str, *, host: str = "127.0.0.1") -> None:
        """Start an agent.

        Args:
            name: Unique per process and generation.
            host: With a loopback address UCX's own sockets stay on the loopback device; with any
                other address UCX uses the devices in ``UCX_NET_DEVICES``.

        Raises:
            ConfigError: NIXL is not installed, or has no UCX plugin.
        """
        self.name = name
        self._host = host
        self._number = 0
        self._agent: NixlAgent | None = self._make_agent()
        self._next_try = 0.0
        self._closed = False
        self._guard = guard_card(host)
        self._place = this_place()
        self._regions = RegionTable()
        self._registered: dict[int, Any] = {}
        self._peers: list[NixlPeer] = []
        self._metadata: dict[str, bytes] = {}
        self._live: list[NixlHandle] = []
        self._prepared: list[NixlHandle] = []
        self._inbox: list[Notice] = []

    def register(self, memory: Memory) -> Region:
        """Register memory with UCX.

        Raises:
            TransportError: UCX can't register the memory.
        """
        agent = self._running()
        try:
            registered = agent.register(memory)
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
        """The agent's metadata (addresses and remote keys), its process and the regions."""
        regions = tuple(
            RemoteRegion(m.address, m.num_bytes, m.device, m.device_index) if m else None
            for m in self._regions.memories()
        )
        agent = self._running()
        metadata = agent.api.get_agent_metadata()
        return msgspec.msgpack.encode(
            NixlCard(self.name, self._number, metadata, self._guard, self._place, regions)
        )

    def connect(self, card: bytes) -> NixlPeer:
        """Load the metadata of a card and dial its guard; UCX dials with the first write.

        This takes a round trip to the peer's machine, at most `DIAL_S`: a peer without a guard
        could not be fenced.

        Raises:
            TransportError: The card is invalid, NIXL refuses it, or the guard does not answer.
        """
        decoded = decode_card(card, _card, "NIXL")
        agent = self._running()
        reaches_gpus = any(m and m.device == "cuda" for m in self._regions.memories())
        lane = choose_lane(self._place, decoded.place, agent.tls, reaches_gpus=reaches_gpus)
        peer = NixlPeer(decoded, agent, lane, near=self._place == decoded.place)
        if not peer.watch.wait(DIAL_S):
            raise TransportError(f"the guard of {decoded.name} does not answer")
        if self._metadata.get(decoded.agent) != decoded.metadata:
            try:
                name = agent.api.add_remote_agent(decoded.metadata)
            except agent.errors as error:
                raise TransportError(f"NIXL refuses the card of {decoded.name}: {error}") from error
            if name != decoded.agent.encode():
                raise TransportError(f"a card of {decoded.agent} holds the metadata of {name!r}")
            self._metadata[decoded.agent] = decoded.metadata
        for other in self._peers:
            other.replaced |= other.name == peer.name and other.agent_number < peer.agent_number
        self._peers.append(peer)
        return peer

    def close(self, peer: Peer) -> bool:
        """Stop writes to a peer and, with its last connection, forget the remote agent.

        False while UCX may still read local memory for a write that it began, as UCX can't cancel
        a write.
        """
        own = own_peer(peer, NixlPeer, "NIXL")
        if own.open:
            own.open = False
            for handle in (*self._live, *self._prepared):
                if handle.peer is own:
                    handle.fail(f"the connection to {own.name} is closed")
        self._reap()
        if not self._reads(own):
            return True
        waited = own.waited()
        hopeless = (own.gone or own.unreachable) and waited > CALL_OFF_S
        if hopeless or (own.lane is UcxLane.SOCKETS and waited > PATIENCE_S):
            self._renew(f"writes to {own.name} do not end")
        return not self._reads(own)

    def fence(self, peer: Peer) -> bool:
        """Try to prove that no byte of this peer can land any more; see the module's docstring."""
        own = own_peer(peer, NixlPeer, "NIXL")
        if own.made_of is not self._agent:
            return True  # the agent that the peer could write to is gone
        if own.lane is UcxLane.SHARED and own.near and own.watch.dead:
            # Bytes in local sockets land when UCX makes progress: let them land before returning.
            for _ in range(3):
                self._collect()
            return True
        silent = own.lane is UcxLane.SOCKETS and own.waited() > PATIENCE_S
        if not own.unreachable and not silent:
            return False
        own.reported = True
        self._renew(f"a fence against {own.name}")
        return True

    def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> NixlHandle:
        """Post a write, or as much of it as the time budget allows."""
        return self.post(self._cut(peer, ranges), notice)

    def prepare(self, peer: Peer, ranges: Ranges) -> NixlHandle:
        """Make NIXL's transfers of a write; if the peer is gone, `post` fails."""
        handle = self._cut(peer, ranges)
        if self._reaches(handle.peer):
            handle.prepare()
            self._prepared.append(handle)
        return handle

    def post(self, prepared: NixlHandle, notice: bytes) -> NixlHandle:
        """Post a prepared write, or as much of it as the time budget allows."""
        check_notice(notice)
        if prepared in self._prepared:
            self._prepared.remove(prepared)
        peer = prepared.peer
        if self._reaches(peer):
            self._live.append(prepared)
            prepared.begin(notice)
        else:
            prepared.fail(f"peer {peer.name} is {'gone' if peer.open else 'closed'}")
        return prepared

    def discard(self, prepared: NixlHandle) -> None:
        """Release NIXL's transfers of a prepared write."""
        if prepared in self._prepared:
            self._prepared.remove(prepared)
            prepared.fail("it was not wanted")

    def _cut(self, peer: Peer, ranges: Ranges) -> NixlHandle:
        """A write, cut into parts, of which nothing is posted yet."""
        own = own_peer(peer, NixlPeer, "NIXL")
        sizes = tuple(region.num_bytes if region else 0 for region in own.regions)
        copies = expand(ranges, self._regions.sizes, sizes)
        return NixlHandle(own.made_of, own, cut(copies, self._regions.memories(), own.regions))

    def _reaches(self, peer: NixlPeer) -> bool:
        """Whether writes to a peer may be posted."""
        return peer.open and not peer.lost and peer.made_of is self._agent

    def notices(self) -> Sequence[Notice]:
        """Notices of writes that landed here since the last call; drives UCX's progress."""
        self._revive()
        self._collect()
        self._reap()
        landed, self._inbox = self._inbox, []
        return tuple(landed)

    def lost(self) -> Sequence[NixlPeer]:
        """Peers that UCX found disconnected, that are dead, or that can't be reached."""
        gone = [p for p in self._peers if p.open and not p.reported and (p.lost or p.unreachable)]
        for peer in gone:
            peer.lost = peer.reported = True
        return tuple(gone)

    def shutdown(self) -> None:
        """Free, in NIXL's order, transfers, remote agents, registered memory and the agent."""
        self._closed = True
        if self._agent is not None:
            self._destroy_agent(f"transport {self.name} is shut down")
        self._peers.clear()

    def _make_agent(self) -> NixlAgent:
        """Make an agent with a new name."""
        self._number += 1
        with loopback_only() if is_loopback(self._host) else nullcontext():
            return NixlAgent(f"{self.name}/{self._number}")

    def _destroy_agent(self, reason: str) -> None:
        agent = self._running()
        for handle in (*self._live, *self._prepared):
            handle.abandon(reason)
        self._live.clear()
        self._prepared.clear()
        for name in tuple(self._metadata):
            self._forget(name)
        self._settle()
        for registered in self._registered.values():
            agent.api.deregister_memory(registered)
        self._registered.clear()
        agent.close()
        self._agent = None

    def _renew(self, reason: str) -> None:
        """Destroy the agent, which ends all writes to and from here, and make another.

        All peers are lost.
        """
        log.warning("making the NIXL agent anew: %s", reason)
        affected = [peer for peer in self._peers if peer.open]
        self._destroy_agent("the agent that it went through was destroyed")
        for peer in affected:
            peer.lost = True
        self._revive()

    def _revive(self) -> None:
        """Make the next agent; if UCX can't (devices may be down), try again after `RETRY_S`."""
        now = time.monotonic()
        if self._agent is not None or self._closed or now < self._next_try:
            return
        self._next_try = now + RETRY_S
        try:
            agent = self._make_agent()
            for index, memory in enumerate(self._regions.memories()):
                if memory is not None:
                    self._registered[index] = agent.register(memory)
        except Exception as error:  # whatever the cause, there are no transfers until it works
            self._registered.clear()
            log.warning("no NIXL agent for now: %s", error)
            return
        self._agent = agent

    def _running(self) -> NixlAgent:
        if self._agent is None:
            state = "shut down" if self._closed else "without an agent for now"
            raise TransportError(f"transport {self.name} is {state}")
        return self._agent

    def _reads(self, peer: NixlPeer) -> bool:
        return any(handle.reads for handle in self._live if handle.peer is peer)

    def _reap(self) -> None:
        """Poll the writes to closed peers; forget remote agents that are not needed any more."""
        for handle in self._live:
            if not handle.peer.open:
                handle.status()
        self._live = [handle for handle in self._live if handle.moves]
        needed = {id(handle.peer) for handle in self._live}
        closed = [peer for peer in self._peers if not peer.open and id(peer) not in needed]
        if closed:
            self._peers = [peer for peer in self._peers if peer not in closed]
            for name in {p.agent_name for p in closed} - {p.agent_name for p in self._peers}:
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Remove a remote agent from the local one, if it is known there."""
        if self._metadata.pop(name, None) is None or self._agent is None:
            return
        try:
            self._agent.api.remove_remote_agent(name)
        except self._agent.errors as error:
            log.info("NIXL had already dropped %s: %s", name, error)

    def _settle(self) -> None:
        """Let UCX finish closing its endpoints: otherwise it aborts the process."""
        limit = time.monotonic() + SETTLE_S
        while time.monotonic() < limit:
            self._collect()

    def _collect(self) -> None:
        if self._agent is None:
            return
        for messages in self._agent.api.get_new_notifs().values():
            self._inbox += [Notice(m[len(_MARK) :]) for m in messages if m.startswith(_MARK)]


def _give_back(transfer: Any) -> None:
    try:
        transfer.release()
    except Exception as error:  # the transfer has ended: nothing depends on its release
        log.info("NIXL does not take a transfer back: %s", error)
