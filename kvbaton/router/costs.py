"""Costs of routes in seconds, from the step costs that nodes report (`NodeInfo.load`).

Nodes report in their heartbeats how long their steps take by their content, so all routers know the
same. What lies between a node's steps and a client is learned from requests (`router.overheads`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from kvbaton.engine.chunk_limit import IN_TIME, chunk_tokens
from kvbaton.engine.config import MIXED_TOKENS
from kvbaton.messages.nodes import STEP_COSTS, NodeInfo
from kvbaton.router.loads import NodeLoad, NodeLoads
from kvbaton.router.overheads import Handovers, Overhead
from kvbaton.router.predictions import Decode, Prediction, Prefill
from kvbaton.router.prompt_queue import PromptQueue
from kvbaton.router.wires import UNKNOWN, Wires, means

SHARE_S = (1.0, 4.0)
"""Minimum and maximum time constant, in seconds, of means over a node's recent work (shares of its
time, requests per second). It is the time that `SHARE_SEQUENCES` sequences take, within these
bounds, but no longer than requests have been coming."""
SHARE_SEQUENCES = 8.0
MAX_SHARE = 0.95
DEFAULT_STEP_TOKENS = 2048
GUESSED_WIRE = 0.25
"""Wire time of a token as a share of its prefill time, while no wire has been measured. With a free
wire, prompts would go to nodes that do not have them cached, and be handed over for nothing."""
BESIDE_HANDOVER = 0.02
"""Seconds that a token's hand-over adds to steps of its source, and of its target, as a share of
the token's prefill time: 0.4 to 0.5 us for 8B, of 22 (docs/performance.md)."""
FIRST_OUTPUT = 128.0
"""Tokens that a request is expected to generate while none has ended."""
PRIOR_SEQUENCES = 8.0
"""Weight of `FIRST_OUTPUT`, as a number of ended sequences."""
RECENT_SEQUENCES = 64.0
"""Number of recent sequences that the mean length is taken over, about."""


RecentMeans = dict[str, tuple[float, ...]]
"""By node: when it was updated, and means per second of its recent work."""


class StepSpeed(Struct, frozen=True):
    """How long steps of one node take; fields as `STEP_COSTS`, in seconds.

    Attributes:
        step_tokens: Maximum tokens of one step.
        mixed_tokens: Maximum tokens of one step that has decoding sequences.
        max_itl_s: Objective for steps that have decoding sequences; prompts come in chunks for it.
    """

    step_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_context_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0
    step_tokens: int = DEFAULT_STEP_TOKENS
    mixed_tokens: int = MIXED_TOKENS
    max_itl_s: float = math.inf

    def chunk_tokens(self, step_s: float) -> int:
        """Maximum prompt tokens in a step that takes `step_s` for its decoding sequences alone."""
        budgets = self.step_tokens, self.mixed_tokens
        return chunk_tokens(self.max_itl_s, step_s, self.prefill_token_s, *budgets)

    def prefill_s(self, new: int, cached: int) -> float:
        """Seconds to compute the last `new` tokens of a prompt, without the cost per step."""
        attended = new * (cached + new / 2) / 1000
        return self.prefill_token_s * new + self.prefill_context_s * attended

    def decode_s(self, sequences: float, tokens: float) -> float:
        """Seconds that decoding sequences with `tokens` tokens in all add to a step."""
        return self.decode_sequence_s * sequences + self.decode_context_s * tokens / 1000


