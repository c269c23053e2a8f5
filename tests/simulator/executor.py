"""The ranks of a simulated node: memory in numpy, and steps whose result every node can foretell.

The KV of a token is 64 bits per layer, K or V, and head, that follow from all tokens up to it; so
is the token sampled next. What a step reads is held against that, so wrong bytes are found by
whoever reads them first. Digest sums are kept by the step that wrote a block, as on a device.

Items are tokens of their own, one mark per image, and the rows that an encoder makes of one are the
KV of its marks: so an encoder is ranks like any others, and a step that computes an item's tokens
reads rows that every node can foretell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvbaton.connectors.base import Memory
from kvbaton.connectors.digest import BlockRange, PendingDigests, PendingSums
from kvbaton.connectors.layout import GroupKind, KVLayout, contiguous_plane
from kvbaton.engine.step import Sampled, SequenceStep, StepPlan, StepResult
from kvbaton.messages.engine import AddRequest, Item, SamplingParams
from kvbaton.types import TokenLogprobs
from tests.simulator.world import SimulatedWorld

HEADS = 4
VOCABULARY = 97
MARKS = 1000
"""Tokens from it on stand for images, by the first byte of their digests."""
PLAIN = SamplingParams(seed=1)
"""Sampling that depends on nothing but the tokens."""
BROKEN = 200
"""Images from this first byte on can't be decoded."""
T = TypeVar("T")

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_ONE = np.uint64(1)


