"""How long requests take, as the engine core sees them: from its receipt to its answers."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from kvbaton.messages.engine import HistogramCounts, Output

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)


class LatencyHistogram:
    """Counts observations, in seconds, by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def counts(self) -> HistogramCounts:
        """All of them."""
        return HistogramCounts(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


@dataclass(slots=True)
class _Timed:
    """A live request: when it came, and when what was last sent, by choice."""

    start: float
    last: dict[int, float] = field(default_factory=dict)
    done: float | None = None


class RequestLatencies:
    """Times live requests, by any frontend. Every clock is monotonic, in seconds."""

    def __init__(self) -> None:
        self._live: dict[str, _Timed] = {}
        self._first_token = LatencyHistogram(TTFT_BUCKETS)
        self._inter_token = LatencyHistogram(ITL_BUCKETS)
        self._whole = LatencyHistogram(E2E_BUCKETS)

    def added(self, request_id: str, now: float) -> None:
        """A request has come."""
        self._live[request_id] = _Timed(now)

    def output(self, request_id: str, output: Output, now: float) -> None:
        """Part of its answer leaves. Requests that are not known are ignored."""
        timed = self._live.get(request_id)
        if timed is None:
            return
        if output.token_ids:
            last = timed.last.get(output.choice)
            if last is not None:
                self._inter_token.observe(now - last)
            elif not timed.last:
                self._first_token.observe(now - timed.start)
            timed.last[output.choice] = now
        if output.finish_reason is not None and output.finish_reason != "abort":
            timed.done = now

    def ended(self, request_id: str) -> None:
        """A request is over."""
        timed = self._live.pop(request_id, None)
        if timed is not None and timed.done is not None:
            self._whole.observe(timed.done - timed.start)

    def histograms(self) -> dict[str, HistogramCounts]:
        """By Prometheus name."""
        return {
            "kvbaton_time_to_first_token_seconds": self._first_token.counts(),
            "kvbaton_inter_token_latency_seconds": self._inter_token.counts(),
            "kvbaton_e2e_request_latency_seconds": self._whole.counts(),
        }
