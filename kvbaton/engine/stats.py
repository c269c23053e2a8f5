"""What an engine core counts and times: requests, steps, and the scheduler's decisions."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbaton.messages.engine import HistogramCounts, Output

if TYPE_CHECKING:
    from kvbaton.engine.config import SpeculativeConfig
    from kvbaton.engine.step import StepPlan, StepResult

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)


class LatencyHistogram:
    """Counts observations in seconds, by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Add an observation."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def counts(self) -> HistogramCounts:
        """Counts so far."""
        return HistogramCounts(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


LATENCIES: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("kvbaton_time_to_first_token", "Until the first token of a prompt.", TTFT_BUCKETS),
    ("kvbaton_inter_token_latency", "Between outputs of one choice.", ITL_BUCKETS),
    ("kvbaton_e2e_request_latency", "Until the last token of a prompt.", E2E_BUCKETS),
)
"""Name without unit, help text and bucket bounds of each field of `RequestHistograms`."""


class RequestHistograms(NamedTuple):
    """Histograms that all requests of an engine or an endpoint are counted in."""

    first_token: LatencyHistogram
    inter_token: LatencyHistogram
    whole: LatencyHistogram


class RequestTimes:
    """Times the outputs of one request, from now until `close`.

    Args:
        seen: Histograms to count in.
    """

    __slots__ = ("_done", "_last", "_seen", "_start")

    def __init__(self, seen: RequestHistograms) -> None:
        self._seen, self._start = seen, time.monotonic()
        self._last: dict[int, float] = {}
        self._done: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def output(self, output: Output) -> None:
        """Count an output that has come now."""
        now = time.monotonic()
        if output.token_ids:
            last = self._last.get(output.choice)
            if last is not None:
                self._seen.inter_token.observe(now - last)
            elif not self._last:
                self._seen.first_token.observe(now - self._start)
            self._last[output.choice] = now
        if output.finish_reason is not None and output.finish_reason != "abort":
            self._done = now

    def close(self) -> None:
        """Count the whole request, since nothing more will come."""
        if self._done is not None:
            self._seen.whole.observe(self._done - self._start)


KEPT = 2048
"""Number of steps kept: 20 s of steps of 10 ms."""

PARTS = ("wait", "receive", "poll", "schedule", "launch", "update", "send", "report")
"""What the core's thread spends time on: waiting for steps and messages; handling messages; polling
connectors (arrived loads, hand-overs); planning; launching; applying results; sending; metrics."""

COLUMNS = (
    "number", "at", "tokens", "sequences", "new", "received", "ended", "step", "device",
    "threads", *PARTS,
)  # fmt: skip
"""Columns of a row. ``at``: monotonic time when the result had been sent. ``new``: sequences that
begin in the step; ``received`` and ``ended``: messages received and sequences ended since the
previous step. The others are seconds: ``step``, as the core counts steps; ``device``, between the
step's first and last kernel; ``threads``, CPU time of all other threads of this process (transfers
and their verification, ZMQ), which share the interpreter with the core's; and `PARTS`."""


class StepTimes:
    """Where an engine core's time goes, step by step, to find out why steps are slow.

    The time of the core's thread is split without gaps, at a cost of some microseconds per step:
    what passes between the results of two steps is in the second one's row.
    """

    def __init__(self) -> None:
        self.rows: deque[tuple[float, ...]] = deque(maxlen=KEPT)
        self.received = 0
        self._plans: deque[tuple[int, int, int]] = deque()
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()
        self._others = time.process_time() - time.thread_time()

    def lap(self, part: str) -> None:
        """Count the time since the last lap for a part."""
        now = time.perf_counter()
        self._spent[part] += now - self._last
        self._last = now

    def launched(self, plan: StepPlan, num_tokens: int) -> None:
        """Note the launch of a step; results come in the order of launches."""
        self._plans.append((num_tokens, len(plan.steps), len(plan.new)))

    def over(self, result: StepResult, outputs: Sequence[Output], step_s: float) -> None:
        """Add a row for a step whose result was applied and sent."""
        tokens, sequences, new = self._plans.popleft()
        others = time.process_time() - time.thread_time()
        ended = sum(output.finish_reason is not None for output in outputs)
        self.rows.append(
            (
                result.number, self._last, tokens, sequences, new, self.received, ended,
                step_s, result.device_s, others - self._others, *self._spent.values(),
            )
        )  # fmt: skip
        self.received, self._others = 0, others
        for part in PARTS:
            self._spent[part] = 0.0

    def dump(self) -> dict[str, Any]:
        """All rows, oldest first."""
        return {"columns": COLUMNS, "rows": list(self.rows)}


@dataclass
class Totals:
    """Monotonic totals.

    Attributes:
        received: Requests accepted.
        finished: Requests that have ended, by finish reason of their last choice.
        prompt_tokens: Prompt tokens by source: ``computed``, ``local_cache``, ``transferred``,
            ``store``.
        cached_at_source: Transferred prompt tokens that the source had in its prefix cache.
        generated: Generated tokens.
        preemptions: Preempted sequences.
        load_failures: Failed loads, from hand-overs and stores.
        drafts: Steps of a sequence with a draft.
        draft_tokens: Tokens of these drafts.
        accepted: Accepted draft tokens, by position in the draft.
    """

    received: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    cached_at_source: int = 0
    generated: int = 0
    preemptions: int = 0
    load_failures: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    def counters(self, speculative: SpeculativeConfig | None) -> dict[str, float]:
        """Totals by Prometheus name; those of drafts only if `speculative` is set."""
        values = {
            "kvbaton_requests_received_total": float(self.received),
            **_labelled("kvbaton_requests_finished_total", "reason", self.finished.items()),
            **_labelled("kvbaton_prompt_tokens_total", "source", self.prompt_tokens.items()),
            "kvbaton_prompt_tokens_cached_at_source_total": float(self.cached_at_source),
            "kvbaton_generation_tokens_total": float(self.generated),
            "kvbaton_preemptions_total": float(self.preemptions),
            "kvbaton_load_failures_total": float(self.load_failures),
        }
        if speculative is not None:  # under vLLM's names
            head, places = "kvbaton_spec_decode_num", speculative.num_speculative_tokens
            accepted = [(str(place), self.accepted[place]) for place in range(places)]
            values |= {
                f"{head}_drafts_total": float(self.drafts),
                f"{head}_draft_tokens_total": float(self.draft_tokens),
                f"{head}_accepted_tokens_total": float(self.accepted.total()),
                **_labelled(f"{head}_accepted_tokens_per_pos_total", "position", accepted),
            }
        return values


def _labelled(name: str, label: str, counts: Iterable[tuple[str, int]]) -> dict[str, float]:
    return {f'{name}{{{label}="{value}"}}': float(count) for value, count in counts}
