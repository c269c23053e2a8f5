"""How long steps take by what is in them, learned from steps that are tried, and from all others.

A step's seconds are modelled as a sum of five terms, each a count that the plan gives times a cost:
the step itself, tokens of prompts, the context that these attend to, decoding sequences, and their
context.

Some steps are tried before the first request, so that a node knows from the start what they take.
They go the way of all steps, through all ranks, on a pool that nobody uses yet. As long as there is
time each is run twice, and the quicker one counts: on a machine that others use, too, the other one
may have had to wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvbaton.engine.config import SchedulerConfig
from kvbaton.engine.cost_fit import CostFit
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan
from kvbaton.messages.engine import SamplingParams
from kvbaton.messages.nodes import STEP_COSTS

MEMORY = 0.997
"""The last 300 steps or so matter."""
MIN_STEPS = 8

Terms = tuple[float, float, float, float, float]


def terms_of(steps: Sequence[SequenceStep]) -> Terms:
    """The counts of a step's plan, in the order of `STEP_COSTS`."""
    tokens = context = kv = sequences = 0
    for step in steps:
        if step.count == 1:
            sequences += 1
            kv += step.start
        else:
            tokens += step.count
            context += step.count * (2 * step.start + step.count)
    return 1.0, float(tokens), context / 2000.0, float(sequences), kv / 1000.0


def step_costs() -> CostFit:
    """To be told of steps, by `terms_of`."""
    return CostFit(STEP_COSTS, MEMORY, MIN_STEPS)


# --- trials ---

