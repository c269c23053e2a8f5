"""Runs the two machines of the hand-over against each other in a hostile world, from a seed.

One call of `simulate` is one schedule: a few prefill and decode nodes, a dozen prompts, and until
the weather heals every fault that the protocol claims to stand: loss, duplication and reordering of
control messages; writes that fail, hang, or land long after their sender has given up; source
blocks that rot; nodes stopped, continued, killed and restarted; clocks that jump. After every event
it holds that

- no byte lands in a block that its attempt does not own, and none twice;
- nothing is read that is not what the prompt's own computation gives;
- no block is free while a write may land in it, or reads it;
- each attempt has a live timer and the counters balance (the machines' own `validate`).

In one schedule of three some prompts have items, which an encoder node hands to the prefill node by
the same protocol; what is held then is that no token of an item is computed before the item is
there, whatever becomes of the encoder.

At the end every reservation, lease and quarantine must be gone, but those of a peer that is dead
and can't be fenced. A `ViolationError` tells the story.

    python -m kvbaton.testing.simulator 1000        # seeds 0 to 999
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbaton.connectors.base import FenceScope
from kvbaton.testing.simulated_decode import Decode
from kvbaton.testing.simulated_items import EncoderCacheManager
from kvbaton.testing.simulated_node import Job, Node
from kvbaton.testing.simulated_prefill import Prefill
from kvbaton.testing.simulated_world import Weather, World
from kvbaton.types import Attempt

REST_S = 45.0
"""Virtual seconds after the weather has healed in which everything must come to rest."""

ITEM_SIZES = {"ranks": 1, "block_size": 2, "blocks": 7}
"""Of the pool of encoder outputs: room for one prompt's items and a half."""


@dataclass
class Report:
    """What one schedule did.

    Attributes:
        events: handled by machines.
        delivered: hand-overs that ended well.
        left: quarantines that remain, on peers that are dead and can't be fenced.
        items: outputs of items by how their hand-over ended.
    """

    seed: int
    events: int = 0
    delivered: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    left: int = 0
    items: Counter[str] = field(default_factory=Counter)


