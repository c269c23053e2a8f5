"""The simulator's world: virtual time, a bad network, and writes that land as they like.

Nothing here sleeps or does I/O, and all randomness comes from one seed, so a run can be repeated.
A write lands in parts, late, or never, whatever timers have rung; its bytes are copied from the
source's memory to the target's when they land, and each of them is held against the account of who
owns its block.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import zmq
from msgspec import structs

from kvbaton.connectors.base import (
    Capabilities,
    FenceScope,
    Memory,
    Notice,
    Ranges,
    Region,
    Status,
)
from kvbaton.connectors.protocol.events import Landed, Link
from kvbaton.connectors.protocol.notice import pack_notice, unpack_notice
from kvbaton.errors import TransportError
from kvbaton.messages.control import (
    Ack,
    Complete,
    Control,
    Reserve,
    decode_control,
    encode_control,
)
from kvbaton.types import Attempt, ChoiceStart, NodeId


class ViolationError(AssertionError):
    """Something happened that may never happen."""


@dataclass(frozen=True)
class Weather:
    """How bad it is until `heal_at`, in seconds of virtual time.

    Attributes:
        loss: probability that a control message is lost.
        duplicate: probability that it arrives twice.
        stall: probability that it is late by seconds, so that later ones overtake it.
        nonsense: probability that a message is one that no sane peer would send.
        bad_write: probability that a write fails, hangs, or lands after its error.
        rot: probability that a bit flips in what a step of a source has computed.
        violence: stops, continues, kills, restarts, partitions and clock jumps per second.
        misdirection: probability that a router or client does something foolish with a prompt.
        fence: what a fence can prove.
        offload: writes go on while their process is stopped.
        heal_at: from then on nothing goes wrong any more.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    stall: float = 0.0
    nonsense: float = 0.0
    bad_write: float = 0.0
    rot: float = 0.0
    violence: float = 0.0
    misdirection: float = 0.0
    fence: FenceScope = FenceScope.PEER
    offload: bool = False
    heal_at: float = 6.0

    @property
    def calm(self) -> bool:
        """Whether nothing at all goes wrong: then every hand-over must end well."""
        return self == Weather(fence=self.fence, offload=self.offload, heal_at=self.heal_at)


class NodeWatcher(Protocol):
    """Is told of all that a node decides, and what happens to its memory; see `laws`."""

    def saw(self, side: str, event: Any, actions: Sequence[Any]) -> None:
        """Its machine of a side has answered an event."""

    def check_pools(self) -> None:
        """Its core has had a turn."""

    def read(self, write: SimulatedWrite, run: ByteRun) -> None:
        """A write reads its memory."""

    def landed(self, write: SimulatedWrite, rank: int, run: ByteRun) -> None:
        """Bytes land in its memory."""


class SimulatedProcess:
    """One life of a process in the world, as its transports and its channel know it.

    Attributes:
        name: of the node in all of its lives.
        host: what is cut off from others as one.
        generation: of this life.
        address: of its control channel.
        identity: what it computes.
        offset: by which its clock is off.
        laws: what is held of it after every event.
    """

    address: str
    laws: NodeWatcher

    def __init__(self, world: SimulatedWorld, name: str, generation: int, identity: bytes) -> None:
        self.world, self.name, self.generation = world, name, generation
        self.host = name
        self.id = NodeId(name, generation.to_bytes(16, "little"))
        self.identity = identity
        self.alive, self.stopped, self.offset = True, False, 0.0
        self._asleep: list[Callable[[], None]] = []
        world.processes[name] = self

    @property
    def clock(self) -> float:
        """What its clock shows."""
        return self.world.monotonic() - self.world.offset + self.offset

    def fail(self, what: str) -> None:
        """Report a violation."""
        self.world.fail(f"{self.name}: {what}")

    def wake_transfers(self, seconds: float = 0.0) -> None:
        """Let whoever drives its transports and its channel have a turn by then."""
        raise NotImplementedError

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def when_continued(self, do: Callable[[], None]) -> None:
        """Do something as soon as the process runs again."""
        self._asleep.append(do)

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        asleep, self._asleep = self._asleep, []
        for do in asleep:
            do()


