"""Costs that add up to seconds, learned from totals: least squares over relative errors.

An observation is a count for each of several terms, and the seconds that they took in total. Older
observations count less and less, and costs are never negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

OUTLIER = 5.0
"""Longest observation, as a multiple of the prediction; longer ones are outliers, cut to it."""
EXTRAPOLATED = 2.0
"""A prediction is not trusted if a count exceeds this multiple of the largest one seen."""
LEAST_S = 1e-5
"""Shortest seconds to which errors are relative; shorter observations weigh no more."""
FORGOTTEN = 1e-200
"""Sums that have faded to less contain no information."""


class CostFit:
    """Learns the cost of each term from observations.

    Args:
        names: Names of the terms.
        memory: Factor by which an observation's weight fades with each later one.
        min_count: Number of observations before which no costs are given.
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
        """Start from the results of trials (counts and seconds), before any observation.

        Each counts as one observation that never fades. They keep terms known that are never seen,
        or were long ago; and the first few observations are too alike to tell the cost of counts
        ten times as large.
        """
        if not tried:
            return
        terms, seconds = np.array([row for row, _ in tried]), np.array([took for _, took in tried])
        weights = 1 / np.maximum(seconds, LEAST_S) ** 2
        self._tried = (terms * weights[:, None]).T @ terms, terms.T @ (weights * seconds)
        self._most, self._seen = terms.max(axis=0), self._min_count
        self._costs = solve_nonnegative(*self._tried)

    def observe(self, counts: Sequence[float], seconds: float) -> None:
        """Add an observation: a count for each term, and the seconds that they took."""
        self._rows.append((counts, seconds))
        if len(self._rows) >= 256:
            self._fit()

    def costs(self) -> dict[str, float]:
        """Seconds by term, without terms never counted; empty while observations are few."""
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
        """Predicted seconds for these counts; 0 while observations are few."""
        self._fit()
        return float(self._costs @ counts) if self._seen >= self._min_count else 0.0

    def _fit(self) -> None:
        """Add the new observations to the sums, and solve for the costs."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        terms = np.array([row for row, _ in rows])
        seconds = np.array([took for _, took in rows])
        scale = np.full(len(rows), seconds.mean())
        if self._seen >= self._min_count:
            # Relative to predictions: relative to observations, errors would favour quick steps.
            scale = np.maximum(terms @ self._costs, LEAST_S)
            # The first prompts of a node that has only decoded are no outliers: cut to one, with
            # the weight of quick steps, they would make prompts look cheap for hundreds of steps.
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
    """Solve the normal equations, with negative results set to 0 and the others solved again."""
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
