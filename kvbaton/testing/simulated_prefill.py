"""A simulated prefill node: computes prompts into a pool that is too small, and pushes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvbaton.connectors.protocol.events import (
    Announce,
    BlocksReady,
    Closed,
    ClosePeer,
    Engage,
    EvictSource,
    FirstTokens,
    Link,
    OpenPeer,
    PeerGone,
    Post,
    Received,
    RefuseAnnounce,
    Release,
    Send,
    SourceFailed,
    StopSource,
    WriteEnded,
)
from kvbaton.connectors.protocol.source import Source
from kvbaton.messages.control import Control, DigestRun, RankCard
from kvbaton.testing.simulated_decode import Decode
from kvbaton.testing.simulated_items import EncoderCacheManager
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
from kvbaton.testing.simulated_world import Cell, Fate, World, Write
from kvbaton.types import Attempt, BlockSpan


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
        self.items: EncoderCacheManager | None = None

    # --- engine ---

    def request(self, job: Job) -> None:
        """The router's request arrives."""
        if not self.alive or self.stopped:
            return
        if job.attempt in self.runs:
            return
        self.runs[job.attempt] = run = Run(job)
        self.take(Announce(job.attempt, job.key, job.num_tokens))
        for _, item, encoder in job.items:
            assert self.items is not None
            self.items.request(item, encoder)
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
        end = min(run.computed + 2 * self.block_size, self.ready_until(run.job))
        if end > run.computed:
            self.launch(run, end)
        else:
            self.world.after(0.1, lambda: self._step(run))

    def ready_until(self, job: Job) -> int:
        """Where the first item begins that is not here; the end of the prompt if all are."""
        return min((at for at, item in self.missing(job)), default=job.num_tokens)

    def missing(self, job: Job) -> list[tuple[int, Job]]:
        """Items that are not here, and where they stand."""
        here = self.items.settled if self.items is not None else set()
        return [(at, item) for at, item, _ in job.items if item.attempt not in here]

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
        if any(at < end for at, _ in self.missing(run.job)):
            self.world.fail(f"{self.name} computes tokens of an item that is not here")
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
            for _, item, _ in run.job.items:
                if self.items is not None:
                    self.items.cancel(item)
            self.take(SourceFailed(job.attempt, "aborted"))
            self._give_back(run)

    # --- shell ---

    def carry_out(self, action: Any) -> None:
        """Do what the machine says."""
        match action:
            case Send():
                self._send(action.message, action.link)
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
        source_blocks = by_number(post.source[0])
        target_blocks = by_number(post.target[0])
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
                heads = heads_of(s, self.ranks) & heads_of(t, len(ranks))
                values = value_bytes(self.digests(post, heads))
                run = DigestRun(s, t, 0, post.start, values)
                self._post_pair(post, target, (s, t), cells, (run,) if heads else ())

    def check_ready(self, post: Post) -> None:
        """A push may read only what is final."""
        run = self.runs[post.attempt]
        for position in range(post.start, post.end):
            if (position, 0) not in run.signed:
                self.world.fail(f"{self.name} pushes token {position}, which is not computed yet")

    def _post_pair(
        self,
        post: Post,
        target: Decode,
        pair: tuple[int, int],
        cells: list[tuple[Cell, Cell]],
        digests: tuple[DigestRun, ...],
    ) -> None:
        world = self.world
        fate = Fate.GOOD
        if world.chance(world.weather.bad_write):
            fate = world.rng.choice([Fate.FAILED, Fate.LATE, Fate.STUCK])
        write = Write(world, self, target, post, pair, cells, fate, digests)
        if post.session in self.broken or not target.alive:
            write.void = write.ended = True
            self.take(WriteEnded(post.attempt, post.write, *pair, ok=False, error="broken"))
            return
        world.writes = [w for w in world.writes if w.left and not w.void]
        world.writes.append(write)
        write.begin()

    def cut_off(self, other: Node) -> None:
        """Another node has fenced this one: what is connected to it breaks."""
        self.broken |= {s for s, (target, _) in self.open.items() if target is other}

    def write_ended(self, write: Write, *, ok: bool, drained: bool) -> None:
        """A write of ours ended; writes are watched to their end, also after `ClosePeer`."""
        number = write.post.write
        self.take(WriteEnded(write.attempt, number, *write.pair, ok=ok, drained=drained))

    def digests(self, action: Post, heads: set[int]) -> list[int | None]:
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
