"""Runs real nodes of the hand-over against each other in a hostile world, from a seed.

One call of `simulate` is one schedule: a few prefill and decode nodes, each with the real core,
scheduler, connector, transfer worker and machine, some prompts that share prefixes, and until the
weather heals every fault that the protocol claims to stand: loss, duplication and reordering of
control messages; messages that no sane peer would send; writes that fail, hang, or land long after
their sender has given up; source blocks that rot; nodes stopped, continued, killed rank by rank,
restarted and cut off from each other; members that come and go; clocks that jump; routers that send
a prompt twice, to two nodes, to one side only, or as two different ones. Pools are small: prompts
wait for each other and preempt each other.

After every event the laws of `simulated_laws` hold, and so do the machines' own. At the end every
request has its answer, and nothing is left in any dict but what a peer keeps that is dead and can't
be fenced. In a schedule without any fault every hand-over must end well. A `ViolationError` tells
the story.

    python -m kvbaton.testing.simulator 1000        # seeds 0 to 999
    python -m kvbaton.testing.simulator 5000 6000   # seeds 5000 to 5999
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvbaton.connectors.base import FenceScope
from kvbaton.connectors.keys import prompt_key, root_key
from kvbaton.testing.simulated_laws import TargetAccount, TargetLaws
from kvbaton.testing.simulated_node import NodeShape, SimulatedNode, SimulatedPrompt, identity_of
from kvbaton.testing.simulated_world import SimulatedWorld, ViolationError, Weather
from kvbaton.types import Attempt

REST_S = 40.0
"""Virtual seconds after the weather has healed in which everything must come to rest."""

WINDOW = 6
"""Tokens that the second group attends to, if there is one."""

MODELS = (1, 2)
"""The second one is that of a node that does not belong here."""


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
        self.world = SimulatedWorld(rng, draw_weather(rng))
        self._shapes: dict[str, NodeShape] = {}
        self._lives: list[SimulatedNode] = []
        num_groups = rng.choice([1, 1, 2])
        # A window's blocks are of one size everywhere: digests of a unit of several blocks can't be
        # compared where only some of them are wanted.
        self._window_size = rng.choice([2, 3, 4])
        for i in range(rng.choice([1, 1, 2])):
            self._shapes[f"p{i}"] = self._draw_shape(True, num_groups)
        for i in range(rng.choice([1, 1, 2])):
            self._shapes[f"d{i}"] = self._draw_shape(False, num_groups)
        self._sources = [name for name, shape in self._shapes.items() if shape.is_source]
        self._targets = [name for name, shape in self._shapes.items() if not shape.is_source]
        self._bases = [self._draw_tokens(24) for _ in range(2)]

    def _draw_shape(self, is_source: bool, num_groups: int) -> NodeShape:
        rng = self.rng
        tokens = rng.choice([50, 50, 70, 120])
        groups = []
        for window in (0, WINDOW)[:num_groups]:
            size = self._window_size if window else rng.choice([2, 3, 4])
            groups.append((size, 1 + tokens // size, window))
        odd = not is_source and self.world.weather.misdirection and rng.random() < 0.1
        return NodeShape(
            is_source=is_source,
            model=MODELS[bool(odd)],
            ranks=rng.choice([1, 1, 1, 2, 2, 4]),
            groups=tuple(groups),
            step_s=rng.choice([0.01, 0.01, 0.05, 0.7]) if is_source else rng.choice([0.01, 0.1]),
            batch=rng.choice([4, 8, 16]) if is_source else 16,
            depth=rng.choice([1, 2]),
        )

    def run(self) -> ScheduleReport:
        """Run it.

        Raises:
            ViolationError: something happened that may never happen, or something raised.
        """
        with _virtual_time(self.world):
            try:
                for name in self._shapes:
                    self._birth(name)
                self._plan()
                self.world.run(self.world.weather.heal_at + REST_S)
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

    def _birth(self, name: str) -> None:
        node = SimulatedNode(self.world, name, len(self._lives), self._shapes[name])
        self._lives.append(node)
        self.world.note(name, "is born")
        self._tell_members()

    def _tell_members(self, missing: str | None = None) -> None:
        addresses = [self.world.nodes[n].address for n in self._sources if n in self.world.nodes]
        for name in self._targets:
            node = self.world.nodes.get(name)
            if node is not None and node.alive:
                node.set_members([address for address in addresses if address != missing])

    # --- what the router does ---

    def _plan(self) -> None:
        weather = self.world.weather
        bursts = [self.rng.uniform(0.0, weather.heal_at * 0.8) for _ in range(3)]
        for number in range(self.rng.randint(3, 9)):
            at = self.rng.choice(bursts)
            for attempt in range(1 + (self.rng.random() < 0.2 and not weather.calm)):
                job = self._draw_job(Attempt(bytes([number + 1]) * 16, attempt))
                self.world.after(at, lambda job=job: self._dispatch(job))  # type: ignore[misc]
        at = 0.0
        while weather.violence and at < weather.heal_at:
            at += self.rng.expovariate(weather.violence)
            self.world.after(min(at, weather.heal_at), self._strike)
        self.world.after(weather.heal_at, self._heal)

    def _draw_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(50) for _ in range(count))

    def _draw_job(self, name: Attempt) -> SimulatedPrompt:
        rng = self.rng
        shared = rng.choice(self._bases)[: rng.choice([0, 6, 12, 24])]
        tokens = shared + self._draw_tokens(rng.randint(0 if shared else 1, 8))
        deadline = 120.0 if self.world.weather.calm else rng.choice([3.0, 8.0])
        return SimulatedPrompt(name, tokens, rng.randint(1, 9), rng.choice([1, 1, 1, 2]), deadline)

    def _dispatch(self, job: SimulatedPrompt) -> None:
        """Send a prompt to both sides, in any order; a foolish router, otherwise."""
        rng, world = self.rng, self.world
        self._know(job)
        source, target = rng.choice(self._sources), rng.choice(self._targets)
        peer = world.nodes[source].address
        to_source, to_target = job, job
        folly = rng.choice(FOLLIES) if world.chance(world.weather.misdirection) else ""
        if folly == "other prompt":
            to_source = SimulatedPrompt(
                job.attempt, self._draw_tokens(len(job.tokens)), 2, job.choices
            )
            self._know(to_source)
        if folly not in ("no source", "late source", "target leaves at once"):
            self._later(lambda: world.nodes[source].add(to_source))
        if folly != "no target":
            self._later(lambda: world.nodes[target].add(to_target, peer))
        if folly == "two targets":
            other = next((n for n in self._targets if n != target), target)
            self._later(lambda: world.nodes[other].add(to_target, peer))
        if folly == "source again":
            self._later(lambda: world.nodes[source].add(to_source))
        if folly == "target leaves at once":
            world.soon(lambda: world.nodes[target].abort(job.attempt), 0.02)
            world.soon(lambda: world.nodes[source].add(to_source), 2.0)
        if folly == "late source":
            world.soon(lambda: world.nodes[source].add(to_source), 3.0)
        if folly == "target leaves":
            world.soon(lambda: world.nodes[target].abort(job.attempt), 0.5)
        if folly == "source leaves":
            world.soon(lambda: world.nodes[source].abort(job.attempt), 0.3)

    def _know(self, job: SimulatedPrompt) -> None:
        for model in MODELS:
            key = prompt_key(root_key(identity_of(model), ""), job.tokens)
            self.world.prompts[key] = job.tokens

    def _later(self, do: object) -> None:
        assert callable(do)
        self.world.soon(do, self.rng.choice([0.01, 0.01, 0.3, 1.0]))

    # --- violence ---

    def _strike(self) -> None:
        node = self.world.nodes[self.rng.choice(list(self._shapes))]
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
            self.world.after(self.rng.uniform(0.3, 2.0), lambda: self._rebirth(node))

    def _rebirth(self, node: SimulatedNode) -> None:
        node.kill()  # whoever still shuts down
        if self.world.nodes[node.name] is node:
            self._birth(node.name)

    def _continue(self, node: SimulatedNode) -> None:
        if node.alive and node.stopped:
            self.world.note(node.name, "continues")
            node.resume()

    def _heal(self) -> None:
        self.world.note("weather", "heals")
        self.world.cut_until.clear()
        for node in self.world.nodes.values():
            self._continue(node)
        self._tell_members()

    # --- the end ---

    def _check_rest(self) -> ScheduleReport:
        report = ScheduleReport(self.seed, self.world.events)
        for node in self._lives:
            self._add_up(node, report)
            if node.alive:
                self._check_node(node, report)
        return report

    def _add_up(self, node: SimulatedNode, report: ScheduleReport) -> None:
        totals, laws = report.totals, node.laws
        side = "source" if node.shape.is_source else "target"
        for name, count in vars(node.machine.counters).items():
            if isinstance(count, int):
                totals[f"{side} {name}"] += count
        totals["preemptions"] += node.scheduler.totals.preemptions
        totals["stale messages"] += laws.stale
        if isinstance(laws, TargetLaws):
            totals["fences"] += laws.fences
            totals["mismatches"] += laws.mismatches
            totals.update(laws.outcomes)

    def _check_node(self, node: SimulatedNode, report: ScheduleReport) -> None:
        fail = node.laws.fail
        node.core.turn()
        unanswered = [name for name, request in node.requests.items() if not request.over]
        if unanswered:
            fail(f"requests without an answer: {unanswered}")
        if node.core.imbalance():
            fail("the pool's account differs from its owners'")
        excused = 0
        for attempt, record in node.laws.live.items():
            if isinstance(record, TargetAccount) and self._excused(node, record.session):
                excused += 1
            else:
                fail(f"{attempt} is not over: {record}")
        report.left += excused
        for place, size in leftovers(node):
            most = len(self._shapes) if place in PER_PEER else 0
            most = len(self._lives) if place in PER_LIFE else most
            if size > most and not excused:
                fail(f"{size} things are left in {place}")

    def _excused(self, node: SimulatedNode, session: bytes) -> bool:
        """Whether a quarantine waits for a peer that is dead and can't be fenced."""
        assert isinstance(node.laws, TargetLaws)
        if self.world.weather.fence is not FenceScope.NONE:
            return False
        peer = node.laws.sessions.get(session)
        return not any(n.alive and n.id == peer for n in self._lives)


