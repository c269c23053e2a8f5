"""What a node tells the router of its speed: `NodeInfo.load`."""

from __future__ import annotations

from kvbaton.messages.engine import Metrics

RATES = {
    "encoder_row_s": (
        ("kvbaton_encoder_read_seconds_total", "kvbaton_encoder_encode_seconds_total"),
        "kvbaton_encoder_rows_total",
    ),
    "prompt_token_s": (("kvbaton_step_seconds_total",), "kvbaton_step_tokens_total"),
}
"""By name: counters of seconds, and what was done in that time."""
NEWEST = 0.5
"""Share of the newest report in what is told."""


class LoadMeter:
    """Turns totals into rates, from one report of the core to the next."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        self._before: dict[str, tuple[float, float]] = {}

    def measure(self, metrics: Metrics | None) -> dict[str, float]:
        """Take a report in; returns what is known by now."""
        counters = {} if metrics is None else metrics.counters
        for name, (timers, work) in RATES.items():
            now = sum(counters.get(timer, 0.0) for timer in timers), counters.get(work, 0.0)
            seconds, done = self._before.get(name, (0.0, 0.0))
            if now[1] > done:
                rate = (now[0] - seconds) / (now[1] - done)
                old = self._rates.get(name, rate)
                self._rates[name] = NEWEST * rate + (1 - NEWEST) * old
                self._before[name] = now
        return dict(self._rates)
