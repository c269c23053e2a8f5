"""How long KV is on its way here, by who sends it, learned from what was delivered.

The way of a hand-over's last tokens and that of a prefix that was asked for are one wire: both say
what a token takes, and each what comes on top (the one is verified, the other asked for before).
"""

from __future__ import annotations

from kvbaton.connectors.protocol.events import Crossing
from kvbaton.engine.cost_fit import CostFit
from kvbaton.messages.nodes import WIRE_COSTS

MEMORY = 0.95
"""The last 20 or so matter."""
MIN_CROSSINGS = 3
HALF_S = 60.0
"""After so long without any, half of what they took is told: a wire that was slow once must not
keep its peer from being asked ever again."""
MAX_PEERS = 64
"""The one that was heard of longest ago is forgotten first."""


class WireCosts:
    """Takes crossings in, gives costs per peer out."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[CostFit, float]] = {}  # and when its last one ended
        self._failures: dict[str, int] = {}  # in a row

    def observe(self, crossing: Crossing) -> None:
        """One has come."""
        fit, before = self._peers.pop(crossing.address, (None, crossing.began))
        if fit is None:
            fit = CostFit(WIRE_COSTS, MEMORY, MIN_CROSSINGS)
        # What shared its way with another says only how long its tokens took beside them.
        alone = before <= crossing.began
        counts = alone and crossing.fetched, alone and not crossing.fetched, crossing.tokens
        fit.observe(counts, crossing.ended - max(before, crossing.began))
        self._peers[crossing.address] = fit, crossing.ended
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def ended(self, address: str, *, failed: bool) -> None:
        """What a peer was to send has come, or has not."""
        before = self._failures.pop(address, 0)
        if failed:
            self._failures[address] = before + 1
            if len(self._failures) > MAX_PEERS:
                del self._failures[next(iter(self._failures))]

    def gauges(self, now: float) -> dict[str, float]:
        """Seconds by Prometheus name, per peer and term; per peer failures in a row, if any."""
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
