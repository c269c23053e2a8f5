"""The order in which requests are served: fair shares among tenants, and late requests last.

Shares follow start-time fair queueing: Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM
1996. Service is counted in tokens: prompt tokens once and generated ones twice, the weights of
Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Generated tokens are charged
when a request ends, so that the tags of a tenant never decrease and its requests keep their order.

Requests whose first tokens can't be in time go last, after Moore, "An n job, one machine sequencing
algorithm for minimizing the number of late jobs", Management Science 15 (1968): jobs are taken in
order of their due times, and whenever one would be late, the longest so far is put back. That
minimizes the number of late jobs, where first come, first served makes every request late once the
queue is longer than the objective. Here jobs are taken in order of service, and a request is put
back only for others of its tenant and priority, so no tenant's share changes.
"""

from __future__ import annotations

import heapq
from operator import attrgetter

from kvbaton.engine.request import Sequence

GENERATED_WEIGHT = 2
SERVED = -1
"""Start tag of a request that was served before; it precedes all others."""

MAX_TENANTS = 4096
"""Number of tenants beyond which past service is forgotten, so that all are equal again."""


ITS_TURN, ON_TIME, LATE = -1, 0, 1
"""Second part of a rank: `ON_TIME` until `LateRequests` says otherwise."""


class FairShares:
    """Start tags of requests; the request with the smallest tag is served first."""

    def __init__(self) -> None:
        self._now = 0
        self._finish: dict[str, int] = {}

    def enter(self, tenant: str, prompt_tokens: int) -> int:
        """Add a request to the queue.

        Returns:
            Its start tag: among requests of equal priority, the smallest is served first.
        """
        if len(self._finish) >= MAX_TENANTS:
            self._now = max(self._now, *self._finish.values())
            self._finish.clear()
        start = max(self._now, self._finish.get(tenant, 0))
        self._finish[tenant] = start + prompt_tokens
        return start

    def serve(self, start: int) -> None:
        """Note that a request with this tag runs: later requests do not get a smaller one."""
        self._now = max(self._now, start)

    def charge(self, tenant: str, generated_tokens: int) -> None:
        """Charge a tenant for the tokens of a request that has ended."""
        before = max(self._now, self._finish.get(tenant, 0))
        self._finish[tenant] = before + GENERATED_WEIGHT * generated_tokens


LATE_SHARE = 0.05
"""Time granted to late requests, as a share of the time spent on others, so that none starves."""

FADE = 0.97
"""Factor by which earlier plans fade in the estimate of the pace, per plan."""

PACES = (0.25, 8.0)
"""Smallest and largest plausible pace."""


