"""The live requests: the state of each, the blocks that it holds, how it goes on and how it ends.

No I/O: requests and tokens in, outputs out, and an injected clock. `scheduler.py` decides which
sequences are computed next; connectors (`kv_connector.py`) load the KV of some
(`loading_requests.py`).
"""

from __future__ import annotations

import itertools
import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import Any

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.chunk_limit import ChunkLimit
from kvbaton.engine.config import SchedulerConfig
from kvbaton.engine.grammars import Grammars
from kvbaton.engine.kv_cache_manager import KVCacheManager, Match
from kvbaton.engine.kv_connector import Connectors, KVConnector, Load
from kvbaton.engine.request import (
    InFlightStep,
    ItemOutputs,
    Request,
    Sequence,
    SequenceState,
    Tables,
    extras_of,
    finish_of,
)
from kvbaton.engine.service_order import SERVED, FairShares, LateRequests
from kvbaton.engine.stats import Totals
from kvbaton.engine.step import BlockCopy
from kvbaton.engine.validate import validate_request
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Mark, Output
from kvbaton.types import TokenLogprobs, clip_text

TOKEN_MARKS = ("first_token", "second_token")
"""Names of the marks of a request's first tokens, in order."""

_rank = attrgetter("rank")


class LiveRequests:
    """Requests from their arrival to their end.

    Args:
        config: Settings of the scheduler.
        root_key: Maps a cache salt to the root of the block keys of its requests.
        clock: Monotonic clock, in seconds.

    Attributes:
        blocks: The KV cache manager of all groups.
        requests: Live requests by id.
        waiting: The queue, in order of service.
        running: Sequences with blocks, in order of service.
        parked: Sequences beside the queue that wait for a connector, an item or a grammar.
        crowded: Parked sequences that wait for the end of a load.
        loading: Loads in progress, by request id.
        in_flight: Plans handed out whose results were not applied, oldest first.
        totals: Monotonic totals.
        chunk_limit: Limits prompt tokens beside decoding sequences; learns from step times.
        late: Ranks last those requests whose first tokens would be late.
        connectors: KV connectors, in the order in which they are asked.
        items: Requests and pins encoder outputs.
        grammars: Grammars of requests that have one; None for an engine that follows none.
        forked_states: Copies of states for the next step; it references sources and targets.
        pinned: Gives further blocks that are referenced, besides requests' and connectors'.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        root_key: Callable[[str], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.blocks = KVCacheManager(
            config.groups,
            enable_caching=config.enable_prefix_caching,
            step_tokens=config.max_num_batched_tokens,
        )
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.parked: set[Sequence] = set()
        self.crowded: set[Sequence] = set()
        self.loading: dict[str, Load] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self.totals = Totals()
        self.connectors = Connectors()
        self.root_key = root_key
        self.clock = clock
        self._arrivals = itertools.count(1)
        self._shares = FairShares()
        self.chunk_limit = ChunkLimit(
            config.max_num_batched_tokens, config.max_num_mixed_tokens, config.whole_items
        )
        self.late = LateRequests()
        self._deadlines: list[tuple[float, int, Request]] = []  # ascending
        self._moves = 0
        self._ended: list[int] = []  # handles for the runner to forget
        self._outbox: list[Output] = []  # produced while a step was planned
        self.forked_states: list[BlockCopy] = []
        self.items = ItemOutputs()
        self.grammars: Grammars | None = None
        self.pinned: Callable[[], Iterable[Tables]] = tuple

    # --- requests ---

    def add(self, request: AddRequest, *, served: bool = False) -> None:
        """Take a request into the queue.

        Args:
            request: The request.
            served: The request is computed a second time, mostly from the cache: it goes before all
                others of its priority, and its tenant is not charged again.

        Raises:
            RequestError: The request can never be served here; names the field and the limit.
        """
        validate_request(request, self.config, self.blocks)
        if request.items and not self.config.whole_prompts:
            self.items.check(request)
        if request.request_id in self.requests:
            raise RequestError(
                f"request id {request.request_id!r} is in use", param="request_id", status=409
            )
        if request.transfer is not None:
            self._check_role(request.transfer.role)
        if request.prefix is not None:
            self._check_role("target", "remote_prefix")
        if request.params.grammar:
            if self.grammars is None:
                raise RequestError("this engine follows no grammars", param="grammar")
            self.grammars.check(request.params.grammar)
        for connector in self.connectors.having[KVConnector.accept]:
            request = connector.accept(request)
        known = request.token_ids + array("I", request.resume_ids)
        source = request.transfer is not None and request.transfer.role == "source"
        params = request.params
        limit = len(known) + 1 if source else len(request.token_ids) + params.max_tokens
        entered = Request(
            request_id=request.request_id,
            prompt=request.token_ids,
            num_known=len(known),
            params=params,
            limit=min(limit, self.config.max_model_len),
            start_tag=SERVED if served else self._shares.enter(request.tenant, len(known)),
            arrival=next(self._arrivals),
            deadline=self.clock() + request.deadline_s,
            due=self.clock() + request.ttft_s if request.ttft_s else None,
            root=self.root_key(request.cache_salt),
            extras=extras_of(request.items) if request.items else (),
            source=source,
            items=() if self.config.whole_prompts else request.items,
            spec=request,
            prompt_logprobs=None if params.prompt_logprobs is None else [],
            marks=[Mark("received", self.clock())] if request.timed else None,
        )
        self.requests[entered.request_id] = entered
        insort(self._deadlines, (entered.deadline, entered.arrival, entered))
        self.totals.received += 1
        sequence = Sequence(entered, 0, known, len(self.blocks.groups))
        entered.sequences.append(sequence)
        self._enqueue(sequence, SequenceState.WAITING)
        waits = False
        for connector in self.connectors.having[KVConnector.added]:
            # Not contained: what a connector raises about a new request fails only that request.
            waits |= connector.added(sequence)
        if waits:
            self.park(sequence)
        elif entered.items and (request.transfer is None or source):
            # The last token is always computed, and may belong to an item.
            cached = min(self._cached(sequence), len(known) - 1) if entered.reads_cache else 0
            self.items.request(sequence, cached)

    def _check_role(self, role: str, field: str = "") -> None:
        """Refuse a role in a hand-over for which there is no connector, or only a failing one."""
        for connector in self.connectors.all:
            if connector.transfer_role != role:
                continue
            if connector not in self.connectors.failing:
                return
            raise RequestError(
                f"the {connector.name} connector of this node is failing; retry elsewhere",
                status=503,
                code="unhealthy",
            )
        usual, other = {
            "source": ("do_remote_decode", "prefill"),
            "target": ("do_remote_prefill", "decode"),
        }[role]
        field = field or usual
        raise RequestError(
            f"this node is no {role} of hand-overs; send {field} to one of role {other} or any",
            param=f"kv_transfer_params.{field}",
        )

    def is_cached(self, request_id: str) -> bool:
        """Whether all tokens of a live request are in whole blocks in the prefix cache."""
        (sequence, *_) = self.requests[request_id].sequences
        return self._cached(sequence) == len(sequence.tokens)

    def _cached(self, sequence: Sequence) -> int:
        """Length in tokens of the longest cached prefix."""
        return self.blocks.match_sequence(sequence).num_tokens

    def sequences(self) -> Iterator[Sequence]:
        """All sequences that may hold blocks."""
        return (s for request in self.requests.values() for s in request.sequences)

    def has_work(self) -> bool:
        """Whether any request is live, any step in flight, or any output unsent."""
        return bool(self.requests or self.in_flight or self._outbox)

    def abort(self, request_id: str, reason: str = "abort") -> list[Output]:
        """End a request now; unknown ids are ignored.

        With any reason but ``abort``, it ends with an error of that text.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        if reason == "abort":
            return self.end(request, "abort")
        return self.end(request, "error", reason)

    def expire(self, now: float) -> list[Output]:
        """End requests past their deadline; returns their outputs, and those of rejected ones."""
        outputs, self._outbox = self._outbox, []
        past = bisect_right(self._deadlines, now, key=itemgetter(0))
        for *_, request in self._deadlines[:past]:
            error = f"the request's deadline of {request.spec.deadline_s:g} s has passed"
            outputs += self.end(request, "error", error)
        return outputs

    def next_deadline(self) -> float | None:
        """Time on the scheduler's clock when `expire` has something to do; None if never."""
        if self._outbox:
            return self.clock()
        return self._deadlines[0][0] if self._deadlines else None

    # --- the queues ---

    def left_in_flight(self) -> set[Sequence]:
        """Sequences that were preempted or have ended while a step in flight computes them."""
        return {
            item.sequence
            for step in self.in_flight
            for item in step.scheduled
            if item.sequence.handle != item.handle
        }

    def _enqueue(self, sequence: Sequence, state: SequenceState) -> None:
        """Insert a sequence into the queue by its rank."""
        sequence.state = state
        insort(self.waiting, sequence, key=_rank)

    def park(self, sequence: Sequence) -> None:
        """Let a sequence wait beside the queue, for a connector, an item or a grammar."""
        self._leave(sequence)
        sequence.state = SequenceState.PARKED
        self.parked.add(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Put a sequence back into the queue if it is parked."""
        if sequence.state is SequenceState.PARKED:
            self._leave(sequence)
            self._enqueue(sequence, SequenceState.WAITING)

    def run(self, sequence: Sequence) -> None:
        """Let a sequence take part in steps from now on."""
        request = sequence.request
        self._shares.serve(request.start_tag)
        self._leave(sequence)
        self.late.leaves(sequence)
        if request.marks is not None:
            request.mark("scheduled", self.clock())
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_rank)
        self.connectors.call(KVConnector.started, sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue, or from the running, parked or loading ones."""
        self._moves += 1
        match sequence.state:
            case SequenceState.RUNNING:
                self.running.remove(sequence)
            case SequenceState.PARKED:
                self.parked.remove(sequence)
                self.crowded.discard(sequence)
            case SequenceState.LOADING:
                del self.loading[sequence.request.request_id]
                for other in tuple(self.crowded):
                    self.unpark(other)
            case SequenceState.WAITING | SequenceState.PREEMPTED if sequence in self.waiting:
                self.waiting.remove(sequence)

    def adopt(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence the blocks of a cached prefix."""
        request = sequence.request
        sequence.tables = list(map(list, match.tables))
        self.blocks.ref(sequence.tables)
        sequence.num_computed = sequence.num_scheduled = match.num_tokens
        sequence.committed = [match.num_tokens // group.block_size for group in self.blocks.groups]
        if request.cached_tokens is None:
            # If the whole prompt is cached, its last token is computed nevertheless.
            known = len(sequence.tokens)
            request.cached_tokens = min(match.num_tokens, len(request.prompt), known - 1)
            self.totals.prompt_tokens["local_cache"] += request.cached_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start a new choice on the blocks of another whose prompt is scheduled to its end."""
        child.tables = list(map(list, parent.tables))
        self.blocks.ref(child.tables)
        child.num_computed = child.num_scheduled = parent.num_scheduled
        child.committed = [child.num_computed // group.block_size for group in self.blocks.groups]
        child.trimmed = list(parent.trimmed)
        child.chains = dict(parent.chains)
        child.shares_tail, child.parent = True, parent
        self.blocks.trim(child, child.num_computed)
        child.request.sequences.append(child)
        self.run(child)
        # The child needs copies of its states before the parent overwrites them. If they do not
        # fit, the child is preempted and recomputed from its tokens.
        pool, position = self.blocks.pool, child.num_scheduled
        shared = [
            (g, position // group.block_size)
            for g, group in enumerate(self.blocks.groups)
            if group.kind is GroupKind.STATE and position % group.block_size
        ]
        if not self.blocks.fits(len(shared)):
            self.preempt(child)
            return
        for g, i in shared:
            source, (target,) = child.tables[g][i], pool.allocate(1, g)
            child.tables[g][i] = target
            pool.ref([target])  # the copy also keeps the child's former reference to the source
            self.forked_states.append(BlockCopy(g, source, target))

    def preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a running sequence; it is queued, and recomputed later."""
        self.totals.preemptions += 1
        sequence.request.mark("preempted", self.clock())
        if sequence.request.prompt_logprobs and not sequence.pending:
            sequence.request.prompt_logprobs.clear()  # the prompt will be computed again
        self._detach(sequence)
        self._enqueue(sequence, SequenceState.PREEMPTED)

    def _detach(self, sequence: Sequence) -> None:
        """Remove a sequence from the runner, and give its blocks back."""
        self._leave(sequence)
        if sequence.handle:
            self._ended.append(sequence.handle)
        if self.forked_states:  # perhaps a fork whose states were not copied yet
            mine = {block for table in sequence.tables for block in table}
            for copy in [copy for copy in self.forked_states if copy.target in mine]:
                self.forked_states.remove(copy)
                self.blocks.pool.deref([copy.source, copy.target])
        self.blocks.clear(sequence)
        for sibling in sequence.request.sequences:
            if sibling.parent is sequence:
                sibling.parent = None

    # --- tokens and ends ---

    def append(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        finish: tuple[str | None, int | str | None] | None = None,
    ) -> Output:
        """Append a sampled token; `finish` overrides the stop rules."""
        request = sequence.request
        index = len(sequence.tokens) - len(request.prompt)
        sequence.tokens.append(token)
        self.totals.generated += 1
        if request.marks is not None and not sequence.choice:
            own = len(sequence.tokens) - request.num_known
            if own <= len(TOKEN_MARKS):
                request.mark(TOKEN_MARKS[own - 1], self.clock())
        sequence.finish_reason, stop_reason = finish or finish_of(
            sequence, token, eos=self.config.eos_token_ids
        )
        return Output(
            request_id=request.request_id,
            choice=sequence.choice,
            index=index,
            token_ids=(token,),
            logprobs=None if logprobs is None else (logprobs,),
            prompt_logprobs=(
                None if request.prompt_logprobs is None else request.take_prompt_logprobs()
            ),
            finish_reason=sequence.finish_reason,
            stop_reason=stop_reason,
            cached_tokens=request.cached_tokens or 0,
            transferred_tokens=request.transferred_tokens,
            marks=request.take_marks() if request.marks else (),
        )

    def commit(self, sequence: Sequence) -> None:
        """Offer blocks that became full and final to the prefix cache, and tell connectors."""
        for g, first, end in self.blocks.commit(sequence):
            self.connectors.call(KVConnector.committed, sequence, g, first, end)

    def retire(self, sequence: Sequence) -> None:
        """End a sequence that has a finish reason: give its blocks back."""
        assert sequence.finish_reason is not None
        self._detach(sequence)
        sequence.state = SequenceState.FINISHED
        if sequence.request.items:
            self.items.retired(sequence)
        request = sequence.request
        if not sequence.unforked and request.state is SequenceState.FINISHED:
            self.totals.finished[sequence.finish_reason] += 1
            del self.requests[request.request_id]
            del self._deadlines[bisect_left(self._deadlines, (request.deadline, request.arrival))]
            generated = sum(each.num_generated for each in request.sequences)
            self._shares.charge(request.spec.tenant, generated)
            if not self.requests:  # use of an otherwise idle engine is not charged
                self._shares = FairShares()
            self.connectors.call(KVConnector.finished, request)

    def end(
        self, request: Request, reason: str, error: str | None = None, code: str | None = None
    ) -> list[Output]:
        """End all choices of a request, in any state."""
        while request.sequences[0].unforked > 0:
            known = request.sequences[0].tokens[: request.num_known]
            choice = len(request.sequences)
            request.sequences.append(Sequence(request, choice, known, len(self.blocks.groups)))
        live = [s for s in request.sequences if s.finish_reason is None]
        return [self.end_choice(sequence, reason, error, code) for sequence in live]

    def end_choice(
        self, sequence: Sequence, reason: str, error: str | None = None, code: str | None = None
    ) -> Output:
        """End one choice without a token."""
        request, sequence.finish_reason = sequence.request, reason
        output = Output(
            request_id=request.request_id,
            choice=sequence.choice,
            index=sequence.num_generated,
            finish_reason=reason,
            error=None if error is None else clip_text(error),
            cached_tokens=request.cached_tokens or 0,
            transferred_tokens=request.transferred_tokens,
            marks=request.take_marks(),
            error_code=code,
        )
        self.retire(sequence)
        return output

    def _reject(self, sequence: Sequence, error: str, code: str | None = None) -> None:
        """End a sequence that can't be served; its outputs are sent with the next ones."""
        if sequence.unforked:
            self._outbox += self.end(sequence.request, "error", error, code)
        else:
            self._outbox.append(self.end_choice(sequence, "error", error, code))

    # --- accounts ---

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name."""
        return self.totals.counters(self.config.speculative)

    def lacking_tokens(self) -> int:
        """Tokens to compute before each request here can have its next token.

        Queued prompts that another node computes are not included.
        """
        own = (s for s in self.waiting if not s.request.is_target)
        lacking = sum(len(s.tokens) for s in own)
        return lacking + sum(max(0, len(s.tokens) - s.num_scheduled - 1) for s in self.running)

    def gauges(self) -> dict[str, float]:
        """Current values by Prometheus name."""
        lacking = self.lacking_tokens()
        values = {
            "kvbaton_sequences_waiting": float(len(self.waiting) + len(self.parked)),
            "kvbaton_sequences_running": float(len(self.running)),
            "kvbaton_sequences_loading": float(len(self.loading)),
            "kvbaton_prompt_tokens_waiting": float(lacking),
            "kvbaton_step_token_budget": float(self.config.max_num_batched_tokens),
            "kvbaton_mixed_step_token_budget": float(self.config.max_num_mixed_tokens),
            "kvbaton_chunk_limit_tokens": float(self.chunk_limit.current),
            "kvbaton_blocks_available": float(self.blocks.pool.num_free),
        }
        for g, owners in enumerate(self.blocks.owners()):
            for owner, count in owners.items():
                values[f'kvbaton_blocks{{group="{g}",owner="{owner}"}}'] = float(count)
        values['kvbaton_blocks{owner="free"}'] = float(self.blocks.pool.num_uncached)
        values['kvbaton_blocks{owner="null"}'] = 1.0
        return values

    def state(self) -> dict[str, Any]:
        """Contents of the debugging dump."""
        return {
            "blocks": [dict(counts) for counts in self.blocks.owners()],
            "steps_in_flight": [step.number for step in self.in_flight],
            "requests": [request.describe() for request in self.requests.values()],
        }
