"""Costs that add up to seconds, learned from sums: least squares over relative errors.

What is observed is a count for each of some terms, and how long all of it took. Older observations
count less and less, and costs are never negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

OUTLIER = 5.0
"""What takes so many times what was expected is taken for that: something else was on."""
EXTRAPOLATED = 2.0
"""What is expected means little if a count is so many times the most there has been."""
LEAST_S = 1e-5
"""What takes less counts as much as what takes so long."""
FORGOTTEN = 1e-200
"""Of sums that have faded so far nothing is left to tell."""


class CostFit:
    """Takes observations in, gives costs out.

    Args:
        names: of the terms.
        memory: what an observation still counts when the next one has come.
        min_count: of observations; before that nothing is said.
    """

    def __init__(self, names: Sequence[str], memory: float, min_count: int) -> None:
        self._names, self._memory, self._min_count = names, memory, min_count
        self._products = np.zeros((len(names), len(names)))
        self._targets = np.zeros(len(names))
        self._tried = self._products.copy(), self._targets.copy()
        self._rows: list[tuple[Sequence[float], float]] = []
        self._costs: npt.NDArray[np.float64] = np.zeros(len(names))
        self._most = np.zeros(len(names))
        self._seen = 0

    def start(self, tried: Sequence[tuple[Sequence[float], float]]) -> None:
        """Believe what trials took (counts and seconds), before anything is observed.

        Each counts as one observation, but for ever: of a term that is never seen, or was long ago,
        they are what is known, and the first few observations are too alike to say what others take
        that are ten times as large.
        """
        if not tried:
            return
        terms, seconds = np.array([row for row, _ in tried]), np.array([took for _, took in tried])
        weights = 1 / np.maximum(seconds, LEAST_S) ** 2
        self._tried = (terms * weights[:, None]).T @ terms, terms.T @ (weights * seconds)
        self._most, self._seen = terms.max(axis=0), self._min_count
        self._costs = solve_nonnegative(*self._tried)

    def observe(self, counts: Sequence[float], seconds: float) -> None:
        """Something with these counts, one for each term, took so long."""
        self._rows.append((counts, seconds))
        if len(self._rows) >= 256:
            self._fit()

    def costs(self) -> dict[str, float]:
        """Seconds by term; those never counted are left out, and all while few were observed."""
        self._fit()
        if self._seen < self._min_count:
            return {}
        known = (self._products + self._tried[0]).diagonal() > FORGOTTEN
        return {
            name: float(cost)
            for name, cost, here in zip(self._names, self._costs, known, strict=True)
            if here
        }

    def predict(self, counts: Sequence[float]) -> float:
        """Seconds that something with these counts is to take; 0 while few were observed."""
        self._fit()
        return float(self._costs @ counts) if self._seen >= self._min_count else 0.0

    def _fit(self) -> None:
        """Take in what has come since, and solve."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        terms = np.array([row for row, _ in rows])
        seconds = np.array([took for _, took in rows])
        scale = np.full(len(rows), seconds.mean())
        if self._seen >= self._min_count:
            # Not of the observed seconds: that would draw costs towards the quick ones.
            scale = np.maximum(terms @ self._costs, LEAST_S)
            # Taken for outliers, with the weight of quick steps, the first prompts of a node that
            # has only decoded would make its prompts look cheap for hundreds of steps.
            beyond = (terms > EXTRAPOLATED * self._most).any(axis=1)
            scale = np.where(beyond, np.maximum(scale, seconds), scale)
            seconds = np.minimum(seconds, OUTLIER * scale)
        self._most = np.maximum(self._most, terms.max(axis=0))
        weights = self._memory ** np.arange(len(rows) - 1, -1, -1) / np.maximum(scale, LEAST_S) ** 2
        fade = self._memory ** len(rows)
        self._products = fade * self._products + (terms * weights[:, None]).T @ terms
        self._targets = fade * self._targets + terms.T @ (weights * seconds)
        self._seen += len(rows)
        products, targets = self._tried
        self._costs = solve_nonnegative(products + self._products, targets + self._targets)


def solve_nonnegative(
    products: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Solve the normal equations; what comes out negative is set to 0, and the rest solved anew."""
    scale = np.sqrt(np.maximum(products.diagonal(), FORGOTTEN))
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
