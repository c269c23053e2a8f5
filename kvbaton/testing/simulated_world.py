"""The world of the protocol's simulator: virtual time, a bad network, and memory that writes reach.

Nothing here sleeps or does I/O. All randomness comes from one seed, so a run can be repeated. A
`Write` lands in parts, late, or never, whatever timers have rung; each cell that lands is checked
against the account of who owns its block.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvbaton.connectors.base import FenceScope
from kvbaton.connectors.protocol.events import Post
from kvbaton.messages.control import Control, DigestRun, decode_control, encode_control
from kvbaton.types import Attempt

if TYPE_CHECKING:
    from kvbaton.testing.simulated_decode import Decode
    from kvbaton.testing.simulated_node import Node
    from kvbaton.testing.simulated_prefill import Prefill

Cell = tuple[int, int, int]
"""Block, slot in the block, head."""


class ViolationError(AssertionError):
    """The protocol let something happen that may never happen."""


@dataclass(frozen=True)
class Weather:
    """How bad it is until `heal_at`, in seconds of virtual time.

    Attributes:
        loss: probability that a control message is lost.
        duplicate: probability that it arrives twice.
        stall: probability that it is late by seconds, so that later ones overtake it.
        bad_write: probability that a write fails, hangs, or lands after its error.
        corrupt: probability that a source block rots after it was reported ready.
        violence: stops, continues, kills, restarts and clock jumps per second.
        fence: what a fence can prove.
        heal_at: from then on nothing goes wrong any more.
    """

    loss: float
    duplicate: float
    stall: float
    bad_write: float
    corrupt: float
    violence: float
    fence: FenceScope
    heal_at: float = 12.0


class World:
    """Virtual time, network and nodes."""

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        self.rng = rng
        self.weather = weather
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.writes: list[Write] = []
        self.log: list[str] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def healed(self) -> bool:
        """Whether faults are over."""
        return self.now >= self.weather.heal_at

    def chance(self, probability: float) -> bool:
        """Whether a fault happens now."""
        return not self.healed and self.rng.random() < probability

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + max(seconds, 0.0), self._count, do))

    def soon(self, do: Callable[[], None], mean: float = 0.02) -> None:
        """Do something after a random while."""
        self.after(self.rng.expovariate(1 / mean), do)

    def run(self, until: float) -> int:
        """Let time pass; returns how many things happened."""
        steps = 0
        while self._heap and self._heap[0][0] <= until:
            self.now, _, do = heapq.heappop(self._heap)
            do()
            steps += 1
        self.now = until
        return steps

    def note(self, line: str) -> None:
        """Add to the log, which is part of a violation's message."""
        self.log.append(f"{self.now:.3f} {line}")

    def fail(self, what: str) -> None:
        """Report a violation, with the last of the log."""
        raise ViolationError("\n".join([what, *self.log[-60:]]))

    # --- network ---

    def send(self, message: Control, to: str, deliver: Callable[[Control], None]) -> None:
        """Carry a message, or lose, repeat or delay it."""
        copies = 0 if self.chance(self.weather.loss) else 1 + self.chance(self.weather.duplicate)
        copy = decode_control(encode_control(message))
        self.note(f"-> {to}: {type(message).__name__} #{message.seq} x{copies}")
        for _ in range(copies):
            stall = self.rng.uniform(0.2, 3.0) if self.chance(self.weather.stall) else 0.0
            self.soon(lambda: deliver(copy), 0.004 + stall)


class Fate(Enum):
    """How a write will end."""

    GOOD = "good"
    FAILED = "failed"
    """A part lands; then it is terminal with an error."""
    LATE = "late"
    """It is in error while it still lands, and terminal later."""
    STUCK = "stuck"
    """A part lands; the rest only after long, perhaps after every timer."""