class SimulatedWorld:
    """Virtual time, network, and everybody in it.

    Attributes:
        now: seconds.
        offset: how far the clock of whoever acts now is off.
        processes: the present life of each node, by name.
        channels: who listens, by address.
        links: whom a channel's incoming link leads back to.
        transports: of ranks that live, by card.
        writes: those that may still land or are still watched.
        garbled: messages that are nonsense, by session and number.
        garbled_notices: attempt, write, start and end of notices that are.
        clients_left: how many gave a request up, so that its source may tell its target first.
        violation: the first one, which whoever happened to call may have contained.
        heard: what a source has accepted, by session and attempt.
        prompts: tokens by prompt key.
    """

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        self.rng = rng
        self.weather = weather
        self.now = 0.0
        self.offset = 0.0
        self.processes: dict[str, SimulatedProcess] = {}
        self.channels: dict[str, SimulatedChannel] = {}
        self.links: dict[bytes, SimulatedChannel] = {}
        self.transports: dict[bytes, SimulatedTransport] = {}
        self.writes: list[SimulatedWrite] = []
        self.cut_until: dict[frozenset[str], float] = {}
        self.garbled: dict[tuple[bytes, int], Control] = {}
        self.garbled_notices: set[tuple[Attempt, int, int, int]] = set()
        self.clients_left = 0
        self.heard: set[tuple[bytes, Attempt]] = set()
        self.prompts: dict[bytes, tuple[int, ...]] = {}
        self.log: deque[tuple[float, str, object]] = deque(maxlen=120)
        self.events = 0
        self.violation: ViolationError | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def monotonic(self) -> float:
        """`time.monotonic` of whoever acts now."""
        return 1000.0 + self.now + self.offset

    def chance(self, probability: float) -> bool:
        """Whether a fault happens now."""
        return (
            probability > 0 and self.now < self.weather.heal_at and self.rng.random() < probability
        )

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Do something at a time."""
        self.events += 1
        heapq.heappush(self._heap, (time, self.events, do))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something later."""
        self.at(self.now + max(seconds, 0.0), do)

    def soon(self, do: Callable[[], None], mean: float) -> None:
        """Do something after a random while, in seconds."""
        self.after(self.rng.expovariate(1 / mean), do)

    def run(self, until: float) -> None:
        """Let time pass."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, do = heapq.heappop(heap)
            do()
            if self.violation is not None:
                raise self.violation
            if self.events > 200_000:
                self.fail("somebody turns in circles")
        self.now = until

    def note(self, who: str, what: object) -> None:
        """Add to the log, which is part of a violation's message."""
        self.log.append((self.now, who, what))

    def fail(self, what: str) -> None:
        """Raise a `ViolationError` that tells the last of the log."""
        lines = []
        for at, who, event in self.log:
            # Names of 16 and more bytes are cut.
            line = re.sub(r"""b(['"])((?:\\x..|[^'\\]){1,2}).*?\1(?=[,)])""", r"\2~", str(event))
            line = re.sub(r", logprobs=None, finish_reason=None, stop_reason=None", "", line)
            line = re.sub(r"transfer_id=|ranks=.*|prompt_key=|sums=.*|attempt=Attempt", "", line)
            lines.append(f"{at:.3f} {who}: {line[:230]}")
        self.violation = self.violation or ViolationError("\n".join([*lines, what]))
        raise self.violation

    # --- network ---

    def carry(self, sender: SimulatedChannel, to: str, data: bytes) -> None:
        """Carry a message to an address, or to a link back; lose, repeat, delay or garble it."""
        if self.chance(self.weather.loss):
            self.note(sender.node.name, ("lost", decode_control(data)))
            return
        if self.chance(self.weather.nonsense):
            garbled = garble(self, decode_control(data))
            if garbled is not None:
                self.garbled[garbled.session, garbled.seq] = garbled
                data = encode_control(garbled)

        def arrive() -> None:
            channel = self.channels.get(to) or self.links.get(to.encode())
            if channel is None or not channel.node.alive:
                return
            pair = frozenset((sender.node.host, channel.node.host))
            if self.cut_until.get(pair, 0.0) <= self.now:
                channel.inbox.append((channel.link_of(sender), data))
                channel.node.wake_transfers()

        for _ in range(1 + self.chance(self.weather.duplicate)):
            at = self.now + self.rng.expovariate(500.0)
            if self.chance(self.weather.stall):
                at += self.rng.expovariate(0.7)  # later ones overtake it
            else:
                at = sender.arrivals[to] = max(at, sender.arrivals.get(to, 0.0))
            self.after(at - self.now, arrive)


