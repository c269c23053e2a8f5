"""The router's metrics, beside those of its endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvbaton.router.loads import IDLE, NodeLoads
from kvbaton.router.membership import Member, failing
from kvbaton.server.metrics import LabelledCounter, RatioHistogram, SecondsHistogram

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
MOVE_GAP_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
RATIO_BUCKETS = (0.01, 0.02, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
OVERHEAD_BUCKETS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)


OUTCOMES = ("finished", "failed", "cancelled", "refused")


class RouterMetrics:
    """Metrics of dispatch and relay.

    Args:
        registry: Registry to add them to.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"kvbaton_router_{name}", text, registry=registry)

        def labelled(name: str, text: str, labels: Sequence[str]) -> LabelledCounter:
            return LabelledCounter(f"kvbaton_router_{name}", text, labels, registry)

        def seconds(name: str, text: str, bounds: tuple[float, ...]) -> SecondsHistogram:
            return SecondsHistogram(f"kvbaton_router_{name}", text, bounds, registry)

        def ratio(name: str, text: str) -> RatioHistogram:
            return RatioHistogram(f"kvbaton_router_{name}", text, RATIO_BUCKETS, registry)

        self.requests = labelled("requests", "Requests ended, by outcome.", ("outcome",))
        for outcome in OUTCOMES:  # present from the start, so that rates start at 0
            self.requests.counts[(outcome,)] = 0
        self.node_requests = labelled(
            "node_requests", "Requests sent to nodes, by what for.", ("node", "part")
        )
        self.node_request_failures = labelled(
            "node_request_failures", "Of those, how many failed.", ("node", "part")
        )
        self.retries = counter("retries", "Attempts after the first.")
        self.refused_retries = counter(
            "retries_refused", "Attempts that were not made: the budget was spent."
        )
        self.moves = labelled(
            "moves", "Running requests that went on at another node, or failed to.", ("outcome",)
        )
        self.move_gap = seconds(
            "move_gap", "From the last token of one node to the next one's.", MOVE_GAP_BUCKETS
        )
        self.items = labelled("items", "Items given to nodes, by who is to encode.", ("where",))
        self.first_token = seconds(
            "first_token", "From dispatch to the first token.", FIRST_TOKEN_BUCKETS
        )
        self.ttft_error = seconds(
            "ttft_error", "Between predicted and observed times to first tokens.", OVERHEAD_BUCKETS
        )
        self.ttft_relative_error = ratio("ttft_error", "The same as a share of the observed time.")
        self.regret = seconds(
            "regret",
            "What routes cost more than the next best way, as far as first tokens tell.",
            OVERHEAD_BUCKETS,
        )
        self.itl_relative_error = ratio(
            "itl_error",
            "Between predicted and observed times per token after the second, as a share of these.",
        )
        self.overhead = seconds(
            "overhead", "From a node's output being read to its being relayed.", OVERHEAD_BUCKETS
        )


IN_FLIGHT = (
    ("kvbaton_router_in_flight", "Requests a node generates for.", "sequences"),
    ("kvbaton_router_prompt_tokens_in_flight", "Being prefilled.", "prompt_tokens"),
    ("kvbaton_router_item_rows_in_flight", "Being encoded.", "rows"),
)
"""Gauges by node: name, help text, and field of `NodeLoad`."""


class NodeCollector(Collector):
    """Gauges by node, computed on collection.

    Args:
        members: All nodes, by id.
        loads: Their loads.
    """

    def __init__(self, members: Mapping[str, Member], loads: NodeLoads) -> None:
        self._members = members
        self._loads = loads

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Requests, prompt tokens and rows in flight by node, and nodes by state."""
        loads = {**dict.fromkeys(self._members, IDLE), **self._loads.own}
        for name, text, what in IN_FLIGHT:
            in_flight = GaugeMetricFamily(name, text, labels=["node"])
            for node, load in loads.items():
                in_flight.add_metric([node], getattr(load, what))
            yield in_flight
        nodes = GaugeMetricFamily(
            "kvbaton_router_nodes", "1 per node.", labels=["node", "role", "state"]
        )
        for member in self._members.values():
            nodes.add_metric([member.info.node_id, member.info.role, member.state], 1)
        yield nodes
        failures = GaugeMetricFamily(
            "kvbaton_router_pair_failures",
            "Of pairs that get trials only: hand-overs and prefixes that failed in a row.",
            labels=["source", "target"],
        )
        for source, target, pair in failing(self._members.values()):
            failures.add_metric([source, target], pair.failures)
        yield failures
