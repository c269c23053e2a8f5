"""What the endpoint counts, and how it is shown."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvbaton.engine.latencies import E2E_BUCKETS, ITL_BUCKETS, TTFT_BUCKETS
from kvbaton.messages.engine import Output
from kvbaton.server.source import close


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

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{name}_seconds", text, buckets=buckets, registry=self._timed)

    async def observe(self, stream: AsyncIterator[Output]) -> AsyncGenerator[Output]:
        """Pass a prompt's outputs on and time them; closes `stream` when it is closed."""
        start = time.monotonic()
        last: dict[int, float] = {}
        done = None
        try:
            async for output in stream:
                if output.token_ids:
                    self._token(output.choice, last, start)
                if output.finish_reason is not None:
                    done = time.monotonic() - start
                yield output
        finally:
            if done is not None:
                self.e2e_request_latency.observe(done)
            await close(stream)

    def _token(self, choice: int, last: dict[int, float], start: float) -> None:
        now = time.monotonic()
        if not last:
            self.time_to_first_token.observe(now - start)
        if choice in last:
            self.inter_token_latency.observe(now - last[choice])
        last[choice] = now


def exposition(registry: CollectorRegistry) -> web.Response:
    """Answer of ``GET /metrics``: Prometheus' text format 0.0.4."""
    return web.Response(
        body=generate_latest(registry),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )
