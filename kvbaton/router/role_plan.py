"""Decides which nodes of role ``any`` only decode, where decoding needs more than one node.

The cost policy places one request at a time, so nodes specialize by themselves. It can't turn a
node that prefills all the time into one that only decodes: for that no prompts may come for as long
as sequences decode, which costs more than any single one of them is worth. So this plan derives the
number of such nodes from recent traffic: prompts that the other nodes can compute in time, shortest
first, against sequences that the decoding nodes have room for. All nodes do both while prefill
keeps up in chunks that are short enough for the sequences that decode beside them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Set
from itertools import accumulate

from kvbaton.router.loads import NodeLoad

MAX_REQUESTS = 128
"""Maximum number of recent requests that a plan is made from."""
LONGEST_S = 4.0
"""Maximum age of these requests in seconds."""
MIN_REQUESTS = 32
"""Minimum number of these requests for any node to be told to only decode."""
PERIOD_S = 0.1
"""Seconds between two plans."""
HORIZON_S = 1.5
"""Seconds ahead for which the number of decoding sequences is predicted: a node that stops
prefilling first has to finish its queued prompts."""
MEAN_STEP = 0.9
"""Mean decode step of a node at its capacity, as a share of the ITL objective."""
FULL_STEP = 0.95
"""Longest allowed decode step, as a share of the ITL objective."""
FITS = 1.0, 1.5
"""Share of the time left beside decode steps that prefill may take for chunks to count as fitting:
to start, and to stay so. The second is larger since a change costs: sequences that have gathered at
one node are soon too many there."""
LONG = 0.4
"""Maximum time of prompts in short chunks, as a share of `late_s`; a mean weighted by prefill
time."""
STEADY_S = 15.0
"""Time constant in seconds of the means that `fits` is judged by: any burst would hit all nodes."""
STEADY_LEAST = 16
"""Minimum number of requests in `LONGEST_S`, without a break, for that mean to continue."""
GAIN = 0.05
"""Minimum gain of a changed plan, as a share of requests in time: the change itself costs some."""
FADE = 0.97
"""Weight of the running mean of prompt lengths when a new one comes."""


class RolePlan:
    """Decides how many nodes only decode, and which.

    Args:
        slo_s: ITL objective in seconds.
        forgiven: Share of a sequence's ITLs that may exceed it; None if it is for their mean.
        chunk_s: Seconds that nodes let a step take that has prompt chunks and decoding sequences.
        late_s: Seconds to a first token beyond which a prompt is no longer held to small chunks.

    Attributes:
        generating: Ids of the nodes that only decode; empty while all nodes may do both.
        fits: Whether prefill keeps up in steps of at most `chunk_s` if all nodes do both.
        per_s: New sequences per second at each node of `generating`.
        prompt_tokens: Mean prompt length in tokens.
    """

    def __init__(self, slo_s: float, forgiven: float | None, chunk_s: float, late_s: float) -> None:
        self._slo_s, self._forgiven = slo_s, forgiven
        self._chunk_s, self._late_s = chunk_s, late_s
        self._given = deque[tuple[float, float]](maxlen=MAX_REQUESTS)
        self._due = self._at = -math.inf
        self._since, self._steady = math.inf, (0.0, 0.0)
        self.generating: Set[str] = frozenset()
        self.per_s = 0.0
        self.fits = False
        self.prompt_tokens = 1000.0

    def given(self, now: float, work_s: float) -> None:
        """Record that a node was given a prompt whose prefill takes `work_s` seconds."""
        self._given.append((now, work_s))
        kept, self._at = math.exp((self._at - now) / STEADY_S), now
        work, squares = self._steady
        self._steady = kept * work + work_s, kept * squares + work_s**2

    def is_due(self, now: float, num_tokens: int) -> bool:
        """Record a request of `num_tokens` prompt tokens; return whether it is time to `plan`."""
        self.prompt_tokens += (1 - FADE) * (num_tokens - self.prompt_tokens)
        return now >= self._due

    def plan(
        self,
        now: float,
        loads: Mapping[str, NodeLoad],
        step_s: float,
        sequence_s: float,
        full_s: float,
        output_tokens: float,
        own: float,
    ) -> Set[str]:
        """Make a new plan from recent requests.

        Args:
            now: Seconds on the clock of `given`.
            loads: Loads of all nodes of role ``any``, by node id.
            step_s: Seconds of an empty step.
            sequence_s: Seconds that one more decoding sequence adds to a step.
            full_s: Seconds that a prompt chunk of the whole token budget adds to a step.
            output_tokens: Mean number of tokens that a sequence generates.
            own: Decoding sequences that this process has routed; other workers' come on top.

        Returns:
            Ids of the nodes that only decode from now on and did not before.
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
        decoding = {node_id: load.sequences - load.pending for node_id, load in loads.items()}
        decode_s, total = output_tokens * MEAN_STEP * self._slo_s, sum(decoding.values())
        expected = per_s * decode_s
        expected += (total - expected) * math.exp(-HORIZON_S / decode_s)
        needed = 0.0
        if sequence_s:  # noise may hide what sequences cost: then one node has room for all
            needed = expected * sequence_s / max(FULL_STEP * self._slo_s - step_s, sequence_s)
        mean_s = step_s + sequence_s * expected / count
        now_s = step_s + sequence_s * total / count
        self.fits = self._fits(now, total / count, own / count, count, now_s, output_tokens)
        if self.fits or needed < 1 or len(given) < MIN_REQUESTS:
            return frozenset()
        if self._together(busy[-1] / count, mean_s, min(full_s, busy[-1] / per_s)):
            return frozenset()

        def merit(chosen: int) -> tuple[float, float]:
            in_time = bisect_right(busy, count - chosen) / len(busy)
            fullest = max(busy[-1] / (count - chosen), needed / chosen)
            return min(in_time, chosen / needed), -fullest

        best = max(range(1, count), key=merit)
        current = len(before) or sum(n > total / (2 * count) for n in decoding.values())
        if 0 < current < count and merit(best)[0] < merit(current)[0] + GAIN:
            best = current
        if best < 2:  # one node is left to the cost policy alone
            return frozenset()
        self.per_s = per_s / best
        ranked = sorted(
            loads, key=lambda i: (i in before, decoding[i], -loads[i].prompt_tokens), reverse=True
        )
        self.generating = frozenset(ranked[:best])
        return self.generating - before

    def _fits(
        self, now: float, here: float, own: float, count: int, step_s: float, tokens: float
    ) -> bool:
        """Whether all nodes can prefill and decode, in chunks that keep the ITL objective.

        The share of time that prefill took of late must fit into what decode steps leave. Short
        outputs do not count: they have ended when nodes have changed what they do.

        Args:
            now: Seconds on the clock of `given`.
            here: Mean number of decoding sequences per node.
            own: Mean number of these that this process has routed; `given` knows of their prompts.
            count: Number of nodes.
            step_s: Seconds of a step in which all of them decode, without prompts.
            tokens: Mean number of tokens that a sequence generates.
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
        """Whether all nodes can prefill and decode within the ITL objective.

        Args:
            share: Share of each node's time that prefill takes.
            step_s: Seconds of a step without prompts.
            prompt_s: Seconds that prefill adds to a step that has some.
        """
        if share >= 1 or step_s > MEAN_STEP * self._slo_s:
            return False
        if self._forgiven is None:
            return step_s <= MEAN_STEP * self._slo_s * (1 - share)
        if step_s + prompt_s <= self._slo_s:  # also if noise hides what prompts cost
            return True
        slow = share / prompt_s
        slow /= slow + (1 - share) / step_s
        return slow <= self._forgiven