def garble(world: SimulatedWorld, message: Control) -> Control | None:
    """A message as only a peer with a defect would send it, or None."""
    if isinstance(message, Reserve):
        spans = message.spans
        if (message.session, Attempt(message.transfer_id, message.attempt)) in world.heard:
            # Known by now, so other blocks are no first word but a change of mind.
            other = tuple(
                tuple(structs.replace(span, blocks=span.blocks[::-1]) for span in group)
                for group in spans
            )
            return None if other == spans else structs.replace(message, spans=other)
        first = next(group for group in spans if group)[0]
        bad = (structs.replace(first, blocks=(*first.blocks[:-1], 1 << 20)),)
        wrong: list[dict[str, Any]] = [
            {"spans": ()},
            {"num_tokens": 0},
            {"spans": (bad, *spans[1:])},
            {"spans": tuple(() for _ in spans)},
        ]
        if message.keys:
            wrong += [{"keys": message.keys[1:]}, {"prompt_key": bytes(32)}]
    elif isinstance(message, Complete):
        choices = () if message.choices else (ChoiceStart(1),)  # of block keys there are none
        wrong = [{"num_tokens": message.num_tokens + 1}, {"num_writes": 0}, {"choices": choices}]
    elif isinstance(message, Ack):
        wrong = [{"verdict": "perhaps"}, {"bad": ((5, 5),)}, {"bad": ((0, 1 << 20),)}]
    else:
        return None
    return structs.replace(message, **world.rng.choice(wrong))


class SimulatedChannel:
    """A `ControlChannel` in the world.

    Attributes:
        inbox: what has arrived and was not taken.
        arrivals: when the last message sent to each address or link arrives.
    """

    dropped = 0

    def __init__(self, world: SimulatedWorld, node: SimulatedProcess, address: str) -> None:
        self.world, self.node, self._address = world, node, address
        self.inbox: list[tuple[Link, bytes]] = []
        self.poller = zmq.Poller()  # of nothing: the world wakes its node
        self._id = f"{node.name}#{node.generation}"
        self.arrivals: dict[str, float] = {}
        self._dialled: dict[str, Link] = {}
        world.channels[address] = world.links[self._id.encode()] = self

    @property
    def address(self) -> str:
        """What peers dial."""
        return self._address

    def dial(self, address: str) -> Link:
        """As `ControlChannel.dial`."""
        return self._dialled.setdefault(address, Link(b"d" + address.encode()))

    def link_of(self, sender: SimulatedChannel) -> Link:
        """The link by which a message of `sender` arrives."""
        known = self._dialled.get(sender.address)
        return known if known is not None else Link(b"i" + sender._id.encode())

    def send(self, link: Link, data: bytes) -> bool:
        """As `ControlChannel.send`."""
        self.world.carry(self, link.id[1:].decode(), data)
        return True

    def receive(self) -> list[tuple[Link, bytes]]:
        """As `ControlChannel.receive`."""
        got, self.inbox = self.inbox, []
        return got

    def hang_up(self, address: str) -> None:
        """As `ControlChannel.hang_up`."""
        self._dialled.pop(address, None)

    def close(self) -> None:
        """As `ControlChannel.close`."""
        if self.world.channels.get(self._address) is self:
            del self.world.channels[self._address]
        self.world.links.pop(self._id.encode(), None)


# --- transports ---


class ByteRun(NamedTuple):
    """One run of bytes on its way."""

    source_region: int
    source_offset: int
    target_region: int
    target_offset: int
    length: int


@dataclass(eq=False)
class SimulatedPeer:
    """A connection of one rank to another."""

    near: SimulatedTransport
    far: SimulatedTransport
    broken: bool = False

    @property
    def name(self) -> str:
        """The far transport's name."""
        return self.far.name


