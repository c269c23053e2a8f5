"""In which order requests are served: fair shares among tenants, and who of a queue goes last.

Shares are start-time fair queueing: Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996.
Service is counted in tokens, those of a prompt once and generated ones twice, as Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024, weigh them; what is generated is charged
when it is known, so that tags of one tenant never go back and its requests keep their order.

Last go those that can't have their first tokens in time. Moore, "An n job, one machine sequencing
algorithm for minimizing the number of late jobs", Management Science 15 (1968): in order of their
due times, whenever one would be late, the longest so far steps back. So as few as possible are
late, where first come, first served makes all of a queue late that has become longer than the
objective. Here the order is that of service, and one steps back only for others of its own tenant
and priority: neither's share changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from kvbaton.engine.request import Sequence

GENERATED_WEIGHT = 2
SERVED = -1
"""Start tag of what has had its turn before: it goes first."""

MAX_TENANTS = 4096
"""Beyond them, what all have had is forgotten: they are equal again, and none goes back."""


class FairShares:
    """Start tags of requests; who has the least goes first."""

    def __init__(self) -> None:
        self._now = 0
        self._finish: dict[str, int] = {}

    def enter(self, tenant: str, prompt_tokens: int) -> int:
        """A request joins the queue.

        Returns:
            Its start tag: among requests of equal priority the smallest goes first.
        """
        if len(self._finish) >= MAX_TENANTS:
            self._now = max(self._now, *self._finish.values())
            self._finish.clear()
        start = max(self._now, self._finish.get(tenant, 0))
        self._finish[tenant] = start + prompt_tokens
        return start

    def serve(self, start: int) -> None:
        """A request with this tag runs: nobody who comes now is to go before it."""
        self._now = max(self._now, start)

    def charge(self, tenant: str, generated_tokens: int) -> None:
        """A request has ended."""
        before = max(self._now, self._finish.get(tenant, 0))
        self._finish[tenant] = before + GENERATED_WEIGHT * generated_tokens


LATE_SHARE = 0.05
"""What steps back gets so much of the time that those take who go before it, lest it starve."""

FADE = 0.97
"""What a plan counts for the pace when the next one is made."""

PACES = (0.25, 8.0)
"""Between which the pace is believed."""


class LateRequests:
    """Ranks those of a queue that would be late, or make more others late, behind the others.

    How long prompts take by what requests say is corrected by how long others took here, beside
    what is generated: if too little were expected, all would be begun in time and end late. Their
    tokens come when their steps end, which others may fill: as much as the longest step later.
    """

    def __init__(self) -> None:
        self._owed_s = 0.0
        self._turn: Sequence | None = None
        self._planned: tuple[float, float] | None = None
        self._begun_s = 0.0
        self._took_s = self._expected_s = 1.0
        self._step_s = 0.0

    def _pace(self, now: float, left_s: float) -> float:
        """Seconds that a second of prompts has taken of late, while there was a queue."""
        if self._planned is not None:
            before, left_before_s = self._planned
            self._step_s = max(now - before, FADE * self._step_s)
            self._took_s = FADE * self._took_s + now - before
            done_s = left_before_s + self._begun_s - left_s
            self._expected_s = FADE * self._expected_s + max(0.0, done_s)
        self._planned, self._begun_s = (now, left_s), 0.0
        low, high = PACES
        return min(max(self._took_s / max(self._expected_s, 1e-6), low), high)

    def rank(self, waiting: list[Sequence], running: Iterable[Sequence], now: float) -> None:
        """Bring a queue into order.

        Args:
            waiting: the queue, in order of rank.
            running: whose prompts are computed first.
            now: on the scheduler's clock.
        """
        timed = list[Sequence]()
        if len(waiting) > 1:  # alone, one can only be late itself
            timed = [s for s in waiting if s.request.due is not None and not s.num_generated]
        if len(timed) < 2:
            self._planned = None
            return
        left_s = sum(map(_left_s, running))
        pace = self._pace(now, left_s)
        end = now + pace * left_s
        timed.sort(key=lambda sequence: (sequence.rank[0], *sequence.rank[2:]))
        late = dict.fromkeys(timed, False)
        longest: dict[tuple[int, str], list[tuple[float, int, Sequence]]] = {}
        for number, sequence in enumerate(timed):
            spec, due = sequence.request.spec, sequence.request.due
            assert due is not None, "the others are left out"
            rivals = longest.setdefault((spec.priority, spec.tenant), [])
            work_s = pace * spec.prefill_s
            heapq.heappush(rivals, (-work_s, -number, sequence))
            end += work_s
            if end + self._step_s > due:
                less, _, steps_back = heapq.heappop(rivals)
                end += less
                late[steps_back] = True
        first = next((sequence for sequence in timed if late[sequence]), None)
        self._turn = None
        if first is None:
            self._owed_s = 0.0
        elif self._owed_s >= first.request.spec.prefill_s:
            self._turn, late[first] = first, False
        for sequence, is_late in late.items():
            sequence.rank = sequence.rank[0], is_late, *sequence.rank[2:]
        waiting.sort(key=lambda sequence: sequence.rank)

    def leaves(self, sequence: Sequence) -> None:
        """One of the queue is computed now, and is as good as the others from now on."""
        work_s = sequence.request.spec.prefill_s
        self._begun_s += work_s
        if sequence.rank[1] or sequence is self._turn:
            self._owed_s = max(0.0, self._owed_s - work_s)
            sequence.rank = sequence.rank[0], False, *sequence.rank[2:]
        elif sequence.request.due is not None and not sequence.num_generated:
            self._owed_s += LATE_SHARE * work_s


def _left_s(sequence: Sequence) -> float:
    """What is left of a prompt that is being computed."""
    request, known = sequence.request, sequence.request.num_known
    lacking = known - sequence.num_computed
    if lacking <= 0 or not request.spec.prefill_s:
        return 0.0
    return request.spec.prefill_s * lacking / max(lacking, known - (request.cached_tokens or 0))
