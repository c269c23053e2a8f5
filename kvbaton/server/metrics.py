"""What the endpoint counts, and how it is shown."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvbaton.engine.latencies import E2E_BUCKETS, ITL_BUCKETS, TTFT_BUCKETS, LatencyHistogram
from kvbaton.messages.engine import Output


class SecondsHistogram(LatencyHistogram, Collector):
    """A Prometheus histogram that costs little per observation: every token is one or two.

    Args:
        name: without ``_seconds``.
        text: for people.
        bounds: upper bounds of the buckets, rising, in seconds.
        registry: where it is shown.
    """

    def __init__(
        self, name: str, text: str, bounds: tuple[float, ...], registry: CollectorRegistry
    ) -> None:
        super().__init__(bounds)
        self._name, self._text = f"{name}_seconds", text
        registry.register(self)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See `Collector`."""
        counts = self.counts()
        bounds = [*map(floatToGoString, counts.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(counts.counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=counts.total)


class HttpMetrics:
    """Counters of one endpoint, in a registry of their own.

    Args:
        latencies: time prompts here; a node leaves that to its engine, which sees those of all its
            frontends.

    Attributes:
        registry: where the owner may register collectors beside ours.
    """

    def __init__(self, *, latencies: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._timed = CollectorRegistry() if not latencies else self.registry
        self.requests = Counter(
            "kvbaton_http_requests",
            "Requests answered, by route and status.",
            ["method", "path", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvbaton_http_requests_in_flight", "Requests being served.", registry=self.registry
        )
        self.time_to_first_token = self._seconds(
            "kvbaton_time_to_first_token", "Until the first token of a prompt.", TTFT_BUCKETS
        )
        self.inter_token_latency = self._seconds(
            "kvbaton_inter_token_latency", "Between outputs of one choice.", ITL_BUCKETS
        )
        self.e2e_request_latency = self._seconds(
            "kvbaton_e2e_request_latency", "Until the last token of a prompt.", E2E_BUCKETS
        )

    def _seconds(self, name: str, text: str, bounds: tuple[float, ...]) -> SecondsHistogram:
        return SecondsHistogram(name, text, bounds, self._timed)

    @contextmanager
    def timed(self) -> Iterator[PromptTimes]:
        """Time a prompt."""
        times = PromptTimes(self)
        try:
            yield times
        finally:
            if times.ended_s is not None:
                self.e2e_request_latency.observe(times.ended_s)


class PromptTimes:
    """When the outputs of a prompt come.

    Args:
        metrics: where that is counted.

    Attributes:
        ended_s: seconds until its latest output that ends a choice; None if none did.
    """

    def __init__(self, metrics: HttpMetrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._last: dict[int, float] = {}
        self.ended_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def output(self, output: Output) -> None:
        """One has come."""
        if output.token_ids:
            now = time.monotonic()
            last = self._last.get(output.choice)
            if last is not None:
                self._metrics.inter_token_latency.observe(now - last)
            elif not self._last:
                self._metrics.time_to_first_token.observe(now - self._start)
            self._last[output.choice] = now
        if output.finish_reason is not None:
            self.ended_s = self.elapsed_s


def exposition(text: bytes) -> web.Response:
    """Answer of ``GET /metrics``: Prometheus' text format 0.0.4."""
    return web.Response(
        body=text,
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )
