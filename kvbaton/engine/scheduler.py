"""Decides what the engine computes next: plans the steps, and applies their results.

A plan takes decoding sequences first, then running prompts, then newly admitted sequences. If a
sequence needs a block and none is free, the scheduler preempts the running sequence that is last in
order of service, which is recomputed later. Sources are never preempted: the blocks that they have
reported stay held until the whole prompt is computed and sent. A sequence already in the plan is
never preempted either: a prompt in a sliding-window group that lacks blocks for its next chunk
waits for decoding sequences that come after it in order of service.

A plan may be made while an earlier step is still in flight. A decoding sequence is then scheduled
for the token that is still being sampled, unless that token is known to be its last. With drafts or
a grammar the sequence waits for the token, since the next draft or mask depends on it; if it has an
ITL objective, no step with prompts is planned meanwhile. The blocks of a preempted sequence stay
fenced until the step in flight is over, so the sequence that wanted them skips one step.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.chunk_limit import FAR_PREFIX, IN_TIME
from kvbaton.engine.config import NO_DRAFTS, SchedulerConfig
from kvbaton.engine.kv_cache_manager import Match
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.loading_requests import LoadingRequests
from kvbaton.engine.request import InFlightStep, ScheduledSequence, Sequence, SequenceState
from kvbaton.engine.speculative import propose
from kvbaton.engine.step import (
    MOST_KNOWN,
    BlockCopy,
    Fork,
    NewSequence,
    Sampled,
    SequenceStep,
    StepPlan,
    StepResult,
)
from kvbaton.messages.engine import Output


@dataclass
class PlanBuilder:
    """A plan that is being made.

    Attributes:
        number: Number of the step.
        budget: Tokens that the step may still take.
        room: Sequences that the step may still take.
        full: No tokens are left for the first sequence of the queue, which could otherwise run.
        scheduled: What the step computes so far; `steps` is the same for the ranks.
        new: Sequences that the ranks do not know yet and that are not forks.
        forks: Sequences that the ranks make as copies of others.
        copies: Private copies of blocks; their sources stay referenced until the plan is sealed.
        governed: Sequences with a grammar that sample in this step, each with its draft tokens.
    """

    number: int
    budget: int
    room: int
    full: bool = False
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    steps: list[SequenceStep] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    governed: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the plan contains a sequence."""
        return any(item.sequence is sequence for item in self.scheduled)


