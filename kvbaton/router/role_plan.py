"""Which nodes of role ``any`` only generate, where more than one has to and not all can do both.

Each request goes where it costs least, so nodes part by themselves one request at a time. But to
make one more of several that compute all the time generate only, what it computes must stop for as
long as texts take: too much for any one text, and too little for all that come. So how many do is
found from what comes: prompts that are in time with the nodes that are left to compute, the
shortest first, against texts that have a place at those that generate. All do both for as long as
prompts keep up in chunks that are short enough for who generates beside them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Set
from itertools import accumulate

from kvbaton.router.loads import NodeLoad

LAST = 128
"""Requests by which it is judged what comes,"""
LONGEST_S = 4.0
"""of at most so long ago,"""
LEAST = 32
"""and at least so many."""
PERIOD_S = 0.1
"""So often it is judged."""
HORIZON_S = 1.5
"""For so much later: a node that is to generate only has prompts to compute first."""
MEAN_STEP = 0.9
"""Of the objective, what steps of nodes take that are as full as may be,"""
FULL_STEP = 0.95
"""and the longest of them."""
FITS = 1.0, 1.5
"""Share of the time that decoding leaves which prompts may take where all nodes prefill and decode:
to begin with that, and to go on (sequences that have gathered at one node are soon too many)."""
LONG = 0.4
"""and prompts of this part of the time of a first token, each by the time that it takes."""
STEADY_S = 15.0
"""That is judged by a mean over so long, since the next burst would hit all nodes,"""
STEADY_LEAST = 16
"""with so many requests in `LONGEST_S` all the time."""
GAIN = 0.05
"""A change must have so many more requests in time: it costs some itself."""
FADE = 0.97
"""What a prompt's length still counts when the next one has come."""


class RolePlan:
    """How many nodes only generate, and which.

    Args:
        slo_s: objective of the tokens after the first.
        forgiven: share of a text's times between tokens that may be longer; None if their mean
            counts.
        chunk_s: what nodes let steps take that have prompts beside texts;
        late_s: but not for those whose first token would take so long then.

    Attributes:
        generating: ids of the nodes that only generate; none while all may do both.
        fits: no step need take longer than `chunk_s`, if all nodes do both.
        per_s: texts that each of these is given a second.
        prompt_tokens: of a prompt, on average.
    """

    def __init__(self, slo_s: float, forgiven: float | None, chunk_s: float, late_s: float) -> None:
        self._slo_s, self._forgiven = slo_s, forgiven
        self._chunk_s, self._late_s = chunk_s, late_s
        self._given = deque[tuple[float, float]](maxlen=LAST)
        self._due = self._at = -math.inf
        self._since, self._steady = math.inf, (0.0, 0.0)
        self.generating: Set[str] = frozenset()
        self.per_s = 0.0
        self.fits = False
        self.prompt_tokens = 1000.0

    def given(self, now: float, work_s: float) -> None:
        """A node was given a prompt that takes it so many seconds."""
        self._given.append((now, work_s))
        kept, self._at = math.exp((self._at - now) / STEADY_S), now
        work, squares = self._steady
        self._steady = kept * work + work_s, kept * squares + work_s**2

    def is_due(self, now: float, num_tokens: int) -> bool:
        """A request with so long a prompt came; whether to `plan` for it."""
        self.prompt_tokens += (1 - FADE) * (num_tokens - self.prompt_tokens)
        return now >= self._due

    def plan(
        self,
        now: float,
        loads: Mapping[str, NodeLoad],
        step_s: float,
        text_s: float,
        full_s: float,
        output_tokens: float,
        own: float,
    ) -> Set[str]:
        """Judge anew.

        Args:
            now: on the clock of `given`.
            loads: of all nodes of role ``any``, by id.
            step_s: of a step with nothing in it.
            text_s: that one more text adds to it.
            full_s: that a prompt adds to a step that is full of it.
            output_tokens: that a text has.
            own: of the texts that nodes have, those that this process has given them.

        Returns:
            Ids of those that only generate from now on, and did not before.
        """
        self._due = now + PERIOD_S
        given, before, count = self._given, self.generating, len(loads)
        while given and given[0][0] < now - LONGEST_S:
            given.popleft()
        self.generating = frozenset()
        if count < 2 or len(given) < STEADY_LEAST:
            self.fits, self._since, self._steady = False, now, (0.0, 0.0)
            return frozenset()
        each = 1 / max(now - given[0][0], 1e-3)
        per_s, works = each * len(given), sorted(work_s for _, work_s in given)
        busy = list(accumulate(each * work_s for work_s in works))  # nodes, by the shortest prompts
        here = {node_id: load.sequences - load.pending for node_id, load in loads.items()}
        lives_s, there = output_tokens * MEAN_STEP * self._slo_s, sum(here.values())
        texts = per_s * lives_s
        texts += (there - texts) * math.exp(-HORIZON_S / lives_s)
        needed = texts * text_s / max(FULL_STEP * self._slo_s - step_s, text_s)
        mean_s = step_s + text_s * texts / count
        here_s = step_s + text_s * there / count
        self.fits = self._fits(now, there / count, own / count, count, here_s, output_tokens)
        if self.fits or needed < 1 or len(given) < LEAST:
            return frozenset()
        if self._together(busy[-1] / count, mean_s, min(full_s, busy[-1] / per_s)):
            return frozenset()

        def merit(places: int) -> tuple[float, float]:
            in_time = bisect_right(busy, count - places) / len(busy)
            fullest = max(busy[-1] / (count - places), needed / places)
            return min(in_time, places / needed), -fullest

        best = max(range(1, count), key=merit)
        now_many = len(before) or sum(some > there / (2 * count) for some in here.values())
        if 0 < now_many < count and merit(best)[0] < merit(now_many)[0] + GAIN:
            best = now_many
        if best < 2:  # one does so without being told
            return frozenset()
        self.per_s = per_s / best
        ranked = sorted(
            loads, key=lambda i: (i in before, here[i], -loads[i].prompt_tokens), reverse=True
        )
        self.generating = frozenset(ranked[:best])
        return self.generating - before

    def _fits(
        self, now: float, here: float, own: float, count: int, step_s: float, tokens: float
    ) -> bool:
        """Whether all nodes can prefill and decode, in chunks that keep the ITL objective.

        The share of time that prompts took of late must fit into what decoding leaves of a step.
        Short outputs don't count: they are over when nodes have changed their roles.

        Args:
            now: on the clock of `given`.
            here: decoding sequences of a node, on average.
            own: of these, how many this process has given it, as it has the prompts in `given`.
            count: of nodes.
            step_s: of a step in which all of them decode, without prompts.
            tokens: of an output.
        """
        reach_s = STEADY_S * -math.expm1((self._since - now) / STEADY_S)
        lasts_s = tokens * self._chunk_s
        if reach_s < STEADY_S / 2 or lasts_s < LONGEST_S or self._chunk_s >= self._slo_s:
            return False
        if not own or not step_s:
            return False
        work, squares = (total / (count * reach_s) for total in self._steady)
        left = 1 - step_s / self._chunk_s
        in_time = squares < LONG * self._late_s * left * work
        return in_time and work * max(1.0, here / own) < FITS[self.fits] * left

    def _together(self, share: float, step_s: float, prompt_s: float) -> bool:
        """Whether all nodes can do both.

        Args:
            share: of each one's time that prompts take.
            step_s: of its steps without prompts.
            prompt_s: that prompts add to a step that has some.
        """
        if share >= 1 or step_s > MEAN_STEP * self._slo_s:
            return False
        if self._forgiven is None:
            return step_s <= MEAN_STEP * self._slo_s * (1 - share)
        slow = share / prompt_s
        slow /= slow + (1 - share) / step_s
        return step_s + prompt_s <= self._slo_s or slow <= self._forgiven
