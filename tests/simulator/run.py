"""Runs real nodes of the hand-over against each other in a hostile world, from a seed.

One call of `simulate` is one schedule: a few prefill and decode nodes, some of them both, each with
the real core, scheduler, connector, transfer worker and machine, some prompts that share prefixes,
and until the weather heals every fault that the protocol claims to stand: loss, duplication and
reordering of control messages; messages that no sane peer would send; writes that fail, hang, or
land long after their sender has given up; source blocks that rot; nodes stopped, continued, killed
rank by rank, restarted and cut off from each other; members that come and go; clocks that jump;
routers that send a prompt twice, to two nodes, to one side only, or as two different ones. Pools
are small: prompts wait for each other and preempt each other. In every fourth schedule prompts have
items, encoder nodes encode them, and the other nodes have encoders beside their language models, as
in real life. In every 32nd the weather is calm, all nodes are both, and more is asked of them than
there is room for: they must not wait for each other for ever.

After every event the laws of `laws` hold, and so do the machines' own. At the end every
request has its answer, and nothing is left in any dict but what a peer keeps that is dead and can't
be fenced. In a schedule without any fault every hand-over must end well. A `ViolationError` tells
the story.

    python -m tests.simulator.run 1000 --first 5000 --processes 8   # seeds 5000 to 5999
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

from kvbaton.connectors.base import FenceScope
from kvbaton.types import ENCODER_BLOCK_ROWS
from tests.simulator.dispatch import SimulatedDispatch
from tests.simulator.laws import NodeLaws
from tests.simulator.machine_invariants import check_machine
from tests.simulator.node import NodeShape, SimulatedNode
from tests.simulator.router import CALM_DEADLINE_S, ENCODER_OF, MODELS, SimulatedRouter
from tests.simulator.world import SimulatedWorld, ViolationError, Weather

REST_S = 40.0
"""Virtual seconds after the weather has healed, and the last step of a node is over, in which
everything must come to rest."""

PROGRESS_S = 15.0
"""Between two lines of progress."""

WINDOW = 6
"""Tokens that the second group attends to, if there is one."""


@dataclass
class ScheduleReport:
    """What one schedule did.

    Attributes:
        events: turns, messages, steps and landings.
        totals: outcomes of attempts by side, and other things that happened, by name.
        left: quarantines that remain, on peers that are dead and can't be fenced.
    """

    seed: int
    events: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    left: int = 0


class Simulation:
    """One schedule.

    Args:
        seed: of everything.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self._crowded = seed % 64 in CROWDED
        weather = Weather(fence=rng.choice(SCOPES)) if self._crowded else draw_weather(rng)
        self.world = SimulatedWorld(rng, weather)
        self._shapes: dict[str, NodeShape] = {}
        self._nodes: dict[str, SimulatedNode] = {}
        self._lives: list[SimulatedNode] = []
        self._laws: list[NodeLaws] = []
        self._to_come = 0
        num_groups = rng.choice([1, 1, 2])
        self._window_size = rng.choice([2, 3, 4])  # of most nodes: equal shapes meet often
        for i in range(rng.choice([1, 1, 2])):
            both = rng.random() < 0.3 or self._crowded
            self._shapes[f"p{i}"] = self._draw_shape(True, both, num_groups)
        for i in range(rng.choice([1, 1, 2])):
            both = rng.random() < 0.3 or self._crowded
            self._shapes[f"d{i}"] = self._draw_shape(both, True, num_groups)
        self._dispatch: SimulatedDispatch | None = None
        if seed % 8 == MOVING:
            self._add_movers(num_groups)
        if seed % 4 == 1:
            self._add_encoders()
        shapes = self._shapes.items()
        self._targets = [name for name, shape in shapes if shape.is_target]
        self._sources = [name for name, shape in shapes if shape.is_source and not shape.items]
        self._encoders = [name for name, shape in shapes if shape.items]
        parts = self._sources, self._targets, self._encoders
        self._router = SimulatedRouter(
            self.world, self._nodes, self._later, *parts, crowded=self._crowded
        )

    def _draw_shape(self, is_source: bool, is_target: bool, num_groups: int) -> NodeShape:
        rng = self.rng
        tokens = rng.choice([50, 50, 70, 120] if not self._crowded else [50, 50, 70])
        groups, blocks = [], 1
        for window in (0, WINDOW)[:num_groups]:
            size = rng.choice([self._window_size] * 2 + [2, 3, 4])
            groups.append((size, window))
            blocks += tokens // size
        odd = not is_source and self.world.weather.misdirection and rng.random() < 0.1
        steps = [0.01, 0.01, 0.05, 0.7] if is_source else [0.01, 0.1]
        return NodeShape(
            is_source=is_source,
            is_target=is_target,
            model=MODELS[bool(odd)],
            ranks=rng.choice([1, 1, 1, 2, 2, 4]),
            groups=tuple((size, blocks, window) for size, window in groups),
            step_s=rng.choice(steps if not self._crowded else [0.01]),
            batch=rng.choice([4, 8, 16]) if is_source else 16,
            depth=rng.choice([1, 2]),
        )

    def _add_movers(self, num_groups: int) -> None:
        """All prompts are given to the real router's dispatch, by which they move."""
        rng = self.rng
        self._shapes.clear()
        drafts = rng.choice([0, 0, 2, 3])
        for i in range(rng.choice([2, 3])):
            role = rng.choice(["any"] * 4 + ["prefill", "decode"]) if i > 1 else "any"
            shape = self._draw_shape(True, True, num_groups)
            sizes = [size for size, _, _ in shape.groups]
            if rng.random() < 0.8:
                sizes = [self._window_size] * num_groups
            tokens = rng.choice([60, 90, 150])
            blocks = 1 + sum(tokens // size for size in sizes)
            windows = (window for _, _, window in shape.groups)
            self._shapes[f"n{i}"] = replace(
                shape,
                is_source=role != "decode",
                is_target=role != "prefill",
                groups=tuple((size, blocks, w) for size, w in zip(sizes, windows, strict=True)),
                step_s=rng.choice([0.02, 0.05, 0.1, 0.2]),
                drafts=drafts,
            )

    def _add_encoders(self) -> None:
        """Prompts have images: nodes that encode them, and an encoder beside each of the others."""
        for name, shape in self._shapes.items():
            beside = self._draw_encoder(shape.model, False)
            self._shapes[name] = replace(shape, encoder=beside)
        for i in range(self.rng.choice([1, 1, 2])):
            self._shapes[f"e{i}"] = self._draw_encoder(MODELS[0], True)

    def _draw_encoder(self, model: int, is_source: bool) -> NodeShape:
        rng = self.rng
        return NodeShape(
            is_source=is_source,
            is_target=not is_source,
            model=ENCODER_OF[model],
            ranks=1,
            groups=((ENCODER_BLOCK_ROWS, 1 + rng.choice([2, 3, 6]), 0),),
            step_s=rng.choice([0.01, 0.1]),
            batch=rng.choice([32, 64]),
            items=True,
        )

    def run(self) -> ScheduleReport:
        """Run it.

        Raises:
            ViolationError: something happened that may never happen, or something raised.
        """
        with _virtual_time(self.world, self.seed):
            try:
                for name in self._shapes:
                    self._birth(name)
                self._plan()
                # Until all is over, and stays so for longer than any lease. Every eighth schedule
                # goes on to the end: to be at rest for long must do no harm either.
                world = self.world
                world.run(world.weather.heal_at)
                lease, rested_at = 1.25 * self._lives[0].timers.lease, math.inf
                while world.now < self._end() and world.now < rested_at + lease:
                    world.run(world.now + 1.0)
                    if self.seed % 8 == 0 or not self._rests():
                        rested_at = math.inf
                    else:
                        rested_at = min(rested_at, world.now)
                return self._check_rest()
            except Exception as error:
                if not isinstance(error, ViolationError):
                    self.world.note("raised", repr(error))
                    try:
                        self.world.fail(f"{type(error).__name__}: {error}")
                    except ViolationError as violation:
                        raise violation from error
                raise
            finally:
                for node in self._lives:
                    node.transfers.close()
                asyncio.events._set_running_loop(None)

    def _end(self) -> float:
        """By when everything must have come to rest: nobody is so slow that clients give it up."""
        busy_until = max(node.executor.busy_until for node in self._lives)
        heal_at = self.world.weather.heal_at
        return min(max(heal_at, busy_until), heal_at + CALM_DEADLINE_S) + REST_S

    def _rests(self) -> bool:
        """Whether nothing is left to happen."""
        if self._dispatch is not None and self._dispatch.unrest():
            return False
        if self._to_come or any(write.may_land for write in self.world.writes):
            return False
        lives = [pair for pair in zip(self._lives, self._laws, strict=True) if pair[0].alive]
        if not all(request.over for node, _ in lives for request in node.requests.values()):
            return False
        return not any(any(self._unrest(node, laws)) for node, laws in lives)

    def _birth(self, name: str) -> None:
        node = SimulatedNode(self.world, name, len(self._lives), self._shapes[name])
        self._nodes[name] = node
        for life in node.together:
            life.laws = laws = NodeLaws(life)
            self._lives.append(life)
            self._laws.append(laws)
        self.world.note(name, "is born")
        self._tell_members()

    def _tell_members(self, missing: str | None = None) -> None:
        if self._dispatch is not None and missing is None:
            return  # its heartbeats do
        for name, node in self._nodes.items():
            senders = self._sources if name in self._targets else []
            if name in self._sources:
                senders = [*senders, *self._encoders]
            known = [self._nodes[n].address for n in senders if n in self._nodes and n != name]
            if known and node.alive:
                node.set_members([address for address in known if address != missing])

    # --- what happens ---

    def _plan(self) -> None:
        rng, weather = self.rng, self.world.weather
        if self.seed % 8 == MOVING:
            self._dispatch = SimulatedDispatch(self.world, self._nodes, self._later)
            self._dispatch.plan()
        else:
            self._router.plan()
        at = 0.0
        while weather.violence and at < weather.heal_at:
            at += rng.expovariate(weather.violence)
            self.world.after(min(at, weather.heal_at), self._strike)

        def heal() -> None:
            self.world.note("weather", "heals")
            self.world.cut_until.clear()
            for node in self._nodes.values():
                self._continue(node)
            self._tell_members()

        self.world.after(weather.heal_at, heal)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something to a node later; there is no rest before."""

        def act() -> None:
            self._to_come -= 1
            do()

        self._to_come += 1
        self.world.after(seconds, act)

    # --- violence ---

    def _strike(self) -> None:
        node = self._nodes[self.rng.choice(list(self._shapes))]
        kind = self.rng.choice(BLOWS)
        self.world.note(node.name, kind)
        if not node.alive or self.world.now >= self.world.weather.heal_at:
            return
        if kind == "stop" and not node.stopped:
            node.stop()
            self.world.after(self.rng.uniform(0.1, 5.0), lambda: self._continue(node))
        elif kind == "kill":
            node.kill()
        elif kind == "kill by a shutdown":
            node.shut_down(self.rng.uniform(0.0, 1.5))
        elif kind == "kill a rank":
            node.kill_rank(self.rng.randrange(node.shape.ranks))
        elif kind == "jump":
            node.jump(self.rng.choice([0.5, 3.0, 10.0, -0.5]))
        elif kind == "cut off":
            other = self.rng.choice(list(self._shapes))
            until = self.world.now + self.rng.uniform(0.2, 4.0)
            self.world.cut_until[frozenset((node.name, other))] = until
        elif kind == "members":
            self._tell_members(missing=node.address)
            self.world.soon(self._tell_members, 1.0)
        if "kill" in kind and (not node.shape.is_source or self.rng.random() < 0.8):

            def rebirth() -> None:
                node.kill()  # whoever still shuts down
                if self._nodes[node.name] is node:
                    self._birth(node.name)

            self._later(self.rng.uniform(0.3, 2.0), rebirth)

    def _continue(self, node: SimulatedNode) -> None:
        if node.alive and node.stopped:
            self.world.note(node.name, "continues")
            node.resume()

    # --- the end ---

    def _check_rest(self) -> ScheduleReport:
        report = ScheduleReport(self.seed, self.world.events)
        if self._dispatch is not None:
            self._dispatch.check_ends()
            report.totals.update(self._dispatch.totals)
            for what in self._dispatch.unrest():
                self.world.fail(what)
        for node, laws in zip(self._lives, self._laws, strict=True):
            for side, machine in node.machines.items():
                for name, count in vars(machine.counters).items():
                    if isinstance(count, int):
                        report.totals[f"{side} {name}"] += count
            report.totals["preemptions"] += node.scheduler.totals.preemptions
            if node.encoder is not None:
                counted = node.items.counters()
                for how in ("cache", "transferred"):
                    name = f'kvbaton_encoder_items_total{{source="{how}"}}'
                    report.totals[f"items {how}"] += int(counted[name])
            for held in laws.sides.values():
                report.totals["stale messages"] += held.stale
            if (target := laws.target) is not None:
                report.totals["fences"] += target.fences
                report.totals["fetched"] += target.fetched
                report.totals["mismatches"] += target.mismatches
                report.totals.update(target.outcomes)
            if node.alive:
                if node.name == node.host:  # it has that of an encoder beside it in its own
                    node.core.turn()
                for machine in node.machines.values():
                    check_machine(machine)
                for what in self._unrest(node, laws):
                    node.fail(what)
                if node.core.imbalance():
                    node.fail("the pool's account differs from its owners'")
                # Quarantines may remain on peers that are dead and can't be fenced.
                report.left += self._num_excused(laws)
        return report

    def _unrest(self, node: SimulatedNode, laws: NodeLaws) -> Iterator[str]:
        """What is left to happen on a node, by its clients, its laws and its containers."""
        unanswered = [name for name, request in node.requests.items() if not request.over]
        if unanswered:
            yield f"requests without an answer: {unanswered}"
        excused = self._num_excused(laws)
        live = [laws_of.live for laws_of in laws.sides.values()]
        if sum(map(len, live)) > excused:
            yield f"attempts that are not over: {live}"
        if any(transport.prepared for transport in node.transports):
            yield "writes that were prepared, and neither posted nor discarded"
        for place, size in leftovers(node):
            most = len(self._shapes) if place in PER_PEER else 0
            if size > most and not excused:
                yield f"{size} things are left in {place}"

    def _num_excused(self, laws: NodeLaws) -> int:
        """Quarantines on peers that are dead and can't be fenced."""
        target = laws.target
        if target is None or self.world.weather.fence is not FenceScope.NONE:
            return 0
        living = {other.id for other in self._lives if other.alive}
        return sum(target.sessions.get(r.session) not in living for r in target.live.values())


def leftovers(node: SimulatedNode) -> Iterator[tuple[str, int]]:
    """Containers in all that a node is made of that are not empty, but for those that may be."""
    ahead: list[Any] = [node.core, node.transfers]
    seen: set[int] = set() if node.encoder is None else {id(node.encoder.core)}
    while ahead:
        owner = ahead.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in vars(owner).items():
            label = f"{type(owner).__name__}.{name}"
            if isinstance(value, dict | set | list | deque):
                if value and name not in SETTINGS and label not in SETTINGS:
                    yield label, len(value)
            elif type(value).__name__ not in BOUNDED and hasattr(value, "__dict__"):
                if type(value).__module__.startswith("kvbaton."):
                    ahead.append(value)


SETTINGS = set(
    "transports layouts counters published outcomes groups prompt_tokens workers Timelines._marks "
    "finished record ranks connectors by_code ended Connectors.failures having _do _on _rules "
    "_reactions _handlers actions stories _at _heap Scheduler._ended Source._over Totals.accepted "
    "EncoderCacheManager._counts".split()
)
"""What is set up once, counts, or is emptied by the next call."""

BOUNDED = set(
    "SimulatedExecutor SimulatedChannel SimulatedNode BlockPool Tombstones CostFit WireCosts "
    "FairShares StepTimes".split()
)
"""What holds a bounded number of things, or has an audit of its own."""

PER_PEER = set(
    "Source.known SourceWorker.linked Target.known Target.lines "
    "TargetWorker.linked TargetConnector._members".split()
)
"""What holds one thing for each peer that lives."""

MOVING = 3
"""Of 8 schedules the one in which the router's real dispatch moves requests between nodes."""

CROWDED = (7, 33)
"""Of 64 schedules those in which all nodes are both, and have too little room; one has items."""

SCOPES = list(FenceScope)

BLOWS = "stop,stop,jump,cut off,members,kill,kill a rank,kill by a shutdown".split(",")


def draw_weather(rng: random.Random) -> Weather:
    """From calm to awful."""
    if rng.random() < 0.15:
        return Weather(fence=rng.choice(SCOPES))
    bad = rng.choice([0.0, 0.3, 1.0])
    return Weather(
        loss=bad * rng.uniform(0, 0.3),
        duplicate=bad * rng.uniform(0, 0.2),
        stall=bad * rng.uniform(0, 0.15),
        nonsense=rng.choice([0.0, 0.0, 0.1]),
        bad_write=rng.choice([0.0, 0.05, 0.3]),
        rot=rng.choice([0.0, 0.0, 0.3]),
        violence=rng.choice([0.0, 0.2, 0.8]),
        misdirection=rng.choice([0.0, 0.3, 0.6]),
        fence=rng.choice(SCOPES),
        offload=rng.random() < 0.5,
    )


@contextmanager
def _virtual_time(world: SimulatedWorld, seed: int) -> Iterator[None]:
    """All that asks the time gets that of the world, and what is expected to go wrong is quiet.

    Names that are random are so by the seed.

    Garbage waits until the end: to look for it takes a quarter of the time.
    """
    real, time.monotonic = time.monotonic, world.monotonic
    urandom, os.urandom = os.urandom, random.Random(seed).randbytes
    collects = gc.isenabled()
    gc.disable()
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        time.monotonic, os.urandom = real, urandom
        if collects:
            gc.enable()
        logging.disable(level)


def simulate(seed: int) -> ScheduleReport:
    """Run one schedule; see the module."""
    return Simulation(seed).run()


def simulate_or_tell(seed: int) -> ScheduleReport | str:
    """Run one schedule; the story of its violation if there is one."""
    try:
        return simulate(seed)
    except ViolationError as error:
        return f"{error}\nviolated by: python -m tests.simulator.run 1 --first {seed}"


def main(arguments: Sequence[str]) -> int:
    """Run as many seeds as the arguments say; returns the exit status: 1 if a law was violated."""
    parser = argparse.ArgumentParser(description="Run schedules of the hand-over's simulator.")
    parser.add_argument("count", nargs="?", type=int, default=100, help="schedules (100)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (0)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="at a time (1)")
    args = parser.parse_args(arguments)
    seeds = range(args.first, args.first + args.count)
    began = told = time.monotonic()
    totals, events, done, violations = Counter[str](), 0, 0, 0
    with ExitStack() as closing:
        found: Iterable[ScheduleReport | str] = map(simulate_or_tell, seeds)
        if args.processes > 1:
            pool = closing.enter_context(get_context("spawn").Pool(args.processes))
            found = pool.imap_unordered(simulate_or_tell, seeds, chunksize=8)
        for report in found:
            done += 1
            if isinstance(report, str):
                violations += 1
                print(report, flush=True)
            else:
                totals.update(report.totals)
                events += report.events
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                print(f"{done} of {args.count} after {told - began:.0f} s", flush=True)
    for name, count in sorted(totals.items()):
        print(f"  {count:9} {name}")
    print(
        f"{done} schedules from seed {args.first} in {time.monotonic() - began:.0f} s, "
        f"{events} events, {violations or 'no'} violation{'s' * (violations > 1)}"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
