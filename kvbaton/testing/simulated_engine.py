"""The ranks of a simulated node: memory in numpy, and steps whose result every node can foretell.

The KV of a token is 64 bits per layer, K or V, and head, that follow from all tokens up to it; so
is the token sampled next. What a step reads is held against that, so wrong bytes are found by
whoever reads them first. Digest sums are kept by the step that wrote a block, as on a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import Memory
from kvbaton.connectors.layout import GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.transfer.source_worker import PendingSums
from kvbaton.engine.step import Sampled, StepPlan, StepResult
from kvbaton.messages.engine import AddRequest
from kvbaton.testing.simulated_world import SimulatedWorld

HEADS = 4
VOCABULARY = 97
Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_ONE = np.uint64(1)


def _mix(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_PLACES = _mix(np.arange(1, 2 * HEADS + 1, dtype=np.uint64)).reshape(HEADS, 1, 2)


@lru_cache(maxsize=65_536)
def _next(prefix: int, token: int) -> int:
    """Fingerprint of a prefix that is one token longer."""
    x = (prefix ^ (token + 1) * 0x9E3779B97F4A7C15) & _MASK
    return (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9 & _MASK


@lru_cache(maxsize=4096)
def _prefixes(tokens: tuple[int, ...], model: int) -> tuple[int, ...]:
    prefixes, prefix = [], model
    for token in tokens:
        prefixes.append(prefix := _next(prefix, token))
    return tuple(prefixes)


@lru_cache(maxsize=4096)
def kv_of(tokens: tuple[int, ...], model: int) -> Words:
    """What a model makes of each token: [tokens, heads, 1 layer, kv]."""
    prefixes = np.array(_prefixes(tokens, model), np.uint64)
    return _mix(prefixes[:, None, None, None] + _PLACES)


def next_token(tokens: tuple[int, ...], choice: int, model: int) -> int:
    """What a model samples after some tokens."""
    return (_prefixes(tokens, model)[-1] >> 20) % (VOCABULARY - choice)


@cache
def _weights() -> Words:
    """Per position and K or V, odd: [positions, kv]."""
    return _mix(np.arange(1, 257, dtype=np.uint64)).reshape(128, 2) | _ONE


@dataclass
class _Runner:
    """A sequence, as the ranks know it."""

    tokens: list[int]
    choice: int
    tables: list[list[int]]
    sampled: tuple[int, ...] = ()


class SimulatedStep:
    """A `PendingStep` that is over when the world says so."""

    def __init__(self) -> None:
        self.outcome: StepResult | None = None

    def ready(self) -> bool:
        """As `PendingStep.ready`."""
        return self.outcome is not None

    def result(self) -> StepResult:
        """As `PendingStep.result`."""
        assert self.outcome is not None, "the core waits for a step that is not over"
        return self.outcome


@dataclass
class SimulatedSums:
    """Sums on their way; there from a certain time on."""

    world: SimulatedWorld
    at: float
    ask: Callable[[], list[Words]]
    _found: list[Words] | None = field(default=None)

    def poll(self) -> list[Words] | None:
        """As `PendingSums.poll`."""
        if self._found is None and self.world.now >= self.at:
            self._found = self.ask()
        return self._found


class SimulatedExecutor:
    """The ranks of one node, as `engine.executor.Executor` has them.

    Args:
        world: its time and its luck.
        model: its number; another one computes something else.
        rots: bits may flip in what its steps have written.
        ranks: a divisor of `HEADS`.
        groups: per group, block size, blocks, and window (0 for full attention).
        step_s: how long a step takes about.
        wake_core: called when a step is over.
        wake_transfers: called when sums are there.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        *,
        model: int,
        rots: bool,
        ranks: int,
        groups: Sequence[tuple[int, int, int]],
        step_s: float,
        wake_core: Callable[[], None],
        wake_transfers: Callable[[], None],
    ) -> None:
        self.world, self.model, self.step_s = world, model, step_s
        self.rots = rots
        self.wake_core, self.wake_transfers = wake_core, wake_transfers
        heads = HEADS // ranks
        self.layouts = [
            [_layout(g, shape, heads, rank) for g, shape in enumerate(groups)]
            for rank in range(ranks)
        ]
        shapes = [(blocks, heads, 1, 2, size) for size, blocks, _ in groups]
        self.words = [[np.zeros(shape, np.uint64) for shape in shapes] for _ in range(ranks)]
        self.kept = [[np.zeros(shape, np.uint64) for shape in shapes] for _ in range(ranks)]
        bytes_of = [[words.reshape(-1).view(np.uint8) for words in rank] for rank in self.words]
        self.memories = [
            [Memory(data.ctypes.data, data.nbytes, owner=data) for data in rank]
            for rank in bytes_of
        ]
        self.rotten: set[tuple[int, int]] = set()
        self.steps_in_flight = 0
        self._busy_until = 0.0
        self._runners: dict[int, _Runner] = {}

    @property
    def wake_fd(self) -> int:
        """Never readable: the world wakes the core."""
        return _wake_fd()

    # --- steps ---

    def launch(self, plan: StepPlan) -> SimulatedStep:
        """As `Executor.launch`: all of a step happens when it is over, in order."""
        step = SimulatedStep()
        self.steps_in_flight += 1
        seconds = self.step_s * self.world.rng.uniform(0.5, 1.5)
        self._busy_until = max(self._busy_until, self.world.now) + seconds

        def end() -> None:
            step.outcome = self._run(plan)
            self.steps_in_flight -= 1
            self.wake_core()

        self.world.after(self._busy_until - self.world.now, end)
        return step

    def _run(self, plan: StepPlan) -> StepResult:
        for fork in plan.forks:
            parent = self._runners[fork.parent]
            known = [*parent.tokens[:-1], parent.sampled[fork.choice]]
            self._runners[fork.child] = _Runner(known, fork.choice, [[] for _ in self.layouts[0]])
        for handle in plan.ended:
            self._runners.pop(handle, None)
        for copy in plan.copies:
            for pools in (*self.words, *self.kept):
                pools[copy.group][copy.target] = pools[copy.group][copy.source]
            if (copy.group, copy.source) in self.rotten:
                self.rotten.add((copy.group, copy.target))
        for new in plan.new:
            tables: list[list[int]] = [[] for _ in self.layouts[0]]
            self._runners[new.handle] = _Runner(list(new.token_ids), new.choice, tables)
        sampled = []
        for step in plan.steps:
            runner = self._runners[step.handle]
            for table, more in zip(runner.tables, step.new_blocks, strict=True):
                table += more
            tokens = tuple(runner.tokens[: step.start + step.count])
            assert len(tokens) == step.start + step.count, "a step is ahead of its tokens"
            self._compute(runner, tokens, step.start)
            if step.num_samples:
                choices = range(step.num_samples) if step.num_samples > 1 else [runner.choice]
                found = tuple(next_token(tokens, choice, self.model) for choice in choices)
                runner.sampled = found
                runner.tokens.append(found[0])
                sampled.append(Sampled(step.handle, found))
            if self.rots and self.world.chance(self.world.weather.rot):
                self._rot(runner.tables, self.world.rng.randrange(step.start, len(tokens)))
        return StepResult(plan.number, tuple(sampled))

    def _compute(self, runner: _Runner, tokens: tuple[int, ...], start: int) -> None:
        """Read the KV of all tokens before `start`, and write that of those from it on."""
        kv = kv_of(tokens, self.model)
        for g, table in enumerate(runner.tables):
            wrong = self.differs(g, enumerate(table), kv[:start], self.first_needed(g, start))
            if wrong is not None:
                self.world.fail(f"a step reads wrong bytes of group {g}: {wrong}")
            self._write(g, table, kv, start)

    def first_needed(self, g: int, position: int) -> int:
        """First token that one at `position` attends to."""
        window = self.layouts[0][g].window
        return max(0, position - window + 1) if window else 0

    def _write(self, g: int, table: list[int], kv: Words, start: int) -> None:
        size = self.layouts[0][g].block_size
        for number in range(start // size, -(-len(kv) // size)):
            low, high = max(start, number * size), min(len(kv), (number + 1) * size)
            block, slots = table[number], slice(low - number * size, high - number * size)
            assert block, "a step has no block for its tokens"
            # Heads, layer, kv, token.
            data = kv[low:high].transpose(1, 2, 3, 0)
            weighted = (data + _ONE) * _weights()[low:high].T
            if low == number * size:
                self.rotten.discard((g, block))
            for rank, (words, kept) in enumerate(zip(self.words, self.kept, strict=True)):
                mine = self._heads(rank)
                words[g][block, ..., slots] = data[mine]
                kept[g][block, ..., slots.start :] = 0
                kept[g][block, ..., slots] = weighted[mine]

    def _heads(self, rank: int) -> slice:
        heads = HEADS // len(self.words)
        return slice(rank * heads, (rank + 1) * heads)

    def differs(
        self, g: int, table: Sequence[tuple[int, int]] | enumerate[int], kv: Words, first: int
    ) -> str | None:
        """The first block, rotten ones aside, that does not hold the KV of the tokens from `first`.

        Args:
            g: group.
            table: logical and physical number of each block.
            kv: of all tokens, as `kv_of` has it.
            first: tokens before it are not looked at.
        """
        size = self.layouts[0][g].block_size
        for number, block in table:
            low, high = max(first, number * size), min(len(kv), (number + 1) * size)
            if low >= high or (g, block) in self.rotten:
                continue
            slots = slice(low - number * size, high - number * size)
            wanted = kv[low:high].transpose(1, 2, 3, 0)
            for rank, words in enumerate(self.words):
                if not np.array_equal(words[g][block, ..., slots], wanted[self._heads(rank)]):
                    return f"tokens {low} to {high} in block {block} on rank {rank}"
        return None

    def _rot(self, tables: list[list[int]], position: int) -> None:
        """A bit of a token flips after its sums were made."""
        g = self.world.rng.randrange(len(tables))
        rank = self.world.rng.randrange(len(self.words))
        number, slot = divmod(position, self.layouts[0][g].block_size)
        block = tables[g][number]
        self.words[rank][g][block, 0, 0, 0, slot] ^= np.uint64(1 << 40)
        self.rotten.add((g, block))

    # --- sums ---

    def sums(self, group: int, blocks: Sequence[int]) -> PendingSums:
        """As `Executor.sums`."""
        found = [_by_layer(kept[group][list(blocks)]) for kept in self.kept]
        return self._soon(lambda: found)

    def digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> PendingSums:
        """As `Executor.digest`."""
        size, ids = self.layouts[0][group].block_size, list(blocks)
        positions = np.arange(first_position, first_position + size * len(ids))
        counted = (positions >= start) & (positions < end)
        weights = _weights()[positions] * counted[:, None]
        weights = weights.reshape(len(ids), 1, 1, size, 2).transpose(0, 1, 2, 4, 3)
        return self._soon(
            lambda: [_by_layer((words[group][ids] + _ONE) * weights) for words in self.words]
        )

    def _soon(self, ask: Callable[[], list[Words]]) -> SimulatedSums:
        delay = self.world.rng.choice([0.0, 0.0, 0.005])
        if delay:
            self.world.after(delay, self.wake_transfers)
        return SimulatedSums(self.world, self.world.now + delay, ask)

    # --- what no schedule needs, or is nothing here ---

    def poison(self, group: int, blocks: Sequence[int]) -> None:
        """As `Executor.poison`."""
        for words in self.words:
            words[group][list(blocks)] = np.uint64(0x7FF8DEAD7FF8DEAD)

    def expect(self, request: AddRequest) -> None:
        """As `Executor.expect`."""

    def counters(self) -> dict[str, float]:
        """As `Executor.counters`."""
        return {}

    def close(self) -> None:
        """As `Executor.close`."""


def _by_layer(weighted: Words) -> Words:
    """Sums over tokens: [blocks, heads, layers, kv, tokens] to [blocks, layers, kv, heads]."""
    sums: Words = weighted.sum(-1, dtype=np.uint64).transpose(0, 2, 3, 1)
    return sums


def _layout(g: int, shape: tuple[int, int, int], heads: int, rank: int) -> KVLayout:
    size, blocks, window = shape
    plane = contiguous_plane(
        num_blocks=blocks,
        block_size=size,
        num_heads=heads,
        head_dim=2,
        layers=(0,),
        dtype="float32",
        region=g,
        head_start=rank * heads,
        head_total=HEADS,
    )
    kind = GroupKind.WINDOW if window else GroupKind.FULL
    return KVLayout(g, kind, size, blocks, (plane,), window)


@cache
def _wake_fd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