class Scheduler(LoadingRequests):
    """Continuous batching with chunked prefill, prefix caching and preemption by recompute.

    Args:
        config: Settings.
        root_key: Maps a cache salt to the root of the block keys of its requests.
        clock: Monotonic clock, in seconds.

    Attributes:
        propose: Drafts at most the given number of tokens after the given ones.
        result_at: Monotonic time at which the core received the latest step's result.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        root_key: Callable[[str], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, root_key=root_key, clock=clock)
        drafts = config.speculative or NO_DRAFTS
        self.propose: Callable[[npt.NDArray[np.int32], int], tuple[int, ...]]
        least, most = drafts.lookup
        self.propose = partial(propose, least=least, most=most)
        self._longest_draft = drafts.num_speculative_tokens
        self.result_at: float | None = None
        self._handles = itertools.count(1)
        self._launched = 0

    # --- plans ---

    def plan(self) -> StepPlan | None:
        """The next step; None if nothing can be computed before something else happens.

        May be called again while the result of one earlier plan is outstanding.
        """
        config = self.config
        while True:
            moves = self._moves
            plan = PlanBuilder(
                self._launched + 1, config.max_num_batched_tokens, config.max_num_seqs
            )
            self._fill(plan)
            if plan.scheduled:
                return self._seal(plan)
            if self._moves == moves:
                return None

    def _fill(self, plan: PlanBuilder) -> None:
        """Fill a plan: first sequences that decode, then prompts, running or queued, by rank."""
        preemptions, running, blocked = self.totals.preemptions, [], False
        delayed = False
        self.late.rank(self.waiting, self.running, self.clock())
        for sequence in tuple(self.running):
            end = len(sequence.tokens) + sequence.pending
            if sequence.request.items:  # up to the first item whose encoder output is missing
                self.items.request(sequence, sequence.num_scheduled)
                end = min(end, self.items.ready_until(sequence, sequence.num_scheduled))
            unknown = not sequence.handle and sequence.parent is None
            grammar = bool(sequence.request.params.grammar)
            awaits = sequence.is_ending or self._longest_draft or grammar
            if sequence.pending and (unknown or awaits):
                delayed = delayed or bool(sequence.request.spec.itl_s and not sequence.is_ending)
                continue  # it only waits for a token in flight
            if grammar and not self._can_follow(sequence):
                continue
            running.append((end - sequence.num_scheduled, sequence))
        admissible = self.waiting and len(self.running) < self.config.max_num_seqs
        if delayed and (admissible or any(remaining > 1 for remaining, _ in running)):
            # This step would delay a next token that has an ITL objective, and have prompts in it:
            # they are left to the step after the one in flight.
            running, plan.full, blocked = [], True, True
        for decoding in (True, False):
            beside = plan.scheduled and (self.waiting or len(plan.scheduled) < len(running))
            if beside and not decoding:
                plan.budget = min(plan.budget, self._chunk(plan))
            for remaining, sequence in running:
                # Tokens that a source has sampled must not wait for chunks of prompts.
                decodes = remaining == 1 or remaining <= min(MOST_KNOWN, sequence.num_generated)
                if not remaining or decodes != decoding:
                    continue
                if not decoding and not blocked and self.totals.preemptions == preemptions:
                    blocked = not self._admit_before(plan, sequence.rank)
                count = self._fit(sequence, sequence.num_scheduled, remaining, plan.budget)
                if sequence.state is not SequenceState.RUNNING or count < 1 or plan.room < 1:
                    continue
                end = sequence.num_scheduled + count
                drafts = decoding and self._longest_draft
                proposed = self._propose(plan, sequence) if drafts else ()
                if self._secure(plan, sequence, end + len(proposed)):
                    self._compute(plan, sequence, count, proposed)
        if self.totals.preemptions == preemptions:
            if not blocked:
                self._admit_before(plan)
            if plan.full:  # loads take no tokens; if it starts late, the source prefills twice
                for sequence in tuple(self.waiting):
                    if sequence.request.is_target and not self._admit(plan, sequence):
                        break

    def _chunk(self, plan: PlanBuilder) -> int:
        """Maximum number of prompt tokens in a step with decoding sequences.

        An ITL objective is kept whatever waits. Without one this is the whole budget if, in small
        chunks, a first token would come when most of its TTFT objective has passed, or if a
        prompt's chunk begins beyond `FAR_PREFIX`.
        """
        most, objective_s = self.config.max_num_batched_tokens, math.inf
        for scheduled in plan.scheduled:
            objective_s = min(objective_s, scheduled.sequence.request.spec.itl_s or math.inf)
        limit = self.chunk_limit.for_step(most - plan.budget, objective_s)
        if objective_s < math.inf:
            return limit
        ends = self.clock()
        for sequence in itertools.chain(self.running, self.waiting):
            due, ttft_s = sequence.request.due, sequence.request.spec.ttft_s
            if not sequence.num_generated:
                if sequence.num_scheduled >= FAR_PREFIX:
                    return most
                token_s = self.chunk_limit.token_s
                ends += (len(sequence.tokens) - sequence.num_scheduled) * token_s
                if due is not None and ends > due - (1 - IN_TIME) * ttft_s:
                    return most
        return limit

    def _fit(self, sequence: Sequence, start: int, remaining: int, budget: int) -> int:
        """How many of the `remaining` tokens from `start` on fit into a step's remaining `budget`.

        Items with `whole_items` are never split: 0 if the next token begins one that does not fit.
        """
        count = min(remaining, budget)
        if self.config.whole_items:
            for item in sequence.request.items:
                if item.start < start + count < item.start + item.length:
                    return max(0, item.start - start)
        return count

    def _propose(self, plan: PlanBuilder, sequence: Sequence) -> tuple[int, ...]:
        """Draft tokens after a decoding sequence's last token, as far as there is room for them.

        A draft takes no tokens or blocks away from other sequences.
        """
        if sequence.unforked:
            return ()
        known, others = len(sequence.tokens), len(self.running) - len(plan.scheduled) - 1
        if not sequence.num_generated or sequence.num_scheduled + 1 < known:
            return ()
        most = min(
            self._longest_draft,
            sequence.request.limit - known - 1,
            plan.budget - 1 - others - self.config.whole_items,
        )
        if most < 1:
            return ()
        proposed = self.propose(np.frombuffer(sequence.tokens, np.int32), most)
        if self.grammars and sequence.request.params.grammar:
            proposed = self.grammars.cut(sequence, proposed)
        end = known + len(proposed)
        if not sequence.shares_tail and self.blocks.covers(sequence.tables, end):
            return proposed
        fits = not self.blocks.too_large(end) and self.blocks.fits(self._need(sequence, end))
        return proposed if fits else ()

    def _need(self, sequence: Sequence, end: int) -> int:
        """Number of blocks that a sequence lacks to reach `end`."""
        start = sequence.num_scheduled
        copy_at = start if sequence.shares_tail else None
        return self.blocks.need(sequence.tables, end, start=start, copy_at=copy_at)

    def _secure(self, plan: PlanBuilder, sequence: Sequence, end: int) -> bool:
        """Give a sequence the blocks that it needs up to `end`, preempting others if necessary."""
        if not sequence.shares_tail and self.blocks.covers(sequence.tables, end):
            return True
        if error := self.blocks.too_large(end):
            if not sequence.pending:  # else the token in flight may end the sequence
                self._reject(sequence, error)
            return False
        need = self._need(sequence, end)
        while not self.blocks.fits(need):
            if sequence.shares_tail and self.blocks.owns(sequence.tables, sequence.num_scheduled):
                sequence.shares_tail = False  # the others have ended, or were preempted
                return self._secure(plan, sequence, end)
            victims = [one for one in self.running if not one.request.source]
            if self.blocks.fits_soon(need) or not victims or plan.holds(last := victims[-1]):
                return False
            if victims == [sequence] and not self.is_crowded_out(sequence):
                return False  # It runs alone: wait for blocks that transfers or steps still hold.
            if last.is_ending:
                return False  # Its blocks come no sooner this way, and connectors still need them.
            self.preempt(last)
            if last is sequence:
                return False
        self._extend(plan, sequence, end)
        return True

    def _extend(
        self, plan: PlanBuilder, sequence: Sequence, num_tokens: int, end: int | None = None
    ) -> None:
        """Allocate the blocks that a sequence lacks (`KVCacheManager.extend`); they must fit.

        If the block written next is shared, it is replaced by a private copy.
        """
        if sequence.shares_tail:
            sequence.shares_tail = False
            for g, group in enumerate(self.blocks.groups):
                i, table = sequence.num_scheduled // group.block_size, sequence.tables[g]
                if i < len(table) and group.kind is not GroupKind.STATE:
                    source, (table[i],) = table[i], self.blocks.pool.allocate(1, g)
                    plan.copies.append(BlockCopy(g, source, table[i]))
        start = sequence.num_scheduled
        self.blocks.extend(sequence.tables, num_tokens, start=start, end=end)

    def _compute(
        self, plan: PlanBuilder, sequence: Sequence, count: int, proposed: tuple[int, ...] = ()
    ) -> None:
        """Add the next `count` tokens of a sequence, and its draft, to the plan."""
        request = sequence.request
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        targets: tuple[Sequence, ...] = ()
        if end == len(sequence.tokens) + sequence.pending:
            targets = (sequence,)
            # Choices that are forked later each get a sample of this step, too.
            for choice in range(len(request.sequences), request.params.n):
                targets += (Sequence(request, choice, sequence.tokens[:], len(sequence.tables)),)
        if targets and request.params.grammar:
            plan.governed.append((sequence, proposed))
        if not sequence.handle:
            self._introduce(plan, sequence)
        handle = sequence.handle
        unsent = []
        for g, table in enumerate(sequence.tables):
            unsent.append(tuple(table[sequence.sent[g] :]))
            sequence.sent[g] = len(table)
        rows = self.items.rows(sequence, start, end) if request.items else ()
        num_draft = len(proposed)
        count += num_draft
        plan.steps.append(
            SequenceStep(handle, start, count, tuple(unsent), len(targets), rows, proposed)
        )
        plan.scheduled.append(ScheduledSequence(sequence, handle, start, end, targets, num_draft))
        plan.budget -= count
        plan.room -= 1
        sequence.num_scheduled = start + count

    def _introduce(self, plan: PlanBuilder, sequence: Sequence) -> None:
        """Announce a sequence to the runner: as a fork of another one, or with all its tokens."""
        parent, sequence.parent = sequence.parent, None
        sequence.handle = next(self._handles)
        if parent is not None:
            plan.forks.append(Fork(parent.handle, sequence.handle, sequence.choice))
            return
        assert not sequence.pending, "the runner can't be told of tokens that nobody knows yet"
        request = sequence.request
        new = NewSequence(
            sequence.handle,
            sequence.tokens[:],
            len(request.prompt),
            sequence.choice,
            request.params,
            request.spec.items,
        )
        plan.new.append(new)

    def _seal(self, plan: PlanBuilder) -> StepPlan:
        """Finish a plan, with decoding sequences first, and note it as in flight."""
        for sequence in self.running:
            if sequence.parent is not None:
                self._introduce(plan, sequence)  # Fork before the parent's next token.
        self._launched = plan.number
        self.blocks.pool.launched = plan.number
        forked, self.forked_states = self.forked_states, []
        plan.copies += forked
        if plan.copies:
            held = [copy.source for copy in plan.copies] + [copy.target for copy in forked]
            self.blocks.pool.deref(held)
        ended, self._ended = tuple(self._ended), []
        self.in_flight.append(InFlightStep(plan.number, tuple(plan.scheduled)))
        for scheduled in plan.scheduled:
            for target in scheduled.targets:
                target.pending += 1
            for child in scheduled.targets[1:]:
                self.fork(scheduled.sequence, child)
        masks = self.grammars.masks(plan.governed) if self.grammars and plan.governed else {}
        steps = plan.steps
        if len(steps) > 1:
            steps.sort(key=lambda step: not step.decodes)
        return StepPlan(
            plan.number,
            ended,
            tuple(plan.copies),
            tuple(plan.forks),
            tuple(plan.new),
            tuple(steps),
            masks,
        )

    def extend_source(self, sequence: Sequence) -> bool:
        """Let a source sample a second token, if it is all that is to be computed."""
        request, known = sequence.request, len(sequence.tokens)
        most = min(len(request.prompt) + request.params.max_tokens, self.config.max_model_len)
        alone = self.running == [sequence] and not self.waiting
        if not alone or request.params.grammar or known + MOST_KNOWN > most:
            return False
        need = self.blocks.need(sequence.tables, known + 1, start=known)
        if sequence.pending != 1 or not self.blocks.fits(need):
            return False
        request.limit = known + MOST_KNOWN
        return True

    # --- admission ---

    def _admit_before(self, plan: PlanBuilder, rank: tuple[float, ...] = (math.inf,)) -> bool:
        """Admit sequences of the queue up to a rank; False once one has to wait."""
        while self.waiting and self.waiting[0].rank < rank:
            if not self._admit(plan, self.waiting[0]):
                return False
        return True

    def _admit(self, plan: PlanBuilder, sequence: Sequence) -> bool:
        """Admit the first sequence of the queue; False if it has to wait, and all behind it.

        If the step is full, only loads are decided; the next step decides about the rest.

        A sequence is admitted if blocks for all its known tokens are free, beyond those that
        running requests may claim for their next step. Quarantined blocks count as allocated.
        """
        request, total, holders = sequence.request, len(sequence.tokens), self.holders()
        taken = 1 + sequence.unforked
        for other in holders:
            taken += 1 + other.unforked
        if sequence.pending:
            return False
        if taken > self.config.max_num_seqs:
            return self.is_crowded_out(sequence) and self.step_aside(sequence)
        if error := self.blocks.too_large(total):
            self._reject(sequence, error)
            return True
        if self.config.enable_prefix_caching and request.reads_cache:
            match = self.blocks.match_sequence(sequence)
        else:
            match = Match(0, self.blocks.empty())
        outcome = self.load_beyond(sequence, match)
        if outcome != "compute":
            return outcome == "done"
        if plan.full:
            return True
        missing = len(request.prompt) - match.num_tokens
        if self.config.debug_forbid_prompt_compute and missing > 1:
            error = f"debug_forbid_prompt_compute: {missing} prompt tokens are not cached"
            self._reject(sequence, error)
            return True
        if request.items and self._awaits_item(sequence, match):
            return True
        if request.params.grammar and not self._can_follow(sequence):
            return True
        fitting = self._fitting(sequence, match, self.wanted(holders))
        if fitting is None:
            return self.is_crowded_out(sequence) and self.step_aside(sequence)
        if fitting is not match and request.items and self._awaits_item(sequence, fitting):
            return True
        whole = self.config.whole_prompts
        enough = max(1, total - fitting.num_tokens) if whole else 1
        if plan.room < 1 or (enough > plan.budget and (plan.scheduled or not whole)):
            plan.full = True
            return False  # A whole prompt longer than the budget gets a step of its own.
        start = min(fitting.num_tokens, total - 1)
        end = min(total, self.items.ready_until(sequence, start)) if request.items else total
        count = end - start if whole else self._fit(sequence, start, end - start, plan.budget)
        if count < 1:
            plan.full = True
            return False
        self.adopt(sequence, fitting)
        if fitting.num_tokens == total:
            sequence.num_computed = sequence.num_scheduled = total - 1
            sequence.shares_tail = True
        self.run(sequence)
        self._extend(plan, sequence, total, sequence.num_scheduled + count)
        self._compute(plan, sequence, count)
        return True

    def _can_follow(self, sequence: Sequence) -> bool:
        """Whether a sequence's grammar can make masks; if not, it is parked or has failed."""
        assert self.grammars is not None, "checked in add"
        if not self.grammars.ready(sequence):
            if sequence.state is not SequenceState.RUNNING:
                self.park(sequence)
            return False
        if error := self.grammars.error(sequence):
            self._reject(sequence, error.message, error.code)
            return False
        return True

    def _awaits_item(self, sequence: Sequence, match: Match) -> bool:
        """Whether the first token after a prefix lacks its item, which is then requested."""
        start = min(match.num_tokens, len(sequence.tokens) - 1)
        if self.items.ready_until(sequence, start) > start:
            return False
        self.items.wait(sequence, start)
        return True

    def _fitting(self, sequence: Sequence, match: Match, beside: int) -> Match | None:
        """The longest cached prefix after which the rest fits and `beside` blocks stay free.

        None if no prefix does.
        """
        total = len(sequence.tokens)
        copy_at = total - 1 if match.num_tokens == total else None
        start = min(match.num_tokens, total - 1)
        need = self.blocks.need(match.tables, total, start=start, copy_at=copy_at)
        if self.blocks.fits(need, beside=beside, hits=match.tables):
            return match
        if copy_at is None:
            return None
        # There is no room for a private copy of the last block: compute that block instead.
        match = self.blocks.shorten(sequence, match)
        need = self.blocks.need(match.tables, total, start=match.num_tokens)
        fits = self.blocks.fits(need, beside=beside, hits=match.tables)
        forbidden = self.config.debug_forbid_prompt_compute
        forbidden = forbidden and match.num_tokens < len(sequence.request.prompt) - 1
        return match if fits and not forbidden else None

    # --- results ---

    def update(self, result: StepResult) -> list[Output]:
        """Apply the result of the oldest step in flight."""
        step = self.in_flight.popleft()
        assert step.number == result.number, f"step {result.number} is not the oldest in flight"
        sampled = {sample.handle: sample for sample in result.sampled}
        outputs, self._outbox = self._outbox, []
        for scheduled in step.scheduled:
            nothing = Sampled(scheduled.handle, ())
            outputs += self._apply(scheduled, sampled.get(scheduled.handle, nothing))
        self.blocks.pool.settle(step.number)
        return outputs

    def _apply(self, scheduled: ScheduledSequence, sampled: Sampled) -> list[Output]:
        """Apply one sequence's part of a step's result.

        For a sequence preempted meanwhile, sampled tokens and their prompt logprobs still count.
        """
        sequence, request = scheduled.sequence, scheduled.sequence.request
        error, is_current = sampled.error, sequence.handle == scheduled.handle
        if request.prompt_logprobs is not None and (is_current or scheduled.targets):
            request.prompt_logprobs += sampled.prompt_logprobs or ()
        if error is None and is_current:
            sequence.num_computed = scheduled.end
            self.commit(sequence)
            if request.items:
                self.items.computed(sequence)
            of_prompt = min(scheduled.end, len(request.prompt)) - scheduled.start
            self.totals.prompt_tokens["computed"] += max(0, of_prompt)
            if request.source:
                raised = len(self.connectors.raised)
                self.connectors.call(KVConnector.progressed, request)
                if len(self.connectors.raised) > raised:
                    error = self.connectors.raised[-1][2]
            # Only now: connectors have taken hold of the blocks that they need.
            self.blocks.trim(sequence, scheduled.end)
        for target in scheduled.targets:
            target.pending -= 1
        # Checked first: where no token fits, the ranks only report that none can be sampled.
        grammars = self.grammars if request.params.grammar else None
        if grammars and (failed := grammars.error(sequence)):
            return self.end(request, "error", failed.message, failed.code)
        if error is not None:
            return self.end(request, "error", error, sampled.error_code)
        targets = scheduled.targets
        if scheduled.num_draft:  # which is verified for one sequence alone
            targets *= len(sampled.token_ids)
        assert len(sampled.token_ids) == len(targets), f"sampled: {sampled}"
        outputs = []
        for i, target in enumerate(targets):
            if not target.finish_reason:
                logprobs = sampled.logprobs[i] if sampled.logprobs else None
                outputs.append(self.append(target, sampled.token_ids[i], logprobs))
        if scheduled.num_draft:
            self._accept(scheduled, len(targets) - 1)
        for target in scheduled.targets:
            if target.finish_reason and not target.is_over:
                self.retire(target)
        return outputs

    def _accept(self, scheduled: ScheduledSequence, accepted: int) -> None:
        """Take so many leading tokens of a draft as computed; they were appended before."""
        sequence = scheduled.sequence
        self.totals.drafts += 1
        self.totals.draft_tokens += scheduled.num_draft
        self.totals.accepted.update(range(accepted))
        if sequence.handle == scheduled.handle:
            # Rejected draft tokens are overwritten; the KV of a final token is never computed.
            computed = min(scheduled.end + accepted, len(sequence.tokens))
            sequence.num_computed = sequence.num_scheduled = computed
            self.commit(sequence)
            self.blocks.trim(sequence, computed)