class SimulatedTransport:
    """One rank's `Transport` in the world; memory is numpy arrays, which their `Memory` owns."""

    def __init__(self, world: SimulatedWorld, node: SimulatedProcess, side: str, rank: int) -> None:
        self.world, self.node, self.rank = world, node, rank
        self.name = f"{node.name}-{node.generation}-{side}-{rank}"
        self.capabilities = Capabilities(
            frozenset({"cpu"}),
            world.rng.choice([160, 4096]),
            world.weather.fence,
            max_ranges=world.rng.choice([2, 65_536]),
        )
        self.regions: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        self.alive = True
        self.prepared: dict[int, tuple[SimulatedPeer, Ranges]] = {}
        self._peers: list[SimulatedPeer] = []
        self._notices: list[Notice] = []
        self._lost: list[SimulatedPeer] = []
        world.transports[self.card()] = self

    def register(self, memory: Memory) -> Region:
        """As `Transport.register`."""
        assert isinstance(memory.owner, np.ndarray)
        self.regions.append(memory.owner)
        return Region(len(self.regions) - 1, memory)

    def deregister(self, region: Region) -> None:
        """As `Transport.deregister`."""

    def card(self) -> bytes:
        """As `Transport.card`."""
        return self.name.encode()

    def connect(self, card: bytes) -> SimulatedPeer:
        """As `Transport.connect`."""
        far = self.world.transports.get(card)
        if far is None or not far.alive:
            raise TransportError(f"{card.decode()} can't be reached")
        peer = SimulatedPeer(self, far)
        self._peers.append(peer)
        return peer

    def close(self, peer: SimulatedPeer) -> bool:
        """As `Transport.close`: what is left of its writes is read at once, or a little later."""
        peer.broken = True
        if self.alive and self.world.chance(0.3):
            self.node.wake_transfers(0.05)
            return False
        if peer in self._peers:
            self._peers.remove(peer)
        for write in self.world.writes:
            if write.peer is peer:
                write.detach()
        return True

    def fence(self, peer: SimulatedPeer) -> bool:
        """As `Transport.fence`; it may hold late, only once the process is gone, or never."""
        scope, rng = self.world.weather.fence, self.world.rng
        gone = not peer.far.node.alive
        if scope is FenceScope.NONE or (scope is FenceScope.PROCESS and not gone):
            return False
        if self.world.chance(0.3):
            return False
        for write in self.world.writes:
            if write.peer.near is peer.far and write.peer.far is self:
                write.cut()
        for back in peer.far._peers:
            if back.far is self and not back.broken:
                back.broken = True
                if rng.random() < 0.7:
                    peer.far.lose(back)
        return True

    def prepare(self, peer: SimulatedPeer, ranges: Ranges) -> tuple[SimulatedPeer, Ranges]:
        """As `PreparesWrites.prepare`."""
        prepared = peer, ranges.copy()
        self.prepared[id(prepared)] = prepared
        return prepared

    def post(self, prepared: tuple[SimulatedPeer, Ranges], notice: bytes) -> SimulatedWrite:
        """As `PreparesWrites.post`."""
        del self.prepared[id(prepared)]
        return self.write(*prepared, notice)

    def discard(self, prepared: tuple[SimulatedPeer, Ranges]) -> None:
        """As `PreparesWrites.discard`."""
        del self.prepared[id(prepared)]

    def write(self, peer: SimulatedPeer, ranges: Ranges, notice: bytes) -> SimulatedWrite:
        """As `Transport.write`."""
        self.world.note(self.name, ("write", unpack_notice(notice)))
        runs = [
            ByteRun(source, start + i * step, target, end + i * stride, length)
            for source, start, target, end, length, count, step, stride in ranges.tolist()
            for i in range(count)
        ]
        write = SimulatedWrite(self.world, peer, runs, notice)
        self.world.writes.append(write)
        write.begin()
        return write

    def notices(self) -> Sequence[Notice]:
        """As `Transport.notices`."""
        got, self._notices = self._notices, []
        return got

    def lost(self) -> Sequence[SimulatedPeer]:
        """As `Transport.lost`."""
        got, self._lost = self._lost, []
        return got

    def shutdown(self) -> None:
        """As `Transport.shutdown`."""
        for peer in list(self._peers):
            self.close(peer)

    # --- what the world does to it ---

    def notify(self, payload: bytes) -> None:
        """A write has landed here."""
        if self.alive:
            self._notices.append(Notice(payload))
            self.node.wake_transfers()

    def lose(self, peer: SimulatedPeer) -> None:
        """A peer is found to be gone, soon."""

        def tell() -> None:
            self._lost.append(peer)
            self.node.wake_transfers()

        self.world.soon(tell, 0.2)

    def die(self) -> None:
        """The rank is gone; peers find out, perhaps."""
        self.alive = False
        for write in [w for w in self.world.writes if w.peer.near is self]:
            # A process that is gone writes nothing more; its sockets may.
            if self.world.weather.fence is FenceScope.PEER:
                write.detach()
            else:
                write.void = True
        for other in list(self.world.transports.values()):
            for peer in other._peers:
                if peer.far is self and not peer.broken:
                    peer.broken = True
                    if self.world.rng.random() < 0.6:
                        other.lose(peer)
        del self.world.transports[self.card()]