def leftovers(node: SimulatedNode) -> Iterator[tuple[str, int]]:
    """Containers in all that a node is made of that are not empty, but for those that may be."""
    seen: set[int] = set()
    ahead: list[Any] = [node.core, node.transfers]
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


SETTINGS = {
    *(
        "transports",
        "layouts",
        "counters",
        "published",
        "outcomes",
        "groups",
        "pools",
        "prompt_tokens",
    ),
    *("finished", "record", "ranks", "on_commit", "connectors", "by_code", "ended"),
    *("_do", "_on", "_rules", "_handlers", "actions", "Scheduler._ended", "SourceSessions._over"),
}
"""What is set up once, counts, or is emptied by the next call."""

BOUNDED = {
    *(
        "SimulatedExecutor",
        "SimulatedChannel",
        "SimulatedNode",
        "Stories",
        "Timelines",
        "BlockPool",
        "Tombstones",
        "Alarms",
    ),
}
"""What holds a bounded number of things, or has an audit of its own."""

PER_PEER = {
    *("SourceSessions.known", "SourceWorker._peers", "TargetSessions.known"),
    *("TargetSessions.lines", "TargetSessions._peers", "TargetWorker._peers"),
    *("TargetWorker._rank_layouts", "TargetConnector._members"),
}
"""What holds one thing for each peer that lives."""