@dataclass(eq=False)
class Write:
    """One rank pair's part of a `Post`, on its way.

    Attributes:
        left: (source cell, target cell) still to land.
        wire: values that were read already, when the source went away; None while it is read live.
        void: it can't land any more.
        ended: P's transport has reported it terminal.
    """

    world: World
    source: Prefill
    target: Decode
    post: Post
    pair: tuple[int, int]
    left: list[tuple[Cell, Cell]]
    fate: Fate
    digests: tuple[DigestRun, ...]
    wire: list[int | None] | None = None
    void: bool = False
    ended: bool = False
    failed: bool = False
    blocks: frozenset[int] = field(default_factory=frozenset)

    @property
    def attempt(self) -> Attempt:
        """Whose it is."""
        return self.post.attempt

    def begin(self) -> None:
        """Schedule what will happen."""
        rng = self.world.rng
        self.blocks = frozenset(cell[0] for cell, _ in self.left)
        parts = 1 if self.fate is Fate.GOOD and rng.random() < 0.6 else rng.randint(2, 3)
        quick = rng.uniform(0.001, 0.03)
        if self.fate is Fate.GOOD:
            self._land_in_parts(parts, quick, self._good)
        elif self.fate is Fate.FAILED:
            self._land_in_parts(parts, quick, lambda: self._end(ok=False), keep=True)
        elif self.fate is Fate.LATE:
            self.world.after(quick / 2, self._error)
            self._land_in_parts(parts, rng.uniform(0.1, 3.0), lambda: self._end(ok=False))
        else:
            self._land(len(self.left) // 2)
            self.world.after(rng.uniform(1.0, 20.0), lambda: self._finish(self._good))

    def _land_in_parts(
        self, parts: int, seconds: float, then: Callable[[], None], *, keep: bool = False
    ) -> None:
        """Land in equal parts; with `keep` the last one never does."""
        size = -(-len(self.left) // parts)
        for part in range(1, parts + 1 - keep):
            self.world.after(seconds * part / parts, lambda: self._when_running(size))
        self.world.after(seconds, lambda: self._finish(then, drop=keep))

    def _when_running(self, count: int) -> None:
        if not self._paused(lambda: self._when_running(count)):
            self._land(count)

    def _finish(self, then: Callable[[], None], *, drop: bool = False) -> None:
        if self._paused(lambda: self._finish(then, drop=drop)):
            return
        if drop:
            self.left.clear()
        self._land(len(self.left))
        then()

    def _paused(self, again: Callable[[], None]) -> bool:
        """A stopped process moves nothing; it goes on where it was."""
        if self.source.stopped and self.source.alive:
            self.source.backlog.append(again)
            return True
        return False

    def _land(self, count: int) -> None:
        for _ in range(min(count, len(self.left))):
            source, target = self.left.pop()
            value = self.wire.pop() if self.wire is not None else self.source.memory.get(source)
            if not self.void and self.target.alive:
                self.target.land(self, target, value)

    def detach(self) -> None:
        """The source is read no more: what is left was read by now and is on the wire."""
        if self.wire is None:
            self.wire = [self.source.memory.get(cell) for cell, _ in self.left]

    def cut(self) -> None:
        """A fence: nothing lands any more, and P sees an error that says so little."""
        if not self.void and not self.ended:
            self.void = True
            self._error()

    def _error(self) -> None:
        if not self.ended and not self.failed:
            self.failed = True
            self.source.write_ended(self, ok=False, drained=False)

    def _good(self) -> None:
        if self.void or self.failed:
            self._end(ok=False)
            return
        target = self.target
        self.world.soon(lambda: target.notice(self), 0.003)
        self._end(ok=True)

    def _end(self, *, ok: bool) -> None:
        if self.void:
            return  # P never learns more of a write that was fenced off
        self.ended = True
        self.world.soon(lambda: self.source.write_ended(self, ok=ok, drained=True), 0.003)

    @property
    def may_land(self) -> bool:
        """Whether a byte of it can still land."""
        return bool(self.left) and not self.void and self.target.alive

    @property
    def reads(self) -> bool:
        """Whether it still reads the source's memory."""
        return bool(self.left) and self.wire is None
