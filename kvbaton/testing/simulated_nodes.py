"""Simulated nodes: a machine, the shell around it, and a small model of the engine behind it.

`Prefill` computes prompts into a pool that is too small and pushes them; `Decode` reserves blocks,
reads what is delivered, computes anew what is not, and reuses each block as soon as it may. The
shells do what the courier does: they carry out all actions of one event before the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from kvbaton.connectors.base import FenceScope
from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.connectors.protocol.events import (
    AdmitPeer,
    Announce,
    Attempt,
    BlocksReady,
    CancelTarget,
    Closed,
    ClosePeer,
    Deliver,
    Engage,
    EvictSource,
    Fail,
    Fence,
    Fenced,
    FirstTokens,
    Identity,
    Landed,
    Link,
    OpenPeer,
    PeerGone,
    Post,
    Received,
    RefuseAnnounce,
    Release,
    Send,
    SendPushed,
    SourceFailed,
    Start,
    StopSource,
    Tick,
    TransferTimers,
    Unneeded,
    Unquarantine,
    Verified,
    Verify,
    WriteEnded,
)
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.target import Target
from kvbaton.testing.simulated_world import Cell, Fate, World, Write
from kvbaton.wire import (
    BlockSpan,
    ChoiceStart,
    Control,
    DigestRun,
    NodeId,
    Pushed,
    RankCard,
)

HEADS = 2
TIMERS = TransferTimers(
    session=1.5,
    resend=0.25,
    progress_period=0.4,
    progress_deadline=1.5,
    total=8.0,
    lease=3.0,
    unclaimed=3.0,
    fence_retry=0.3,
    quarantine_limit=6.0,
    tombstone=20.0,
    silence=3.0,
    put_out=2.0,
)


@dataclass(frozen=True)
class Job:
    """A prompt that the router sends to one pair of nodes."""

    attempt: Attempt
    num_tokens: int

    @property
    def key(self) -> bytes:
        """Its prompt key."""
        return self.attempt.transfer_id * 2

    @property
    def choices(self) -> tuple[ChoiceStart, ...]:
        """Its first token."""
        return (ChoiceStart(self.attempt.transfer_id[0]),)

    def value(self, position: int, head: int) -> int:
        """What the cell of a token must hold."""
        return self.attempt.transfer_id[0] << 40 | position << 8 | head


def value_bytes(values: list[int | None]) -> bytes:
    """A stand-in for digests: they differ if any value does."""
    return b"".join(
        (-1 & ((1 << 64) - 1) if v is None else v).to_bytes(8, "little") for v in values
    )


def heads_of(rank: int, ranks: int) -> set[int]:
    """Heads that a rank holds; with one rank, all."""
    return {head for head in range(HEADS) if head * ranks // HEADS == rank}


def any_layout(source: object, target: object) -> None:
    """Pairs everything."""


class Node:
    """One life of a node: a machine that is fed one event at a time."""

    machine: Source | Target

    def __init__(
        self, world: World, name: str, generation: int, *, ranks: int, block_size: int, blocks: int
    ) -> None:
        self.world = world
        self.name = name
        self.id = NodeId(name, generation.to_bytes(16, "little"))
        self.ranks = ranks
        self.block_size = block_size
        self.num_blocks = blocks
        self.free = list(range(1, blocks))
        self.memory: dict[Cell, int | None] = {}
        self.alive = True
        self.stopped = False
        self.offset = 0.0
        self.backlog: list[Callable[[], None]] = []
        self.handled = 0
        self._events: deque[Any] = deque()
        self._busy = False
        self._tick_at: float | None = None
        world.nodes[name] = self

    def identity(self) -> Identity:
        """What the node says of itself."""
        layout = KVLayout(0, GroupKind.FULL, self.block_size, self.num_blocks, ())
        layouts = msgspec.msgpack.encode([layout])
        cards = tuple(RankCard(rank, b"card", layouts) for rank in range(self.ranks))
        return Identity(self.id, bytes(32), {}, "simulated", cards)

    def new_id(self) -> bytes:
        """16 random bytes of the world's seed."""
        return self.world.rng.randbytes(16)

    @property
    def clock(self) -> float:
        """The node's own monotonic clock."""
        return self.world.now + self.offset

    def take(self, event: Any) -> None:
        """Give the machine an event, now or when the process runs again."""
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append(lambda: self.take(event))
            return
        self._events.append(event)
        if not self._busy:
            self._pump()

    def _pump(self) -> None:
        self._busy = True
        while self._events:
            event = self._events.popleft()
            if not isinstance(event, Tick | Received):
                self.world.note(f"{self.name} {_short(event)}")
            self.handled += 1
            for action in self.machine.handle(event, self.clock):
                self.carry_out(action)
            self.machine.validate()
        self._busy = False
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is None:
            return
        at = max(deadline - self.offset, self.world.now + 0.001)
        if self._tick_at is None or at < self._tick_at or self._tick_at <= self.world.now:
            self._tick_at = at
            self.world.after(at - self.world.now, self._tick)

    def _tick(self) -> None:
        deadline = self.machine.next_deadline()
        self._tick_at = None
        if deadline is not None and deadline <= self.clock:
            self.take(Tick())
        else:
            self._schedule_tick()

    def carry_out(self, action: Any) -> None:
        """Do what the machine says."""
        raise NotImplementedError

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        for do in backlog:
            do()

    def jump(self, seconds: float) -> None:
        """The node's clock jumps."""
        self.offset += seconds
        self._schedule_tick()

    def kill(self) -> None:
        """SIGKILL; peers hear of it from their transports, perhaps."""
        self.alive = False
        self.backlog.clear()
        for other in list(self.world.nodes.values()):
            if other is not self and self.world.rng.random() < 0.7:
                self.world.soon(lambda other=other: other.take(PeerGone(self.id)), 0.3)  # type: ignore[misc]

    def allocate(self, count: int) -> list[int] | None:
        """Take free blocks, latest freed first, with nothing in them."""
        if len(self.free) < count:
            return None
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            for slot in range(self.block_size):
                for head in range(HEADS):
                    self.memory[block, slot, head] = None
        return blocks

    def fill(self, job: Job, blocks: dict[int, int], start: int, end: int) -> None:
        """Compute tokens [start, end)."""
        for position in range(start, end):
            block, slot = blocks[position // self.block_size], position % self.block_size
            for head in range(HEADS):
                self.memory[block, slot, head] = job.value(position, head)

    def read(
        self, blocks: dict[int, int], start: int, end: int, heads: set[int]
    ) -> list[int | None]:
        """Values of tokens [start, end)."""
        return [
            self.memory[blocks[p // self.block_size], p % self.block_size, head]
            for p in range(start, end)
            for head in sorted(heads)
        ]


@dataclass(eq=False)
class Run:
    """A prompt on P."""

    job: Job
    running: bool = True
    finished: bool = False
    computed: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    engaged: bool = False
    reported: int = 0
    held: set[int] = field(default_factory=set)
    signed: dict[tuple[int, int], int] = field(default_factory=dict)


class Prefill(Node):
    """A prefill node."""

    machine_type: ClassVar[type[Source]] = Source
    machine: Source

    def __init__(self, world: World, name: str, generation: int, **sizes: int) -> None:
        super().__init__(world, name, generation, **sizes)
        self.machine = self.machine_type(
            self.identity(), TIMERS, new_id=self.new_id, pairable=any_layout
        )
        self.runs: dict[Attempt, Run] = {}
        self.open: dict[bytes, tuple[Decode, tuple[RankCard, ...]]] = {}
        self.broken: set[bytes] = set()

    # --- engine ---

    def request(self, job: Job) -> None:
        """The router's request arrives."""
        if not self.alive or self.stopped:
            return
        if job.attempt in self.runs:
            return
        self.runs[job.attempt] = run = Run(job)
        self.take(Announce(job.attempt, job.key, job.num_tokens))
        self.world.soon(lambda: self._step(run), 0.05)

    def _step(self, run: Run) -> None:
        """Compute a chunk; the first one waits until there are blocks for the whole prompt."""
        if not self.alive or not run.running:
            return
        if self.stopped:
            self.backlog.append(lambda: self._step(run))
            return
        numbers = range(0 if run.blocks else -(-run.job.num_tokens // self.block_size))
        blocks = self.allocate(len(numbers))
        if blocks is None:
            self.world.after(0.2, lambda: self._step(run))
            return
        run.blocks.update(zip(numbers, blocks, strict=True))
        self.launch(run, min(run.computed + 2 * self.block_size, run.job.num_tokens))

    def launch(self, run: Run, end: int) -> None:
        """Start a step; its blocks are ready when it is over."""
        self.world.soon(lambda: self._step_over(run, end), 0.05)

    def _step_over(self, run: Run, end: int) -> None:
        if not self.alive or not run.running:
            return
        self.computed(run, end)
        self.report(run)
        self._go_on(run)

    def computed(self, run: Run, end: int) -> None:
        """The step's bytes are in memory, and signed."""
        self.fill(run.job, run.blocks, run.computed, end)
        for position in range(run.computed, end):
            for head in range(HEADS):
                run.signed[position, head] = run.job.value(position, head)
        run.computed = end

    def report(self, run: Run) -> None:
        """Tell the machine what is ready."""
        job = run.job
        if run.engaged and run.computed > run.reported:
            start, run.reported = run.reported, run.computed
            first, last = start // self.block_size, -(-run.computed // self.block_size)
            blocks = tuple(run.blocks[number] for number in range(first, last))
            run.held.update(blocks)
            self._rot(blocks)
            self.take(BlocksReady(job.attempt, start, run.computed, ((BlockSpan(first, blocks),),)))

    def _go_on(self, run: Run) -> None:
        job = run.job
        if run.computed < job.num_tokens:
            self.world.soon(lambda: self._step(run), 0.05)
        elif run.running:
            run.running, run.finished = False, True
            self.take(FirstTokens(job.attempt, job.choices))
            self._give_back(run)

    def _rot(self, blocks: tuple[int, ...]) -> None:
        if self.world.chance(self.world.weather.corrupt):
            cell = (self.world.rng.choice(blocks), 0, 0)
            self.memory[cell] = self.world.rng.getrandbits(60)
            self.world.note(f"{self.name} {cell} rots")

    def _give_back(self, run: Run) -> None:
        """Free what neither a run nor the machine holds."""
        if run.running:
            return
        for number, block in list(run.blocks.items()):
            if block not in run.held:
                self._free(run.blocks.pop(number))

    def _free(self, block: int) -> None:
        for write in self.world.writes:
            if write.source is self and write.reads and block in write.blocks:
                self.world.fail(f"{self.name} frees block {block} while a write reads it")
        self.free.append(block)

    def abort(self, job: Job) -> None:
        """The client is gone."""
        run = self.runs.get(job.attempt)
        if run is not None and run.running and self.alive and not self.stopped:
            run.running = False
            self.take(SourceFailed(job.attempt, "aborted"))
            self._give_back(run)

    # --- shell ---

    def carry_out(self, action: Any) -> None:
        """Do what the machine says."""
        match action:
            case Send():
                self._send(action.message, action.link)
            case SendPushed():
                self._send(self._pushed(action), action.link)
            case OpenPeer():
                self._open(action)
            case ClosePeer():
                self._close(action.session)
            case Post():
                self._post(action)
            case Engage():
                self._engage(action)
            case Release():
                self._release(action)
            case StopSource() | RefuseAnnounce():
                self._stop(action.attempt)
            case EvictSource():
                self.world.note(f"{self.name} evicts {action.bad}")

    def _send(self, message: Control, link: Link | None) -> None:
        assert link is not None, "a source only answers"
        name = link.id[:-16].decode()
        generation = link.id[-16:]
        address = Link(self.name.encode())

        def deliver(copy: Control) -> None:
            node = self.world.nodes[name]
            if node.id.generation == generation:
                node.take(Received(address, copy))

        self.world.send(message, name, deliver)

    def _open(self, action: OpenPeer) -> None:
        node = self.world.nodes[action.node.node]
        if node.id != action.node or not node.alive:
            self.take(PeerGone(action.node))
        assert isinstance(node, Decode)
        self.open[action.session] = (node, action.ranks)

    def _close(self, session: bytes) -> None:
        self.open.pop(session, None)
        for write in self.world.writes:
            if write.source is self and write.post.session == session:
                write.detach()
        self.take(Closed(session))

    def _post(self, post: Post) -> None:
        target, ranks = self.open[post.session]
        self.check_ready(post)
        source_blocks = _by_number(post.source[0])
        target_blocks = _by_number(post.target[0])
        for s in range(self.ranks):
            for t in range(len(ranks)):
                cells = [
                    (
                        (source_blocks[p // self.block_size], p % self.block_size, head),
                        (target_blocks[p // target.block_size], p % target.block_size, head),
                    )
                    for p in range(post.start, post.end)
                    for head in heads_of(s, self.ranks) & heads_of(t, len(ranks))
                ]
                self._post_pair(post, target, (s, t), cells)

    def check_ready(self, post: Post) -> None:
        """A push may read only what is final."""
        run = self.runs[post.attempt]
        for position in range(post.start, post.end):
            if (position, 0) not in run.signed:
                self.world.fail(f"{self.name} pushes token {position}, which is not computed yet")

    def _post_pair(
        self, post: Post, target: Decode, pair: tuple[int, int], cells: list[tuple[Cell, Cell]]
    ) -> None:
        world = self.world
        fate = Fate.GOOD
        if world.chance(world.weather.bad_write):
            fate = world.rng.choice([Fate.FAILED, Fate.LATE, Fate.STUCK])
        write = Write(world, self, target, post, pair, cells, fate)
        if post.session in self.broken or not target.alive:
            write.void = write.ended = True
            self.take(WriteEnded(post.attempt, post.write, *pair, ok=False, error="broken"))
            return
        world.writes = [w for w in world.writes if w.left and not w.void]
        world.writes.append(write)
        write.begin()

    def write_ended(self, write: Write, *, ok: bool, drained: bool) -> None:
        """A write of ours ended; writes are watched to their end, also after `ClosePeer`."""
        number = write.post.write
        self.take(WriteEnded(write.attempt, number, *write.pair, ok=ok, drained=drained))

    def _pushed(self, action: SendPushed) -> Pushed:
        _, ranks = self.open[action.session]
        runs = tuple(
            DigestRun(s, t, 0, action.start, value_bytes(self.digests(action, heads)))
            for s in range(self.ranks)
            for t in range(len(ranks))
            if (heads := heads_of(s, self.ranks) & heads_of(t, len(ranks)))
        )
        return Pushed(
            session=action.session,
            seq=action.seq,
            transfer_id=action.attempt.transfer_id,
            attempt=action.attempt.number,
            write=action.write,
            start=action.start,
            end=action.end,
            digests=runs,
        )

    def digests(self, action: SendPushed, heads: set[int]) -> list[int | None]:
        """What the step that computed the tokens has signed."""
        signed = self.runs[action.attempt].signed
        return [signed[p, h] for p in range(action.start, action.end) for h in sorted(heads)]

    def _engage(self, action: Engage) -> None:
        run = self.runs.get(action.attempt)
        if run is None:
            self.take(SourceFailed(action.attempt, "the prompt is gone"))
            return
        if run.engaged:
            self.world.fail(f"{self.name} is engaged twice for {action.attempt}")
        run.engaged, run.reported = True, action.start
        if run.running:
            self.report(run)
        elif run.finished:
            run.running, run.finished, run.computed = True, False, 0
            self._step(run)
        else:
            self.take(SourceFailed(action.attempt, "the prompt was aborted"))

    def _release(self, action: Release) -> None:
        run = self.runs.get(action.attempt)
        if run is None:
            return
        if not run.engaged:
            self.world.fail(f"{self.name} is released without an Engage: {action}")
        run.engaged = False
        run.held.clear()
        self._give_back(run)

    def _stop(self, attempt: Attempt) -> None:
        run = self.runs.get(attempt)
        if run is not None:
            run.running = False
            self._give_back(run)


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

    def cancel(self, job: Job) -> None:
        """The client is gone."""
        stay = self.stays.get(job.attempt)
        if stay is not None and stay.waiting and self.alive and not self.stopped:
            stay.waiting = False
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
        self.take(Landed(post.session, post.attempt, post.write, *write.pair))

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
        blocks = _by_number(action.target[0])
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
        self.delivered += 1
        self._expect(stay, stay.job.num_tokens, "delivered")
        self.world.soon(lambda: self._leave(stay), 0.2)

    def _fail(self, action: Fail) -> None:
        stay = self.stays[action.attempt]
        if not stay.waiting:
            return
        stay.waiting = False
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
        if not gone and isinstance(current, Prefill):
            current.broken |= {s for s, (target, _) in current.open.items() if target is self}
            if self.world.rng.random() < 0.7:
                self.world.soon(lambda: current.take(PeerGone(self.id)), 0.1)
        self.take(Fenced(node))


def _by_number(spans: tuple[BlockSpan, ...]) -> dict[int, int]:
    return {span.first + i: block for span in spans for i, block in enumerate(span.blocks)}


def _short(event: Any) -> str:
    text = repr(event)
    return text if len(text) < 160 else text[:160] + "..."
