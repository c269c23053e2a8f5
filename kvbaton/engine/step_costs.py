"""How long steps take by what is in them, learned from the steps themselves.

A step's seconds are modelled as a sum of five terms, each a count that the plan gives times a cost:
the step itself, tokens of prompts, the context that these attend to, decoding sequences, and their
context.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.engine.cost_fit import CostFit
from kvbaton.engine.step import SequenceStep
from kvbaton.messages.nodes import STEP_COSTS

MEMORY = 0.997
"""The last 300 steps or so matter."""
MIN_STEPS = 8

Terms = tuple[float, float, float, float, float]


def terms_of(steps: Sequence[SequenceStep]) -> Terms:
    """The counts of a step's plan, in the order of `STEP_COSTS`."""
    tokens = context = kv = 0
    sequences = 0
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
