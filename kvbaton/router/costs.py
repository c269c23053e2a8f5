"""What a choice of nodes costs, in seconds, from what nodes say of their speed (`NodeInfo.load`).

Each node tells in its heartbeats what its steps take by what is in them, so all routers know the
same. What lies between a node's steps and a client is learned from requests (`router.overheads`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvbaton.engine.chunk_limit import IN_TIME, chunk_tokens
from kvbaton.engine.config import MIXED_TOKENS
from kvbaton.messages.nodes import STEP_COSTS, NodeInfo
from kvbaton.router.loads import IDLE, NodeLoad, NodeLoads
from kvbaton.router.overheads import Handovers, Overhead
from kvbaton.router.predictions import Decode, Prediction, Prefill
from kvbaton.router.prompt_queue import PromptQueue
from kvbaton.router.role_plan import RolePlan
from kvbaton.router.wires import UNKNOWN, Wires

LENGTHS = 128
"""Of the last texts, of which a quarter is short."""
SHARE_S = (1.0, 4.0)
"""Least and most time over which it is averaged how much of a node's time prompts take, and how
many sequences come to it; between, it is as long as `SHARE_TEXTS` texts take, and at first as there
have been requests."""
SHARE_TEXTS = 8.0
MOST_SHARE = 0.95
DEFAULT_STEP_TOKENS = 2048
LEAST_S = 1e-6
"""That a step full of a prompt is believed to take longer, also by those who say it is nothing."""
GUESSED_WIRE = 0.25
"""Of what computing tokens takes, their way from a node while no wire has been measured: a free one
would have prompts travel to who has them not, and hand-overs made for nothing."""
BESIDE_HANDOVER = 0.02
"""Of what computing tokens takes, so much longer take steps of the node that they leave, and of the
one where they come: 0.4 to 0.5 us a token of 8B, which takes 22 (docs/performance.md)."""
FIRST_OUTPUT = 128.0
"""Tokens that a request is expected to generate, while none has ended;"""
FIRST_TEXTS = 8.0
"""believed as if so many had ended,"""
LAST_TEXTS = 64.0
"""and later those of about so many are."""


class StepSpeed(Struct, frozen=True):
    """What a step of one node takes; fields as `STEP_COSTS`, in seconds.

    Attributes:
        step_tokens: most tokens of one step.
        mixed_tokens: most of one with sequences that decode.
        full_s: what so many tokens of a prompt add to a step.
        max_itl_s: what it may take where sequences decode in it; prompts come in chunks for that.
    """

    step_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_context_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0
    step_tokens: int = DEFAULT_STEP_TOKENS
    mixed_tokens: int = MIXED_TOKENS
    full_s: float = 0.0
    max_itl_s: float = math.inf

    def chunk_tokens(self, step_s: float) -> int:
        """Most tokens of a prompt in a step that takes so long for those who decode in it."""
        budgets = self.step_tokens, self.mixed_tokens
        return chunk_tokens(self.max_itl_s, step_s, self.prefill_token_s, *budgets)

    def prefill_s(self, new: int, cached: int) -> float:
        """To compute the last `new` tokens of a prompt, without the steps themselves."""
        attended = new * (cached + new / 2) / 1000
        return self.prefill_token_s * new + self.prefill_context_s * attended

    def decode_s(self, sequences: float, tokens: float) -> float:
        """What decoding sequences with so many tokens in all add to a step."""
        return self.decode_sequence_s * sequences + self.decode_context_s * tokens / 1000


class CostModel:
    """Predicts what requests take at nodes.

    Args:
        clock: monotonic seconds.

    Attributes:
        ttft_slo_s: objective of first tokens.
        max_itl_s: what tokens beside a prompt may take.
        output_tokens: that a request generates, of late: by what all do, over how many end.
        relayed: tokens that clients were told; who tells them counts them here.
        short_output: that a quarter of the last requests do not exceed.
        wires: between nodes.
        roles: which nodes only generate; None without an objective of the tokens after the first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttft_slo_s = self.max_itl_s = math.inf
        self.output_tokens = FIRST_OUTPUT
        self.short_output = FIRST_OUTPUT * math.log(4 / 3)  # a quarter of exponential lengths
        self.wires = Wires(clock)
        self._generated, self._ended = FIRST_TEXTS * FIRST_OUTPUT, FIRST_TEXTS
        self._ended_tokens = self._generated
        self.relayed = self._counted = self._live_tokens = self._live = 0
        self._lengths = deque[int](maxlen=LENGTHS)
        self._handovers: dict[tuple[str, str], Handovers] = {}
        self._clock = clock
        self._overhead = Overhead()
        self._speeds: dict[str, tuple[Mapping[str, float], StepSpeed | None]] = {}
        self._learned: Sequence[NodeInfo] | None = None
        self._measured = False
        self._mean_s, self._share_s = SHARE_S
        self._given_since = math.inf
        self._elsewhere: dict[str, tuple[float, int]] = {}
        self._prefilled: dict[str, tuple[float, float, float, float]] = {}
        self._targeted: dict[str, tuple[float, float, float]] = {}
        self._crossed: dict[str, tuple[float, float]] = {}
        self._queues: dict[str, PromptQueue] = {}
        self._queued_at: dict[str, str] = {}
        self.roles: RolePlan | None = None

    @property
    def chunks_fit(self) -> bool:
        """Prompts come in chunks that keep no text from its objective; see `RolePlan.fits`."""
        return self.roles is not None and self.roles.fits

    # --- speeds ---

    def learn(self, nodes: Sequence[NodeInfo], loads: NodeLoads) -> bool:
        """Take in what nodes say now; False if none has measured what a prompt takes.

        The same list again (which nobody may have changed) says nothing new.

        Of terms that a node has never had in a step it takes the mean of the others: a prefill node
        does not know how fast it would decode. What waits there beyond what this router has had
        there while the report was made (`loads`) is other routers'.
        """
        self._count_tokens()
        # Means reach back to the first request, not into the time before.
        given_s = self._clock() - self._given_since
        self._mean_s = min(self._share_s, max(SHARE_S[0], given_s))
        if nodes is self._learned:
            return self._measured
        self.wires.learn(nodes)
        known = self._speeds
        told = defaultdict[str, list[float]](list)
        for node in nodes:
            for term in node.load.keys() & STEP_COSTS:
                told[term].append(node.load[term])
        mean = {term: sum(seconds) / len(seconds) for term, seconds in told.items()}
        measured = "prefill_token_s" in mean
        self._learned, self._measured = nodes, measured
        texts_s = SHARE_TEXTS * self.output_tokens * mean.get("step_s", math.inf)
        self._share_s = min(max(texts_s, SHARE_S[0]), SHARE_S[1])
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
                speed = replace(speed, full_s=speed.prefill_s(budget, 0))
            self._speeds[node.node_id] = node.load, speed
        of_nodes: tuple[dict[str, Any], ...] = (
            self._overhead.scales,
            self._prefilled,
            self._targeted,
            self._crossed,
            self._queues,
        )
        for by_node in of_nodes:
            for node_id in by_node.keys() - self._speeds.keys():
                del by_node[node_id]
        if len(self._handovers) > len(nodes) ** 2:
            self._handovers.clear()
        return measured

    def speed(self, node: NodeInfo) -> StepSpeed:
        """Of a node that `learn` was told of."""
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
        """Of computing a prompt on a node, or of fetching the start of it if that is faster.

        Args:
            node: who.
            load: what it has in flight.
            since: when it began what it is computing now; None if nothing of ours.
            new: tokens of the prompt to compute.
            cached: tokens that it holds.
            holders: others that could send it more, and how many tokens they hold.
            ahead: share of the prompts there that go before it.
        """
        speed = self.speed(node)
        own = computed = speed.prefill_s(new, cached)
        holder, fetch_s, saved_s, end = None, 0.0, None, new + cached
        for other, held in holders:
            less = held if held < end else end - 1
            rest = speed.prefill_s(end - less, less)
            wire = self.wires.speed(other, node)
            if wire is UNKNOWN:
                on_way = GUESSED_WIRE * (computed - rest)
            else:
                on_way = wire.fetch_s + wire.token_s * (less - cached) + self.wires.queued_s(other)
            saved = computed - rest - on_way
            if saved_s is None or saved > saved_s:
                saved_s = saved
                if saved >= 0:
                    holder, fetch_s, own, new = other, on_way, rest, end - less
        queued_tokens, queued = load.prompt_tokens, 0.0
        told_at, elsewhere = self._elsewhere[node.node_id]
        if elsewhere:  # of other routers, as of the last heartbeat, less what was done since
            left = max(0.0, speed.prefill_s(elsewhere, 0) - (self._clock() - told_at))
            queued_tokens += elsewhere
            queued = left
        decoding = load.sequences - load.pending
        each = speed.step_s + (speed.decode_s(decoding, load.tokens) if decoding else 0.0)
        late_s, queue = 0.0, self._queues.get(node.node_id)
        if queue is not None:
            late_s = queue.late_s
        wait = ahead * (self._left_s(load, since, late_s) + queued)
        wait += each / 2 if decoding else 0.0
        budget = speed.chunk_tokens(each) if decoding else speed.step_tokens
        alone_s, all_tokens = wait + fetch_s + own, ahead * queued_tokens + new
        model = alone_s + math.ceil(all_tokens / budget) * each
        if model > IN_TIME * self.ttft_slo_s:
            budget = speed.step_tokens
            model = alone_s + math.ceil(all_tokens / budget) * each
        ttft = risk = self._overhead.predict(node.node_id, model)
        late = ttft > self.ttft_slo_s
        if late and queue is not None:
            late = own >= queue.longest_s
            more = late_s if late else -min(wait, queue.longest_s)
            wait, model = wait + more, model + more
            ttft = self._overhead.predict(node.node_id, model)
        work = own + (0.0 if decoding else math.ceil(new / budget) * each)
        last = new - (new - 1) // budget * budget
        how = holder, 0 if holder is None else end - new, saved_s, risk, late
        beside = decoding * load.hopeful if load.late else decoding
        return Prefill(ttft, model, wait, work, beside, new, last, fetch_s, *how)

    def wait_s(self, node: NodeInfo, load: NodeLoad, since: float | None) -> float:
        """No first token of `prefill` comes sooner; found faster."""
        left, queue = self._left_s(load, since), self._queues.get(node.node_id)
        if queue is not None:
            left = max(0.0, left - queue.late_s - queue.longest_s)
        return self._overhead.predict(node.node_id, left)

    def _left_s(self, load: NodeLoad, since: float | None, late_s: float = 0.0) -> float:
        """Seconds of our prompts at a node that are to come, without some that go last."""
        done_s = self._clock() - since if since is not None else 0.0
        return max(0.0, load.prefill_us / 1e6 - late_s - done_s)

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
        """Of generating after a prompt of so many tokens on a node.

        Args:
            node: who.
            load: what it has in flight.
            since: when it began what it is computing now; None if nothing of ours.
            num_tokens: of the prompt.
            output_tokens: that are expected.
            after_s: when the first token is there; prompts that wait at the node now are computed
                first, the rest of them meanwhile.
            alone: nothing is in flight anywhere. Then the prompts of late are no sign that others
                will come in between: most likely they were this client's own.
        """
        speed = self.speed(node)
        share, longer, meet = 0.0, 1.0, 1.0
        if not alone:
            share, longer = self.prefill_share(node), 1 / (1 - self.crossing_share(node))
        if load.pending and load.sequences:  # many wait elsewhere, and never meet
            every_s = speed.step_s + speed.decode_s(load.sequences, load.tokens)
            meet = self._generating(node, output_tokens * every_s / (1 - share))
            meet = max(meet, 1.0 - load.pending / load.sequences)
        sequences, tokens = meet * load.sequences, meet * load.tokens
        if self._live:  # what they have generated is context, too
            tokens += (load.sequences - load.pending) * self._live_tokens / self._live
        before = speed.decode_s(sequences, tokens)
        after = speed.decode_s(sequences + 1, tokens + num_tokens)
        free = node.load.get("free_blocks")
        room = free is None or free * node.block_size >= num_tokens
        if node.num_blocks:  # those whose prompts are on their way hold all their blocks, too
            room = room and node.num_blocks * node.block_size >= load.tokens + num_tokens
        step_s = longer * (speed.step_s + after)
        chunk = speed.chunk_tokens(step_s)
        full_s = speed.full_s if chunk == speed.step_tokens else speed.prefill_s(chunk, 0)
        full_s = max(full_s, LEAST_S)
        _, in_all, per_s, _ = self._prefilled.get(node.node_id, (0.0, 0.0, 1.0, 0.0))
        queued_s = load.prefill_us / 1e6
        backlog_s = max(0.0, self._left_s(load, since) - after_s)
        return Decode(
            itl_s=max(step_s / (1 - share), step_s + backlog_s / output_tokens),
            step_s=step_s,
            others_s=longer * (speed.step_s + before) / (1 - share),
            queued_s=queued_s,
            backlog_s=backlog_s,
            prefill_share=share,
            full_s=full_s,
            prompt_s=min(full_s, in_all / per_s) if share else full_s,
            slower_s=after - before,
            sequences=sequences * load.hopeful if load.late else sequences,
            room=room,
        )

    def prefill_share(self, node: NodeInfo) -> float:
        """Share of a node's time that prompts of ours take, of late."""
        at, share, *_ = self._prefilled.get(node.node_id, (0.0, 0.0))
        return min(MOST_SHARE, share * self._kept(at)) if share else 0.0

    def prompts_per_s(self, node: NodeInfo) -> float:
        """Prompts per second that a node was given to compute, of late."""
        at, *_, prompts = self._prefilled.get(node.node_id, (0.0, 0.0))
        return prompts * self._kept(at) if prompts else 0.0

    def crossing_share(self, node: NodeInfo) -> float:
        """Share of a node's time that steps take longer for KV that leaves it or comes, of late."""
        at, share = self._crossed.get(node.node_id, (0.0, 0.0))
        return min(MOST_SHARE, share * self._kept(at)) if share else 0.0

    def _generating(self, node: NodeInfo, seconds: float) -> float:
        """Share of its time at a node that a sequence generates, which takes so many seconds.

        Of the sequences that are there so many generate at a time (Little's law); the others wait
        for their first tokens as long as those did that the node was given of late.
        """
        _, per_s, waits = self._targeted.get(node.node_id, (0.0, 0.0, 0.0))
        return seconds / (seconds + waits / per_s) if per_s and seconds else 1.0

    def targets_per_s(self, node: NodeInfo) -> float:
        """Sequences per second that a node was given to generate, of late."""
        if self.roles is not None and node.node_id in self.roles.generating:
            return self.roles.per_s
        at, per_s, _ = self._targeted.get(node.node_id, (0.0, 0.0, 0.0))
        return per_s * self._kept(at) if per_s else 0.0

    def _kept(self, at: float) -> float:
        """What is left of a mean per second that was such then."""
        return math.exp((at - self._clock()) / self._mean_s)

    def assigned(self, prefills: NodeInfo, target: NodeInfo, predicted: Prediction) -> None:
        """A prompt was given to a node, and what it generates to the same or another one."""
        # Means, not sums: how long they reach back changes with how long texts take.
        now, share_s = self._clock(), self._mean_s
        self._given_since = min(self._given_since, now)
        nothing = now, 0.0, 0.0, 0.0
        at, share, steps, prompts = self._prefilled.get(prefills.node_id, nothing)
        kept, work_s = self._kept(at), predicted.work_s
        if self.roles is not None:
            self.roles.given(now, work_s)
        _, speed = self._speeds.get(prefills.node_id, (None, None))
        count, queue = 1.0, self._queues.get(prefills.node_id)
        if speed is not None and speed.full_s:
            count = work_s / speed.full_s
            if queue is None or not queue.longest_s:  # else it shares a step with those that wait
                count = math.ceil(count)
        self._prefilled[prefills.node_id] = (
            now,
            kept * share + work_s / share_s,
            kept * steps + count / share_s,
            kept * prompts + 1.0 / share_s,
        )
        if predicted.late:
            return
        at, per_s, waits = self._targeted.get(target.node_id, (now, 0.0, 0.0))
        kept = self._kept(at)
        given = now, kept * per_s + 1.0 / share_s, kept * waits + predicted.ttft_s / share_s
        self._targeted[target.node_id] = given

    def crosses(self, source: NodeInfo, target: NodeInfo, tokens: int) -> None:
        """So many tokens' KV is to be handed over."""
        self.wires.sent(source, target, tokens)
        now = self._clock()
        for node in (source, target):
            at, share = self._crossed.get(node.node_id, (now, 0.0))
            more = self.beside_s(node, tokens) / self._mean_s
            self._crossed[node.node_id] = now, self._kept(at) * share + more

    def queued(self, request_id: str, node: NodeInfo, predicted: Prediction) -> None:
        """A prompt waits at a node until it is `computed`, or given to another."""
        if request_id in self._queued_at:
            self.computed(request_id)
        queue = self._queues.get(node.node_id)
        if queue is None:
            queue = self._queues[node.node_id] = PromptQueue()
        queue.add(request_id, predicted.work_s, full=predicted.full, late=predicted.late)
        self._queued_at[request_id] = node.node_id

    def handover(self, source: NodeInfo, target: NodeInfo) -> float:
        """Seconds that second tokens come later for a hand-over than `wire_s` says; 0 or more."""
        known = self._handovers.get((source.node_id, target.node_id))
        return 0.0 if known is None else known.predict(self._clock())

    def wire_s(self, source: NodeInfo, target: NodeInfo, tokens: int, prefill: Prefill) -> float:
        """Seconds from the first token until all of a prompt has come to its target.

        What a step has computed leaves meanwhile the next ones run: what is left is the last one's,
        or more if the wire is slower than the source.

        Args:
            source: who computes it.
            target: who generates.
            tokens: of the prompt that the target lacks.
            prefill: what is expected of the source.
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

    def beside_s(self, node: NodeInfo, tokens: int) -> float:
        """What steps of a node take longer since so many tokens' KV leaves it, or comes there."""
        return BESIDE_HANDOVER * self.speed(node).prefill_token_s * tokens

    def held_s(self, node: NodeInfo, load: NodeLoad, since: float | None) -> float:
        """Seconds until a node's next step, which a sequence that is handed over waits for.

        Args:
            node: who generates.
            load: what it has in flight.
            since: when it began the prompts that it computes now; None if there are none of ours.
        """
        _, speed = self._speeds.get(node.node_id, (None, None))  # it may have left meanwhile
        if since is None or speed is None:
            return 0.0
        left = self._left_s(load, since)
        return min(left, speed.step_s + speed.full_s)

    def plan_roles(self, loads: Mapping[str, NodeLoad], num_tokens: int) -> None:
        """See which nodes only generate, before one with so long a prompt is placed."""
        roles, now = self.roles, self._clock()
        if roles is None or not roles.is_due(now, num_tokens):
            return
        nodes = [node for node in self._learned or () if node.role == "any"]
        there = {node.node_id: loads.get(node.node_id, IDLE) for node in nodes}
        if not there:
            return
        _, speed = self._speeds[max(there, key=lambda i: there[i].sequences - there[i].pending)]
        assert speed is not None, "ask only what `learn` has found measured"
        tokens = roles.prompt_tokens + (self._live_tokens / self._live if self._live else 0.0)
        how = speed.step_s, speed.decode_s(1, tokens), speed.full_s, self.output_tokens
        for node_id in roles.plan(now, there, *how, self._live):
            self._prefilled.pop(node_id, None)  # prompts to come are given to others

    # --- what comes of them ---

    def computed(self, request_id: str) -> bool:
        """A prompt waits no more; False if it came sooner or later in turn than was expected."""
        queue = self._queues.get(self._queued_at.pop(request_id, ""))
        return queue is None or queue.remove(request_id)

    def observed(self, node_id: str, predicted: Prediction, ttft_s: float) -> None:
        """A first token came after so long."""
        if predicted.full and predicted.model_s > self.ttft_slo_s:
            return  # when it comes depends on who else does
        self._overhead.observe(node_id, predicted.model_s, ttft_s)

    def handed_over(self, source: NodeInfo, target: NodeInfo, late_s: float) -> None:
        """A second token came so much later than `wire_s` and the target's steps explain."""
        known = self._handovers.setdefault((source.node_id, target.node_id), Handovers())
        known.observe(late_s, self._clock())

    def begun(self, texts: int) -> None:
        """Texts have their second token, and go on until they are `finished`."""
        self._live += texts

    def finished(self, tokens: int, texts: int = 1) -> None:
        """Texts of one request are over, after so many tokens that were `relayed`, in all."""
        self._count_tokens()
        self._live_tokens -= tokens
        if tokens > 1:
            self._live -= texts
        if not self._live:
            self._live_tokens = 0
        if not tokens:
            return
        kept = min(1.0, LAST_TEXTS / (self._ended + texts))
        self._generated *= kept
        self._ended_tokens = kept * (self._ended_tokens + tokens)
        self._ended = kept * (self._ended + texts)
        self._count_tokens()
        self._lengths.append(tokens // texts)
        self.short_output = float(sorted(self._lengths)[len(self._lengths) // 4])

    def _count_tokens(self) -> None:
        """What all texts generate, over how many end, is how long they are.

        The mean of those that have ended would be too short while long ones have yet to end. But
        where none could have ended yet, that says nothing: so none is believed to go on for longer
        than it has, or than texts are believed to be at first.
        """
        new, self._counted = self.relayed - self._counted, self.relayed
        self._generated += new
        self._live_tokens += new
        to_come = max(self._live_tokens, FIRST_OUTPUT * self._live)
        most = (self._ended_tokens + self._live_tokens + to_come) / (self._ended + self._live)
        self.output_tokens = min(self._generated / self._ended, most)
