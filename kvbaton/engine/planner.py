"""Makes step plans: decoding sequences first, then running prompts, then who is admitted.

A sequence that needs a block when none is free takes those of the last in order of service, who is
preempted and computes again later. Everybody whom a plan holds comes before its victims, so no plan
loses a sequence that it already holds.

A plan may be made while an earlier one is still in flight. A decoding sequence is then scheduled
for the token that is being sampled, unless that one is known to be its last. Blocks that a victim
gives up stay behind the fence of the step in flight, so the sequence that wanted them sits one step
out.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from kvbaton.engine.admission import Admission, Await, Fetch, Follow, Load, Reject, Run
from kvbaton.engine.encoder.cache_manager import EncoderCacheManager
from kvbaton.engine.handover import Handover
from kvbaton.engine.kv_cache_manager import Match
from kvbaton.engine.request import Sequence, State
from kvbaton.engine.roster import Roster
from kvbaton.engine.step import BlockCopy, Fork, NewSequence, SequenceStep, StepPlan
from kvbaton.engine.store_connector import StoreConnector


@dataclass(frozen=True)
class Item:
    """What a plan in flight does for one sequence.

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
class Flight:
    """A plan that was handed out and has not been updated."""

    number: int
    items: tuple[Item, ...]


@dataclass
class Draft:
    """A plan in the making.

    Attributes:
        number: of the step.
        budget: tokens that it may still take.
        room: sequences that it may still take.
        sources: per copy, (group, block): a reference to give back once the step is numbered.
    """

    number: int
    budget: int
    room: int
    copies: list[BlockCopy] = field(default_factory=list)
    sources: list[tuple[int, int]] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    steps: list[SequenceStep] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)