TRIAL_S = 0.25
"""A kind of step is not tried any larger if that would let all of its trials take longer, once it
is known what prompts cost."""
PROMPTS = (16, 64, 256, 1024)
PREFIX = 7168
"""Tokens before the end of a prompt that is tried last."""
SEQUENCES = (1, 4, 16, 64)
CONTEXT = 2048
"""Tokens before each of the most sequences that decode, likewise."""
LONGER = 1.5
"""What a step takes longer with such a context, as far as is known before it is tried."""
SLOWER = 1.1
"""A prompt's tokens cost something if its step takes so many times the quickest one's: few are
computed while the weights are read, and by these alone prompts would be free."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Trial:
    """A step of equal sequences.

    Attributes:
        count: tokens that each computes.
        context: tokens before them, whole blocks.
        sequences: how many.
    """

    count: int
    context: int = 0
    sequences: int = 1

    @property
    def tokens(self) -> int:
        """That it computes."""
        return self.count * self.sequences


def try_steps(
    run: Callable[[StepPlan], float], limits: SchedulerConfig
) -> list[tuple[Terms, float]]:
    """What steps take by what is in them, for `CostFit.start`.

    Args:
        run: runs a step on all ranks and returns its seconds.
        limits: of steps.
    """
    # Of two steps that decode it can be told what each takes for itself.
    return _climb(run, limits, _texts(limits), 2) + _climb(run, limits, _prompts(limits), 1)


def _climb(
    run: Callable[[StepPlan], float], limits: SchedulerConfig, trials: Iterable[Trial], least: int
) -> list[tuple[Terms, float]]:
    """Try larger and larger steps of a kind, at least so many, as long as they are quick."""
    found, spent, done = list[tuple[Terms, float]](), 0.0, list[Trial]()
    for trial in trials:
        if len(done) >= least and spent + _guess(trial, done, found) > TRIAL_S:
            if trial.count == 1 or found[-1][1] > SLOWER * min(took for _, took in found):
                break
        start, first, again, end = _plans(trial, limits)
        run(start)
        spent += (took := run(first))
        if spent < TRIAL_S / 2:
            spent += (second := run(again))
            took = min(took, second)
        run(end)
        found.append((terms_of(first.steps), took))
        done.append(trial)
    found = _plausible(done, found)
    if done and done[-1].context:
        return found
    # What the tokens cost can't be told from what their context does.
    return [
        ((step, tokens, 0.0, sequences, 0.0), s) for (step, tokens, _, sequences, _), s in found
    ]


def _plausible(
    done: Sequence[Trial], found: Sequence[tuple[Terms, float]]
) -> list[tuple[Terms, float]]:
    """Without what noise alone explains, of which a fit could make steps that cost nothing.

    No step takes longer than a larger one does. And of the quickest step that decodes half is taken
    to be the step's own at least, so that another one takes less than its tokens would alone.
    """
    kept = list(found)
    for i in range(len(done) - 1, 0, -1):
        if not done[i].context:
            kept[i - 1] = kept[i - 1][0], min(kept[i - 1][1], kept[i][1])
    for i in range(1, len(done)):
        if done[i].count == 1 and not done[i].context:
            kept[i] = kept[i][0], min(kept[i][1], kept[0][1] * (1 + done[i].sequences) / 2)
    return kept


def _guess(trial: Trial, done: Sequence[Trial], found: Sequence[tuple[Terms, float]]) -> float:
    """Seconds that a trial will take, by those before it."""
    before, (_, took) = done[-1], found[-1]
    if trial.context:
        return LONGER * took
    if len(done) == 1:
        return took * trial.tokens / before.tokens
    each = (took - found[-2][1]) / (before.tokens - done[-2].tokens)
    return took + max(0.0, each) * (trial.tokens - before.tokens)


def _pool(limits: SchedulerConfig) -> tuple[int, int]:
    """Tokens of a block, and how many blocks each group could have for itself."""
    group = limits.groups[0]
    return group.block_size, (group.num_blocks - 1) // len(limits.groups)


def _texts(limits: SchedulerConfig) -> Iterator[Trial]:
    """Sequences that decode: more and more, then with a context."""
    size, blocks = _pool(limits)
    most = min(SEQUENCES[-1], limits.max_num_seqs, limits.max_num_batched_tokens)
    most = min(most, blocks // -(-2 // size))
    for count in SEQUENCES:
        if count < most:
            yield Trial(1, 0, count)
    if most:
        yield Trial(1, 0, most)
        each = min(limits.max_model_len, blocks // most * size) - 2
        if (context := min(CONTEXT, each) // size * size) > 0:
            yield Trial(1, context, most)


def _prompts(limits: SchedulerConfig) -> Iterator[Trial]:
    """A prompt: longer and longer, then the end of a longer one."""
    size, blocks = _pool(limits)
    longest = min(limits.max_model_len, blocks * size)
    most = min(PROMPTS[-1], longest, limits.max_num_batched_tokens)
    for count in PROMPTS:
        if count < most:
            yield Trial(count)
    if most > 1:
        yield Trial(most)
    end = min(most, longest // 4)
    if end > 1 and (context := min(PREFIX, longest - end) // size * size):
        yield Trial(end, context)


def _plans(trial: Trial, limits: SchedulerConfig) -> Iterator[StepPlan]:
    """Sequences come, compute, compute once more, and end.

    A prompt computes the same again, a decoding sequence its next token: so nothing is written that
    does not follow what its block holds. What the contexts hold is whatever the pool does.
    """
    (size, _), groups = _pool(limits), len(limits.groups)
    goes_on = trial.count == 1
    known = trial.context + trial.count
    blocks = -(-(known + goes_on) // size)
    new, first, again = [], [], []
    for number in range(trial.sequences):
        handle = -1 - number  # a scheduler's are positive
        new.append(NewSequence(handle, array("I", [1]) * known, known, 0, GREEDY))
        starts = (1 + (number * groups + group) * blocks for group in range(groups))
        tables = tuple(tuple(range(start, start + blocks)) for start in starts)
        first.append(SequenceStep(handle, trial.context, trial.count, tables, 1))
        none = ((),) * groups
        again.append(SequenceStep(handle, trial.context + goes_on, trial.count, none, 1))
    yield StepPlan(0, new=tuple(new))
    yield StepPlan(0, steps=tuple(first))
    yield StepPlan(0, steps=tuple(again))
    yield StepPlan(0, ended=tuple(step.handle for step in first))
