"""What simulated nodes share: a machine, the shell around it, and a pool of blocks.

The shell does what the transfer thread does: all actions of one event before the next event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.connectors.protocol.events import Identity, PeerGone, Received, Tick
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.target import Target
from kvbaton.messages.control import RankCard
from kvbaton.testing.simulated_world import Cell, World
from kvbaton.types import Attempt, BlockSpan, ChoiceStart, NodeId, TransferTimers

HEADS = 2
TIMERS = TransferTimers(
    session=1.5,
    resend=0.25,
    progress_period=0.4,
    progress_deadline=1.5,
    total=8.0,
    lease=3.0,
    unclaimed=3.0,
    unannounced=3.0,
    fence_retry=0.3,
    quarantine_limit=6.0,
    tombstone=20.0,
    silence=3.0,
    put_out=2.0,
)


@dataclass(frozen=True)
class Job:
    """A prompt that the router sends to one pair of nodes, or an item of one.

    Attributes:
        items: per item, where it stands in the prompt, its own hand-over, and from whom.
    """

    attempt: Attempt
    num_tokens: int
    items: tuple[tuple[int, Job, str], ...] = ()

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

    def cut_off(self, other: Node) -> None:
        """Another node has fenced this one: what is connected to it breaks."""

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


def by_number(spans: tuple[BlockSpan, ...]) -> dict[int, int]:
    """Physical block behind each logical block."""
    return {span.first + i: block for span in spans for i, block in enumerate(span.blocks)}


def _short(event: Any) -> str:
    text = repr(event)
    return text if len(text) < 160 else text[:160] + "..."