class Planner:
    """Decides what the ranks compute next.

    Attributes:
        in_flight: plans handed out and not updated, oldest first.
    """

    def __init__(
        self,
        roster: Roster,
        handover: Handover,
        stash: StoreConnector | None,
        items: EncoderCacheManager | None,
    ) -> None:
        self.in_flight: deque[Flight] = deque()
        self._roster = roster
        self._blocks = roster.blocks
        self._config = roster.config
        self._handover = handover
        self._stash = stash
        self._items = items
        if items is not None:
            items.in_flight = self.in_flight
        self._admission = Admission(roster, stash, items)
        self._handles = itertools.count(1)
        self._launched = 0

    # --- the plan ---

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        draft = Draft(
            self._launched + 1, self._config.max_num_batched_tokens, self._config.max_num_seqs
        )
        preemptions = self._roster.totals.preemptions
        self._ask()
        running = [(self._remaining(s), s) for s in self._roster.running]
        for decoding in (True, False):
            for remaining, sequence in running:
                if remaining and (remaining == 1) == decoding:
                    self._step(draft, sequence, remaining)
        if self._roster.totals.preemptions == preemptions:
            self._admit(draft)
        return self._seal(draft) if draft.steps else None

    def can_plan(self) -> bool:
        """Whether `plan` would do something now."""
        self._ask()
        steady = [s for s in self._roster.running if self._remaining(s) > 0]
        if len(steady) > 1 or (steady and not self._is_stalled(steady[0])):
            return True
        waiting = self._roster.waiting
        return bool(waiting) and self._admission.decide(waiting[0]) is not None

    def _ask(self) -> None:
        """Ask for the items that running sequences need next; one that is here is pinned."""
        if self._items is not None:
            for sequence in self._roster.running:
                self._items.ask(sequence, sequence.num_scheduled)

    def _is_stalled(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for blocks that it can't take from another running one."""
        error, need = self._blocks.too_large(sequence.num_scheduled + 1), self._need(sequence)
        waits = self._roster.running == [sequence] or self._blocks.fits_soon(need)
        return error is None and waits and not self._blocks.fits(need)

    def _remaining(self, sequence: Sequence) -> int:
        """Tokens that could be computed now; a sequence that only awaits its last one has none."""
        if sequence.pending:
            unknown = sequence.handle is None and sequence.parent is None
            if unknown or sequence.is_ending:
                return 0
        return self._end(sequence) - sequence.num_scheduled

    def _end(self, sequence: Sequence) -> int:
        """How far it could be computed now: to its end, or to an item that is not here."""
        if self._items is None or not sequence.request.spec.items:
            return sequence.num_total
        return min(sequence.num_total, self._items.ready_until(sequence, sequence.num_scheduled))

    # --- one sequence ---

    def _step(self, draft: Draft, sequence: Sequence, remaining: int) -> None:
        """Let a running sequence take part, if it still runs and there is room."""
        count = min(remaining, draft.budget)
        if sequence.state is not State.RUNNING or count < 1 or draft.room < 1:
            return
        if self._secure(draft, sequence, sequence.num_scheduled + count):
            self._compute(draft, sequence, count)

    def _need(self, sequence: Sequence, end: int | None = None) -> tuple[int, ...]:
        """Blocks that it lacks to compute up to `end`, or for one more token."""
        start = sequence.num_scheduled
        copy_at = start if sequence.shares_tail else None
        return self._blocks.need(sequence.tables, end or start + 1, copy_at=copy_at)

    def _secure(self, draft: Draft, sequence: Sequence, end: int) -> bool:
        """Get the blocks that a sequence needs up to `end`; preempt others for it if need be."""
        if not sequence.shares_tail and self._blocks.covers(sequence.tables, end):
            return True
        error = self._blocks.too_large(end)
        if error is not None:
            if not sequence.pending:  # else the token in flight may be its last
                self._reject(sequence, error)
            return False
        need = self._need(sequence, end)
        while not self._blocks.fits(need):
            last = self._roster.running[-1]
            if self._blocks.fits_soon(need) or last is self._roster.running[0]:
                return False  # Alone, it waits for blocks that transfers or steps still hold.
            self._roster.preempt(last)
            if last is sequence:
                return False
        self._grow(draft, sequence, end)
        return True

    def _grow(self, draft: Draft, sequence: Sequence, end: int) -> None:
        if sequence.shares_tail:
            self._own_tail(draft, sequence)
        self._blocks.extend(sequence.tables, end)

    def _own_tail(self, draft: Draft, sequence: Sequence) -> None:
        """Replace the shared block that is written next by a private copy."""
        sequence.shares_tail = False
        for g, (group, pool) in enumerate(
            zip(self._blocks.groups, self._blocks.pools, strict=True)
        ):
            i = sequence.num_scheduled // group.block_size
            if i < len(sequence.tables[g]):
                source, (target,) = sequence.tables[g][i], pool.allocate(1)
                sequence.tables[g][i] = target
                draft.copies.append(BlockCopy(g, source, target))
                draft.sources.append((g, source))

    def _compute(self, draft: Draft, sequence: Sequence, count: int) -> None:
        """Add a sequence that has its blocks to the plan."""
        if sequence.handle is None:
            self._introduce(draft, sequence)
        assert sequence.handle is not None
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        targets = self._targets(sequence) if end == sequence.num_total else ()
        rows = () if self._items is None else self._items.rows(sequence, start, end)
        draft.steps.append(
            SequenceStep(sequence.handle, start, count, self._unsent(sequence), len(targets), rows)
        )
        draft.items.append(Item(sequence, sequence.handle, start, end, targets))
        draft.budget -= count
        draft.room -= 1
        sequence.num_scheduled = end

    def _targets(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Who gets what a sequence samples: itself, and all choices yet to be forked from it."""
        request = sequence.request
        choices = range(len(request.sequences), request.params.n)
        return (
            sequence,
            *(self._roster.new_sequence(request, c, list(sequence.tokens)) for c in choices),
        )

    def _introduce(self, draft: Draft, sequence: Sequence) -> None:
        """Tell the runner of a sequence, as a copy of another one or with all its tokens."""
        parent, sequence.parent = sequence.parent, None
        sequence.handle = next(self._handles)
        if parent is not None and parent.handle is not None:
            draft.forks.append(Fork(parent.handle, sequence.handle, sequence.choice))
            return
        assert not sequence.pending, "the runner can't be told of tokens that nobody knows yet"
        request = sequence.request
        draft.new.append(
            NewSequence(
                sequence.handle,
                tuple(sequence.tokens),
                len(request.prompt),
                sequence.choice,
                request.params,
                request.spec.items,
            )
        )

    def _unsent(self, sequence: Sequence) -> tuple[tuple[int, ...], ...]:
        unsent = []
        for g, table in enumerate(sequence.tables):
            unsent.append(tuple(table[sequence.sent[g] :]))
            sequence.sent[g] = len(table)
        return tuple(unsent)

    # --- admission ---

    def _admit(self, draft: Draft) -> None:
        """Take from the head of the queue until it has to wait."""
        waiting = self._roster.waiting
        while waiting and self._admit_one(draft, waiting[0]):
            pass

    def _admit_one(self, draft: Draft, sequence: Sequence) -> bool:
        match self._admission.decide(sequence):
            case Reject(error):
                self._reject(sequence, error)
            case Load(match):
                self._handover.reserve(sequence, match)
            case Fetch(match) if self._stash is not None:
                self._stash.load(sequence, match)
            case Follow(match) if self._stash is not None:
                self._stash.follow(sequence, match)
            case Await(start) if self._items is not None:
                self._items.wait(sequence, start)
            case Run(match) if draft.room > 0 and self._has_budget(draft, sequence, match):
                self._start(draft, sequence, match)
            case _:
                return False
        return True

    def _has_budget(self, draft: Draft, sequence: Sequence, match: Match) -> bool:
        """Whether a step may take a sequence's next tokens; of whole prompts, all of them."""
        if not self._config.whole_prompts:
            return draft.budget > 0
        missing = max(1, len(sequence.tokens) - match.num_tokens)
        return missing <= draft.budget or not draft.steps

    def _start(self, draft: Draft, sequence: Sequence, match: Match) -> None:
        """Give a sequence its blocks and its first step."""
        total = len(sequence.tokens)
        self._handover.skip(sequence)
        self._roster.adopt(sequence, match)
        if match.num_tokens == total:
            sequence.num_computed = sequence.num_scheduled = total - 1
            sequence.shares_tail = True
        self._grow(draft, sequence, total)
        self._roster.run(sequence)
        missing = self._end(sequence) - sequence.num_scheduled
        whole = self._config.whole_prompts
        self._compute(draft, sequence, missing if whole else min(missing, draft.budget))

    def _reject(self, sequence: Sequence, error: str) -> None:
        """End what can never fit; the outputs go out with the next ones."""
        if sequence.unforked:
            self._roster.outbox += self._roster.end(sequence.request, "error", error)
        else:
            self._roster.outbox.append(self._roster.fail(sequence, "error", error))

    # --- the end ---

    def _seal(self, draft: Draft) -> StepPlan:
        """Hand the plan out, steps of one token first."""
        for sequence in self._roster.running:
            if sequence.parent is not None and sequence.parent.handle is not None:
                self._introduce(draft, sequence)  # A parent's copy is made before it moves on.
        self._launched = draft.number
        self._blocks.launch(draft.number)
        for g, source in draft.sources:
            self._blocks.pools[g].deref([source])
        ended, self._roster.ended = self._roster.ended, []
        self.in_flight.append(Flight(draft.number, tuple(draft.items)))
        for item in draft.items:
            self._await_samples(item)
        return StepPlan(
            draft.number,
            tuple(ended),
            tuple(draft.copies),
            tuple(draft.forks),
            tuple(draft.new),
            tuple(sorted(draft.steps, key=lambda step: step.count > 1)),
        )

    def _await_samples(self, item: Item) -> None:
        for target in item.targets:
            target.pending += 1
        for child in item.targets[1:]:
            self._roster.fork(item.sequence, child)
