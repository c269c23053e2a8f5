"""Where an engine core's time went, step by step: for who looks for slow steps.

The core's thread is split without gaps, at a cost of some microseconds a step: what lies between
the results of two steps adds up to the second one's row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvbaton.engine.step import StepPlan, StepResult
from kvbaton.messages.engine import Output

KEPT = 2048
"""Steps; 20 s of those of 10 ms."""

PARTS = ("wait", "receive", "poll", "schedule", "launch", "update", "send", "report")
"""Of the core's thread: waiting for steps and messages; taking messages in; connectors (loads that
have come, hand-overs); planning; enqueueing; applying what was sampled; sending it; metrics."""

COLUMNS = (
    "number", "at", "tokens", "sequences", "new", "received", "ended", "step", "device",
    "threads", *PARTS,
)  # fmt: skip
"""Of a row. ``at``: when the result had been sent, monotonic. ``new``: sequences that begin in it;
``received`` and ``ended``: messages taken in and sequences that ended since the step before. Then
seconds: ``step``, as the core counts steps; ``device``, between its first and last kernel;
``threads``: CPU time of all other threads of this process (transfers and their verification, ZMQ),
which share the interpreter with the core's; and `PARTS`."""


class StepTimes:
    """A stopwatch for the core's thread, and the rows of the latest steps."""

    def __init__(self) -> None:
        self.rows: deque[tuple[float, ...]] = deque(maxlen=KEPT)
        self.received = 0
        self._plans: deque[tuple[int, int, int]] = deque()
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()
        self._others = time.process_time() - time.thread_time()

    def lap(self, part: str) -> None:
        """What has passed since the last lap was spent on this."""
        now = time.perf_counter()
        self._spent[part] += now - self._last
        self._last = now

    def launched(self, plan: StepPlan, num_tokens: int) -> None:
        """A step of so many tokens is on its way; results come in the order of steps."""
        self._plans.append((num_tokens, len(plan.steps), len(plan.new)))

    def over(self, result: StepResult, outputs: Sequence[Output], step_s: float) -> None:
        """A step's result was applied and sent."""
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
