"""How long KV takes to come here, by sender, learned from deliveries.

A hand-over's last tokens and a fetched prefix use the same wire: both have the cost per token in
common, and each has a constant of its own (a hand-over is verified, a prefix is first asked for).
"""

from __future__ import annotations

from kvbaton.connectors.protocol.events import Crossing
from kvbaton.engine.cost_fit import CostFit
from kvbaton.messages.nodes import WIRE_COSTS

MEMORY = 0.95
"""Weight of past crossings when a new one comes: about the last 20 matter."""
MIN_CROSSINGS = 3
HALF_S = 60.0
"""Half-life in seconds of the reported costs without crossings: a wire that was slow once must not
keep its peer from ever being asked again."""
MAX_PEERS = 64
"""Maximum number of peers; the one without crossings for the longest time is forgotten first."""


class WireCosts:
    """Learns costs per peer from crossings."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[CostFit, float]] = {}  # and the end of its last crossing
        self._failures: dict[str, int] = {}  # in a row

    def observe(self, crossing: Crossing) -> None:
        """Add a crossing."""
        fit, before = self._peers.pop(crossing.address, (None, crossing.began))
        if fit is None:
            fit = CostFit(WIRE_COSTS, MEMORY, MIN_CROSSINGS)
        # A crossing that overlaps the one before only tells the cost of its tokens.
        alone = before <= crossing.began
        counts = alone and crossing.fetched, alone and not crossing.fetched, crossing.tokens
        fit.observe(counts, crossing.ended - max(before, crossing.began))
        self._peers[crossing.address] = fit, crossing.ended
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def ended(self, address: str, *, failed: bool) -> None:
        """Record whether a peer's transfer succeeded."""
        before = self._failures.pop(address, 0)
        if failed:
            self._failures[address] = before + 1
            if len(self._failures) > MAX_PEERS:
                del self._failures[next(iter(self._failures))]

    def gauges(self, now: float) -> dict[str, float]:
        """Gauges by Prometheus name: seconds per peer and term, and failures in a row per peer."""
        failures = {
            f'kvbaton_wire_failures{{peer="{peer}"}}': float(count)
            for peer, count in self._failures.items()
        }
        return failures | {
            f'kvbaton_wire_cost_seconds{{peer="{peer}",term="{term}"}}': (
                cost * 2.0 ** (min(0.0, ended - now) / HALF_S)
            )
            for peer, (fit, ended) in self._peers.items()
            for term, cost in fit.costs().items()
        }
