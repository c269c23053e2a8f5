"""The work that a router has in flight at its nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import add
from typing import Self

from msgspec import Struct
from msgspec.structs import astuple

from kvbaton.messages.nodes import NodeInfo


class Counts(Struct, frozen=True):
    """Numbers that are added field by field."""

    def plus(self, other: Self) -> Self:
        """The sum, field by field."""
        return type(self)(*map(add, astuple(self), astuple(other)))


class NodeLoad(Counts, frozen=True):
    """Work that the router has in flight at a node.

    Attributes:
        prompt_tokens: Prompt tokens that the node has yet to prefill, without those cached there.
        sequences: Requests that it decodes or will decode.
        tokens: Prompt and generated tokens of those.
        rows: Rows of items that it has to encode.
        pending: Number of `sequences` that have no token yet.
        prefill_us: Microseconds that prefill of those prompts is expected to take.
        cached_tokens: Tokens of the same prompts that are cached there.
        late: Number of `sequences` whose first token was late, or is expected to be.
    """

    prompt_tokens: int = 0
    sequences: int = 0
    tokens: int = 0
    rows: int = 0
    pending: int = 0
    prefill_us: int = 0
    cached_tokens: int = 0
    late: int = 0

    @property
    def hopeful(self) -> float:
        """Share of `sequences` that may still meet all objectives; others can't miss them again."""
        return 1.0 - self.late / self.sequences if self.sequences else 1.0

    def taken(self, node: NodeInfo, tokens: int = 0) -> float:
        """Share of a node's room for sequences that is taken.

        That is the largest of the shares of its KV blocks, and of the sequences and tokens that may
        be handed over to it at a time.

        Args:
            node: The node.
            tokens: Tokens of one more prompt that is handed over; 0 for none.
        """
        limits, share = node.prompt_limits, 0.0
        if node.num_blocks:
            share = (self.tokens + tokens) / (node.num_blocks * node.block_size)
        if limits is None or not limits.choices or not limits.received:
            return share
        expected = self.tokens * self.pending / self.sequences if self.pending else 0.0
        seats = (self.pending + bool(tokens)) / limits.choices
        return max(share, seats, (expected + tokens) / limits.received)


class RouterTotals(Counts, frozen=True):
    """Totals of a router, or of one worker of it.

    Attributes:
        waiting: Requests that have no token yet.
        running: Requests that have a token and have not ended.
        finished: Requests that were answered to the end.
        failed: Requests that failed, or were refused because of the nodes' state.
        tokens: Tokens that were relayed.
    """

    waiting: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0


IDLE = NodeLoad()
Queue = tuple[int, str]
"""Priority and tenant of requests."""
REPORT_AGE_S = 3.0
"""Maximum age in seconds of a node's last report: a period of its engine's reports, and a
heartbeat."""


class NodeLoads(Mapping[str, NodeLoad]):
    """Loads by node id.

    Args:
        clock: Monotonic seconds.

    Attributes:
        own: Loads by this process; idle nodes have no entry.
        others: Loads by other workers of this router, which are added to ours.
        queues: Prompt tokens of this process by node id, then by priority and tenant.
        other_queues: The same of other workers of this router.
        prefill_since: By node id, when it began the prompt of this process that it computes now, as
            far as can be seen from here; on the monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.prefill_since: dict[str, float] = {}
        self.own: dict[str, NodeLoad] = {}
        self.queues: dict[str, dict[Queue, int]] = {}
        self.other_queues: Mapping[str, Mapping[Queue, int]] = {}
        self.others: Mapping[str, NodeLoad] = {}
        self._peaks: dict[str, tuple[float, int, int]] = {}

    def change(self, node_id: str, old: NodeLoad, new: NodeLoad, queue: Queue = (0, "")) -> None:
        """Replace one request's load at a node; it is `IDLE` before the request and after it."""
        if more := new.prompt_tokens - old.prompt_tokens:
            queues = self.queues.setdefault(node_id, {})
            queues[queue] = queues.get(queue, 0) + more
            if not queues[queue]:
                del queues[queue]
            if not queues:
                del self.queues[node_id]
        before = self.own.get(node_id, IDLE)
        total = NodeLoad(
            before.prompt_tokens + new.prompt_tokens - old.prompt_tokens,
            before.sequences + new.sequences - old.sequences,
            before.tokens + new.tokens - old.tokens,
            before.rows + new.rows - old.rows,
            before.pending + new.pending - old.pending,
            before.prefill_us + new.prefill_us - old.prefill_us,
            before.cached_tokens + new.cached_tokens - old.cached_tokens,
            before.late + new.late - old.late,
        )
        if not total.prefill_us:
            self.prefill_since.pop(node_id, None)
        elif not before.prefill_us or total.prefill_us < before.prefill_us:
            self.prefill_since[node_id] = self._clock()
        # Nodes count cached tokens, too: they look them up only when they begin a prompt.
        reported = before.prompt_tokens + before.cached_tokens
        if total.prompt_tokens + total.cached_tokens < reported:
            since, most, earlier = self._peak(node_id)
            self._peaks[node_id] = since, max(most, reported), earlier
        if total == IDLE:
            self.own.pop(node_id, None)
        else:
            self.own[node_id] = total

    def ahead(self, node_id: str, queue: Queue, num_tokens: int) -> float:
        """Share of a node's queued prompt tokens that are served before a further prompt.

        Tenants have fair shares (`kvbaton.engine.service_order`): the prompt waits for as many
        tokens of each other tenant as its own has with it, and for all of a priority that is served
        first.

        Args:
            node_id: The node.
            queue: Priority and tenant of the prompt.
            num_tokens: Its number of tokens.
        """
        queues = Counter(self.queues.get(node_id)) + Counter(self.other_queues.get(node_id))
        if not queues:
            return 1.0
        own = queues[queue] + num_tokens
        tokens = (
            left if priority < queue[0] else min(left, own)
            for (priority, _), left in queues.items()
            if priority <= queue[0]
        )
        return sum(tokens) / queues.total()

    def _peak(self, node_id: str) -> tuple[float, int, int]:
        """When the current period began, and the most prompt tokens in it and in the one before."""
        now = self._clock()
        since, most, earlier = self._peaks.get(node_id, (now, 0, 0))
        if now - since > 2 * REPORT_AGE_S:
            return now, 0, 0
        if now - since > REPORT_AGE_S:
            return since + REPORT_AGE_S, 0, most
        return since, most, earlier

    def reported_prompt_tokens(self, node_id: str) -> int:
        """The most prompt tokens of ours that a node may have counted in its last report."""
        _, most, earlier = self._peak(node_id)
        load = self.get(node_id, IDLE)
        return max(most, earlier, load.prompt_tokens + load.cached_tokens)

    def now(self) -> Mapping[str, NodeLoad]:
        """All loads, for one decision: lookups are faster, and the result must not be kept."""
        return dict(self) if self.others else self.own

    def __getitem__(self, node_id: str) -> NodeLoad:
        if node_id not in self.others:
            return self.own[node_id]
        return self.own.get(node_id, IDLE).plus(self.others[node_id])

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **self.others})

    def __len__(self) -> int:
        return len({**self.own, **self.others})
