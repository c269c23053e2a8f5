"""What a supervisor and its worker processes tell each other, as MessagePack."""

from __future__ import annotations

from msgspec import Struct

from kvbaton.types import Count


class PublishedState(Struct, frozen=True, tag="state"):
    """What the supervisor knows and workers need; each replaces the one before.

    Attributes:
        data: as the owner of the workers encodes it.
    """

    data: bytes


class AskMetrics(Struct, frozen=True, tag="ask_metrics"):
    """Answered by `WorkerMetrics` with the same number."""

    number: Count


class WorkerStarted(Struct, frozen=True, tag="started"):
    """The worker serves."""


class WorkerMetrics(Struct, frozen=True, tag="metrics"):
    """What a worker counts, in Prometheus' text format."""

    number: Count
    text: str


class WorkerReport(Struct, frozen=True, tag="report"):
    """What a worker has learned and its supervisor should know.

    Attributes:
        data: as the owner of the workers encodes it.
    """

    data: bytes


ToWorker = PublishedState | AskMetrics
FromWorker = WorkerStarted | WorkerMetrics | WorkerReport