class CostModel:
    """Predicts how long requests take at nodes.

    Args:
        clock: Monotonic seconds.

    Attributes:
        ttft_slo_s: TTFT objective.
        max_itl_s: Longest time between tokens that a prompt chunk may cause.
        output_tokens: Mean number of tokens that requests generate, of late.
        relayed: Number of tokens relayed to clients; whoever relays them counts them here.
        wires: Wires between nodes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttft_slo_s = self.max_itl_s = math.inf
        self.output_tokens = FIRST_OUTPUT
        self.wires = Wires(clock)
        self._generated, self._ended = PRIOR_SEQUENCES * FIRST_OUTPUT, PRIOR_SEQUENCES
        self._ended_tokens = self._generated
        self.relayed = self._counted = self._live_tokens = self._live = 0
        self._handovers: dict[tuple[str, str], Handovers] = {}
        self._clock = clock
        self._overhead = Overhead()
        self._speeds: dict[str, tuple[Mapping[str, float], StepSpeed | None]] = {}
        self._learned: Sequence[NodeInfo] | None = None
        self._measured = False
        self._mean_s, self._share_s = SHARE_S
        self._given_since = math.inf
        self._elsewhere: dict[str, tuple[float, int]] = {}
        self._prefilled: RecentMeans = {}  # seconds of prefill, prompts
        self._targeted: RecentMeans = {}  # sequences, and seconds until their first tokens
        self._handover_shares: RecentMeans = {}  # seconds that hand-overs added to steps
        self._queues: dict[str, PromptQueue] = {}
        self._queued_at: dict[str, str] = {}

    # --- speeds ---

    def learn(self, nodes: Sequence[NodeInfo], loads: NodeLoads) -> bool:
        """Take in nodes' reports; return False if none has measured how long a prompt takes.

        The same list object again is skipped, so nobody may change it.

        Of terms that a node has never measured, it gets the mean of the others: a prefill node does
        not know how fast it would decode. Queued tokens beyond those that this router may have had
        there when the report was made (`loads`) are other routers'.
        """
        self._count_tokens()
        # The time before the first request does not count in means.
        given_s = self._clock() - self._given_since
        self._mean_s = min(self._share_s, max(SHARE_S[0], given_s))
        if nodes is self._learned:
            return self._measured
        self.wires.learn(nodes)
        known = self._speeds
        mean = means([node.load for node in nodes], STEP_COSTS)
        measured = "prefill_token_s" in mean
        self._learned, self._measured = nodes, measured
        lifetimes_s = SHARE_SEQUENCES * self.output_tokens * mean.get("step_s", math.inf)
        self._share_s = min(max(lifetimes_s, SHARE_S[0]), SHARE_S[1])
        self._speeds = {}
        elsewhere, self._elsewhere, now = self._elsewhere, {}, self._clock()
        for node in nodes:
            before, _ = known.get(node.node_id, (None, None))
            if before is node.load:
                self._elsewhere[node.node_id] = elsewhere[node.node_id]
            else:
                waiting = int(node.load.get("waiting_tokens", 0.0))
                others = max(0, waiting - loads.reported_prompt_tokens(node.node_id))
                self._elsewhere[node.node_id] = now, others
            terms = {term: node.load.get(term, mean.get(term, 0.0)) for term in STEP_COSTS}
            budget = max(1, int(node.load.get("step_tokens", DEFAULT_STEP_TOKENS)))
            mixed = max(1, int(node.load.get("mixed_tokens", MIXED_TOKENS)))
            speed: StepSpeed | None = None
            if measured:
                speed = StepSpeed(
                    **terms, step_tokens=budget, mixed_tokens=mixed, max_itl_s=self.max_itl_s
                )
            self._speeds[node.node_id] = node.load, speed
        of_nodes: tuple[dict[str, Any], ...] = (
            self._overhead.scales,
            self._prefilled,
            self._targeted,
            self._handover_shares,
            self._queues,
        )
        for by_node in of_nodes:
            for node_id in by_node.keys() - self._speeds.keys():
                del by_node[node_id]
        if len(self._handovers) > len(nodes) ** 2:
            self._handovers.clear()
        return measured

    def speed(self, node: NodeInfo) -> StepSpeed:
        """Step speed of a node that `learn` was given."""
        _, speed = self._speeds[node.node_id]
        assert speed is not None, "ask only what `learn` has found measured"
        return speed

    # --- predictions ---

    def prefill(
        self,
        node: NodeInfo,
        load: NodeLoad,
        since: float | None,
        new: int,
        cached: int,
        holders: Iterable[tuple[NodeInfo, int]] = (),
        ahead: float = 1.0,
    ) -> Prefill:
        """Predict the prefill of a prompt on a node; it fetches a cached prefix if that is faster.

        Args:
            node: Node that computes the prompt.
            load: Its load.
            since: When it began the prompt that it computes now; None if it has none of ours.
            new: Number of prompt tokens to compute.
            cached: Number of prompt tokens that it holds.
            holders: Nodes that could send it a longer prefix, each with the number of tokens it
                holds.
            ahead: Share of the prompts queued there that are served before this one.
        """
        speed = self.speed(node)
        own = computed = speed.prefill_s(new, cached)
        holder, fetch_s, saved_s, end = None, 0.0, None, new + cached
        for other, held in holders:
            fetched = held if held < end else end - 1
            rest = speed.prefill_s(end - fetched, fetched)
            wire = self.wires.speed(other, node)
            if wire is UNKNOWN:
                wire_s = GUESSED_WIRE * (computed - rest)
            else:
                wire_s = (
                    wire.fetch_s + wire.token_s * (fetched - cached) + self.wires.queued_s(other)
                )
            saved = computed - rest - wire_s
            if saved_s is None or saved > saved_s:
                saved_s = saved
                if saved >= 0:
                    holder, fetch_s, own, new = other, wire_s, rest, end - fetched
        decoding = load.sequences - load.pending
        each = speed.step_s + (speed.decode_s(decoding, load.tokens) if decoding else 0.0)
        budget = speed.chunk_tokens(each) if decoding else speed.step_tokens
        queue, deferred_s, longest_s = self._queues.get(node.node_id), 0.0, 0.0
        if queue is not None:
            deferred_s, longest_s = queue.deferred_s, queue.longest_s
        queued_tokens, queued = float(load.prompt_tokens), 0.0
        if load.prefill_us:
            in_order = max(0.0, 1 - deferred_s * 1e6 / load.prefill_us)
            queued_tokens *= in_order
            # Some of the time since the first prompt began was for steps, which are added below.
            done_s = self._clock() - since if since is not None else 0.0
            queued = in_order * load.prefill_us / 1e6 - done_s
            queued = max(queued, -queued_tokens / budget * each)
        told_at, elsewhere = self._elsewhere[node.node_id]
        if elsewhere:  # other routers' prompts, as of the last heartbeat, less the time since
            queued += max(0.0, speed.prefill_s(elsewhere, 0) - (self._clock() - told_at))
            queued_tokens += elsewhere
        wait = ahead * queued
        wait += each / 2 if decoding else 0.0
        alone_s, all_tokens = wait + fetch_s + own, ahead * queued_tokens + new
        model = alone_s + math.ceil(all_tokens / budget) * each
        if self.max_itl_s == math.inf and model > IN_TIME * self.ttft_slo_s:
            budget = speed.step_tokens
            model = alone_s + math.ceil(all_tokens / budget) * each
        ttft = risk = self._overhead.predict(node.node_id, model)
        late = ttft > self.ttft_slo_s
        if late and queue is not None:
            late = own >= longest_s
            more = deferred_s if late else -min(wait, longest_s)
            wait, model = wait + more, model + more
            ttft = self._overhead.predict(node.node_id, model)
        work = own + (0.0 if decoding else math.ceil(new / budget) * each)
        last = new - (new - 1) // budget * budget
        share = own / longest_s if own < longest_s else 1.0
        how = holder, 0 if holder is None else end - new, saved_s, risk, late, share
        beside = decoding * load.hopeful if load.late else decoding
        return Prefill(ttft, model, max(0.0, wait), work, beside, new, last, fetch_s, *how)

    def wait_s(self, node: NodeInfo, load: NodeLoad, since: float | None) -> float:
        """Lower bound for `ttft_s` of `prefill`, computed faster."""
        left, queue = self._left_s(load, since), self._queues.get(node.node_id)
        if queue is not None:
            left = max(0.0, left - queue.deferred_s - queue.longest_s)
        return self._overhead.predict(node.node_id, left)

    def _left_s(self, load: NodeLoad, since: float | None) -> float:
        """Seconds until our prompts at a node are computed."""
        done_s = self._clock() - since if since is not None else 0.0
        return max(0.0, load.prefill_us / 1e6 - done_s)

    def decode(
        self,
        node: NodeInfo,
        load: NodeLoad,
        since: float | None,
        num_tokens: int,
        output_tokens: float = FIRST_OUTPUT,
        *,
        after_s: float = math.inf,
        alone: bool = False,
    ) -> Decode:
        """Predict decoding on a node, after a prompt of `num_tokens` tokens.

        Args:
            node: Node that decodes.
            load: Its load.
            since: When it began the prompt that it computes now; None if it has none of ours.
            num_tokens: Number of prompt tokens.
            output_tokens: Number of tokens expected to be generated.
            after_s: Seconds until the first token; of the prompts queued there now, what takes
                longer than that delays the sequence.
            alone: Whether nothing is in flight anywhere. Then recent prompts are no sign that
                others will come in between: most likely they were this client's own.
        """
        speed = self.speed(node)
        share, slowdown, decoding_share = 0.0, 1.0, 1.0
        if not alone:
            share, slowdown = self.prefill_share(node), 1 / (1 - self.handover_share(node))
        if load.pending and load.sequences:  # not all of these decode at once
            every_s = speed.step_s + speed.decode_s(load.sequences, load.tokens)
            decoding_share = self._decoding_share(node, output_tokens * every_s / (1 - share))
            decoding_share = max(decoding_share, 1.0 - load.pending / load.sequences)
        sequences, tokens = decoding_share * load.sequences, decoding_share * load.tokens
        if self._live:  # generated tokens are context, too
            tokens += (load.sequences - load.pending) * self._live_tokens / self._live
        before = speed.decode_s(sequences, tokens)
        after = speed.decode_s(sequences + 1, tokens + num_tokens)
        free = node.load.get("free_blocks")
        room = free is None or free * node.block_size >= num_tokens
        if node.num_blocks:  # sequences whose prompts are on their way hold all their blocks, too
            room = room and node.num_blocks * node.block_size >= load.tokens + num_tokens
        step_s = slowdown * (speed.step_s + after)
        queued_s = load.prefill_us / 1e6
        backlog_s = max(0.0, self._left_s(load, since) - after_s) if queued_s else 0.0
        itl_s = max(step_s / (1 - share), step_s + backlog_s / output_tokens)
        if self.max_itl_s < math.inf:  # else more keeps sequences from nodes with long queues
            itl_s = min(itl_s, step_s + speed.prefill_s(speed.chunk_tokens(step_s), 0))
        return Decode(
            itl_s=itl_s,
            step_s=step_s,
            others_s=slowdown * (speed.step_s + before),
            queued_s=queued_s,
            slower_s=after - before,
            sequences=sequences * load.hopeful if load.late else sequences,
            room=room,
        )

    def prefill_share(self, node: NodeInfo) -> float:
        """Share of a node's recent time that prefill of our prompts took."""
        return min(MAX_SHARE, self._recent(self._prefilled, node, 1))

    def prompts_per_s(self, node: NodeInfo) -> float:
        """Prompts per second that a node was recently given to compute."""
        return self._recent(self._prefilled, node, 2)

    def handover_share(self, node: NodeInfo) -> float:
        """Share of a node's recent time by which hand-overs to or from it made steps longer."""
        return min(MAX_SHARE, self._recent(self._handover_shares, node, 1))

    def _decoding_share(self, node: NodeInfo, seconds: float) -> float:
        """Share of its time at a node that a sequence decodes, if decoding takes `seconds`.

        By Little's law it is also the share of the node's sequences that decode at a time; the
        others wait for their first tokens, as long as recent ones did.
        """
        _, per_s, waits = self._targeted.get(node.node_id, (0.0, 0.0, 0.0))
        return seconds / (seconds + waits / per_s) if per_s and seconds else 1.0

    def targets_per_s(self, node: NodeInfo) -> float:
        """Sequences per second that a node was recently given to decode."""
        return self._recent(self._targeted, node, 1)

    def _recent(self, work: RecentMeans, node: NodeInfo, place: int) -> float:
        """One of a node's means, as it has faded until now."""
        known = work.get(node.node_id)
        if known is None:
            return 0.0
        return known[place] * math.exp((known[0] - self._clock()) / self._mean_s)

    def _add(self, work: RecentMeans, node: NodeInfo, *amounts: float) -> None:
        """Add work to a node's means; not to sums, since how fast these fade changes."""
        now, share_s = self._clock(), self._mean_s
        at, *old = work.get(node.node_id, (now, *[0.0] * len(amounts)))
        kept = math.exp((at - now) / share_s)
        new = (kept * mean + more / share_s for mean, more in zip(old, amounts, strict=True))
        work[node.node_id] = now, *new

    def assigned(self, prefills: NodeInfo, target: NodeInfo, predicted: Prediction) -> None:
        """Record that a prompt was given to a node, and its decoding to that or another one."""
        now, work_s = self._clock(), predicted.work_s
        self._given_since = min(self._given_since, now)
        self._add(self._prefilled, prefills, work_s, 1.0)
        if not predicted.late:
            self._add(self._targeted, target, 1.0, predicted.ttft_s)

    def handover_begun(self, source: NodeInfo, target: NodeInfo, tokens: int) -> None:
        """Record that the KV of `tokens` tokens is to be handed over."""
        self.wires.sent(source, target, tokens)
        for node in (source, target):
            self._add(self._handover_shares, node, self.handover_slowdown_s(node, tokens))

    def queued(self, request_id: str, node: NodeInfo, predicted: Prediction) -> None:
        """Record that a prompt waits at a node, until it is `computed` or given to another node."""
        if request_id in self._queued_at:
            self.computed(request_id)
        queue = self._queues.get(node.node_id)
        if queue is None:
            queue = self._queues[node.node_id] = PromptQueue()
        queue.add(request_id, predicted.work_s, full=predicted.full, late=predicted.late)
        self._queued_at[request_id] = node.node_id

    def handover(self, source: NodeInfo, target: NodeInfo) -> float:
        """Seconds that targets' first tokens come later than `wire_s` predicts; at least 0."""
        known = self._handovers.get((source.node_id, target.node_id))
        return 0.0 if known is None else known.predict(self._clock())

    def wire_s(self, source: NodeInfo, target: NodeInfo, tokens: int, prefill: Prefill) -> float:
        """Seconds from the first token until all of a prompt's KV is at its target.

        The KV of each step is sent while the next one runs. So what is left is the last step's, or
        more if the wire is slower than the source.

        Args:
            source: Node that computes the prompt.
            target: Node that decodes.
            tokens: Number of prompt tokens that the target lacks.
            prefill: Prediction for the source.
        """
        wire = self.wires.speed(source, target)
        token_s = wire.token_s
        if wire is UNKNOWN:
            token_s = GUESSED_WIRE * self.speed(source).prefill_token_s
        if not token_s:
            return wire.handover_s
        last = min(prefill.last, tokens)
        meanwhile = prefill.work_s * (1.0 - prefill.last / prefill.new)
        behind = max(token_s * last, token_s * tokens - meanwhile)
        waits = self.wires.queued_s(source) - prefill.ttft_s
        return wire.handover_s + behind + max(0.0, waits)

    def handover_slowdown_s(self, node: NodeInfo, tokens: int) -> float:
        """Seconds that sending or receiving `tokens` tokens' KV adds to a node's steps."""
        return BESIDE_HANDOVER * self.speed(node).prefill_token_s * tokens

    def step_wait_s(self, node: NodeInfo, load: NodeLoad, since: float | None) -> float:
        """Seconds that a handed-over sequence waits for the next step of a node.

        Args:
            node: Node that decodes.
            load: Its load.
            since: When it began the prompts that it computes now; None if it has none of ours.
        """
        _, speed = self._speeds.get(node.node_id, (None, None))  # the node may have left meanwhile
        if since is None or speed is None:
            return 0.0
        left = self._left_s(load, since)
        return min(left, speed.step_s + speed.prefill_s(speed.step_tokens, 0))

    # --- what comes of them ---

    def computed(self, request_id: str) -> bool:
        """Record that a prompt waits no more; False if its place was mispredicted."""
        queue = self._queues.get(self._queued_at.pop(request_id, ""))
        return queue is None or queue.remove(request_id)

    def observed(self, node_id: str, predicted: Prediction, ttft_s: float) -> None:
        """Record when a first token came."""
        if predicted.full and predicted.model_s > self.ttft_slo_s:
            return  # when it comes depends on which prompts come later
        self._overhead.observe(node_id, predicted.model_s, ttft_s)

    def handed_over(self, source: NodeInfo, target: NodeInfo, late_s: float) -> None:
        """Record how much later a target's first token came than wire and steps explain."""
        known = self._handovers.setdefault((source.node_id, target.node_id), Handovers())
        known.observe(late_s, self._clock())

    def begun(self, sequences: int) -> None:
        """Record that sequences have their second tokens; they are live until `finished`."""
        self._live += sequences

    def finished(self, tokens: int, sequences: int = 1) -> None:
        """Record the end of a request's sequences, of which `tokens` were `relayed` in all."""
        self._count_tokens()
        self._live_tokens -= tokens
        if tokens > 1:
            self._live -= sequences
        if not self._live:
            self._live_tokens = 0
        if not tokens:
            return
        kept = min(1.0, RECENT_SEQUENCES / (self._ended + sequences))
        self._generated *= kept
        self._ended_tokens = kept * (self._ended_tokens + tokens)
        self._ended = kept * (self._ended + sequences)
        self._count_tokens()

    def _count_tokens(self) -> None:
        """Update the mean length: tokens generated by all sequences over the number ended.

        The mean of ended sequences would be too short while long ones go on. But that ratio says
        nothing where none could have ended yet. So no live sequence is expected to go on for longer
        than it has, or than `FIRST_OUTPUT` if that is longer.
        """
        new, self._counted = self.relayed - self._counted, self.relayed
        self._generated += new
        self._live_tokens += new
        to_come = max(self._live_tokens, FIRST_OUTPUT * self._live)
        most = (self._ended_tokens + self._live_tokens + to_come) / (self._ended + self._live)
        self.output_tokens = min(self._generated / self._ended, most)