class LateRequests:
    """Ranks prompts last that would be late, or make more others late.

    Prompts that are being computed are ranked, too: what is left of a long one that is late anyway
    waits for those that can be in time. The prefill time that requests state is corrected by how
    long others took here, beside decoding: if it were too short, all prompts would start in time
    and end late. A first token comes at the end of its step, which other sequences may prolong, so
    the longest recent step is added.
    """

    def __init__(self) -> None:
        self._owed_s = 0.0
        self._planned: tuple[float, float] | None = None
        self._begun_s = 0.0
        self._took_s = self._expected_s = 1.0
        self._step_s = 0.0
        self._ranked = False

    def _pace(self, now: float, left_s: float) -> float:
        """Seconds that each stated second of prefill took recently, while there was a queue."""
        before, left_before_s = self._planned or (now, left_s)
        if now > before:
            self._step_s = max(now - before, FADE * self._step_s)
            self._took_s = FADE * self._took_s + now - before
            done_s = left_before_s + self._begun_s - left_s
            self._expected_s = FADE * self._expected_s + max(0.0, done_s)
        if now > before or self._planned is None:
            self._planned, self._begun_s = (now, left_s), 0.0
        low, high = PACES
        return min(max(self._took_s / max(self._expected_s, 1e-6), low), high)

    def rank(self, waiting: list[Sequence], running: list[Sequence], now: float) -> None:
        """Sort a queue and the running sequences, both in order of rank.

        Args:
            waiting: The queue.
            running: Running sequences; those that decode are not ranked.
            now: Time on the scheduler's clock.
        """
        if len(waiting) + len(running) < 2:  # a single prompt makes no other late
            self._planned = None
            return
        timed = [s for s in waiting if s.request.due is not None and _may_be_late(s)]
        left = dict[Sequence, float]()
        if timed:
            left = {sequence: left_s for sequence in running if (left_s := _left_s(sequence))}
            timed += [s for s in left if s.request.due is not None and _may_be_late(s)]
        late = dict.fromkeys(timed, ON_TIME)
        if self._ranked:  # of these, some are computed by now
            late |= {s: ON_TIME for s in running if s.rank[1] == LATE or not _left_s(s)}
        if len(timed) < 2:
            self._planned = None
        else:
            pace = self._pace(now, sum(left.values()))
            late |= self._late(timed, left, pace, now)
        changed = [sequence for sequence, kind in late.items() if sequence.rank[1] != kind]
        for sequence in changed:
            sequence.rank = sequence.rank[0], late[sequence], *sequence.rank[2:]
        if changed:
            self._ranked = any(sequence.rank[1] for sequence in running)
            for queue in (waiting, running):
                queue.sort(key=_rank)

    def _late(
        self, timed: list[Sequence], left: dict[Sequence, float], pace: float, now: float
    ) -> dict[Sequence, int]:
        """Second part of the rank of prompts with objectives, some of which are computed now."""
        end = now + pace * (sum(left.values()) - sum(left.get(s, 0.0) for s in timed))
        timed.sort(key=lambda sequence: (sequence.rank[0], *sequence.rank[2:]))
        late = dict.fromkeys(timed, ON_TIME)
        longest: dict[tuple[int, str], list[tuple[float, int, Sequence]]] = {}
        for number, sequence in enumerate(timed):
            spec, due = sequence.request.spec, sequence.request.due
            assert due is not None, "the others are left out"
            rivals = longest.setdefault((spec.priority, spec.tenant), [])
            work_s = pace * left.get(sequence, spec.prefill_s)
            heapq.heappush(rivals, (-work_s, -number, sequence))
            end += work_s
            if end + self._step_s > due:
                less, _, steps_back = heapq.heappop(rivals)
                end += less
                late[steps_back] = LATE
        # Those of a priority of which none is in time are put back for nobody: requests without an
        # objective must not pass them.
        in_time = {sequence.rank[0] for sequence in timed if late[sequence] == ON_TIME}
        late = {s: one if s.rank[0] in in_time else ON_TIME for s, one in late.items()}
        first = next((sequence for sequence in timed if late[sequence] == LATE), None)
        if first is None:
            self._owed_s = 0.0
        elif self._owed_s >= (work_s := left.get(first, first.request.spec.prefill_s)):
            self._owed_s -= work_s
            late[first] = ITS_TURN
        return late

    def leaves(self, sequence: Sequence) -> None:
        """Note that a queued sequence runs from now on."""
        work_s = sequence.request.spec.prefill_s
        self._begun_s += work_s
        self._ranked = self._ranked or sequence.rank[1] != ON_TIME
        timed = sequence.request.due is not None and not sequence.num_generated
        if timed and sequence.rank[1] == ON_TIME:
            self._owed_s += LATE_SHARE * work_s


_rank = attrgetter("rank")


def _may_be_late(sequence: Sequence) -> bool:
    """Whether a prompt with an objective is not on its turn after it was late."""
    return not sequence.num_generated and sequence.rank[1] != ITS_TURN


def _left_s(sequence: Sequence) -> float:
    """Stated prefill seconds that are left of a prompt being computed; 0 in its last step.

    From then on choices may be forked from it, which must come after it.
    """
    request, known = sequence.request, sequence.request.num_known
    lacking = known - sequence.num_computed
    if lacking <= 0 or sequence.pending or not request.spec.prefill_s:
        return 0.0
    return request.spec.prefill_s * lacking / max(lacking, known - (request.cached_tokens or 0))
