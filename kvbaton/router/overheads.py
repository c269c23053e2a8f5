"""What lies between nodes' steps and clients, learned from the times that clients see.

That is sockets, queues inside the engine, other programs of the machine: observed times to the
first token are regressed on predicted ones, older ones fading, and each node that prefills has a
factor of its own. What hand-overs of a pair take beyond their wire is learned likewise.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

FADE = 0.97
"""What an observation still counts when the next one has come."""
MIN_OBSERVED = 3
MEDIAN_STEP = 1.03
"""By so much each observation moves the median that is followed."""
SLOPES = (0.25, 4.0)
"""Observed times may be so many times what was predicted, beyond a constant."""
SURPRISE = 2.0
"""An observation counts as at most so many times what was usual, and at least such a part of it: a
prompt that stood behind one of which nothing was known says little of the next."""
HANDOVERS = 15
"""Of a pair, whose median counts."""
HANDOVER_HALF_S = 30.0
"""After so long without a hand-over half of what it took is believed, or one bad time would keep
the pair from being tried ever again."""


@dataclass
class Overhead:
    """Observed against modelled times: ``observed = base + slope * modelled``.

    Sockets and queues on the way are alike for all nodes, so all of them are taken together: who
    has only computed long prompts can't tell the constant from the factor. A few late tokens lift
    that mean; what is left of each node's differs by a factor of its own, which follows the median.
    """

    sums: tuple[float, float, float, float, float] = (0.0,) * 5
    base: float = 0.0
    slope: float = 1.0
    scales: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def predict(self, node_id: str, modelled: float) -> float:
        """Seconds that are to be expected of a node whose figures give `modelled`."""
        return self.scales.get(node_id, 1.0) * (self.base + self.slope * modelled)

    def observe(self, node_id: str, modelled: float, observed: float) -> None:
        """Take one in, errors counting as shares of what was modelled.

        As shares of what was observed they would draw predictions towards the lucky ones.
        """
        low, high = SLOPES
        late = observed > self.predict(node_id, modelled)
        scale = self.scales.get(node_id, 1.0) * (MEDIAN_STEP if late else 1 / MEDIAN_STEP)
        self.scales[node_id] = min(max(scale, low), high)
        if self.count >= MIN_OBSERVED:
            usual = self.base + self.slope * modelled
            observed = min(max(observed, usual / SURPRISE), usual * SURPRISE)
        weight = 1.0 / max(modelled, 1e-4) ** 2
        n, x, xx, y, xy = self.sums
        n, x = FADE * n + weight, FADE * x + weight * modelled
        xx = FADE * xx + weight * (modelled * modelled)
        y, xy = FADE * y + weight * observed, FADE * xy + weight * (modelled * observed)
        self.sums = n, x, xx, y, xy
        self.count += 1
        if self.count < MIN_OBSERVED:
            return
        spread = n * xx - x * x
        slope = (n * xy - x * y) / spread if spread > 1e-3 * n * xx else 1.0
        self.slope = min(max(slope, low), high)
        self.base = (y - self.slope * x) / n
        if self.base < 0:
            self.base, self.slope = 0.0, min(max(xy / xx, low), high)


@dataclass
class Handovers:
    """How much later second tokens came for hand-overs of one pair than wires and steps explain."""

    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=HANDOVERS))
    median_s: float = 0.0
    at: float = 0.0

    def predict(self, now: float) -> float:
        """Seconds that the next one is to be expected later."""
        return self.median_s * math.exp2((self.at - now) / HANDOVER_HALF_S)

    def observe(self, late_s: float, now: float) -> None:
        """Take one in."""
        self.late_s.append(late_s)
        self.median_s, self.at = median(self.late_s), now
