"""Mirrors the order in which a node's engine serves the prompts that this router has given it.

With a TTFT objective, engines order their queues so that as few prompts as possible are late
(`kvbaton.engine.service_order`, Moore's algorithm): whenever one would be late, the longest prompt
so far is deferred to the end. So a prompt does not wait for deferred ones, and one that comes to a
full queue is in time if a longer one is there. `PromptQueue` applies the same rule as prompts are
given to a node and are computed, but to none that has begun: an engine lets one yield that will be
late, but nodes whose long prompts seemed to wait for all others were given too many.
"""

from __future__ import annotations

from itertools import islice


class PromptQueue:
    """The prompts of this router at one node.

    Attributes:
        deferred_s: Seconds of prefill of all deferred prompts.
        longest_s: Seconds of prefill of the prompt that would be deferred next: the longest of
            those in order, without the first, which has begun.
    """

    def __init__(self) -> None:
        self.deferred_s = self.longest_s = 0.0
        self._in_order: dict[str, float] = {}
        self._deferred: dict[str, float] = {}
        self._unforeseen: set[str] = set()

    def add(self, request_id: str, work_s: float, *, full: bool, late: bool) -> None:
        """Add a prompt that was given to the node.

        Args:
            request_id: Id of its request.
            work_s: Seconds of prefill that it takes.
            full: Whether some prompt of the queue will be late because of it.
            late: Whether it is the one to be deferred; otherwise the longest is.
        """
        if late and self._in_order:
            self._defer(request_id, work_s)
            return
        if full and self.longest_s:
            self._unforeseen.add(request_id)
            waiting = islice(self._in_order, 1, None)
            longest = max(waiting, key=self._in_order.__getitem__)
            self._defer(longest, self._in_order.pop(longest))
            self._measure()
        if self._in_order:
            self.longest_s = max(self.longest_s, work_s)
        self._in_order[request_id] = work_s

    def remove(self, request_id: str) -> bool:
        """Remove a prompt that is computed or given up; whether its place was as predicted."""
        if self._in_order.pop(request_id, None) is None:
            self.deferred_s -= self._deferred.pop(request_id, 0.0)
        if not self._in_order and self._deferred:  # the first of these has begun
            first = next(iter(self._deferred))
            self._in_order[first] = self._deferred.pop(first)
            self.deferred_s -= self._in_order[first]
        if not self._deferred:
            self.deferred_s = 0.0
        self._measure()
        foreseen = request_id not in self._unforeseen
        self._unforeseen.discard(request_id)
        return foreseen

    def _defer(self, request_id: str, work_s: float) -> None:
        self._deferred[request_id] = work_s
        self._unforeseen.add(request_id)
        self.deferred_s += work_s

    def _measure(self) -> None:
        self.longest_s = max(islice(self._in_order.values(), 1, None), default=0.0)
