"""How long steps take by what is in them, learned from the steps themselves.

A step's seconds are modelled as a sum of five terms, each a count that the plan gives times a cost:
the step itself, tokens of prompts, the context that these attend to, decoding sequences, and their
context. Costs are fitted by least squares over relative errors, older steps counting less and less,
and are never negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.engine.step import SequenceStep
from kvbaton.messages.nodes import STEP_COSTS

MEMORY = 0.997
"""What a step still counts when the next one has come: the last 300 or so matter."""
MIN_STEPS = 8
"""Before so many nothing is said."""
OUTLIER = 5.0
"""A step that takes so many times what was expected is taken for that: something else was on."""
EXTRAPOLATED = 2.0
"""What is expected of a step means little if a count is so many times the most there has been."""

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


class StepCosts:
    """Takes steps in, gives costs out."""

    def __init__(self) -> None:
        self._products = np.zeros((5, 5))
        self._targets = np.zeros(5)
        self._rows: list[tuple[Terms, float]] = []
        self._costs: npt.NDArray[np.float64] = np.zeros(5)
        self._most = np.zeros(5)
        self._seen = 0

    def observe(self, terms: Terms, seconds: float) -> None:
        """A step with these counts took so long."""
        self._rows.append((terms, seconds))
        if len(self._rows) >= 256:
            self._fit()

    def costs(self) -> dict[str, float]:
        """Seconds by term; those that no step has had are left out, and all while few were seen."""
        self._fit()
        if self._seen < MIN_STEPS:
            return {}
        known = self._products.diagonal() > 0
        return {
            name: float(cost)
            for name, cost, here in zip(STEP_COSTS, self._costs, known, strict=True)
            if here or name == "step_s"
        }

    def _fit(self) -> None:
        """Take in what has come since, and solve."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        terms = np.array([row for row, _ in rows])
        seconds = np.array([took for _, took in rows])
        scale = np.full(len(rows), seconds.mean())
        if self._seen >= MIN_STEPS:
            # Not of the step's own seconds: that would draw costs towards the quick ones.
            scale = np.maximum(terms @ self._costs, 1e-5)
            # Taken for outliers, with the weight of quick steps, the first prompts of a node that
            # has only decoded would make its prompts look cheap for hundreds of steps.
            beyond = (terms > EXTRAPOLATED * self._most).any(axis=1)
            scale = np.where(beyond, np.maximum(scale, seconds), scale)
            seconds = np.minimum(seconds, OUTLIER * scale)
        self._most = np.maximum(self._most, terms.max(axis=0))
        weights = MEMORY ** np.arange(len(rows) - 1, -1, -1) / np.maximum(scale, 1e-5) ** 2
        fade = MEMORY ** len(rows)
        self._products = fade * self._products + (terms * weights[:, None]).T @ terms
        self._targets = fade * self._targets + terms.T @ (weights * seconds)
        self._seen += len(rows)
        self._costs = solve_nonnegative(self._products, self._targets)


def solve_nonnegative(
    products: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Solve the normal equations; what comes out negative is set to 0, and the rest solved anew."""
    scale = np.sqrt(np.maximum(products.diagonal(), 1e-30))
    a, b = products / np.outer(scale, scale), targets / scale
    found, active = np.zeros(len(b)), list(range(len(b)))
    while active:
        part = a[np.ix_(active, active)] + 1e-9 * np.eye(len(active))
        solved = np.linalg.solve(part, b[active])
        if (solved >= 0).all():
            found[active] = solved
            break
        active = [i for i, value in zip(active, solved, strict=True) if value >= 0]
    return found / scale
