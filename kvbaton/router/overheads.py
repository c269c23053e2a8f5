"""Learns what lies between nodes' step times and the times that clients see.

That is sockets, queues inside engines, and other programs on the machine. Observed times to the
first token are regressed on modelled ones, older ones fading, and each node that prefills has a
factor of its own. What hand-overs of a pair take beyond their wire is learned likewise.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

FADE = 0.97
"""Weight of past observations when a new one comes."""
MIN_OBSERVED = 3
"""Number of observations before the regression is used."""
MEDIAN_STEP = 1.03
"""Factor by which each observation moves the estimate of a node's median."""
SLOPES = (0.25, 4.0)
"""Minimum and maximum ratio of observed to modelled time, beyond the constant."""
SURPRISE = 2.0
"""Maximum factor between an observation and what is usual; it is clamped to that. A prompt that
queued behind an unknown one says little about the next."""
HANDOVERS = 15
"""Number of a pair's last hand-overs whose median counts."""
HANDOVER_HALF_S = 30.0
"""Half-life in seconds of a pair's median without hand-overs: otherwise one bad time would keep the
pair from ever being tried again."""


@dataclass
class Overhead:
    """Observed against modelled times: ``observed = base + slope * modelled``.

    Sockets and queues are alike for all nodes, so one regression serves them all: a node that has
    only computed long prompts can't tell the constant from the slope. A few late tokens raise that
    mean, so a factor per node in `scales` follows the median of what is left. `sums` are the
    weighted, fading sums of 1, x, x^2, y and x y (x is modelled, y observed).
    """

    sums: tuple[float, float, float, float, float] = (0.0,) * 5
    base: float = 0.0
    slope: float = 1.0
    scales: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def predict(self, node_id: str, modelled: float) -> float:
        """Seconds to expect of a node whose step costs give `modelled` seconds."""
        return self.scales.get(node_id, 1.0) * (self.base + self.slope * modelled)

    def observe(self, node_id: str, modelled: float, observed: float) -> None:
        """Add an observation, weighted so that errors are relative to the modelled time.

        Errors relative to the observed time would bias predictions towards lucky observations.
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
    """How much later a target's first tokens came than wires and steps explain, for one pair."""

    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=HANDOVERS))
    median_s: float = 0.0
    at: float = 0.0

    def predict(self, now: float) -> float:
        """Seconds by which the target's next first token is expected to be late."""
        return self.median_s * math.exp2((self.at - now) / HANDOVER_HALF_S)

    def observe(self, late_s: float, now: float) -> None:
        """Add an observation."""
        self.late_s.append(late_s)
        self.median_s, self.at = median(self.late_s), now
