"""The core's counters and gauges for Prometheus."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvbaton.messages.engine import HistogramCounts, Metrics

_NAME = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


class CoreCollector(Collector):
    """Shows the latest `wire.Metrics` in a registry.

    Args:
        latest: gives them; None before the first.
    """

    def __init__(self, latest: Callable[[], Metrics | None]) -> None:
        self._latest = latest

    def collect(self) -> Iterable[Metric]:
        """All metrics now; none before the core has sent any."""
        metrics = self._latest()
        if metrics is None:
            return []
        counters = families(metrics.counters, "counter")
        histograms = [_histogram(name, found) for name, found in metrics.histograms.items()]
        return [*counters, *families(metrics.gauges, "gauge"), *histograms]


def families(values: Mapping[str, float], kind: str) -> list[Metric]:
    """Values by name with labels (``name{label="x"}``) as one `Metric` per name."""
    found: dict[str, Metric] = {}
    for key, value in values.items():
        name, labels = split_name(key)
        counter = kind == "counter" and name.endswith("_total")
        family = name.removesuffix("_total") if counter else name
        shown = kind if counter or kind == "gauge" else "unknown"
        metric = found.setdefault(name, Metric(family, f"{family} of the engine core.", shown))
        metric.add_sample(name, labels, value)
    return list(found.values())


def _histogram(name: str, found: HistogramCounts) -> Metric:
    bounds = [*map(floatToGoString, found.bounds), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(found.counts), strict=True))
    return HistogramMetricFamily(
        name, f"{name} of the engine core.", buckets=buckets, sum_value=found.total
    )


def split_name(key: str) -> tuple[str, dict[str, str]]:
    """``name{a="x"}`` as its name and labels.

    Raises:
        ValueError: it is no Prometheus name.
    """
    match = _NAME.fullmatch(key)
    if match is None:
        raise ValueError(f"not a Prometheus name: {key!r}")
    labels = {name: _unescape(value) for name, value in _LABEL.findall(match.group(2) or "")}
    return match.group(1), labels


def _unescape(value: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], value)
