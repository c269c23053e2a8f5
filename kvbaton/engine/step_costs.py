"""How long steps take by what is in them, learned from trial steps and from all steps that run.

The seconds of a step are modelled as a sum of five terms. Each is a count that the plan gives times
a cost: the step itself, prompt tokens, the context that these attend to, decoding sequences, and
their context.

Trial steps run before the first request, so that a node knows its costs from the start. They take
the way of all steps, through all ranks, on a pool that nothing uses yet. While there is time each
runs twice and the quicker one counts, since other users of the machine may have delayed the other.
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
"""Factor by which an observation's weight fades per step: about the last 300 steps count."""
MIN_STEPS = 8

Terms = tuple[float, float, float, float, float]


def terms_of(steps: Sequence[SequenceStep]) -> Terms:
    """Counts of a step, in the order of `STEP_COSTS`; a draft's tokens are sequences, too."""
    tokens = context = kv = sequences = 0
    for step in steps:
        if step.count == 1 + len(step.draft):
            sequences += step.count
            kv += step.count * step.start
        else:
            tokens += step.count
            context += step.count * (2 * step.start + step.count)
    return 1.0, float(tokens), context / 2000.0, float(sequences), kv / 1000.0


def step_costs() -> CostFit:
    """An empty model of step times, to be fed with `terms_of` each step."""
    return CostFit(STEP_COSTS, MEMORY, MIN_STEPS)


# --- trials ---

TRIAL_S = 0.25
"""Seconds for the trials of each kind (decode, prefill). Larger steps are not tried if all trials
together would take longer, once the cost of prompt tokens is known."""
PROMPTS = (16, 64, 256, 1024)
PREFIX = 7168
"""Tokens before the part of a prompt that the last prefill trial computes."""
SEQUENCES = (1, 4, 16, 64)
CONTEXT = 2048
"""Tokens of context of each sequence in the last decode trial."""
LONGER = 1.5
"""Expected ratio of a trial's time with context to its time without, before it is run."""
SLOWER = 1.1
"""A prompt's tokens are known to cost time if its step takes this multiple of the quickest one. The
first few are computed while weights are read; by these alone, prompts would seem free."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Trial:
    """A trial step of equal sequences.

    Attributes:
        count: Tokens that each sequence computes.
        context: Tokens before them, in whole blocks.
        sequences: Number of sequences.
    """

    count: int
    context: int = 0
    sequences: int = 1

    @property
    def tokens(self) -> int:
        """Total number of tokens that the step computes."""
        return self.count * self.sequences


def try_steps(
    run: Callable[[StepPlan], float], limits: SchedulerConfig
) -> list[tuple[Terms, float]]:
    """Run trial steps; returns (terms, seconds) of each, for `CostFit.start`.

    Args:
        run: Runs a step on all ranks and returns its seconds.
        limits: Settings that limit steps.
    """
    # Two decode trials tell the cost of a sequence from that of the step itself.
    decode = _climb(run, limits, _decode_trials(limits), 2)
    return decode + _climb(run, limits, _prefill_trials(limits), 1)


def _climb(
    run: Callable[[StepPlan], float], limits: SchedulerConfig, trials: Iterable[Trial], least: int
) -> list[tuple[Terms, float]]:
    """Run trials of a kind in order of size, at least `least`, until they take too long."""
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
    # Without a trial with context, the cost of context can't be told from that of tokens.
    return [
        ((step, tokens, 0.0, sequences, 0.0), s) for (step, tokens, _, sequences, _), s in found
    ]


def _plausible(
    done: Sequence[Trial], found: Sequence[tuple[Terms, float]]
) -> list[tuple[Terms, float]]:
    """Trial results without noise from which a fit could conclude that steps cost nothing.

    No step may take longer than a larger one. At least half of the quickest decode trial is taken
    as the cost of the step itself, so that adding sequences costs less than separate steps would.
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
    """Expected seconds of a trial, extrapolated from those before it."""
    before, (_, took) = done[-1], found[-1]
    if trial.context:
        return LONGER * took
    if len(done) == 1:
        return took * trial.tokens / before.tokens
    each = (took - found[-2][1]) / (before.tokens - done[-2].tokens)
    return took + max(0.0, each) * (trial.tokens - before.tokens)


def _pool(limits: SchedulerConfig) -> tuple[int, int]:
    """Tokens per block, and blocks that each group has if they share the pool equally."""
    group = limits.groups[0]
    return group.block_size, (group.num_blocks - 1) // len(limits.groups)


def _decode_trials(limits: SchedulerConfig) -> Iterator[Trial]:
    """Decode trials: more and more sequences, then the same number with a context."""
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


def _prefill_trials(limits: SchedulerConfig) -> Iterator[Trial]:
    """Prefill trials: longer and longer prompts, then the last part of a long one."""
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
    """Plans of a trial: add the sequences, compute, compute again, and end them.

    The second time a prompt computes the same tokens and a decoding sequence its next one, so that
    every write fits the content of its block. The context is whatever the pool contains.
    """
    (size, _), groups = _pool(limits), len(limits.groups)
    goes_on = trial.count == 1
    known = trial.context + trial.count
    blocks = -(-(known + goes_on) // size)
    new, first, again = [], [], []
    for number in range(trial.sequences):
        handle = -1 - number  # the scheduler's handles are positive
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