def _mix(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_PLACES = _mix(np.arange(1, 2 * HEADS + 1, dtype=np.uint64)).reshape(HEADS, 2)


@lru_cache(maxsize=1 << 14)
def _prefixes(tokens: tuple[int, ...], model: int) -> tuple[int, ...]:
    """Fingerprint of each prefix."""
    if not tokens:
        return ()
    before = _prefixes(tokens[:-1], model)
    x = ((before[-1] if before else model) ^ (tokens[-1] + 1) * 0x9E3779B97F4A7C15) & _MASK
    return *before, (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9 & _MASK


@lru_cache(maxsize=4096)
def kv_of(tokens: tuple[int, ...], model: int) -> Words:
    """What a model makes of each token in its one layer: [tokens, heads, kv]."""
    prefixes = np.array(_prefixes(tokens, model), np.uint64)
    return _mix(prefixes[:, None, None] + _PLACES)


def next_token(
    tokens: tuple[int, ...],
    choice: int,
    model: int,
    params: SamplingParams = PLAIN,
    num_prompt: int = 0,
) -> int:
    """What a model samples after some tokens.

    Unless sampling is plain, it depends on seed, temperature and penalties, and by those on which
    tokens were generated, as what a real sampler does.

    Args:
        tokens: the prompt, and what was generated.
        choice: noise differs by it.
        model: its number.
        params: sampling.
        num_prompt: tokens of the prompt.
    """
    x = _prefixes(tokens, model)[-1] >> 20
    if params.seed != PLAIN.seed:
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        x ^= hash((params.seed, params.temperature, *penalties, tokens[num_prompt:])) & _MASK
    return x % (params.top_k or VOCABULARY - choice)


def logprobs_of(tokens: tuple[int, ...]) -> TokenLogprobs:
    """What a model says of the last of some tokens."""
    return TokenLogprobs(-(hash(tokens) % 64) / 8, len(tokens))


def with_marks(token_ids: Sequence[int], items: Iterable[Item]) -> tuple[int, ...]:
    """The tokens of a prompt, with marks in the place of those that stand for items."""
    tokens = list(token_ids)
    for item in items:
        mark = MARKS + item.digest[0]
        tokens[item.start : item.start + item.length] = [mark] * item.length
    return tuple(tokens)


_WEIGHTS = _mix(np.arange(1, 257, dtype=np.uint64)).reshape(128, 2) | _ONE
"""Per position and K or V, odd: [positions, kv]."""


@cache
def _slots(size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Logical block of each position, and its place in there."""
    return np.divmod(np.arange(128), size)


@dataclass
class _Sequence:
    """A sequence, as the ranks know it."""

    tokens: list[int]
    choice: int
    tables: list[list[int]]
    params: SamplingParams
    num_prompt: int
    items: tuple[Item, ...] = ()
    sampled: tuple[int, ...] = ()

    def sample(self, model: int, choice: int) -> int:
        """The token that follows all."""
        return next_token(tuple(self.tokens), choice, model, self.params, self.num_prompt)


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
class SimulatedSums(Generic[T]):
    """Sums on their way; there from a certain time on."""

    world: SimulatedWorld
    at: float
    ask: Callable[[], T]
    _found: T | None = field(default=None)

    def poll(self) -> T | None:
        """As `PendingSums.poll` or `PendingDigests.poll`."""
        if self._found is None and self.world.now >= self.at:
            self._found = self.ask()
        return self._found


@dataclass
class _SumsOfSteps:
    """Sums that are read when so many more steps are over."""

    steps: int
    ask: Callable[[], list[Words]]
    found: list[Words] | None = None

    def poll(self) -> list[Words] | None:
        """As `PendingSums.poll`."""
        return self.found


class SimulatedExecutor:
    """The ranks of one node, as `engine.executor.Executor` has them.

    Args:
        world: its time and its luck.
        model: its number; another one computes something else.
        rots: bits may flip in what its steps have written.
        ranks: a divisor of `HEADS`.
        groups: per group, block size, blocks of the pool that all share (each group has memory for
            all of them), and window (0 for full attention).
        step_s: how long a step takes about.
        wake_core: called when a step is over.
        wake_transfers: called when sums are there.
        in_order: see `Executor.in_order`; not of encoders, as real ones, whose steps may fail for
            an item.
        encoder: the ranks whose memory has the rows of a prompt's items; None where prompts are
            items themselves, or have none.

    Attributes:
        busy_until: when the last of its steps is over.
        kept: per group, sums of blocks: [blocks, ranks, heads, kv].
        counted: per group, how many slots of each block are in its sum.
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
        in_order: bool = True,
        encoder: SimulatedExecutor | None = None,
    ) -> None:
        self.in_order = in_order
        self.world, self.model, self.step_s = world, model, step_s
        self.encoder = encoder
        self.rots = rots
        self.wake_core, self.wake_transfers = wake_core, wake_transfers
        self.heads = HEADS // ranks
        self.layouts = [
            [
                KVLayout(
                    g,
                    GroupKind.WINDOW if window else GroupKind.FULL,
                    size,
                    blocks,
                    (
                        contiguous_plane(
                            num_blocks=blocks,
                            block_size=size,
                            num_heads=self.heads,
                            head_dim=2,
                            layers=(0,),
                            dtype="float32",
                            region=g,
                            head_start=rank * self.heads,
                            head_total=HEADS,
                        ),
                    ),
                    window,
                )
                for g, (size, blocks, window) in enumerate(groups)
            ]
            for rank in range(ranks)
        ]
        shapes = [(ranks, blocks, self.heads, 2, size) for size, blocks, _ in groups]
        self.words = [np.zeros(shape, np.uint64) for shape in shapes]
        self.kept = [np.zeros((blocks, ranks, self.heads, 2), np.uint64) for _, blocks, _ in groups]
        self.counted = [np.zeros(blocks, np.int64) for _, blocks, _ in groups]
        self.memories = [
            [
                Memory(data.ctypes.data, data.nbytes, owner=data)
                for data in (words[rank].reshape(-1).view(np.uint8) for words in self.words)
            ]
            for rank in range(ranks)
        ]
        self.rotten: set[tuple[int, int]] = set()
        self.steps_in_flight = 0
        self._asked: list[_SumsOfSteps] = []
        self.busy_until = 0.0
        self._slots = [_slots(size) for size, _, _ in groups]
        self._sequences: dict[int, _Sequence] = {}

    @property
    def wake_fds(self) -> tuple[int, ...]:
        """Never readable: the world wakes the core."""
        return (_wake_fd(),)

    # --- steps ---

    def check(self) -> None:
        """See `Executor.check`: a rank ends with its node."""

    def launch(self, plan: StepPlan) -> SimulatedStep:
        """As `Executor.launch`: all of a step happens when it is over, in order."""
        step = SimulatedStep()
        self.steps_in_flight += 1
        seconds = self.step_s * self.world.rng.uniform(0.5, 1.5)
        self.busy_until = max(self.busy_until, self.world.now) + seconds

        def end() -> None:
            step.outcome = self._run(plan)
            self.steps_in_flight -= 1
            self._read_sums(1)
            self.wake_core()

        self.world.after(self.busy_until - self.world.now, end)
        return step

    def _run(self, plan: StepPlan) -> StepResult:
        for fork in plan.forks:
            parent = self._sequences[fork.parent]
            known = [*parent.tokens[:-1], parent.sampled[fork.choice]]
            tables: list[list[int]] = [[] for _ in self.layouts[0]]
            self._sequences[fork.child] = _Sequence(
                known, fork.choice, tables, parent.params, parent.num_prompt
            )
        for handle in plan.ended:
            self._sequences.pop(handle, None)
        for copy in plan.copies:
            words = self.words[copy.group]
            words[:, copy.target] = words[:, copy.source]
            for of_blocks in (self.kept[copy.group], self.counted[copy.group]):
                of_blocks[copy.target] = of_blocks[copy.source]
            if (copy.group, copy.source) in self.rotten:
                self.rotten.add((copy.group, copy.target))
        for new in plan.new:
            tables = [[] for _ in self.layouts[0]]
            known = list(with_marks(new.token_ids, new.items))
            self._sequences[new.handle] = _Sequence(
                known, new.choice, tables, new.params, new.num_prompt, new.items
            )
        sampled = []
        for step in plan.steps:
            sequence = self._sequences[step.handle]
            for table, more in zip(sequence.tables, step.new_blocks, strict=True):
                table += more
            if step.draft:
                assert len(sequence.tokens) == step.start + 1, "a draft follows the last token"
                sequence.tokens += step.draft
            tokens = tuple(sequence.tokens[: step.start + step.count])
            assert len(tokens) == step.start + step.count, "a step is ahead of its tokens"
            error = self._take_items(sequence, step)
            if error is not None:
                sampled.append(Sampled(step.handle, (0,) * step.num_samples, error=error))
                continue
            self._compute(sequence, tokens, step.start)
            if step.num_samples:
                sampled.append(self._sample(sequence, step))
            if self.rots and self.world.chance(self.world.weather.rot):
                # A bit of a token flips after its sums were made.
                rng, position = self.world.rng, self.world.rng.randrange(step.start, len(tokens))
                g, rank = rng.randrange(len(sequence.tables)), rng.randrange(len(self.layouts))
                number, slot = divmod(position, self.layouts[0][g].block_size)
                block = sequence.tables[g][number]
                self.words[g][rank, block, 0, 0, slot] ^= np.uint64(1 << 40)
                self.rotten.add((g, block))
        return StepResult(plan.number, tuple(sampled))

    def _sample(self, sequence: _Sequence, step: SequenceStep) -> Sampled:
        """What follows a sequence's tokens; of its draft, as much as is what would have come."""
        model = self.model
        if step.draft:
            del sequence.tokens[step.start + 1 :]
            found: tuple[int, ...] = ()
            for proposed in (*step.draft, None):
                found += (sequence.sample(model, sequence.choice),)
                sequence.tokens.append(found[-1])
                if found[-1] != proposed:
                    break
        else:
            choices = range(step.num_samples) if step.num_samples > 1 else [sequence.choice]
            found = tuple(sequence.sample(model, choice) for choice in choices)
            sequence.tokens.append(found[0])
        sequence.sampled = found
        if sequence.params.logprobs is None:
            return Sampled(step.handle, found)
        before = sequence.tokens[: step.start + step.count - len(step.draft)]
        ends = [
            (*before, *found[: i + 1]) if step.draft else (*before, token)
            for i, token in enumerate(found)
        ]
        return Sampled(step.handle, found, tuple(map(logprobs_of, ends)))

    def _take_items(self, sequence: _Sequence, step: SequenceStep) -> str | None:
        """Read the rows of the items that a step computes; of an encoder, why it has no image."""
        blocks = {rows.start: rows.blocks for rows in step.items}
        for item in sequence.items:
            start, end = item.start, item.start + item.length
            if self.encoder is not None:
                if start < step.start + step.count and end > step.start:
                    if start not in blocks:
                        self.world.fail(f"a step computes {item}, and is told of no rows")
                    marks = with_marks((0,) * item.length, (replace(item, start=0),))
                    kv = kv_of(marks, self.encoder.model)
                    wrong = self.encoder.differs(0, 0, blocks[start], kv, 0)
                    if wrong is not None:
                        self.world.fail(f"a step reads wrong rows of an item: {wrong}")
            elif step.count > 1:
                if not item.data:
                    return "this node was not given the image"
                if item.digest[0] >= BROKEN:
                    return "can't decode the image"
        return None

    def _compute(self, sequence: _Sequence, tokens: tuple[int, ...], start: int) -> None:
        """Read the KV of all tokens before `start`, and write that of those from it on.

        Sums as `engine.cache.KVCache` keeps them: that of a block begins anew with its first slot,
        and what is written over is taken out of it before.
        """
        kv, end = kv_of(tokens, self.model), len(tokens)
        new = kv[start:].reshape(end - start, -1, self.heads, 2)
        weighted = (new + _ONE) * _WEIGHTS[start:end, None, None]
        for g, table in enumerate(sequence.tables):
            wrong = self.differs(g, 0, table, kv[:start], self.first_needed(g, start))
            if wrong is not None:
                self.world.fail(f"a step reads wrong bytes of group {g}: {wrong}")
            numbers, slots = (places[start:end] for places in self._slots[g])
            blocks = np.array(table)[numbers]
            assert blocks.all(), "a step has no block for its tokens"
            if self.rotten:
                self.rotten -= {(g, b) for b in blocks[slots == 0].tolist()}
            kept, counted, first = self.kept[g], self.counted[g], blocks[0]
            kept[blocks[slots == 0]] = 0
            counted[blocks[slots == 0]] = 0
            if slots[0] < counted[first]:
                over = self.words[g][:, first, ..., slots[0] : counted[first]]
                weights = _WEIGHTS[start : start + over.shape[-1]].T
                kept[first] -= ((over + _ONE) * weights).sum(-1, dtype=np.uint64)
                counted[first] = slots[0]
            self.words[g][:, blocks, ..., slots] = new
            np.add.at(kept, blocks, weighted)
            np.maximum.at(counted, blocks, slots + 1)

    def first_needed(self, g: int, position: int) -> int:
        """First token that one at `position` attends to."""
        window = self.layouts[0][g].window
        return max(0, position - window + 1) if window else 0

    def differs(
        self, g: int, first_block: int, blocks: Sequence[int], kv: Words, first: int
    ) -> str | None:
        """The first token, those in rotten blocks aside, whose KV is not what it must be.

        Args:
            g: group.
            first_block: logical number of the first block.
            blocks: physical numbers from it on.
            kv: of all tokens, as `kv_of` has it.
            first: tokens before it are not looked at.
        """
        size = self.layouts[0][g].block_size
        low = max(first, first_block * size)
        high = min(len(kv), (first_block + len(blocks)) * size)
        if low >= high:
            return None
        numbers, slots = (places[low:high] for places in self._slots[g])
        held = np.array(blocks)[numbers - first_block]
        same = self.words[g][:, held, ..., slots] == kv[low:high].reshape(
            high - low, -1, self.heads, 2
        )
        if same.all():
            return None
        for wrong, rank in np.argwhere(~same.all((2, 3))).tolist():
            if (g, int(held[wrong])) not in self.rotten:
                return f"token {low + wrong} in block {held[wrong]} on rank {rank}"
        return None

    # --- sums ---

    def sums(self, group: int, blocks: Sequence[int], *, in_flight: bool = False) -> PendingSums:
        """As `Executor.sums`: per rank [blocks, 1 layer, kv, heads]."""

        def ask() -> list[Words]:
            found = self.kept[group][list(blocks)].transpose(1, 0, 3, 2)[:, :, None].copy()
            return list(found)

        if not in_flight:
            now = ask()
            return self._soon(lambda: now)
        waits = _SumsOfSteps(self.steps_in_flight, ask)
        self._asked.append(waits)
        self._read_sums()
        return waits

    def digest(self, ranges: Sequence[BlockRange], *, keep: bool = False) -> PendingDigests:
        """As `Executor.digest`."""
        asks = [self._summing(*held) for held in ranges]

        def ask() -> list[list[Words]]:
            found = [ask() for ask in asks]
            if keep:
                self._keep(ranges, found)
            return found

        return self._soon(ask)

    def _summing(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> Callable[[], list[Words]]:
        size, ids = self.layouts[0][group].block_size, list(blocks)
        positions = np.arange(first_position, first_position + size * len(ids))
        counted = (positions >= start) & (positions < end)
        weights = (_WEIGHTS[positions] * counted[:, None]).reshape(len(ids), 1, size, 2)
        weights = weights.swapaxes(2, 3)

        def ask() -> list[Words]:
            """Over tokens: [ranks, blocks, heads, kv, tokens] to those of `sums`."""
            found = ((self.words[group][:, ids] + _ONE) * weights).sum(-1, dtype=np.uint64)
            return list(found.swapaxes(2, 3)[:, :, None])

        return ask

    def _keep(self, ranges: Sequence[BlockRange], sums: Sequence[Sequence[Words]]) -> None:
        """As `BlockMemory.keep`."""
        for (group, blocks, first_position, start, end), found in zip(ranges, sums, strict=True):
            if start > first_position:
                continue
            size, ids = self.layouts[0][group].block_size, list(blocks)
            self.kept[group][ids] = np.stack(list(found))[:, :, 0].transpose(1, 0, 3, 2)
            counted = end - first_position - size * np.arange(len(ids))
            self.counted[group][ids] = np.clip(counted, 0, size)

    def _read_sums(self, steps: int = 0) -> None:
        """Read the sums that were asked for while steps were in flight that are over now."""
        for waits in tuple(self._asked):
            waits.steps -= steps
            if not waits.steps:
                waits.found = waits.ask()
                self._asked.remove(waits)
                self.world.after(self.world.rng.choice([0.0, 0.005]), self.wake_transfers)

    def _soon(self, ask: Callable[[], T]) -> SimulatedSums[T]:
        delay = self.world.rng.choice([0.0, 0.0, 0.005])
        if delay:
            self.world.after(delay, self.wake_transfers)
        return SimulatedSums(self.world, self.world.now + delay, ask)

    # --- what no schedule needs, or is nothing here ---

    def poison(self, blocks: Sequence[int]) -> None:
        """As `Executor.poison`."""
        for words in self.words:
            words[:, list(blocks)] = np.uint64(0x7FF8DEAD7FF8DEAD)

    def expect(self, request: AddRequest) -> None:
        """As `Executor.expect`."""

    def counters(self) -> dict[str, float]:
        """As `Executor.counters`."""
        return {}

    def close(self) -> None:
        """As `Executor.close`."""


@cache
def _wake_fd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
