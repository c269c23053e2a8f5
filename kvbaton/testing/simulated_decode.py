"""A simulated decode node: reserves blocks, reads what is delivered, reuses what it may at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvbaton.connectors.base import FenceScope
from kvbaton.connectors.protocol.events import (
    AdmitPeer,
    CancelTarget,
    Deliver,
    Fail,
    Fence,
    Fenced,
    Landed,
    Link,
    PeerGone,
    Received,
    Send,
    Start,
    Unneeded,
    Unquarantine,
    Verified,
    Verify,
)
from kvbaton.connectors.protocol.target import Target
from kvbaton.messages.control import Control
from kvbaton.testing.simulated_node import (
    HEADS,
    TIMERS,
    Job,
    Node,
    any_layout,
    by_number,
    heads_of,
    value_bytes,
)
from kvbaton.testing.simulated_world import Cell, World, Write
from kvbaton.types import Attempt, BlockSpan, NodeId


@dataclass(eq=False)
class Stay:
    """A request on D and its blocks.

    Attributes:
        start: tokens below this were a hit of D's own.
        in_use: the request refers to the blocks.
    """

    job: Job
    start: int
    blocks: dict[int, int]
    in_use: bool = True
    incoming: bool = True
    waiting: bool = True
    own: list[int] = field(default_factory=list)


class Decode(Node):
    """A decode node."""

    machine_type: ClassVar[type[Target]] = Target
    machine: Target

    def __init__(self, world: World, name: str, generation: int, **sizes: int) -> None:
        super().__init__(world, name, generation, **sizes)
        self.machine = self.machine_type(
            self.identity(), TIMERS, new_id=self.new_id, pairable=any_layout
        )
        self.stays: dict[Attempt, Stay] = {}
        self.owner: dict[int, Attempt] = {}
        self.landed: set[tuple[Attempt, Cell]] = set()
        self.delivered = 0

    # --- engine ---

    def request(self, job: Job, address: str, tries: int = 40) -> None:
        """The router's request arrives; it waits while there are too few blocks."""
        if not self.alive or self.stopped or job.attempt in self.stays:
            return
        if self.world.rng.random() < 0.05:
            self.take(Unneeded(job.attempt, address))
            self.over(job)
            return
        size = self.block_size
        first = self.world.rng.choice([0, 0, self.world.rng.randrange(-(-job.num_tokens // size))])
        numbers = range(first, -(-job.num_tokens // size))
        blocks = self.allocate(len(numbers))
        if blocks is None:
            if tries:
                self.world.after(0.2, lambda: self.request(job, address, tries - 1))
            return
        stay = Stay(job, first * size, dict(zip(numbers, blocks, strict=True)))
        self.stays[job.attempt] = stay
        self.owner.update(dict.fromkeys(blocks, job.attempt))
        spans = ((BlockSpan(first, tuple(blocks)),),)
        deadline = self.world.rng.choice([0.0, 1.0, 4.0])
        self.take(Start(job.attempt, address, job.key, job.num_tokens, spans, deadline))

    def over(self, job: Job) -> None:
        """A request waits no more for its hand-over."""

    def cancel(self, job: Job) -> None:
        """The client is gone."""
        stay = self.stays.get(job.attempt)
        if stay is not None and stay.waiting and self.alive and not self.stopped:
            stay.waiting = False
            self.over(job)
            self.take(CancelTarget(job.attempt))
            self._leave(stay)

    def _leave(self, stay: Stay) -> None:
        """The request refers to no block any more."""
        stay.in_use = False
        self.free += stay.own
        stay.own = []
        self._give_back(stay)

    def _give_back(self, stay: Stay) -> None:
        if stay.in_use or stay.incoming:
            return
        self.free += stay.blocks.values()
        stay.blocks = {}

    def _expect(self, stay: Stay, end: int, what: str) -> None:
        wanted = [stay.job.value(p, head) for p in range(stay.start, end) for head in range(HEADS)]
        if self.read(stay.blocks, stay.start, end, set(range(HEADS))) != wanted:
            self.world.fail(f"{self.name} reads wrong bytes, {what}: {stay.job.attempt}")

    # --- memory ---

    def land(self, write: Write, cell: Cell, value: int | None) -> None:
        """A byte arrives."""
        attempt = write.attempt
        if self.owner.get(cell[0]) != attempt:
            self.world.fail(
                f"{self.name}: a byte of {attempt} lands in {cell}, which is not its own"
            )
        record = self.machine._live.get(attempt)
        session = record.session if record is not None else None
        if session is None or session.id != write.post.session:
            self.world.fail(f"{self.name}: a byte of another session lands in {cell} of {attempt}")
        if (attempt, cell) in self.landed:
            self.world.fail(f"{self.name}: {cell} is written twice for {attempt}")
        self.landed.add((attempt, cell))
        self.memory[cell] = value

    def notice(self, write: Write) -> None:
        """A write has landed."""
        post = write.post
        landed = Landed(
            post.session,
            post.attempt,
            post.write,
            post.start,
            post.end,
            *write.pair,
            digests=write.digests,
        )
        self.take(landed)

    # --- shell ---

    def carry_out(self, action: Any) -> None:
        """Do what the machine says."""
        match action:
            case Send():
                self._send(action)
            case AdmitPeer():
                node = self.world.nodes[action.node.node]
                if node.id != action.node or not node.alive:
                    self.take(PeerGone(action.node))
            case Verify():
                self.world.soon(lambda: self._verify(action), 0.01)
            case Deliver():
                self._deliver(action)
            case Fail():
                self._fail(action)
            case Unquarantine():
                self._unquarantine(action.attempt)
            case Fence():
                self._fence(action.node)

    def _send(self, action: Send) -> None:
        address = action.link.id.decode() if action.link is not None else action.address
        assert address is not None
        link = Link(self.name.encode() + self.id.generation)

        def deliver(copy: Control) -> None:
            self.world.nodes[address].take(Received(link, copy))

        self.world.send(action.message, address, deliver)

    def _verify(self, action: Verify) -> None:
        blocks = by_number(action.target[0])
        bad = len(action.digests) == 0
        for run in action.digests:
            source_ranks = 1 + max(run.source_rank for run in action.digests)
            heads = heads_of(run.source_rank, source_ranks) & heads_of(run.target_rank, self.ranks)
            found = self.read(blocks, action.start, action.end, heads)
            bad |= value_bytes(found) != run.values
        if bad and not self.world.weather.corrupt and action.attempt in self.owner.values():
            self.world.fail(f"{self.name}: digests of {action.attempt} differ, but nothing rots")
        ranges = ((action.start, action.end),) if bad else ()
        self.take(Verified(action.attempt, action.write, ranges))

    def _deliver(self, action: Deliver) -> None:
        stay = self.stays[action.attempt]
        if not stay.waiting:
            return
        stay.waiting = False
        self.over(stay.job)
        self.delivered += 1
        self._expect(stay, stay.job.num_tokens, "delivered")
        self.world.soon(lambda: self._leave(stay), 0.2)

    def _fail(self, action: Fail) -> None:
        stay = self.stays[action.attempt]
        if not stay.waiting:
            return
        stay.waiting = False
        self.over(stay.job)
        self._expect(stay, action.valid_through, "verified before it failed")
        self._recompute(stay, action.valid_through)

    def _recompute(self, stay: Stay, start: int) -> None:
        """Compute what is missing into fresh blocks."""
        numbers = range(start // self.block_size, -(-stay.job.num_tokens // self.block_size))
        own = self.allocate(len(numbers))
        if own is not None:
            stay.own = own
            begin = numbers.start * self.block_size
            blocks = dict(zip(numbers, own, strict=True))
            self.fill(stay.job, blocks, begin, stay.job.num_tokens)
        self.world.soon(lambda: self._leave(stay), 0.2)

    def _unquarantine(self, attempt: Attempt) -> None:
        stay = self.stays[attempt]
        if not stay.incoming:
            self.world.fail(f"{self.name}: {attempt} leaves quarantine twice")
        for write in self.world.writes:
            if write.attempt == attempt and write.target is self and write.may_land:
                self.world.fail(f"{self.name}: {attempt} is freed while a write may still land")
        stay.incoming = False
        for block in stay.blocks.values():
            del self.owner[block]
        self._give_back(stay)

    def _fence(self, node: NodeId) -> None:
        scope = self.world.weather.fence
        current = self.world.nodes[node.node]
        gone = current.id != node or not current.alive
        if scope is FenceScope.NONE or (scope is FenceScope.PROCESS and not gone):
            return
        for write in self.world.writes:
            if write.source.id == node and write.target is self:
                write.cut()
        if not gone:
            current.cut_off(self)
            if self.world.rng.random() < 0.7:
                self.world.soon(lambda: current.take(PeerGone(self.id)), 0.1)
        self.take(Fenced(node))