PER_LIFE = {"SourceSessions._heard"}
"""What holds one thing for each life that a peer ever had; bounded."""

BLOWS = [
    *("stop", "stop", "jump", "cut off", "members"),
    *("kill", "kill a rank", "kill by a shutdown"),
]

FOLLIES = [
    "other prompt",
    "other prompt",
    "no source",
    "no target",
    "two targets",
    "two targets",
    "source again",
    "late source",
    "target leaves at once",
    "target leaves",
    "target leaves",
    "source leaves",
]


def draw_weather(rng: random.Random) -> Weather:
    """From calm to awful."""
    if rng.random() < 0.15:
        return Weather(fence=rng.choice(list(FenceScope)))
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
        fence=rng.choice(list(FenceScope)),
        offload=rng.random() < 0.5,
    )


@contextmanager
def _virtual_time(world: SimulatedWorld) -> Iterator[None]:
    """All that asks the time gets that of the world, and what is expected to go wrong is quiet.

    Garbage waits until the end: to look for it takes a quarter of the time.
    """
    real, time.monotonic = time.monotonic, world.monotonic
    collects = gc.isenabled()
    gc.disable()
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        time.monotonic = real
        if collects:
            gc.enable()
        logging.disable(level)


def simulate(seed: int) -> ScheduleReport:
    """Run one schedule; see the module."""
    return Simulation(seed).run()


def main(arguments: Sequence[str]) -> int:
    """Run as many seeds as the arguments say; returns the exit status."""
    numbers = [int(argument) for argument in arguments] or [100]
    seeds = range(*numbers)
    totals: Counter[str] = Counter()
    events = 0
    for seed in seeds:
        try:
            report = simulate(seed)
        except ViolationError as error:
            print(f"{error}\nseed {seed}")
            return 1
        totals.update(report.totals)
        events += report.events
    print(f"{len(seeds)} schedules, {events} events, no violation")
    for name, count in sorted(totals.items()):
        print(f"  {count:9} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
