"""A step plan in the making: what each sequence that takes part adds to it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from kvbaton.engine.kv_cache_manager import KVCacheManager
from kvbaton.engine.request import Sequence
from kvbaton.engine.step import BlockCopy, Fork, ItemRows, NewSequence, SequenceStep, StepPlan


@dataclass(frozen=True)
class ScheduledSequence:
    """What a step in flight does for one sequence.

    Attributes:
        sequence: which.
        handle: its name then; another one now means that it was preempted or is over.
        start: first position computed.
        end: past the last one.
        targets: who gets the sampled tokens, in order.
    """

    sequence: Sequence
    handle: int
    start: int
    end: int
    targets: tuple[Sequence, ...]


@dataclass(frozen=True)
class InFlightStep:
    """A plan that was handed out and whose result has not been applied."""

    number: int
    scheduled: tuple[ScheduledSequence, ...]


@dataclass
class StepDraft:
    """A plan in the making.

    Attributes:
        number: of the step.
        budget: tokens that it may still take.
        room: sequences that it may still take.
        blocks: the pools.
        handles: where the names of sequences at the runner come from.
        sources: per copy, (group, block): a reference to give back once the step is numbered.
        scheduled: what is in it so far.
    """

    number: int
    budget: int
    room: int
    blocks: KVCacheManager
    handles: itertools.count[int]
    sources: list[tuple[int, int]] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    _copies: list[BlockCopy] = field(default_factory=list)
    _forks: list[Fork] = field(default_factory=list)
    _new: list[NewSequence] = field(default_factory=list)
    _steps: list[SequenceStep] = field(default_factory=list)

    def extend(self, sequence: Sequence, end: int) -> None:
        """Give a sequence the blocks that it lacks up to `end`; they must fit.

        If the block that is written next is shared, a private copy replaces it.
        """
        if sequence.shares_tail:
            sequence.shares_tail = False
            for g, group in enumerate(self.blocks.groups):
                i, table = sequence.num_scheduled // group.block_size, sequence.tables[g]
                if i < len(table):
                    source, (table[i],) = table[i], self.blocks.pools[g].allocate(1)
                    self._copies.append(BlockCopy(g, source, table[i]))
                    self.sources.append((g, source))
        self.blocks.extend(sequence.tables, end)

    def compute(
        self,
        sequence: Sequence,
        count: int,
        targets: tuple[Sequence, ...],
        rows: tuple[ItemRows, ...],
    ) -> None:
        """Compute the next `count` tokens of a sequence that has its blocks.

        Args:
            sequence: which.
            count: tokens.
            targets: who gets what is sampled after them.
            rows: encoder outputs that they need.
        """
        if sequence.handle is None:
            self.introduce(sequence)
        assert sequence.handle is not None
        unsent = tuple(
            tuple(table[sent:]) for table, sent in zip(sequence.tables, sequence.sent, strict=True)
        )
        sequence.sent = [len(table) for table in sequence.tables]
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        step = SequenceStep(sequence.handle, start, count, unsent, len(targets), rows)
        self._steps.append(step)
        self.scheduled.append(ScheduledSequence(sequence, sequence.handle, start, end, targets))
        self.budget -= count
        self.room -= 1
        sequence.num_scheduled = end

    def introduce(self, sequence: Sequence) -> None:
        """Tell the runner of a sequence, as a copy of another one or with all its tokens."""
        parent, sequence.parent = sequence.parent, None
        sequence.handle = next(self.handles)
        if parent is not None and parent.handle is not None:
            self._forks.append(Fork(parent.handle, sequence.handle, sequence.choice))
            return
        assert not sequence.pending, "the runner can't be told of tokens that nobody knows yet"
        request = sequence.request
        self._new.append(
            NewSequence(
                sequence.handle,
                tuple(sequence.tokens),
                len(request.prompt),
                sequence.choice,
                request.params,
                request.spec.items,
            )
        )

    def plan(self, ended: tuple[int, ...]) -> StepPlan:
        """The plan, steps of one token first."""
        return StepPlan(
            self.number,
            ended,
            tuple(self._copies),
            tuple(self._forks),
            tuple(self._new),
            tuple(sorted(self._steps, key=lambda step: step.count > 1)),
        )
