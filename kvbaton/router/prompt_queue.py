"""Which prompts at a node wait in turn, and which have stepped back, as its engine has them.

With an objective of first tokens engines serve their queues so that as few prompts as possible are
late (`kvbaton.engine.service_order`): whenever one would be, the longest so far goes last. So a
prompt does not wait for those that have, and one that comes to a full queue is in time if a longer
one is there. This follows the same rule as prompts are given to a node and are computed.
"""

from __future__ import annotations

from itertools import islice


class PromptQueue:
    """Prompts of ours at one node.

    Attributes:
        late_s: seconds of work of those that have stepped back.
        longest_s: of the longest that would step back next: not the one that has begun.
    """

    def __init__(self) -> None:
        self.late_s = self.longest_s = 0.0
        self._in_turn: dict[str, float] = {}
        self._late: dict[str, float] = {}
        self._unforeseen: set[str] = set()

    def add(self, request_id: str, work_s: float, *, full: bool, late: bool) -> None:
        """A prompt of so many seconds was given to the node.

        Args:
            request_id: whose it is.
            work_s: that it takes.
            full: all of the queue can't be in time with it.
            late: it is the one that steps back, else the longest does.
        """
        if late and self._in_turn:
            self._step_back(request_id, work_s)
            return
        if full and self.longest_s:
            self._unforeseen.add(request_id)
            waiting = islice(self._in_turn, 1, None)
            longest = max(waiting, key=self._in_turn.__getitem__)
            self._step_back(longest, self._in_turn.pop(longest))
            self._measure()
        if self._in_turn:
            self.longest_s = max(self.longest_s, work_s)
        self._in_turn[request_id] = work_s

    def remove(self, request_id: str) -> bool:
        """A prompt is computed, or given up; whether it had its turn when that was expected."""
        if self._in_turn.pop(request_id, None) is None:
            self.late_s -= self._late.pop(request_id, 0.0)
        if not self._in_turn and self._late:  # it has begun: others wait for it
            first = next(iter(self._late))
            self._in_turn[first] = self._late.pop(first)
            self.late_s -= self._in_turn[first]
        if not self._late:
            self.late_s = 0.0
        self._measure()
        foreseen = request_id not in self._unforeseen
        self._unforeseen.discard(request_id)
        return foreseen

    def _step_back(self, request_id: str, work_s: float) -> None:
        self._late[request_id] = work_s
        self._unforeseen.add(request_id)
        self.late_s += work_s

    def _measure(self) -> None:
        self.longest_s = max(islice(self._in_turn.values(), 1, None), default=0.0)