@dataclass(eq=False)
class SimulatedWrite:
    """One rank pair's part of a post, on its way; the `Handle` of it too.

    Attributes:
        left: runs still to land, the last one first.
        wire: what was read of them already when the source went away; None while it is read live.
        void: it can't land any more.
        told: the notice's names.
    """

    world: SimulatedWorld
    peer: SimulatedPeer
    left: list[ByteRun]
    notice: bytes
    wire: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] | None = None
    void: bool = False
    state: Status = Status.PENDING
    told: Landed = field(init=False)

    def __post_init__(self) -> None:
        told = unpack_notice(self.notice)
        assert told is not None, "a notice that nobody can read"
        self.told = told

    # --- Handle ---

    def status(self) -> Status:
        """As `Handle.status`."""
        return self.state

    def error(self) -> str | None:
        """As `Handle.error`."""
        return None if self.state in (Status.PENDING, Status.DONE) else "the write failed"

    def release(self) -> None:
        """As `Handle.release`."""

    # --- how it goes ---

    def begin(self) -> None:
        """Schedule what will happen."""
        world, rng = self.world, self.world.rng
        if self.peer.broken or not self.peer.far.alive:
            self.void = True
            world.after(0.01, lambda: self._become(rng.choice([Status.ERROR, Status.DRAINED])))
        elif not world.chance(world.weather.bad_write):
            self._land_in_parts(rng.choice([1, 1, 2]), rng.uniform(0.001, 0.03), self._good)
        else:
            match rng.choice(("fails", "fails late", "sticks")):
                case "fails":
                    self.left = self.left[: len(self.left) // 2]
                    self._land_in_parts(1, 0.02, lambda: self._become(Status.DRAINED))
                case "fails late":  # in error while it still lands, and terminal later
                    world.after(0.01, lambda: self._become(Status.ERROR))
                    seconds = rng.uniform(0.1, 3.0)
                    self._land_in_parts(3, seconds, lambda: self._become(Status.DRAINED))
                case "sticks":  # the rest lands only after long, perhaps after every timer
                    self._land(len(self.left) // 2)
                    self._land_in_parts(1, rng.uniform(1.0, 20.0), self._good)

    def _land_in_parts(self, parts: int, seconds: float, then: Callable[[], None]) -> None:
        size = -(-len(self.left) // parts)
        for part in range(1, parts):
            self.world.after(seconds * part / parts, lambda: self._when_running(size))
        self.world.after(seconds, lambda: self._when_running(1 << 30, then))

    def _when_running(self, count: int, then: Callable[[], None] | None = None) -> None:
        """Land so many runs; a stopped process moves nothing, and goes on where it was."""
        node = self.peer.near.node
        if node.stopped and self.wire is None and not self.world.weather.offload:
            node.when_continued(lambda: self._when_running(count, then))
            return
        self._land(count)
        if then is not None:
            then()

    def _land(self, count: int) -> None:
        near, far = self.peer.near, self.peer.far
        for _ in range(min(count, len(self.left))):
            run = self.left.pop()
            if self.wire is not None:
                data = self.wire.pop()
            else:
                near.node.laws.read(self, run)
                data = self._read(run)
            if self.void or not far.node.alive:
                continue
            far.node.laws.landed(self, far.rank, run)
            low = run.target_offset
            far.regions[run.target_region][low : low + run.length] = data

    def _read(self, run: ByteRun) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        low = run.source_offset
        data = self.peer.near.regions[run.source_region][low : low + run.length].copy()
        assert len(data) == run.length, f"{run} reads beyond its region"
        return data

    def detach(self) -> None:
        """The source is read no more: what is left was read by now and is on the wire."""
        if self.wire is None:
            self.wire = [self._read(run) for run in self.left]

    def cut(self) -> None:
        """A fence: nothing lands any more; the source sees an error that says so little."""
        if not self.void:
            self.void = True
            self._become(Status.ERROR)

    def _good(self) -> None:
        if self.void or self.state is not Status.PENDING:
            self._become(Status.DRAINED)
            return
        far = self.peer.far
        notice = self.notice
        if self.world.chance(self.world.weather.nonsense):
            # What only a source with a defect would tell of the write.
            wrong: list[dict[str, Any]] = [
                {"write": 1 << 20},
                {"end": self.told.end + 100},
                {"end": self.told.start},
            ]
            told = structs.replace(self.told, **self.world.rng.choice(wrong))
            self.world.garbled_notices.add((told.attempt, told.write, told.start, told.end))
            notice = pack_notice(told)
        self.world.soon(lambda: far.notify(notice), 0.003)
        self._become(Status.DONE)

    def _become(self, state: Status) -> None:
        if self.state in (Status.DONE, Status.DRAINED):
            return
        self.state = state
        if state is not Status.ERROR and self in self.world.writes:
            self.world.writes.remove(self)
        self.peer.near.node.wake_transfers()

    @property
    def may_land(self) -> bool:
        """Whether a byte of it can still land."""
        return bool(self.left) and not self.void and self.peer.far.node.alive

    @property
    def reads(self) -> bool:
        """Whether it still reads the source's memory."""
        return bool(self.left) and self.wire is None and not self.void
