"""Transport over NIXL with its UCX back end: RDMA, NVLink, shared memory or TCP, as UCX finds them.

One agent per transport, without NIXL's progress thread: every call into NIXL is made by the one
thread that owns the transport, and both sides must be polled (`Transport.notices`) for either to
make progress.

A write is cut into *parts*. Over shared memory UCX copies within the post itself, at some 4 GB/s,
so a call posts parts only until `POST_BUDGET_S` is spent and the next `status` goes on; over
hardware all parts are posted at once. The notice goes with the part if there is only one, else
after all are done.

A write can be prepared before its bytes are there (`NixlTransport.prepare`): only the post is left
for the moment in which they are.

Descriptor lists are made per part from N x 3 arrays with `initialize_xfer`: measured in 1.5.1 on a
CPU, 0.15 ms for 128 ranges and 0.57 ms for 4,096 (two prepared lists per write: 0.24 and 1.32 ms;
one list prepared per region, picked by index: 0.04 and 0.32 ms, but only for equal blocks). Posting
takes 2.1 ms for 128 x 64 KiB and 14.4 ms for 4,096 x 4 KiB, whichever was used.

A fence depends on the *lane* that UCX may take from the peer to here (`nixl_parts`). Measured in
1.5.1 with a writer that was stopped at a tenth and continued: nothing that a target does to its
registrations stops the rest; destroying the target's agent stops it wholly over TCP, and not over
shared memory. So:

- over shared memory (also CUDA IPC) only the death of the peer's process is a fence, which its
  guard proves (`connectors.guard`);
- over sockets, the agent is destroyed and made anew. That costs all other peers their writes in
  flight and their sessions, so it is done when the peer's process is dead (its kernel may still
  send what it held) or can't be reached; one that is only silent, whose kernel still answers, is
  given `PATIENCE_S` first;
- over RDMA, and CUDA IPC between machines, both are asked for: death, and a new agent. That a new
  agent alone is enough there has not been proven.

The agent's name and metadata change with that: `card` is never the same after it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
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
"""A call stops posting parts after this long; the next call goes on."""
SETTLE_S = 0.05
DIAL_S = 0.5
"""`connect` waits so long for the guard of the peer's process: a round trip where all is well."""
PATIENCE_S = 40.0
"""A fence waits so long for a silent process whose kernel answers before it disturbs others."""
RETRY_S = 0.5
"""Between two tries to make an agent where the first has failed."""
CALL_OFF_S = 2.0
"""After `close` UCX has so long to find by itself that whom it writes to is no more."""
_MARK = b"N"
"""Leads every notice, since NIXL takes an empty one for none."""

log = logging.getLogger(__name__)


class NixlCard(msgspec.Struct, frozen=True):
    """What `connect` needs.

    Attributes:
        name: of the transport.
        number: of its agent at the moment, from 1; each is destroyed before the next is made.
        metadata: of that agent.
        guard: of the process.
        place: where it runs.
        regions: by number; None for those removed.
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
        made_of: the agent of ours that it writes to, and that we write with.
        lane: what UCX may take from it to here.
        near: in our network namespace, so that its bytes come over the loopback device if by TCP.
        open: whether writes may be posted.
        lost: found to be gone; reported: the caller was told.
        replaced: its agent is no more, another has taken its place.
        asked_since: when a fence, or the end of reading, was first asked for.
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
        """Dead, or cut off on a lane where that allows a fence."""
        return self.watch.dead or (self.lane is UcxLane.SOCKETS and self.watch.cut)

    @property
    def gone(self) -> bool:
        """The agent that we write to is proven to be no more."""
        return self.replaced or self.watch.dead

    def waited(self) -> float:
        """Seconds since the first call."""
        now = time.monotonic()
        if self.asked_since is None:
            self.asked_since = now
        return now - self.asked_since


class NixlHandle(BaseHandle):
    """One write: parts not yet posted, some of them prepared, and NIXL transfers in flight.

    What was posted stays in flight until NIXL says that it has ended: giving a transfer back early
    does not stop UCX from reading its source (measured over TCP with a stopped target: the rest
    was read and sent once it went on).
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
        """Make NIXL transfers of as many parts as a call may; what it refuses, it will again."""
        limit = time.monotonic() + POST_BUDGET_S
        with suppress(*self._agent.errors):
            while self._parts and time.monotonic() < limit:
                self._prepared.append(self._agent.prepare(self.peer.agent_name, self._parts[0]))
                self._parts.popleft()

    def begin(self, notice: bytes) -> None:
        """Post it, or as much of it as a call may."""
        self._notice = _MARK + notice
        self.status()
        self.status()  # UCX begins to copy when it is asked how far it is

    def status(self) -> Status:
        """State now; posts and polls what is left of the write."""
        if self._status is Status.PENDING:
            self._advance()
        if self._status is Status.ERROR:
            self._settle()
        return self._status

    @property
    def reads(self) -> bool:
        """Whether UCX may still read its source, as of the last `status`."""
        return bool(self._active)

    @property
    def moves(self) -> bool:
        """Whether there is anything to drive, as of the last `status`."""
        return self._status is Status.PENDING or self.reads

    def fail(self, reason: str) -> None:
        """Post no more; what was posted goes on."""
        if self._status is Status.PENDING:
            self._parts.clear()
            while self._prepared:
                _give_back(self._prepared.popleft())
            self._error, self._status = reason, Status.ERROR
            self._settle()

    def abandon(self, reason: str) -> None:
        """Fail because the agent is about to be destroyed; what was sent may still land."""
        self.fail(reason)
        self._broken |= bool(self._active)
        for transfer in self._active:
            _give_back(transfer)
        self._active.clear()

    def _advance(self) -> None:
        """Poll what is in flight, post more until the budget is spent, and send a late notice."""
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
        """Ask for a transfer's state; one that has ended, well or not, is given back."""
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
        """From ERROR to DRAINED once that is proven: all that was posted has landed, or never will.

        A transfer that failed was read to its end (UCX has given it up), but may still land.
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
            name: unique per process and generation.
            host: a loopback address keeps UCX's own sockets on the loopback device; with any other
                address UCX takes what ``UCX_NET_DEVICES`` says.

        Raises:
            ConfigError: NIXL is not installed or has no UCX.
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
            TransportError: UCX can't reach it.
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
        """The agent's metadata (addresses and remote keys), its process and its regions."""
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

        Takes a round trip to the peer's machine, at most `DIAL_S`: without its guard a peer could
        not be fenced.

        Raises:
            TransportError: it is no card, NIXL refuses it, or the guard does not answer.
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
        """End writes to a peer and, with its last connection, forget the remote agent.

        False while UCX may still read our memory for a write that it began: it can't be called off.
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
        """Try to prove that nothing of this peer can land any more; see the module."""
        own = own_peer(peer, NixlPeer, "NIXL")
        if own.made_of is not self._agent:
            return True  # what it could write to is gone
        if own.lane is UcxLane.SHARED and own.near and own.watch.dead:
            # Bytes that wait in our sockets land as UCX makes progress: let them, before we say so.
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
        """Post a write, or as much of it as a call may take."""
        return self.post(self._cut(peer, ranges), notice)

    def prepare(self, peer: Peer, ranges: Ranges) -> NixlHandle:
        """Make NIXL's transfers of a write; to a peer that is gone `post` finds that out."""
        handle = self._cut(peer, ranges)
        if self._reaches(handle.peer):
            handle.prepare()
            self._prepared.append(handle)
        return handle

    def post(self, prepared: NixlHandle, notice: bytes) -> NixlHandle:
        """Post what was prepared, or as much of it as a call may take."""
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
        """Give NIXL's transfers back."""
        if prepared in self._prepared:
            self._prepared.remove(prepared)
            prepared.fail("it was not wanted")

    def _cut(self, peer: Peer, ranges: Ranges) -> NixlHandle:
        """A write of which nothing was posted."""
        own = own_peer(peer, NixlPeer, "NIXL")
        sizes = tuple(region.num_bytes if region else 0 for region in own.regions)
        copies = expand(ranges, self._regions.sizes, sizes)
        return NixlHandle(own.made_of, own, cut(copies, self._regions.memories(), own.regions))

    def _reaches(self, peer: NixlPeer) -> bool:
        """Whether writes to a peer may be posted."""
        return peer.open and not peer.lost and peer.made_of is self._agent

    def notices(self) -> Sequence[Notice]:
        """Notices that have come in; lets UCX make progress."""
        self._revive()
        self._collect()
        self._reap()
        landed, self._inbox = self._inbox, []
        return tuple(landed)

    def lost(self) -> Sequence[NixlPeer]:
        """Peers that UCX found disconnected, that are dead, or that a fence can cut off."""
        gone = [p for p in self._peers if p.open and not p.reported and (p.lost or p.unreachable)]
        for peer in gone:
            peer.lost = peer.reported = True
        return tuple(gone)

    def shutdown(self) -> None:
        """Give back, in the order that NIXL wants: transfers, remote agents, memory, the agent."""
        self._closed = True
        if self._agent is not None:
            self._destroy_agent(f"transport {self.name} is shut down")
        self._peers.clear()

    def _make_agent(self) -> NixlAgent:
        """An agent of a name that nobody has had."""
        self._number += 1
        # While UCX reads its environment, show it the loopback device alone if we are there.
        before = os.environ.get("UCX_NET_DEVICES")
        if is_loopback(self._host):
            os.environ["UCX_NET_DEVICES"] = "lo"
        try:
            return NixlAgent(f"{self.name}/{self._number}")
        finally:
            if before is None:
                os.environ.pop("UCX_NET_DEVICES", None)
            else:
                os.environ["UCX_NET_DEVICES"] = before

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
        """Destroy the agent, which ends every write to and from here, and make another.

        All peers are lost by that.
        """
        log.warning("making the NIXL agent anew: %s", reason)
        affected = [peer for peer in self._peers if peer.open]
        self._destroy_agent("the agent that it went through was destroyed")
        for peer in affected:
            peer.lost = True
        self._revive()

    def _revive(self) -> None:
        """Make the next agent; if UCX can't (its devices are down, say), try again later."""
        now = time.monotonic()
        if self._agent is not None or self._closed or now < self._next_try:
            return
        self._next_try = now + RETRY_S
        try:
            agent = self._make_agent()
            for index, memory in enumerate(self._regions.memories()):
                if memory is not None:
                    self._registered[index] = agent.register(memory)
        except Exception as error:  # whatever NIXL says: until it can, nothing crosses
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
        """Drive the writes to closed peers; forget the agents that nobody needs any more."""
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
        """Remove a remote agent, if our agent knows it."""
        if self._metadata.pop(name, None) is None or self._agent is None:
            return
        try:
            self._agent.api.remove_remote_agent(name)
        except self._agent.errors as error:
            log.info("NIXL had already dropped %s: %s", name, error)

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


def _give_back(transfer: Any) -> None:
    try:
        transfer.release()
    except Exception as error:  # of a transfer that has ended: nothing depends on it
        log.info("NIXL does not take a transfer back: %s", error)
