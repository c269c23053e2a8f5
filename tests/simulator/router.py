"""The simulator's router: prompts, whom it sends them to, and the foolish things it does.

A prompt goes to a prefill and a decode node at once, and each of its items, if there are encoder
nodes, to one of those.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from kvbaton.connectors.keys import block_keys, prompt_key, root_key
from kvbaton.engine.request import extras_of
from kvbaton.messages.engine import Item, TransferSpec
from kvbaton.types import Attempt
from tests.simulator.executor import BROKEN, with_marks
from tests.simulator.node import (
    CALM_TIMERS,
    SimulatedNode,
    SimulatedPrompt,
    identity_of,
)
from tests.simulator.world import SimulatedWorld

LATEST_S = CALM_TIMERS.lease - 2.0
"""In calm weather the router has sent a prompt to both sides by then: a `Reserve` waits for its
request no longer than a lease."""

CALM_DEADLINE_S = 120.0
"""How long clients wait in calm weather."""

MODELS = (1, 2)
"""The second one is that of a node that does not belong here."""
ENCODER_OF = {1: 11, 2: 12}
"""The vision tower of each."""

FOLLIES = (
    "other prompt,other prompt,no source,no target,two targets,two targets,source again,"
    "late source,target leaves at once,target leaves,target leaves,source leaves"
).split(",")
ITEM_FOLLIES = "no encoder,late,again,leaves,other item".split(",")


class SimulatedRouter:
    """Sends prompts.

    Args:
        world: its time and its luck.
        nodes: that live now, by name.
        later: does something to a node later.
        sources: names of prefill nodes.
        targets: of decode nodes.
        encoders: of encoder nodes.
        crowded: there are more and longer prompts and answers, all at about the same time.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        nodes: dict[str, SimulatedNode],
        later: Callable[[float, Callable[[], None]], None],
        sources: Sequence[str],
        targets: Sequence[str],
        encoders: Sequence[str],
        *,
        crowded: bool,
    ) -> None:
        self.world, self.nodes, self.later = world, nodes, later
        self.sources, self.targets, self.encoders = sources, targets, encoders
        self._num_items, self._crowded = 0, crowded
        self._bases = [self._draw_tokens(24) for _ in range(2)]

    def plan(self) -> None:
        """Draw all prompts, and when they come."""
        rng, weather = self.world.rng, self.world.weather
        crowded = self._crowded
        bursts = [rng.uniform(0.0, weather.heal_at * 0.8) for _ in range(1 if crowded else 3)]
        for number in range(rng.randint(8, 14) if crowded else rng.randint(3, 9)):
            at = rng.choice(bursts)
            for attempt in range(1 + (rng.random() < 0.2 and not weather.calm)):
                shared = rng.choice(self._bases)[: rng.choice([0, 6, 12, 24])]
                tokens = shared + self._draw_tokens(
                    rng.randint(0 if shared else 1, 8 + 8 * crowded)
                )
                items: tuple[Item, ...] = ()
                if self.encoders and rng.random() < 0.7:
                    tokens, items = self._draw_items()
                deadline = CALM_DEADLINE_S if weather.calm else rng.choice([3.0, 8.0])
                name = Attempt(bytes([number + 1]) * 16, attempt)
                sizes = rng.randint(1, 20 if crowded else 9), rng.choice([1, 1, 1, 2])
                fetched = min(rng.choice([0, 0, 0, 8, 12, 99]), len(tokens))
                job = SimulatedPrompt(name, tokens, *sizes, deadline, items, fetched)
                self.world.after(at, lambda job=job: self._dispatch(job))  # type: ignore[misc]

    def _draw_tokens(self, count: int) -> tuple[int, ...]:
        """A prompt, or a part of one."""
        return tuple(self.world.rng.randrange(50) for _ in range(count))

    def _draw_items(self) -> tuple[tuple[int, ...], tuple[Item, ...]]:
        """A prompt with images in it, some of which others have too."""
        rng = self.world.rng
        tokens = self._draw_tokens(rng.choice([0, 1, 5]))
        items = []
        for length in rng.choice([(3,), (9,), (33,), (34,), (5, 3), (3, 3)]):
            first = rng.choice([rng.randrange(6), 100 + self._num_items])
            if rng.random() < 0.03 and not self.world.weather.calm:
                first = BROKEN
            digest, grid = bytes([first, *bytes(31)]), (1, 1, length)
            items.append(
                Item(start=len(tokens), length=length, digest=digest, grid=grid, data=b"an image")
            )
            tokens += (0,) * length + self._draw_tokens(1)
        return with_marks(tokens, items), tuple(items)

    def _dispatch(self, job: SimulatedPrompt) -> None:
        """Send a prompt to both sides, in any order; a foolish router, otherwise."""
        rng, world, nodes = self.world.rng, self.world, self.nodes
        pairs = [(s, t) for s in self.sources for t in self.targets if s != t]
        if job.fetched:
            self._dispatch_fetch(job, pairs)
            return
        source, target = rng.choice(pairs)
        peer, to_source = nodes[source].address, job
        folly = rng.choice(FOLLIES) if world.chance(world.weather.misdirection) else ""
        if folly == "other prompt":
            other_tokens = self._draw_tokens(len(job.tokens))
            to_source = SimulatedPrompt(job.attempt, other_tokens, 2, job.choices)
        for prompt in (job, to_source):
            every = {group[0] for node in nodes.values() for group in node.shape.groups}
            self._tell_world(prompt, MODELS, every if self._crowded else ())
        to_source = self._with_encoded(to_source)

        def to(name: str, role: str, mean: float | None = None) -> None:
            prompt, where = (to_source, None) if role == "source" else (job, peer)
            if role == "source" and self._crowded:
                where = nodes[target].address  # where its prefix may be
            at = self._draw_delay(mean or rng.choice([0.01, 0.01, 0.3, 1.0]))
            self.later(at, lambda: nodes[name].add(prompt, role, where))

        def leave(name: str, mean: float) -> None:
            self.later(rng.expovariate(1 / mean), lambda: nodes[name].abort(job.attempt))

        if folly not in ("no source", "late source", "target leaves at once"):
            to(source, "source")
        if folly != "no target":
            to(target, "target")
        match folly:
            case "two targets":
                others = (name for name in self.targets if name not in (source, target))
                to(next(others, target), "target")
            case "source again":
                to(source, "source")
            case "late source":
                to(source, "source", 3.0)
            case "target leaves at once":
                leave(target, 0.02)
                to(source, "source", 2.0)
            case "target leaves":
                leave(target, 0.5)
            case "source leaves":
                leave(source, 0.3)

    def _dispatch_fetch(self, job: SimulatedPrompt, pairs: Sequence[tuple[str, str]]) -> None:
        """Send a prompt to a node which is told of a peer that has its prefix, or may have it."""
        rng, nodes = self.world.rng, self.nodes
        sizes = {name: [group[0] for group in node.shape.groups] for name, node in nodes.items()}
        # Keys mean blocks of one size.
        source, target = rng.choice([(s, t) for s, t in pairs if sizes[s] == sizes[t]] or pairs)
        self._tell_world(job, MODELS, set(sizes[target]))
        peer = nodes[source].address
        if rng.random() < 0.7:
            nodes[source].add(self._with_encoded(job), "alone")
        self.later(
            rng.expovariate(1 / rng.choice([0.1, 1.0])),
            lambda: nodes[target].add(job, "fetch", peer),
        )
        if rng.random() < 0.2 and not self.world.weather.calm:
            self.later(rng.expovariate(1 / 0.5), lambda: nodes[target].abort(job.attempt))

    def _with_encoded(self, job: SimulatedPrompt) -> SimulatedPrompt:
        """A prompt whose items encoder nodes are asked for."""
        items = tuple(self._encode(item, job.deadline_s) for item in job.items)
        return dataclasses.replace(job, items=items)

    def _encode(self, item: Item, deadline_s: float) -> Item:
        """Ask an encoder node for an item of a prompt; returns it as the prefill node gets it."""
        rng, nodes = self.world.rng, self.nodes
        name = rng.choice(self.encoders)
        self._num_items += 1
        attempt = Attempt(b"item" + self._num_items.to_bytes(12, "big"), 0)
        folly = ""
        if self.world.chance(self.world.weather.misdirection):
            folly = rng.choice(ITEM_FOLLIES)
        alone = other = replace(item, start=0)
        if folly == "other item":
            other = replace(alone, digest=bytes([99, *bytes(31)]))
        for one in (alone, other):
            tokens = with_marks((0,) * item.padded_rows, (one,))
            job = SimulatedPrompt(attempt, tokens, 1, 1, deadline_s, (one,))
            self._tell_world(job, ENCODER_OF.values())
        delays = {"no encoder": (), "late": (3.0,), "again": (0.01, 1.0)}
        for mean in delays.get(folly, (rng.choice([0.01, 0.3]),)):
            self.later(self._draw_delay(mean), lambda: nodes[name].add(job, "source"))
        if folly == "leaves":
            self.later(rng.expovariate(5.0), lambda: nodes[name].abort(attempt))
        transfer = TransferSpec(
            role="target",
            transfer_id=attempt.transfer_id,
            attempt=attempt.number,
            peer=nodes[name].address,
        )
        blind = not self.world.weather.calm and rng.random() < 0.05
        return replace(item, transfer=transfer, data=b"" if blind else item.data)

    def _draw_delay(self, mean: float) -> float:
        most = LATEST_S if self.world.weather.calm else math.inf
        return min(self.world.rng.expovariate(1 / mean), most)

    def _tell_world(
        self, prompt: SimulatedPrompt, models: Iterable[int], sizes: Iterable[int] = ()
    ) -> None:
        """Let all know what tokens a key stands for, that of the prompt or of its blocks."""
        extras = extras_of(prompt.items)
        for model in models:
            root = root_key(identity_of(model), "")
            key = prompt_key(root, prompt.token_ids, extras=extras)
            self.world.prompts[key] = prompt.tokens
            for size in sizes:
                keys = block_keys(root, prompt.token_ids, size, extras=extras)
                for i, key in enumerate(keys, 1):
                    self.world.prompts[key] = prompt.tokens[: i * size]