class Simulation:
    """One schedule.

    Args:
        seed: of everything.
        prefill: type of the prefill nodes.
        decode: type of the decode nodes.
    """

    def __init__(
        self, seed: int, prefill: type[Prefill] = Prefill, decode: type[Decode] = Decode
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.world = World(rng, draw_weather(rng))
        self._types: dict[str, tuple[type[Node], dict[str, int]]] = {}
        self._generation = 0
        self._all: list[Node] = []
        self._has_items = seed % 3 == 2
        for i in range(rng.choice([1, 1, 2])):
            self._add(f"p{i}", prefill, rng.choice([2, 4]))
        for i in range(rng.choice([1, 1, 2])):
            self._add(f"d{i}", decode, rng.choice([2, 3, 4]))
        for i in range(rng.choice([1, 2]) if self._has_items else 0):
            self._add(f"e{i}", prefill, 2)

    def _add(self, name: str, kind: type[Node], block_size: int) -> None:
        blocks = 1 + self.rng.randint(20, 40) // block_size
        sizes = {"ranks": self.rng.choice([1, 1, 2]), "block_size": block_size, "blocks": blocks}
        self._types[name] = (kind, sizes)
        self._birth(name)

    def _birth(self, name: str) -> None:
        kind, sizes = self._types[name]
        self._generation += 1
        node = kind(self.world, name, self._generation, **sizes)
        self._all.append(node)
        self.world.note(f"{name} is born")
        if self._has_items and name.startswith("p"):
            assert isinstance(node, Prefill)
            node.items = EncoderCacheManager(self.world, f"i{name}", self._generation, **ITEM_SIZES)
            self._all.append(node.items)

    def run(self) -> Report:
        """Run it.

        Raises:
            ViolationError: the protocol let something happen that may never happen.
            AssertionError: a machine found itself in disorder.
        """
        self._plan_requests()
        self._plan_violence()
        heal_at = self.world.weather.heal_at
        self.world.after(heal_at, self._heal)
        self.world.run(heal_at + REST_S)
        return self._check_rest()

    # --- what the router does ---

    def _plan_requests(self) -> None:
        for number in range(self.rng.randint(4, 12)):
            transfer = bytes([number + 1]) * 16
            at = self.rng.uniform(0.0, self.world.weather.heal_at * 0.8)
            for attempt in range(self.rng.choice([1, 1, 1, 2])):
                name, num_tokens = Attempt(transfer, attempt), self.rng.randint(1, 14)
                job = Job(name, num_tokens, self._draw_items(name, num_tokens))
                self.world.after(at, lambda job=job: self._dispatch(job))  # type: ignore[misc]

    def _draw_items(self, name: Attempt, num_tokens: int) -> tuple[tuple[int, Job, str], ...]:
        """Where the items of a prompt stand, their hand-overs, and from whom."""
        if not self._has_items:
            return ()
        encoders = [n for n in self._types if n.startswith("e")]
        places = sorted(self.rng.sample(range(num_tokens), min(num_tokens, self.rng.randint(0, 3))))
        ids = [bytes([100 + 3 * name.transfer_id[0] + i]) * 16 for i in range(len(places))]
        jobs = [Job(Attempt(transfer_id, name.number), 4) for transfer_id in ids]
        return tuple(
            (place, job, self.rng.choice(encoders)) for place, job in zip(places, jobs, strict=True)
        )

    def _dispatch(self, job: Job) -> None:
        """Send a prompt to both sides, in any order, sometimes to one of them only."""
        source = self.rng.choice([n for n in self._types if n.startswith("p")])
        target = self.rng.choice([n for n in self._types if n.startswith("d")])
        for _, item, encoder in job.items:
            if self.rng.random() > 0.04:
                self._later(lambda i=item, e=encoder: self._prefill(e).request(i))
        skip = self.rng.random()
        if skip > 0.04:
            self._later(lambda: self._prefill(source).request(job))
        if skip < 0.96:
            self._later(lambda: self._decode(target).request(job, source))
        if self.rng.random() < 0.15:
            self.world.soon(lambda: self._decode(target).cancel(job), 0.5)
        if self.rng.random() < 0.07:
            self.world.soon(lambda: self._prefill(source).abort(job), 0.3)

    def _later(self, do: object) -> None:
        assert callable(do)
        self.world.soon(do, self.rng.choice([0.01, 0.01, 0.5, 2.0]))

    def _prefill(self, name: str) -> Prefill:
        node = self.world.nodes[name]
        assert isinstance(node, Prefill)
        return node

    def _decode(self, name: str) -> Decode:
        node = self.world.nodes[name]
        assert isinstance(node, Decode)
        return node

    # --- violence ---

    def _plan_violence(self) -> None:
        rate = self.world.weather.violence
        at = 0.0
        while rate and (at := at + self.rng.expovariate(rate)) < self.world.weather.heal_at:
            self.world.after(at, self._strike)

    def _strike(self) -> None:
        name = self.rng.choice(list(self._types))
        node = self.world.nodes[name]
        kind = self.rng.choice(["stop", "stop", "kill", "jump"])
        self.world.note(f"{kind} {name}")
        if not node.alive:
            return
        if kind == "stop" and not node.stopped:
            for part in _process(node):
                part.stop()
            self.world.after(self.rng.uniform(0.1, 6.0), lambda: self._continue(node))
        elif kind == "kill":
            self._kill(node)
        elif kind == "jump":
            seconds = self.rng.choice([0.5, 3.0, 10.0, -0.5])
            for part in _process(node):
                part.jump(seconds)

    def _continue(self, node: Node) -> None:
        if node.alive and node.stopped:
            self.world.note(f"continue {node.name}")
            for part in _process(node):
                part.resume()

    def _kill(self, node: Node) -> None:
        for write in self.world.writes:
            if write.source is node:
                # A process that is gone writes nothing more; its sockets may.
                if self.world.weather.fence is FenceScope.PEER:
                    write.detach()
                else:
                    write.void = True
        for part in _process(node):
            part.kill()
        if isinstance(node, Decode) or self.rng.random() < 0.8:
            self.world.after(self.rng.uniform(0.05, 3.0), lambda: self._birth(node.name))

    def _heal(self) -> None:
        self.world.note("the weather heals")
        for name in self._types:
            self._continue(self.world.nodes[name])

    # --- the end ---

    def _check_rest(self) -> Report:
        report = Report(self.seed, sum(node.handled for node in self._all))
        for node in self._all:
            for name, count in vars(node.machine.counters).items():
                if isinstance(count, int):
                    report.outcomes[name] = report.outcomes.get(name, 0) + count
            if isinstance(node, EncoderCacheManager):
                counts = vars(node.machine.counters)
                report.items.update({k: n for k, n in counts.items() if isinstance(n, int)})
            if isinstance(node, Decode):
                report.delivered += node.delivered
        for node in self.world.nodes.values():
            if node.alive:
                self._check_node(node, report)
        return report

    def _check_node(self, node: Node, report: Report) -> None:
        left = [r for r in node.machine._live.values() if not self._excused(r)]
        if left:
            story = [f"{r.name} {r.state}" for r in left] + node.machine.story(left[0].name)
            self.world.fail("\n".join([f"{node.name} does not come to rest:", *story]))
        report.left += len(node.machine._live)
        if len(node.free) != node.num_blocks - 1 and not node.machine._live:
            self.world.fail(f"{node.name} has lost blocks: {sorted(node.free)}")
        if len(set(node.free)) != len(node.free):
            self.world.fail(f"{node.name} has freed a block twice: {sorted(node.free)}")

    def _excused(self, record: object) -> bool:
        """Whether a quarantine waits for a peer that is dead and can't be fenced."""
        session = getattr(record, "session", None)
        if self.world.weather.fence is not FenceScope.NONE or session is None:
            return False
        return not any(n.alive and n.id == session.node for n in self.world.nodes.values())


def _process(node: Node) -> list[Node]:
    """All that lives and dies with a node."""
    return [node, *([node.items] if isinstance(node, Prefill) and node.items else [])]


def draw_weather(rng: random.Random) -> Weather:
    """From calm to awful."""
    bad = rng.choice([0.0, 0.3, 1.0])
    return Weather(
        loss=bad * rng.uniform(0, 0.3),
        duplicate=bad * rng.uniform(0, 0.2),
        stall=bad * rng.uniform(0, 0.15),
        bad_write=rng.choice([0.0, 0.05, 0.3]),
        corrupt=rng.choice([0.0, 0.0, 0.1]),
        violence=rng.choice([0.0, 0.1, 0.4]),
        fence=rng.choice([FenceScope.PEER, FenceScope.PROCESS, FenceScope.NONE]),
    )


def simulate(seed: int, prefill: type[Prefill] = Prefill, decode: type[Decode] = Decode) -> Report:
    """Run one schedule; see the module."""
    return Simulation(seed, prefill, decode).run()


def main(arguments: Sequence[str]) -> int:
    """Run as many seeds as the first argument says; returns the exit status."""
    count = int(arguments[0]) if arguments else 100
    delivered = events = 0
    for seed in range(count):
        try:
            report = simulate(seed)
        except AssertionError as error:
            print(f"seed {seed}: {error}")
            return 1
        delivered += report.delivered
        events += report.events
    print(f"{count} schedules, {events} events, {delivered} hand-overs delivered, no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
