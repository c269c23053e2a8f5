"""Metrics of endpoints and of the engine core, and their exposition for Prometheus."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from kvbaton.engine.stats import LATENCIES, LatencyHistogram, RequestHistograms
from kvbaton.messages.engine import HistogramCounts, Metrics
from kvbaton.server.metric_texts import text_of
from kvbaton.version import __version__

BUILD_INFO = "kvbaton_build_info"


class SecondsHistogram(LatencyHistogram, Collector):
    """A Prometheus histogram that costs little per observation: each token makes one or two.

    Args:
        name: Name without the unit.
        text: Help text.
        bounds: Upper bounds of the buckets, rising.
        registry: Registry to add it to.
    """

    unit = "seconds"

    def __init__(
        self, name: str, text: str, bounds: tuple[float, ...], registry: CollectorRegistry
    ) -> None:
        super().__init__(bounds)
        self._name, self._text = f"{name}_{self.unit}", text
        registry.register(self)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See `Collector`."""
        found = self.counts()
        yield HistogramMetricFamily(
            self._name, self._text, buckets=buckets_of(found), sum_value=found.total
        )


class RatioHistogram(SecondsHistogram):
    """A `SecondsHistogram` of ratios, without a unit."""

    unit = "ratio"


class LabelledCounter(Collector):
    """A Prometheus counter that costs little to increment: each request increments several.

    Args:
        name: Name without ``_total``.
        text: Help text.
        labels: Names of the labels.
        registry: Registry to add it to.

    Attributes:
        counts: Counts by values of the labels.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self.counts = defaultdict[tuple[str, ...], int](int)
        self._name, self._text, self._labels = name, text, labels
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See `Collector`."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self.counts.items():
            family.add_metric(values, count)
        yield family


class HttpMetrics:
    """Metrics of one endpoint, in a registry of their own.

    Args:
        latencies: Whether to expose latencies of requests. A node leaves this to its engine, which
            sees the requests of all its frontends.

    Attributes:
        registry: The registry; the owner may add collectors.
        requests: Requests answered, by method, path and status.
        in_flight: Number of requests being served.
        latencies: Histograms of request latencies.
    """

    def __init__(self, *, latencies: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.requests = LabelledCounter(
            "kvbaton_http_requests",
            "Requests answered, by route and status.",
            ("method", "path", "status"),
            self.registry,
        )
        self.in_flight = 0
        Gauge(
            "kvbaton_http_requests_in_flight", "Requests being served.", registry=self.registry
        ).set_function(lambda: self.in_flight)
        Gauge(BUILD_INFO, "1, with the version.", ["version"], registry=self.registry).labels(
            __version__
        ).set(1)
        timed = self.registry if latencies else CollectorRegistry()
        self.latencies = RequestHistograms(
            *(SecondsHistogram(name, text, bounds, timed) for name, text, bounds in LATENCIES)
        )


def exposition(text: bytes) -> web.Response:
    """Answer of ``GET /metrics``: Prometheus' text format 0.0.4."""
    return web.Response(
        body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )


_NAME = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


class CoreCollector(Collector):
    """Exposes the latest `messages.engine.Metrics` in a registry.

    Args:
        latest: Returns the latest metrics.
    """

    def __init__(self, latest: Callable[[], Metrics]) -> None:
        self._latest = latest

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        metrics = self._latest()
        counters = families(metrics.counters, "counter")
        histograms = dict[str, HistogramMetricFamily]()
        for key, found in metrics.histograms.items():
            name, labels = split_name(key)
            family = histograms.setdefault(
                name, HistogramMetricFamily(name, text_of(name), labels=list(labels))
            )
            family.add_metric(list(labels.values()), buckets_of(found), found.total)
        return [*counters, *families(metrics.gauges, "gauge"), *histograms.values()]


def families(values: Mapping[str, float], kind: str) -> list[Metric]:
    """Turn values by name with labels (``name{label="x"}``) into one `Metric` per name."""
    found: dict[str, Metric] = {}
    for key, value in values.items():
        name, labels = split_name(key)
        counter = kind == "counter" and name.endswith("_total")
        family = name.removesuffix("_total") if counter else name
        shown = kind if counter or kind == "gauge" else "unknown"
        metric = found.setdefault(name, Metric(family, text_of(family), shown))
        metric.add_sample(name, labels, value)
    return list(found.values())


def buckets_of(found: HistogramCounts) -> list[tuple[str, float]]:
    """Buckets in Prometheus' form: cumulative counts by upper bound."""
    bounds = [*map(floatToGoString, found.bounds), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(found.counts)), strict=True))


def split_name(key: str) -> tuple[str, dict[str, str]]:
    """Split ``name{a="x"}`` into name and labels.

    Raises:
        ValueError: It is not a Prometheus name.
    """
    match = _NAME.fullmatch(key)
    if match is None:
        raise ValueError(f"not a Prometheus name: {key!r}")
    labels = {
        label: _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)
        for label, value in _LABEL.findall(match.group(2) or "")
    }
    return match.group(1), labels


class MergedMetrics:
    """Adds up the metrics of workers, including those that have ended."""

    def __init__(self) -> None:
        self._latest: dict[int, str] = {}
        self._retired = ""

    def update(self, worker: int, text: str) -> None:
        """Store the latest metrics of a worker."""
        self._latest[worker] = text

    def retire(self, worker: int) -> None:
        """Note that a worker has ended: its counters stay in the sums, its gauges do not."""
        text = self._latest.pop(worker, None)
        if text is not None:
            self._retired = merged([self._retired, text], gauges=False)

    def text(self, own: str) -> str:
        """The sum of all workers' metrics and `own`, in Prometheus' text format."""
        return merged([own, merged([self._retired], gauges=False), *self._latest.values()])


def merged(texts: Iterable[str], *, gauges: bool = True) -> str:
    """Sum samples of equal name and labels, but take the earliest creation time (``_created``).

    `BUILD_INFO` stays 1, too.

    Args:
        texts: Metrics in Prometheus' text format 0.0.4, as `prometheus_client` writes it.
        gauges: Whether to keep gauges.
    """
    families: dict[str, Metric] = {}
    samples: dict[str, dict[tuple[object, ...], Sample]] = {}
    for family in itertools.chain.from_iterable(map(text_string_to_metric_families, texts)):
        name, is_time = family.name, family.name.endswith("_created")
        if family.type == "gauge" and not gauges and not is_time:
            continue
        families.setdefault(name, Metric(name, family.documentation, family.type))
        known = samples.setdefault(name, {})
        for sample in family.samples:
            key = sample.name, *sorted(sample.labels.items())
            old = known.setdefault(key, sample)
            if old is not sample:
                values = old.value, sample.value
                is_least = is_time or name == BUILD_INFO
                known[key] = old._replace(value=min(values) if is_least else sum(values))
    for name, family in families.items():
        family.samples = list(samples[name].values())
    return generate_latest(_Families(families.values())).decode()


class _Families(Collector):
    """Exposes metrics that were made elsewhere."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        return self._families
